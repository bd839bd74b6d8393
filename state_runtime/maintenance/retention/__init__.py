"""Which snapshots a policy keeps, and giving up the others."""
