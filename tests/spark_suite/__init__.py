"""Spark's own suites of transformWithState, unmodified, run through our jobs (`make test-spark-suite`)."""
