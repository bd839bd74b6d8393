"""Processors for many keys at once: the interface for users who work on Arrow columns, and the operator that runs it.

A shard's rows are sorted by key for the look-up anyway, and the state of all its keys is looked up at once. Here both
are passed on as they are, so a key costs as much as a row in a numpy call. The built-in `latest_by` and `deduplicate`
use the same interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import partial
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from state_runtime.base.errors import InvalidData, InvalidPipeline
from state_runtime.processors.columns import fit_column
from state_runtime.processors.event_time import drop_late
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.guard import guarded, guarded_iterator
from state_runtime.processors.operator import EpochClock, RowSlice, ShardResult, TimeDomain, WokenWhenDue
from state_runtime.processors.places import Places
from state_runtime.processors.slices import process_slices
from state_runtime.processors.user.connected import ConnectedBatch, ConnectedInput, without_late
from state_runtime.processors.user.keyed_batch import KeyedBatch
from state_runtime.processors.user.keyed_collections import ListOf, MapOf
from state_runtime.snapshot.manifest import OperatorEntry, StateEntry, StateKind
from state_runtime.state.reader import StateReader
from state_runtime.state.table import StateSchema, Time, fold, hashes_of, removal_of

__all__ = [
    "PlannedState",
    "TimeMode",
    "TimedState",
    "VectorizedOperator",
    "VectorizedProcessor",
    "plan_states",
    "time_mode_of",
]

Rows: TypeAlias = "pa.Table | pa.RecordBatch | None"
Piece: TypeAlias = "Rows | Mapping[str, Rows]"
Output: TypeAlias = "Piece | Iterator[Piece] | Sequence[Piece]"
TimeMode: TypeAlias = Literal["none", "processing", "event"]
_DOMAINS: dict[Any, TimeDomain] = {"none": "", "processing": "processing", "event": "event"}


@dataclass(frozen=True)
class TimedState:
    """A state whose values have a time, for `VectorizedProcessor.states`.

    Attributes:
        schema: value columns, as Spark's DDL or a StructType.
        ttl_ms: a value expires this long after the batch that wrote it (in terms of `batch_time_ms`); every update
            renews it.
        due: `update(…, due=…)` sets when the key falls due, in milliseconds of the processor's time mode: see
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
        """The kind of time column that its rows have."""
        return "due" if self.due else "expires"


@dataclass(frozen=True)
class PlannedState:
    """A state as a processor declares it.

    Attributes:
        schema: of its values, as the user wrote it.
        key: of a map the schema of its keys.
    """

    schema: Any
    time: Time = ""
    ttl_ms: int | None = None
    kind: Literal["value", "list", "map"] = "value"
    key: Any = None


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

    `process` is called once per shard and epoch, on a fresh copy of the object: attributes that it sets are lost,
    the state is kept. Spark may repeat a task, so the result must follow from the batch alone (`batch.batch_time_ms`
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
    """The clock of `due`: "event" (the watermark), "processing" (the batch time), or "none" if no state has `due`."""

    @abstractmethod
    def states(self) -> Mapping[str, Any]:
        """Return the states by name, each with its value columns: Spark's DDL, a StructType, or either in a
        `TimedState`; or a `ListOf` or `MapOf` of them. Called once, when the job is built."""

    @abstractmethod
    def process(self, batch: Any) -> Output:
        """Handle the rows of one epoch; there is at least one.

        Args:
            batch: a `KeyedBatch`; a `ConnectedBatch` of streams that `StreamingJob.connect` brings together.

        Returns:
            Output as a table or record batch, a list or iterator of them (the method may be a generator), or None.
            Columns are matched by name with the declared output schema: a missing one is an error, others are ignored,
            types are converted if every value fits. An operator with side outputs gives a mapping of their names to
            such rows, in which "" is the main output: `{"": known, "unknown": rest}`.
        """

    def process_due(self, name: str, batch: Any) -> Output:
        """Handle the keys whose value in a state with `due` has fallen due: its time is at or below the watermark (or
        batch time). Called once per such state and epoch, after `process`, if keys are due, even if the epoch has no
        rows.

        A key whose time `process` has changed is included if the new time has come. Values that this call does not
        update are removed afterwards; an update with a time that has passed too makes the key due again in the next
        epoch.

        Args:
            batch: the keys; it has no rows (`rows` is empty, `sizes` are 0).

        Returns:
            Output, as `process`.
        """
        return None


def time_mode_of(processor: Any, uid: str) -> TimeMode:
    """Return the time mode of a processor.

    Raises:
        InvalidPipeline: its `time_mode` does not exist.
    """
    mode: Any = getattr(processor, "time_mode", "none")
    if mode not in _DOMAINS:
        raise InvalidPipeline(
            f"operator {uid!r}: time_mode of {type(processor).__name__} is {mode!r}; there are "
            f"{', '.join(map(repr, _DOMAINS))}"
        )
    known: TimeMode = mode
    return known


def plan_states(declared: Mapping[str, Any], processor: Any, uid: str) -> dict[str, PlannedState]:
    """Return the states that a processor's `states()` requests.

    Raises:
        InvalidPipeline: a state has `due`, and the processor has no time mode to measure it by.
    """
    planned: dict[str, PlannedState] = {}
    mode = time_mode_of(processor, uid)
    for name, state in declared.items():
        if not isinstance(state, TimedState):
            planned[name] = _untimed(state)
            continue
        if state.due and mode == "none":
            raise InvalidPipeline(
                f"operator {uid!r}: state {name!r} of {type(processor).__name__} has due=True, and its time_mode is "
                "'none'; set "
                'time_mode = "event" or "processing" in the class'
            )
        planned[name] = PlannedState(state.schema, state.time, state.ttl_ms)
    return planned


def _untimed(state: Any) -> PlannedState:
    if isinstance(state, MapOf):
        return PlannedState(state.schema, kind="map", key=state.key)
    return PlannedState(state.schema, kind="list") if isinstance(state, ListOf) else PlannedState(state)


class _Processes(Protocol):
    def process(self, batch: KeyedBatch) -> Output: ...


@dataclass(frozen=True)
class VectorizedOperator(WokenWhenDue):
    """An operator that runs a processor of `KeyedBatch`es: a user's or a built-in one.

    Attributes:
        kind: "vectorized" is user code, whose exceptions are reported as such.
        processor: as the user made it; every task gets its own copy through Spark's closure.
        state_ddl: Spark's DDL of each state's value columns, for the manifest.
        ttl_ms: of the states with a TTL.
        event_time: event-time column of the input, whose late rows are dropped; none if empty.
        modes: of a built-in operator, the settings that cannot change while it has state.
        outputs: schemas of its side outputs, by name.
        entry_ddl: Spark's DDL of the key columns of its maps.
        inputs: the two streams of a connected operator, by name; else none.
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
    outputs: Mapping[str, pa.Schema] = dataclass_field(default_factory=dict)
    inputs: Mapping[str, ConnectedInput] = dataclass_field(default_factory=dict)
    entry_ddl: Mapping[str, str] = dataclass_field(default_factory=dict)

    def entry(self) -> OperatorEntry:
        """Return the operator's description for manifests."""
        states = tuple(
            StateEntry(name, self._kind_of(name), ddl, self.entry_ddl.get(name, ""), self.state_schemas[name].time)
            for name, ddl in sorted(self.state_ddl.items())
        )
        mode = time_mode_of(self.processor, self.uid)
        return OperatorEntry(self.uid, self.kind, self.key_ddl, states, self.modes or ("" if mode == "none" else mode))

    def _kind_of(self, state: str) -> StateKind:
        entries = self.state_schemas[state].entries
        return "value" if entries is None else "map" if len(entries) else "list"

    @property
    def time_domain(self) -> TimeDomain:
        """Return the clock that the processor's `time_mode` names; that of events where late rows are dropped: the
        clock moves without rows, too, and what comes next is late by it."""
        is_by_time = self.event_time or any(each.side.drops_late for each in self.inputs.values())
        return "event" if is_by_time else _DOMAINS[time_mode_of(self.processor, self.uid)]

    def process(
        self,
        slices: Iterable[RowSlice],
        version: StateReader,
        clock: EpochClock,
        shard: int,
        initial: GroupedRows | None = None,
    ) -> ShardResult:
        """Call the processor once per slice with all keys that have rows, and once per state with all due keys."""
        body = partial(self._run, clock, Places(self.uid, clock), shard)
        return process_slices(slices, version, self.state_schemas, body)

    def _run(
        self,
        clock: EpochClock,
        places: Places,
        shard: int,
        rows: GroupedRows,
        version: StateReader,
        result: ShardResult,
        *,
        due: bool,
    ) -> Iterator[pa.RecordBatch]:
        guard: Callable[[Callable[[], Any]], Any] = (
            partial(guarded, self.uid, shard) if self.kind == "vectorized" else lambda call: call()
        )
        if self.inputs:
            rows = without_late(self.inputs, self.key_schema, rows, clock, result)
        else:
            rows = drop_late(rows, self.event_time, clock.late_watermark_ms, result)
        changes: dict[str, pa.RecordBatch] = {}
        if rows.groups:
            # If more rows follow, a built-in processor keeps what the watermark would remove until the due pass.
            now = clock if due or self.kind == "vectorized" else clock.held
            batch = self._batch(rows, version, now, places)
            yield from self._outputs(lambda: self.processor.process(batch), guard, result)
            self._keep(batch, changes, result)
        if due and self.time_domain:
            through = clock.watermark_ms if self.time_domain == "event" else clock.batch_time_ms
            for name, schema in self.state_schemas.items():
                if schema.time == "due":
                    yield from self._run_due(name, through, rows, version, clock, places, guard, changes, result)
        result.changes = changes

    def _batch(self, rows: GroupedRows, version: StateReader, clock: EpochClock, places: Places) -> KeyedBatch:
        given = (self.uid, self.key_schema, self.state_schemas, rows, version, clock, self.ttl_ms, places)
        return ConnectedBatch(*given).with_inputs(self.inputs) if self.inputs else KeyedBatch(*given)

    def _run_due(
        self,
        name: str,
        through_ms: int,
        rows: GroupedRows,
        version: StateReader,
        clock: EpochClock,
        places: Places,
        guard: Callable[[Callable[[], Any]], Any],
        changes: dict[str, pa.RecordBatch],
        result: ShardResult,
    ) -> Iterator[pa.RecordBatch]:
        """Process the due rows of one state, on top of the epoch's changes so far."""
        now = version.overlaid(changes) if changes else version
        due = now.due(name, through_ms)
        result.due_taken[name] = through_ms
        if due.num_rows == 0:
            return
        schema = self.state_schemas[name]
        handle = getattr(self.processor, "process_due", None)
        if handle is None:
            # A built-in processor: due rows are removed.
            self._add(name, removal_of(due, schema), changes)
            result.rows_added -= due.num_rows
            return
        none = np.zeros(due.num_rows, dtype=np.int64)
        keys = GroupedRows(
            rows=rows.rows.slice(0, 0),
            starts=none,
            stops=none,
            hashes=hashes_of(due),
            keys=schema.keys_of(due),
            sequence=none[:0],
        )
        batch = self._batch(keys, now, clock, places)
        batch.start_due(name, [*schema.values_of(due), schema.times_of(due)])
        yield from self._outputs(lambda: handle(name, batch), guard, result)
        batch.end_due(name)
        self._keep(batch, changes, result)

    def _keep(self, batch: KeyedBatch, changes: dict[str, pa.RecordBatch], result: ShardResult) -> None:
        """Add a call's changes to those of the calls before it."""
        changed, gained = batch.changes()
        for name, newer in changed.items():
            self._add(name, newer, changes)
        result.rows_added += gained

    def _add(self, name: str, newer: pa.RecordBatch, changes: dict[str, pa.RecordBatch]) -> None:
        older = [changes[name]] if name in changes else []
        changes[name] = fold([newer, *older], self.state_schemas[name], drop_deleted=False)

    def _outputs(
        self, call: Callable[[], Any], guard: Callable[[Callable[[], Any]], Any], result: ShardResult
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the main output of a call; those of side outputs go to the result."""
        for output, piece in self._pieces(guard(call), guard):
            schema = self.output_schema if not output else self._schema_of(output)
            for part in self._table(piece).to_batches(max_chunksize=self.output_rows_per_batch):
                if not part.num_rows:
                    continue
                declared = self._declared(part, output, schema)
                if output:
                    result.give(output, partial(_itself, declared))
                else:
                    yield declared

    def _schema_of(self, output: Any) -> pa.Schema:
        if output not in self.outputs:
            raise InvalidData(
                f"operator {self.uid!r}: process() gave rows for the output {output!r}; it has the main output '' and "
                f"{', '.join(map(repr, self.outputs)) or 'no other'}. Declare it: process(…, outputs={{{output!r}: …}})"
            )
        return self.outputs[output]

    def _pieces(self, produced: Any, guard: Callable[[Callable[[], Any]], Any]) -> Iterator[tuple[str, Any]]:
        """Yield what a call gave, piece by piece, with the names of the outputs."""
        pieces = produced if isinstance(produced, Iterator | Sequence) else [produced]
        for piece in guarded_iterator(pieces, guard):
            for output, one in piece.items() if isinstance(piece, Mapping) else (("", piece),):
                if one is not None:
                    yield output, one

    def _table(self, piece: Any) -> pa.Table:
        if isinstance(piece, pa.Table):
            return piece
        if isinstance(piece, pa.RecordBatch):
            return pa.Table.from_batches([piece])
        raise InvalidData(
            f"operator {self.uid!r}: process() gave a {type(piece).__name__}; return pyarrow tables or record batches "
            "(pa.table({…}), pa.Table.from_pandas(frame)), or a list or iterator of them"
        )

    def _declared(self, part: pa.RecordBatch, output: str, schema: pa.Schema) -> pa.RecordBatch:
        """Return the declared columns of an output, by name."""
        where = f"the output {output!r} of operator {self.uid!r}" if output else f"the output of operator {self.uid!r}"
        columns = []
        for field in schema:
            at = part.schema.get_all_field_indices(field.name)
            if len(at) != 1:
                raise InvalidData(
                    f"{where}: column {field.name!r} is declared, and the processor gave it "
                    f"{'twice' if at else 'not'}: it gave {', '.join(part.schema.names)}. Give every declared column "
                    "once"
                )
            columns.append(fit_column(part.column(at[0]), field, lambda: where))
        return pa.RecordBatch.from_arrays(columns, schema=schema)


def _itself(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch
