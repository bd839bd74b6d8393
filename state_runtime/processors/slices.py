"""A shard's input in slices of keys, and how an operator goes through them.

A *slice* is what an operator processes in one go; a *pass* is a number of slices with different keys, in order of
their hashes. Rows come first, slice by slice; what is due (timers, windows that close, rows that nothing can match any
more) is done once, with the last slice, and so not at all where rows are left for a later epoch. Most shards have one
slice: its rows and what is due are processed together then, and a row that the same epoch adds and removes is never
written. See docs/design/0030-slices.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
import pyarrow as pa

from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.operator import RowSlice, ShardResult
from state_runtime.state.reader import StateReader
from state_runtime.state.table import StateSchema, concat, fold

__all__ = ["Changes", "SliceBody", "cut", "process_slices", "slices_of", "without_rows"]


def slices_of(rows: GroupedRows, keys_max: int, rows_max: int) -> Iterator[GroupedRows]:
    """Cut groups into runs of at most so many keys and rows; a key's rows stay together, however many they are.

    Keys of equal hashes stay together too: what the slices change must be sorted when it is put one after the other.
    """
    first = 0
    while first < rows.groups:
        by_rows = int(np.searchsorted(rows.stops, rows.starts[first] + rows_max, side="right"))
        end = max(first + 1, min(first + keys_max, by_rows))
        while end < rows.groups and rows.hashes[end] == rows.hashes[end - 1]:
            end += 1
        yield cut(rows, first, end)
        first = end


def cut(rows: GroupedRows, first: int, end: int) -> GroupedRows:
    """The groups number `first` up to (without) `end`; nothing is copied."""
    if first == 0 and end == rows.groups:
        return rows
    low, high = (int(rows.starts[first]), int(rows.stops[end - 1])) if first < end else (0, 0)
    return replace(
        rows,
        rows=rows.rows.slice(low, high - low),
        starts=rows.starts[first:end] - low,
        stops=rows.stops[first:end] - low,
        hashes=rows.hashes[first:end],
        keys=[k.slice(first, end - first) for k in rows.keys],
        sequence=rows.sequence[low:high],
    )


def without_rows(rows: GroupedRows) -> GroupedRows:
    """The same columns, and no row."""
    return cut(rows, 0, 0)


class Changes:
    """What was changed so far, pass by pass."""

    def __init__(self, schemas: Mapping[str, StateSchema]) -> None:
        self._schemas = schemas
        self._current: dict[str, list[pa.RecordBatch]] = {}
        self._newest_first: dict[str, list[pa.RecordBatch]] = {}
        self.rows_added = 0

    def add(self, changed: Iterable[tuple[str, pa.RecordBatch]], rows_added: int) -> None:
        """Note what a slice changed: per state one sorted batch, and the live rows gained.

        Slices between two `seal` hold different keys in order of their hashes.
        """
        for name, batch in changed:
            if batch.num_rows:
                self._current.setdefault(name, []).append(batch)
        self.rows_added += rows_added

    def seal(self) -> Mapping[str, pa.RecordBatch]:
        """End a pass; what it changed, for the next one to see."""
        sealed = {name: concat(batches, self._schemas[name].arrow) for name, batches in self._current.items()}
        self._current = {}
        for name, batch in sealed.items():
            self._newest_first.setdefault(name, []).insert(0, batch)
        return sealed

    def folded(self) -> dict[str, pa.RecordBatch]:
        """Per state one sorted batch of all passes. States that did not change have an empty one."""
        return {
            name: fold(self._newest_first.get(name, []), schema, drop_deleted=False)
            for name, schema in self._schemas.items()
        }


class SliceBody(Protocol):
    """What an operator does with one slice: gives its output, and fills the slice's result while that is drained."""

    def __call__(
        self, rows: GroupedRows, reader: StateReader, result: ShardResult, *, due: bool
    ) -> Iterator[pa.RecordBatch]:
        """Process.

        Args:
            rows: may be none, where only something is due.
            reader: the state with what earlier passes changed.
            due: whether to do what is due, too, on top of what these rows change; else nothing of it.
        """
        ...


def process_slices(
    slices: Iterable[RowSlice],
    reader: StateReader,
    schemas: Mapping[str, StateSchema],
    body: SliceBody,
    *,
    emits_anew: bool = False,
) -> ShardResult:
    """Process a shard's slices one after the other, and what is due with the last one.

    Args:
        emits_anew: what the body gives of a key is no use if more of the key's rows follow.

    Returns:
        The result, which is filled when its output is drained. If the slices end before the last one, nothing that is
        due was done.
    """
    result = ShardResult(iter(()))
    result.outputs = _outputs(slices, reader, schemas, body, result, emits_anew)
    return result


def _outputs(
    slices: Iterable[RowSlice],
    reader: StateReader,
    schemas: Mapping[str, StateSchema],
    body: SliceBody,
    result: ShardResult,
    emits_anew: bool,
) -> Iterator[pa.RecordBatch]:
    changes = Changes(schemas)
    for number, piece in enumerate(_without_rest(slices)):
        if piece.is_last and number == 0:
            yield from body(piece.rows, reader, result, due=True)
            return
        if piece.begins_pass and number:
            reader = reader.overlaid(changes.seal())
        part = ShardResult(iter(()))
        emitted = body(piece.rows, reader, part, due=False)
        if emits_anew and piece.goes_on:
            for _ in emitted:  # draining it fills the result
                continue
        else:
            yield from emitted
        _take(part, changes, result)
        if piece.is_last:
            reader = reader.overlaid(changes.seal())
            part = ShardResult(iter(()))
            yield from body(without_rows(piece.rows), reader, part, due=True)
            _take(part, changes, result)
    changes.seal()
    result.changes = changes.folded()


def _without_rest(slices: Iterable[RowSlice]) -> Iterator[RowSlice]:
    """The rest of a key that has more rows than are held at once as further passes, each over some of its rows."""
    for whole in slices:
        if not whole.rest:
            yield whole
            continue
        before = whole.rows
        for piece in whole.rest:
            same = before.groups == piece.groups == 1 and all(a.equals(b) for a, b in zip(before.keys, piece.keys))
            yield RowSlice(before, is_last=False, begins_pass=True, goes_on=same)
            before = piece
        yield RowSlice(before, is_last=whole.is_last, begins_pass=True)


def _take(part: ShardResult, changes: Changes, result: ShardResult) -> None:
    changes.add(part.changes.items(), part.rows_added)
    result.rows_added = changes.rows_added
    result.late_rows += part.late_rows
    for state, bound_ms in part.due_taken.items():
        result.due_taken[state] = max(bound_ms, result.due_taken.get(state, bound_ms))
