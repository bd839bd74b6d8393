"""Writing the changelog: what a task hands back, and how the driver packs an epoch into one object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from state_runtime.changelog.segment import PartEntry, SegmentIndex, build_segment, encode_lines, encode_part, sha256
from state_runtime.ids import Ids
from state_runtime.snapshot.manifest import SegmentEntry
from state_runtime.snapshot.paths import segment_path
from state_runtime.store import Created, Store

__all__ = ["TaskChanges", "source_log_changes", "write_segment", "write_task_changes"]


@dataclass(frozen=True)
class TaskChanges:
    """The changes of one attempt of one task, as they ride in its acknowledgement.

    `inline[i]` are the bytes of `parts[i]`, or empty if the part lies in an object that the task uploaded.
    """

    parts: tuple[PartEntry, ...] = ()
    inline: tuple[bytes, ...] = ()

    @property
    def rows(self) -> int:
        return sum(p.rows for p in self.parts)

    @property
    def bytes(self) -> int:
        return sum(p.length for p in self.parts)


def write_task_changes(
    root: Store,
    *,
    term: int,
    operator: str,
    hash_range: tuple[int, int],
    changes: Mapping[str, pa.RecordBatch],
    inline_bytes_max: int,
    ids: Ids,
) -> TaskChanges:
    """Encode a task's changes; upload them from here if they are too large to ride along.

    The object's name is unique to the attempt, so a late or repeated attempt overwrites nothing; without a manifest that
    leads to it, it is garbage.

    Raises:
        StoreUnavailable, OutcomeUnknown: the upload failed; the epoch fails and is run again.
    """
    bodies = {state: encode_part(batch) for state, batch in changes.items() if batch.num_rows}
    direct = sum(map(len, bodies.values())) > inline_bytes_max
    path = segment_path(term, f"direct-{operator}-{ids.uid()}.seg") if direct else ""
    parts: list[PartEntry] = []
    offset = 0
    for state, body in bodies.items():
        batch = changes[state]
        parts.append(
            PartEntry(
                kind="state",
                operator=operator,
                state=state,
                path=path,
                offset=offset,
                length=len(body),
                digest=sha256(body),
                rows=batch.num_rows,
                raw_bytes=batch.nbytes,
                hash_low=hash_range[0],
                hash_high=hash_range[1],
            )
        )
        offset += len(body)
    if direct:
        root.put(path, b"".join(bodies.values()))
        return TaskChanges(tuple(parts), tuple(b"" for _ in parts))
    return TaskChanges(tuple(parts), tuple(bodies.values()))


def source_log_changes(source: int, lines: Sequence[str]) -> TaskChanges:
    """New lines of a source's log of seen files, as a part of the epoch's segment."""
    body = encode_lines(lines)
    raw_bytes = len("\n".join(lines).encode())
    entry = PartEntry(
        "source", str(source), "", "", 0, len(body), sha256(body), len(lines), raw_bytes, 0, (1 << 64) - 1
    )
    return TaskChanges((entry,), (body,))


def write_segment(
    root: Store, changes: Sequence[TaskChanges], *, job_uid: str, term: int, snapshot_id: int, ids: Ids
) -> SegmentEntry | None:
    """Write the one packed object of an epoch.

    Returns:
        The manifest's entry; None if nothing changed (then there is no object).

    Raises:
        StoreUnavailable, OutcomeUnknown: see `Store.create`. The object is unreachable until a manifest names it.
    """
    parts = tuple(part for task in changes for part in task.parts)
    if not parts:
        return None
    inline = [body for task in changes for part, body in zip(task.parts, task.inline, strict=True) if not part.path]
    body, index_bytes = build_segment(SegmentIndex(job_uid, snapshot_id, parts), inline)
    path = segment_path(term, f"{snapshot_id:020d}-{ids.uid()}.seg")
    if root.create(path, body) is not Created.MINE:  # a 128-bit random name: only a broken store gets here
        raise FileExistsError(f"{path} in {root.url} exists although its name was just drawn")
    direct_bytes = sum(part.length for part in parts if part.path)
    return SegmentEntry(
        path, len(body), sha256(body), index_bytes, snapshot_id, sum(p.rows for p in parts), direct_bytes
    )
