"""Servers for examples, tests and benchmarks, started on this machine's loopback address."""
