"""Benchmarks of Stillstate against Spark's own stateful operators; see README.md in this folder."""
