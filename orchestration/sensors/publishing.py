"""The state that the progress sensor publishes and has published; pure.

Events by time, not by checkpoint: at most one of a job's checkpoints in an interval, at any pace of the job, since each
costs Dagster's storage ten to twenty kilobytes for ever. Events that a person waits for are published at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from state_runtime.snapshot.manifest import Manifest
from stillstate.assets.metadata import DATA_VERSION_TAG, ROOT_TAG, SHAPE_TAG, TERM_TAG, shape_of
from stillstate.orchestration.sensors.overview import OverviewCursor

__all__ = ["CURSOR_VERSION", "ProgressCursor", "Published", "published_before", "read_cursor", "why_publish"]

CURSOR_VERSION: Final = 2


@dataclass(frozen=True, kw_only=True)
class Published:
    """The published state of a job root.

    Attributes:
        uid: tells a root that was made again from the known one.
        snapshot_id: of the newest checkpoint; 0: none.
        term, shape: its.
        at_ms: when.
        run_term: the newest run.
    """

    uid: str
    snapshot_id: int = 0
    term: int = 0
    shape: str = ""
    at_ms: int = 0
    run_term: int = 0


@dataclass(frozen=True)
class ProgressCursor:
    """The sensor's memory: the published state of each job, the job to begin with, and when the overview was written
    and of which jobs."""

    jobs: Mapping[str, Published]
    start: str = ""
    overview: OverviewCursor = field(default_factory=OverviewCursor)

    def text(self) -> str:
        """Return the cursor as small versioned JSON."""
        jobs = {
            name: [p.uid, p.snapshot_id, p.term, p.shape, p.at_ms, p.run_term] for name, p in sorted(self.jobs.items())
        }
        overview = [self.overview.at_ms, self.overview.digest, dict(self.overview.unwell_ms)]
        whole = {"version": CURSOR_VERSION, "start": self.start, "overview": overview, "jobs": jobs}
        return json.dumps(whole, separators=(",", ":"))


def read_cursor(text: str | None) -> ProgressCursor:
    """Parse a cursor. One that cannot be parsed (another version, edited by a user) is replaced by an empty one: the
    published state is read back from Dagster's own record."""
    if not text:
        return ProgressCursor({})
    try:
        data = json.loads(text)
        if data["version"] != CURSOR_VERSION:
            return ProgressCursor({})
        jobs = {str(name): _published(row) for name, row in data["jobs"].items()}
        at_ms, digest, *more = data["overview"]
        unwell_ms = {str(name): int(since_ms) for name, since_ms in (more[0] if more else {}).items()}
        return ProgressCursor(jobs, str(data["start"]), OverviewCursor(int(at_ms), str(digest), unwell_ms))
    except (ValueError, KeyError, TypeError, AttributeError):
        return ProgressCursor({})


def _published(row: tuple[str, int, int, str, int, int]) -> Published:
    uid, snapshot_id, term, shape, at_ms, run_term = row
    return Published(
        uid=str(uid),
        snapshot_id=int(snapshot_id),
        term=int(term),
        shape=str(shape),
        at_ms=int(at_ms),
        run_term=int(run_term),
    )


def published_before(
    uid: str, checkpoint: Mapping[str, str], at_ms: int, run: Mapping[str, str], known: Published
) -> Published:
    """Return the published state from Dagster's own record, where it is newer than the cursor: the daemon may have died
    between storing a tick's events and its cursor.

    Args:
        uid: of the root now.
        checkpoint, run: tags of the newest materializations; empty if there are none, or Stillstate did not write them.
        at_ms: when the checkpoint's was stored.
        known: the cursor's state.
    """
    snapshot_id, term = _number(checkpoint, DATA_VERSION_TAG), _number(checkpoint, TERM_TAG)
    run_term = _number(run, DATA_VERSION_TAG) if run.get(ROOT_TAG) == uid else 0
    run_term = max(run_term, known.run_term)
    if checkpoint.get(ROOT_TAG) != uid or snapshot_id <= known.snapshot_id:
        return Published(**{**vars(known), "run_term": run_term})
    shape = checkpoint.get(SHAPE_TAG, "")
    return Published(uid=uid, snapshot_id=snapshot_id, term=term, shape=shape, at_ms=at_ms, run_term=run_term)


def _number(tags: Mapping[str, str], name: str) -> int:
    text = tags.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0


def why_publish(head: Manifest, before: Published, now_ms: int, interval_s: float) -> str | None:
    """Return why the newest snapshot is to be published now; None if it is not."""
    if head.kind != "checkpoint" or head.snapshot_id <= before.snapshot_id:
        return None
    if not before.snapshot_id:
        return "the first that Dagster sees"
    if head.term != before.term:
        return f"the first of term {head.term}"
    shape = shape_of(head)
    if shape != before.shape:
        return f"{before.shape or 'unknown'} became {shape}"
    return "interval" if now_ms - before.at_ms >= interval_s * 1000 else None
