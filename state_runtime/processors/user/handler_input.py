"""The two flavours of pyspark's processors: rows as `Row` objects, or as pandas frames."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from types import GeneratorType
from typing import Any, Protocol

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Row

from state_runtime.base.errors import InvalidData, UserCodeError
from state_runtime.base.usercode import described_method
from state_runtime.processors.columns import from_python, read_columns, to_python
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.user.frames import (
    NullableIntegers,
    frames_to_batches,
    nullable_integers,
    split_frame,
    table_to_frame,
)
from state_runtime.processors.user.rows import row_class_of

__all__ = ["ITERABLES", "FrameInput", "HandlerInput", "RowInput", "refuse_returned", "time_zone_of"]


_ROWS_OF_A_KEY = 4_096
"""Rows of a large key that are Python objects at once: more are not faster."""

ITERABLES = frozenset({GeneratorType, list, type(iter([]))})
"""Types that handlers usually return; `refuse_returned` checks all others."""


class HandlerInput(Protocol):
    """Conversion of a handler's input and output.

    Attributes:
        pending_max: number of outputs (rows or frames) that are gathered before they become batches.
    """

    pending_max: int

    def keys(self, rows: GroupedRows) -> list[tuple[Any, ...]]:
        """Return the keys of a slice, as user code gets them."""
        ...

    def inputs(self, rows: GroupedRows) -> Iterable[Iterator[Any]]:
        """Return for each key of a slice the iterator that `handleInputRows` gets."""
        ...

    def initial(self, rows: GroupedRows) -> Iterable[Iterable[Any]]:
        """Return for each key of a slice the values with which `handleInitialState` is called, one after the other."""
        ...

    def batches(self, outputs: list[Any]) -> Iterator[pa.RecordBatch]:
        """Yield outputs as batches of the declared schema."""
        ...


class RowInput:
    """Rows in, rows out: `transformWithState`.

    Args:
        processor: class and place of the user's code, for messages about its rows.
    """

    def __init__(
        self,
        uid: str,
        key_columns: Sequence[str],
        schema: pa.Schema,
        rows_max: int,
        pending_max: int,
        processor: str = "the processor",
    ) -> None:
        self._uid = uid
        self._processor = processor
        self._key_columns = key_columns
        self._schema = schema
        self._rows_max = rows_max
        self.pending_max = pending_max

    def keys(self, rows: GroupedRows) -> list[tuple[Any, ...]]:
        columns = []
        for name, column in zip(self._key_columns, rows.keys):
            given = rows.rows.schema.field(name).type
            # Keys are stored in UTC; user code sees the session's zone, as in its rows.
            columns.append(column.cast(given) if pa.types.is_timestamp(given) else column)
        return list(zip(*read_columns(columns, self._key_columns, to_python, self._uid)))

    def inputs(self, rows: GroupedRows) -> Iterable[Iterator[Any]]:
        if rows.rows.num_rows > self._rows_max and rows.groups == 1:
            return [self._row_by_row(rows.rows)]
        made = self._made(rows.rows)
        return map(iter, map(made.__getitem__, map(slice, rows.starts.tolist(), rows.stops.tolist())))

    def initial(self, rows: GroupedRows) -> Iterable[Iterable[Any]]:
        return self.inputs(rows)

    def _made(self, batch: pa.RecordBatch) -> list[Any]:
        names = batch.schema.names
        row_class = row_class_of(names)
        return list(
            map(partial(tuple.__new__, row_class), zip(*read_columns(batch.columns, names, to_python, self._uid)))
        )

    def _row_by_row(self, batch: pa.RecordBatch) -> Iterator[Any]:
        """Yield the rows of a key that has more rows than are made at once."""
        step = min(self._rows_max, _ROWS_OF_A_KEY)
        pieces = (batch.slice(low, step) for low in range(0, batch.num_rows, step))
        return chain.from_iterable(map(self._made, pieces))

    def batches(self, outputs: list[Any]) -> Iterator[pa.RecordBatch]:
        """Yield batches whose columns are matched by name, missing ones null (Spark's rule); without names by position.

        Raises:
            InvalidData: an undeclared field, which Spark would drop; a value that does not fit.
        """
        wanted = self._schema.names
        where = f"the output of operator {self._uid!r}"
        if not _is_in_order(outputs, wanted):
            outputs = [self._ordered(row, wanted) for row in outputs]
        columns = list(zip(*outputs)) if wanted else []
        yield pa.RecordBatch.from_arrays(
            [from_python(column, f, lambda: where) for column, f in zip(columns, self._schema)], schema=self._schema
        )

    def _ordered(self, row: Any, wanted: Sequence[str]) -> tuple[Any, ...]:
        where = f"operator {self._uid!r}: {self._processor}"
        if isinstance(row, tuple) and not hasattr(row, "__fields__"):
            if len(row) != len(wanted):
                raise InvalidData(
                    f"{where} yielded {len(row)} values without names for {len(wanted)} columns: "
                    f"{', '.join(wanted)}; yield one for each, or Row(name=value, …)"
                )
            return row
        if not hasattr(row, "asDict"):
            raise InvalidData(
                f"{where} yielded a {type(row).__name__}; yield pyspark.sql.Row objects or tuples, "
                "or use transform_with_state_in_pandas for data frames"
            )
        fields = row.asDict()
        unknown = [name for name in fields if name not in wanted]
        if unknown:
            raise InvalidData(
                f"{where} yielded a row with the field {unknown[0]!r}, which its output schema does not have "
                f"({', '.join(wanted)}): its value would be lost. Correct the name, or add the field to the schema"
            )
        return tuple(fields.get(name) for name in wanted)


class FrameInput:
    """Frames in, frames out: `transformWithStateInPandas`."""

    pending_max = 8_192

    def __init__(
        self,
        uid: str,
        key_columns: Sequence[str],
        schema: pa.Schema,
        rows_max: int,
        frame_rows_max: int,
        time_zone: str,
    ) -> None:
        self._uid = uid
        self._key_columns = key_columns
        self._schema = schema
        self._rows_max = rows_max
        self._frame_rows_max = frame_rows_max
        self._time_zone = time_zone

    def keys(self, rows: GroupedRows) -> list[tuple[Any, ...]]:
        columns = []
        for name, column in zip(self._key_columns, rows.keys):
            given = rows.rows.schema.field(name).type
            is_zoned = pa.types.is_timestamp(given) and given.tz is not None
            columns.append(pc.local_timestamp(column.cast(given)) if is_zoned else column)
        return list(zip(*read_columns(columns, self._key_columns, _key_of_frame, self._uid)))

    def inputs(self, rows: GroupedRows) -> Iterable[Iterator[Any]]:
        if rows.rows.num_rows > self._rows_max and rows.groups == 1:
            return [self._frame_by_frame(rows.rows)]
        nullable = nullable_integers(rows.rows)
        cut: Callable[[int, int], Iterator[pd.DataFrame]] = partial(self._cut, table_to_frame(rows.rows), nullable)
        return map(cut, rows.starts.tolist(), rows.stops.tolist())

    def initial(self, rows: GroupedRows) -> Iterable[Iterable[Any]]:
        return self.inputs(rows)

    def _cut(
        self, frame: pd.DataFrame, nullable: Sequence[NullableIntegers], start: int, stop: int
    ) -> Iterator[pd.DataFrame]:
        return split_frame(frame, start, stop, self._frame_rows_max, nullable)

    def _frame_by_frame(self, batch: pa.RecordBatch) -> Iterator[pd.DataFrame]:
        """Yield the frames of a key that has more rows than are made at once."""
        for low in range(0, batch.num_rows, self._frame_rows_max):
            piece = batch.slice(low, self._frame_rows_max)
            yield from split_frame(table_to_frame(piece), 0, piece.num_rows, piece.num_rows, nullable_integers(piece))

    def batches(self, outputs: list[Any]) -> Iterator[pa.RecordBatch]:
        """Yield batches whose columns are matched by name; every declared column must be there."""
        return frames_to_batches(outputs, self._schema, f"the output of operator {self._uid!r}", self._time_zone)


def _key_of_frame(column: pa.Array) -> list[Any]:
    """Return a key column as values: times are pandas' own, as in frames."""
    return list(pd.Series(column.to_pandas())) if pa.types.is_timestamp(column.type) else to_python(column)


def time_zone_of(schema: pa.Schema) -> str:
    """Return the session's time zone, which Spark puts into timestamp types; UTC if no type has one."""
    zones = [f.type.tz for f in schema if pa.types.is_timestamp(f.type) and f.type.tz is not None]
    return zones[0] if zones else "UTC"


def refuse_returned(returned: Any, handler: Callable[..., Any], uid: str) -> None:
    """Refuse a handler's result if it is not an iterable of outputs, or is itself one output.

    A row would give its fields as rows, a frame its labels. Called for results whose type is not in `ITERABLES`.

    Raises:
        UserCodeError: it cannot be iterated over. InvalidData: it is a row or a frame.
    """
    where = f"operator {uid!r}: {described_method(handler)}"
    if isinstance(returned, Row):
        raise InvalidData(
            f"{where} said `return Row(…)`, which gives the fields of the row one by one: write `yield Row(…)`, or "
            "return a list of rows"
        )
    if isinstance(returned, pd.DataFrame):
        raise InvalidData(
            f"{where} returned a DataFrame, which gives its labels one by one: write `yield frame`, or return a list "
            "of frames"
        )
    if not isinstance(returned, Iterable):
        raise UserCodeError(
            f"{where} returned {'None' if returned is None else f'a {type(returned).__name__}'}; it must return an "
            "iterator of its outputs. Write `return iter([])` where it has none, or `yield` each output"
        )


_names_of = attrgetter("__fields__")


def _is_in_order(rows: list[Any], wanted: list[str]) -> bool:
    """Return whether all rows have exactly the wanted columns, in order. All rows are checked, so without a loop."""
    if set(map(type, rows)) == {tuple}:
        return set(map(len, rows)) == {len(wanted)}
    try:
        return all(map(wanted.__eq__, map(list, map(_names_of, rows))))
    except AttributeError:
        return False
