"""The manifest of a snapshot: everything that a restore needs, by relative path, size and digest; pure values.

A manifest lists segments and table files, never keys or the parts inside a segment, so its size follows the number
of epochs since the last materialization and not the shards × states.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from state_runtime.errors import CorruptManifest, InvalidConfiguration
from state_runtime.limits import MANIFEST_BYTES_MAX
from state_runtime.progress import Progress
from state_runtime.snapshot.document import FORMAT_VERSION, decode_document, encode_document
from state_runtime.snapshot.paths import check_relative_path, check_uid

__all__ = [
    "FileEntry",
    "LayerEntry",
    "Manifest",
    "OperatorEntry",
    "SegmentEntry",
    "SourcePosition",
    "StagedFile",
    "StagedOutput",
    "StateEntry",
    "TableEntry",
]


@dataclass(frozen=True)
class StateEntry:
    """A named state of an operator. `schema` is Spark's DDL of the value columns."""

    name: str
    kind: Literal["value"]
    schema: str


@dataclass(frozen=True)
class OperatorEntry:
    """A stateful operator. `key_schema` is Spark's DDL of the key columns."""

    uid: str
    kind: str
    key_schema: str
    states: tuple[StateEntry, ...]


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
        digest: SHA-256 of the packed object.
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
    """A sorted Parquet file of one state, over one closed range of key hashes (unsigned)."""

    path: str
    bytes: int
    digest: str
    rows: int
    operator: str
    state: str
    hash_low: int
    hash_high: int


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


@dataclass(frozen=True)
class SourcePosition:
    """Where Spark's sources stand: what a fresh Spark checkpoint directory is primed with.

    Attributes:
        batch_id: newest committed micro-batch.
        metadata: text of Spark's `metadata` file (the query id is kept over restores).
        offsets: text of `offsets/<batch_id>`.
        previous_offsets: text of `offsets/<batch_id - 1>`; empty for batch 0.
        commit: text of `commits/<batch_id>`.
        logs: indices of the sources with a log of seen files (`sources/<index>`); the entries are in the changelog
            and the layers, because they grow with the input.
    """

    batch_id: int
    metadata: str
    offsets: str
    previous_offsets: str
    commit: str
    logs: tuple[int, ...] = ()


@dataclass(frozen=True)
class StagedFile:
    """An output file that a task wrote and that publishing gives its final name. Paths are below the sink's folder."""

    staged: str
    final: str
    bytes: int
    rows: int


@dataclass(frozen=True)
class StagedOutput:
    """What one sink publishes for one checkpoint."""

    sink: str
    epoch: int
    files: tuple[StagedFile, ...]


@dataclass(frozen=True)
class Manifest:
    """One complete snapshot. Written last, by create-if-absent; immutable afterwards.

    Attributes:
        versions: per operator uid the local version ids of its shards, 16 hexadecimal characters each, joined; only a
            hint for quick restarts (`-` × 16 where a shard has none). Valid for this `parallelism`.
        progress: numbers of this epoch as far as they are known before the manifest is written: its times end there.
        previous: the complete numbers of the checkpoint before, from the same run.
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
        return self.log_bytes + self.table_bytes

    def encode(self) -> bytes:
        """The file's bytes; the bound is checked before anything is written."""
        body = encode_document("manifest", self, self.format_version)
        if len(body) > MANIFEST_BYTES_MAX:
            raise CorruptManifest(
                f"the manifest of snapshot {self.snapshot_id} would have {len(body):,} bytes, more than "
                f"{MANIFEST_BYTES_MAX:,}; materialize the changelog (is materialization switched off?)"
            )
        return body

    @staticmethod
    def decode(data: bytes, where: str) -> Manifest:
        """Parse and check; every path in the result is a plain relative one.

        Raises:
            CorruptManifest, UnsupportedFormat: see `decode_document`.
        """
        manifest = decode_document("manifest", Manifest, data, where)
        if manifest.format_version != FORMAT_VERSION:
            raise CorruptManifest(f"{where} names format {manifest.format_version} inside format {FORMAT_VERSION}")
        for segment in manifest.segments:
            check_relative_path(segment.path)
        for layer in manifest.layers:
            for path in [*(t.path for t in layer.tables), *(f.path for f in layer.source_logs)]:
                check_relative_path(path)
        for output in manifest.outputs:
            for file in output.files:
                check_relative_path(file.staged)
                check_relative_path(file.final)
        for operator in manifest.operators:
            try:
                check_uid(operator.uid, "operator uid")
            except InvalidConfiguration as error:
                raise CorruptManifest(f"{where} is damaged: {error}") from error
        return manifest
