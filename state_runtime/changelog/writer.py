"""Writing the changelog: what a task hands back, and how the driver packs an epoch into one object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from state_runtime.base.ids import Ids
from state_runtime.base.settings import Compression, JobSettings
from state_runtime.changelog.changes import TaskChanges
from state_runtime.changelog.inflight import InflightPass
from state_runtime.changelog.parts import PartEntry, encode_lines, encode_part, sha256
from state_runtime.changelog.segment import SegmentIndex, build_segment, placed_parts
from state_runtime.changelog.source_log import cut_lines
from state_runtime.changelog.upload import Upload, Uploader
from state_runtime.snapshot.manifest import SegmentEntry
from state_runtime.snapshot.paths import segment_path
from state_runtime.store import Store

__all__ = [
    "PendingChanges",
    "PendingSegment",
    "begin_segment",
    "begin_task_changes",
    "source_log_changes",
    "write_segment",
]


@dataclass(frozen=True)
class PendingChanges:
    """A task's changes, encoded, of which the large ones are still on their way.

    Life cycle: made by `begin_task_changes` → `result` once, or `abandon`.
    """

    parts: tuple[PartEntry, ...]
    inline: tuple[bytes, ...]
    upload: Upload | None = None

    def result(self) -> TaskChanges:
        """Wait for the upload, if there is one.

        Raises:
            StoreUnavailable: it failed; the epoch fails and is run again.
        """
        if self.upload is None:
            return TaskChanges(self.parts, self.inline)
        path = self.upload.result()
        return TaskChanges(tuple(replace(part, path=path) for part in self.parts), self.inline, self.upload.totals)

    def abandon(self) -> None:
        """The task fails for another reason: what was uploaded is deleted."""
        if self.upload is not None:
            self.upload.abandon()


def begin_task_changes(
    root: Callable[[], Store],
    uploader: Uploader,
    *,
    term: int,
    operator: str,
    hash_range: tuple[int, int],
    changes: Mapping[str, pa.RecordBatch],
    settings: JobSettings,
    ids: Ids,
) -> PendingChanges:
    """Encode a task's changes; begin to upload them from here, as one object, if they are too large to ride along.

    Args:
        root: opens the job root; only called for an upload.
        changes: per state one sorted batch, each identity once: an update that a later one of the epoch hides is not
            written.
        settings: `inline_bytes_max` and `compression`.

    Raises:
        StoreUnavailable: no room for the upload within its deadline.
    """
    parts, bodies = _encode(operator, hash_range, changes, settings.compression)
    if sum(map(len, bodies)) <= settings.inline_bytes_max:
        return PendingChanges(parts, tuple(body.to_pybytes() for body in bodies))
    whole = bodies[0] if len(bodies) == 1 else b"".join(bodies)
    upload = uploader.begin(root(), lambda: _direct_path(term, operator, ids), whole)
    return PendingChanges(parts, tuple(b"" for _ in parts), upload)


def _direct_path(term: int, operator: str, ids: Ids) -> str:
    return segment_path(term, f"direct-{operator}-{ids.uid()}.seg")


def _encode(
    operator: str, hash_range: tuple[int, int], changes: Mapping[str, pa.RecordBatch], compression: Compression
) -> tuple[tuple[PartEntry, ...], tuple[pa.Buffer, ...]]:
    """One part per state with changes, one behind the other; none has a path yet."""
    parts: list[PartEntry] = []
    bodies: list[pa.Buffer] = []
    offset = 0
    for state, batch in changes.items():
        if not batch.num_rows:
            continue
        body = encode_part(batch, compression)
        parts.append(
            PartEntry(
                kind="state",
                operator=operator,
                state=state,
                path="",
                offset=offset,
                length=len(body),
                digest=sha256(body),
                rows=batch.num_rows,
                raw_bytes=batch.nbytes,
                hash_low=hash_range[0],
                hash_high=hash_range[1],
            )
        )
        bodies.append(body)
        offset += len(body)
    return tuple(parts), tuple(bodies)


def source_log_changes(source: int, lines: Sequence[str]) -> TaskChanges:
    """New lines of a source's log of seen files, as parts of the epoch's segment; each is small enough to be read."""
    parts: list[PartEntry] = []
    bodies: list[bytes] = []
    for group in cut_lines(lines):
        body = encode_lines(group)
        raw_bytes = len("\n".join(group).encode())
        parts.append(
            PartEntry(
                kind="source",
                operator=str(source),
                state="",
                path="",
                offset=0,
                length=len(body),
                digest=sha256(body),
                rows=len(group),
                raw_bytes=raw_bytes,
                hash_low=0,
                hash_high=(1 << 64) - 1,
            )
        )
        bodies.append(body)
    return TaskChanges(tuple(parts), tuple(bodies))


@dataclass(frozen=True)
class PendingSegment:
    """A segment on its way. Life cycle: made by `begin_segment` → `result` once.

    Attributes:
        parts: with their places in it.
    """

    parts: tuple[PartEntry, ...]
    _entry: SegmentEntry
    _path: Callable[[], str]

    def result(self) -> SegmentEntry:
        """Wait until it is written; the manifest's entry.

        Raises:
            StoreUnavailable: the object could not be written.
        """
        return replace(self._entry, path=self._path())


def begin_segment(
    root: Store,
    changes: Sequence[TaskChanges],
    *,
    job_uid: str,
    term: int,
    snapshot_id: int,
    ids: Ids,
    uploader: Uploader | None = None,
    passes: Sequence[InflightPass] = (),
) -> PendingSegment | None:
    """Begin to write the one packed object of an epoch.

    Args:
        uploader: whose attempts are hedged; without one there is a single attempt.
        passes: all rows in flight, to be listed in it; those that lie in it are among `changes`.

    Returns:
        None if nothing changed and nothing is listed (then there is no object).

    Raises:
        StoreUnavailable: the object could not be written. It is unreachable until a manifest names it.
    """
    parts = tuple(part for task in changes for part in task.parts)
    if not parts and not passes:
        return None
    inline = [body for task in changes for part, body in zip(task.parts, task.inline, strict=True) if not part.path]
    body, index_bytes = build_segment(SegmentIndex(job_uid, snapshot_id, parts, tuple(passes)), inline)

    def name() -> str:
        return segment_path(term, f"{snapshot_id:020d}-{ids.uid()}.seg")

    if uploader is None:
        path = name()
        root.put(path, body)

        def written() -> str:
            return path

    else:
        written = uploader.begin(root, name, body).result
    entry = SegmentEntry(
        path="",
        bytes=len(body),
        digest=sha256(body),
        index_bytes=index_bytes,
        snapshot_id=snapshot_id,
        rows=sum(p.rows for p in parts),
        direct_bytes=sum(part.length for part in parts if part.path),
    )
    return PendingSegment(placed_parts(parts), entry, written)


def write_segment(
    root: Store,
    changes: Sequence[TaskChanges],
    *,
    job_uid: str,
    term: int,
    snapshot_id: int,
    ids: Ids,
    uploader: Uploader | None = None,
) -> SegmentEntry | None:
    """Write the one packed object of an epoch; see `begin_segment`.

    Raises:
        StoreUnavailable: the object could not be written.
    """
    begun = begin_segment(
        root, changes, job_uid=job_uid, term=term, snapshot_id=snapshot_id, ids=ids, uploader=uploader
    )
    return begun.result() if begun is not None else None
