"""Materialization: fold changelog into state tables (sorted Parquet), apart from the checkpoints.

*Minor* folds the log into a delta layer on top of the tables; *major* folds everything into a new base. Both are plain
functions over a store and a manifest: they read a snapshot, write new immutable files under unique names, and return a
layer. Nothing refers to the layer until the driver puts it into its next manifest; a crash at any point leaves garbage,
never damage. A failed materialization never fails the job.

Write amplification: with ratio r a row of the base is rewritten once per r × base bytes of log, so at most 1 + 1/r
times the log is written by major ones, plus once by minor ones.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from state_runtime.changelog.reader import fetch_part, read_index, read_source_log, read_table
from state_runtime.changelog.segment import PartEntry, sha256
from state_runtime.changelog.versions import StateVersions, check_dropped
from state_runtime.ids import Ids
from state_runtime.limits import MAX_PARALLELISM, MIB
from state_runtime.settings import JobSettings
from state_runtime.snapshot.manifest import FileEntry, LayerEntry, Manifest, SegmentEntry, TableEntry
from state_runtime.snapshot.paths import safe_name
from state_runtime.state.table import hash_range_of_shard, slice_hash_range
from state_runtime.store import Store

__all__ = ["BackgroundMaterializer", "MaterializationPlan", "Materialized", "apply", "materialize", "plan"]

_LOG = logging.getLogger(__name__)

_RANGE_BYTES = 64 * MIB  # log and tables of one hash range are folded in memory at once
_ROW_GROUP_ROWS = 131_072  # a shard of a higher parallelism reads few row groups too many
_DELTAS_MAX = 8


@dataclass(frozen=True)
class MaterializationPlan:
    """What to fold.

    Attributes:
        first_layer: layers from this index on are folded together with the log; 0 is everything (major).
    """

    mode: Literal["minor", "major"]
    first_layer: int


@dataclass(frozen=True)
class Materialized:
    """A layer that folds the layers from `plan.first_layer` on and the segments up to `layer.last_snapshot_id`."""

    plan: MaterializationPlan
    layer: LayerEntry
    read_bytes: int


def plan(manifest: Manifest, settings: JobSettings) -> MaterializationPlan | None:
    """Whether folding is due, and how much; pure."""
    if not manifest.segments:
        return None
    log_bytes = manifest.log_bytes
    if log_bytes < settings.materialize_min_bytes and len(manifest.segments) < settings.materialize_max_segments:
        return None
    if not manifest.layers:
        return MaterializationPlan("major", 0)
    base_bytes = manifest.layers[0].total_bytes
    above_bytes = log_bytes + sum(layer.total_bytes for layer in manifest.layers[1:])
    if above_bytes >= settings.materialize_ratio * base_bytes:
        return MaterializationPlan("major", 0)
    deltas = len(manifest.layers) - 1
    return MaterializationPlan("minor", 1 if deltas >= _DELTAS_MAX else len(manifest.layers))


def apply(draft: Manifest, result: Materialized) -> Manifest:
    """The manifest with the folded layer in the place of what it folds; pure.

    Segments that were written while the materialization ran stay.
    """
    kept = tuple(s for s in draft.segments if s.snapshot_id > result.layer.last_snapshot_id)
    return replace(draft, layers=(*draft.layers[: result.plan.first_layer], result.layer), segments=kept)


def materialize(root: Store, manifest: Manifest, what: MaterializationPlan, *, ids: Ids) -> Materialized:
    """Fold a snapshot's log (and layers) into a new layer. One hash range is in memory at a time.

    A major fold leaves out what nobody can see any more: tombstones, clear markers, and rows whose TTL has run out by the
    snapshot's batch time. A minor one keeps them, because they hide rows of the layers below. Rows of older columns are
    brought to the newest; what is older than its operator or state (`since`) is left out of either.

    Raises:
        MissingFile, CorruptSegment: the snapshot is damaged. StoreUnavailable: try again.
    """
    layers = manifest.layers[what.first_layer :]
    bottom = what.first_layer == 0
    now_ms = manifest.time.batch_time_ms if bottom and manifest.time is not None else None
    parts = [
        (segment, part)
        for segment in reversed(manifest.segments)
        for part in read_index(root, segment, manifest.job_uid).parts
        if part.kind == "state"
    ]
    pieces = _pieces(root, manifest, layers, parts)
    read_bytes = sum(layer.total_bytes for layer in layers) + manifest.log_bytes
    raw_bytes = max(read_bytes, sum(part.raw_bytes for _, part in parts))
    ranges = min(max(1, -(-raw_bytes // _RANGE_BYTES)), MAX_PARALLELISM)
    name = f"{manifest.snapshot_id:020d}-{ids.uid()}"
    tables: list[TableEntry] = []
    for number in range(ranges):
        low, high = hash_range_of_shard(number, ranges)
        for (operator, state), (versions, stored) in pieces.items():
            newest_first = [
                versions.read(slice_hash_range(piece.load(), low, high), piece.snapshot_id, piece.path)
                for piece in stored
                if piece.low <= high and piece.high >= low
            ]
            batch = versions.fold(newest_first, drop_deleted=bottom, now_ms=now_ms)
            if batch.num_rows:
                path = f"tables/{operator}/{safe_name(state)}/{name}-{number:05d}.parquet"
                tables.append(_write_table(root, path, batch, operator, state, low, high))
    logs = _write_source_logs(root, manifest, what, name)
    first = layers[0].first_snapshot_id if layers else manifest.segments[0].snapshot_id
    layer = LayerEntry(0 if bottom else first, manifest.snapshot_id, tuple(tables), logs)
    return Materialized(what, layer, read_bytes)


@dataclass(frozen=True)
class _Piece:
    """A part or a table, and the newest snapshot that it holds."""

    path: str
    snapshot_id: int
    low: int
    high: int
    load: Callable[[], pa.RecordBatch]


def _pieces(
    root: Store, manifest: Manifest, layers: Sequence[LayerEntry], parts: Sequence[tuple[SegmentEntry, PartEntry]]
) -> dict[tuple[str, str], tuple[StateVersions, list[_Piece]]]:
    """Per state of the manifest how it is read, and what is stored of it, newest first.

    Operators that the manifest does not describe were given up, and are left out.

    Raises:
        CorruptSegment: a state that its operator does not have and did not drop.
    """
    operators = {operator.uid: operator for operator in manifest.operators}
    pieces: dict[tuple[str, str], tuple[StateVersions, list[_Piece]]] = {
        (o.uid, s.name): (StateVersions(o, s), []) for o in manifest.operators for s in o.states
    }

    def add(operator: str, state: str, piece: _Piece) -> None:
        known = pieces.get((operator, state))
        if known is not None:
            if piece.snapshot_id >= known[0].since:
                known[1].append(piece)
        elif operator in operators:
            check_dropped(operators[operator], state, piece.snapshot_id, piece.path)

    for segment, part in parts:
        load = partial(fetch_part, root, segment.path, part)
        piece = _Piece(part.path or segment.path, segment.snapshot_id, part.hash_low, part.hash_high, load)
        add(part.operator, part.state, piece)
    for layer in reversed(layers):
        for table in layer.tables:
            load = partial(read_table, root, table)
            piece = _Piece(table.path, layer.last_snapshot_id, table.hash_low, table.hash_high, load)
            add(table.operator, table.state, piece)
    return pieces


def _write_table(
    root: Store, path: str, batch: pa.RecordBatch, operator: str, state: str, low: int, high: int
) -> TableEntry:
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.Table.from_batches([batch]),
        sink,
        compression="zstd",
        row_group_size=_ROW_GROUP_ROWS,
        write_page_checksum=True,
        use_dictionary=False,
    )
    body = sink.getvalue().to_pybytes()
    root.put(path, body)
    return TableEntry(path, len(body), sha256(body), batch.num_rows, operator, state, low, high)


def _write_source_logs(root: Store, manifest: Manifest, what: MaterializationPlan, name: str) -> tuple[FileEntry, ...]:
    if manifest.source is None:
        return ()
    folded = replace(manifest, layers=manifest.layers[what.first_layer :])
    entries: list[FileEntry] = []
    for source in manifest.source.logs:
        lines = read_source_log(root, folded, source)
        if lines:
            body = "\n".join(lines).encode()
            path = f"tables/_sources/{name}/source-{source}.log"
            root.put(path, body)
            entries.append(FileEntry(path, len(body), sha256(body)))
    return tuple(entries)


class BackgroundMaterializer:
    """Runs `materialize` beside the driver's epochs, one at a time, in a thread of its own.

    Life cycle: idle → running (a thread) → done (a result waits for the next commit) → idle. The driver calls `start_if_due`
    after a commit and `take` before one; both return at once. Failures are logged and counted; the next commit tries again.
    """

    def __init__(self, root: Store, settings: JobSettings, ids: Ids) -> None:
        self._root = root
        self._settings = settings
        self._ids = ids
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._result: Materialized | None = None
        self.failures_in_a_row = 0
        self.completed = 0

    def start_if_due(self, manifest: Manifest) -> None:
        """Begin folding `manifest` if it is time and nothing runs."""
        with self._lock:
            if self._thread is not None or self._result is not None:
                return
            what = plan(manifest, self._settings)
            if what is None:
                return
            thread = threading.Thread(
                target=self._run, args=(manifest, what), name="stillstate-materializer", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                # No more threads on this machine; the next commit tries again.
                _LOG.exception("materialization of snapshot %d could not start", manifest.snapshot_id)
                self.failures_in_a_row += 1
                return
            self._thread = thread

    def take(self, draft: Manifest) -> Manifest:
        """`draft` with the finished layer, if there is one.

        The caller must call `settled` once it knows whether the manifest with the layer was committed.
        """
        with self._lock:
            return apply(draft, self._result) if self._result is not None else draft

    def settled(self, committed: Manifest) -> None:
        """Forget a result that a committed manifest holds."""
        with self._lock:
            if self._result is not None and self._result.layer in committed.layers:
                self._result = None
                self.completed += 1

    def join(self, timeout_s: float) -> None:
        """Wait for a running fold to end, at most so long; what it wrote is garbage if nobody takes it."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _run(self, manifest: Manifest, what: MaterializationPlan) -> None:
        try:
            result = materialize(self._root, manifest, what, ids=self._ids)
        except Exception:
            # The job must go on, whatever happened here; the log stays and is folded later.
            _LOG.exception("materialization (%s) of snapshot %d failed", what.mode, manifest.snapshot_id)
            with self._lock:
                self.failures_in_a_row += 1
                self._thread = None
            return
        with self._lock:
            self.failures_in_a_row = 0
            self._result, self._thread = result, None
