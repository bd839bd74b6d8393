"""Garbage collection: what nothing needs and nobody will name any more, in two passes."""
