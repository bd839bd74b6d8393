"""The newest snapshots of a job in numbers: the content of an interval, from a bounded number of manifests.

A job that makes five checkpoints a second makes three hundred in a minute. Reading all of their manifests would cost
more than making them did. So the newest `POINTS_MAX` are read, each once, and numbers about the others are marked as an
estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from state_runtime.base.errors import CorruptData, MissingSnapshot, SnapshotExpired, UnsupportedFormat
from state_runtime.base.progress import Progress
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.term_files import RunStatus
from stillstate.orchestration.probes.look import Look

__all__ = ["POINTS_MAX", "Point", "Points", "complete", "read_points"]

POINTS_MAX: Final = 20
_CACHED_MAX: Final = 20_000
_CACHE: dict[tuple[str, str, int], Point] = {}
"""By root, its uid and the snapshot's id: a manifest never changes, and most are needed twenty times."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """The part of one manifest that is kept; the manifest may be large.

    Attributes:
        progress: numbers of the epochs that ended in it, without the part after the manifest.
        previous: complete numbers of the checkpoint before.
        restored_from: the snapshot that it continues from; 0: it is the first.
    """

    snapshot_id: int
    term: int
    kind: Literal["checkpoint", "fencing"]
    at_ms: int
    log_bytes: int
    table_bytes: int
    total_bytes: int
    operators: int
    progress: Progress | None
    previous: Progress | None = None
    restored_from: int = 0

    @staticmethod
    def of(manifest: Manifest) -> Point:
        """Make the point of a manifest."""
        return Point(
            snapshot_id=manifest.snapshot_id,
            term=manifest.term,
            kind=manifest.kind,
            at_ms=manifest.created_at_ms,
            log_bytes=manifest.log_bytes,
            table_bytes=manifest.table_bytes,
            total_bytes=manifest.total_bytes,
            operators=len(manifest.operators),
            progress=manifest.progress,
            previous=manifest.previous,
            restored_from=_before(manifest),
        )


def _before(manifest: Manifest) -> int:
    """Return the id of a snapshot's ancestor: the one below it, unless the job went back to an older one."""
    before = manifest.snapshot_id - 1
    for first, last in reversed(manifest.abandoned):
        if first <= before <= last:
            before = first - 1
    return before


@dataclass(frozen=True)
class Points:
    """The newest points, ascending; the last is the newest. `problems` names manifests that cannot be read."""

    newest: tuple[Point, ...]
    problems: tuple[str, ...] = ()


def read_points(catalog: Catalog, look: Look) -> Points:
    """Read those of a look's newest snapshots that were not read before; at most `POINTS_MAX`.

    Raises:
        StillstateError: the store does not answer.
    """
    if look.head is None:
        return Points(())
    found, problems = [Point.of(look.head)], []
    older = [i for i in look.ids if i < look.head.snapshot_id][-(POINTS_MAX - 1) :]
    for snapshot_id in reversed(older):
        key = (catalog.root.url, look.uid, snapshot_id)
        point = _CACHE.get(key)
        if point is None:
            try:
                point = Point.of(catalog.manifest(snapshot_id))
            except (MissingSnapshot, SnapshotExpired):
                continue  # never completed, or expired since
            except (CorruptData, UnsupportedFormat) as error:
                problems.append(str(error))
                continue
            if len(_CACHE) >= _CACHED_MAX:
                _CACHE.clear()
            _CACHE[key] = point
        found.append(point)
    points = complete(tuple(reversed(found)), look.seen.status)
    return Points(points, tuple(problems))


def complete(points: Sequence[Point], status: RunStatus | None) -> tuple[Point, ...]:
    """Return the points with complete numbers, where they are known: a manifest's own times end where it is written;
    the complete numbers are in the next manifest, or in the heartbeat."""
    last = status.progress if status is not None else None
    following = [*(point.previous for point in points[1:]), last]
    return tuple(
        replace(point, progress=more)
        if point.progress is not None and more is not None and more.snapshot_id == point.snapshot_id
        else point
        for point, more in zip(points, following)
    )
