"""A `StateReader` over plain Python lists: slow, and simple enough to be believed. What the real ones are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from state_runtime.state.table import CLEAR_MARKER, DELETED, ENTRY, HASH, StateSchema


def canonical(value: Any) -> Any:
    """A hashable stand-in under grouping equality."""
    if isinstance(value, float):
        return "nan" if value != value else value + 0.0
    if isinstance(value, dict):
        return tuple((k, canonical(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return tuple(canonical(v) for v in value)
    return value


class MemoryReader:
    """State as lists of batches, newest first, folded row by row."""

    def __init__(
        self,
        schemas: Mapping[str, StateSchema],
        batches: Mapping[str, Sequence[pa.RecordBatch]] | None = None,
        now_ms: int = 0,
    ) -> None:
        self.schemas = schemas
        self.batches = {name: list((batches or {}).get(name, ())) for name in schemas}
        self.now_ms = now_ms

    def rows(self, state: str) -> list[dict[str, Any]]:
        """Live rows as dictionaries of stored columns, in order of (hash, entry, key)."""
        schema = self.schemas[state]
        live: dict[Any, dict[str, Any]] = {}
        for batch in reversed(self.batches[state]):
            for row in batch.to_pylist():
                key = (row[HASH], tuple(canonical(row[f"key.{f.name}"]) for f in schema.keys))
                if schema.entries is None:
                    identity: Any = key
                else:
                    identity = (key, row[ENTRY], tuple(canonical(row[f"entry.{f.name}"]) for f in schema.entries))
                    if row[ENTRY] == CLEAR_MARKER:
                        live = {i: r for i, r in live.items() if i[0] != key}
                        continue
                live.pop(identity, None)
                if not row[DELETED]:
                    live[identity] = row
        rows = [r for r in live.values() if not self._expired(schema, r)]
        return sorted(rows, key=lambda r: (r[HASH], r.get(ENTRY, 0)))

    def _expired(self, schema: StateSchema, row: dict[str, Any]) -> bool:
        return schema.time == "expires" and row["expires"] is not None and row["expires"] <= self.now_ms

    def _wanted(self, state: str, hashes: Any, keys: Sequence[pa.Array]) -> Iterator[list[dict[str, Any]]]:
        schema = self.schemas[state]
        rows = self.rows(state)
        columns = [k.to_pylist() for k in keys]
        for position, hashed in enumerate(hashes.tolist()):
            key = tuple(canonical(c[position]) for c in columns)
            yield [
                r
                for r in rows
                if r[HASH] == hashed and tuple(canonical(r[f"key.{f.name}"]) for f in schema.keys) == key
            ]

    def _columns(self, state: str, rows: Sequence[dict[str, Any] | None]) -> tuple[Any, list[pa.Array]]:
        schema = self.schemas[state]
        stored = schema.arrow
        names = [f"value.{f.name}" for f in schema.values] + ([schema.time] if schema.time else [])
        found = np.array([r is not None for r in rows], dtype=np.bool_)
        return found, [pa.array([r[n] if r else None for r in rows], type=stored.field(n).type) for n in names]

    def _batch(self, state: str, rows: Sequence[dict[str, Any]]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist(list(rows), schema=self.schemas[state].arrow)

    def find(
        self, state: str, hashes: Any, keys: Sequence[pa.Array], columns: Sequence[str] | None = None
    ) -> tuple[Any, list[pa.Array]]:
        found, values = self._columns(state, [rows[0] if rows else None for rows in self._wanted(state, hashes, keys)])
        names = self.schemas[state].values.names
        return found, values if columns is None else [values[names.index(name)] for name in columns]

    def find_entries(
        self, state: str, hashes: Any, keys: Sequence[pa.Array], entries: Any, entry_columns: Sequence[pa.Array]
    ) -> tuple[Any, list[pa.Array]]:
        names = [f.name for f in self.schemas[state].entries or ()]
        columns = [c.to_pylist() for c in entry_columns]
        found: list[dict[str, Any] | None] = []
        for position, rows in enumerate(self._wanted(state, hashes, keys)):
            wanted = tuple(canonical(c[position]) for c in columns)
            same = [
                r
                for r in rows
                if r[ENTRY] == int(entries[position]) and tuple(canonical(r[f"entry.{n}"]) for n in names) == wanted
            ]
            found.append(same[0] if same else None)
        return self._columns(state, found)

    def entry_finder(self, state: str, key_hash: int, key: Sequence[pa.Array], view: Any) -> Any:
        (rows,) = self._wanted(state, np.array([key_hash], dtype=np.uint64), key)
        seen = view(self._batch(state, rows))

        def find(entry: int, wanted: Any) -> Any:
            there = [at for at, row in enumerate(rows) if row[ENTRY] == entry and seen.is_at(at, wanted)]
            return seen.value_at(there[0]) if there else None

        return find

    def entry_bounds(self, state: str, hashes: Any) -> Any:
        stored = [h for batch in self.batches[state] for h in batch.column(0).to_pylist()]
        return np.array([stored.count(h) for h in hashes.tolist()], dtype=np.int64)

    def read_entries(self, state: str, hashes: Any, keys: Sequence[pa.Array]) -> tuple[pa.RecordBatch, Any]:
        per_key = list(self._wanted(state, hashes, keys))
        offsets = np.concatenate(([0], np.cumsum([len(rows) for rows in per_key]))).astype(np.int64)
        return self._batch(state, [row for rows in per_key for row in rows]), offsets

    def iter_entries(
        self, state: str, key_hash: int, key: Sequence[pa.Array], rows_max: int
    ) -> Iterator[pa.RecordBatch]:
        (rows,) = self._wanted(state, np.array([key_hash], dtype=np.uint64), key)
        for start in range(0, len(rows), rows_max):
            yield self._batch(state, rows[start : start + rows_max])

    def iter_rows(self, state: str) -> Iterator[pa.RecordBatch]:
        for _, rows in groupby(self.rows(state), key=lambda row: row[HASH]):
            yield self._batch(state, list(rows))

    def due(self, state: str, through_ms: int) -> pa.RecordBatch:
        rows = [r for r in self.rows(state) if r["due"] is not None and r["due"] <= through_ms]
        return self._batch(state, sorted(rows, key=lambda r: (r[HASH], r.get(ENTRY, 0))))

    def next_due(self, state: str, after_ms: int | None = None) -> int | None:
        times = [
            r["due"] for r in self.rows(state) if r["due"] is not None and (after_ms is None or r["due"] > after_ms)
        ]
        return min(times, default=None)

    def overlaid(
        self, changes: Mapping[str, pa.RecordBatch], due_taken: Mapping[str, int] | None = None
    ) -> MemoryReader:
        batches = {s: [*([changes[s]] if s in changes else []), *self.batches[s]] for s in self.schemas}
        return MemoryReader(self.schemas, batches, self.now_ms)
