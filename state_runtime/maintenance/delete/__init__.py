"""Deleting snapshots, savepoints and whole roots, and what a claim leaves."""
