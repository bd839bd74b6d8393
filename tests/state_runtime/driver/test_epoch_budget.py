"""How long an epoch may take, and how that is dealt out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from state_runtime import JobSettings
from state_runtime.base.settings import CheckpointSettings
from state_runtime.driver.batch_progress import BatchProgress
from state_runtime.driver.epoch_budget import BudgetPlanner, EpochBudget
from state_runtime.snapshot.manifest import TimeEntry
from state_runtime.task.acknowledgement import Acknowledgement
from tests.job_settings import job_settings
from tests.state_runtime.driver.inflight_chains import steps_operators as operators

NOW_MS = 1_000_000
UNALIGNED = JobSettings(checkpoint=CheckpointSettings(mode="unaligned", unaligned_epoch_s=4.0))
STEPS, WINDOWS, TOTALS = (o.uid for o in operators())


def governor(settings: JobSettings = UNALIGNED, parallelism: int = 2) -> BudgetPlanner:
    return BudgetPlanner(settings, operators(), parallelism)


def plan(of: BudgetPlanner, *, reads: bool = True, until_s: float = 0.0, now_ms: int = NOW_MS) -> EpochBudget:
    return of.plan(BatchProgress.begun(TimeEntry(0)), reads=reads, now_ms=now_ms, until_checkpoint_s=until_s)


def task(shard: int = 0, **more: Any) -> Acknowledgement:
    numbers = {"processed_rows": 100, "process_s": 1.0, "input_rows": 100, "began_at_ms": NOW_MS}
    return Acknowledgement(epoch="e", stage=0, shard=shard, **(numbers | more))


def started(settings: JobSettings = UNALIGNED) -> BudgetPlanner:
    """A run whose first batch is done, and took long."""
    made = governor(settings)
    made.batch_done(100.0, 5)
    return made


def test_an_aligned_epoch_has_no_deadline() -> None:
    """Mode aligned: an epoch ends with its batch."""
    budget = plan(governor(JobSettings(checkpoint=CheckpointSettings(mode="aligned"))))
    assert budget.within_s is None
    assert all(stage.deadline_ms is None and stage.does_due for stage in budget.stages.values())
    assert budget.does_due == {STEPS, WINDOWS, TOTALS}


@pytest.mark.parametrize(
    ("mode", "epoch_s"), [("unaligned", 4.0), ("aligned-with-timeout", 7.0)], ids=["unaligned", "with timeout"]
)
def test_the_mode_says_how_long_an_epoch_takes(mode: Any, epoch_s: float) -> None:
    """Each of the two modes with a deadline has a time of its own; the last operator's deadline is the epoch's."""
    settings = JobSettings(checkpoint=CheckpointSettings(mode=mode, unaligned_epoch_s=4.0, aligned_timeout_s=7.0))
    budget = plan(started(settings))
    assert budget.within_s == epoch_s
    assert budget.stages[TOTALS].deadline_ms == pytest.approx(NOW_MS + epoch_s * 1000, abs=1)


def test_an_epoch_lasts_until_the_next_checkpoint_if_that_is_later() -> None:
    """More epochs than checkpoints would cost their floor for nothing."""
    assert plan(started(), until_s=60.0).within_s == 60.0
    assert plan(started(), until_s=1.0).within_s == 4.0


def test_the_first_epochs_of_a_run_are_short() -> None:
    """A job that dies every few seconds makes progress: what its first epochs did is durable soon."""
    made = governor(JobSettings(checkpoint=CheckpointSettings(aligned_timeout_s=60.0)))
    times = []
    for _ in range(7):
        times.append(plan(made).within_s)
        made.seen([(STEPS, task())])
    assert times == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    made.batch_done(100.0, 7)
    assert plan(made).within_s == 60.0


def test_a_run_catches_up_from_its_second_epoch_until_its_first_batch_is_done() -> None:
    """Folding waits meanwhile; a batch of one epoch is no backlog, and an aligned job has no such time."""
    made = governor()
    assert not made.is_catching_up
    made.seen([(STEPS, task())])
    assert made.is_catching_up
    made.batch_done(10.0, 3)
    assert not made.is_catching_up
    aligned = governor(JobSettings(checkpoint=CheckpointSettings(mode="aligned")))
    aligned.seen([(STEPS, task())])
    assert not aligned.is_catching_up


def test_a_batch_after_one_that_fitted_is_done_in_one_epoch() -> None:
    """A job that keeps up has epochs as without a deadline: what is due is done at all operators, and those that have
    others by event time below them finish whatever the time."""
    made = governor()
    made.batch_done(1.0, 1)
    budget = plan(made)
    assert budget.does_due == {STEPS, WINDOWS, TOTALS}
    assert budget.stages[STEPS].deadline_ms is None
    assert budget.stages[WINDOWS].deadline_ms is not None


@pytest.mark.parametrize(("took_s", "epochs"), [(3.0, 1), (1.0, 2)], ids=["slow", "two epochs"])
def test_a_batch_after_one_that_did_not_fit_does_what_is_due_at_one_operator_at_a_time(
    took_s: float, epochs: int
) -> None:
    """The input of a lower operator is not complete before those above are done."""
    made = governor()
    made.batch_done(took_s, epochs)
    budget = plan(made)
    assert WINDOWS not in budget.does_due
    assert budget.stages[STEPS].deadline_ms is not None


def test_the_time_is_dealt_out_by_what_operators_took() -> None:
    """Spark runs them one after the other: a fast one does not get the time of a slow one."""
    made = started()
    made.seen([(STEPS, task(process_s=3.0)), (WINDOWS, task(process_s=0.5)), (TOTALS, task(process_s=0.5))])
    stages = plan(made).stages
    assert [stages[uid].within_s for uid in (STEPS, WINDOWS, TOTALS)] == [3.0, 3.5, 4.0]


def test_a_settled_operator_gets_no_time() -> None:
    """An operator that is done with the batch has nothing to take time for."""
    book = replace(BatchProgress.begun(TimeEntry(0)), settled=frozenset({STEPS}))
    stages = started().plan(book, reads=False, now_ms=NOW_MS, until_checkpoint_s=0.0).stages
    assert [stages[uid].within_s for uid in (STEPS, WINDOWS, TOTALS)] == [0.0, 2.0, 4.0]


def test_what_spark_takes_to_begin_is_not_taken_from_the_rows() -> None:
    """Where tasks begin two seconds after their time did, deadlines are by and by two seconds later; else an epoch of a
    second would process one slice, however long it took to get there."""
    made = started()
    for _ in range(12):
        budget = plan(made)
        began_ms = NOW_MS + 2_000
        made.seen([(STEPS, task(began_at_ms=began_ms))])
    deadlines = plan(made).stages
    assert budget.within_s == 4.0
    assert deadlines[STEPS].deadline_ms == pytest.approx(NOW_MS + 2_000 + 4_000 / 3, abs=5)
    assert deadlines[TOTALS].deadline_ms == pytest.approx(NOW_MS + 6_000, abs=5)


def test_what_reading_a_batch_takes_is_not_given_to_the_epochs_that_go_on_with_it() -> None:
    """They begin at once: with the time of the first one they would last twice as long, and a job that is killed every few
    seconds would lose twice as much. The next batch is read as late as the one before."""
    made = started()
    plan(made)
    made.seen([(STEPS, task(began_at_ms=NOW_MS + 3_000))])
    assert plan(made, reads=False).stages[TOTALS].deadline_ms == pytest.approx(NOW_MS + 4_000, abs=5)
    made.seen([(STEPS, task(began_at_ms=NOW_MS))])
    assert plan(made).stages[TOTALS].deadline_ms == pytest.approx(NOW_MS + 4_000 + 1_500, abs=5)


def test_a_slow_beginning_makes_an_epoch_twice_as_long_at_most() -> None:
    """One pause of a minute must not make the next epochs last minutes."""
    made = started()
    plan(made)
    made.seen([(STEPS, task(began_at_ms=NOW_MS + 60_000)), (TOTALS, task(began_at_ms=NOW_MS + 90_000))])
    assert plan(made).stages[TOTALS].deadline_ms == NOW_MS + 8_000


def test_what_may_be_left_adds_up_to_the_cap() -> None:
    """`max_inflight_bytes` is one snapshot's, over all operators and shards; a hot shard gets most of it."""
    made = started(job_settings(UNALIGNED, max_inflight_bytes=6_000_000))
    evenly = plan(made).stages
    assert [stage.keep_bytes for stage in evenly.values()] == [(1_000_000, 1_000_000)] * 3
    made.seen([(STEPS, task(0, input_rows=900)), (STEPS, task(1, input_rows=100))])
    hot = plan(made).stages
    assert hot[STEPS].keep_bytes == (500_000 + 2_700_000, 500_000 + 300_000)
    assert sum(sum(stage.keep_bytes) for stage in hot.values()) <= 6_000_000
