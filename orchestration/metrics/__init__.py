"""Metrics of the jobs for monitoring outside of Dagster, as Prometheus reads them."""
