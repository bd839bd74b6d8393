"""Refusal of collations: text that Spark does not compare by its bytes; pure.

State is found, grouped and ordered by bytes, and only Spark can compute the hash of a key with a collation. So
operators take no such text, as Spark's own streaming takes none as a key.
"""

from __future__ import annotations

from pyspark.sql import types as T

from state_runtime.base.errors import InvalidPipeline

__all__ = ["refuse_collations"]


def refuse_collations(schema: T.StructType, what: str) -> None:
    """Refuse columns with a collation, also inside other types.

    Args:
        what: whose columns they are, for the message.

    Raises:
        InvalidPipeline: a column has a collation other than UTF8_BINARY.
    """
    for column in schema.fields:
        collation = _collation(column.dataType)
        if collation:
            raise InvalidPipeline(
                f"{what}: column {column.name!r} has the collation {collation}. Operators compare text by its bytes, "
                "and would keep apart what Spark's batch queries take for equal; Spark's own streaming refuses such "
                "keys. Take the collation away before the operator, CAST(… AS STRING), and what it made equal with it: "
                "lower(CAST(… AS STRING)) where case does not matter, rtrim(…) where blanks at the end do not"
            )


def _collation(data_type: T.DataType) -> str:
    """Return the first collation inside a type that does not compare bytes; "" if it has none."""
    if isinstance(data_type, T.StructType):
        return next(filter(None, (_collation(f.dataType) for f in data_type.fields)), "")
    if isinstance(data_type, T.ArrayType):
        return _collation(data_type.elementType)
    if isinstance(data_type, T.MapType):
        return _collation(data_type.keyType) or _collation(data_type.valueType)
    if isinstance(data_type, T.StringType) and not data_type.isUTF8BinaryCollation():
        return data_type.collation
    return ""
