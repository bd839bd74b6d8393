"""Work on snapshots outside the job that made them: copy, move, verify, delete, garbage collection. Does not use
Spark."""
