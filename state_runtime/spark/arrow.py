"""Conversion between Spark's types and Arrow's; by pyspark's own functions, which are not documented."""

from __future__ import annotations

from inspect import signature
from typing import Final

import pyarrow as pa
from pyspark.sql import types as T

from state_runtime.base.errors import InvalidPipeline
from state_runtime.spark.internals import Internal, given, private_of

__all__ = ["arrow_schema_of", "spark_schema_of", "spark_type"]

_MODULE: Final = "pyspark.sql.pandas.types"
# Types without parameters, for both directions.
_PLAIN: Final[tuple[tuple[type[T.DataType], pa.DataType], ...]] = (
    (T.BooleanType, pa.bool_()),
    (T.ByteType, pa.int8()),
    (T.ShortType, pa.int16()),
    (T.IntegerType, pa.int32()),
    (T.LongType, pa.int64()),
    (T.FloatType, pa.float32()),
    (T.DoubleType, pa.float64()),
    (T.StringType, pa.string()),
    (T.BinaryType, pa.binary()),
    (T.DateType, pa.date32()),
    (T.TimestampType, pa.timestamp("us", "UTC")),
    (T.TimestampNTZType, pa.timestamp("us")),
    (T.DayTimeIntervalType, pa.duration("us")),
    (T.NullType, pa.null()),
)


def arrow_schema_of(schema: T.StructType) -> pa.Schema:
    """Return a schema in Arrow's types. Time zones are metadata of a column; the canonical one, UTC, keeps stored
    schemas independent of the session.

    Raises:
        InvalidPipeline: Arrow has no type for one of Spark's; raised only if Stillstate's own table is used. Else
            pyspark raises its own error.
    """

    def inner() -> pa.Schema:
        convert = private_of(_MODULE, "to_arrow_schema")
        # Spark 4.1 does not ask: there it is UTC always.
        asked = {"timezone": "UTC"} if "timezone" in signature(convert).parameters else {}
        made: pa.Schema = convert(schema, **asked)
        return made

    return given(Internal.ARROW_TYPES, inner, lambda: pa.schema(list(arrow_type(schema))))


def spark_schema_of(schema: pa.Schema) -> T.StructType:
    """Return a schema in Spark's types; a timestamp without a zone has none there either.

    Raises:
        InvalidPipeline: see `arrow_schema_of`.
    """

    def inner() -> T.StructType:
        made: T.StructType = private_of(_MODULE, "from_arrow_schema")(schema, prefer_timestamp_ntz=True)
        return made

    def public() -> T.StructType:
        return T.StructType([T.StructField(f.name, spark_type(f.type), f.nullable) for f in schema])

    return given(Internal.ARROW_TYPES, inner, public)


def arrow_type(of: T.DataType) -> pa.DataType:
    """Return the Arrow type of a common Spark type, by Stillstate's own table."""
    if isinstance(of, T.DecimalType):
        return pa.decimal128(of.precision, of.scale)
    if isinstance(of, T.ArrayType):
        return pa.list_(pa.field("element", arrow_type(of.elementType), of.containsNull))
    if isinstance(of, T.MapType):
        key = pa.field("key", arrow_type(of.keyType), False)
        return pa.map_(key, pa.field("value", arrow_type(of.valueType), of.valueContainsNull))
    if isinstance(of, T.StructType):
        return pa.struct([pa.field(f.name, arrow_type(f.dataType), f.nullable) for f in of.fields])
    for spark, arrow in _PLAIN:
        if isinstance(of, spark):
            return arrow
    raise InvalidPipeline(
        f"no type of Arrow's is known for Spark's {of.simpleString()}; cast the column to another one"
    )


def spark_type(of: pa.DataType) -> T.DataType:
    """Return the Spark type of a common Arrow type."""
    if pa.types.is_decimal(of):
        return T.DecimalType(of.precision, of.scale)
    if pa.types.is_list(of) or pa.types.is_large_list(of) or pa.types.is_fixed_size_list(of):
        return T.ArrayType(spark_type(of.value_type), of.value_field.nullable)
    if pa.types.is_map(of):
        return T.MapType(spark_type(of.key_type), spark_type(of.item_type), of.item_field.nullable)
    if pa.types.is_struct(of):
        return T.StructType([T.StructField(f.name, spark_type(f.type), f.nullable) for f in of])
    if pa.types.is_timestamp(of):
        return T.TimestampNTZType() if of.tz is None else T.TimestampType()
    if pa.types.is_large_string(of):
        return T.StringType()
    if pa.types.is_large_binary(of) or pa.types.is_fixed_size_binary(of):
        return T.BinaryType()
    for spark, arrow in _PLAIN:
        if of.equals(arrow):
            return spark()
    raise InvalidPipeline(f"no type of Spark's is known for Arrow's {of}; cast the column to another one")
