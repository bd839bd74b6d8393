"""The state handle that a StatefulProcessor works with: the methods of pyspark's, over looked-up columns.

User code calls `get` and `update` per key; everything around those calls is done for all keys of the shard at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from state_runtime.errors import InvalidData, InvalidPipeline, NotSupportedYet
from state_runtime.processors.columns import from_python, to_python
from state_runtime.processors.grouping import GroupedRows
from state_runtime.state.local import OpenVersion
from state_runtime.state.table import StateSchema

__all__ = ["DeclaringHandle", "Handle", "ValueState", "check_state_name"]


class _Cursor:
    """Which group user code is working on."""

    __slots__ = ("group",)

    def __init__(self) -> None:
        self.group = -1


class ValueState:
    """One value per key; the interface of `pyspark.sql.streaming.stateful_processor.ValueState`."""

    __slots__ = ("_cursor", "_dirty", "_existed", "_name", "_operator", "_schema", "_values", "_width")

    def __init__(
        self, name: str, operator: str, schema: StateSchema, cursor: _Cursor, values: list[Any], existed: Any
    ) -> None:
        self._name = name
        self._operator = operator
        self._schema = schema
        self._cursor = cursor
        self._values = values
        self._existed = existed
        self._dirty = bytearray(len(values))
        self._width = len(schema.values)

    def exists(self) -> bool:
        """Whether the key has a value."""
        return self._values[self._cursor.group] is not None

    def get(self) -> tuple[Any, ...] | None:
        """The value as a tuple, or None."""
        value: tuple[Any, ...] | None = self._values[self._cursor.group]
        return value

    def update(self, newValue: tuple[Any, ...]) -> None:
        """Set the value; as many fields as the schema has."""
        value = tuple(newValue)
        if len(value) != self._width:
            raise InvalidData(
                f"operator {self._operator!r}, state {self._name!r}: update() got {len(value)} fields, "
                f"the schema has {self._width}: {', '.join(self._schema.values.names)}"
            )
        group = self._cursor.group
        self._values[group] = value
        self._dirty[group] = 1

    def clear(self) -> None:
        """Remove the value; nothing happens if there is none."""
        group = self._cursor.group
        self._values[group] = None
        self._dirty[group] = 1

    def changes(self, rows: GroupedRows) -> tuple[pa.RecordBatch, int]:
        """What user code changed, as a sorted batch, and the live rows gained."""
        dirty = np.flatnonzero(np.frombuffer(self._dirty, dtype=np.uint8))
        new = [self._values[i] for i in dirty.tolist()]
        gone = np.fromiter((v is None for v in new), dtype=np.bool_, count=len(new))
        existed = self._existed[dirty]
        # Clearing what was never stored leaves no trace.
        kept = ~gone | existed
        if not bool(kept.all()):
            dirty, gone, existed = dirty[kept], gone[kept], existed[kept]
            new = [v for v, k in zip(new, kept.tolist()) if k]
        empty = (None,) * self._width
        columns: Sequence[Any] = list(zip(*[v if v is not None else empty for v in new])) if new else [()] * self._width
        where = f"operator {self._operator!r}, state {self._name!r}"
        values = [from_python(column, f, lambda: where) for column, f in zip(columns, self._schema.values)]
        at = pa.array(dirty)
        batch = self._schema.batch(rows.hashes[dirty], gone, [k.take(at) for k in rows.keys], values)
        return batch, int(np.count_nonzero(~existed) - np.count_nonzero(gone))


class _NotYet:
    """The parts of pyspark's handle that this version refuses."""

    _operator: str

    def getListState(self, *_: Any, **__: Any) -> NoReturn:
        _refuse(self._operator, "ListState")

    def getMapState(self, *_: Any, **__: Any) -> NoReturn:
        _refuse(self._operator, "MapState")

    def registerTimer(self, *_: Any, **__: Any) -> NoReturn:
        _refuse(self._operator, "a timer")

    def deleteTimer(self, *_: Any, **__: Any) -> NoReturn:
        _refuse(self._operator, "a timer")

    def listTimers(self) -> Iterator[int]:
        _refuse(self._operator, "a timer")

    def deleteIfExists(self, *_: Any, **__: Any) -> NoReturn:
        _refuse(self._operator, "deleteIfExists()")


class Handle(_NotYet):
    """The handle of one shard in one epoch: `init(handle)` of a fresh processor gets it."""

    def __init__(
        self, operator: str, schemas: Mapping[str, StateSchema], rows: GroupedRows, version: OpenVersion
    ) -> None:
        self._operator = operator
        self._schemas = schemas
        self._rows = rows
        self._version = version
        self._initializing = True
        self.cursor = _Cursor()
        self.states: dict[str, ValueState] = {}

    def initialized(self) -> None:
        """`init` has returned: states can no longer be asked for."""
        self._initializing = False

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> ValueState:
        """See pyspark; the state was declared when the job was built."""
        if not self._initializing:
            raise InvalidPipeline(f"operator {self._operator!r}: getValueState({stateName!r}) belongs into init()")
        if ttlDurationMs:
            _refuse(self._operator, "a TTL")
        if stateName not in self._schemas:
            raise InvalidPipeline(
                f"operator {self._operator!r}: init() asks for state {stateName!r} in the task but did not when the job "
                f"was built; init() must ask for the same states every time (known: {sorted(self._schemas)})"
            )
        state = self.states.get(stateName)
        if state is None:
            table = self._schemas[stateName]
            found, columns = self._version.find(stateName, self._rows.hashes, self._rows.keys)
            values: list[Any] = list(zip(*map(to_python, columns)))
            for group in np.flatnonzero(~found).tolist():
                values[group] = None
            state = ValueState(stateName, self._operator, table, self.cursor, values, found)
            self.states[stateName] = state
        return state


class DeclaringHandle(_NotYet):
    """The handle of `init` when the job is built: it only learns which states there are, as Spark's PRE_INIT does."""

    def __init__(self, operator: str) -> None:
        self._operator = operator
        self.declared: dict[str, Any] = {}

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> _Unusable:
        """Note the state."""
        if ttlDurationMs:
            _refuse(self._operator, "a TTL")
        if stateName in self.declared:
            raise InvalidPipeline(
                f"operator {self._operator!r} asks for state {stateName!r} twice; give each its own name"
            )
        self.declared[check_state_name(self._operator, stateName)] = schema
        return _Unusable(self._operator)


def check_state_name(operator: str, name: str) -> str:
    """Return `name` if Spark would take it for a state too.

    Raises:
        InvalidPipeline: it would not.
    """
    if not name or name != name.strip() or name == "default" or name.startswith("$"):
        raise InvalidPipeline(
            f"operator {operator!r}: {name!r} cannot name a state (Spark's rule: not empty, no blanks around "
            'it, not "default", not starting with $)'
        )
    return name


class _Unusable:
    """A state during `init` on the driver: there is no key yet."""

    def __init__(self, operator: str) -> None:
        self._operator = operator

    def __getattr__(self, name: str) -> Any:
        raise InvalidPipeline(
            f"operator {self._operator!r}: state cannot be used inside init(); there is no key yet ({name})"
        )


def _refuse(operator: str, what: str) -> NoReturn:
    raise NotSupportedYet(
        f"operator {operator!r} uses {what}, which this version does not support yet: it has ValueState without TTL in time "
        'mode None. Keep such an operator on Spark\'s transformWithState for now (README, "What is not there yet")'
    )
