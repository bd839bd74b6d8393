"""Snapshots: manifest and catalog, commit and fencing, boundary and pins, requests to a run. Does not use Spark."""
