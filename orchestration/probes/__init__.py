"""Probes of many jobs at once: a store that hangs, refuses or answers slowly costs only its own jobs a look."""
