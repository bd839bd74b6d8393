"""Garbage collection: deletes, in two passes, the objects that nothing needs and no writer will name any more."""
