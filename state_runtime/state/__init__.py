"""Keyed state as sorted columns: tables, local runs, handles."""
