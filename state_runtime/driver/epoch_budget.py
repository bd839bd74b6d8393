"""How long an epoch may take, and how its time is divided among operators and shards; pure.

In a mode with a deadline an epoch ends when its time is up, even if rows of its batch are left. Spark runs the
operators of a chain one after the other, so each operator has a separate deadline: a share of the epoch's time,
weighted by how long operators took before. There are two plans:

- *apart*: the deadline holds at each operator. Due work is done at the first operator that is not settled, because its
  input is complete; operators below it wait for a later epoch.
- *together*: operators with others by event time below them finish, even past the deadline, and due work is done at all
  of them. So a small batch takes one epoch, as without a deadline.

The plan is *together* if the waiting rows, or else the batch before, show that the batch will fit. The first batch of a
run is *apart*, because after an outage it is the largest. Its first epochs are also short, so that the job advances
even if it dies often.

A job with an operator in complete mode has no deadline in any mode: while rows of a batch are left, a table would be
that of some of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from state_runtime.base.settings import JobSettings
from state_runtime.driver.batch_progress import BatchProgress
from state_runtime.processors.operator import Operator
from state_runtime.task.acknowledgement import Acknowledgement
from state_runtime.task.slicing import NO_LIMITS, StageBudget

__all__ = ["BudgetPlanner", "EpochBudget"]

_FIRST_EPOCH_S = 2.0
"""Of the first epoch of a run; each one after it may take twice as long, up to the mode's time."""
_SURE = 0.5
"""Work that takes this share of the time is sure to fit."""
_NEWEST = 0.5
"""Weight of the newest epoch in the learned times and rates."""


@dataclass(frozen=True)
class EpochBudget:
    """The limits of one epoch.

    Attributes:
        within_s: its time; None: no limit.
        stages: per operator uid.
        does_due: uids of the operators that do their due work.
        due_after_s: time from its beginning until a checkpoint is due, however long the epoch may take.
    """

    within_s: float | None
    stages: Mapping[str, StageBudget]
    does_due: frozenset[str]
    due_after_s: float = 0.0


@dataclass
class _Seen:
    """Measurements of an operator's newest epochs.

    Attributes:
        rows_per_s: of a task.
        took_s: of its slowest task.
        shards: per shard the rows that came.
        late_s: the delay from the beginning of its time to the beginning of its first task: in epochs that read a
            batch (True), which has to be planned first, and in epochs that continue one, which begin at once.
    """

    rows_per_s: float = 0.0
    took_s: float = 0.0
    shards: dict[int, int] = field(default_factory=dict)
    late_s: Mapping[bool, float] = field(default_factory=dict)


class BudgetPlanner:
    """Plans epochs of one run.

    Life cycle: made with the run → per epoch `plan`, then `seen` with what its tasks acknowledged.

    Args:
        operators: in the order of the pipeline.
        makes_tables: whether one of them is in complete mode.
    """

    def __init__(
        self, settings: JobSettings, operators: Sequence[Operator], parallelism: int, *, makes_tables: bool = False
    ) -> None:
        self._settings = settings
        self._has_deadline = settings.checkpoint.mode != "aligned" and not makes_tables
        self._operators = operators
        self._parallelism = parallelism
        self._seen = {o.uid: _Seen() for o in operators}
        self._begins_ms: dict[str, int] = {}
        self._reads = False
        self._epochs = 0
        self._batches = 0
        self._batch_began_s, self._batch_epochs = 0.0, 0
        self._last_batch_fitted = False

    @property
    def is_catching_up(self) -> bool:
        """Return whether the first batch of the run is under way and takes more than one epoch: other work waits."""
        return self._batches == 0 and self._epochs > 0 and self._has_deadline

    def plan(self, batch: BatchProgress | None, *, reads: bool, now_ms: int, until_checkpoint_s: float) -> EpochBudget:
        """Return the budget of the next epoch.

        Args:
            batch: the open batch; None if no batch is open.
            reads: whether the epoch reads a batch.
            now_ms: wall clock at which it begins.
            until_checkpoint_s: time until a checkpoint is due; 0 if one follows in any case.
        """
        uids = [o.uid for o in self._operators]
        within_s = self._within_s(until_checkpoint_s)
        due_after_s = until_checkpoint_s if self._settings.checkpoint.interval_s else within_s or 0.0
        self._begins_ms, self._reads = {}, reads
        if within_s is None or batch is None:
            return EpochBudget(None, dict.fromkeys(uids, NO_LIMITS), frozenset(uids), due_after_s)
        together = self._last_batch_fitted if reads else self._fits(batch, within_s)
        finish = {uid for uid in uids if together and self._feeds_event_time(uid)}
        level = batch.level(self._operators)
        does_due = frozenset(o.uid for o in self._operators if together or o.uid == level or o.time_domain != "event")
        keep = self._keep_bytes(batch, reads=reads)
        ends = self._ends(batch, within_s)
        self._begins_ms = dict(zip(uids, (now_ms, *(now_ms + int(ends[uid] * 1000) for uid in uids)), strict=False))
        stages = {
            uid: StageBudget(
                deadline_ms=None if uid in finish else now_ms + int(ends[uid] * 1000),
                within_s=ends[uid],
                does_due=uid in does_due,
                keep_bytes=keep[uid],
                rows_per_s=self._seen[uid].rows_per_s,
            )
            for uid in uids
        }
        return EpochBudget(within_s, stages, does_due, due_after_s)

    def seen(self, tasks: Iterable[tuple[str, Acknowledgement]]) -> None:
        """Learn from an epoch: operator uid and acknowledgement of each of its tasks."""
        self._epochs += 1
        of_operator: dict[str, list[Acknowledgement]] = {}
        for uid, acknowledgement in tasks:
            of_operator.setdefault(uid, []).append(acknowledgement)
        for uid, acknowledged in of_operator.items():
            late_s = {**self._seen[uid].late_s, self._reads: self._late_s(uid, acknowledged)}
            self._seen[uid] = replace(_learned(self._seen[uid], acknowledged), late_s=late_s)

    def seen_of_batch(self, started_s: float, ended_s: float, *, is_done: bool) -> None:
        """Learn about a batch from an epoch.

        Args:
            started_s, ended_s: monotonic, of the epoch.
            is_done: whether the batch is done with it.
        """
        if self._batch_epochs == 0:
            self._batch_began_s = started_s
        self._batch_epochs += 1
        if is_done:
            self.batch_done(ended_s - self._batch_began_s, self._batch_epochs)
            self._batch_epochs = 0

    def batch_done(self, took_s: float, epochs: int) -> None:
        """Note that a batch is done.

        Args:
            took_s, epochs: all of its epochs.
        """
        self._batches += 1
        within_s = self._within_s(0.0)
        self._last_batch_fitted = within_s is None or (epochs == 1 and took_s <= _SURE * within_s)

    # --- how long ------------------------------------------------------------------------------------------------

    def _within_s(self, until_checkpoint_s: float) -> float | None:
        settings = self._settings
        if not self._has_deadline:
            return None
        is_unaligned = settings.checkpoint.mode == "unaligned"
        mode_s = settings.checkpoint.unaligned_epoch_s if is_unaligned else settings.checkpoint.aligned_timeout_s
        if self._batches == 0:
            mode_s = min(mode_s, _FIRST_EPOCH_S * 2.0 ** min(self._epochs, 32))
        return max(mode_s, until_checkpoint_s)

    def _ends(self, batch: BatchProgress, within_s: float) -> dict[str, float]:
        """Return when the time of each operator is up, in seconds after the beginning of the epoch."""
        known = [s.took_s for s in self._seen.values() if s.took_s]
        usual = sum(known) / len(known) if known else 1.0
        weights = {o.uid: 0.0 if o.uid in batch.settled else self._seen[o.uid].took_s or usual for o in self._operators}
        total = sum(weights.values()) or 1.0
        ends, so_far = {}, 0.0
        # Spark's delay is not taken from the time for rows: such epochs would process next to nothing.
        late_s = {uid: self._seen[uid].late_s.get(self._reads, 0.0) for uid in weights if weights[uid]}
        shorter = min(1.0, within_s / (sum(late_s.values()) or 1.0))
        for uid, weight in weights.items():
            so_far += weight / total * within_s + late_s.get(uid, 0.0) * shorter
            ends[uid] = so_far
        return ends

    def _late_s(self, uid: str, tasks: Sequence[Acknowledgement]) -> float:
        before_s, begins_ms = self._seen[uid].late_s.get(self._reads, 0.0), self._begins_ms.get(uid)
        began_ms = [t.began_at_ms for t in tasks if t.began_at_ms]
        if begins_ms is None or not began_ms:
            return before_s
        late_s = max(0.0, (min(began_ms) - begins_ms) / 1000)
        return late_s * _NEWEST + before_s * (1 - _NEWEST)

    def _fits(self, batch: BatchProgress, within_s: float) -> bool:
        """Return whether the waiting rows are sure to be done in time, also in the shard with the most of them."""
        needed_s = 0.0
        for operator in self._operators:
            waiting = batch.rows_of_shards(operator.uid, self._parallelism)
            rate = self._seen[operator.uid].rows_per_s
            if waiting and not rate:
                return False
            needed_s += max((rows / rate for rows, _ in waiting.values()), default=0.0)
        return needed_s <= _SURE * within_s

    def _feeds_event_time(self, uid: str) -> bool:
        number = next(n for n, o in enumerate(self._operators) if o.uid == uid)
        return any(o.time_domain == "event" for o in self._operators[number + 1 :])

    # --- how much may wait ---------------------------------------------------------------------------------------

    def _keep_bytes(self, batch: BatchProgress, *, reads: bool) -> dict[str, tuple[int, ...]]:
        """Return the bytes that each shard of an operator may leave: half of the total is divided evenly, half by the
        rows that wait there now or, if no rows wait, by the rows that came before."""
        cells = {uid: [0.0] * self._parallelism for uid in self._seen}
        for uid, of_shards in cells.items():
            waiting = batch.rows_of_shards(uid, self._parallelism)
            for shard in range(self._parallelism):
                _, size = waiting.get(shard, (0, 0))
                of_shards[shard] = float(size)
        total = sum(map(sum, cells.values()))
        if not total:
            for uid, of_shards in cells.items():
                for shard, rows in self._seen[uid].shards.items():
                    of_shards[shard] = float(rows)
            total = sum(map(sum, cells.values()))
        cap = self._settings.checkpoint.max_inflight_bytes
        evenly = cap / (len(cells) * self._parallelism) if cells else 0.0
        if not total:
            return {uid: (int(evenly),) * self._parallelism for uid in cells}
        return {
            uid: tuple(int(evenly / 2 + weight / total * cap / 2) for weight in of_shards)
            for uid, of_shards in cells.items()
        }


def _learned(before: _Seen, tasks: Sequence[Acknowledgement]) -> _Seen:
    rows, took_s = sum(t.processed_rows for t in tasks), sum(t.process_s for t in tasks)
    if not rows or took_s <= 0:
        return before
    longest_s = max(t.process_s for t in tasks)
    came = {t.shard: t.partial_rows or t.input_rows for t in tasks}
    if not before.rows_per_s:
        return _Seen(rows / took_s, longest_s, came)
    mixed = {
        shard: round(came.get(shard, 0) * _NEWEST + before.shards.get(shard, 0) * (1 - _NEWEST))
        for shard in {*came, *before.shards}
    }
    return _Seen(
        rows / took_s * _NEWEST + before.rows_per_s * (1 - _NEWEST),
        longest_s * _NEWEST + before.took_s * (1 - _NEWEST),
        mixed,
    )
