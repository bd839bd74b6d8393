"""Upkeep of the places that sinks write to: few large files instead of many small ones."""
