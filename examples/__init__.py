"""Examples that run as they are: see ``examples/flights``."""
