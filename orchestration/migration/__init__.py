"""Migrations of a running job: planned, executed in recorded steps, gone on with after a crash, and taken back."""
