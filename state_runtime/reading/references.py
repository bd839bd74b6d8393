"""The objects that a snapshot needs on the store: they are copied with it, verified, and kept by garbage collection.

A manifest names most of them. The segments' indexes name the objects that tasks uploaded themselves, and the listing
names the files of shards. No other module decides which objects belong to a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from state_runtime.changelog.parts import PartEntry
from state_runtime.changelog.reader import read_index
from state_runtime.restore.uploaded_files import direct, read_listing
from state_runtime.snapshot.manifest import Manifest, SegmentEntry
from state_runtime.snapshot.paths import manifest_path
from state_runtime.store import Store

__all__ = ["Memo", "StoredRef", "references", "sink_references"]

RefKind = Literal["manifest", "segment", "direct", "table", "source-log", "listing", "shard-file", "output"]


@dataclass(frozen=True)
class StoredRef:
    """One object below the job root that a snapshot needs.

    Attributes:
        kind: "output" is staged output below the root; `references` yields none, because it belongs to the next run and
            not to the state.
        bytes: 0 for a manifest and -1 for a direct object: their size is not recorded. A direct object has at least
            `bytes_min`.
        digest: SHA-256; empty if none is recorded (manifests check themselves, direct objects part by part).
        operator, state: the owner of the data, if it has exactly one.
        hash_low, hash_high: closed range of key hashes.
        part: of a direct object the part that this reference is about.
    """

    kind: RefKind
    path: str
    bytes: int
    digest: str
    operator: str = ""
    state: str = ""
    hash_low: int = 0
    hash_high: int = (1 << 64) - 1
    bytes_min: int = 0
    part: PartEntry | None = None


Memo = dict[str, tuple["StoredRef", ...]]
"""The objects that segments lead to, by the segments' path: they are immutable, and snapshots share most of them."""


def references(root: Store, manifest: Manifest, memo: Memo | None = None) -> Iterator[StoredRef]:
    """Yield the objects that the snapshot needs, the manifest last. Several shards may name the same object.

    Reads only the index of each segment that leads to other objects, and the listing of files.

    Args:
        memo: filled and used, so that each segment is read once for several snapshots; the caller bounds its size.

    Raises:
        MissingFile, CorruptSegment, CorruptManifest, UnsupportedFormat: not all objects are known; nothing may be
            deleted.
        StoreUnavailable: try again.
    """
    memo = {} if memo is None else memo
    for segment in manifest.stored_segments:
        yield StoredRef("segment", segment.path, segment.bytes, segment.digest)
        if segment.direct_bytes:
            if segment.path not in memo:
                memo[segment.path] = tuple(_direct_objects(root, segment, manifest))
            yield from memo[segment.path]
    for layer in manifest.layers:
        for table in layer.tables:
            yield StoredRef(
                kind="table",
                path=table.path,
                bytes=table.bytes,
                digest=table.digest,
                operator=table.operator,
                state=table.state,
                hash_low=table.hash_low,
                hash_high=table.hash_high,
            )
        for log in layer.source_logs:
            yield StoredRef("source-log", log.path, log.bytes, log.digest)
    if manifest.shards is not None:
        entry = manifest.shards
        yield StoredRef("listing", entry.path, entry.bytes, entry.digest)
        listing = read_listing(direct(root), manifest)
        for shard in listing.shards if listing is not None else ():
            low, high = shard.hash_range
            for file in shard.files:
                if file.path:
                    yield StoredRef(
                        kind="shard-file",
                        path=file.path,
                        bytes=file.bytes,
                        digest=file.digest,
                        operator=shard.operator,
                        state="",
                        hash_low=low,
                        hash_high=high,
                    )
    yield StoredRef("manifest", manifest_path(manifest.snapshot_id), 0, "")


def _direct_objects(root: Store, segment: SegmentEntry, manifest: Manifest) -> Iterator[StoredRef]:
    for part in read_index(root, segment, manifest.job_uids).parts:
        if part.path:
            yield StoredRef(
                kind="direct",
                path=part.path,
                bytes=-1,
                digest="",
                operator=part.operator,
                state=part.state,
                hash_low=part.hash_low,
                hash_high=part.hash_high,
                bytes_min=part.offset + part.length,
                part=part,
            )


def sink_references(manifest: Manifest) -> Iterator[str]:
    """Yield paths of output that is staged for this snapshot, below its sink's folder; some sinks' folders are below
    the job root."""
    for output in manifest.outputs:
        for file in output.files:
            yield file.staged
