"""Sinks on other systems' tables, each on the field's own library, an extra of its own."""
