"""`ValueState` over looked-up columns: the interface of `pyspark.sql.streaming.stateful_processor.ValueState`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from state_runtime.processors.user.scope import NoKey, Scope
from state_runtime.processors.user.value_codec import ValueCodec, can_be_changed
from state_runtime.state.table import Mask, StateSchema

__all__ = ["NestedValueState", "ValueState", "value_state"]


class ValueState:
    """One value per key. The first use in a slice looks up all keys of the slice."""

    __slots__ = (
        "_codec",
        "_dirty",
        "_existed",
        "_is_plain",
        "_no_key",
        "_schema",
        "_scope",
        "_time_ms",
        "_values",
        "_width",
        "name",
    )

    def __init__(self, name: str, where: str, schema: StateSchema, scope: Scope, expires_ms: int | None) -> None:
        """
        Args:
            where: operator and state, for messages.
            expires_ms: when a value that is written in this epoch expires; None for a state without TTL.
        """
        self.name = name
        self._schema = schema
        self._scope = scope
        self._time_ms = expires_ms
        self._codec = ValueCodec(schema.values, where)
        self._width = self._codec.width
        self._is_plain = self._codec.is_plain
        self._no_key = NoKey(where)
        self._values: Any = self._no_key
        self._dirty = bytearray()
        self._existed: Mask | None = None

    def exists(self) -> bool:
        """Return whether the key has a value."""
        return self._values[self._scope.group] is not None

    def get(self) -> tuple[Any, ...] | None:
        """Return the value as a tuple, or None."""
        value: tuple[Any, ...] | None = self._values[self._scope.group]
        return value

    def update(self, newValue: tuple[Any, ...]) -> None:
        """Set the value; it has as many fields as the schema.

        Raises:
            InvalidStateValue: not a tuple of the schema's fields and their types.
        """
        if not self._is_plain(newValue):
            newValue = self._codec.row_of(newValue, "update")
        group = self._scope.group
        self._values[group] = newValue
        self._dirty[group] = 1

    def clear(self) -> None:
        """Remove the value, if there is one."""
        group = self._scope.group
        self._values[group] = None
        self._dirty[group] = 1

    # --- for the passes ---

    def attach(self) -> None:
        self._values = _NotLoaded(self)
        self._existed = None

    def detach(self) -> None:
        self._values = self._no_key
        self._dirty = bytearray()
        self._existed = None

    def load(self) -> list[Any]:
        """Look up the slice's keys."""
        scope = self._scope
        found, columns = scope.reader.find(self.name, scope.hashes, scope.keys)
        values: list[Any] = self._codec.rows(columns[: self._width])
        for group in np.flatnonzero(~found).tolist():
            values[group] = None
        self._values = values
        self._existed = found
        self._dirty = bytearray(len(values))
        return values

    def changes(self) -> tuple[pa.RecordBatch, int]:
        """Return the changes of user code in the slice, as a sorted batch, and the live rows gained."""
        if self._existed is None:
            return self._schema.empty(), 0
        dirty = np.flatnonzero(np.frombuffer(self._dirty, dtype=np.uint8))
        if not len(dirty):
            return self._schema.empty(), 0
        new = [self._values[i] for i in dirty.tolist()]
        gone = np.fromiter((v is None for v in new), dtype=np.bool_, count=len(new))
        existed = self._existed[dirty]
        # Clearing a value that was never stored writes nothing.
        kept = ~gone | existed
        if not bool(kept.all()):
            dirty, gone, existed = dirty[kept], gone[kept], existed[kept]
            new = [v for v, k in zip(new, kept.tolist()) if k]
        times = None
        if self._schema.time:
            times = pa.array(np.full(len(new), self._time_ms or 0, dtype=np.int64), mask=gone)
        values = self._codec.columns(new, holes=bool(gone.any()))
        at = pa.array(dirty)
        keys = [k.take(at) for k in self._scope.keys]
        batch = self._schema.batch(self._scope.hashes[dirty], gone, keys, values, times=times)
        return batch, int(np.count_nonzero(~existed) - np.count_nonzero(gone))


class NestedValueState(ValueState):
    """A state whose values hold lists or maps: each read returns a copy, so changes to it do not reach the state."""

    __slots__ = ("_fresh",)

    def __init__(self, name: str, where: str, schema: StateSchema, scope: Scope, expires_ms: int | None) -> None:
        super().__init__(name, where, schema, scope, expires_ms)
        assert self._codec.fresh is not None, "made for values that can be changed in place"
        self._fresh = self._codec.fresh

    def get(self) -> tuple[Any, ...] | None:
        """Return the value as a tuple, or None."""
        value = super().get()
        return None if value is None else self._fresh(value)


def value_state(name: str, where: str, schema: StateSchema, scope: Scope, expires_ms: int | None) -> ValueState:
    """Return the state for a schema; see `ValueState`."""
    make = NestedValueState if any(can_be_changed(field.type) for field in schema.values) else ValueState
    return make(name, where, schema, scope, expires_ms)


class _NotLoaded:
    """Placeholder for the values of a slice until user code reads or writes one of them."""

    __slots__ = ("_state",)

    def __init__(self, state: ValueState) -> None:
        self._state = state

    def __getitem__(self, group: int) -> Any:
        return self._state.load()[group]

    def __setitem__(self, group: int, value: Any) -> None:
        self._state.load()[group] = value
