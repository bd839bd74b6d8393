"""The foundation of all other modules: clock, ids, limits, errors, settings, progress; knows nothing of snapshots."""
