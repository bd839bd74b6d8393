"""What is done to snapshots apart from the job that made them: copied, moved, verified, deleted, collected. No Spark in
here."""
