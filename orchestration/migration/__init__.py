"""Migrations of a running job: planned, executed in recorded steps, resumed after a crash, and taken back."""
