"""Which columns a pipeline reads, so that no others are scanned, shuffled or handed to Python.

An operator says what it reads (`columns_read`). Before the first one stand the user's transforms; what these read for
it is asked of Spark's own optimizer (`spark/needed_columns.py`), and the rest of the source's columns become typed
nulls in the streaming frame (`without_unread`): every name stays, so that a transform finds its input as it was
written, and Spark's scan leaves out what is not read. See docs/design/0028-columns-read.md.
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
from state_runtime.processors.builtin.interval_join import SIDE_COLUMN, IntervalJoinOperator
from state_runtime.processors.builtin.latest import LatestBy
from state_runtime.processors.builtin.sessions import SessionOperator
from state_runtime.processors.builtin.windows import WindowOperator
from state_runtime.processors.operator import Operator
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
    """Which of the source's columns are read: followed through the transforms up to the first stage of each branch."""

    def __init__(self, spark: SparkSession, schema: T.StructType) -> None:
        self._spark = spark
        self._given = spark.createDataFrame([], schema)
        # By node: the source without rows, through the transforms so far. Not of nodes that are beyond a stage.
        self._frames: dict[int, DataFrame] = {}
        self._columns: frozenset[str] | None = None  # until a stage reads something
        self._is_all = False

    @property
    def columns(self) -> frozenset[str] | None:
        """What is read; None for all."""
        return None if self._is_all else self._columns

    def source(self, node: int) -> None:
        """A node gives the source's rows."""
        self._frames[node] = self._given

    def frame_of(self, node: int, schema: T.StructType) -> DataFrame:
        """A frame without rows for a transform of a node's rows, which have this schema."""
        return self._frames.get(node) or self._spark.createDataFrame([], schema)

    def through(self, node: int, inputs: Sequence[int], made: DataFrame, *, looked: bool) -> None:
        """A transform has made the rows of a node, of what `frame_of` gave for its inputs.

        Args:
            looked: it ran a job to do so, which may read any column.
        """
        given = [self._frames[n] for n in inputs if n in self._frames]
        if looked and given:
            self._is_all = True
        elif len(inputs) > 1:
            # A union: of each input all is read.
            for frame in given:
                self._needs(frame, tuple(map(quoted, frame.columns)))
        elif given:
            self._frames[node] = made

    def by(self, node: int, wanted: tuple[str, ...] = ()) -> None:
        """A stage reads these columns of a node's rows, as SQL; all, if empty: then others can read no more of it."""
        frame = self._frames.get(node) if wanted else self._frames.pop(node, None)
        if frame is not None:
            self._needs(frame, wanted or tuple(map(quoted, frame.columns)))

    def _needs(self, frame: DataFrame, wanted: tuple[str, ...]) -> None:
        needed = columns_needed(self._given, frame, wanted)
        self._is_all |= needed is None
        self._columns = (self._columns or frozenset()) | (needed or frozenset())


def columns_read(operator: Operator) -> tuple[str, ...]:
    """The input columns that an operator reads, its keys among them; empty where it reads all, as user code may."""
    if isinstance(operator, AggregateOperator):
        return _distinct(*operator.key_columns, *operator.plan.columns)
    if isinstance(operator, WindowOperator | SessionOperator):
        return _distinct(*operator.key_columns, operator.time_column, *operator.plan.columns)
    if isinstance(operator, VectorizedOperator) and isinstance(operator.processor, LatestBy):
        return _distinct(*operator.key_columns, *operator.processor.kept)
    return ()


def deciding_columns(operator: Operator) -> tuple[str, ...]:
    """Input columns that say whether, when and for whom a row counts: a row without one is passed over, is never late,
    or counts for another key, and nothing says so.

    (The event times of both sides of a join, and the one of `deduplicate`, cannot change while there is state.)
    """
    found = list(operator.key_columns)
    if isinstance(operator, AggregateOperator | WindowOperator | SessionOperator):
        found += [name for name in operator.plan.columns if name.startswith(CONDITION_COLUMN)]
    if isinstance(operator, WindowOperator | SessionOperator):
        found.append(operator.time_column)
    if isinstance(operator, IntervalJoinOperator):
        found.append(SIDE_COLUMN)
    if isinstance(operator, StatefulProcessorOperator):
        found.append(operator.event_time_column)
    if isinstance(operator, VectorizedOperator):
        found.append(operator.event_time)
        if isinstance(operator.processor, Deduplicate):
            found.append(operator.processor.event_time)
        if isinstance(operator.processor, LatestBy):
            found += operator.processor.order
    return _distinct(*filter(None, found))


def without_unread(frame: DataFrame, read: Collection[str], corrupt_column: str) -> DataFrame:
    """A streaming frame with the same columns, of which those that nothing reads are null, and no scan looks for them.

    A column with event time is always read: the watermark is observed on it. A column that cannot be null stays too:
    Spark has taken conditions on it for granted. And where the column with malformed records is wanted everything is
    read: what is malformed depends on what is parsed.

    Args:
        read: by `spark/needed_columns.py`.
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
