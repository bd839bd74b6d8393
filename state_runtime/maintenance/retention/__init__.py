"""Decides which snapshots a policy keeps, and lets the others expire."""
