"""Changes of a table as Debezium writes them into Kafka, as columns; see docs/cdc.md.

The parsing is Spark's own (`from_json`), so that no row passes through Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from pyspark.sql import functions as F
from pyspark.sql import types as T

from state_runtime.base.errors import InvalidConfiguration, InvalidData
from state_runtime.spark.errors import marked

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["UNAVAILABLE", "from_debezium"]

UNAVAILABLE: Final = "__debezium_unavailable_value"
"""What PostgreSQL's connector writes for a large value that an update did not touch."""
_DAMAGED: Final = "stillstate_damaged"
_TOLD: Final = "stillstate_told"
_ROW_OPS: Final = ("c", "u", "d", "r")
_OURS: Final = ("op", "before", "after", "ts_ms")


def from_debezium(
    frame: DataFrame,
    row: str | T.StructType,
    *,
    position: str | T.StructType,
    bad: Literal["fail", "null"] = "fail",
) -> DataFrame:
    """Return records of Debezium's JSON converter with the changes of a table that they tell of.

    To the columns of `frame` come `op` ("c" created, "u" updated, "d" deleted, "r" read by a snapshot), `before` and
    `after` (the row as a struct; null where Debezium gives none), the columns of `position`, and `ts_ms` (when the
    database made the change). The column `value` is read, with or without the `schema` wrapper. Tombstones, which
    follow a delete and have no value, are left out.

    Args:
        frame: a stream of records, or a batch.
        row: columns of the table, as Spark writes types, `"id INT, name STRING"`. Columns that it does not name are
            not read; those that a record does not have are null.
        position: columns of the record's `source` that order the changes of one row: `"lsn BIGINT"` of PostgreSQL,
            `"file STRING, pos BIGINT, row INT"` of MySQL.
        bad: what happens to a record that is no change of a row: not JSON, no envelope, a value of another type, no
            position, a truncated table (op "t"), a text that PostgreSQL did not send. "fail": the run ends, and nothing
            of the epoch is committed. "null": the columns that come are null, for
            `expect_or_drop(a_change="op IS NOT NULL")`.

    Raises:
        InvalidConfiguration: `row` or `position` names no column, or one that is there already.
        InvalidData: in the tasks, with bad="fail": says what the record is, and not what it has.

    Example:
        changes = sources.from_debezium(topic.load(spark), "id INT, name STRING", position="lsn BIGINT")
    """
    if bad not in ("fail", "null"):
        raise InvalidConfiguration(f'from_debezium: bad must be "fail" or "null" (got {bad!r})')
    columns, places = _struct(row, "row"), _struct(position, "position")
    named = [field.name for field in places]
    taken = sorted({*named} & {*_OURS, *frame.columns} | {*_OURS} & {*frame.columns})
    if taken:
        raise InvalidConfiguration(f"from_debezium: there is a column {taken[0]!r} already; rename it before")
    told = frame.where("value IS NOT NULL").withColumn(_TOLD, _parsed(columns, places))
    problem = _problem(columns, places)
    # All that comes is taken from behind the condition, so that no reader of some columns only is without it.
    otherwise = F.raise_error(problem) if bad == "fail" else F.lit(None)
    told = told.withColumn(_TOLD, F.when(problem.isNull(), F.col(_TOLD)).otherwise(otherwise))
    given = [F.col(_TOLD)["source"][name].alias(name) for name in named]
    parts = [F.col(_TOLD)[name].alias(name) for name in ("op", "before", "after")]
    return told.select(*frame.columns, *parts, *given, F.col(_TOLD)["source"]["ts_ms"].alias("ts_ms"))


def _struct(given: str | T.StructType, what: str) -> T.StructType:
    struct: Any = given
    if isinstance(given, str):
        struct = T.StructType.fromDDL(given) if given.strip() else T.StructType([])
    if not isinstance(struct, T.StructType) or not struct.fields:
        raise InvalidConfiguration(f'from_debezium: {what} names no column; write them as "id INT, name STRING"')
    return struct


def _parsed(columns: T.StructType, places: T.StructType) -> Column:
    """Return the envelope of a record, whether or not it is wrapped."""
    source = T.StructType([*(f for f in places.fields if f.name != "ts_ms"), T.StructField("ts_ms", T.LongType())])
    envelope = T.StructType(
        [
            T.StructField("op", T.StringType()),
            T.StructField("before", columns),
            T.StructField("after", columns),
            T.StructField("source", source),
        ]
    )
    both = T.StructType([*envelope, T.StructField("payload", envelope), T.StructField(_DAMAGED, T.StringType())])
    parsed = F.from_json(F.col("value").cast("string"), both, {"columnNameOfCorruptRecord": _DAMAGED})
    parts = [F.coalesce(parsed["payload"][n], parsed[n]).alias(n) for n in ("op", "before", "after", "source")]
    return F.struct(*parts, parsed[_DAMAGED].isNotNull().alias("is_damaged"))


def _problem(columns: T.StructType, places: T.StructType) -> Column:
    """Return a sentence about a record that is no change of a row; null for one that is."""
    told = F.col(_TOLD)
    op, after = told["op"], told["after"]
    row = F.coalesce(after, told["before"])
    missing = F.lit(False)
    for field in places:
        missing = missing | told["source"][field.name].isNull()
    unsent = F.lit(False)
    for field in columns:
        if isinstance(field.dataType, T.StringType):
            unsent = unsent | F.coalesce(after[field.name] == UNAVAILABLE, F.lit(False))
    return (
        F.when(
            told["is_damaged"],
            _error(
                "a record is not JSON, or has a value of another type than its column was declared with: compare "
                "`row` and `position` with the table (decimal.handling.mode=string writes decimals as text)"
            ),
        )
        .when(
            op == "t",
            _error(
                "the table was truncated (op t), which is no change of a row: each row's last state would stay. Begin "
                "anew from a snapshot of the connector"
            ),
        )
        .when(
            op.isNull() | ~op.isin(*_ROW_OPS) | row.isNull(),
            _error("a record is no change of a row: it has no op c, u, d or r, or neither `before` nor `after`"),
        )
        .when(
            missing,
            _error(f"a change has no position: its `source` lacks one of {', '.join(field.name for field in places)}"),
        )
        .when(
            unsent,
            _error(
                "an update lacks a large value that it did not change. ALTER TABLE … REPLICA IDENTITY FULL lets "
                "PostgreSQL send it; or leave the column out of `row`"
            ),
        )
    )


def _error(text: str) -> Column:
    advice = 'With bad="null" such records pass with nulls, for expect_or_drop(a_change="op IS NOT NULL")'
    return F.lit(str(marked(InvalidData(f"from_debezium: {text}. {advice}"))))
