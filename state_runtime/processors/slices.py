"""A shard's input in slices of keys, and the way in which an operator goes through them.

An operator processes one *slice* at a time; a *pass* is a number of slices with different keys, in order of their
hashes. Rows come first, slice by slice. Due rows (timers, windows that close, rows that can match no other row any
more) are processed once, with the last slice; if rows are left for a later epoch, they are not processed. Most shards
have one slice: then its rows and due rows are processed together, and a row that the same epoch adds and removes is
never written. See docs/design/0030-slices.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
import pyarrow as pa

from state_runtime.base.limits import MIB
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.operator import RowSlice, ShardResult
from state_runtime.state.changed_rows import Changed, ChangedRows, batches_of, on_top
from state_runtime.state.reader import StateReader
from state_runtime.state.table import HASH_MAX, StateSchema, concat, fold, hashes_of, slice_hash_range

__all__ = ["HELD_BYTES_MIN", "Changes", "SliceBody", "cut", "process_slices", "slices_of", "without_rows"]


def slices_of(rows: GroupedRows, keys_max: int, rows_max: int) -> Iterator[GroupedRows]:
    """Cut groups into runs of at most `keys_max` keys and `rows_max` rows; all rows of a key stay together.

    Keys of equal hashes stay together too: the slices' changes must be sorted when they are concatenated.
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
    """Return the groups number `first` up to (without) `end`; nothing is copied."""
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
    """Return the same columns without rows."""
    return cut(rows, 0, 0)


HELD_BYTES_MIN = 32 * MIB
"""When the changes of a pass reach this size, they are passed to `hold`."""


class Changes:
    """The changes so far, pass by pass.

    Args:
        hold: see `ShardResult.hold`.
        held_bytes_min: size at which changes are passed to `hold`; 0 takes `HELD_BYTES_MIN`.
    """

    def __init__(
        self,
        schemas: Mapping[str, StateSchema],
        hold: Callable[[str, pa.RecordBatch], pa.RecordBatch] | None = None,
        held_bytes_min: int = 0,
    ) -> None:
        self._schemas = schemas
        self._hold = hold
        self._held_bytes_min = held_bytes_min or HELD_BYTES_MIN
        self._current: dict[str, list[pa.RecordBatch]] = {}
        self._current_bytes = 0
        self._held: dict[str, list[pa.RecordBatch]] = {}
        # Per state the changes of the passes, the newest first.
        self._newest_first: dict[str, list[list[pa.RecordBatch]]] = {}
        self.rows_added = 0

    def add(self, changed: Iterable[tuple[str, Changed]], rows_added: int) -> None:
        """Record the changes of a slice: per state sorted rows, and the live rows gained.

        Slices between two calls of `seal` have different keys in order of their hashes.
        """
        for name, rows in changed:
            for batch in batches_of(rows):
                if batch.num_rows:
                    self._current.setdefault(name, []).append(batch)
                    self._current_bytes += batch.nbytes
        self.rows_added += rows_added
        if self._hold is not None and self._current_bytes >= self._held_bytes_min:
            for name, batches in self._current.items():
                held = self._hold(name, concat(batches, self._schemas[name].arrow))
                self._held.setdefault(name, []).append(held)
            self._current, self._current_bytes = {}, 0

    def seal(self) -> bool:
        """End a pass: the next one sees its changes.

        Returns:
            Whether it changed anything.
        """
        changed = {**self._held, **self._current}
        for name in changed:
            last = self._current.get(name)
            rest = [concat(last, self._schemas[name].arrow)] if last else []
            self._newest_first.setdefault(name, []).insert(0, [*self._held.get(name, ()), *rest])
            self._merge(name)
        self._current, self._current_bytes, self._held = {}, 0, {}
        return bool(changed)

    def _merge(self, name: str) -> None:
        """Merge passes with about the same number of changes, as a log-structured tree does: otherwise a key with a
        thousand pieces, each a pass, would be looked up in a thousand layers."""
        passes = self._newest_first[name]
        while len(passes) > 1 and len(passes[0]) == len(passes[1]) == 1:
            newer, older = passes[0][0], passes[1][0]
            if older.num_rows > 2 * newer.num_rows or newer.nbytes + older.nbytes >= self._held_bytes_min:
                return
            passes[:2] = [[fold([newer, older], self._schemas[name], drop_deleted=False)]]

    def on_top(self, reader: StateReader) -> StateReader:
        """Return the state before the first pass with the changes of all ended passes."""
        for name, passes in self._newest_first.items():
            for batches in reversed(passes):
                reader = on_top(reader, {name: ChangedRows(tuple(batches))})
        return reader

    def folded(self) -> dict[str, Changed]:
        """Return per state the changes of all passes. States that did not change have an empty batch."""
        return {
            name: self._folded(name, self._newest_first.get(name, []), schema) for name, schema in self._schemas.items()
        }

    def _folded(self, name: str, newest_first: list[list[pa.RecordBatch]], schema: StateSchema) -> Changed:
        if len(newest_first) == 1:
            batches = newest_first[0]
            return batches[0] if len(batches) == 1 else ChangedRows(tuple(batches))
        if all(len(batches) == 1 for batches in newest_first):
            return fold([batches[0] for batches in newest_first], schema, drop_deleted=False)
        # Range by range, as the longest pass was held.
        longest = max(newest_first, key=len)
        ends = [*(int(hashes_of(batch)[-1]) for batch in longest[:-1]), HASH_MAX]
        folded, low = [], 0
        for end in ends:
            parts = [slice_hash_range(b, low, end) for batches in newest_first for b in batches]
            batch = fold([part for part in parts if part.num_rows], schema, drop_deleted=False)
            folded.append(self._hold(name, batch) if self._hold is not None else batch)
            low = end + 1
        return ChangedRows(tuple(folded))


class SliceBody(Protocol):
    """An operator's processing of one slice: yields its output, and fills the slice's result while that is drained."""

    def __call__(
        self, rows: GroupedRows, reader: StateReader, result: ShardResult, *, due: bool
    ) -> Iterator[pa.RecordBatch]:
        """Process.

        Args:
            rows: may be empty if only due rows are processed.
            reader: the state with the changes of earlier passes.
            due: whether to process due rows too, on top of the changes of these rows.
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
    """Process a shard's slices one after the other, and its due rows with the last one.

    Args:
        emits_anew: the body's output for a key is obsolete if more of the key's rows follow.

    Returns:
        The result, which is filled when its output is drained. If the slices end before the last one, no due rows were
        processed.
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
    changes = Changes(schemas, result.hold)
    seen = reader
    for number, piece in enumerate(_without_rest(slices)):
        if piece.is_last and number == 0:
            yield from body(piece.rows, reader, result, due=True)
            return
        if piece.begins_pass and number and changes.seal():
            seen = changes.on_top(reader)
        part = ShardResult(iter(()), sides=result.sides)
        emitted = body(piece.rows, seen, part, due=False)
        if emits_anew and piece.goes_on:
            for _ in emitted:  # draining it fills the result
                continue
        else:
            yield from emitted
        _take(part, changes, result)
        if piece.is_last:
            changes.seal()
            part = ShardResult(iter(()), sides=result.sides)
            yield from body(without_rows(piece.rows), changes.on_top(reader), part, due=True)
            _take(part, changes, result)
    changes.seal()
    result.changes = changes.folded()


def _without_rest(slices: Iterable[RowSlice]) -> Iterator[RowSlice]:
    """Split a key that has more rows than are held at once into further passes, each over some of its rows."""
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
