"""The rows in flight of a snapshot as tables: rows that an operator has yet to process, with its input columns.

    _operator   string
    _epoch      long      the epoch that read the row
    _key_hash   decimal   hash of its key, unsigned
    _place      long      place of the row in the input of that epoch; orders the rows of a key
    …                     the columns that the operator reads

Rows that were read with older columns are shown in the newest, by the rules of state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from state_runtime.base.errors import InvalidConfiguration, MissingFile, SnapshotExpired
from state_runtime.changelog.inflight import InflightPass, RowsPart
from state_runtime.changelog.reader import read_passes
from state_runtime.changelog.rows import decode_columns, decode_rows, fit_rows, misfit, rows_schema
from state_runtime.reading.reader import ALL_HASHES
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.locate import Place
from state_runtime.snapshot.manifest import Manifest
from state_runtime.store import Store

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ReadableInflight"]

_OWN = {"_operator": pa.string(), "_epoch": pa.int64(), "_key_hash": pa.decimal128(20, 0), "_place": pa.int64()}


@dataclass(frozen=True)
class ReadableInflight:
    """The rows in flight of one operator, as of one snapshot.

    Every method that reads may raise:
        MissingFile, CorruptSegment: the snapshot is damaged; the message names the file.
        SnapshotExpired: it expired while it was read. StoreUnavailable: try again.
    """

    root: Store
    manifest: Manifest
    operator: str

    @staticmethod
    def of(root: Store, manifest: Manifest, operator: str) -> ReadableInflight:
        """Open the rows in flight of an operator.

        Raises:
            InvalidConfiguration: it has none; the message lists the operators that have some.
        """
        batch = manifest.open_batch
        known = [o.uid for o in batch.operators] if batch is not None else []
        if operator not in known:
            place = Place(root.url, manifest.snapshot_id)
            raise InvalidConfiguration(
                f"no rows of operator {operator!r} are in flight in {place}; there are some of: "
                f"{', '.join(known) or 'no operator'}"
            )
        return ReadableInflight(root, manifest, operator)

    @cached_property
    def passes(self) -> tuple[InflightPass, ...]:
        """The parts of the input that epochs read and did not process, the oldest first."""
        try:
            return tuple(p for p in read_passes(self.root, self.manifest) if p.operator == self.operator)
        except MissingFile as error:
            raise self._lost(error) from error

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns.

        Raises:
            InvalidConfiguration: older rows cannot be shown in the newest columns.
        """
        rows = self._input_columns
        for passed in self.passes[:-1]:
            stored = decode_columns(passed.layout.columns, f"operator {self.operator!r}")
            if why := misfit(stored, rows):
                raise InvalidConfiguration(
                    f"the rows of operator {self.operator!r} from epoch {passed.epoch} cannot be shown together with "
                    f"newer ones: {why}"
                )
        names = dict(zip(_own_names(rows), _OWN.values()))
        return pa.schema([*(pa.field(name, kind) for name, kind in names.items()), *rows])

    @cached_property
    def _input_columns(self) -> pa.Schema:
        return decode_columns(self.passes[-1].layout.columns, f"operator {self.operator!r}")

    def batches(self, hash_range: tuple[int, int] = ALL_HASHES) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a closed range of key hashes; by epoch, then by hash. A part of a few MiB is in memory at a
        time."""
        schema = self.schema
        for passed in self.passes:
            for part in passed.parts:
                wanted = [
                    (max(left.hash_low, hash_range[0]), min(left.hash_high, hash_range[1])) for left in passed.left
                ]
                meets = [r for r in wanted if r[0] <= min(r[1], part.part.hash_high) and r[1] >= part.part.hash_low]
                if meets:
                    stored = self._read(part)
                    for low, high in meets:
                        if (found := _cut(stored, low, high)).num_rows:
                            yield self._shown(found, passed, schema, part.path)

    def to_arrow(self, hash_range: tuple[int, int] = ALL_HASHES) -> pa.Table:
        """Return the same rows as a table in memory."""
        return pa.Table.from_batches(list(self.batches(hash_range)), schema=self.schema)

    def to_pandas(self, hash_range: tuple[int, int] = ALL_HASHES) -> pd.DataFrame:
        """Return the same rows as a pandas DataFrame."""
        frame: pd.DataFrame = self.to_arrow(hash_range).to_pandas()
        return frame

    def _read(self, part: RowsPart) -> pa.RecordBatch:
        try:
            data = self.root.read_range(part.path, part.part.offset, part.part.length)
        except FileNotFoundError as error:
            raise self._lost(MissingFile(f"{part.path} is missing in {self.root.url}")) from error
        return decode_rows(data, part.part, part.path)

    def _lost(self, error: MissingFile) -> MissingFile | SnapshotExpired:
        if read_boundary(self.root).keeps(self.manifest.snapshot_id):
            return error
        return SnapshotExpired(
            f"snapshot {self.manifest.snapshot_id} in {self.root.url} expired while it was read; choose a newer one"
        )

    def _shown(self, stored: pa.RecordBatch, passed: InflightPass, schema: pa.Schema, where: str) -> pa.RecordBatch:
        rows = pa.RecordBatch.from_arrays(stored.columns[2:], schema=rows_schema(stored.schema, where))
        count = rows.num_rows
        own = [
            pa.array([self.operator], pa.string()).take(pa.array(np.zeros(count, np.int64))),
            pa.array(np.full(count, passed.epoch, np.int64)),
            stored.column(0).cast(_OWN["_key_hash"]),
            stored.column(1),
        ]
        return pa.RecordBatch.from_arrays([*own, *fit_rows(rows, self._input_columns).columns], schema=schema)


def _own_names(rows: pa.Schema) -> list[str]:
    """Return names, not used by the input, for the columns that are not the input's."""
    names = []
    for name in _OWN:
        while name in rows.names:
            name = f"_{name}"
        names.append(name)
    return names


def _cut(stored: pa.RecordBatch, low: int, high: int) -> pa.RecordBatch:
    hashes = stored.column(0).to_numpy(zero_copy_only=False)
    first = int(np.searchsorted(hashes, np.uint64(low), side="left"))
    last = int(np.searchsorted(hashes, np.uint64(high), side="right"))
    return stored.slice(first, last - first)
