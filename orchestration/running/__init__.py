"""Runs one job in this process, and makes savepoints of a job whether it runs or not."""
