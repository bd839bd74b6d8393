"""The driver of a run: where it begins, its epochs, its checkpoints, its heartbeat, and the end."""
