"""Operators without a Python loop over rows or keys: aggregates, windows, joins, deduplication, the latest row of each
key."""
