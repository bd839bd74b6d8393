"""The as-of join, without a Python loop over rows or keys: to each row of the left stream the newest row of the right
one with the same key, as of the left row's time.

    of all right rows with   left.key = right.key  and  left.time - tolerance <= right.time <= left.time
    the one with the greatest right.time

It is `pandas.merge_asof` (backward) over streams, and Flink's temporal join by event time. A right row is a *version*
of its key: it holds from its time until the next one.

- A left row is answered once, when the watermark has reached its time: then no earlier version can come any more. So
  the answer does not depend on the order in which rows come.
- A left row without a version is emitted with nulls (left outer), or not at all (inner).
- Of several versions of one key and time the last one counts.
- A row with event time at or below the late watermark is dropped. A left row without event time has no version; a right
  one without it is dropped. A null key is equal to nothing.
- Of the versions that the watermark has reached, each key keeps the newest: left rows to come are later than the
  watermark. With a tolerance it goes, too, once no left row can reach it any more.

A left row's `due` is its time. A version is due at its own time, when it makes all earlier ones of its key obsolete;
the one that stays is due again when the tolerance has run out, or never.

The input holds both streams: see `processors/sides.py`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from state_runtime.base.joining import UNBOUNDED_US
from state_runtime.processors.builtin.interval_join_plan import LEFT, RIGHT, IntervalJoinPlan
from state_runtime.processors.builtin.stream_join import StreamJoin
from state_runtime.processors.event_time import Times, micros_of, millis_up, plus
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.operator import EpochClock, ShardResult
from state_runtime.processors.places import STORED_ROWS_PER_READ, Places
from state_runtime.processors.sides import SideRows
from state_runtime.state.reader import StateReader
from state_runtime.state.table import (
    Hashes,
    Mask,
    Positions,
    StateSchema,
    concat,
    entries_of,
    entry_of_time,
    first_of_groups,
    fold,
    hashes_of,
    in_order,
    removal_of,
)

__all__ = ["AsOfJoinOperator"]


@dataclass(frozen=True)
class _Keys:
    """The different keys of some stored rows, which come in order of their hashes.

    Attributes:
        rows: the stored rows, those of a key together.
        firsts: the place of each key's first row.
    """

    rows: pa.RecordBatch
    firsts: Positions
    hashes: Hashes
    keys: list[pa.Array]

    @staticmethod
    def of(rows: pa.RecordBatch, schema: StateSchema) -> _Keys:
        order, first = first_of_groups(hashes_of(rows), schema.keys_of(rows))
        rows = rows if order is None else rows.take(pa.array(order))
        firsts = np.flatnonzero(first)
        taken = pa.array(firsts)
        return _Keys(rows, firsts, hashes_of(rows)[firsts], [key.take(taken) for key in schema.keys_of(rows)])

    def pieces(self, reader: StateReader, state: str) -> Iterator[tuple[slice, pa.RecordBatch, Positions]]:
        """Yield the rows that a state has for these keys, for a bounded number of keys at a time.

        Yields:
            Which of the keys; their rows; and offsets, as `StateReader.read_entries` gives both.
        """
        piece = np.cumsum(reader.entry_bounds(state, self.hashes)) // STORED_ROWS_PER_READ
        ends = [*(np.flatnonzero(np.diff(piece)) + 1).tolist(), len(self.firsts)]
        begin = 0
        for end in ends:
            if begin < end:
                keys = [key.slice(begin, end - begin) for key in self.keys]
                yield slice(begin, end), *reader.read_entries(state, self.hashes[begin:end], keys)
            begin = end

    def of_keys(self, which: slice) -> tuple[pa.RecordBatch, Positions]:
        """Return the rows of some keys, and of each row the number of its key among those."""
        bounds = np.append(self.firsts, self.rows.num_rows)
        low, high = int(bounds[which.start]), int(bounds[which.stop])
        sizes = np.diff(bounds[which.start : which.stop + 1])
        return self.rows.slice(low, high - low), np.repeat(np.arange(len(sizes)), sizes)


@dataclass(frozen=True)
class AsOfJoinOperator(StreamJoin):
    """The operator; emits each left row once, in append mode. The range of time of its plan begins at minus the
    tolerance and ends at 0."""

    kind = "as-of-join"

    @staticmethod
    def values_of(plan: IntervalJoinPlan) -> Mapping[str, pa.Schema]:
        """See `StreamJoin.values_of`."""
        return {name: side.columns for name, side in plan.sides.items()}

    @property
    def modes(self) -> str:
        tolerance = "" if self._tolerance_us is None else f", at most {self._tolerance_us} µs before"
        return f"{self.plan.terms.how}, {self.plan.right_time} as of {self.plan.left_time}{tolerance}"

    @property
    def _tolerance_us(self) -> int | None:
        return None if self.plan.terms.lower_us == -UNBOUNDED_US else -self.plan.terms.lower_us

    def _run(
        self,
        clock: EpochClock,
        places: Places,
        rows: GroupedRows,
        version: StateReader,
        result: ShardResult,
        *,
        due: bool,
    ) -> Iterator[pa.RecordBatch]:
        changes = {name: schema.empty() for name, schema in self.state_schemas.items()}
        if rows.groups:
            left, right = (SideRows(self.plan.sides[name], self.plan.keys, rows) for name in ("left", "right"))
            changes[LEFT] = yield from self._waiting(left, places, clock, result)
            changes[RIGHT] = self._versions(right, version, clock, result)
            result.rows_added += changes[LEFT].num_rows
        if due:
            now = version.overlaid(changes)
            result.due_taken = {LEFT: clock.watermark_ms, RIGHT: clock.watermark_ms}
            answered = now.due(LEFT, clock.watermark_ms)
            yield from self._answers(answered, now)
            forgotten, kept = self._obsolete(now, clock)
            for name, newer in ((LEFT, [removal_of(answered, self._schema(LEFT))]), (RIGHT, [forgotten, kept])):
                changes[name] = fold([*newer, changes[name]], self._schema(name), drop_deleted=False)
            result.rows_added -= answered.num_rows + forgotten.num_rows
        result.changes.update(changes)

    def _schema(self, name: str) -> StateSchema:
        return self.state_schemas[name]

    # --- new rows ------------------------------------------------------------------------------------------------

    def _waiting(
        self, given: SideRows, places: Places, clock: EpochClock, result: ShardResult
    ) -> Generator[pa.RecordBatch, None, pa.RecordBatch]:
        """Return new left rows as the state has them; yield those that no version can have the time or key of."""
        keep, (micros, valid) = given.on_time(clock, result), given.times
        never = given.has_no_key[given.group]
        if valid is not None:
            never = never | ~valid
        _, keys, values = given.picked(keep & never)
        yield from self._emitted(keys, values, [pa.nulls(len(keys[0]), f.type) for f in self.plan.right], None)
        keep &= ~never
        hashes, keys, values = given.picked(keep)
        due = pa.array(millis_up(micros[keep]))
        return self._schema(LEFT).batch(hashes, None, keys, values, entries=places.next(len(hashes)), times=due)

    def _versions(
        self, given: SideRows, version: StateReader, clock: EpochClock, result: ShardResult
    ) -> pa.RecordBatch:
        """Return new versions as the state has them."""
        keep, (micros, valid) = given.on_time(clock, result), given.times
        keep &= ~given.has_no_key[given.group]
        if valid is not None:
            keep &= valid
        # Rows of a key come in source order, and the sort keeps it: of equal times the last row counts.
        at = np.flatnonzero(keep)
        at = at[np.lexsort((micros[at], given.group[at]))]
        same_key, same_time = (np.append(a[1:] == a[:-1], False)[: len(at)] for a in (given.group[at], micros[at]))
        keep[at[same_key & same_time]] = False
        hashes, keys, values = given.picked(keep)
        entries, due = entry_of_time(micros[keep]), millis_up(micros[keep])
        order = np.lexsort((entries, hashes))
        taken = pa.array(order)
        hashes, keys, entries = hashes[order], [key.take(taken) for key in keys], entries[order]
        found, _ = version.find_entries(RIGHT, hashes, keys, entries, [])
        result.rows_added += len(hashes) - int(np.count_nonzero(found))
        values = [value.take(taken) for value in values]
        return self._schema(RIGHT).batch(hashes, None, keys, values, entries=entries, times=pa.array(due[order]))

    # --- answers -------------------------------------------------------------------------------------------------

    def _answers(self, rows: pa.RecordBatch, reader: StateReader) -> Iterator[pa.RecordBatch]:
        """Yield left rows that are due, each with its version."""
        left = self._schema(LEFT)
        asked = _Keys.of(rows, left)
        for which, versions, offsets in asked.pieces(reader, RIGHT):
            some, group = asked.of_keys(which)
            newest = self._newest(
                group,
                self._times(some, LEFT),
                np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)),
                self._times(versions, RIGHT),
            )
            found = newest >= 0
            places = pa.array(newest, mask=~found)
            theirs = [column.take(places) for column in self._schema(RIGHT).values_of(versions)]
            yield from self._emitted(left.keys_of(some), left.values_of(some), theirs, found)

    def _newest(self, group: Positions, times: Times, version_group: Positions, version_times: Times) -> Positions:
        """Return for each left row the place of its version; -1: it has none.

        Args:
            group: of each left row the number of its key.
            version_group, version_times: the same of the versions.
        """
        versions = len(version_times)
        # In order of key and time, a version before the left rows of the same time.
        is_left = np.arange(versions + len(times)) >= versions
        order = np.lexsort((is_left, np.concatenate((version_times, times)), np.concatenate((version_group, group))))
        is_left = is_left[order]
        before = np.maximum.accumulate(np.where(is_left, -1, np.arange(len(order))))[is_left]
        row = order[is_left] - versions
        newest = np.full(len(times), -1, dtype=np.int64)
        newest[row[before >= 0]] = order[before[before >= 0]]
        found = np.flatnonzero(newest >= 0)
        is_its = version_group[newest[found]] == group[found]
        if self._tolerance_us is not None:
            is_its &= plus(version_times[newest[found]], self._tolerance_us) >= times[found]
        newest[found[~is_its]] = -1
        return newest

    def _times(self, rows: pa.RecordBatch, name: str) -> Times:
        side = self.plan.sides[name]  # type: ignore[index]  # both names of states are names of sides
        return micros_of(self._schema(name).values_of(rows)[side.columns.get_field_index(side.time)])[0]

    def _emitted(
        self, keys: Sequence[pa.Array], ours: Sequence[pa.Array], theirs: Sequence[pa.Array], found: Mask | None
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows of the output.

        Args:
            found: which of them have a version; None: none has one.
        """
        columns = [*keys, *ours, *theirs]
        if self.plan.terms.how == "inner":
            if found is None:
                return
            columns = [column.filter(pa.array(found)) for column in columns]
        for start in range(0, len(columns[0]), self.output_rows_per_batch):
            piece = [column.slice(start, self.output_rows_per_batch) for column in columns]
            yield pa.RecordBatch.from_arrays(piece, schema=self.output_schema)

    # --- versions that are obsolete ------------------------------------------------------------------------------

    def _obsolete(self, reader: StateReader, clock: EpochClock) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Return the removal of versions that no left row can have any more, and those that stay, with their new due
        time: of the keys with a version that is due."""
        schema = self._schema(RIGHT)
        asked = _Keys.of(reader.due(RIGHT, clock.watermark_ms), schema)
        removed, kept = [schema.empty()], [schema.empty()]
        for _, versions, offsets in asked.pieces(reader, RIGHT):
            group = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
            micros = self._times(versions, RIGHT)
            reached = np.flatnonzero(millis_up(micros) <= clock.watermark_ms)
            is_newest = np.append(group[reached][1:] != group[reached][:-1], True)[: len(reached)]
            stays = np.zeros(len(micros), dtype=np.bool_)
            stays[reached[is_newest]] = True
            until = None
            if self._tolerance_us is not None:
                until = millis_up(plus(micros, self._tolerance_us))
                stays &= until > clock.watermark_ms
            gone = np.zeros(len(micros), dtype=np.bool_)
            gone[reached] = True
            removed.append(removal_of(versions.filter(pa.array(gone & ~stays)), schema))
            rest = versions.filter(pa.array(stays))
            times = pa.nulls(rest.num_rows, pa.int64()) if until is None else pa.array(until[stays])
            kept.append(
                schema.batch(
                    hashes_of(rest), None, schema.keys_of(rest), schema.values_of(rest), entries=entries_of(rest),
                    times=times,
                )
            )  # fmt: skip
        return in_order(concat(removed, schema.arrow)), in_order(concat(kept, schema.arrow))
