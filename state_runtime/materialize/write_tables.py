"""Folding: read the objects that a plan names, write new tables under unique names. No existing object is changed.

The same function runs in the driver's background thread and in the tasks of a Spark job. A crash at any point leaves
files that no manifest names, never damage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from state_runtime.base import faults
from state_runtime.base.errors import InvalidData
from state_runtime.base.ids import Ids
from state_runtime.base.limits import PART_BYTES_MAX
from state_runtime.changelog.parts import sha256
from state_runtime.changelog.reader import read_table
from state_runtime.changelog.snapshot_state import StoredTable
from state_runtime.changelog.versions import StateVersions
from state_runtime.materialize.encoding import encode_table
from state_runtime.materialize.grid import Cell, MaterializationSizes
from state_runtime.materialize.log import read_parts
from state_runtime.materialize.plan import MaterializationPlan, Unit
from state_runtime.restore.uploaded_files import Bottom, direct, read_listing
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, TableEntry
from state_runtime.snapshot.paths import safe_name
from state_runtime.state.table import bounded_slices, concat, slice_hash_range
from state_runtime.store import Store

__all__ = ["TablesContext", "WrittenTables", "fold_unit", "table_name"]


@dataclass(frozen=True)
class TablesContext:
    """The common context of all units of one materialization.

    Attributes:
        writer: unique to the materialization, and part of the name of each file that it writes.
        now_ms: rows that expired by then are removed; None if the time is unknown.
        files: the snapshot, if files of shards are below all tables; reduced to the parts needed to read them.
        decide: whether cells over their threshold get a new base ("auto"); else only cells that must.
    """

    snapshot_id: int
    writer: str
    operators: tuple[OperatorEntry, ...]
    now_ms: int | None
    decide: bool
    sizes: MaterializationSizes
    files: Manifest | None = None

    @staticmethod
    def of(manifest: Manifest, plan: MaterializationPlan, writer: str, sizes: MaterializationSizes) -> TablesContext:
        now_ms = manifest.time.batch_time_ms if manifest.time is not None else None
        files = replace(manifest, segments=(), layers=(), outputs=()) if manifest.shards is not None else None
        bases = max(len(manifest.layers[0].tables) if manifest.layers else 0, sum(len(u.cells) for u in plan.units))
        return TablesContext(
            snapshot_id=manifest.snapshot_id,
            writer=writer,
            operators=manifest.operators,
            now_ms=now_ms,
            decide=plan.mode == "auto",
            sizes=sizes.bounded(bases),
            files=files,
        )


@dataclass(frozen=True)
class WrittenTables:
    """The result of units: tables for the base and for a new layer above, and the paths of the replaced tables."""

    base: tuple[TableEntry, ...] = ()
    deltas: tuple[TableEntry, ...] = ()
    removed: tuple[str, ...] = ()
    read_bytes: int = 0

    def __add__(self, other: WrittenTables) -> WrittenTables:
        return WrittenTables(
            self.base + other.base,
            self.deltas + other.deltas,
            # A table that several cells read is named by each of them.
            tuple(dict.fromkeys(self.removed + other.removed)),
            self.read_bytes + other.read_bytes,
        )

    @property
    def written_bytes(self) -> int:
        return sum(t.bytes for t in self.base + self.deltas)

    @property
    def rows(self) -> int:
        return sum(t.rows for t in self.base + self.deltas)


def table_name(snapshot_id: int, writer: str, unique: str) -> str:
    """Return the file name of a table: the snapshot that it folds, its writer (used by garbage collection), and a
    unique part."""
    return f"{snapshot_id:020d}-{writer}-{unique}.parquet"


def fold_unit(
    root: Store,
    unit: Unit,
    context: TablesContext,
    *,
    ids: Ids,
    bottom: Callable[[str, str, int, int], pa.RecordBatch] | None = None,
    into: Store | None = None,
) -> WrittenTables:
    """Fold one unit cell by cell. In memory: the unit's log, folded where it is large, and one cell's tables.

    A new base leaves out invisible rows: tombstones, clear markers, and rows whose TTL has run out by the snapshot's
    batch time. A delta keeps them, because they hide rows below. Rows with older columns are converted to the newest
    columns.

    Args:
        bottom: reads the rows below all tables (files of shards), if there are any: (operator, state, low, high).
        into: where the tables are written; None is the root itself. They have the same paths there.

    Raises:
        MissingFile, CorruptSegment: the snapshot is damaged. StoreUnavailable: try again. Files written by then are
            garbage.
    """
    operator = next(o for o in context.operators if o.uid == unit.operator)
    state = next(s for s in operator.states if s.name == unit.state)
    if bottom is None and context.files is not None:
        bottom = _bottom(root, context.files)
    work = _Work(
        root=root,
        unit=unit,
        context=context,
        versions=StateVersions(operator, state),
        ids=ids,
        bottom=bottom,
        into=into or root,
    )
    total = WrittenTables(read_bytes=sum(p.part.length for p in unit.log))
    log = work.log()
    for cell in unit.cells:
        pieces = (slice_hash_range(batch, cell.low, cell.high) for batch in log)
        total = total + work.cell(cell, [piece for piece in pieces if piece.num_rows])
    return total


def _bottom(root: Store, manifest: Manifest) -> Callable[[str, str, int, int], pa.RecordBatch]:
    """Return a reader of the files of shards below all tables; it reads one range at a time, in the newest columns."""
    objects = direct(root)
    listing = read_listing(objects, manifest)

    def read(uid: str, name: str, low: int, high: int) -> pa.RecordBatch:
        operator = next(o for o in manifest.operators if o.uid == uid)
        state = next(s for s in operator.states if s.name == name)
        versions = StateVersions(operator, state)
        if listing is None:
            return versions.declared.empty()
        sources = [list(s) for s in Bottom(objects, listing, operator).sources(name, versions, low, high)]
        parts = [concat(batches, batches[0].schema) for batches in sources if batches]
        return versions.fold(parts, drop_deleted=False)

    return read


@dataclass(frozen=True)
class _Work:
    root: Store
    unit: Unit
    context: TablesContext
    versions: StateVersions
    ids: Ids
    bottom: Callable[[str, str, int, int], pa.RecordBatch] | None
    into: Store

    def log(self) -> list[pa.RecordBatch]:
        """Return the unit's log, newest first.

        Its batches are folded together with the tables, so that a row is moved once. A log that is too large for that
        is folded first and then has each identity once; folding is associative.
        """
        log: list[pa.RecordBatch] = []
        unfolded = self.context.sizes.unfolded_bytes
        bytes_max = unfolded
        for parts, batches in read_parts(self.root, self.unit.log):
            log += [
                self.versions.read(self._slice(batch), part.snapshot_id, part.path)
                for part, batch in zip(parts, batches, strict=True)
            ]
            if sum(batch.nbytes for batch in log) > bytes_max:
                log = [self.versions.fold(part, drop_deleted=False) for part in bounded_slices(log)]
                bytes_max = sum(batch.nbytes for batch in log) + unfolded
        return log

    def _slice(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return slice_hash_range(batch, self.unit.low, self.unit.high)

    def cell(self, cell: Cell, log: Sequence[pa.RecordBatch]) -> WrittenTables:
        """Write a new base, a delta, or nothing.

        Args:
            log: of the cell, newest first; no batch is empty.
        """
        if cell.major:
            return self._major(cell, log)
        rows = self._rows_of(cell, log)
        if self._is_due(cell, rows):
            return self._major(cell, log)
        if not rows:
            return WrittenTables()
        # A delta that is not larger than the newer data above it is folded in. So a cell has few deltas, and a row is
        # rewritten about log2(deltas) times before a major fold takes it (the binary counter of log-structured
        # merging).
        size = rows * self._row_bytes(cell)
        taken = 0
        while taken < len(cell.deltas) and cell.deltas[taken].table.bytes <= size:
            size += cell.deltas[taken].table.bytes
            taken += 1
        if len(cell.deltas) - taken >= self.context.sizes.deltas_max:
            taken = len(cell.deltas)
        older = cell.deltas[:taken]
        batch = self._folded(cell, log, older)
        table = self._write(batch, cell)
        return WrittenTables((), (table,), tuple(t.table.path for t in older), sum(t.table.bytes for t in older))

    def _rows_of(self, cell: Cell, log: Sequence[pa.RecordBatch]) -> float:
        """Estimate the rows that folding leaves of a log, from the first part of the cell's range."""
        total: int = sum(batch.num_rows for batch in log)
        if len(log) < 2:
            return total
        high = cell.low + (cell.high - cell.low) * min(self.context.sizes.sampled_rows, total) // total
        sample = [slice_hash_range(batch, cell.low, high) for batch in log]
        sampled: int = sum(batch.num_rows for batch in sample)
        left: int = self.versions.fold(sample, drop_deleted=False).num_rows
        return total * left / sampled if sampled else total

    def _is_due(self, cell: Cell, log_rows: float) -> bool:
        if not log_rows:
            return False
        if not cell.base:
            return True  # nothing is below: a base costs no more than a delta
        if cell.base_bytes <= self.context.sizes.small_bytes:
            return self.context.decide
        return self.context.decide and cell.delta_bytes + log_rows * self._row_bytes(cell) >= cell.threshold

    @staticmethod
    def _row_bytes(cell: Cell) -> float:
        """Estimate the bytes of a row in a table of this cell."""
        stored = [*cell.base, *cell.deltas]
        rows = sum(t.table.rows for t in stored)
        return sum(t.table.bytes for t in stored) / rows if rows else 1.0

    def _major(self, cell: Cell, log: Sequence[pa.RecordBatch]) -> WrittenTables:
        older = (*cell.deltas, *cell.base)
        batch = self._folded(cell, log, older, drop_deleted=True)
        tables = (self._write(batch, cell),) if batch.num_rows else ()
        return WrittenTables(tables, (), tuple(t.table.path for t in older), sum(t.table.bytes for t in older))

    def _folded(
        self, cell: Cell, log: Sequence[pa.RecordBatch], older: Sequence[StoredTable], *, drop_deleted: bool = False
    ) -> pa.RecordBatch:
        newest_first = list(log)
        for stored in older:
            batch = slice_hash_range(read_table(self.root, stored.table), cell.low, cell.high)
            newest_first.append(self.versions.read(batch, stored.snapshot_id, stored.table.path))
        if drop_deleted and self.bottom is not None:
            below = self.bottom(self.unit.operator, self.unit.state, cell.low, cell.high)
            newest_first += [below] if below.num_rows else []
        now_ms = self.context.now_ms if drop_deleted else None
        return self.versions.fold(newest_first, drop_deleted=drop_deleted, now_ms=now_ms)

    def _write(self, batch: pa.RecordBatch, cell: Cell) -> TableEntry:
        unit = self.unit
        name = table_name(self.context.snapshot_id, self.context.writer, self.ids.short())
        path = f"tables/{unit.operator}/{safe_name(unit.state)}/{name}"
        if batch.nbytes > PART_BYTES_MAX:
            raise InvalidData(
                f"the table of {unit.operator}/{unit.state} for key hashes from {cell.low:x} would have "
                f"{batch.nbytes:,} bytes, more than the {PART_BYTES_MAX:,} that can be read: lower "
                "materialization.cell_bytes_max. Nothing was changed"
            )
        body = encode_table(batch)
        self.into.put(path, body)
        faults.reach("fold-table-written")
        return TableEntry(
            path=path,
            bytes=len(body),
            digest=sha256(body),
            rows=batch.num_rows,
            operator=unit.operator,
            state=unit.state,
            hash_low=cell.low,
            hash_high=cell.high,
            last_snapshot_id=self.context.snapshot_id,
        )
