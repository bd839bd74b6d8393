"""Two streams that share one processor and its state: the rows of each input by key, for the keys of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from state_runtime.base.errors import InvalidPipeline
from state_runtime.processors.grouping import GroupedRows, filter_rows
from state_runtime.processors.operator import EpochClock, ShardResult
from state_runtime.processors.sides import LEFT_COLUMN, RIGHT_COLUMN, JoinSide, SideRows
from state_runtime.processors.user.keyed_batch import KeyedBatch, RowsByKey

__all__ = ["ConnectedBatch", "ConnectedInput", "connected_input", "without_late"]


@dataclass(frozen=True)
class ConnectedInput:
    """One of the two streams.

    Attributes:
        side: its place among the rows of both.
        schema: all of its columns, in its own order and with its own names of the keys.
    """

    side: JoinSide
    schema: pa.Schema


def connected_input(number: int, schema: pa.Schema, keys: Sequence[str], time: str) -> ConnectedInput:
    """Return the input with a number.

    Args:
        time: its column with event time; "": its rows are never late.
    """
    side = JoinSide(
        name="left" if number == 0 else "right",
        number=number,
        keys=tuple(keys),
        struct=(LEFT_COLUMN, RIGHT_COLUMN)[number],
        columns=pa.schema([field for field in schema if field.name not in keys]),
        time=time,
        when="",
        is_outer=False,
        drops_late=bool(time),
        stays_ms=None,
    )
    return ConnectedInput(side, schema)


def without_late(
    inputs: Mapping[str, ConnectedInput],
    key_schema: pa.Schema,
    rows: GroupedRows,
    clock: EpochClock,
    result: ShardResult,
) -> GroupedRows:
    """Return the rows of both inputs that are not late; the late ones go to the result."""
    if rows.groups == 0:
        return rows
    keep = np.ones(rows.rows.num_rows, dtype=np.bool_)
    for each in inputs.values():
        given = SideRows(each.side, key_schema, rows)
        keep[given.at] = given.on_time(clock, result)
    return filter_rows(rows, keep)


class ConnectedBatch(KeyedBatch):
    """The rows of two streams in one shard and epoch, by key, and the state of their keys, which they share.

    `keys` has each key that has a row in one of the inputs. `input(name)` has the rows of one, aligned with `keys`: a
    key may have none there (`sizes` 0).
    """

    _inputs: Mapping[str, ConnectedInput] = MappingProxyType({})

    def with_inputs(self, inputs: Mapping[str, ConnectedInput]) -> ConnectedBatch:
        """For the runtime: return the batch, which now knows its inputs."""
        self._inputs = inputs
        return self

    @property
    def rows(self) -> pa.RecordBatch:
        """There is no table of both inputs' rows.

        Raises:
            InvalidPipeline: always; it names the inputs.
        """
        raise InvalidPipeline(
            f"operator {self._operator!r} has the inputs {', '.join(map(repr, self._inputs))}: read the rows of one, "
            f"as in batch.input({next(iter(self._inputs))!r}).rows"
        )

    def __repr__(self) -> str:
        return f"ConnectedBatch({self.num_keys} keys, {self._rows.rows.num_rows} rows)"

    def input(self, name: str) -> RowsByKey:
        """Return the rows of one input, by the keys of both.

        Raises:
            InvalidPipeline: `connect` has no such stream.
        """
        if name not in self._inputs:
            raise InvalidPipeline(
                f"operator {self._operator!r} has no input {name!r}; connect() names {', '.join(self._inputs)}"
            )
        asked = self._inputs[name]
        if self._rows.rows.num_rows == 0:
            return RowsByKey(self._operator, replace(self._rows, rows=pa.RecordBatch.from_pylist([], asked.schema)))
        given = SideRows(asked.side, self._key_schema, self._rows)
        _, keys, others = given.picked(np.ones(len(given.at), dtype=np.bool_))
        columns = {**dict(zip(asked.side.keys, keys)), **dict(zip(asked.side.columns.names, others))}
        rows = pa.RecordBatch.from_arrays([columns[field.name] for field in asked.schema], schema=asked.schema)
        stops = np.cumsum(np.bincount(given.group, minlength=self.num_keys)).astype(np.int64)
        starts = np.concatenate((np.zeros(1, dtype=np.int64), stops))[: self.num_keys]
        return RowsByKey(
            self._operator,
            replace(self._rows, rows=rows, starts=starts, stops=stops, sequence=self._rows.sequence[given.at]),
        )
