"""Materialization outside the driver: its health, whether it is due, and its execution."""
