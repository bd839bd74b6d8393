"""Spark's own suites through our jobs (`make test-spark-suite`): of transformWithState unmodified, of all else as data."""
