"""Whether all objects that a snapshot needs exist and are undamaged."""
