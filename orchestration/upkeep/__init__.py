"""Upkeep of a job that keeps running: deletions, verification, drills. Commands and Dagster's runs call it."""
