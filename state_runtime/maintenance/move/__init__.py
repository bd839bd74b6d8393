"""Copies and moves of snapshots, savepoints and whole jobs between stores: plan → carry → verify → hand over."""
