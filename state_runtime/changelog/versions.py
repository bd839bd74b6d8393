"""One state over the versions of its columns: which stored rows belong to it, and their conversion to current columns;
pure.

A batch is as old as the newest snapshot that it holds (a segment's, or a layer's last). It has the columns of that
time, which the manifest still knows, and is converted through every later version in turn.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.base.errors import CorruptManifest, CorruptSegment
from state_runtime.snapshot.manifest import OperatorEntry, StateEntry
from state_runtime.state.ddl import DdlColumn, parse_ddl
from state_runtime.state.table import DELETED, StateSchema, Time, adapt, expired, fold

__all__ = ["StateVersions", "check_dropped"]


def check_dropped(operator: OperatorEntry, state: str, snapshot_id: int, where: str) -> None:
    """Check that a stored state that the operator does not have was dropped later; its rows are then skipped.

    Raises:
        CorruptSegment: the state was not dropped, or was dropped before this was written: it is in the wrong place.
    """
    if snapshot_id >= operator.dropped.get(state, operator.since):
        raise CorruptSegment(f"{where} holds state {state!r} that operator {operator.uid!r} does not have")


@dataclass(frozen=True)
class _Version:
    values: tuple[DdlColumn, ...]
    time: Time
    ended_ms: int = 0

    @cached_property
    def defaults(self) -> dict[str, pa.Scalar]:
        return {c.name: c.default for c in self.values if c.default is not None}


class StateVersions:
    """Reads batches of any version of one state.

    Args:
        operator, state: the descriptions to read by (in a restart with changed states: the result of `reconcile`).
        schema: the newest columns, exactly; None for tools that know a state only by its manifest: then types inside of
            nested columns are those of the newest batch.

    Raises:
        CorruptManifest: the description cannot be read.
    """

    def __init__(self, operator: OperatorEntry, state: StateEntry, schema: StateSchema | None = None) -> None:
        self.name = f"operator {operator.uid!r}, state {state.name!r}"
        self.since = max(operator.since, state.since)
        try:
            self.keys = parse_ddl(operator.key_schema)
            self.entries = (
                None if state.kind == "value" else parse_ddl(state.entry_schema) if state.entry_schema else ()
            )
            old = [_Version(_parsed(v.schema), v.time, v.ended_ms) for v in state.history]
            self._versions = (*old, _Version(_parsed(state.schema), state.time))
        except ValueError as error:
            raise CorruptManifest(f"the columns of {self.name} cannot be read: {error}") from error
        self._ends = [version.until for version in state.history]
        self._schema = schema
        self._only: frozenset[str] | None = None

    def only(self, values: Collection[str]) -> StateVersions:
        """Return a reader of the same state with only some value columns: the others are dropped on reading."""
        kept = frozenset(values)
        pruned = copy.copy(self)
        pruned.__dict__.pop("declared", None)
        pruned._only = kept
        pruned._versions = tuple(
            replace(version, values=tuple(c for c in version.values if c.name in kept)) for version in self._versions
        )
        if self._schema is not None:
            fields = pa.schema([f for f in self._schema.values if f.name in kept])
            pruned._schema = replace(self._schema, values=fields)
        return pruned

    def stored_columns(self, names: Sequence[str]) -> list[str]:
        """Return which of a stored batch's columns are read."""
        if self._only is None:
            return list(names)
        return [n for n in names if not n.startswith("value.") or n.removeprefix("value.") in self._only]

    @property
    def is_one(self) -> bool:
        """Whether all rows have the current columns."""
        return len(self._versions) == 1

    @property
    def values(self) -> tuple[DdlColumn, ...]:
        """The newest value columns."""
        return self._versions[-1].values

    @property
    def time(self) -> Time:
        """The newest time column."""
        return self._versions[-1].time

    @cached_property
    def declared(self) -> StateSchema:
        """The newest columns as known without a batch; unknown types are null."""
        if self._schema is not None:
            return self._schema
        entries = None if self.entries is None else _arrow(self.entries)
        return StateSchema(_arrow(self.keys), _arrow(self.values), entries, self.time)

    def read(self, batch: pa.RecordBatch, snapshot_id: int, where: str) -> pa.RecordBatch:
        """Convert a stored batch to the newest columns.

        Args:
            batch: as it was stored; its order is checked already.
            snapshot_id: the newest snapshot that it holds, at least `since`.
            where: path, for messages.

        Raises:
            CorruptSegment: it does not have the columns that the state had then.
        """
        if self._only is not None:
            batch = batch.select(self.stored_columns(batch.schema.names))
        if self._schema is not None and batch.schema.equals(self._schema.arrow) and not self._passes(snapshot_id):
            return batch
        first = sum(end <= snapshot_id for end in self._ends)
        self._check(batch, self._versions[first], where)
        try:
            for before, after in zip(self._versions[first:], self._versions[first + 1 :]):
                if before.time != after.time:
                    batch = _with_ttl(batch) if after.time else _without_ttl(batch, before.ended_ms)
                batch = adapt(batch, _step_schema(batch, before, after), after.defaults)
            return batch if self._schema is None else adapt(batch, self._respelled(batch, self._schema))
        except CorruptSegment as error:
            raise CorruptSegment(f"{where}: {self.name}: {error}") from error

    def fold(
        self, newest_first: Sequence[pa.RecordBatch], *, drop_deleted: bool, now_ms: int | None = None
    ) -> pa.RecordBatch:
        """Do `fold` of batches that `read` returned. Nested types that differ only in their spelling become those of
        the newest."""
        batches = [b for b in newest_first if b.num_rows] or list(newest_first[:1])
        if not batches:
            return self.declared.empty()
        schema = self._schema or StateSchema.of(batches[0].schema)
        same = [adapt(b, schema) for b in batches]
        return fold(same, schema, drop_deleted=drop_deleted, now_ms=now_ms)

    def _respelled(self, batch: pa.RecordBatch, schema: StateSchema) -> StateSchema:
        """Return the columns that the operator has, if they are those that the manifest describes.

        Raises:
            CorruptSegment: they differ: they were changed without a change of the manifest.
        """
        if any(
            here.name != there.name or not (here.type == there.type or pa.types.is_nested(there.type))
            for here, there in zip(batch.schema, schema.arrow)
        ) or len(batch.schema) != len(schema.arrow):
            raise CorruptSegment(
                f"it has the columns {_fields(batch.schema)}, expected {_fields(schema.arrow)}; types must match too"
            )
        return schema

    def _passes(self, snapshot_id: int) -> bool:
        """Return whether a batch of that snapshot is of an older version."""
        return bool(self._ends) and snapshot_id < self._ends[-1]

    def _check(self, batch: pa.RecordBatch, version: _Version, where: str) -> None:
        stored = StateSchema.of(batch.schema)
        if (stored.entries is None) != (self.entries is None) or stored.time != version.time:
            raise CorruptSegment(
                f"{where}: {self.name} has the columns {_fields(batch.schema)}, which is another layout than the "
                "manifest's"
            )
        for declared, fields in (
            (self.keys, stored.keys),
            (self.entries or (), stored.entries or pa.schema([])),
            (version.values, stored.values),
        ):
            names_differ = [c.name for c in declared] != list(fields.names)
            if names_differ or any(
                c.type is not None and not c.is_nested and c.type != field.type for c, field in zip(declared, fields)
            ):
                shown = ", ".join(f"{c.name} {c.type_text}" for c in declared) or "none"
                raise CorruptSegment(
                    f"{where}: {self.name} has the columns {_fields(fields)} where the manifest says {shown}; "
                    "types must match too"
                )


def _parsed(schema: str) -> tuple[DdlColumn, ...]:
    return parse_ddl(schema) if schema else ()


def _arrow(columns: Sequence[DdlColumn]) -> pa.Schema:
    return pa.schema([pa.field(c.name, pa.null() if c.type is None else c.type) for c in columns])


def _fields(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema) or "none"


def _step_schema(batch: pa.RecordBatch, before: _Version, after: _Version) -> StateSchema:
    """Return the columns after one step; an unchanged type stays as it is stored, known or not."""
    stored = StateSchema.of(batch.schema)
    kept: Mapping[str, str] = {c.name: c.type_text for c in before.values}
    fields = []
    for column in after.values:
        if kept.get(column.name) == column.type_text:
            fields.append(stored.values.field(column.name))
        else:
            fields.append(pa.field(column.name, pa.null() if column.type is None else column.type))
    return StateSchema(stored.keys, pa.schema(fields), stored.entries, after.time)


def _with_ttl(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Add the time column: rows that were stored before the state had a TTL never expire."""
    columns = [*batch.columns, pa.nulls(batch.num_rows, pa.int64())]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema.append(pa.field("expires", pa.int64())))


def _without_ttl(batch: pa.RecordBatch, ended_ms: int) -> pa.RecordBatch:
    """Remove the time column. Rows whose TTL had run out when the state lost it become tombstones, which hide older
    rows; the others stay."""
    schema = StateSchema.of(batch.schema)
    gone = expired(schema.times_of(batch), ended_ms)
    columns = list(batch.columns[:-1])
    if bool(gone.any()):
        mask = pa.array(gone)
        at = batch.schema.get_field_index(DELETED)
        columns[at] = pc.or_(columns[at], mask)
        for position in range(len(columns) - len(schema.values), len(columns)):
            columns[position] = pc.if_else(mask, pa.scalar(None, columns[position].type), columns[position])
    stored = StateSchema(schema.keys, schema.values, schema.entries)
    return pa.RecordBatch.from_arrays(columns, schema=stored.arrow)
