"""How far a run's driver is with the newest batch: rows in flight, and which operators are done; pure.

A batch is *open* from the epoch that reads it until every operator is done with its rows and with the work that they
made due. No other batch is read while it is open, so it has one watermark, however many epochs it takes. Therefore late
rows, the windows of each row, and due work are the same as if one epoch did it all.

An operator is *settled* when those above it are settled, no row of it waits, and the work that its clock made due is
done. Only then is the input of the operator below complete. So an operator by event time does its due work in an
epoch that begins with no rows left above it (or in one in which the operators above are sure to finish).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Final

from state_runtime.changelog.inflight import InflightPass, RowsLeft, RowsPart, cut_by_shards
from state_runtime.changelog.parts import PartEntry
from state_runtime.processors.operator import Operator
from state_runtime.snapshot.manifest import InflightNumbers, OpenBatch, RowsLayout, SegmentEntry, TimeEntry
from state_runtime.state.key_groups import hash_range_of_shard, shard_of_hash

__all__ = ["BatchProgress", "ShardRows"]

NO_LAYOUT: Final = RowsLayout("")


@dataclass(frozen=True)
class ShardRows:
    """The rows that a task left.

    Attributes:
        left: per epoch that read them, the ranges of the shard that are left.
        kept: parts with rows of the epoch that is over; they have `layout`.
    """

    operator: str
    shard: int
    left: Mapping[int, tuple[RowsLeft, ...]]
    kept: tuple[PartEntry, ...] = ()
    layout: RowsLayout = NO_LAYOUT


@dataclass(frozen=True)
class BatchProgress:
    """An open batch. Each event makes a new value; None stands for no open batch.

    Life cycle: `begun` with its first epoch, or `resumed` by a new run → `after` each epoch, until that gives None.
    `placed` whenever parts were written to the primary store.

    Attributes:
        late_watermark_ms: the watermark of the batch before.
        late_clocks: the same of each operator that has another one.
        settled: uids of the operators that are done.
        begun_with: uid of the operator that has begun its due work; empty if no operator has.
        passes: the rows that are left, each range in one shard.
        segments: the segments that hold parts, by path.
        listed_in: path of the segment that lists the rows that are left, as they were cut for these shards or for
            others; empty if no segment does.
    """

    late_watermark_ms: int
    settled: frozenset[str] = frozenset()
    begun_with: str = ""
    passes: tuple[InflightPass, ...] = ()
    segments: Mapping[str, SegmentEntry] = field(default_factory=dict)
    listed_in: str = ""
    late_clocks: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def begun(late: TimeEntry) -> BatchProgress:
        """Return the progress of a batch that is about to be read.

        Args:
            late: the clocks of the batch before.
        """
        return BatchProgress(late.watermark_ms, late_clocks=late.clocks)

    @staticmethod
    def resumed(
        batch: OpenBatch,
        passes: Sequence[InflightPass],
        operators: Sequence[Operator],
        *,
        parallelism: int,
        parallelism_before: int,
    ) -> BatchProgress:
        """Read the progress from a manifest and its listing, for the pipeline and the shards of the resuming run.

        Args:
            passes: the listed rows (`changelog.reader.read_passes`).
            operators: of this run; they may differ from those of the run before. An operator below a new one has no
                complete input yet, even if it was settled before; the run does not wait for a removed operator.
            parallelism: of the run; ranges are cut for its shards.
        """
        cut = [cut_by_shards(p, parallelism) for p in passes]
        before = frozenset(batch.settled)
        settled = frozenset(o.uid for o in takewhile(lambda o: o.uid in before, operators))
        progress = BatchProgress(
            late_watermark_ms=batch.late_watermark_ms,
            late_clocks=batch.late_clocks,
            settled=settled,
            passes=tuple(cut),
            segments={s.path: s for s in batch.segments},
            # Ranges that were cut for other shards are the same rows: the listing is valid until some are done.
            listed_in=batch.listing,
        )
        # With other shards it is not known which shards had done their due work: a key may have moved from a shard that
        # had not to one without rows in flight. So all work that is still due is looked at again. Below an operator
        # that is not settled all due work waits in any case.
        goes_on = parallelism == parallelism_before and batch.begun == progress.level(operators)
        return replace(progress, begun_with=batch.begun) if goes_on else progress

    # --- contents ------------------------------------------------------------------------------------------------

    @property
    def late(self) -> TimeEntry:
        """The clocks that decide which of its rows are late."""
        return TimeEntry(0, self.late_watermark_ms, clocks=dict(self.late_clocks))

    def of_operator(self, uid: str) -> tuple[InflightPass, ...]:
        """Return the passes of an operator, oldest first."""
        return tuple(sorted((p for p in self.passes if p.operator == uid), key=lambda p: p.epoch))

    def rows_of_shards(self, uid: str, parallelism: int) -> dict[int, tuple[int, int]]:
        """Return, for each shard in which rows of an operator wait, their number and their bytes in memory."""
        found: dict[int, tuple[int, int]] = {}
        for passed in self.of_operator(uid):
            for left in passed.left:
                shard = shard_of_hash(left.hash_low, parallelism)
                rows, size = found.get(shard, (0, 0))
                found[shard] = rows + left.rows, size + left.bytes
        return found

    @property
    def needed(self) -> frozenset[str]:
        """Digests of all named parts."""
        return frozenset(p.part.digest for passed in self.passes for p in passed.parts)

    def level(self, operators: Sequence[Operator]) -> str:
        """Return the uid of the first operator that is not settled: its input is complete. Empty if all are settled."""
        return next((o.uid for o in operators if o.uid not in self.settled), "")

    # --- events --------------------------------------------------------------------------------------------------

    def after(
        self,
        epoch: int,
        read_at_ms: int,
        rows: Iterable[ShardRows],
        operators: Sequence[Operator],
        *,
        parallelism: int,
        did_due: frozenset[str],
        is_due: Callable[[str], bool],
    ) -> BatchProgress | None:
        """Return the progress after an epoch; None if the batch is done.

        Args:
            epoch, read_at_ms: its number and its batch time.
            rows: left by its tasks; shards that no task visited keep their rows.
            did_due: uids of the operators that did their due work, in shards that were done with their rows.
            is_due: whether an operator has due work by the batch's watermark, after the epoch.
        """
        passes = {(p.operator, p.epoch): p for p in self.passes}
        for task in rows:
            low, high = hash_range_of_shard(task.shard, parallelism)
            for number, left in task.left.items():
                key = (task.operator, number)
                if key not in passes:
                    if not left:
                        continue
                    passes[key] = InflightPass(
                        task.operator, number, read_at_ms=read_at_ms, layout=task.layout, parts=(), left=()
                    )
                if number == epoch and task.kept:
                    parts = (*passes[key].parts, *(RowsPart("", part) for part in task.kept))
                    passes[key] = replace(passes[key], parts=tuple(sorted(parts, key=_place)))
                passes[key] = passes[key].after(low, high, left)
        order = {o.uid: number for number, o in enumerate(operators)}
        left_over = sorted((p for p in passes.values() if p.left), key=lambda p: (order.get(p.operator, 0), p.epoch))
        settled, begun_with = _settled(self, operators, {p.operator for p in left_over}, did_due, is_due)
        progress = replace(
            self,
            settled=settled,
            begun_with=begun_with,
            passes=tuple(left_over),
            listed_in=self.listed_in if tuple(left_over) == self.passes else "",
        )
        return _tidied(progress) if left_over or progress.level(operators) else None

    def placed(self, segment: SegmentEntry, parts: Iterable[PartEntry]) -> BatchProgress:
        """Return the progress after a segment was written.

        Args:
            parts: the parts of rows in the segment, with their places.
        """
        found = {part.digest: RowsPart(segment.path, part) for part in parts if part.kind == "rows"}
        passes = tuple(
            replace(p, parts=tuple(part if part.segment else found.get(part.part.digest, part) for part in p.parts))
            for p in self.passes
        )
        return _tidied(replace(self, passes=passes, segments={**self.segments, segment.path: segment}))

    def listed(self, segment: SegmentEntry) -> BatchProgress:
        """Return the progress after a segment that lists the passes was written."""
        return _tidied(replace(self, segments={**self.segments, segment.path: segment}, listed_in=segment.path))

    def entry(self) -> OpenBatch:
        """Return the entry for a manifest, once the passes are listed."""
        numbers: dict[str, InflightNumbers] = {}
        for p in self.passes:  # the oldest of an operator first
            so_far = numbers.get(p.operator, InflightNumbers(p.operator, 0, 0, p.epoch, p.read_at_ms))
            layouts = so_far.layouts if p.layout in so_far.layouts else (*so_far.layouts, p.layout)
            rows, size = so_far.rows + p.rows, so_far.bytes + p.bytes
            numbers[p.operator] = replace(so_far, rows=rows, bytes=size, layouts=layouts)
        return OpenBatch(
            late_watermark_ms=self.late_watermark_ms,
            settled=tuple(sorted(self.settled)),
            begun=self.begun_with,
            listing=self.listed_in if self.passes else "",
            segments=tuple(self.segments[path] for path in sorted(self.segments)) if self.passes else (),
            operators=tuple(numbers.values()),
            late_clocks=dict(self.late_clocks),
        )


def _tidied(progress: BatchProgress) -> BatchProgress:
    """Remove segments that are no longer needed."""
    needed = {part.segment for passed in progress.passes for part in passed.parts} | {progress.listed_in}
    return replace(progress, segments={path: s for path, s in progress.segments.items() if path in needed})


def _settled(
    before: BatchProgress,
    operators: Sequence[Operator],
    with_rows: set[str],
    did_due: frozenset[str],
    is_due: Callable[[str], bool],
) -> tuple[frozenset[str], str]:
    """Return which operators are settled after an epoch, and which one has begun its due work."""
    settled = set(before.settled)
    for operator in operators:
        uid = operator.uid
        if uid in settled:
            continue
        # All operators above are settled, so the input of this one is complete.
        if uid in with_rows:
            return frozenset(settled), uid if uid in did_due else ""
        if operator.time_domain == "event" and uid not in did_due and is_due(uid):
            return frozenset(settled), ""
        settled.add(uid)
    return frozenset(settled), ""


def _place(part: RowsPart) -> int:
    return part.part.hash_low
