"""Looking at and setting a processor's state by its own means: code that stands in for the processor for one call.

So a test reads what user code would read (values that have expired are gone), and writes what user code may write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from state_runtime.processors.user.keyed_batch import KeyedBatch
from state_runtime.processors.user.vectorized import VectorizedProcessor
from state_runtime.snapshot.manifest import StateKind
from state_runtime.state.table import StateSchema
from stillstate.testing.rows import as_batch, as_rows

__all__ = ["ByHandle", "InColumns", "Visit", "read_state", "read_timers", "written_state"]

Visit: TypeAlias = Callable[[Any, Mapping[str, Any]], None]
"""Called with a key and, by their names, the states that the processor asks its handle for; `""` is the handle."""


class ByHandle(StatefulProcessor):
    """Asks for the states of a user's processor, and visits them where that would handle rows."""

    def __init__(self, processor: Any, visit: Visit) -> None:
        self._processor = processor
        self._visit = visit
        self._states: dict[str, Any] = {}

    def init(self, handle: Any) -> None:
        self._states = {"": handle}
        self._processor.init(_Recording(handle, self._states))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        self._visit(key, self._states)
        return iter(())

    def close(self) -> None:
        self._processor.close()


class _Recording:
    """A handle that notes the states that it gives out."""

    def __init__(self, handle: Any, states: dict[str, Any]) -> None:
        self._handle = handle
        self._states = states

    def getValueState(self, stateName: str, *given: Any, **named: Any) -> Any:
        return self._noted(stateName, self._handle.getValueState(stateName, *given, **named))

    def getListState(self, stateName: str, *given: Any, **named: Any) -> Any:
        return self._noted(stateName, self._handle.getListState(stateName, *given, **named))

    def getMapState(self, stateName: str, *given: Any, **named: Any) -> Any:
        return self._noted(stateName, self._handle.getMapState(stateName, *given, **named))

    def _noted(self, name: str, state: Any) -> Any:
        self._states[name] = state
        return state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def read_state(name: str, kind: StateKind, found: dict[Any, Any]) -> Visit:
    """Return a visit that notes the state of each key that has one: a tuple, a list of tuples, or a dictionary."""

    def visit(key: Any, states: Mapping[str, Any]) -> None:
        state = states[name]
        if state.exists():
            found[key] = (
                state.get() if kind == "value" else list(state.get()) if kind == "list" else dict(state.iterator())
            )

    return visit


def read_timers(found: dict[Any, list[int]]) -> Visit:
    """Return a visit that notes the timers of each key, in milliseconds."""

    def visit(key: Any, states: Mapping[str, Any]) -> None:
        found[key] = sorted(states[""].listTimers())

    return visit


def written_state(name: str, kind: StateKind, value: Any) -> Visit:
    """Return a visit that sets the state of its keys; None clears it."""

    def visit(key: Any, states: Mapping[str, Any]) -> None:
        state = states[name]
        if value is None:
            state.clear()
        elif kind == "value":
            state.update(value)
        elif kind == "list":
            state.put(list(value))
        else:
            state.clear()
            for entry, held in value.items():
                state.updateValue(entry, held)

    return visit


class InColumns(VectorizedProcessor):
    """Stands in for a vectorised processor: notes one state of all keys in `found`, as `read_state` does with Rows, or
    sets it.

    Args:
        is_set: `value` is written.
        due: of a value of a state with `due`, in milliseconds.
    """

    def __init__(
        self, name: str, schema: StateSchema, *, is_set: bool = False, value: Any = None, due: int | None = None
    ) -> None:
        self._name = name
        self._schema = schema
        self._is_set = is_set
        self._value = value
        self._due = due
        self.found: dict[Any, Any] = {}

    def states(self) -> Mapping[str, Any]:
        """The operator that this processor is put into has them already."""
        return {}

    def process(self, batch: KeyedBatch) -> None:
        if self._is_set:
            self._set(batch)
            return
        keys = as_rows([batch.keys])
        if self._schema.entries is None:
            exists, values = batch.state(self._name)
            self.found = {key: row for key, row, is_there in zip(keys, as_rows([values]), exists) if is_there}
            return
        is_list = len(self._schema.entries) == 0
        collection = batch.list_state(self._name) if is_list else batch.map_state(self._name)
        entries, starts, stops = collection.read()
        width = len(self._schema.entries)
        held = as_rows([entries.select(range(width, entries.num_columns))])
        names = as_rows([entries.select(range(width))]) if width else []
        for key, start, stop in zip(keys, starts.tolist(), stops.tolist(), strict=True):
            if start < stop:
                here = slice(start, stop)
                self.found[key] = held[here] if is_list else dict(zip(names[here], held[here], strict=True))

    def _set(self, batch: KeyedBatch) -> None:
        schema, name = self._schema, self._name
        if schema.entries is None:
            if self._value is None:
                batch.clear(name)
            else:
                rows = as_batch([self._value] * batch.num_keys, schema.values, "set_state()")
                batch.update(name, rows, due=self._due)
            return
        zeros = np.zeros(len(self._value or ()), dtype=np.int64)
        if len(schema.entries) == 0:
            elements = batch.list_state(name)
            elements.clear()
            elements.append(as_batch(self._value or [], schema.values, "set_state()"), zeros)
            return
        entries, value = batch.map_state(name), dict(self._value or {})
        entries.clear()
        entries.put(
            as_batch(map(_row, value), schema.entries, "set_state()"),
            as_batch(map(_row, value.values()), schema.values, "set_state()"),
            zeros,
        )


def _row(value: Any) -> Any:
    return value if isinstance(value, tuple | list | Mapping) else (value,)
