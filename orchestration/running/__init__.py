"""Running one job in this process, and savepoints of a job whether it runs or not."""
