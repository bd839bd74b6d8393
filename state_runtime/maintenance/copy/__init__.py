"""Copies of snapshots: everything that one needs at the same relative paths, data first, the manifest last; savepoints
are such copies."""
