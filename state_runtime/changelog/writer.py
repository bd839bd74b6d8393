"""Writing the changelog: the changes that a task returns, and how the driver packs an epoch into one object."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from state_runtime.base.ids import Ids
from state_runtime.base.settings import JobSettings
from state_runtime.changelog.changes import TaskChanges
from state_runtime.changelog.inflight import InflightPass
from state_runtime.changelog.parts import PartEntry, encode_lines, sha256
from state_runtime.changelog.parts_writer import PartsWriter, WrittenParts
from state_runtime.changelog.segment import SegmentIndex, build_segment, placed_parts
from state_runtime.changelog.source_log import cut_lines
from state_runtime.changelog.upload import Uploader
from state_runtime.snapshot.manifest import SegmentEntry
from state_runtime.snapshot.paths import named_for, segment_path
from state_runtime.state.changed_rows import Changed, batches_of
from state_runtime.store import Store

__all__ = [
    "PendingSegment",
    "begin_segment",
    "begin_task_changes",
    "source_log_changes",
    "task_writer",
]


def task_writer(
    root: Callable[[], Store],
    uploader: Uploader,
    *,
    term: int,
    snapshot_id: int,
    operator: str,
    settings: JobSettings,
    ids: Ids,
) -> PartsWriter:
    """Return a writer for the changes of a task.

    Args:
        root: opens the job root; only called for an upload.
        snapshot_id: of the snapshot that they will end in.
    """
    name = named_for(snapshot_id, f"direct-{operator}")
    return PartsWriter(root, uploader, term=term, name=name, settings=settings, ids=ids)


def begin_task_changes(
    writer: PartsWriter,
    *,
    operator: str,
    hash_range: tuple[int, int],
    changes: Mapping[str, Changed],
    sent: Collection[int] = (),
) -> WrittenParts:
    """Encode a task's changes; begin their upload here if they are too large for the acknowledgement.

    Args:
        changes: per state the changed rows, each identity once: an update that a later one of the epoch hides is not
            written.
        sent: the `id` of batches that were given to the writer before.

    Raises:
        StoreUnavailable: no room for the upload within its deadline.
    """
    for state, rows in changes.items():
        for batch in batches_of(rows):
            if batch.num_rows and id(batch) not in sent:
                writer.add("state", operator, state, batch, hash_range)
    return writer.finish()


def source_log_changes(source: int, lines: Sequence[str]) -> TaskChanges:
    """Return new lines of a source's log of seen files, as parts of the epoch's segment, each small enough to read."""
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
    """A segment being written. Life cycle: made by `begin_segment` → `result` once.

    Attributes:
        parts: with their places in it.
    """

    parts: tuple[PartEntry, ...]
    _entry: SegmentEntry
    _path: Callable[[], str]

    def result(self) -> SegmentEntry:
        """Wait until it is written. Return the manifest's entry.

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
        uploader: hedges its attempts; without one there is a single attempt.
        passes: all rows in flight, to be listed in it; those stored in it are among `changes`.

    Returns:
        None if nothing changed and nothing is listed (then no object is written).

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
