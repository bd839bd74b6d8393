"""What monitoring outside of Dagster gets of the jobs, as Prometheus reads it."""
