"""The interval between two checkpoints: the head, and the unwritten changes of the epochs since then; pure.

    manifest ──epoch──▶ head ──epoch──▶ head ──epoch──▶ head ──checkpoint──▶ manifest
                         └──────── pending: changes, segments, output ───────┘

The *head* is a draft manifest after the newest epoch: the clocks, the position and the operators that the next epoch
begins with. *Pending* changes exist in the driver's memory, in segments that no manifest names yet, and in local
versions. A crash loses the head; the next run begins at the manifest and repeats the epochs, whose output no reader
has seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from state_runtime.base.limits import PENDING_FILES_MAX, PENDING_OBJECTS_MAX, PENDING_PARTS_MAX, PENDING_SEGMENTS_MAX
from state_runtime.base.progress import Progress, together
from state_runtime.base.settings import JobSettings
from state_runtime.changelog.changes import TaskChanges
from state_runtime.snapshot.manifest import Manifest, SegmentEntry, StagedOutput

__all__ = ["Interval", "first_head", "has_intervals", "is_checkpoint_due", "objects_of"]


def first_head(last: Manifest, published: int = 0) -> Manifest:
    """Return the head of a run before its first epoch. The first epoch gets the head's number plus one.

    Args:
        published: the highest epoch whose output is visible. It is above the manifest's own if the snapshots of the
            runs that published it are lost, because an older backup replaced the root. No number is used twice.
    """
    return replace(last, epoch=max(last.epoch, last.snapshot_id, published))


@dataclass(frozen=True)
class Interval:
    """The changes since the newest manifest. See the module.

    Attributes:
        head: its segments, layers and shards are those of the newest manifest, without the pending ones.
        began_s: monotonic time of the newest manifest.
        epochs: since then.
        changes: in memory, in order of age.
        rows: parts of in-flight rows that no segment has, in memory or uploaded by tasks.
        segments: the flushed ones of these, in order of age; older than `changes`.
        outputs: staged and not published, in order of epochs.
        uploaded: objects that tasks uploaded, in `segments`, in `changes` or in `rows`; and segments of rows.
        numbers: of the epochs together; None before the first one.
    """

    head: Manifest
    began_s: float
    epochs: int = 0
    changes: tuple[TaskChanges, ...] = field(default=(), repr=False)
    rows: tuple[TaskChanges, ...] = field(default=(), repr=False)
    segments: tuple[SegmentEntry, ...] = ()
    outputs: tuple[StagedOutput, ...] = ()
    uploaded: tuple[str, ...] = ()
    numbers: Progress | None = None

    def holds_more_than(self, bytes_max: int) -> bool:
        """Return whether the changes in memory take more bytes, or have too many parts."""
        held = (*self.changes, *self.rows)
        size = sum(len(body) for task in held for body in task.inline)
        return size > bytes_max or sum(len(task.parts) for task in held) > PENDING_PARTS_MAX

    @property
    def staged_files(self) -> int:
        return sum(len(output.files) for output in self.outputs)

    def with_epoch(
        self,
        head: Manifest,
        changes: Sequence[TaskChanges],
        outputs: Sequence[StagedOutput],
        rows: Sequence[TaskChanges] = (),
    ) -> Interval:
        """Return the interval after one more epoch. Sinks without output in it are left out."""
        return replace(
            self,
            head=head,
            epochs=self.epochs + 1,
            changes=(*self.changes, *(c for c in changes if c.parts)),
            rows=(*self.rows, *(r for r in rows if r.parts)),
            outputs=(*self.outputs, *(o for o in outputs if o.files)),
            uploaded=(*self.uploaded, *objects_of((*changes, *rows))),
        )

    def since(self, before: Interval) -> Interval:
        """Return only the additions since `before`, an earlier moment of the same interval."""
        return replace(
            self,
            epochs=self.epochs - before.epochs,
            changes=(),
            rows=(),
            segments=self.segments[len(before.segments) :],
            outputs=self.outputs[len(before.outputs) :],
            uploaded=self.uploaded[len(before.uploaded) :],
        )

    def flushed(self, segment: SegmentEntry | None) -> Interval:
        """Return the interval after the changes in memory, and the rows, were written; None: there were no changes."""
        segments = (*self.segments, segment) if segment is not None else self.segments
        return replace(self, changes=(), rows=(), segments=segments)

    def rows_flushed(self, segment: SegmentEntry) -> Interval:
        """Return the interval after rows in flight, or the listing of their places, were written."""
        return replace(self, uploaded=(*self.uploaded, segment.path))

    def counted(self, numbers: Progress) -> Interval:
        """Return the interval with the numbers of one more epoch."""
        return replace(self, numbers=together(self.numbers, numbers))


def objects_of(changes: Sequence[TaskChanges]) -> list[str]:
    """Return the objects that tasks uploaded, each once."""
    return list(dict.fromkeys(part.path for task in changes for part in task.parts if part.path))


def has_intervals(settings: JobSettings) -> bool:
    """Return whether several epochs may end in one checkpoint."""
    return settings.checkpoint.interval_s > 0 or settings.checkpoint.batches > 1


def is_checkpoint_due(interval: Interval, settings: JobSettings, now_s: float) -> bool:
    """Return whether a checkpoint is due after the newest epoch, or now.

    With neither setting: after each epoch. With one of them: when it says so; with both, when either does. And early,
    when the pending entries would make the manifest too large.
    """
    if not interval.epochs:
        return False
    if (
        interval.staged_files > PENDING_FILES_MAX
        or len(interval.segments) > PENDING_SEGMENTS_MAX
        or len(interval.uploaded) > PENDING_OBJECTS_MAX
    ):
        return True
    by_time, by_count = settings.checkpoint.interval_s > 0, settings.checkpoint.batches > 1
    if by_time and now_s - interval.began_s >= settings.checkpoint.interval_s:
        return True
    if by_count:
        return interval.epochs >= settings.checkpoint.batches
    return not by_time
