"""With the changelog off: a task uploads the new files of its shard's local version, after every epoch.

What is not new is told by digest: the files that the driver's listing names of the shard, and of the listing that the
shard was restored from. So a run that compaction wrote is uploaded once, whichever shard or version holds it. Uploading
after each epoch, and not only at the end of a checkpoint's interval, keeps the checkpoint as short as its last epoch;
files that do not live to see the checkpoint are garbage then.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from functools import partial
from hashlib import sha256

import pyarrow as pa

from state_runtime.base import faults
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.base.limits import SMALL_FILE_BYTES_MAX
from state_runtime.changelog.changes import UploadTotals
from state_runtime.changelog.upload import Upload, Uploader
from state_runtime.processors.operator import Operator
from state_runtime.snapshot.paths import named_for, shard_file_path
from state_runtime.snapshot.shard_files import ShardFiles, StoredFile, encode_schema
from state_runtime.snapshot.shard_versions import NO_VERSION
from state_runtime.state.backend import LocalCopyUnusable, VersionFiles
from state_runtime.state.reader import StateReader
from state_runtime.state.run_description import describe_whole
from state_runtime.state.run_files import encode_run
from state_runtime.state.table import StateSchema
from state_runtime.task.acknowledgement import PersistedFiles
from state_runtime.task.shard_access import ShardAccess, TaskJob

__all__ = ["persist_files"]

Known = Mapping[str, str]
"""Paths of files on the primary store, by digest."""


def persist_files(
    job: TaskJob,
    operator: Operator,
    access: ShardAccess,
    after: StateReader,
    version: str,
    *,
    changed: bool,
    listed: Mapping[str, str] | None,
    uploader: Uploader,
) -> PersistedFiles:
    """Make a shard's state durable as files.

    Args:
        after: the state after the epoch, for the case that there is no local version of it.
        version: the local version after the epoch; `NO_VERSION` if it could not be written. Then the whole state is
            uploaded from memory, as Arrow runs: a local failure never fails a checkpoint.
        changed: whether the epoch changed anything in the shard.
        listed: what the driver's listing says of the shard (`ListedFiles.paths`).

    Raises:
        StoreUnavailable: an upload failed; the epoch fails and is run again. What was uploaded is garbage.
    """
    if listed is not None and not changed:
        return PersistedFiles()
    known = dict(listed or {})
    if access.listing is not None:
        known |= {
            f.digest: f.path for s in access.listing.shards if s.operator == operator.uid for f in s.files if f.path
        }
    backend = job.settings.backend
    try:
        exported = access.export(version) if version != NO_VERSION else None
        bodies = _local_bodies(exported, known) if exported is not None else None
    except (OSError, LocalCopyUnusable):
        exported, bodies = None, None  # the disk failed right after the write: the same as if it had failed before
    if exported is None or bodies is None:
        version, backend = SYSTEM_IDS.short(), "arrow"
        exported, bodies = _from_memory(version, after, operator.state_schemas)
    stored, totals = _upload(job, operator, access, version, exported, bodies, known, uploader)
    faults.reach("task-files-uploaded")
    schemas = {state: encode_schema(schema) for state, schema in operator.state_schemas.items()}
    digests = {state: sha256(text.encode()).hexdigest() for state, text in schemas.items()}
    shard = ShardFiles(
        operator=operator.uid,
        shard=access.shard,
        parallelism=job.parallelism,
        backend=backend,
        version=version,
        snapshot_id=job.snapshot_id,
        description=exported.description,
        files=stored,
        columns=digests,
    )
    new = tuple(sorted({f.path for f in stored if f.path} - set(known.values())))
    return PersistedFiles(
        shard, schemas={digests[state]: text for state, text in schemas.items()}, uploaded=new, totals=totals
    )


def _local_bodies(exported: VersionFiles, known: Known) -> dict[str, bytes]:
    """The files that must be uploaded, by digest, checked against what the backend says of them.

    Raises:
        OSError, LocalCopyUnusable: they cannot be read, or are others by now.
    """
    bodies = {}
    for file in exported.files:
        if file.digest in known or file.digest in bodies:
            continue
        body = file.path.read_bytes()
        if len(body) != file.bytes or sha256(body).hexdigest() != file.digest:
            raise LocalCopyUnusable(f"{file.path} has another digest than when it was written")
        bodies[file.digest] = body
    return bodies


def _from_memory(
    version: str, after: StateReader, schemas: Mapping[str, StateSchema]
) -> tuple[VersionFiles, dict[str, bytes]]:
    """The whole state as Arrow runs, without the local disk."""
    runs: dict[str, tuple[pa.Buffer, int]] = {}
    for state, schema in schemas.items():
        batch = after.whole(state)
        if batch.num_rows:
            runs[state] = encode_run(batch, schema), batch.num_rows
    files, description = describe_whole(version, runs)
    bodies = {file.digest: body.to_pybytes() for file, (body, _) in zip(files, runs.values(), strict=True)}
    return VersionFiles(description, files), bodies


def _upload(
    job: TaskJob,
    operator: Operator,
    access: ShardAccess,
    version: str,
    exported: VersionFiles,
    bodies: Mapping[str, bytes],
    known: Known,
    uploader: Uploader,
) -> tuple[tuple[StoredFile, ...], UploadTotals]:
    """Upload what is new, several files at a time; small ones ride along."""
    uploads: dict[str, Upload] = {}
    try:
        for digest, body in bodies.items():
            if len(body) > SMALL_FILE_BYTES_MAX:
                names = _attempt_names(job, operator.uid, access.shard, version, digest)
                uploads[digest] = uploader.begin(access.root, partial(next, names), body)
        paths = {digest: upload.result() for digest, upload in uploads.items()}
    except BaseException:
        for upload in uploads.values():
            upload.abandon()
        raise
    totals = sum((upload.totals for upload in uploads.values()), UploadTotals())
    return tuple(
        StoredFile(
            file.name,
            path := known.get(file.digest) or paths.get(file.digest, ""),
            file.bytes,
            file.digest,
            "" if path else base64.b64encode(bodies[file.digest]).decode(),
        )
        for file in exported.files
    ), totals


def _attempt_names(job: TaskJob, operator: str, shard: int, version: str, digest: str) -> Iterator[str]:
    """Every attempt has a name of its own; nobody else writes for this version, whose id is random."""
    while True:
        name = named_for(job.snapshot_id, f"{shard}-{version}-{digest[:16]}")
        yield shard_file_path(job.term, operator, f"{name}-{SYSTEM_IDS.short()}")
