"""How far a task goes with its rows in one epoch: slice by slice, until they are done or the epoch's time is up.

At the deadline no further slice begins, and the remaining rows wait as in-flight rows. There are three exceptions. One
slice is always processed, or the job would never advance. A task always has half a second. And a task continues past
the deadline as long as its remaining rows are more than it may keep. Most tasks finish long before: where the rows fit,
they are one slice, as if there were no deadline.

A slice is sized to take a small share of the time, by the rate of the slices before it (at first, of earlier epochs).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from state_runtime.base.clock import Clock
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.operator import RowSlice
from state_runtime.task.sorted_input import RowPass

__all__ = ["NO_LIMITS", "Slicer", "StageBudget"]

_SLICE_S = 0.2
"""Target duration of a slice: the deadline is exceeded by one slice at most."""
_LEAST_S = 0.5
"""Time of a task even if the deadline passed before it began: the first task of a run also starts Python."""
_FIRST_ROWS = 256
"""Size of the first slice of an operator without a known rate."""
_ROWS_MIN = 64
_GROWTH = 8
"""Growth limit from one slice to the next: a rate that was measured on few rows may be far off."""
_SURE = 0.5
"""Rows that take at most this share of the remaining time are one slice."""


@dataclass(frozen=True)
class StageBudget:
    """The limits of the tasks of one stage in an epoch.

    Attributes:
        deadline_ms: wall clock at which no further slice begins; None: all rows are processed.
        within_s: upper bound of the time left when a task begins, in case its host's clock is wrong.
        does_due: whether tasks that are done with their rows do their due work.
        due_was_done: an earlier epoch of the batch did the due work, in shards without rows in flight. Work that became
            due there since (a timer that fired and set one that is due already) is due with the next batch.
        keep_bytes: per shard how much may be left, in memory.
        rows_per_s: of a task, in earlier epochs; 0 if not known.
    """

    deadline_ms: int | None = None
    within_s: float = 0.0
    does_due: bool = True
    due_was_done: bool = False
    keep_bytes: tuple[int, ...] = ()
    rows_per_s: float = 0.0


NO_LIMITS = StageBudget()


class Slicer:
    """Hands a shard's passes to an operator, slice by slice.

    Life cycle: made when the task has its rows → `slices` is drained once → `rows_done` and the passes have the
    result.

    Args:
        passes: those of older epochs first.
        began_s: monotonic time at which the task began.
        began_ms: the wall clock then.
        rows_max: of one slice.

    Attributes:
        count: slices.
        rows_done: rows that were processed.
        took_s: time spent on processing them.
        is_done: no row is left.
    """

    def __init__(
        self,
        passes: Sequence[RowPass],
        budget: StageBudget,
        clock: Clock,
        *,
        shard: int,
        began_s: float,
        began_ms: int,
        rows_max: int,
    ) -> None:
        self._passes = passes
        self._budget = budget
        self._clock = clock
        self._rows_max = rows_max
        self._keep_bytes = budget.keep_bytes[shard] if budget.keep_bytes else 0
        self._deadline_s: float | None = None
        if budget.deadline_ms is not None:
            left_s = min(max(_LEAST_S, (budget.deadline_ms - began_ms) / 1000), budget.within_s)
            self._deadline_s = began_s + left_s
        self._rows_per_s = budget.rows_per_s
        self.count = 0
        self.rows_done = 0
        self.took_s = 0.0

    @property
    def did_due(self) -> bool:
        """Whether the due work was done with the last slice."""
        was_done = self._budget.due_was_done and not any(p.epoch for p in self._passes)
        return self._budget.does_due and not was_done and self.is_done

    @property
    def is_done(self) -> bool:
        """Whether no row is left, by the ranges: their numbers of rows are estimates after a change of parallelism."""
        return not any(p.left() for p in self._passes)

    def slices(self) -> Iterator[RowSlice]:
        """Yield at least one slice, which may have no rows. The last one is marked if no row is left and due work is to
        be done."""
        rows_total = sum(p.rows_left for p in self._passes)
        size = rows_total if self._is_one_slice(rows_total) else min(self._rows_max, self._sized(_FIRST_ROWS))
        is_last = False
        for passed in self._passes:
            begins = True
            while not (self.count and self._is_over()):
                taken = passed.take(size)
                if taken is None:
                    break
                before, begun_s = self.rows_done, self._clock.monotonic_s()
                self.rows_done += taken.rows.rows.num_rows
                rest = self._counted(taken.rest) if taken.rest is not None else None
                is_last = self.did_due
                self.count += 1
                yield RowSlice(taken.rows, is_last=is_last, begins_pass=begins, rest=rest)
                begins = rest is not None
                size = self._learned(self.rows_done - before, self._clock.monotonic_s() - begun_s, size)
        # A slice without rows: no row came, or the last ranges had none, which the slice before could not know.
        if self.count == 0 or (self.did_due and not is_last):
            self.count += 1
            yield RowSlice(self._passes[-1].none(), is_last=self.did_due)

    def _counted(self, rest: Iterator[GroupedRows]) -> Iterator[GroupedRows]:
        for piece in rest:
            self.rows_done += piece.rows.num_rows
            yield piece

    def _is_one_slice(self, rows: int) -> bool:
        if rows > self._rows_max or not all(p.is_bounded for p in self._passes):
            return False
        if self._deadline_s is None:
            return True
        return rows <= self._rows_per_s * _SURE * (self._deadline_s - self._clock.monotonic_s())

    def _is_over(self) -> bool:
        if self._deadline_s is None or self._clock.monotonic_s() < self._deadline_s:
            return False
        return sum(p.bytes_left for p in self._passes) <= self._keep_bytes

    def _sized(self, default: int) -> int:
        return max(_ROWS_MIN, int(self._rows_per_s * _SLICE_S)) if self._rows_per_s else default

    def _learned(self, rows: int, took_s: float, size: int) -> int:
        """Return the size of the next slice."""
        self.took_s += took_s
        if self._deadline_s is None:
            return size
        if took_s > 0:
            seen = rows / took_s
            self._rows_per_s = seen if not self._rows_per_s else (self._rows_per_s + seen) / 2
        return min(self._rows_max, size * _GROWTH, self._sized(size * _GROWTH))
