"""Deletion of snapshots, savepoints, whole roots, and the remains of a claimed root."""
