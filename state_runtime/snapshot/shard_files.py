"""With the changelog off: the backend's files that are the state of each shard; pure.

    {"stillstate": "shard-files", …}        a document as any other (snapshot/document.py), one per checkpoint

A *listing* names for every shard of every operator the version of its local state, in the backend's own words, and the
place of the version's files on the primary store. Files are immutable. Where it matters they are named by their
content's digest: a file that two versions share, or that a shard of another parallelism took over, is stored once.

Shards that a listing does not name have no state.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import pyarrow as pa

from state_runtime.base.errors import CorruptData, CorruptManifest, InvalidConfiguration, check
from state_runtime.base.limits import SHARD_FILES_BYTES_MAX
from state_runtime.snapshot.document import decode_document, encode_document
from state_runtime.snapshot.manifest import Manifest, ShardFilesEntry
from state_runtime.snapshot.paths import check_uid
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.table import StateSchema
from state_runtime.store.paths import check_relative_path

__all__ = ["ShardFiles", "ShardListing", "StoredFile", "bottom_is_of_shape", "decode_schema", "encode_schema"]


@dataclass(frozen=True)
class StoredFile:
    """One file of a version.

    Attributes:
        name: given by the backend; relative to the version's own folder.
        path: object below the job root; empty if `content` is the file.
        bytes, digest: of the file; SHA-256.
        content: all of a small file, in Base64: a separate object would cost a request.
    """

    name: str
    path: str
    bytes: int
    digest: str
    content: str = ""


@dataclass(frozen=True)
class ShardFiles:
    """The state of one shard of one operator.

    Attributes:
        backend: the backend that wrote the files. A shard whose local version could not be written is Arrow, for every
            backend of the job.
        version: its local version's id.
        snapshot_id: the checkpoint that the version was written for: its rows have the columns of that time.
        description: the backend's description of the version; opaque here.
        columns: per state the digest of its Arrow schema, see `ShardListing.schemas`.
    """

    operator: str
    shard: int
    parallelism: int
    backend: Literal["arrow", "rocksdb"]
    version: str
    snapshot_id: int
    description: str
    files: tuple[StoredFile, ...]
    columns: dict[str, str] = field(default_factory=dict)

    @property
    def hash_range(self) -> tuple[int, int]:
        """The closed range of key hashes."""
        return hash_range_of_shard(self.shard, self.parallelism)


@dataclass(frozen=True)
class ShardListing:
    """The files of all shards, as of a checkpoint; also the driver's knowledge of them between checkpoints.

    Attributes:
        schemas: serialized Arrow schemas in Base64, by the digests in `ShardFiles.columns`.
    """

    job_uid: str
    parallelism: int
    shards: tuple[ShardFiles, ...] = ()
    schemas: dict[str, str] = field(default_factory=dict)

    @cached_property
    def by_shard(self) -> Mapping[tuple[str, int], ShardFiles]:
        return {(s.operator, s.shard): s for s in self.shards}

    @property
    def total_bytes(self) -> int:
        """Of all files; a file that several shards share counts once."""
        objects = {f.path: f.bytes for s in self.shards for f in s.files if f.path}
        return sum(objects.values()) + sum(f.bytes for s in self.shards for f in s.files if not f.path)

    @property
    def oldest_snapshot_id(self) -> int:
        """The checkpoint of the oldest version; 0 without shards."""
        return min((s.snapshot_id for s in self.shards), default=0)

    def of_operator(self, uid: str, low: int, high: int) -> list[ShardFiles]:
        """Return the shards that overlap a closed hash range."""
        return [s for s in self.shards if s.operator == uid and s.hash_range[0] <= high and s.hash_range[1] >= low]

    def with_shards(self, changed: Iterable[ShardFiles], schemas: Mapping[str, str]) -> ShardListing:
        """Return the listing after an epoch.

        Args:
            changed: the shards that have another version now; the others stay.
            schemas: the schemas that `changed` needs.
        """
        shards = {**self.by_shard, **{(s.operator, s.shard): s for s in changed}}
        ordered = tuple(shards[key] for key in sorted(shards))
        check(all(s.parallelism == self.parallelism for s in ordered), "shards of one listing have one parallelism")
        return self._of(ordered, {**self.schemas, **schemas})

    def only(self, operators: Iterable[str]) -> ShardListing:
        """Return the listing without the operators that are not named."""
        kept = set(operators)
        return self._of(tuple(s for s in self.shards if s.operator in kept), self.schemas)

    def _of(self, shards: tuple[ShardFiles, ...], schemas: Mapping[str, str]) -> ShardListing:
        used = {digest for s in shards for digest in s.columns.values()}
        return replace(self, shards=shards, schemas={d: text for d, text in sorted(schemas.items()) if d in used})

    def schema(self, shard: ShardFiles, state: str) -> StateSchema:
        """Return the columns of a shard's rows of a state.

        Raises:
            CorruptManifest: they cannot be read.
        """
        return decode_schema(self.schemas[shard.columns[state]], f"operator {shard.operator!r}, state {state!r}")

    def encode(self) -> bytes:
        """Return the object's bytes; the size limit is checked before anything is written."""
        body = encode_document("shard-files", self)
        if len(body) > SHARD_FILES_BYTES_MAX:
            raise InvalidConfiguration(
                f"the listing of {len(self.shards):,} shards' files would have {len(body):,} bytes, more than "
                f"{SHARD_FILES_BYTES_MAX:,}; lower the parallelism, or switch the changelog on"
            )
        return body

    @staticmethod
    def decode(data: bytes, entry: ShardFilesEntry, job_uids: Collection[str]) -> ShardListing:
        """Parse and check; every path in the result is a plain relative one. Size and digest were compared before.

        Raises:
            CorruptManifest, UnsupportedFormat: see `decode_document`. CorruptData: a path that leads elsewhere.
        """
        listing = decode_document("shard-files", ShardListing, data, entry.path)
        if listing.job_uid not in job_uids or listing.parallelism != entry.parallelism:
            raise CorruptManifest(
                f"{entry.path} lists {listing.parallelism} shards of job {listing.job_uid}, not {entry.parallelism} of "
                f"{' or '.join(sorted(job_uids))}: files were swapped"
            )
        if len(listing.by_shard) < len(listing.shards):
            raise CorruptManifest(f"{entry.path} is damaged: it lists a shard twice")
        for shard in listing.shards:
            _check_shard(shard, listing, entry)
        return listing


def _check_shard(shard: ShardFiles, listing: ShardListing, entry: ShardFilesEntry) -> None:
    where = f"{entry.path} is damaged: operator {shard.operator[:80]!r}, shard {shard.shard}"
    try:
        check_uid(shard.operator, "operator uid")
        for file in shard.files:
            if file.path:
                check_relative_path(file.path)
    except (InvalidConfiguration, CorruptData) as error:
        raise CorruptManifest(f"{where}: {error}") from error
    if shard.parallelism != listing.parallelism or not 0 <= shard.shard < shard.parallelism:
        raise CorruptManifest(
            f"{where} of {shard.parallelism} is not one of the {listing.parallelism} shards of the listing"
        )
    if shard.snapshot_id > entry.snapshot_id:
        raise CorruptManifest(f"{where} is of snapshot {shard.snapshot_id}, after {entry.snapshot_id}")
    if missing := [state for state, digest in shard.columns.items() if digest not in listing.schemas]:
        raise CorruptManifest(f"{where}: the columns of state {missing[0]!r} are not there")


def encode_schema(schema: StateSchema) -> str:
    """Return a schema as text."""
    return base64.b64encode(schema.arrow.serialize().to_pybytes()).decode()


def decode_schema(text: str, where: str) -> StateSchema:
    """Invert `encode_schema`.

    Raises:
        CorruptManifest: it is not a schema, or not the columns of a state.
    """
    try:
        return StateSchema.of(pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text, validate=True))))
    except (binascii.Error, ValueError, pa.ArrowException, CorruptData, OSError) as error:
        raise CorruptManifest(f"{where}: its columns in the listing of files cannot be read: {error}") from error


def bottom_is_of_shape(manifest: Manifest, parallelism: int) -> bool:
    """Whether a snapshot's state is only files of `parallelism` shards, so that a run without a changelog can continue
    from them.

    Segments that are not newer than the files hold no state (only what sources have seen).
    """
    entry = manifest.shards
    return (
        entry is not None
        and entry.parallelism == parallelism
        and not any(layer.tables for layer in manifest.layers)
        and all(segment.snapshot_id <= entry.snapshot_id for segment in manifest.segments)
    )
