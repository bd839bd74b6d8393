"""Conversion from columns with shown names to stored rows, for rows that are written into a snapshot; pure.

The inverse of `DisplaySchema.show`: a table that was read can be written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.base.errors import InvalidConfiguration, InvalidData
from state_runtime.changelog.versions import StateVersions
from state_runtime.reading.display_schema import DisplaySchema
from state_runtime.snapshot.manifest import OperatorEntry, StateEntry, StateKind
from state_runtime.state.keyhash import hash_rows
from state_runtime.state.table import Hashes, StateSchema, entry_of_time, int64_values

__all__ = ["RowLayout"]

_EPOCH_SHIFT = 28  # of a list's entries: the lower bits hold the number of an append within its epoch
_OPTIONAL = ("expires",)


@dataclass(frozen=True)
class RowLayout:
    """The layout of one state's rows.

    Args:
        schema: its columns, exactly; None takes them from the description.
        epoch: the epoch in which list elements are appended.
        is_import: an import makes rows whose form is the operator's own of another engine's: of sessions, which are
            whole, and of joins, whose rows have a `position` as the elements of a list.

    Raises:
        InvalidConfiguration: (methods) rows of this kind of state cannot be made of plain columns.
    """

    operator: OperatorEntry
    state: StateEntry
    schema: StateSchema | None = None
    epoch: int = 1
    is_import: bool = False

    @cached_property
    def versions(self) -> StateVersions:
        return StateVersions(self.operator, self.state, self.schema)

    @cached_property
    def shown(self) -> DisplaySchema:
        return DisplaySchema(self.versions, self._kind, self.operator.kind)

    @property
    def _kind(self) -> StateKind:
        return "list" if self.is_import and self.operator.kind == "interval-join" else self.state.kind

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that a row has; `expires` may be left out, and the row then never expires."""
        if self._kind == "rows" and not (self.is_import and self.operator.kind == "sessions"):
            raise InvalidConfiguration(
                f"{self.versions.name} holds {self.operator.kind} rows, whose form is the operator's own; they cannot "
                "be written from a table. Start from a snapshot of the job instead"
            )
        return self.shown.names

    def check(self, given: Sequence[str]) -> None:
        """Check that a table has all columns, and no others.

        Raises:
            InvalidConfiguration: it does not.
        """
        roles = self.shown.roles()
        missing = [c for c in self.columns if c not in given and roles[c][1] not in _OPTIONAL]
        unknown = [c for c in given if c not in self.columns]
        if missing or unknown:
            raise InvalidConfiguration(
                f"{self.versions.name} takes the columns {', '.join(self.columns)}; "
                + (f"missing: {', '.join(missing)}" if missing else f"unknown: {', '.join(unknown)}")
            )

    def stored(self, table: pa.Table | pa.RecordBatch, hashes: Hashes | None = None) -> pa.RecordBatch:
        """Convert rows to the stored form, in their order of arrival.

        Args:
            hashes: of the keys, if the caller must supply them, as Spark does for strings with a collation.

        Raises:
            InvalidConfiguration: see `check`. InvalidData: values that do not fit their column, or a missing time or
                place where one is needed.
        """
        self.check(table.schema.names)
        schema = self.versions.declared
        given: Mapping[tuple[str, str], str] = {(role, own): name for name, (role, own) in self.shown.roles().items()}

        def column(role: str, own: str, kind: pa.DataType) -> pa.Array:
            name = given[role, own]
            return self._cast(_whole(table.column(name)), kind, name)

        keys = [column("key", f.name, f.type) for f in schema.keys]
        values = [column("value", f.name, f.type) for f in schema.values]
        entry_columns = [column("entry", f.name, f.type) for f in schema.entries or ()]
        times = self._times(table, given) if schema.time else None
        if hashes is None:
            if not all(c.binary_equality for c in self.versions.keys):
                raise InvalidConfiguration(
                    f"{self.versions.name} has a key with a collation, which only Spark can hash; write it from Spark"
                )
            hashes = hash_rows(keys)
        entries: Hashes | None = None
        if schema.entries is not None:
            entries = self._entries(table, given, entry_columns, times)
        return schema.batch(hashes, None, keys, values, entries=entries, entry_columns=entry_columns, times=times)

    def _entries(
        self,
        table: pa.Table | pa.RecordBatch,
        given: Mapping[tuple[str, str], str],
        entry_columns: Sequence[pa.Array],
        times: pa.Array | None,
    ) -> Hashes:
        if self.state.kind == "map":
            found: Hashes = np.maximum(hash_rows(entry_columns), np.uint64(1))
            return found
        if self.state.kind == "timers" and times is not None:
            return entry_of_time(int64_values(times).copy())
        if self._kind == "rows":
            name = given["start", "window.start"]
            starts = self._cast(_whole(table.column(name)), pa.timestamp("us", "UTC"), name).cast(pa.int64())
            if starts.null_count:
                raise InvalidData(f"{self.versions.name}: a session has no start")
            return entry_of_time(int64_values(starts).copy())
        name = given["position", "position"]
        places = self._cast(_whole(table.column(name)), pa.int64(), name)
        if places.null_count or bool(
            pc.any(pc.or_(pc.less(places, 0), pc.greater_equal(places, (1 << _EPOCH_SHIFT) - 1))).as_py()
        ):
            raise InvalidData(
                f"{self.versions.name}: column {name!r} must be the place of each element in its list, from 0 to 2^28 "
                "- 2"
            )
        listed: Hashes = int64_values(places).astype(np.uint64) + np.uint64((self.epoch << _EPOCH_SHIFT) + 1)
        return listed

    def _times(self, table: pa.Table | pa.RecordBatch, given: Mapping[tuple[str, str], str]) -> pa.Array:
        time = self.versions.time
        name = given["time", time]
        if name not in table.schema.names:
            return pa.nulls(table.num_rows, pa.int64())
        column = _whole(table.column(name))
        if pa.types.is_timestamp(column.type):
            # A timestamp without a zone would mean another moment on every machine.
            if column.type.tz is None:
                raise InvalidData(f"{self.versions.name}: column {name!r} must be a timestamp with a time zone")
            column = column.cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
        column = self._cast(column, pa.int64(), name)
        if self.state.kind == "timers" and column.null_count:
            raise InvalidData(f"{self.versions.name}: a timer has no time")
        return column

    def _cast(self, column: pa.Array, kind: pa.DataType, name: str) -> pa.Array:
        if column.type == kind:
            return column
        misfit = InvalidData(
            f"{self.versions.name}: column {name!r} is {column.type}, and not all of it fits {kind}. Cast it before"
        )
        # Arrow would parse numbers from texts.
        if pa.types.is_null(column.type) or _family(column.type) == _family(kind):
            try:
                return column.cast(kind)
            except (pa.ArrowException, TypeError):
                raise misfit from None  # Arrow's own message holds the value
        raise misfit


def _family(kind: pa.DataType) -> str:
    for name, belongs in (
        ("number", lambda t: pa.types.is_integer(t) or pa.types.is_floating(t) or pa.types.is_decimal(t)),
        ("text", lambda t: pa.types.is_string(t) or pa.types.is_large_string(t)),
        ("bytes", lambda t: pa.types.is_binary(t) or pa.types.is_large_binary(t)),
        ("time", pa.types.is_timestamp),
        ("nested", pa.types.is_nested),
    ):
        if belongs(kind):
            return name
    return str(kind)


def _whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
