"""Writing of sorted live rows as the state tables of a canonical snapshot, by one process or by the tasks of a Spark
job.

Tables are files under unique names. A crash at any point leaves files that no manifest names.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from state_runtime.base.errors import CorruptSegment, InvalidData, check
from state_runtime.base.ids import Ids
from state_runtime.base.limits import FOLD_BYTES_MAX, MIB
from state_runtime.changelog.versions import StateVersions
from state_runtime.materialize.write_tables import table_name
from state_runtime.reading.fingerprint import Fingerprint
from state_runtime.restore.stream import merge_sorted
from state_runtime.snapshot.manifest import OperatorEntry, StateEntry, TableEntry
from state_runtime.snapshot.paths import safe_name
from state_runtime.state.keyhash import hash_rows
from state_runtime.state.table import (
    CLEAR_MARKER,
    StateSchema,
    concat,
    entries_of,
    first_of_groups,
    hashes_of,
    slice_hash_range,
)
from state_runtime.state.text import broken_text
from state_runtime.store import Store

__all__ = ["TableWriter", "WrittenTables", "cell_bits"]

_ROW_GROUP_ROWS = 131_072
_TABLE_BYTES = 32 * MIB  # the size that folds aim at
_CELL_BITS_MAX = 8


def cell_bits(stored_bytes: int) -> int:
    """Return the number of cells (2 to the power of it) into which a state of this size is cut."""
    return min(_CELL_BITS_MAX, max(0, -(-stored_bytes // _TABLE_BYTES) - 1).bit_length())


@dataclass(frozen=True)
class WrittenTables:
    """The tables written for states; results of several writers add up.

    Attributes:
        next_due_ms: per operator the earliest `due` of its rows.
        fingerprints: per operator and state of the rows.
    """

    tables: tuple[TableEntry, ...] = ()
    next_due_ms: tuple[tuple[str, int], ...] = ()
    fingerprints: tuple[tuple[tuple[str, str], Fingerprint], ...] = ()

    def __add__(self, other: WrittenTables) -> WrittenTables:
        due: dict[str, int] = {}
        for uid, at in (*self.next_due_ms, *other.next_due_ms):
            due[uid] = min(at, due.get(uid, at))
        found: dict[tuple[str, str], Fingerprint] = {}
        for state, part in (*self.fingerprints, *other.fingerprints):
            found[state] = found.get(state, Fingerprint()) + part
        return WrittenTables(
            (*self.tables, *other.tables), tuple(sorted(due.items())), tuple(sorted(found.items(), key=lambda f: f[0]))
        )

    @property
    def rows(self) -> int:
        return sum(t.rows for t in self.tables)

    @property
    def bytes(self) -> int:
        return sum(t.bytes for t in self.tables)


class TableWriter:
    """Writes one state's tables.

    Args:
        snapshot_id, writer: parts of the files' names: the snapshot that they are for, and the name of the writer.
        bits: the hashes are cut into 2^bits cells, with a table for each that has rows.
        scratch: a folder of this host for the table that is being written; None is the system's folder for temporary
            files.
        schema: the state's columns, exactly; None takes them from the description.
    """

    def __init__(
        self,
        root: Store,
        operator: OperatorEntry,
        state: StateEntry,
        *,
        snapshot_id: int,
        writer: str,
        ids: Ids,
        bits: int = 0,
        scratch: Path | None = None,
        schema: StateSchema | None = None,
        row_group_rows: int = _ROW_GROUP_ROWS,
    ) -> None:
        check(not state.history and 0 <= bits <= 32, "a canonical table is of the newest columns only")
        self._root = root
        self._operator = operator
        self._state = state
        self._versions = StateVersions(operator, state, schema)
        self._snapshot_id = snapshot_id
        self._writer = writer
        self._ids = ids
        self._shift = 64 - bits
        self._scratch = scratch
        self._row_group_rows = row_group_rows
        self._name = self._versions.name

    def write(self, batches: Iterable[pa.RecordBatch]) -> WrittenTables:
        """Write live rows as tables; rows of one cell must all be given to the same call.

        Args:
            batches: sorted by hash (and entry), in the columns of the state's description. One row group is held in
                memory.

        Raises:
            InvalidData: a key or an entry twice, a hash that is not that of its key, a row out of order, other columns,
                a tombstone, or text that is not UTF-8. No manifest names the tables written before the error.
            StoreUnavailable: the same; try again.
        """
        total = WrittenTables()
        cell: _OpenTable | None = None
        try:
            for batch in merge_sorted([self._checked(batches)], self._unique):
                for number, rows in self._by_cell(batch):
                    if cell is None or cell.number != number:
                        total = total + self._close(cell)
                        cell = _OpenTable(number, rows.schema, self._scratch, self._row_group_rows)
                    cell.add(rows)
            total = total + self._close(cell)
            cell = None
        finally:
            if cell is not None:
                cell.drop()
        return total

    def _checked(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        last = -1
        for batch in batches:
            if not batch.num_rows:
                continue
            try:
                batch = self._versions.read(batch, self._snapshot_id, "the rows to be written")
                StateSchema.of(batch.schema).check_batch(batch, "the rows to be written")
            except CorruptSegment as error:
                raise InvalidData(f"{self._name}: {error}") from error
            broken = broken_text(batch)
            if broken is not None:
                raise InvalidData(
                    f"{self._name}: column {broken[0]!r} holds text whose bytes are not UTF-8, which no reader of "
                    "snapshots takes. Repair it before, for example with Spark's make_valid_utf8"
                )
            hashes = hashes_of(batch)
            if int(hashes[0]) < last:
                raise InvalidData(f"{self._name}: the rows to be written are not sorted by key hash")
            last = int(hashes[-1])
            schema = StateSchema.of(batch.schema)
            if pc.any(batch.column(1)).as_py() or (
                schema.entries is not None and bool((entries_of(batch) == CLEAR_MARKER).any())
            ):
                raise InvalidData(f"{self._name}: a canonical snapshot holds live rows only, not removals")
            # For a string with a collation Spark does not hash its bytes: only Spark can compute the hash.
            if all(c.binary_equality for c in self._versions.keys) and not np.array_equal(
                hash_rows(schema.keys_of(batch)), hashes
            ):
                raise InvalidData(f"{self._name}: a key_hash is not the hash of its key columns (docs/format.md)")
            yield batch

    def _unique(self, parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        """Return all rows of some hashes, after a check that each identity occurs once."""
        batch = concat(parts, parts[0].schema)
        schema = StateSchema.of(batch.schema)
        groups = hashes_of(batch)
        identity = schema.keys_of(batch)
        if schema.entries is not None:
            entries = entries_of(batch)
            apart = np.ones(batch.num_rows, dtype=np.int64)
            apart[1:] = (groups[1:] != groups[:-1]) | (entries[1:] != entries[:-1])
            groups = np.cumsum(apart).view(np.uint64)
            identity += schema.entry_columns_of(batch)
        _, starts = first_of_groups(groups, identity)
        if not bool(starts.all()):
            what = "key" if schema.entries is None else "entry of a key"
            raise InvalidData(
                f"{self._name}: {int((~starts).sum()):,} rows have a {what} that another row has; each may be there "
                "once"
            )
        return batch

    def _by_cell(self, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        first, last = (int(h) >> self._shift for h in hashes_of(batch)[[0, -1]])
        for number in range(first, last + 1):
            rows = slice_hash_range(batch, *self._range(number))
            if rows.num_rows:
                yield number, rows

    def _range(self, number: int) -> tuple[int, int]:
        return number << self._shift, ((number + 1) << self._shift) - 1

    def _close(self, cell: _OpenTable | None) -> WrittenTables:
        if cell is None:
            return WrittenTables()
        uid, state = self._operator.uid, self._state.name
        name = table_name(self._snapshot_id, self._writer, self._ids.short())
        path = f"tables/{uid}/{safe_name(state)}/{name}"
        size, digest = cell.publish(self._root, path)
        low, high = self._range(cell.number)
        entry = TableEntry(
            path=path,
            bytes=size,
            digest=digest,
            rows=cell.rows,
            operator=uid,
            state=state,
            hash_low=low,
            hash_high=high,
        )
        due = ((uid, cell.next_due_ms),) if cell.next_due_ms is not None else ()
        return WrittenTables((entry,), due, (((uid, state), cell.fingerprint),))


class _OpenTable:
    """A Parquet file on this host, until it is published."""

    def __init__(self, number: int, schema: pa.Schema, scratch: Path | None, row_group_rows: int) -> None:
        self.number = number
        self.rows = 0
        self.next_due_ms: int | None = None
        self.fingerprint = Fingerprint()
        self._schema = schema
        self._row_group_rows = row_group_rows
        self._held: list[pa.RecordBatch] = []
        self._folder = tempfile.TemporaryDirectory(prefix=".table-", dir=scratch)
        self._path = Path(self._folder.name) / "table.parquet"
        self._file = pq.ParquetWriter(
            str(self._path), schema, compression="zstd", write_page_checksum=True, use_dictionary=False
        )

    def add(self, rows: pa.RecordBatch) -> None:
        self.rows += rows.num_rows
        self.fingerprint = self.fingerprint + Fingerprint.of(rows)
        schema = StateSchema.of(rows.schema)
        if schema.time == "due":
            earliest = pc.min(schema.times_of(rows)).as_py()
            if earliest is not None:
                self.next_due_ms = earliest if self.next_due_ms is None else min(self.next_due_ms, earliest)
        self._held.append(rows)
        if sum(b.nbytes for b in self._held) >= FOLD_BYTES_MAX:
            # A reader loads a whole row group into memory.
            self._write(concat(self._held, self._schema))
            self._held = []
        while sum(b.num_rows for b in self._held) >= self._row_group_rows:
            batch = concat(self._held, self._schema)
            self._write(batch.slice(0, self._row_group_rows))
            self._held = [batch.slice(self._row_group_rows)]

    def _write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self._file.write_batch(batch, row_group_size=self._row_group_rows)

    def publish(self, root: Store, path: str) -> tuple[int, str]:
        """Put the finished file on the store.

        Returns:
            Its size and SHA-256.
        """
        try:
            self._write(concat(self._held, self._schema))
            self._file.close()
            with self._path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = self._path.stat().st_size
            root.put_file(self._path, path)
            return size, digest
        finally:
            self.drop()

    def drop(self) -> None:
        self._file.close()
        self._folder.cleanup()
