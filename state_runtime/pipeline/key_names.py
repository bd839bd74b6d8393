"""Hints about the names of key columns."""

from __future__ import annotations

from pyspark.sql import types as T

__all__ = ["way_to_key"]


def way_to_key(name: str, schema: T.StructType) -> str:
    """Return the hint for an error about a missing key column: the column that was probably meant."""
    alike = [column for column in schema.names if column.lower() == name.lower()]
    if alike:
        return f". Write key_by({alike[0]!r}): names are compared exactly, also if spark.sql.caseSensitive is false"
    if name.partition(".")[0] in schema.names and "." in name:
        made = name.replace(".", "_")
        return (
            f". To key by a field of a struct, make it a column first: .transform(lambda df: df.withColumn({made!r}, "
            f"col({name!r}))).key_by({made!r})"
        )
    return ""
