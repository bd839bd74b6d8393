"""Many keys at once: the interface for users who work on Arrow columns, and the operator that drives it.

A shard's rows are sorted by key for the look-up anyway, and the state of all its keys is looked up at once. Here both
are handed over as they are, so the cost of a key is that of a row in a numpy call. The built-in `latest_by` and
`deduplicate` are written on the same interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from state_runtime.base.errors import InvalidData, InvalidPipeline
from state_runtime.processors.columns import fit_column
from state_runtime.processors.event_time import drop_late
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.guard import guarded, guarded_iterator
from state_runtime.processors.operator import EpochClock, RowSlice, ShardResult, TimeDomain, WokenWhenDue
from state_runtime.processors.slices import process_slices
from state_runtime.snapshot.manifest import OperatorEntry, StateEntry
from state_runtime.state.reader import StateReader
from state_runtime.state.table import Mask, Positions, StateSchema, Time, fold, hashes_of

__all__ = [
    "KeyedBatch",
    "KeyedState",
    "TimeMode",
    "TimedState",
    "VectorizedOperator",
    "VectorizedProcessor",
    "plan_states",
    "time_mode_of",
]

Array = TypeVar("Array", bound="np.ndarray[Any, Any]")
Piece: TypeAlias = "pa.Table | pa.RecordBatch | None"
Output: TypeAlias = "Piece | Iterator[Piece] | Sequence[Piece]"
TimeMode: TypeAlias = Literal["none", "processing", "event"]
_DOMAINS: dict[Any, TimeDomain] = {"none": "", "processing": "processing", "event": "event"}


@dataclass(frozen=True)
class TimedState:
    """A state whose values have a time, for `VectorizedProcessor.states`.

    Attributes:
        schema: value columns, as Spark's DDL or a StructType.
        ttl_ms: a value is gone so long after the batch that wrote it (in terms of `batch_time_ms`); every update renews
            it.
        due: `update(…, due=…)` says when the key's turn is, in milliseconds of the processor's time mode: see
            `process_due`.

    Raises:
        InvalidPipeline: a TTL below one millisecond, or both a TTL and `due`, or neither.
    """

    schema: Any
    ttl_ms: int | None = None
    due: bool = False

    def __post_init__(self) -> None:
        if self.ttl_ms is not None and self.ttl_ms < 1:
            raise InvalidPipeline(f"TimedState: ttl_ms={self.ttl_ms}; a value must live for at least 1 ms")
        if self.due == (self.ttl_ms is not None):
            raise InvalidPipeline("TimedState has either ttl_ms=… or due=True; for neither, name the schema alone")

    @property
    def time(self) -> Time:
        """Which time column its rows have."""
        return "due" if self.due else "expires"


class VectorizedProcessor(ABC):
    """Keyed state for all keys of a shard at once, in Arrow and numpy; give an instance to `KeyedStream.process`.

    Example:
        class Running(VectorizedProcessor):
            def states(self):
                return {"totals": "n long, total long"}

            def process(self, batch):
                amounts = batch.rows["amount"].fill_null(0).to_numpy()
                found, before = batch.state("totals")  # aligned with batch.keys; null where not found
                n = before["n"].fill_null(0).to_numpy() + batch.sizes
                total = before["total"].fill_null(0).to_numpy() + np.add.reduceat(amounts, batch.starts)
                batch.update("totals", {"n": n, "total": total})
                return pa.table({"name": batch.keys["name"], "n": n, "total": total})

    `process` is called once per shard and epoch, on a fresh copy of the object: attributes that it sets do not survive,
    the state does. Spark may repeat a task, so the result must follow from the batch alone (`batch.batch_time_ms`
    instead of the clock, no random numbers): then every attempt gives the same output and the same state.

    With a `time_mode`, state can fall due. Where Spark has a timer per key, here a value has a time, and all keys whose
    time has come are handled at once:

        class Silence(VectorizedProcessor):  # of each device, its last row, once nothing came for a minute after it
            time_mode = "event"

            def states(self):
                return {"last": TimedState("at timestamp", due=True)}

            def process(self, batch):
                at = batch.last_rows()["at"]
                batch.update("last", {"at": at}, due=pc.add(at.cast("int64"), 60_000_000).to_numpy() // 1000)

            def process_due(self, name, batch):
                return pa.table({"device": batch.keys["device"], "silent_since": batch.state(name).values["at"]})
    """

    time_mode: ClassVar[TimeMode] = "none"
    """What `due` is measured in: "event" (the watermark), "processing" (the batch time), or "none" where no state has
    one."""

    @abstractmethod
    def states(self) -> Mapping[str, Any]:
        """The states by name, each with its value columns: Spark's DDL, a StructType, or either in a `TimedState`.
        Asked once, when the job is built."""

    @abstractmethod
    def process(self, batch: KeyedBatch) -> Output:
        """Handle the rows of one epoch; there is at least one.

        Returns:
            Output as a table or record batch, a list or iterator of them (the method may be a generator), or None.
            Columns are
            matched by name with the declared output schema: a missing one is an error, others are ignored, types are
            converted where every value fits.
        """

    def process_due(self, name: str, batch: KeyedBatch) -> Output:
        """Handle the keys whose value in a state with `due` has fallen due: its time is at or below the watermark (or
        batch time). Called once per such state and epoch, after `process`, if there are any; also in epochs without
        rows.

        A key that `process` has given another time is there if that one has come. Values that this call does not update
        are removed afterwards; an update with a time that has passed too makes the key due again in the next epoch.

        Args:
            batch: the keys; it has no rows (`rows` is empty, `sizes` are 0, and `first_rows` does not work).

        Returns:
            Output, as `process`.
        """
        return None


def time_mode_of(processor: Any, uid: str) -> TimeMode:
    """The time mode of a processor.

    Raises:
        InvalidPipeline: its `time_mode` is not one that exists.
    """
    mode: Any = getattr(processor, "time_mode", "none")
    if mode not in _DOMAINS:
        raise InvalidPipeline(
            f"operator {uid!r}: time_mode of {type(processor).__name__} is {mode!r}; there are "
            f"{', '.join(map(repr, _DOMAINS))}"
        )
    known: TimeMode = mode
    return known


def plan_states(declared: Mapping[str, Any], processor: Any, uid: str) -> dict[str, tuple[Any, Time, int | None]]:
    """What a processor's `states()` asks for: of each state the schema, the time column and the TTL (ms).

    Raises:
        InvalidPipeline: a state has `due`, and the processor no time mode that would say when that is.
    """
    planned: dict[str, tuple[Any, Time, int | None]] = {}
    mode = time_mode_of(processor, uid)
    for name, state in declared.items():
        if not isinstance(state, TimedState):
            planned[name] = (state, "", None)
            continue
        if state.due and mode == "none":
            raise InvalidPipeline(
                f"operator {uid!r}: state {name!r} of {type(processor).__name__} has due=True, and its time_mode is "
                "'none'; set "
                'time_mode = "event" or "processing" in the class'
            )
        planned[name] = (state.schema, state.time, state.ttl_ms)
    return planned


class KeyedState(NamedTuple):
    """One state of a batch's keys, to be unpacked: `found, values = batch.state("totals")`.

    Attributes:
        found: whether the key has a value.
        values: the value columns, one row per key; null where it has none.
    """

    found: Mask
    values: pa.RecordBatch


class KeyedBatch:
    """The rows of one shard in one epoch, by key, and the state of their keys.

    A key's rows are neighbours, in source order; key number k has the rows `starts[k]` up to (without) `stops[k]`, and
    at least one. So `np.add.reduceat(column, batch.starts)` sums per key, and likewise with `np.maximum`,
    `np.logical_or`, … The order of the keys has no meaning. Equal keys are equal as in Spark's GROUP BY (null equals
    null, NaN equals NaN).

    Everything that is handed out is read-only; state changes only by `update` and `clear`, and `state` shows them at
    once.
    """

    def __init__(
        self,
        operator: str,
        key_schema: pa.Schema,
        schemas: Mapping[str, StateSchema],
        rows: GroupedRows,
        version: StateReader,
        clock: EpochClock,
        ttl_ms: Mapping[str, int],
    ) -> None:
        self._operator = operator
        self._key_schema = key_schema
        self._schemas = schemas
        self._rows = rows
        self._version = version
        self._ttl_ms = ttl_ms
        self._states: dict[str, _StateColumns] = {}
        self.batch_time_ms = clock.batch_time_ms
        """Spark's time of the batch, the same in every attempt of a task."""
        self.watermark_ms = clock.watermark_ms
        """Event time up to which everything should have come: the highest of earlier epochs minus the allowed delay; 0
        at first."""
        self.late_watermark_ms = clock.late_watermark_ms
        """The watermark of the epoch before; rows at or below it are too late. In time mode "event" they are not
        there."""

    def __repr__(self) -> str:
        return f"KeyedBatch({self.num_keys} keys, {self.rows.num_rows} rows)"

    @property
    def rows(self) -> pa.RecordBatch:
        """All input columns, the key columns too; equal keys together, a key's rows in source order."""
        return self._rows.rows

    @cached_property
    def keys(self) -> pa.RecordBatch:
        """The key columns, one row per key."""
        return pa.RecordBatch.from_arrays(self._rows.keys, schema=self._key_schema)

    @property
    def num_keys(self) -> int:
        """How many keys there are."""
        return self._rows.groups

    @cached_property
    def starts(self) -> Positions:
        """Of each key, the position of its first row."""
        return _frozen(self._rows.starts)

    @cached_property
    def stops(self) -> Positions:
        """Of each key, the position after its last row."""
        return _frozen(self._rows.stops)

    @cached_property
    def sizes(self) -> Positions:
        """Of each key, how many rows it has."""
        return _frozen(self._rows.stops - self._rows.starts)

    @cached_property
    def key_of_row(self) -> Positions:
        """Of each row, the number of its key."""
        return _frozen(np.repeat(np.arange(self.num_keys), self.sizes))

    @cached_property
    def row_in_key(self) -> Positions:
        """Of each row, how many rows of its key come before it in this batch."""
        return _frozen(np.arange(self.rows.num_rows) - np.repeat(self.starts, self.sizes))

    @cached_property
    def sequence(self) -> Positions:
        """Of each row, a number that orders the rows of all keys as the source had them (with gaps)."""
        return _frozen(self._rows.sequence)

    def per_row(self, values: Any) -> Any:
        """Repeat what there is once per key (numpy array, Arrow column or batch) for each of the key's rows.

        Raises:
            InvalidData: not one value per key.
        """
        if len(values) != self.num_keys:
            raise InvalidData(
                f"operator {self._operator!r}: per_row() got {len(values)} values for {self.num_keys} keys; give one "
                "per key"
            )
        return values[self.key_of_row] if isinstance(values, np.ndarray) else values.take(pa.array(self.key_of_row))

    def first_rows(self) -> pa.RecordBatch:
        """The first row of each key, aligned with `keys`."""
        return self.rows.take(pa.array(self.starts))

    def last_rows(self) -> pa.RecordBatch:
        """The last row of each key, aligned with `keys`."""
        return self.rows.take(pa.array(self.stops - 1))

    def state(self, name: str) -> KeyedState:
        """The state of all keys, aligned with `keys`; with what this call of `process` has changed so far.

        Raises:
            InvalidPipeline: `states()` does not name it.
        """
        columns = self._columns(name)
        # The time of a state that has one is the runtime's, behind the value columns.
        schema = columns.schema.values
        values = pa.RecordBatch.from_arrays(columns.values[: len(schema)], schema=schema)
        return KeyedState(_frozen(columns.found.copy()), values)

    def update(self, name: str, values: Any, where: Any = None, *, due: Any = None) -> None:
        """Set the state of all keys, or of those where a mask is true.

        Args:
            values: all value columns of the state: a mapping of names to numpy arrays or Arrow columns, a record batch
                or a table. One row per key; with `where` also one row per key for which it is true.
            where: booleans, one per key.
            due: of a state with `due`, when the keys fall due (ms): one integer for all, or a column like those of
                `values`, where null is never. None: never.

        Raises:
            InvalidData: a wrong column, length or type, or a value that does not fit.
            InvalidPipeline: `states()` does not name the state.
        """
        columns = self._columns(name)
        mask = self._mask(name, "update", where)
        fitted = self._fit(name, columns.schema.values, values, mask)
        count = self.num_keys if mask is None else int(np.count_nonzero(mask))
        columns.put(mask, [*fitted, *self._times(name, columns.schema.time, due, mask, count)])

    def clear(self, name: str, where: Any = None) -> None:
        """Remove the state of all keys, or of those where a mask is true; nothing happens where there is none.

        Raises:
            InvalidData: the mask is not one boolean per key.
            InvalidPipeline: `states()` does not name the state.
        """
        self._columns(name).clear(self._mask(name, "clear", where))

    def changes(self) -> tuple[dict[str, pa.RecordBatch], int]:
        """For the runtime: per state what changed, as a sorted batch, and the live rows gained."""
        batches: dict[str, pa.RecordBatch] = {}
        gained = 0
        for name, columns in self._states.items():
            batches[name] = columns.changes(self._rows)
            gained += int(np.count_nonzero(columns.found)) - int(np.count_nonzero(columns.existed))
        return batches, gained

    def start_due(self, name: str, values: list[pa.Array]) -> None:
        """For the runtime: the state of all keys is known, because it was found by its time."""
        self._states[name] = _StateColumns(self._schemas[name], np.ones(self.num_keys, dtype=np.bool_), values)

    def end_due(self, name: str) -> None:
        """For the runtime: what was due and was not given another value is removed."""
        columns = self._states[name]
        columns.clear(~columns.touched)

    def _columns(self, name: str) -> _StateColumns:
        if name not in self._schemas:
            raise InvalidPipeline(
                f"operator {self._operator!r} has no state {name!r}; states() names {', '.join(sorted(self._schemas))}"
            )
        if name not in self._states:
            found, values = self._version.find(name, self._rows.hashes, self._rows.keys)
            self._states[name] = _StateColumns(self._schemas[name], found, values)
        return self._states[name]

    def _mask(self, name: str, method: str, where: Any) -> Mask | None:
        if where is None:
            return None
        mask = np.asarray(where)
        if mask.dtype != np.bool_ or mask.shape != (self.num_keys,):
            raise InvalidData(
                f"operator {self._operator!r}, state {name!r}: {method}(where=…) needs {self.num_keys} booleans, one "
                "per key "
                f"and none null, not {mask.dtype} of shape {mask.shape}"
            )
        return mask

    def _fit(self, name: str, schema: pa.Schema, values: Any, mask: Mask | None) -> list[pa.Array]:
        """The columns of an update in the declared types and order, cut down to the keys of the mask."""
        where = f"operator {self._operator!r}, state {name!r}"
        given = _named_columns(values, where)
        if sorted(given) != sorted(schema.names):
            raise InvalidData(
                f"{where}: update() got the columns {', '.join(sorted(given)) or 'none'}; the state has "
                f"{', '.join(schema.names)}, and an update sets all of them"
            )
        count = self.num_keys if mask is None else int(np.count_nonzero(mask))
        return [self._fit_column(where, f, given[f.name], mask, count) for f in schema]

    def _fit_column(self, where: str, field: pa.Field, values: Any, mask: Mask | None, count: int) -> pa.Array:
        column = _as_column(values, field, where)
        if len(column) not in (count, self.num_keys):
            raise InvalidData(
                f"{where}: update() got {len(column)} values in column {field.name!r} for "
                f"{count} of {self.num_keys} keys; give one per key, or one per key of the mask"
            )
        if len(column) != count:
            column = column.filter(pa.array(mask))
        return fit_column(column, field, lambda: where)

    def _times(self, name: str, time: Time, due: Any, mask: Mask | None, count: int) -> list[pa.Array]:
        """The time column of an update, if the state has one."""
        where = f"operator {self._operator!r}, state {name!r}"
        if due is not None and time != "due":
            raise InvalidData(
                f"{where}: update() got due=…, and the state has none; declare it as TimedState(…, due=True)"
            )
        if time == "":
            return []
        if time == "expires":
            return [pa.array(np.full(count, self.batch_time_ms + self._ttl_ms[name]))]
        if due is None:
            return [pa.nulls(count, pa.int64())]
        if isinstance(due, int | np.integer):
            due = np.full(count, due)
        return [self._fit_column(where, pa.field("due", pa.int64()), due, mask, count)]


class _StateColumns:
    """One state of the batch's keys: what was stored, and what it is by now.

    Attributes:
        existed: which keys had a value when the epoch began.
        found: which have one now.
        values: the value columns now, and the time column if the state has one; null where there is none.
        touched: which were updated or cleared.
    """

    def __init__(self, schema: StateSchema, existed: Mask, values: list[pa.Array]) -> None:
        self.schema = schema
        self.existed = existed
        self.found = existed.copy()
        self.values = values
        self.touched = np.zeros(len(existed), dtype=np.bool_)

    def put(self, mask: Mask | None, values: list[pa.Array]) -> None:
        """New values, as many as the mask has true ones."""
        if mask is None:
            self.values = values
            self.found[:] = self.touched[:] = True
            return
        count = len(self.found)
        # Picking from old and new ones put together works for every type, nested ones too.
        at = np.arange(count)
        at[mask] = count + np.arange(np.count_nonzero(mask))
        picked = pa.array(at)
        self.values = [pa.concat_arrays([old, new]).take(picked) for old, new in zip(self.values, values)]
        self.found[mask] = self.touched[mask] = True

    def clear(self, mask: Mask | None) -> None:
        """No value any more."""
        gone = np.ones(len(self.found), dtype=np.bool_) if mask is None else mask
        kept = pa.array(np.arange(len(gone)), mask=gone)
        self.values = [column.take(kept) for column in self.values]
        self.found[gone] = False
        self.touched[gone] = True

    def changes(self, rows: GroupedRows) -> pa.RecordBatch:
        """What to log; clearing what was never stored leaves no trace."""
        changed = self.touched & (self.found | self.existed)
        gone = ~self.found
        hashes, keys, values = rows.hashes, rows.keys, self.values
        if not bool(changed.all()):
            at = np.flatnonzero(changed)
            taken = pa.array(at)
            hashes, gone = hashes[at], gone[at]
            keys, values = [k.take(taken) for k in keys], [v.take(taken) for v in values]
        times = values[-1] if self.schema.time else None
        return self.schema.batch(hashes, gone, keys, values[: len(self.schema.values)], times=times)


class _Processes(Protocol):
    def process(self, batch: KeyedBatch) -> Output: ...


@dataclass(frozen=True)
class VectorizedOperator(WokenWhenDue):
    """An operator around something that processes a `KeyedBatch`: a user's processor or a built-in one.

    Attributes:
        kind: "vectorized" is user code, whose exceptions are reported as such.
        processor: as the user made it; every task gets a copy of its own through Spark's closure.
        state_ddl: Spark's DDL of each state's value columns, for the manifest.
        ttl_ms: of the states with a TTL.
        event_time: event-time column of the input, whose late rows are dropped; none if empty.
        modes: of a built-in operator what cannot change while it has state.
    """

    uid: str
    key_columns: tuple[str, ...]
    key_ddl: str
    key_schema: pa.Schema
    output_schema: pa.Schema
    state_schemas: Mapping[str, StateSchema]
    state_ddl: Mapping[str, str]
    kind: Literal["vectorized", "latest-by", "deduplicate"]
    processor: _Processes
    output_rows_per_batch: int
    ttl_ms: Mapping[str, int] = dataclass_field(default_factory=dict)
    event_time: str = ""
    modes: str = ""

    def entry(self) -> OperatorEntry:
        """How a manifest describes the operator."""
        states = tuple(
            StateEntry(name, "value", ddl, time=self.state_schemas[name].time)
            for name, ddl in sorted(self.state_ddl.items())
        )
        mode = time_mode_of(self.processor, self.uid)
        return OperatorEntry(self.uid, self.kind, self.key_ddl, states, self.modes or ("" if mode == "none" else mode))

    @property
    def time_domain(self) -> TimeDomain:
        """As the processor's `time_mode` says."""
        return _DOMAINS[time_mode_of(self.processor, self.uid)]

    def process(
        self,
        slices: Iterable[RowSlice],
        version: StateReader,
        clock: EpochClock,
        shard: int,
        initial: GroupedRows | None = None,
    ) -> ShardResult:
        """Call the processor once per slice with all keys that have rows, and once per state with all that are due."""
        return process_slices(slices, version, self.state_schemas, partial(self._run, clock, shard))

    def _run(
        self, clock: EpochClock, shard: int, rows: GroupedRows, version: StateReader, result: ShardResult, *, due: bool
    ) -> Iterator[pa.RecordBatch]:
        guard: Callable[[Callable[[], Any]], Any] = (
            partial(guarded, self.uid, shard) if self.kind == "vectorized" else lambda call: call()
        )
        rows, result.late_rows = drop_late(rows, self.event_time, clock.late_watermark_ms)
        changes: dict[str, pa.RecordBatch] = {}
        if rows.groups:
            # A built-in one that knows its rows are not all leaves to what is due what the watermark would remove.
            now = clock if due or self.kind == "vectorized" else clock.held
            batch = KeyedBatch(self.uid, self.key_schema, self.state_schemas, rows, version, now, self.ttl_ms)
            yield from self._outputs(lambda: self.processor.process(batch), guard)
            self._keep(batch, changes, result)
        if due and self.time_domain:
            through = clock.watermark_ms if self.time_domain == "event" else clock.batch_time_ms
            for name, schema in self.state_schemas.items():
                if schema.time == "due":
                    yield from self._run_due(name, through, rows, version, clock, guard, changes, result)
        result.changes = changes

    def _run_due(
        self,
        name: str,
        through_ms: int,
        rows: GroupedRows,
        version: StateReader,
        clock: EpochClock,
        guard: Callable[[Callable[[], Any]], Any],
        changes: dict[str, pa.RecordBatch],
        result: ShardResult,
    ) -> Iterator[pa.RecordBatch]:
        """What is due in one state, on top of what the epoch has changed so far."""
        now = version.overlaid(changes) if changes else version
        due = now.due(name, through_ms)
        result.due_taken[name] = through_ms
        if due.num_rows == 0:
            return
        schema = self.state_schemas[name]
        due = due.take(pa.array(np.argsort(hashes_of(due), kind="stable")))
        none = np.zeros(due.num_rows, dtype=np.int64)
        keys = GroupedRows(
            rows=rows.rows.slice(0, 0),
            starts=none,
            stops=none,
            hashes=hashes_of(due),
            keys=schema.keys_of(due),
            sequence=none[:0],
        )
        batch = KeyedBatch(self.uid, self.key_schema, self.state_schemas, keys, now, clock, self.ttl_ms)
        batch.start_due(name, [*schema.values_of(due), schema.times_of(due)])
        handle = getattr(self.processor, "process_due", None)  # the built-in ones need none
        if handle is not None:
            yield from self._outputs(lambda: handle(name, batch), guard)
        batch.end_due(name)
        self._keep(batch, changes, result)

    def _keep(self, batch: KeyedBatch, changes: dict[str, pa.RecordBatch], result: ShardResult) -> None:
        """Add a call's changes to those of the calls before it."""
        changed, gained = batch.changes()
        for name, newer in changed.items():
            older = [changes[name]] if name in changes else []
            changes[name] = fold([newer, *older], self.state_schemas[name], drop_deleted=False)
        result.rows_added += gained

    def _outputs(self, call: Callable[[], Any], guard: Callable[[Callable[[], Any]], Any]) -> Iterator[pa.RecordBatch]:
        for piece in self._pieces(guard(call), guard):
            for part in self._table(piece).to_batches(max_chunksize=self.output_rows_per_batch):
                if part.num_rows:
                    yield self._declared(part)

    def _pieces(self, produced: Any, guard: Callable[[Callable[[], Any]], Any]) -> Iterator[Any]:
        pieces = produced if isinstance(produced, Iterator | Sequence) else [produced]
        for piece in guarded_iterator(pieces, guard):
            if piece is not None:
                yield piece

    def _table(self, piece: Any) -> pa.Table:
        if isinstance(piece, pa.Table):
            return piece
        if isinstance(piece, pa.RecordBatch):
            return pa.Table.from_batches([piece])
        raise InvalidData(
            f"operator {self.uid!r}: process() gave a {type(piece).__name__}; return pyarrow tables or record batches "
            "(pa.table({…}), pa.Table.from_pandas(frame)), or a list or iterator of them"
        )

    def _declared(self, part: pa.RecordBatch) -> pa.RecordBatch:
        """The declared columns, by name."""
        where = f"the output of operator {self.uid!r}"
        columns = []
        for field in self.output_schema:
            at = part.schema.get_all_field_indices(field.name)
            if len(at) != 1:
                raise InvalidData(
                    f"{where}: column {field.name!r} is declared, and process() gave it {'twice' if at else 'not'}: it "
                    "gave "
                    f"{', '.join(part.schema.names)}. Give every declared column once"
                )
            columns.append(fit_column(part.column(at[0]), field, lambda: where))
        return pa.RecordBatch.from_arrays(columns, schema=self.output_schema)


def _named_columns(values: Any, where: str) -> dict[str, Any]:
    """The columns of an update by name."""
    if isinstance(values, Mapping):
        return dict(values)
    if isinstance(values, pa.Table | pa.RecordBatch):
        if len(set(values.schema.names)) < len(values.schema.names):
            raise InvalidData(f"{where}: update() got a column twice: {', '.join(values.schema.names)}")
        return dict(zip(values.schema.names, values.columns))
    raise InvalidData(
        f'{where}: update() got a {type(values).__name__}; give {{"column": array, …}}, a record batch or a table'
    )


def _as_column(values: Any, field: pa.Field, where: str) -> pa.Array:
    """One column as an Arrow array of whatever type it has."""
    if isinstance(values, pa.ChunkedArray):
        if values.num_chunks == 1:
            return values.chunk(0)
        return pa.concat_arrays(values.chunks) if values.num_chunks else pa.nulls(0, values.type)
    if isinstance(values, pa.Array):
        return values
    try:
        if isinstance(values, str | bytes | Mapping):
            raise TypeError("not a column")
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        raise InvalidData(
            f"{where}: update() got a {type(values).__name__} for column {field.name!r} that Arrow makes no column of; "
            "give a one-dimensional numpy array or an Arrow array"
        ) from None  # Arrow's own message holds the value


def _frozen(array: Array) -> Array:
    """A view that cannot be written through: the runtime works on the same memory."""
    view: Array = array.view()
    view.flags.writeable = False
    return view
