"""Telling somebody outside of Dagster that something is wrong, once, and that it is right again."""
