"""pyspark's own `StatefulProcessor`, both flavours, driven one shard at a time.

Spark asks its state store over a socket for every call of a state. Here the stored state of many keys is looked up at
once, user code works on Python values, and its changes are written together at the end.

Life cycle of an epoch in a shard, with a fresh copy of the processor: (1) `init`; (2) in a job's first epoch all rows
of the initial state; (3) `handleInputRows` once per key, in order of the key hashes; (4) `handleExpiredTimer` once per
due timer, in order of their times, for the timers that existed when (3) ended; (5) `close`, also after an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues

from state_runtime.base.errors import InvalidData, StillstateError
from state_runtime.base.usercode import described_class
from state_runtime.processors.columns import read_columns
from state_runtime.processors.event_time import drop_late
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.guard import user_error
from state_runtime.processors.operator import EpochClock, RowSlice, ShardResult, TimeDomain, WokenWhenDue
from state_runtime.processors.slices import Changes, slices_of, without_rows
from state_runtime.processors.user.due_timers import DueTimers, due_slices, too_early
from state_runtime.processors.user.handle import TIMERS, Handle, TimeMode, timers_schema
from state_runtime.processors.user.handler_input import (
    ITERABLES,
    FrameInput,
    HandlerInput,
    RowInput,
    refuse_returned,
    time_zone_of,
)
from state_runtime.processors.user.rows import row_class_of
from state_runtime.processors.user.user_errors import plain
from state_runtime.processors.user.value_codec import read_column
from state_runtime.snapshot.manifest import OperatorEntry, StateEntry, StateKind
from state_runtime.state.reader import StateReader
from state_runtime.state.table import StateSchema

__all__ = ["SLICE_KEYS_MAX", "SLICE_ROWS_MAX", "StatefulProcessorOperator"]

SLICE_KEYS_MAX, SLICE_ROWS_MAX = 16_384, 50_000
"""Measured on a million rows of 500,000 keys. Larger slices take more memory (16,384 keys take a quarter of the memory
of a single slice) and also more time, because the objects of a slice then leave the processor's caches."""

_DOMAINS: Mapping[TimeMode, TimeDomain] = {"none": "", "processing": "processing", "event": "event"}


@dataclass(frozen=True)
class StatefulProcessorOperator(WokenWhenDue):
    """An operator that runs a user's `StatefulProcessor`.

    Attributes:
        state_schemas: of the declared states; the timers' is added in time modes that have timers.
        state_ddl: Spark's DDL of each state's value columns, for the manifest.
        processor: as the user made it; every task gets its own copy through Spark's closure.
        pandas: the flavour of `transformWithStateInPandas` (iterators of frames), else rows.
        state_kinds: "value", "list" or "map"; a state that is not listed is a value.
        entry_ddl: of maps, DDL of the map's key columns.
        ttls_ms: of states with a TTL.
        dropped: names passed to `deleteIfExists`.
        time_mode: the clock that timers and TTLs follow.
        output_mode: append, update or complete; only recorded.
        event_time_column: of the input, the column that its watermark refers to; empty if there is none.
        output_event_time: of the output, the column that the next operator's watermark refers to; empty if there is
            none.
        time_zone: of the session; empty for the zone in the input's timestamp types.
        frame_rows_max: rows of one frame.
        slice_keys_max, slice_rows_max: maximum keys and rows that are Python objects at once; one key may have more.
    """

    uid: str
    key_columns: tuple[str, ...]
    key_ddl: str
    key_schema: pa.Schema
    output_schema: pa.Schema
    state_schemas: Mapping[str, StateSchema]
    state_ddl: Mapping[str, str]
    processor: Any
    pandas: bool
    output_rows_per_batch: int
    frame_rows_max: int = 10_000
    state_kinds: Mapping[str, StateKind] = field(default_factory=dict)
    entry_ddl: Mapping[str, str] = field(default_factory=dict)
    ttls_ms: Mapping[str, int] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    time_mode: TimeMode = "none"
    output_mode: str = "update"
    event_time_column: str = ""
    output_event_time: str = ""
    time_zone: str = ""
    slice_keys_max: int = SLICE_KEYS_MAX
    slice_rows_max: int = SLICE_ROWS_MAX

    def __post_init__(self) -> None:
        if self.time_mode != "none":
            schemas = {**self.state_schemas, TIMERS: timers_schema(self.key_schema)}
            object.__setattr__(self, "state_schemas", schemas)

    def entry(self) -> OperatorEntry:
        """Return the operator's description for manifests."""
        states = [
            StateEntry(name, self.kind_of(name), ddl, self.entry_ddl.get(name, ""), self.state_schemas[name].time)
            for name, ddl in sorted(self.state_ddl.items())
        ]
        if self.time_mode != "none":
            states.append(StateEntry(TIMERS, "timers", "", "", "due"))
        modes = f"{self.time_mode}/{self.output_mode}"
        return OperatorEntry(self.uid, "stateful-processor", self.key_ddl, tuple(states), modes)

    def kind_of(self, state: str) -> StateKind:
        """Return the kind of a declared state."""
        return self.state_kinds.get(state, "value")

    @property
    def time_domain(self) -> TimeDomain:
        """The clock that timers follow."""
        return _DOMAINS[self.time_mode]

    def process(
        self,
        slices: Iterable[RowSlice],
        version: StateReader,
        clock: EpochClock,
        shard: int,
        initial: GroupedRows | None = None,
    ) -> ShardResult:
        """Call the user's code; `close()` is always called once `init()` has returned.

        Raises (while `outputs` is drained):
            UserCodeError: the processor raised; with its file and line, operator, shard and key hash.
            InvalidData, InvalidPipeline: it misused the handle or a state, or emitted values that do not fit.
        """
        result = ShardResult(iter(()))
        result.outputs = _Epoch(self, version, clock, shard, result).run(slices, initial)
        return result


class _Epoch:
    """One epoch of one shard: the passes over a processor, and their results."""

    def __init__(
        self,
        operator: StatefulProcessorOperator,
        reader: StateReader,
        clock: EpochClock,
        shard: int,
        result: ShardResult,
    ) -> None:
        self._operator = operator
        self._processor = operator.processor
        self._clock = clock
        self._shard = shard
        self._result = result
        self._stored = reader
        self._reader = reader
        self._changes = Changes(operator.state_schemas)  # made again in `run`, when `hold` is known
        self._pending: list[Any] = []  # outputs that do not yet fill a batch
        kinds = {name: operator.kind_of(name) for name in operator.state_ddl}
        self._handle = Handle(
            operator.uid,
            operator.state_schemas,
            kinds,
            operator.ttls_ms,
            operator.dropped,
            operator.time_mode,
            clock,
            shard,
            reader,
        )
        timeless = operator.time_mode == "none"
        self._timer_values = TimerValues(-1, -1) if timeless else TimerValues(clock.batch_time_ms, clock.watermark_ms)

    def run(self, slices: Iterable[RowSlice], initial: GroupedRows | None) -> Iterator[pa.RecordBatch]:
        """Run all passes in order; the result is filled when this is drained."""
        self._changes = Changes(self._operator.state_schemas, self._result.hold)
        self._call(self._processor.init, self._handle)
        self._handle.initialized()
        failed = True
        try:
            if initial is not None:
                self._initial_pass(initial)
            for number, piece in enumerate(slices):
                if piece.begins_pass and number:
                    self._seal()
                flavour = self._flavour(piece.rows.rows.schema)
                yield from self._input_slice(piece.rows, flavour, piece.rest)
                if piece.is_last:
                    has_timers = self._operator.time_mode != "none"
                    self._seal(more=has_timers)
                    if has_timers:
                        yield from self._timer_pass(flavour)
                yield from self._batches(self._pending, flavour)
                self._pending = []
            self._seal(more=False)
            failed = False
        finally:
            self._handle.closed()
            self._close(failed)
        self._result.changes = self._changes.folded()
        self._result.rows_added = self._changes.rows_added

    def _close(self, failed: bool) -> None:
        try:
            self._call(self._processor.close)
        except StillstateError:
            if not failed:
                raise  # else the first error is the one to report

    def _initial_pass(self, initial: GroupedRows) -> None:
        flavour = self._flavour(initial.rows.schema)
        handle_initial = self._processor.handleInitialState
        for piece in self._slices(initial):
            keys = flavour.keys(piece)

            def call(piece: GroupedRows = piece, keys: Sequence[Any] = keys) -> Iterator[list[Any]]:
                scope, timer_values = self._handle.scope, self._timer_values
                for group, (key, pieces) in enumerate(zip(keys, flavour.initial(piece))):
                    scope.group = group
                    for given in pieces:
                        handle_initial(key, given, timer_values)
                yield from ()

            self._enter(piece.hashes, piece.keys)
            for _ in self._guarded(call()):
                pass
            self._leave()
        self._seal()

    def _on_time(self, rows: GroupedRows) -> GroupedRows:
        operator = self._operator
        if operator.time_mode == "event" and operator.event_time_column:
            rows = drop_late(rows, operator.event_time_column, self._clock.late_watermark_ms, self._result)
        return rows

    def _of_one_key(self, first: GroupedRows, rest: Iterator[GroupedRows]) -> tuple[GroupedRows, Iterator[GroupedRows]]:
        """Return the first of a key's pieces that has rows which are not late, and the pieces after it."""
        pieces = (self._checked(first, piece) for piece in rest)
        on_time = (piece for piece in map(self._on_time, chain([first], pieces)) if piece.groups)
        return next(on_time, without_rows(first)), on_time

    def _checked(self, first: GroupedRows, piece: GroupedRows) -> GroupedRows:
        if piece.groups != 1 or not all(a.equals(b) for a, b in zip(first.keys, piece.keys)):
            raise InvalidData(
                f"operator {self._operator.uid!r}, shard {self._shard}: two keys share a hash, and their rows of one "
                "epoch are more than task_bytes_max; raise task_bytes_max, or let the source give fewer rows at a time"
            )
        return piece

    def _input_slice(
        self, rows: GroupedRows, flavour: HandlerInput, rest: Iterator[GroupedRows] | None
    ) -> Iterator[pa.RecordBatch]:
        """Process the rows of some keys; `rest` has the further rows of a key whose rows are not all held at once."""
        if rest is None:
            rows, more = self._on_time(rows), None
        else:
            rows, more = self._of_one_key(rows, rest)
        handle_input = self._processor.handleInputRows
        for piece in self._slices(rows):
            keys = flavour.keys(piece)

            def one_key(piece: GroupedRows) -> Iterator[Any]:
                return chain.from_iterable(flavour.inputs(piece))

            def call(piece: GroupedRows = piece, keys: Sequence[Any] = keys) -> Iterator[list[Any]]:
                scope, timer_values, most = self._handle.scope, self._timer_values, flavour.pending_max
                pending = self._pending
                for group, (key, given) in enumerate(zip(keys, flavour.inputs(piece))):
                    scope.group = group
                    if more is not None:
                        given = chain(given, chain.from_iterable(map(one_key, more)))
                    outputs = handle_input(key, given, timer_values)
                    if type(outputs) not in ITERABLES:
                        refuse_returned(outputs, handle_input, self._operator.uid)
                    pending.extend(outputs)
                    if len(pending) >= most:
                        yield pending
                        pending = self._pending = []

            self._enter(piece.hashes, piece.keys)
            yield from self._outputs(self._guarded(call()), flavour)
            self._leave()

    def _timer_pass(self, flavour: HandlerInput) -> Iterator[pa.RecordBatch]:
        operator, clock = self._operator, self._clock
        bound_ms = clock.batch_time_ms if operator.time_mode == "processing" else clock.watermark_ms
        schema = operator.state_schemas[TIMERS]
        # A snapshot: timers that user code registers or deletes from now on do not change it.
        due = self._reader.due(TIMERS, bound_ms)
        make_key = partial(tuple.__new__, row_class_of(operator.key_columns))
        for piece in due_slices(due, schema, operator.slice_keys_max):
            keys = list(map(make_key, zip(*read_columns(piece.keys, operator.key_columns, read_column, operator.uid))))
            self._enter(piece.hashes, piece.keys, piece.groups)
            yield from self._outputs(self._guarded(self._fire(piece, keys, flavour)), flavour)
            self._leave()
            self._seal()
        self._result.due_taken[TIMERS] = bound_ms

    def _fire(self, due: DueTimers, keys: Sequence[Any], flavour: HandlerInput) -> Iterator[list[Any]]:
        handle, timer_values = self._handle, self._timer_values
        scope, timers = handle.scope, handle.timers
        if timers is None:
            return
        handle_expired, operator_uid = self._processor.handleExpiredTimer, self._operator.uid
        pending = self._pending
        for place, (group, time_ms) in enumerate(zip(due.groups.tolist(), due.times_ms.tolist())):
            scope.group, scope.place = group, place
            expired = ExpiredTimerInfo(time_ms)
            outputs = handle_expired(key=keys[group], timerValues=timer_values, expiredTimerInfo=expired)
            if type(outputs) not in ITERABLES:
                refuse_returned(outputs, handle_expired, operator_uid)
            pending.extend(outputs)
            timers.delete(time_ms)
            if len(pending) >= flavour.pending_max:
                yield pending
                pending = self._pending = []

    # --- around user code ---

    def _flavour(self, schema: pa.Schema) -> HandlerInput:
        operator = self._operator
        if operator.pandas:
            zone = operator.time_zone or time_zone_of(schema)
            return FrameInput(
                operator.uid,
                operator.key_columns,
                operator.output_schema,
                operator.slice_rows_max,
                operator.frame_rows_max,
                zone,
            )
        return RowInput(
            operator.uid,
            operator.key_columns,
            operator.output_schema,
            operator.slice_rows_max,
            operator.output_rows_per_batch,
            described_class(type(self._processor)),
        )

    def _slices(self, rows: GroupedRows) -> Iterator[GroupedRows]:
        return slices_of(rows, self._operator.slice_keys_max, self._operator.slice_rows_max)

    def _enter(self, hashes: Any, keys: list[pa.Array], order: Any = None) -> None:
        self._handle.scope.enter(self._reader, hashes, keys, order)
        for state in self._handle.states.values():
            state.attach()

    def _leave(self) -> None:
        for state in self._handle.states.values():
            changed, rows_added = state.changes()
            self._changes.add([(state.name, changed)], rows_added)
        for state in self._handle.states.values():
            state.detach()
        self._handle.scope.leave()

    def _seal(self, *, more: bool = True) -> None:
        """End a pass. If more passes follow, they see its changes on top of the state."""
        if self._changes.seal() and more:
            self._reader = self._changes.on_top(self._stored)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Run user code that is not called for a key."""
        try:
            function(*arguments)
        except StillstateError as error:
            raise plain(error) from error
        except (Exception, SystemExit) as error:
            raise user_error(self._operator.uid, self._shard, error) from error

    def _guarded(self, pieces: Iterator[list[Any]]) -> Iterator[list[Any]]:
        """Yield the outputs of user code; its exceptions name the key's hash."""
        while True:
            try:
                piece = next(pieces, None)
            except StillstateError as error:
                raise plain(error) from error
            except (Exception, SystemExit) as error:
                scope = self._handle.scope
                key_hash = int(scope.hashes[scope.group]) if scope.group >= 0 else None
                raise user_error(self._operator.uid, self._shard, error, key_hash) from error
            if piece is None:
                return
            yield piece

    def _outputs(self, pieces: Iterator[list[Any]], flavour: HandlerInput) -> Iterator[pa.RecordBatch]:
        for outputs in pieces:
            yield from self._batches(outputs, flavour)

    def _batches(self, outputs: list[Any], flavour: HandlerInput) -> Iterator[pa.RecordBatch]:
        if not outputs:
            return
        for batch in flavour.batches(outputs):
            if self._operator.output_event_time:
                self._check_times(batch)
            yield batch

    def _check_times(self, batch: pa.RecordBatch) -> None:
        operator, late_ms = self._operator, self._clock.late_watermark_ms
        if too_early(batch, operator.output_event_time, late_ms):
            raise InvalidData(
                f"[EMITTING_ROWS_OLDER_THAN_WATERMARK_NOT_ALLOWED] operator {operator.uid!r}: it emitted a row whose "
                f"{operator.output_event_time!r} is not later than the watermark {late_ms} ms; a later operator would "
                "take it for late. Emit rows after the watermark"
            )
