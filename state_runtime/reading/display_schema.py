"""A state's columns as people and other programs see them; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import pyarrow as pa

from state_runtime.changelog.versions import StateVersions
from state_runtime.snapshot.manifest import StateKind
from state_runtime.state.ddl import DdlColumn
from state_runtime.state.table import Positions, StateSchema, entries_of, first_of_groups, hashes_of, time_of_entry

__all__ = ["DisplaySchema"]

Role = Literal["key", "entry", "position", "start", "value", "time"]
_TIME = pa.timestamp("ms", "UTC")
_POSITION = DdlColumn("position", "bigint", pa.int64())
_START = DdlColumn("window.start", "timestamp", pa.timestamp("us", "UTC"))
_PREFIX = {"position": "state", "start": "state", "time": "state"}
_WINDOWED = ("windows", "sessions")  # kinds of operators


@dataclass(frozen=True)
class DisplaySchema:
    """The columns of one state.

    Their names are: keys, then a map's key, a list's `position` (from 0) or the `window.start` of windows and sessions,
    then values, and last `expires` (states with a TTL; null is never) or `due` (timers, windows, stored rows of a
    join), as times in UTC. Names that would occur twice get a prefix: `key.`, `entry.` (map keys), `value.`, or
    `state.` (all others).

    Attributes:
        operator_kind: of the operator whose state it is.
    """

    versions: StateVersions
    kind: StateKind
    operator_kind: str = ""

    @cached_property
    def _all(self) -> tuple[tuple[Role, DdlColumn], ...]:
        versions = self.versions
        position = [_POSITION] if self.kind == "list" else []
        time = [DdlColumn(versions.time, "timestamp", _TIME)] if versions.time else []
        by_role: tuple[tuple[Role, Sequence[DdlColumn]], ...] = (
            ("key", versions.keys),
            ("entry", versions.entries or ()),
            ("position", position),
            ("start", [_START] if self._is_windowed else []),
            ("value", versions.values),
            ("time", time),
        )
        return tuple((role, column) for role, columns in by_role for column in columns)

    @property
    def _is_windowed(self) -> bool:
        return self.kind == "rows" and self.operator_kind in _WINDOWED

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All names, in order."""
        count = Counter(column.name for _, column in self._all)
        full = [f"{_PREFIX.get(role, role)}.{column.name}" for role, column in self._all]
        shown = [c.name if count[c.name] == 1 else long for (_, c), long in zip(self._all, full, strict=True)]
        # A column's own name may begin with such a prefix.
        return tuple(full if len(set(shown)) < len(shown) else shown)

    @property
    def by_name(self) -> Mapping[str, DdlColumn]:
        """Columns by name."""
        return dict(zip(self.names, (column for _, column in self._all), strict=True))

    def roles(self) -> Mapping[str, tuple[Role, str]]:
        """Return for each name its column's role and own name."""
        return {name: (role, column.name) for name, (role, column) in zip(self.names, self._all, strict=True)}

    def values_of(self, columns: Sequence[str]) -> list[str]:
        """Return the stored value columns that are needed to show some columns."""
        return [own for name, (role, own) in self.roles().items() if role == "value" and name in columns]

    def show(self, batch: pa.RecordBatch, columns: Sequence[str] | None = None) -> pa.Table:
        """Convert stored live rows, with all rows of each key in the batch, to the columns that people see.

        Args:
            columns: the columns, in this order; None is all. Value columns that are not listed may be missing in the
                batch.
        """
        wanted = self.names if columns is None else tuple(columns)
        schema = StateSchema.of(batch.schema)
        stored: dict[tuple[Role, str], pa.Array] = {}
        of_role: tuple[tuple[Role, Sequence[str], Sequence[pa.Array]], ...] = (
            ("key", schema.keys.names, schema.keys_of(batch)),
            ("entry", (schema.entries or pa.schema([])).names, schema.entry_columns_of(batch)),
            ("value", schema.values.names, schema.values_of(batch)),
        )
        for role, names, arrays in of_role:
            stored |= {(role, name): array for name, array in zip(names, arrays, strict=True)}
        if schema.time:
            stored["time", schema.time] = schema.times_of(batch).cast(pa.timestamp("ms")).cast(_TIME)
        if self._is_windowed:
            stored["start", _START.name] = pa.array(time_of_entry(entries_of(batch)), _START.type)
        order: Positions | None = None
        if self.kind == "list":
            stored["position", _POSITION.name], order = _positions(batch, schema)
        roles = self.roles()
        table = pa.table([stored[roles[name]] for name in wanted], names=list(wanted))
        return table if order is None else table.take(pa.array(order))


def _positions(batch: pa.RecordBatch, schema: StateSchema) -> tuple[pa.Array, Positions | None]:
    """Return the place of each row among those of its key, and the order that separates keys with the same hash (None:
    they are separate)."""
    order, starts = first_of_groups(hashes_of(batch), schema.keys_of(batch))
    rows = np.arange(batch.num_rows)
    positions = rows - np.maximum.accumulate(np.where(starts, rows, 0))
    if order is not None:
        unordered = np.empty_like(positions)
        unordered[order] = positions
        positions = unordered
    return pa.array(positions, pa.int64()), order
