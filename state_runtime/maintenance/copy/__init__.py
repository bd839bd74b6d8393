"""Copies of snapshots: all needed objects at the same relative paths, data first, the manifest last. Savepoints are
such copies."""
