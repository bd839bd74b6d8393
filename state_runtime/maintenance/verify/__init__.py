"""Whether everything that a snapshot needs is there and undamaged."""
