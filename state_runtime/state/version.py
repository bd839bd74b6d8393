"""A version of a shard's states, open for reading: sorted runs, newest first, perhaps with a bottom below them.

The runs are Arrow batches, most of them mapped files. Every method asks each run once for all keys, newest first. A row
is hidden by a newer row of its identity, by a clear marker of its key in a newer run, and once it has expired.

Below the runs there may be a *bottom*: any other `StateReader`, older than every run. So a backend without runs
implements `overlaid` by putting changes on top of itself: `OpenVersion.on_top_of(self, changes, schemas, now_ms)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.base.errors import check
from state_runtime.base.limits import MIB
from state_runtime.state.answers import Answers
from state_runtime.state.cursors import Cursor, RunCursor, StreamCursor
from state_runtime.state.one_key import FoundInRuns
from state_runtime.state.pieces import Piece, RunData, Wanted, rows_of_piece
from state_runtime.state.reader import EntryFinder, EntryView, StateReader
from state_runtime.state.runs import Layout, RunFile, Version, add_run
from state_runtime.state.search import hash_ranges
from state_runtime.state.table import (
    CLEAR_MARKER,
    HASH_MAX,
    Hashes,
    Mask,
    Positions,
    StateSchema,
    bounded_slices,
    concat,
    entries_of,
    expired,
    fold,
    hashes_of,
    int64_values,
    interleaved,
    ranges,
    same_keys,
    slice_hash_range,
)

__all__ = ["OpenVersion"]

# `next_due` skips rows that were removed since, but at most this number: tens of milliseconds.
_STALE_ROWS_MAX = 65_536
_STALE_ROWS_FIRST = 256
_FOLDED_BYTES_MAX = 32 * MIB
"""Rows of all runs that are folded at a time where all rows of a state are read."""


class OpenVersion:
    """A version's runs, ready for look-up: a `StateReader`. Values of mapped batches stay valid after files are
    unlinked.

    Attributes:
        version: its description; in memory only, any id is allowed.
        mapped: per state the files' rows by file name.
        tidied_for: the version that the outputs of this one's merges belong to; empty without outputs.
    """

    def __init__(
        self,
        version: Version,
        mapped: Mapping[str, Mapping[str, RunData]],
        schemas: Mapping[str, StateSchema],
        now_ms: int = 0,
        bottom: StateReader | None = None,
    ) -> None:
        """Args:
        now_ms: batch time: rows that expire by then are hidden.
        bottom: older than every run; answers the rest. It has the same schemas and the same batch time.
        """
        self.version = version
        self.mapped = mapped
        self._schemas = schemas
        self._now_ms = now_ms
        self._bottom = bottom
        self._taken_below: Mapping[str, int] = {}  # per state the time up to which due rows of the bottom were handled
        self._pieces: dict[str, list[Piece]] = {}
        self.tidied_for = ""

    def tidied_as(
        self, version: str, layouts: Mapping[str, Layout], mapped: Mapping[str, Mapping[str, RunData]]
    ) -> OpenVersion:
        """Return the same state in other runs, which merges made for the next version."""
        tidied = self
        if layouts:
            described = replace(self.version, states={**self.version.states, **layouts})
            tidied = OpenVersion(described, {**self.mapped, **mapped}, self._schemas, self._now_ms, self._bottom)
            tidied._taken_below = self._taken_below
        tidied.tidied_for = version
        return tidied

    @staticmethod
    def of_batches(
        version: str, states: Mapping[str, pa.RecordBatch], schemas: Mapping[str, StateSchema], now_ms: int = 0
    ) -> OpenVersion:
        """Return a version that exists only in memory: freshly restored, or the empty state."""
        return OpenVersion(*_in_memory(version, states), schemas, now_ms)

    @staticmethod
    def on_top_of(
        bottom: StateReader,
        changes: Mapping[str, pa.RecordBatch],
        schemas: Mapping[str, StateSchema],
        now_ms: int,
        due_taken: Mapping[str, int] | None = None,
    ) -> OpenVersion:
        """Put changes in memory on top of any reader; see `StateReader.overlaid`.

        `next_due` uses the bottom's bound unchanged, even if the changes remove that row; only taken rows are skipped.
        """
        above = OpenVersion(*_in_memory("", changes), schemas, now_ms, bottom)
        above._taken_below = due_taken or {}
        return above

    def overlaid(
        self, changes: Mapping[str, pa.RecordBatch], due_taken: Mapping[str, int] | None = None
    ) -> OpenVersion:
        """Return this state with changes on top, in memory."""
        taken = due_taken or {}
        above = OpenVersion(self.version, self.mapped, self._schemas, self._now_ms, self._bottom)
        above._taken_below = {**self._taken_below, **{s: max(t, self._taken_below.get(s, t)) for s, t in taken.items()}}
        for state in self._schemas:
            pieces = self._pieces_of(state)
            if state in taken:
                pieces = [replace(piece, taken_ms=_later(piece.taken_ms, taken[state])) for piece in pieces]
            change = changes.get(state)
            if change is not None and change.num_rows:
                age = pieces[0].age - 1 if pieces else 0
                pieces = [Piece(age, change, RunData(change), 0, None), *pieces]
            above._pieces[state] = pieces
        return above

    def batches(self, state: str) -> list[pa.RecordBatch]:
        """Return the batches of a state's runs, newest first; those of one run have disjoint hash ranges. Without the
        bottom."""
        return [piece.batch for piece in self._pieces_of(state)]

    def whole(self, state: str) -> pa.RecordBatch:
        """See `StateReader.whole`."""
        schema = self._schemas[state]
        newest_first = [concat([p.batch for p in run], schema.arrow) for run in self._runs_of(state)]
        if self._bottom is not None:
            newest_first.append(self._bottom.whole(state))
        return fold(newest_first, schema, drop_deleted=True, now_ms=self._now_ms)

    def iter_rows(self, state: str) -> Iterator[pa.RecordBatch]:
        """See `StateReader.iter_rows`. Range by range, as the bottom gives its rows."""
        schema = self._schemas[state]
        newest_first = [piece.batch for piece in self._pieces_of(state)]
        low = 0
        for below in self._bottom.iter_rows(state) if self._bottom is not None else ():
            if below.num_rows:
                high = int(hashes_of(below)[-1])
                above = [slice_hash_range(batch, low, high) for batch in newest_first]
                yield from self._folded([*above, below], schema)
                low = high + 1
        if low <= HASH_MAX:
            yield from self._folded([slice_hash_range(batch, low, HASH_MAX) for batch in newest_first], schema)

    def _folded(self, newest_first: Sequence[pa.RecordBatch], schema: StateSchema) -> Iterator[pa.RecordBatch]:
        for parts in bounded_slices(newest_first, _FOLDED_BYTES_MAX):
            rows = fold(parts, schema, drop_deleted=True, now_ms=self._now_ms)
            if rows.num_rows:
                yield rows

    def _pieces_of(self, state: str) -> list[Piece]:
        if state not in self._pieces:
            pieces = []
            for age, run in enumerate(self.version.states.get(state, Layout()).runs):
                for file in run.pieces:
                    data = self.mapped[state][file.file]
                    first, end = rows_of_piece(data.batch, run, file)
                    batch = data.batch.slice(first, end - first)
                    if batch.num_rows:
                        pieces.append(Piece(age, batch, data, first, run.taken_ms))
            self._pieces[state] = pieces
        return self._pieces[state]

    def _runs_of(self, state: str) -> Iterator[list[Piece]]:
        for _, pieces in groupby(self._pieces_of(state), key=lambda piece: piece.age):
            yield list(pieces)

    # --- look-up -------------------------------------------------------------------------------------------------

    def find(
        self, state: str, hashes: Hashes, keys: Sequence[pa.Array], columns: Sequence[str] | None = None
    ) -> tuple[Mask, list[pa.Array]]:
        """See `StateReader.find`."""
        return self._find(state, Wanted(hashes, keys), columns)

    def find_entries(
        self,
        state: str,
        hashes: Hashes,
        keys: Sequence[pa.Array],
        entries: Hashes,
        entry_columns: Sequence[pa.Array],
    ) -> tuple[Mask, list[pa.Array]]:
        """See `StateReader.find_entries`."""
        return self._find(state, Wanted(hashes, keys, entries, entry_columns), None)

    def _find(self, state: str, wanted: Wanted, columns: Sequence[str] | None) -> tuple[Mask, list[pa.Array]]:
        schema = self._schemas[state]
        asked_for = schema.answers(columns)
        answers = Answers(len(wanted.hashes))
        # The rows that no run has answered yet.
        still_open = np.arange(len(wanted.hashes))
        for run in self._runs_of(state):
            if len(still_open) == 0:
                break
            still_open = self._ask_run(run, schema, wanted, still_open, asked_for, answers)
        if self._bottom is not None and len(still_open):
            rest = wanted.take(still_open)
            if rest.entries is None:
                found, values = self._bottom.find(state, rest.hashes, rest.keys, columns)
            else:
                found, values = self._bottom.find_entries(
                    state, rest.hashes, rest.keys, rest.entries, rest.entry_columns
                )
            there = np.flatnonzero(found)
            answers.add(still_open[there], values, there)
        return answers.found, answers.columns([schema.arrow.types[number] for number in asked_for])

    def _ask_run(
        self,
        run: Sequence[Piece],
        schema: StateSchema,
        wanted: Wanted,
        still_open: Positions,
        asked_for: Sequence[int],
        answers: Answers,
    ) -> Positions:
        """Look rows up in the pieces of one run, whose ranges are neighbours. Return the rows still open after it."""
        hashes = wanted.hashes if len(still_open) == len(wanted.hashes) else wanted.hashes[still_open]
        stays = np.ones(len(still_open), dtype=np.bool_)
        for piece in run:
            inside = piece.inside(hashes)
            if inside.start == inside.stop:
                continue
            asked = still_open[inside]
            said = piece.ask(schema, wanted, asked)
            # A tombstone ends the search for its row like a value.
            stays[said.answered + inside.start] = False
            rows, at = asked[said.found], said.at
            live = self._live_at(piece.batch, schema, at)
            if live is not None:
                rows, at = rows[live], at[live]
            answers.add(rows, [piece.batch.column(number) for number in asked_for], at)
        return still_open[stays]

    def _live_at(self, batch: pa.RecordBatch, schema: StateSchema, at: Positions) -> Mask | None:
        """Return which rows at some positions are neither removed nor expired; None if all are."""
        live = None
        if pc.any(batch.column(1)).as_py():
            live = np.logical_not(batch.column(1).take(pa.array(at)).to_numpy(zero_copy_only=False))
        if schema.time == "expires":
            there = ~expired(schema.times_of(batch).take(pa.array(at)), self._now_ms)
            live = there if live is None else live & there
        return live

    def entry_bounds(self, state: str, hashes: Hashes) -> Positions:
        """See `StateReader.entry_bounds`."""
        bounds = np.zeros(len(hashes), dtype=np.int64)
        for piece in self._pieces_of(state):
            inside = piece.inside(hashes)
            bounds[inside] += hash_ranges(hashes_of(piece.batch), hashes[inside])[1]
        return bounds if self._bottom is None else bounds + self._bottom.entry_bounds(state, hashes)

    # --- whole keys ----------------------------------------------------------------------------------------------

    def read_entries(self, state: str, hashes: Hashes, keys: Sequence[pa.Array]) -> tuple[pa.RecordBatch, Positions]:
        """See `StateReader.read_entries`."""
        schema = self._schemas[state]
        distinct = hashes if _ascends(hashes) else np.unique(hashes)
        newest_first: list[pa.RecordBatch] = []
        for group in self._runs_of(state):
            # The pieces of a run have ascending hash ranges, so the rows read of them are one sorted batch.
            read = []
            for piece in group:
                inside = piece.inside(distinct)
                if inside.start < inside.stop:
                    starts, counts = hash_ranges(hashes_of(piece.batch), distinct[inside])
                    read.append(piece.batch.take(pa.array(ranges(starts, counts))))
            newest_first.append(concat(read, schema.arrow))
        if self._bottom is not None:
            below, _ = self._bottom.read_entries(state, hashes, keys)
            if len(distinct) < len(hashes):
                below = below.take(pa.array(np.lexsort((entries_of(below), hashes_of(below)))))
            newest_first.append(below)
        rows = fold(newest_first, schema, drop_deleted=True, now_ms=self._now_ms)
        return _by_key(rows, schema, hashes, keys)

    def iter_entries(
        self, state: str, key_hash: int, key: Sequence[pa.Array], rows_max: int
    ) -> Iterator[pa.RecordBatch]:
        """See `StateReader.iter_entries`. About `rows_max` rows of each run are in private memory at a time."""
        check(rows_max > 0, f"rows_max is {rows_max}")
        schema = self._schemas[state]
        runs, cleared = self._rows_of_hash(state, key_hash, key)
        cursors: list[Cursor] = [RunCursor(rows, rows_max) for rows in runs]
        if self._bottom is not None and not cleared:
            cursors.append(StreamCursor(self._bottom.iter_entries(state, key_hash, key, rows_max)))
        while ends := [last for cursor in cursors if (last := cursor.last()) is not None]:
            # Up to here every run's rows are in memory.
            cut = min(ends)
            newest_first = [cursor.take_through(cut) for cursor in cursors]
            rows = fold([b for b in newest_first if b is not None], schema, drop_deleted=True, now_ms=self._now_ms)
            own = _of_key(schema, rows, key)
            rows = rows if bool(own.all()) else rows.filter(pa.array(own))
            for start in range(0, rows.num_rows, rows_max):
                yield rows.slice(start, rows_max)

    def entry_finder(
        self, state: str, key_hash: int, key: Sequence[pa.Array], view: Callable[[pa.RecordBatch], EntryView]
    ) -> EntryFinder:
        """See `StateReader.entry_finder`."""
        runs, cleared = self._rows_of_hash(state, key_hash, key)
        below = None
        if self._bottom is not None and not cleared:
            below = self._bottom.entry_finder(state, key_hash, key, view)
        return FoundInRuns(self._schemas[state], runs, key, view, self._now_ms, below)

    def _rows_of_hash(self, state: str, key_hash: int, key: Sequence[pa.Array]) -> tuple[list[pa.RecordBatch], bool]:
        """Return each run's rows of one hash, newest run first, without clear markers and without a copy.

        Returns:
            The rows, and whether the key was cleared: then older rows do not count, and are left out.
        """
        schema = self._schemas[state]
        hashes = np.array([key_hash], dtype=np.uint64)
        runs = []
        for piece in self._pieces_of(state):
            starts, counts = hash_ranges(hashes_of(piece.batch), hashes)
            if counts[0] == 0:
                continue
            rows = piece.batch.slice(int(starts[0]), int(counts[0]))
            markers = int(np.searchsorted(entries_of(rows), np.uint64(CLEAR_MARKER), side="right"))
            runs.append(rows.slice(markers))
            if bool(_of_key(schema, rows.slice(0, markers), key).any()):
                return runs, True
        return runs, False

    # --- due rows ------------------------------------------------------------------------------------------------

    def due(self, state: str, through_ms: int) -> pa.RecordBatch:
        """See `StateReader.due`. The cost depends on the due rows, not on the stored ones."""
        schema = self._schemas[state]
        found: list[pa.RecordBatch] = []
        for piece in self._pieces_of(state):
            if not piece.data.is_indexed:
                # Rows that an epoch has just written are rarely due in it: no index is made for them.
                earliest = piece.earliest_due()
                if earliest is None or earliest > through_ms:
                    continue
            rows = piece.rows_at(piece.due_between(piece.taken_ms, through_ms))
            found.append(self._not_superseded(state, rows, piece.age))
        if self._bottom is not None:
            below = self._bottom.due(state, through_ms)
            if (taken_ms := self._taken_below.get(state)) is not None:
                below = below.filter(pa.array(int64_values(schema.times_of(below)) > taken_ms))
            found.append(self._not_superseded(state, below, None))
        return interleaved(found, schema)

    def next_due(self, state: str, after_ms: int | None = None) -> int | None:
        """See `StateReader.next_due`.

        Rows that were removed or got another time since are skipped, up to a limit.
        """
        below = _later(after_ms, self._taken_below.get(state))
        earliest = self._bottom.next_due(state, below) if self._bottom is not None else None
        for piece in self._pieces_of(state):
            if after_ms is not None:
                piece = replace(piece, taken_ms=_later(piece.taken_ms, after_ms))
            found = self._next_due_of(state, piece, earliest)
            if found is not None and (earliest is None or found < earliest):
                earliest = found
        return earliest

    def _next_due_of(self, state: str, piece: Piece, before_ms: int | None) -> int | None:
        """Return a lower bound of the earliest due in one piece; None if no row is due, or none before `before_ms`."""
        if not piece.data.is_indexed and piece.taken_ms is None and piece.age == self._pieces_of(state)[0].age:
            # Nothing hides the newest rows, and an epoch calls this for its own changes, which have no index yet.
            return piece.earliest_due()
        order, due = piece.data.due_order, piece.data.due
        place = 0 if piece.taken_ms is None else piece.due_between(None, piece.taken_ms).stop
        limit = min(len(order), place + _STALE_ROWS_MAX)
        step = _STALE_ROWS_FIRST
        while place < limit:
            if before_ms is not None and int(due[order[place]]) >= before_ms:
                return None
            end = min(place + step, limit)
            rows = self._not_superseded(state, piece.rows_at(slice(place, end)), piece.age)
            if rows.num_rows:
                return int(int64_values(self._schemas[state].times_of(rows)).min())
            place, step = end, 4 * step
        return int(due[order[place]]) if place < len(order) else None

    def _not_superseded(self, state: str, rows: pa.RecordBatch, age: int | None) -> pa.RecordBatch:
        """Select those sorted rows of a run of some age (None: the bottom) that no newer run removes or replaces."""
        schema = self._schemas[state]
        newer = [piece for piece in self._pieces_of(state) if age is None or piece.age < age]
        if rows.num_rows == 0 or not newer:
            return rows
        wanted = Wanted(
            hashes_of(rows),
            schema.keys_of(rows),
            None if schema.entries is None else entries_of(rows),
            schema.entry_columns_of(rows),
        )
        kept = np.arange(rows.num_rows)
        for piece in newer:
            inside = piece.inside(wanted.hashes[kept])
            if inside.start < inside.stop:
                said = piece.ask(schema, wanted, kept[inside])
                kept = np.delete(kept, said.answered + inside.start)
        return rows if len(kept) == rows.num_rows else rows.take(pa.array(kept))


def _in_memory(version: str, states: Mapping[str, pa.RecordBatch]) -> tuple[Version, dict[str, dict[str, RunData]]]:
    layouts = {
        state: add_run(Layout(), RunFile(state, batch.num_rows, batch.nbytes, "")) if batch.num_rows else Layout()
        for state, batch in states.items()
    }
    return Version(version, "", layouts), {state: {state: RunData(batch)} for state, batch in states.items()}


def _later(left: int | None, right: int | None) -> int | None:
    """Return the later of two bounds; None means no bound."""
    return right if left is None else left if right is None else max(left, right)


def _of_key(schema: StateSchema, rows: pa.RecordBatch, key: Sequence[pa.Array]) -> Mask:
    """Return which rows are of a key, and not of another one with its hash."""
    repeated = pa.array(np.zeros(rows.num_rows, dtype=np.int64))
    return same_keys(schema.keys_of(rows), [k.take(repeated) for k in key])


def _ascends(hashes: Hashes) -> bool:
    return len(hashes) < 2 or bool(np.all(hashes[:-1] < hashes[1:]))


def _by_key(
    rows: pa.RecordBatch, schema: StateSchema, hashes: Hashes, keys: Sequence[pa.Array]
) -> tuple[pa.RecordBatch, Positions]:
    """Bring rows sorted by (hash, entry) into order of the wanted keys, and return where each key's rows begin.

    Rows of other keys, which only share a hash with a wanted one, are left out.
    """
    stored = hashes_of(rows)
    first, counts = hash_ranges(stored, hashes)
    # Candidates: every row for every wanted key of its hash.
    at = ranges(first, counts)
    key = np.repeat(np.arange(len(hashes)), counts)
    same_place = len(at) == rows.num_rows and _ascends(hashes)
    candidates = rows if same_place else rows.take(pa.array(at))
    picked = pa.array(key)
    same = same_keys(schema.keys_of(candidates), [k.take(picked) for k in keys])
    if not bool(same.all()):
        candidates, key = candidates.filter(pa.array(same)), key[same]
    offsets = np.concatenate(([0], np.cumsum(np.bincount(key, minlength=len(hashes))))).astype(np.int64)
    return candidates, offsets
