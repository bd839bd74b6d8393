"""Snapshots: manifest, catalog, terms, commit, control. No Spark in here."""
