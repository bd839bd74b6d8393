"""The columns that a pipeline reads; no others are scanned, shuffled or handed to Python.

An operator names the columns that it reads (`columns_read`). User transforms may precede the first operator; Spark's
own optimizer says which columns they need for it (`spark/needed_columns.py`). The rest of the source's columns become
typed nulls in the streaming frame (`without_unread`): every name stays, so a transform finds its input as it was
written, and Spark's scan leaves out the unread columns. See docs/design/0028-columns-read.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T
from pyspark.sql.functions import col, lit

from state_runtime.pipeline.watermark import watermark_columns
from state_runtime.processors.builtin.aggregate import AggregateOperator
from state_runtime.processors.builtin.deduplicate import Deduplicate
from state_runtime.processors.builtin.latest import LatestBy
from state_runtime.processors.builtin.sessions import SessionOperator
from state_runtime.processors.builtin.stream_join import StreamJoin
from state_runtime.processors.builtin.windows import WindowOperator
from state_runtime.processors.operator import Operator
from state_runtime.processors.sides import SIDE_COLUMN
from state_runtime.processors.user.stateful import StatefulProcessorOperator
from state_runtime.processors.user.vectorized import VectorizedOperator
from state_runtime.spark.columns import CONDITION_COLUMN
from state_runtime.spark.needed_columns import columns_needed
from state_runtime.spark.sql import quoted

__all__ = [
    "CORRUPT_COLUMN_CONF",
    "SourceReads",
    "columns_read",
    "deciding_columns",
    "without_unread",
]

CORRUPT_COLUMN_CONF: Final = "spark.sql.columnNameOfCorruptRecord"


class SourceReads:
    """The columns of the sources that are read, followed through the transforms up to the first stage of each branch.

    Args:
        schemas: of the sources.
    """

    def __init__(self, spark: SparkSession, schemas: Sequence[T.StructType]) -> None:
        self._spark = spark
        self._given = [spark.createDataFrame([], schema) for schema in schemas]
        # By node: a source without rows, through the transforms so far, and its number. Nodes behind a stage are not in
        # it, nor are those behind a union.
        self._frames: dict[int, DataFrame] = {}
        self._numbers: dict[int, int] = {}
        self._columns: list[frozenset[str] | None] = [None] * len(schemas)  # until a stage reads something
        self._are_all: set[int] = set()

    @property
    def columns(self) -> tuple[frozenset[str] | None, ...]:
        """The columns of each source that are read; None for all."""
        return tuple(None if number in self._are_all else read for number, read in enumerate(self._columns))

    def source(self, node: int, number: int) -> None:
        """Record that a node has the rows of a source."""
        self._frames[node], self._numbers[node] = self._given[number], number

    def frame_of(self, node: int, schema: T.StructType) -> DataFrame:
        """Return a frame without rows, of a node's schema, for the transform that reads the node."""
        known = self._frames.get(node)
        return known if known is not None else self._spark.createDataFrame([], schema)

    def through(self, node: int, inputs: Sequence[int], made: DataFrame, *, looked: bool) -> None:
        """Record the frame of a node that a stateless step made of `frame_of` of its inputs.

        Args:
            looked: the transform ran a Spark job, which may read any column.
        """
        known = [n for n in inputs if n in self._frames]
        if looked:
            self._are_all.update(self._numbers[n] for n in known)
        elif len(inputs) > 1:
            # A union reads all columns of each input.
            for n in known:
                self._needs(n, self._frames[n], tuple(map(quoted, self._frames[n].columns)))
        elif known:
            self._frames[node], self._numbers[node] = made, self._numbers[known[0]]

    def by(self, node: int, wanted: tuple[str, ...] = ()) -> None:
        """Record that a stage reads these columns of a node, as SQL; all, if empty: then no other reader adds any."""
        frame = self._frames.get(node) if wanted else self._frames.pop(node, None)
        if frame is not None:
            self._needs(node, frame, wanted or tuple(map(quoted, frame.columns)))

    def _needs(self, node: int, frame: DataFrame, wanted: tuple[str, ...]) -> None:
        number = self._numbers[node]
        needed = columns_needed(self._given[number], frame, wanted)
        if needed is None:
            self._are_all.add(number)
        self._columns[number] = (self._columns[number] or frozenset()) | (needed or frozenset())


def columns_read(operator: Operator) -> tuple[str, ...]:
    """Return the input columns that an operator reads, keys included; empty if it reads all, as user code may."""
    if isinstance(operator, AggregateOperator):
        return _distinct(*operator.key_columns, *operator.plan.columns)
    if isinstance(operator, WindowOperator | SessionOperator):
        return _distinct(*operator.key_columns, *_times_of(operator), *operator.plan.columns)
    if isinstance(operator, VectorizedOperator) and isinstance(operator.processor, LatestBy):
        return _distinct(*operator.key_columns, *operator.processor.kept)
    return ()


def deciding_columns(operator: Operator) -> tuple[str, ...]:
    """Return the input columns that decide whether, when and for which key a row counts. A row without one would
    silently be skipped, never be late, or count for another key.

    (The event times of both sides of a join, and that of `deduplicate`, cannot change while there is state.)
    """
    found = list(operator.key_columns)
    if isinstance(operator, AggregateOperator | WindowOperator | SessionOperator):
        found += [name for name in operator.plan.columns if name.startswith(CONDITION_COLUMN)]
    if isinstance(operator, WindowOperator | SessionOperator):
        found += _times_of(operator)
    if isinstance(operator, StreamJoin):
        found.append(SIDE_COLUMN)
    if isinstance(operator, StatefulProcessorOperator):
        found.append(operator.event_time_column)
    if isinstance(operator, VectorizedOperator) and operator.inputs:
        found.append(SIDE_COLUMN)
    elif isinstance(operator, VectorizedOperator):
        found.append(operator.event_time)
        if isinstance(operator.processor, Deduplicate):
            found.append(operator.processor.event_time)
        if isinstance(operator.processor, LatestBy):
            found += operator.processor.order
    return _distinct(*filter(None, found))


def _times_of(operator: WindowOperator | SessionOperator) -> tuple[str, ...]:
    """Return the columns that say in which windows a row is."""
    ends = operator.window.end_column if isinstance(operator, SessionOperator) else ""
    return (operator.time_column, ends) if ends else (operator.time_column,)


def without_unread(frame: DataFrame, read: Collection[str], corrupt_column: str) -> DataFrame:
    """Return a streaming frame with the same columns, of which unread ones are null and not scanned.

    A column with event time is always read: the watermark is observed on it. A column that cannot be null stays too:
    Spark relies on that. If the column with malformed records is read, all columns are read: which records are
    malformed depends on the columns that are parsed.

    Args:
        read: the columns that are read, by `spark/needed_columns.py`.
        corrupt_column: Spark's name of the column with malformed records.
    """
    if corrupt_column in read:
        return frame
    unread = {field.name for field in frame.schema.fields if field.name not in read and _can_be_null(field)}
    if not unread:
        return frame
    columns = [
        lit(None).cast(field.dataType).alias(field.name) if field.name in unread else col(quoted(field.name))
        for field in frame.schema.fields
    ]
    return frame.select(*columns)


def _can_be_null(field: T.StructField) -> bool:
    is_plain = field.nullable and not isinstance(field.dataType, T.UserDefinedType)
    return is_plain and not watermark_columns(T.StructType([field]))


def _distinct(*names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
