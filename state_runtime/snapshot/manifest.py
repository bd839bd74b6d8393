"""The manifest of a snapshot: everything that a restore needs, by relative path, size and digest; pure values.

A manifest lists segments and table files, never keys or the parts inside a segment. So its size grows with the number
of epochs since the last materialization, and not with shards × states.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Literal

from state_runtime.base.errors import CorruptManifest, InvalidConfiguration, check
from state_runtime.base.limits import MANIFEST_BYTES_MAX, MAX_PARALLELISM, SOURCE_FILES_BYTES_MAX, SOURCE_FILES_MAX
from state_runtime.base.progress import NOT_IN_MANIFESTS, Progress
from state_runtime.snapshot.document import (
    FORMAT_VERSION,
    FORMAT_WITH_ROWS,
    FORMAT_WITH_SOURCES,
    decode_document,
    encode_document,
    header_format,
)
from state_runtime.snapshot.paths import check_uid
from state_runtime.store.paths import check_relative_path

__all__ = [
    "DUE_WHEN_REMOVED",
    "FileEntry",
    "InflightNumbers",
    "LayerEntry",
    "Manifest",
    "OpenBatch",
    "OperatorEntry",
    "OriginEntry",
    "RowsLayout",
    "SchemaVersion",
    "SegmentEntry",
    "ShardFilesEntry",
    "SnapshotFormat",
    "SourceFile",
    "SourcePosition",
    "StagedFile",
    "StagedOutput",
    "StateEntry",
    "StateKind",
    "TableEntry",
    "TimeEntry",
    "format_of",
]


StateKind = Literal["value", "list", "map", "timers", "rows"]
SnapshotFormat = Literal["changelog", "incremental", "canonical"]


@dataclass(frozen=True)
class SchemaVersion:
    """Columns that a state had before they were changed.

    Attributes:
        until: first snapshot with the columns of the next version; rows of older ones (and of no newer) are these.
        schema, time: as in `StateEntry`.
        ended_ms: batch time (ms) when the next version took over. Rows whose TTL had run out by then are gone for good,
            even if the next version has no TTL.
    """

    until: int
    schema: str
    time: Literal["", "expires", "due"] = ""
    ended_ms: int = 0


@dataclass(frozen=True)
class StateEntry:
    """A named state of an operator.

    Attributes:
        kind: "value" has one row per key; the others have many (state/table.py).
        schema: Spark's DDL of the value columns, with `DEFAULT <literal>` where older rows get a value; empty if there
            are no value columns.
        entry_schema: DDL of a map's key columns.
        time: which time column its rows have.
        since: first snapshot of this state; anything older of that name was dropped and is not read.
        history: its earlier columns, oldest first, as long as such rows are stored. A row passes through all versions
            after its own. So a column that was dropped and added again does not bring old values back.
    """

    name: str
    kind: StateKind
    schema: str
    entry_schema: str = ""
    time: Literal["", "expires", "due"] = ""
    since: int = 0
    history: tuple[SchemaVersion, ...] = ()


DUE_WHEN_REMOVED = ", panes due when removed"
"""The suffix of the modes of windows in append mode whose panes are due when they are removed. Earlier versions made
them due at a window's close: those must not read the newer state, and the newer ones read theirs."""


@dataclass(frozen=True)
class OperatorEntry:
    """A stateful operator.

    Attributes:
        key_schema: Spark's DDL of the key columns.
        modes: of a processor its time and output mode, which cannot change.
        next_due_ms: lower bound of when a shard must be visited next (`Operator.wake_ms`), on the operator's clock;
            None: never.
        functions: the functions of a built-in operator's outputs, by name: a name keeps its function over restarts.
        since: first snapshot of this operator; anything older of that uid is not read.
        dropped: dropped states, and the first snapshot without each: older data of them is skipped, and the name in
            newer data is damage. Kept as long as older data is stored.
        says: of an operator of a query (`StreamingJob.query`) the expressions of its key columns, down to the columns
            of sources; under "" a digest of its input, if a number in its name tells it from others.
    """

    uid: str
    kind: str
    key_schema: str
    states: tuple[StateEntry, ...]
    modes: str = ""
    next_due_ms: int | None = None
    functions: dict[str, str] = field(default_factory=dict)
    since: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    says: dict[str, str] = field(default_factory=dict)

    def state(self, name: str) -> StateEntry | None:
        """Return the state of that name."""
        return next((state for state in self.states if state.name == name), None)


@dataclass(frozen=True)
class TimeEntry:
    """The clocks after an epoch.

    Attributes:
        batch_time_ms: processing time of the epoch.
        watermark_ms: the epoch's watermark over all sources; an operator's rows are late in the next epoch by
            `watermark_of`.
        event_time_ms: per watermarked column of the sources the highest event time so far.
        clocks: the watermark of each operator that does not have `watermark_ms`: its own sources are further.
        seen_ms: per source that may be left out while it is idle, the batch time of its newest rows.
        idle: the sources that are left out: the newest batch that was read came too long after their rows.
    """

    batch_time_ms: int
    watermark_ms: int = 0
    event_time_ms: dict[str, int] = field(default_factory=dict)
    clocks: dict[str, int] = field(default_factory=dict)
    seen_ms: dict[str, int] = field(default_factory=dict)
    idle: tuple[str, ...] = ()

    def watermark_of(self, uid: str) -> int:
        """Return the watermark of an operator."""
        return self.clocks.get(uid, self.watermark_ms)


@dataclass(frozen=True)
class FileEntry:
    """An immutable file below the job root."""

    path: str
    bytes: int
    digest: str


@dataclass(frozen=True)
class SegmentEntry:
    """The changelog of one epoch.

    Attributes:
        path: below the job root.
        bytes: size of the packed object.
        digest: SHA-256 of the packed object: for copies and whole-file checks; readers check the parts that they read.
        index_bytes: length of the index at its end (with the footer), so that one range read gets it.
        snapshot_id: the checkpoint that the segment was written for; orders the log.
        rows: rows in all parts.
        direct_bytes: bytes of the objects that tasks uploaded themselves; the index names them.
    """

    path: str
    bytes: int
    digest: str
    index_bytes: int
    snapshot_id: int
    rows: int
    direct_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.bytes + self.direct_bytes


@dataclass(frozen=True)
class TableEntry:
    """A sorted Parquet file of one state, over one closed range of key hashes (unsigned).

    Attributes:
        last_snapshot_id: newest snapshot that it holds; 0 is its layer's. A base table may be younger than its layer:
            ranges are folded one by one, and the deltas above a younger table in its range were removed.
    """

    path: str
    bytes: int
    digest: str
    rows: int
    operator: str
    state: str
    hash_low: int
    hash_high: int
    last_snapshot_id: int = 0


@dataclass(frozen=True)
class ShardFilesEntry:
    """With the changelog off: the object that lists the backend's files of all shards (snapshot/shard_files.py).

    It is the bottom of the state. No manifest has tables above it. Newer segments are above it once the changelog was
    switched on. Segments that are not newer, and layers, hold only what sources have seen.

    Attributes:
        backend: the backend that wrote the files.
        parallelism: of the run that wrote them.
        snapshot_id: the checkpoint whose state they are.
        total_bytes: of all files that it lists; a file that several shards share counts once.
        oldest_snapshot_id: the checkpoint that the oldest shard's files were written for: their rows have the columns
            of that time.
    """

    path: str
    bytes: int
    digest: str
    backend: Literal["arrow", "rocksdb"]
    parallelism: int
    snapshot_id: int
    total_bytes: int
    oldest_snapshot_id: int = 0


@dataclass(frozen=True)
class LayerEntry:
    """State tables that fold the changelog of the snapshots `first_snapshot_id … last_snapshot_id`.

    The first layer of a manifest is the base: it starts at the beginning and holds no tombstones. Later layers are
    deltas on top of it, in order.
    """

    first_snapshot_id: int
    last_snapshot_id: int
    tables: tuple[TableEntry, ...]
    source_logs: tuple[FileEntry, ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(t.bytes for t in self.tables) + sum(f.bytes for f in self.source_logs)

    def newest_in(self, table: TableEntry) -> int:
        """Return the newest snapshot that one of its tables holds."""
        return table.last_snapshot_id or self.last_snapshot_id


@dataclass(frozen=True)
class OriginEntry:
    """A snapshot that this job (or an ancestor of it) was started from.

    Attributes:
        job, job_uid, snapshot_id, commit_id: identify it. Segments and listings that were taken over have `job_uid`.
        mode: how it was taken over, which decides its owner since then.
    """

    job: str
    job_uid: str
    snapshot_id: int
    commit_id: str
    mode: Literal["NO_CLAIM", "CLAIM", "IMPORT", "BOOTSTRAP", "CONVERT"]


@dataclass(frozen=True)
class SourceFile:
    """A small file that a source keeps for itself in Spark's checkpoint directory.

    Attributes:
        path: below Spark's folder `sources`, so it begins with the source's number: `0/0`.
        content: its bytes, in Base64.
    """

    path: str
    content: str


@dataclass(frozen=True)
class SourcePosition:
    """The position of Spark's sources: a fresh Spark checkpoint directory is filled from it.

    Attributes:
        batch_id: newest committed micro-batch.
        metadata: text of Spark's `metadata` file (the query id is kept over restores).
        offsets: text of `offsets/<batch_id>`.
        previous_offsets: text of `offsets/<batch_id - 1>`; empty for batch 0.
        commit: text of `commits/<batch_id>`.
        logs: indices of the sources with a log of seen files (`sources/<index>`); the entries are in the changelog
            and the layers, because they grow with the input.
        files: files of the other sources below `sources`, byte for byte. A manifest without the field has no such file.
        names: for each line of `offsets` the name of its source in the pipeline; empty if no source has a name. The
            index of a line is the source's number here, whatever its place in the pipeline, and stays when sources come
            and go (pipeline/source_names.py).
        away: the numbers of the sources that the pipeline did not read any more, as the user had allowed.
    """

    batch_id: int
    metadata: str
    offsets: str
    previous_offsets: str
    commit: str
    logs: tuple[int, ...] = ()
    files: tuple[SourceFile, ...] = ()
    names: tuple[str, ...] = ()
    away: tuple[int, ...] = ()


@dataclass(frozen=True)
class StagedFile:
    """An output file that a task wrote; publishing gives it its final name. Paths are below the sink's folder."""

    staged: str
    final: str
    bytes: int
    rows: int


@dataclass(frozen=True)
class StagedOutput:
    """The output that one sink publishes for one checkpoint."""

    sink: str
    epoch: int
    files: tuple[StagedFile, ...]


@dataclass(frozen=True)
class RowsLayout:
    """The columns of in-flight rows.

    Attributes:
        columns: names and types (`changelog.rows.encode_columns`).
        functions: the functions of a built-in operator's outputs, in order (JSON): columns that the runtime makes for
            them have numbers and no names.
    """

    columns: str
    functions: str = ""


@dataclass(frozen=True)
class InflightNumbers:
    """The in-flight rows of one operator, in numbers.

    Attributes:
        rows, bytes: approximate; bytes in memory.
        epoch, read_at_ms: the oldest epoch that read one of them, and its batch time.
        layouts: every layout that some of them have.
    """

    uid: str
    rows: int
    bytes: int
    epoch: int
    read_at_ms: int
    layouts: tuple[RowsLayout, ...] = ()


@dataclass(frozen=True)
class OpenBatch:
    """The newest batch, if it is not done: the source's position is behind it, and the next epochs continue it.

    Attributes:
        late_watermark_ms: the watermark that decides which of its rows are late: that of the batch before.
        late_clocks: the same of each operator that has another one.
        settled: uids of the operators that are done with it: with their rows, and with everything that was due.
        begun: uid of the operator that has begun to process due work, because its input is complete; or empty.
        listing: path of the segment whose index lists the rows in flight (`SegmentIndex.passes`); empty without such
            rows.
        segments: the segments with the rows, including the listing's. They are kept for the rows; `Manifest.segments`
            says which of them count for the state.
        operators: the operators that have rows in flight.
    """

    late_watermark_ms: int
    settled: tuple[str, ...] = ()
    begun: str = ""
    listing: str = ""
    segments: tuple[SegmentEntry, ...] = ()
    operators: tuple[InflightNumbers, ...] = ()
    late_clocks: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """One complete snapshot. Written last, by create-if-absent; immutable afterwards.

    Attributes:
        versions: per operator uid the local version ids of its shards, 16 hexadecimal characters each, joined; only a
            hint for quick restarts (`-` × 16 for a shard without one). Valid for this `parallelism`.
        progress: numbers of this epoch that are known before the manifest is written: its times end there.
        previous: the complete numbers of the checkpoint before, from the same run.
        time: None before the first epoch.
        epoch: number of the newest epoch. It counts on over all runs, is never below the snapshot's id, and orders list
            elements and output; several epochs may end in one checkpoint. 0 in manifests of format 2 and older: there
            it is the id.
        shards: the state's bottom where the changelog is (or was) off.
        origins: where the job's state came from, oldest first; empty if it began empty.
        abandoned: closed ranges of snapshot ids of this job that are not ancestors of this one, ascending, because the
            job went back to an older snapshot. Local copies of them are not used.
        drained: the job was told that no more input comes, so every window and event-time timer has fired: later input
            would find its window closed. A run continues from here only on request. The watermark in `time` is that of
            the input.
        open_batch: None, unless the newest batch is not done.
        undelivered: sinks with a first and a last epoch each, whose output may not have been published when the job
            went back below it. Sinks have newer epochs since, and would pass over it.
        left_epochs: closed ranges of epochs that the job went back behind, ascending: their output was given by a
            history that is not this one's.
        withdrawn: sinks with a first and a last epoch each, whose output was taken out of the sink's place because the
            job went back behind it, or is being taken out.
        session: the settings of Spark's session that change results, with their values, under which its newest epoch
            ran (pipeline/result_settings.py); empty if it was made by a version that did not record them.
    """

    format_version: int
    job_uid: str
    snapshot_id: int
    term: int
    commit_id: str
    kind: Literal["checkpoint", "fencing"]
    created_at_ms: int
    parallelism: int
    operators: tuple[OperatorEntry, ...] = ()
    segments: tuple[SegmentEntry, ...] = ()
    layers: tuple[LayerEntry, ...] = ()
    source: SourcePosition | None = None
    outputs: tuple[StagedOutput, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    progress: Progress | None = None
    previous: Progress | None = None
    time: TimeEntry | None = None
    epoch: int = 0
    shards: ShardFilesEntry | None = None
    origins: tuple[OriginEntry, ...] = ()
    abandoned: tuple[tuple[int, int], ...] = ()
    drained: bool = False
    open_batch: OpenBatch | None = None
    session: dict[str, str] = field(default_factory=dict)
    undelivered: tuple[tuple[str, int, int], ...] = ()
    left_epochs: tuple[tuple[int, int], ...] = ()
    withdrawn: tuple[tuple[str, int, int], ...] = ()

    @property
    def job_uids(self) -> frozenset[str]:
        """The jobs whose segments and listings it may name: the job itself, and those that its state came from."""
        return frozenset({self.job_uid, *(origin.job_uid for origin in self.origins)})

    def abandons(self, snapshot_id: int) -> bool:
        """Whether a snapshot of this job is no ancestor of this one, because the job went back to an older one."""
        return any(first <= snapshot_id <= last for first, last in self.abandoned)

    @property
    def snapshot_format(self) -> SnapshotFormat:
        """`canonical`: only one layer of sorted Parquet tables, without rows in flight. `incremental`: no changelog,
        but several layers or files of a backend. `changelog`: anything with changelog segments."""
        if self.segments:
            return "changelog"
        is_plain = self.shards is None and self.open_batch is None
        return "canonical" if is_plain and len(self.layers) <= 1 else "incremental"

    @property
    def stored_segments(self) -> tuple[SegmentEntry, ...]:
        """All segments that the snapshot needs, each once: for its state, or for rows in flight."""
        held = self.open_batch.segments if self.open_batch is not None else ()
        named = {s.path for s in self.segments}
        return (*self.segments, *(s for s in held if s.path not in named))

    @property
    def state_segments(self) -> tuple[SegmentEntry, ...]:
        """The segments that may hold state: segments that are not newer than the files of shards only hold what sources
        have seen."""
        if self.shards is None:
            return self.segments
        return tuple(s for s in self.segments if s.snapshot_id > self.shards.snapshot_id)

    @property
    def log_bytes(self) -> int:
        """Changelog bytes since the tables."""
        return sum(s.total_bytes for s in self.segments)

    @property
    def table_bytes(self) -> int:
        """Bytes of the state tables."""
        return sum(layer.total_bytes for layer in self.layers)

    @property
    def total_bytes(self) -> int:
        """Bytes that a full restore reads."""
        stored = sum(s.total_bytes for s in self.stored_segments)
        return stored + self.table_bytes + (self.shards.total_bytes if self.shards is not None else 0)

    def encode(self) -> bytes:
        """Return the file's bytes; the size limit is checked before anything is written."""
        check(self.format_version >= _format_needed(self), "a manifest has a format that knows all of its fields")
        body = encode_document(
            "manifest",
            self,
            self.format_version,
            left_out=(
                ("source", "files"),
                ("source", "names"),
                ("source", "away"),
                ("time", "clocks"),
                ("time", "seen_ms"),
                ("time", "idle"),
                ("open_batch", "late_clocks"),
                ("operators", "says"),
                *(
                    (outer, inner)
                    for outer in ("progress", "previous")
                    for inner in ("inflight", "spilled_bytes", *NOT_IN_MANIFESTS)
                ),
            ),
            younger={"open_batch": None, "session": {}, "undelivered": (), "left_epochs": (), "withdrawn": ()},
        )
        if len(body) > MANIFEST_BYTES_MAX:
            staged = sum(len(output.files) for output in self.outputs)
            raise CorruptManifest(
                f"the manifest of snapshot {self.snapshot_id} would have {len(body):,} bytes, more than "
                f"{MANIFEST_BYTES_MAX:,}. It names {staged:,} files of output and {len(self.stored_segments):,} "
                "segments: partition the output by columns with fewer values or take a lower parallelism; materialize "
                "the changelog (is materialization switched off?)"
            )
        return body

    @staticmethod
    def decode(data: bytes, where: str) -> Manifest:
        """Parse and check; every path in the result is a plain relative one.

        Raises:
            CorruptManifest, UnsupportedFormat: see `decode_document`.
        """
        manifest = decode_document("manifest", Manifest, data, where)
        format_version = header_format(data)
        if manifest.format_version != format_version:
            raise CorruptManifest(f"{where} names format {manifest.format_version} inside format {format_version}")
        if format_version < _format_needed(manifest):
            raise CorruptManifest(f"{where} is damaged: it has fields that format {format_version} does not have")
        _check_numbers(manifest, where)
        for segment in manifest.stored_segments:
            check_relative_path(segment.path)
        if manifest.open_batch is not None:
            _check_open_batch(manifest.open_batch, where)
        for layer in manifest.layers:
            for path in [*(t.path for t in layer.tables), *(f.path for f in layer.source_logs)]:
                check_relative_path(path)
        if manifest.source is not None:
            _check_source_files(manifest.source, where)
            _check_source_names(manifest.source, where)
        if manifest.shards is not None:
            check_relative_path(manifest.shards.path)
        for output in manifest.outputs:
            for file in output.files:
                check_relative_path(file.staged)
                check_relative_path(file.final)
        for operator in manifest.operators:
            try:
                check_uid(operator.uid, "operator uid")
            except InvalidConfiguration as error:
                raise CorruptManifest(f"{where} is damaged: {error}") from error
            _check_states(operator, where)
        if len({operator.uid for operator in manifest.operators}) != len(manifest.operators):
            # Readers look operators up by uid: the states of one would be read by the description of the other.
            raise CorruptManifest(f"{where} is damaged: it has two operators of one uid")
        return manifest


def format_of(manifest: Manifest) -> int:
    """Return the format of a manifest: the oldest that can represent it."""
    return max(FORMAT_VERSION, _format_needed(manifest))


def _format_needed(manifest: Manifest) -> int:
    """Return the oldest format that knows the fields that a manifest has; 0 if all formats do."""
    time, batch, source = manifest.time, manifest.open_batch, manifest.source
    has_clocks = time is not None and bool(time.clocks or time.seen_ms or time.idle)
    has_late_clocks = batch is not None and bool(batch.late_clocks)
    is_of_query = any(operator.says for operator in manifest.operators)
    if has_clocks or has_late_clocks or is_of_query or (source is not None and source.names):
        return FORMAT_WITH_SOURCES
    return 0 if batch is None else FORMAT_WITH_ROWS


def _check_open_batch(batch: OpenBatch, where: str) -> None:
    """Check an open batch.

    Raises:
        CorruptManifest: rows are in flight without a place, or numbers are impossible.
    """
    held = {segment.path for segment in batch.segments}
    uids = [o.uid for o in batch.operators]
    numbers = [n for o in batch.operators for n in (o.rows, o.bytes, o.epoch, o.read_at_ms)]
    if (
        bool(batch.listing) != bool(batch.operators)
        or (batch.listing and batch.listing not in held)
        or len(held) != len(batch.segments)
        or len(set(uids)) != len(uids)
        or any(not 0 <= n < 1 << 63 for n in numbers)
    ):
        raise CorruptManifest(f"{where} is damaged: what it says of in-flight rows cannot be")


def _check_numbers(manifest: Manifest, where: str) -> None:
    """Check that sizes, ids and ranges are possible; readers do arithmetic with them.

    Raises:
        CorruptManifest: a number is impossible.
    """
    tables = [table for layer in manifest.layers for table in layer.tables]
    sizes = [manifest.snapshot_id, manifest.term, manifest.parallelism, manifest.epoch]
    sizes += [
        n for s in manifest.stored_segments for n in (s.bytes, s.index_bytes, s.rows, s.direct_bytes, s.snapshot_id)
    ]
    sizes += [n for t in tables for n in (t.bytes, t.rows, t.last_snapshot_id)]
    sizes += [n for ends in manifest.left_epochs for n in ends]
    sizes += [n for _, *ends in manifest.withdrawn for n in ends]
    sizes += [n for x in manifest.layers for n in (x.first_snapshot_id, x.last_snapshot_id)]
    sizes += [f.bytes for x in manifest.layers for f in x.source_logs]
    sizes += [f.bytes for output in manifest.outputs for f in output.files]
    if (shards := manifest.shards) is not None:
        sizes += [shards.bytes, shards.parallelism, shards.snapshot_id, shards.total_bytes, shards.oldest_snapshot_id]
    sizes += [n for o in manifest.operators for n in (o.since, *o.dropped.values(), *(s.since for s in o.states))]
    times: list[int] = []
    if (time := manifest.time) is not None:
        times += [time.batch_time_ms, time.watermark_ms]
        times += [n for each in (time.event_time_ms, time.clocks, time.seen_ms) for n in each.values()]
    if (batch := manifest.open_batch) is not None:
        times += [batch.late_watermark_ms, *batch.late_clocks.values()]
    if any(abs(n) >= 1 << 63 for n in times):
        raise CorruptManifest(f"{where} is damaged: a time is out of bounds")
    if any(not 0 <= n < 1 << 63 for n in sizes) or manifest.parallelism > MAX_PARALLELISM:
        raise CorruptManifest(f"{where} is damaged: a size, an id or a number of rows is out of bounds")
    if any(not 0 <= t.hash_low <= t.hash_high for t in tables):
        raise CorruptManifest(f"{where} is damaged: a table's lowest key hash is above its highest")


def _check_source_files(position: SourcePosition, where: str) -> None:
    """Check the files, which are written to the driver's disk: only below their source's folder, each once, and small.

    Raises:
        CorruptManifest: they are not as Stillstate writes them. CorruptData: a path is not a plain one.
    """
    paths = [check_relative_path(file.path) for file in position.files]
    sources = [path.partition("/") for path in paths]
    if len(set(paths)) != len(paths) or any(not number.isdigit() or not name for number, _, name in sources):
        raise CorruptManifest(f"{where} is damaged: a file of a source has no place of its own")
    size = 0
    for file in position.files:
        try:
            size += len(base64.b64decode(file.content, validate=True))
        except ValueError as error:
            raise CorruptManifest(f"{where} is damaged: a file of a source cannot be decoded: {error}") from error
    if len(paths) > SOURCE_FILES_MAX or size > SOURCE_FILES_BYTES_MAX:
        raise CorruptManifest(f"{where} is damaged: the files of its sources are {len(paths)} with {size:,} bytes")


def _check_source_names(position: SourcePosition, where: str) -> None:
    """Check that each source has a name, if any has.

    Raises:
        CorruptManifest: there are more or fewer names than sources, or a number without a source.
    """
    lines = len(position.offsets.split("\n")) - 2
    numbers = (*position.logs, *position.away)
    if (position.names or position.away) and (len(position.names) != lines or any(not 0 <= n < lines for n in numbers)):
        raise CorruptManifest(f"{where} is damaged: {len(position.names)} names for {lines} sources")


def _check_states(operator: OperatorEntry, where: str) -> None:
    """Check names and versions: readers look states up by name, and rely on the order of versions.

    Raises:
        CorruptManifest: a name appears twice, a time does not fit the kind, or versions are out of order.
    """
    names = [state.name for state in operator.states]
    if len(set(names)) != len(names):
        raise CorruptManifest(f"{where} is damaged: operator {operator.uid!r} has two states of one name")
    for state in operator.states:
        name = f"{where} is damaged: operator {operator.uid!r}, state {state.name!r}"
        if (state.kind == "timers" and state.time != "due") or (state.kind in ("list", "map") and state.time == "due"):
            raise CorruptManifest(f"{name} is {state.kind} and has the time {state.time!r}")
        ends = [version.until for version in state.history]
        if any(end <= begin for begin, end in zip([state.since, *ends], ends)):
            raise CorruptManifest(f"{name}: its schema versions end at {ends}, which is not in order")
