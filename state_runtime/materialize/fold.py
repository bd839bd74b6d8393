"""Folding: read what a plan names, write new tables under names of their own. Nothing that exists is changed.

The same function runs in the driver's background thread and in the tasks of a Spark job. A crash at any point leaves
files that nothing names, never damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain

import pyarrow as pa

from state_runtime.base import faults
from state_runtime.base.errors import MissingFile
from state_runtime.base.ids import Ids
from state_runtime.base.limits import KIB, MIB, SOURCE_LOG_PART_BYTES_MAX
from state_runtime.changelog.reader import read_index, read_table, stream_source_log
from state_runtime.changelog.segment import decode_part, sha256
from state_runtime.changelog.source_log import joined_texts, source_log_path
from state_runtime.changelog.versions import StateVersions
from state_runtime.materialize.encoding import encode_table
from state_runtime.materialize.plan import Cell, FoldPlan, FoldSizes, LogPart, StoredTable, Unit
from state_runtime.restore.uploaded_files import Bottom, direct, read_listing
from state_runtime.snapshot.manifest import FileEntry, Manifest, OperatorEntry, TableEntry
from state_runtime.snapshot.paths import safe_name
from state_runtime.state.table import StateSchema, concat, slice_hash_range
from state_runtime.store import Store

__all__ = ["FoldContext", "Folded", "fold_source_logs", "fold_unit", "read_log", "table_name"]

_GAP_BYTES = 64 * KIB  # parts of one object this near to each other are read by one request
_CHUNK_BYTES = 32 * MIB  # decoded bytes of the log that are fetched at once
_READERS = 4  # requests at a time


@dataclass(frozen=True)
class FoldContext:
    """What all units of one materialization share.

    Attributes:
        writer: unique to the materialization, and part of the name of each file that it writes.
        now_ms: what expired by then goes; None if nothing is known.
        files: the snapshot, if files of shards lie below all tables; with nothing else in it that counts.
        decide: whether cells over their threshold get a new base ("auto"); else only those that must.
    """

    snapshot_id: int
    writer: str
    operators: tuple[OperatorEntry, ...]
    now_ms: int | None
    decide: bool
    sizes: FoldSizes
    files: Manifest | None = None

    @staticmethod
    def of(manifest: Manifest, plan: FoldPlan, writer: str, sizes: FoldSizes) -> FoldContext:
        now_ms = manifest.time.batch_time_ms if manifest.time is not None else None
        return FoldContext(
            manifest.snapshot_id,
            writer,
            manifest.operators,
            now_ms,
            plan.mode == "auto",
            sizes,
            replace(manifest, segments=(), layers=(), outputs=()) if manifest.shards is not None else None,
        )


@dataclass(frozen=True)
class Folded:
    """What units became: tables for the base and for a new layer above, and the paths of those that they replace."""

    base: tuple[TableEntry, ...] = ()
    deltas: tuple[TableEntry, ...] = ()
    removed: tuple[str, ...] = ()
    read_bytes: int = 0

    def __add__(self, other: Folded) -> Folded:
        return Folded(
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
    """File name of a table: the snapshot that it folds, whose it is (what garbage collection looks at), and a name of
    its own."""
    return f"{snapshot_id:020d}-{writer}-{unique}.parquet"


def read_log(root: Store, manifest: Manifest) -> list[LogPart]:
    """All state parts of a snapshot's segments, newest first; the indexes are read some at a time.

    Raises:
        MissingFile, CorruptSegment, StoreUnavailable: see `read_index`.
    """
    newest_first = list(reversed(manifest.state_segments))
    with ThreadPoolExecutor(_READERS, "stillstate-fold") as pool:
        indexes = list(pool.map(lambda segment: read_index(root, segment, manifest.job_uids), newest_first))
    return [
        LogPart(segment.path, part, segment.snapshot_id)
        for segment, index in zip(newest_first, indexes, strict=True)
        for part in reversed(index.parts)
        if part.kind == "state"
    ]


def fold_unit(
    root: Store,
    unit: Unit,
    context: FoldContext,
    *,
    ids: Ids,
    bottom: Callable[[str, str, int, int], pa.RecordBatch] | None = None,
    into: Store | None = None,
) -> Folded:
    """Fold one unit cell by cell. In memory: the unit's log, folded where it is large, and one cell's tables.

    A new base leaves out what nobody can see any more: tombstones, clear markers, and rows whose TTL has run out by the
        snapshot's
    batch time. A delta keeps them, because they hide rows below. Rows of older columns are brought to the newest.

    Args:
        bottom: reads what lies below all tables (files of shards), if there is such a thing: (operator, state, low,
            high).
        into: where the tables are written; None is the root itself. They have the same paths there.

    Raises:
        MissingFile, CorruptSegment: the snapshot is damaged. StoreUnavailable: try again. What was written by then is
            garbage.
    """
    operator = next(o for o in context.operators if o.uid == unit.operator)
    state = next(s for s in operator.states if s.name == unit.state)
    if bottom is None and context.files is not None:
        bottom = _bottom(root, context.files)
    work = _Work(root, unit, context, StateVersions(operator, state), ids, bottom, into or root)
    total = Folded(read_bytes=sum(p.part.length for p in unit.log))
    log = work.log()
    for cell in unit.cells:
        pieces = (slice_hash_range(batch, cell.low, cell.high) for batch in log)
        total = total + work.cell(cell, [piece for piece in pieces if piece.num_rows])
    return total


def _bottom(root: Store, manifest: Manifest) -> Callable[[str, str, int, int], pa.RecordBatch]:
    """Reads the files of shards that lie below all tables; a range at a time, in the newest columns."""
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
    context: FoldContext
    versions: StateVersions
    ids: Ids
    bottom: Callable[[str, str, int, int], pa.RecordBatch] | None
    into: Store

    def log(self) -> list[pa.RecordBatch]:
        """The unit's log, newest first.

        Its batches are folded together with the tables, so that a row is moved once. Of a log that is too large for
        that an identity is kept once; folding is associative.
        """
        log: list[pa.RecordBatch] = []
        unfolded = self.context.sizes.unfolded_bytes
        bytes_max = unfolded
        with ThreadPoolExecutor(_READERS, "stillstate-fold") as pool:
            for chunk in _chunks(self.unit.log):
                log += [
                    self.versions.read(self._slice(batch), piece.snapshot_id, piece.path)
                    for piece, batch in zip(chunk, self._fetch(chunk, pool), strict=True)
                ]
                if sum(batch.nbytes for batch in log) > bytes_max:
                    log = [self.versions.fold(log, drop_deleted=False)]
                    bytes_max = log[0].nbytes + unfolded
        return log

    def _slice(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return slice_hash_range(batch, self.unit.low, self.unit.high)

    def _fetch(self, chunk: Sequence[LogPart], pool: ThreadPoolExecutor) -> list[pa.RecordBatch]:
        """The batches of parts; parts that lie near to each other in one object come by one request."""
        spans = _spans(chunk)
        bodies = list(pool.map(lambda span: _read_range(self.root, *span[:3]), spans))
        where = {
            id(piece): (body, start)
            for (_, start, _, pieces), body in zip(spans, bodies, strict=True)
            for piece in pieces
        }
        batches = []
        for piece in chunk:
            body, start = where[id(piece)]
            at = piece.part.offset - start
            batch = decode_part(body[at : at + piece.part.length], piece.part, piece.path)
            batches.append(StateSchema.of(batch.schema).check_batch(batch, piece.path))
        return batches

    def cell(self, cell: Cell, log: Sequence[pa.RecordBatch]) -> Folded:
        """A new base, a delta, or nothing.

        Args:
            log: of the cell, newest first; no batch is empty.
        """
        if cell.major:
            return self._major(cell, log)
        rows = self._rows_of(cell, log)
        if self._is_due(cell, rows):
            return self._major(cell, log)
        if not rows:
            return Folded()
        # A delta that is not larger than what comes on top of it is taken in: so few deltas lie above one another, and
        # a row is rewritten about log2(deltas) times before a major fold takes it (the binary counter of log-structured
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
        return Folded((), (table,), tuple(t.table.path for t in older), sum(t.table.bytes for t in older))

    def _rows_of(self, cell: Cell, log: Sequence[pa.RecordBatch]) -> float:
        """What folding leaves of a log, about: it is tried with the first part of the cell's range."""
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
            return True  # nothing lies below: a base costs no more than a delta
        if cell.base_bytes <= self.context.sizes.small_bytes:
            return self.context.decide
        return self.context.decide and cell.delta_bytes + log_rows * self._row_bytes(cell) >= cell.threshold

    @staticmethod
    def _row_bytes(cell: Cell) -> float:
        """Bytes of a row in a table of this cell."""
        stored = [*cell.base, *cell.deltas]
        rows = sum(t.table.rows for t in stored)
        return sum(t.table.bytes for t in stored) / rows if rows else 1.0

    def _major(self, cell: Cell, log: Sequence[pa.RecordBatch]) -> Folded:
        older = (*cell.deltas, *cell.base)
        batch = self._folded(cell, log, older, drop_deleted=True)
        tables = (self._write(batch, cell),) if batch.num_rows else ()
        return Folded(tables, (), tuple(t.table.path for t in older), sum(t.table.bytes for t in older))

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
        body = encode_table(batch)
        self.into.put(path, body)
        faults.reach("fold-table-written")
        return TableEntry(
            path,
            len(body),
            sha256(body),
            batch.num_rows,
            unit.operator,
            unit.state,
            cell.low,
            cell.high,
            self.context.snapshot_id,
        )


def _chunks(log: Sequence[LogPart]) -> Iterator[list[LogPart]]:
    chunk: list[LogPart] = []
    size = 0
    for piece in log:
        if chunk and size + piece.part.raw_bytes > _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(piece)
        size += piece.part.raw_bytes
    if chunk:
        yield chunk


_Span = tuple[str, int, int, list[LogPart]]


def _spans(chunk: Sequence[LogPart]) -> list[_Span]:
    """Range reads (path, offset, length) that bring all parts, and which parts each brings."""
    spans: list[_Span] = []
    for piece in sorted(chunk, key=lambda p: (p.path, p.part.offset)):
        offset, length = piece.part.offset, piece.part.length
        if spans:
            path, start, size, pieces = spans[-1]
            if path == piece.path and offset <= start + size + _GAP_BYTES:
                pieces.append(piece)
                spans[-1] = (path, start, max(size, offset + length - start), pieces)
                continue
        spans.append((piece.path, offset, length, [piece]))
    return spans


def _read_range(root: Store, path: str, offset: int, length: int) -> bytes:
    try:
        return root.read_range(path, offset, length)
    except FileNotFoundError as error:
        raise MissingFile(
            f"{path} is missing in {root.url} although a manifest names it. "
            "Restore the file from a copy of the job root, or start from an older snapshot"
        ) from error


# --- logs of seen files ------------------------------------------------------------------------------------------


def fold_source_logs(
    root: Store, manifest: Manifest, writer: str, *, everything: bool, into: Store | None = None
) -> tuple[tuple[FileEntry, ...], tuple[str, ...]]:
    """The log's new lines as files, and the paths of older ones that they take in.

    A file that is not larger than what comes after it is taken in, so there are few, and a line is rewritten few times.
    A file of at least half the size that one may have is left as it is, and with it all before it: so a fold reads and
    writes as much as is new, however long the log is.

    Args:
        everything: take in all of them but these.
        into: where they are written; None is the root itself.
    """
    if manifest.source is None:
        return (), ()
    written: list[FileEntry] = []
    removed: list[str] = []
    for source in manifest.source.logs:
        newest = replace(manifest, layers=())
        size = sum(len(text.encode()) + 1 for text in stream_source_log(root, newest, source))
        is_new = size > 0
        suffix = f"/source-{source}.log"
        stored = [f for x in manifest.layers for f in x.source_logs if f.path.endswith(suffix)]
        kept = len(stored)
        while kept and stored[kept - 1].bytes < SOURCE_LOG_PART_BYTES_MAX // 2:
            if not (everything or (is_new and stored[kept - 1].bytes <= size)):
                break
            kept -= 1
            size += stored[kept].bytes
        taken = stored[kept:]
        if not is_new and len(taken) < 2:
            continue
        texts = chain(stream_source_log(root, _only(manifest, taken), source), stream_source_log(root, newest, source))
        for number, body in enumerate(joined_texts(texts)):
            path = source_log_path(manifest.snapshot_id, writer, number, source)
            (into or root).put(path, body)
            written.append(FileEntry(path, len(body), sha256(body)))
        removed += [file.path for file in taken]
    return tuple(written), tuple(removed)


def _only(manifest: Manifest, files: Sequence[FileEntry]) -> Manifest:
    """The manifest with no log, and only these files of its layers."""
    chosen = set(files)
    layers = (replace(x, source_logs=tuple(f for f in x.source_logs if f in chosen)) for x in manifest.layers)
    return replace(manifest, segments=(), layers=tuple(layers))
