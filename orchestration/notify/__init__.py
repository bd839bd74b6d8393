"""Notify a receiver outside of Dagster once when something is wrong, and once when it has passed."""
