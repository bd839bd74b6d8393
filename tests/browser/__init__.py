"""Dagster's real pages over a house of thirty jobs, looked at by a real browser (`make test-browser`)."""
