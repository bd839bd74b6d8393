"""How far a task goes with its rows in one epoch."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from state_runtime.task.slicing import Slicer, StageBudget


class Clock:
    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s


@dataclass
class Rows:
    """A pass of so many rows, each of 10 bytes."""

    rows_left: int
    epoch: int = 0
    is_bounded: bool = True

    @property
    def bytes_left(self) -> int:
        return self.rows_left * 10

    def left(self) -> tuple[int, ...]:
        return (self.rows_left,) if self.rows_left else ()

    def take(self, rows_max: int) -> Any:
        taken = min(rows_max, self.rows_left)
        self.rows_left -= taken
        rows = SimpleNamespace(rows=SimpleNamespace(num_rows=taken))
        return SimpleNamespace(rows=rows, rest=None) if taken else None


def processed(rows: int, budget: StageBudget, *, row_s: float) -> tuple[int, float]:
    """Rows that an operator gets that takes so long over each, and how long that is."""
    clock: Any = Clock()
    given: Any = Rows(rows)
    slicer = Slicer([given], budget, clock, shard=0, began_s=100.0, began_ms=50_000, rows_max=1 << 20)
    for part in slicer.slices():
        clock.now_s += part.rows.rows.num_rows * row_s
    assert rows - given.rows_left == slicer.rows_done
    return slicer.rows_done, clock.now_s - 100.0


def budget(left_s: float, **more: Any) -> StageBudget:
    return StageBudget(deadline_ms=50_000 + int(left_s * 1000), within_s=4.0, keep_bytes=(1 << 40,), **more)


def test_a_task_that_begins_when_the_time_is_up_has_half_a_second() -> None:
    """The first task of a run starts Python, Spark and the state, which takes longer than its epoch may: a small batch is
    done all the same, and needs no second epoch."""
    assert processed(1_000, budget(-3.0), row_s=0.0001)[0] == 1_000
    rows, took_s = processed(100_000, budget(-3.0), row_s=0.001)
    assert 0.5 <= took_s < 1.0
    assert rows < 1_000


def test_a_task_stops_at_the_deadline_within_a_slice() -> None:
    """A slice takes a fifth of a second, about."""
    rows, took_s = processed(100_000, budget(2.0), row_s=0.001)
    assert 2.0 <= took_s < 2.5
    assert rows == pytest.approx(took_s * 1_000)


def test_rows_that_fit_by_the_known_rate_are_one_slice() -> None:
    """As without a deadline: cutting costs."""
    clock: Any = Clock()
    given: Any = Rows(1_000)
    known = budget(2.0, rows_per_s=5_000.0)
    slicer = Slicer([given], known, clock, shard=0, began_s=100.0, began_ms=50_000, rows_max=1 << 20)
    assert [part.rows.rows.num_rows for part in slicer.slices()] == [1_000]


def test_a_task_goes_on_while_it_would_leave_more_than_it_may() -> None:
    """`max_inflight_bytes` is kept although the time is up."""
    tight = StageBudget(deadline_ms=50_000, within_s=1.0, keep_bytes=(1_000,))
    rows, _ = processed(10_000, tight, row_s=0.001)
    assert 9_900 <= rows <= 10_000


@pytest.mark.parametrize(("epoch", "does_due"), [(0, False), (7, True)])
def test_what_is_due_was_done_in_shards_without_rows_in_flight(epoch: int, does_due: bool) -> None:
    """They may be visited for another reason: what has become due there since waits for the next batch."""
    given: Any = Rows(10)
    given.epoch = epoch
    slicer = Slicer([given], StageBudget(due_was_done=True), Clock(), shard=0, began_s=0.0, began_ms=0, rows_max=100)  # type: ignore[arg-type]
    assert [part.is_last for part in slicer.slices()] == [does_due]
    assert slicer.did_due is does_due
