"""Materialization from outside the driver: how it stands, whether it is due, and doing it."""
