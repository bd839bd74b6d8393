"""How far a run's driver is with the newest batch: rows in flight, and which operators are done; pure.

A batch is *open* from the epoch that reads it until every operator is done with its rows and with what they made due.
While it is open no other is read, so it has one watermark, however many epochs it takes: what is late, which windows a
row counts for and what is due are the same as if one epoch did it all.

An operator is *settled* when those above it are, no row of its own waits, and what its clock made due is done. Its
input is complete only then; so an operator by event time does what is due in an epoch that begins with nothing left
above it (or in one in which those above are sure to get done).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Final

from state_runtime.changelog.inflight import InflightPass, RowsLeft, RowsPart, cut_by_shards
from state_runtime.changelog.parts import PartEntry
from state_runtime.processors.operator import Operator
from state_runtime.snapshot.manifest import InflightNumbers, OpenBatch, RowsLayout, SegmentEntry
from state_runtime.state.key_groups import hash_range_of_shard, shard_of_hash

__all__ = ["BatchProgress", "ShardRows"]

NO_LAYOUT: Final = RowsLayout("")


@dataclass(frozen=True)
class ShardRows:
    """What a task left.

    Attributes:
        left: per epoch that read them the ranges that are left of the shard.
        kept: parts of the rows of the epoch that is over; `layout` is theirs.
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
        settled: uids of the operators that are done.
        begun_with: uid of the operator that has begun with what is due; empty if none has.
        passes: what is left, each range in one shard.
        segments: that hold parts, by path.
        listed_in: path of the segment that lists what is left, as it was cut for these shards or for others; empty if
            there is none.
    """

    late_watermark_ms: int
    settled: frozenset[str] = frozenset()
    begun_with: str = ""
    passes: tuple[InflightPass, ...] = ()
    segments: Mapping[str, SegmentEntry] = field(default_factory=dict)
    listed_in: str = ""

    @staticmethod
    def begun(late_watermark_ms: int) -> BatchProgress:
        """Of a batch that is about to be read."""
        return BatchProgress(late_watermark_ms)

    @staticmethod
    def resumed(
        batch: OpenBatch,
        passes: Sequence[InflightPass],
        operators: Sequence[Operator],
        *,
        parallelism: int,
        parallelism_before: int,
    ) -> BatchProgress:
        """As a manifest and the listing that it names have it, for the pipeline and the shards that go on with it.

        Args:
            passes: what is listed (`changelog.reader.read_passes`).
            operators: of the run, which may be others than those of the run before. One below a new operator has no
                complete input yet, whatever it had; one that is gone is not waited for.
            parallelism: of the run; ranges are cut for its shards.
        """
        cut = [cut_by_shards(p, parallelism) for p in passes]
        before = frozenset(batch.settled)
        settled = frozenset(o.uid for o in takewhile(lambda o: o.uid in before, operators))
        progress = BatchProgress(
            late_watermark_ms=batch.late_watermark_ms,
            settled=settled,
            passes=tuple(cut),
            segments={s.path: s for s in batch.segments},
            # Ranges that were cut for other shards are the same rows: the listing serves until some are done.
            listed_in=batch.listing,
        )
        # Of other shards nobody knows which were done with what is due: a key may have moved from one that was not to
        # one without rows in flight. So all that is due still is looked at once more; and below an operator that is not
        # settled all that is due waits in any case.
        goes_on = parallelism == parallelism_before and batch.begun == progress.level(operators)
        return replace(progress, begun_with=batch.begun) if goes_on else progress

    # --- what is in it -------------------------------------------------------------------------------------------

    def of_operator(self, uid: str) -> tuple[InflightPass, ...]:
        """Its passes, the oldest first."""
        return tuple(sorted((p for p in self.passes if p.operator == uid), key=lambda p: p.epoch))

    def rows_of_shards(self, uid: str, parallelism: int) -> dict[int, tuple[int, int]]:
        """Of the shards in which rows of an operator wait: how many, and their bytes in memory."""
        found: dict[int, tuple[int, int]] = {}
        for passed in self.of_operator(uid):
            for left in passed.left:
                shard = shard_of_hash(left.hash_low, parallelism)
                rows, size = found.get(shard, (0, 0))
                found[shard] = rows + left.rows, size + left.bytes
        return found

    @property
    def needed(self) -> frozenset[str]:
        """Digests of all parts that are named."""
        return frozenset(p.part.digest for passed in self.passes for p in passed.parts)

    def level(self, operators: Sequence[Operator]) -> str:
        """Uid of the first operator that is not settled: its input is complete. Empty if all are."""
        return next((o.uid for o in operators if o.uid not in self.settled), "")

    # --- what happens --------------------------------------------------------------------------------------------

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
        """After an epoch; None if the batch is done.

        Args:
            epoch, read_at_ms: its number and its batch time.
            rows: what its tasks left; shards that no task visited keep what they had.
            did_due: uids of the operators that did what was due, in shards that were done with their rows.
            is_due: whether something of an operator is due by the batch's watermark, after the epoch.
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
        """After a segment was written.

        Args:
            parts: those of rows in it, with their places.
        """
        found = {part.digest: RowsPart(segment.path, part) for part in parts if part.kind == "rows"}
        passes = tuple(
            replace(p, parts=tuple(part if part.segment else found.get(part.part.digest, part) for part in p.parts))
            for p in self.passes
        )
        return _tidied(replace(self, passes=passes, segments={**self.segments, segment.path: segment}))

    def listed(self, segment: SegmentEntry) -> BatchProgress:
        """After a segment was written that lists the passes."""
        return _tidied(replace(self, segments={**self.segments, segment.path: segment}, listed_in=segment.path))

    def entry(self) -> OpenBatch:
        """As a manifest has it, once the passes are listed."""
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
        )


def _tidied(progress: BatchProgress) -> BatchProgress:
    """Without segments that are not needed any more."""
    needed = {part.segment for passed in progress.passes for part in passed.parts} | {progress.listed_in}
    return replace(progress, segments={path: s for path, s in progress.segments.items() if path in needed})


def _settled(
    before: BatchProgress,
    operators: Sequence[Operator],
    with_rows: set[str],
    did_due: frozenset[str],
    is_due: Callable[[str], bool],
) -> tuple[frozenset[str], str]:
    """Which operators are settled after an epoch, and which has begun with what is due."""
    settled = set(before.settled)
    for operator in operators:
        uid = operator.uid
        if uid in settled:
            continue
        # All above are settled, so this one's input is complete.
        if uid in with_rows:
            return frozenset(settled), uid if uid in did_due else ""
        if operator.time_domain == "event" and uid not in did_due and is_due(uid):
            return frozenset(settled), ""
        settled.add(uid)
    return frozenset(settled), ""


def _place(part: RowsPart) -> int:
    return part.part.hash_low
