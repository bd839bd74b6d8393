"""What everything stands on: clock, ids, limits, errors, settings, progress; knows nothing of snapshots."""
