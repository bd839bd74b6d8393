"""The handle of a `StatefulProcessor`, with the methods of pyspark's handle: one for the job's build, one for tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import pyarrow as pa

from state_runtime.base.errors import InvalidPipeline
from state_runtime.processors.operator import EpochClock
from state_runtime.processors.user.list_state import ListState
from state_runtime.processors.user.map_state import MapState
from state_runtime.processors.user.scope import Scope, SliceState
from state_runtime.processors.user.timer_state import TIMERS, Timers, timers_schema
from state_runtime.processors.user.user_errors import InvalidStateUse
from state_runtime.processors.user.value_state import value_state
from state_runtime.state.reader import StateReader
from state_runtime.state.table import StateSchema

__all__ = [
    "TIMERS",
    "DeclaringHandle",
    "Handle",
    "QueryInfo",
    "StateDeclaration",
    "TimeMode",
    "check_map_key",
    "check_state_name",
    "layout_of",
    "timers_schema",
]

TimeMode = Literal["none", "processing", "event"]
Kind = Literal["value", "list", "map"]

_SPARKS_TIME_MODE: Mapping[TimeMode, str] = {"none": "None", "processing": "ProcessingTime", "event": "EventTime"}


@dataclass(frozen=True)
class StateDeclaration:
    """A state as `init` requests it.

    Attributes:
        schema: of the value, or of an element: a StructType or Spark's DDL, not parsed yet.
        entry_schema: of a map's keys; None for the other kinds.
        ttl_ms: 0 for none.
    """

    name: str
    kind: Kind
    schema: Any
    entry_schema: Any = None
    ttl_ms: int = 0


@dataclass(frozen=True)
class QueryInfo:
    """The place where user code runs; the result of `getQueryInfo()`. Spark has it on the JVM only.

    Attributes:
        operator: uid of the operator.
        shard: the shard of the operator's state.
        snapshot_id: of the snapshot that the epoch will become.
    """

    operator: str
    shard: int
    snapshot_id: int


def layout_of(
    declaration: StateDeclaration, key_schema: pa.Schema, value: pa.Schema, entry: pa.Schema | None
) -> StateSchema:
    """Return how a declared state is stored.

    Args:
        key_schema: of the operator.
        value, entry: the declaration's schemas in Arrow's types; `entry` for maps only.

    Raises:
        InvalidPipeline: a map's key has a type that cannot be a map key.
    """
    time: Literal["", "expires"] = "expires" if declaration.ttl_ms else ""
    if declaration.kind == "value":
        return StateSchema(key_schema, value, None, time)
    if declaration.kind == "list":
        return StateSchema(key_schema, value, pa.schema([]), time)
    entry = entry if entry is not None else pa.schema([])
    check_map_key(declaration.name, entry)
    return StateSchema(key_schema, value, entry, time)


def check_map_key(state: str, key: pa.Schema) -> None:
    """Check that the key of a map can be hashed.

    Raises:
        InvalidPipeline: with the field.
    """
    for key_field in key:
        if not _has_hash(key_field.type):
            raise InvalidPipeline(
                f"state {state!r}: field {key_field.name!r} of the map's key has type {key_field.type}; it can be made "
                "of booleans, numbers, strings, binary, dates and timestamps, and of structs and arrays of them"
            )


def _has_hash(data_type: pa.DataType) -> bool:
    """Return whether a map's key can have this type: its entries are found by hash."""
    types = pa.types
    if types.is_struct(data_type) or types.is_list(data_type) or types.is_large_list(data_type):
        return all(_has_hash(data_type.field(i).type) for i in range(data_type.num_fields))
    plain = (types.is_boolean, types.is_signed_integer, types.is_floating, types.is_decimal128, types.is_string)
    rest = (types.is_large_string, types.is_binary, types.is_large_binary, types.is_date32, types.is_timestamp)
    return any(is_kind(data_type) for is_kind in plain + rest)


class DeclaringHandle:
    """The handle of `init` when the job is built: it only collects the states, as Spark's PRE_INIT does.

    Attributes:
        declared: the states that `init` requested and did not drop again.
        dropped: names passed to `deleteIfExists`.
    """

    def __init__(self, operator: str, time_mode: TimeMode = "none") -> None:
        self._operator = operator
        self._time_mode = time_mode
        self.declared: dict[str, StateDeclaration] = {}
        self.dropped: set[str] = set()

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> _Unusable:
        """Record the state."""
        return self._declare(StateDeclaration(stateName, "value", schema, None, self._ttl(stateName, ttlDurationMs)))

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> _Unusable:
        """Record the state."""
        return self._declare(StateDeclaration(stateName, "list", schema, None, self._ttl(stateName, ttlDurationMs)))

    def getMapState(
        self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: int | None = None
    ) -> _Unusable:
        """Record the state."""
        ttl_ms = self._ttl(stateName, ttlDurationMs)
        return self._declare(StateDeclaration(stateName, "map", valueSchema, userKeySchema, ttl_ms))

    def deleteIfExists(self, stateName: str) -> None:
        """Record that the state of this name is dropped, for all keys."""
        self.dropped.add(check_state_name(self._operator, stateName))
        self.declared.pop(stateName, None)

    def registerTimer(self, expiryTimestampMs: int) -> NoReturn:
        """Refuse: no key is current yet."""
        self._no_timers("register_timer")

    def deleteTimer(self, expiryTimestampMs: int) -> NoReturn:
        """Refuse: no key is current yet."""
        self._no_timers("delete_timer")

    def listTimers(self) -> Iterator[int]:
        """Refuse: no key is current yet."""
        self._no_timers("list_timers")

    def getQueryInfo(self) -> QueryInfo:
        """Return the operator; there is no shard and no snapshot yet."""
        return QueryInfo(self._operator, -1, 0)

    def _declare(self, declaration: StateDeclaration) -> _Unusable:
        name = check_state_name(self._operator, declaration.name)
        if name in self.declared:
            raise InvalidPipeline(
                f"[STATEFUL_PROCESSOR_DUPLICATE_STATE_VARIABLE_DEFINED] operator {self._operator!r} asks for state "
                f"{name!r} twice; give each its own name"
            )
        if name in self.dropped:
            raise InvalidPipeline(
                f"operator {self._operator!r} drops state {name!r} and asks for it again; init() runs in every epoch, "
                "so the state would never live longer than one. Give the new state a new name, or drop it in one "
                "version of the job"
            )
        self.declared[name] = declaration
        return _Unusable(self._operator)

    def _ttl(self, name: str, ttl_ms: int | None) -> int:
        return _checked_ttl(self._operator, self._time_mode, name, ttl_ms)

    def _no_timers(self, operation: str) -> NoReturn:
        if self._time_mode == "none":
            raise InvalidStateUse(_wrong_time_mode(self._operator, operation))
        raise InvalidStateUse(_wrong_handle_state(self._operator, operation, "CREATED"))


class Handle:
    """The handle of one shard in one epoch; a fresh processor gets it in `init(handle)`.

    Life cycle: (1) created: states can be requested; (2) `initialized`: states and timers can be used while the passes
    have set a current key; (3) `closed`.

    Attributes:
        scope: the current slice and key.
        states: the states that were requested, and the timers.
    """

    def __init__(
        self,
        operator: str,
        schemas: Mapping[str, StateSchema],
        kinds: Mapping[str, str],
        ttls_ms: Mapping[str, int],
        dropped: frozenset[str],
        time_mode: TimeMode,
        clock: EpochClock,
        shard: int,
        reader: StateReader,
    ) -> None:
        self._operator = operator
        self._schemas = schemas
        self._kinds = kinds
        self._ttls_ms = ttls_ms
        self._dropped = dropped
        self._time_mode: TimeMode = time_mode
        self._clock = clock
        self._info = QueryInfo(operator, shard, clock.epoch)
        self._phase = "CREATED"
        self.scope = Scope(reader)
        self.states: dict[str, SliceState] = {}
        self.timers: Timers | None = None
        if time_mode != "none":
            self.timers = Timers(f"operator {operator!r}, timers", schemas[TIMERS], self.scope)
            self.states[TIMERS] = self.timers

    def initialized(self) -> None:
        """Mark the return of `init`: states can no longer be requested, timers can be used."""
        self._phase = "INITIALIZED"
        if self.timers is not None:
            # Bound methods on the instance save user code a call in between.
            self.__dict__["registerTimer"] = self.timers.register
            self.__dict__["deleteTimer"] = self.timers.delete
            self.__dict__["listTimers"] = self.timers.list

    def closed(self) -> None:
        """Mark the handle as closed: nothing can be used any more."""
        self._phase = "CLOSED"
        for name in ("registerTimer", "deleteTimer", "listTimers"):
            self.__dict__.pop(name, None)

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> Any:
        """See pyspark; state and schema were declared when the job was built."""
        return self._state(stateName, "value", ttlDurationMs)

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> Any:
        """See pyspark; state and schema were declared when the job was built."""
        return self._state(stateName, "list", ttlDurationMs)

    def getMapState(
        self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: int | None = None
    ) -> Any:
        """See pyspark; state and schemas were declared when the job was built."""
        return self._state(stateName, "map", ttlDurationMs)

    def deleteIfExists(self, stateName: str) -> None:
        """See pyspark. The stored rows are gone since the job was started with this `init`, and the state's object
        already refuses every use."""
        if self._phase != "CREATED":
            raise InvalidStateUse(_wrong_handle_state(self._operator, "delete_if_exists", self._phase))
        if stateName not in self._dropped:
            raise InvalidPipeline(
                f"operator {self._operator!r}: init() drops state {stateName!r} in the task but did not when the job "
                "was built; init() must do the same every time"
            )

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """See `Timers.register`, which replaces this method while the handle is in use."""
        self._no_timers("register_timer")

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        """See `Timers.delete`, which replaces this method while the handle is in use."""
        self._no_timers("delete_timer")

    def listTimers(self) -> Iterator[int]:
        """See `Timers.list`, which replaces this method while the handle is in use."""
        self._no_timers("list_timers")

    def getQueryInfo(self) -> QueryInfo:
        """Return the operator, shard and snapshot. Stillstate's own method: Spark's handle has it on the JVM only."""
        return self._info

    def _state(self, name: str, kind: Kind, ttl_ms: int | None) -> Any:
        if self._phase != "CREATED":
            raise InvalidStateUse(
                _wrong_handle_state(self._operator, f"get_{kind}_state", self._phase)
                + f"; state {name!r} belongs into init()"
            )
        ttl_ms = _checked_ttl(self._operator, self._time_mode, name, ttl_ms)
        if name in self._dropped:
            return _Dropped(name, kind)
        if self._kinds.get(name) != kind or self._ttls_ms.get(name, 0) != ttl_ms:
            raise InvalidPipeline(
                f"operator {self._operator!r}: init() asks for {kind} state {name!r} (TTL {ttl_ms} ms) in the task but "
                "did not "
                f"when the job was built; init() must ask for the same states every time (known: {sorted(self._kinds)})"
            )
        if name not in self.states:
            self.states[name] = self._make(name, kind, ttl_ms)
        return self.states[name]

    def _make(self, name: str, kind: Kind, ttl_ms: int) -> SliceState:
        where = f"operator {self._operator!r}, state {name!r}"
        schema = self._schemas[name]
        expires_ms = self._clock.batch_time_ms + ttl_ms if ttl_ms else None
        if kind == "value":
            return value_state(name, where, schema, self.scope, expires_ms)
        if kind == "list":
            return ListState(name, where, schema, self.scope, expires_ms, self._clock.epoch)
        return MapState(name, where, schema, self.scope, expires_ms)

    def _no_timers(self, operation: str) -> NoReturn:
        if self._time_mode == "none":
            raise InvalidStateUse(_wrong_time_mode(self._operator, operation))
        raise InvalidStateUse(_wrong_handle_state(self._operator, operation, self._phase))


def check_state_name(operator: str, name: str) -> str:
    """Return `name` if Spark would accept it as a state's name too.

    Raises:
        InvalidPipeline: Spark would not.
    """
    if not isinstance(name, str) or not name or name.strip() != name or name == "default" or name.startswith("$"):
        raise InvalidPipeline(
            f"operator {operator!r}: {name!r} cannot name a state; a name is not empty, has no blanks around it, does "
            "not "
            'begin with $ and is not "default"'
        )
    return name


class _Unusable:
    """A state during `init` on the driver, where no key is current yet: every use is refused."""

    def __init__(self, operator: str) -> None:
        self._operator = operator

    def __getattr__(self, name: str) -> Any:
        raise InvalidPipeline(
            f"operator {self._operator!r}: state cannot be used inside init(); there is no key yet ({name})"
        )


class _Dropped:
    """A state that `init` requested and then dropped with `deleteIfExists`; every use raises Spark's error."""

    _ERRORS: Mapping[str, str] = {
        "exists": "Error checking {kind} state exists",
        "get": "Error getting {kind} state",
        "update": "Error updating {kind} state",
        "clear": "Error clearing {kind} state",
        "put": "Error updating {kind} state",
        "appendValue": "Error updating {kind} state",
        "appendList": "Error updating {kind} state",
        "getValue": "Error getting value",
        "containsKey": "Error checking if map state contains key",
        "updateValue": "Error updating map state value",
        "iterator": "Error getting map state entry",
        "keys": "Error getting map state entry",
        "values": "Error getting map state entry",
        "removeKey": "Error removing key from map state",
    }

    def __init__(self, name: str, kind: Kind) -> None:
        self._name = name
        self._kind = kind

    def __getattr__(self, method: str) -> Any:
        what = self._ERRORS.get(method)
        if what is None:
            raise AttributeError(method)

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise InvalidStateUse(
                f"{what.format(kind=self._kind)}: {self._kind.capitalize()} state {self._name} is not initialized."
            )

        return refuse


def _checked_ttl(operator: str, time_mode: TimeMode, name: str, ttl_ms: int | None) -> int:
    """Return the TTL of a state in milliseconds; 0 for none.

    Raises:
        InvalidPipeline: the TTL is negative, or this time mode has no clock for it.
    """
    ttl_ms = ttl_ms or 0
    if not isinstance(ttl_ms, int) or ttl_ms < 0:
        raise InvalidPipeline(
            f"[STATEFUL_PROCESSOR_TTL_DURATION_MUST_BE_POSITIVE] operator {operator!r}, state {name!r}: a TTL is a "
            "whole number of milliseconds, more than 0 (0 or None for no TTL)"
        )
    if ttl_ms and time_mode != "processing":
        raise InvalidPipeline(
            f"[STATEFUL_PROCESSOR_INCORRECT_TIME_MODE_TO_ASSIGN_TTL] operator {operator!r}: Cannot use TTL for "
            f"state={name} in timeMode={_SPARKS_TIME_MODE[time_mode]}, use TimeMode.ProcessingTime() instead."
        )
    return ttl_ms


def _wrong_time_mode(operator: str, operation: str) -> str:
    return (
        f"[STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_TIME_MODE] operator {operator!r}: Failed to "
        f"perform stateful processor operation={operation} with invalid timeMode=None"
    )


def _wrong_handle_state(operator: str, operation: str, state: str) -> str:
    return (
        f"[STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_HANDLE_STATE] operator {operator!r}: Failed to "
        f"perform stateful processor operation={operation} with invalid handle state={state}"
    )
