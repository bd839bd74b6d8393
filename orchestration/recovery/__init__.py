"""Whether a driver is well, and whether to bring it back."""
