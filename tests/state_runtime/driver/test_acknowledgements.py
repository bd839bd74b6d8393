"""What comes back from tasks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from state_runtime.base.errors import InvalidPipeline, TasksDisagree, can_pass
from state_runtime.changelog.inflight import RowsLeft
from state_runtime.driver.acknowledgements import Acknowledgements
from state_runtime.task.acknowledgement import EMPTY_TASK, Acknowledgement

STAGES: Any = [SimpleNamespace(operator=SimpleNamespace(uid="legs")), SimpleNamespace(operator=None)]


class Accumulator:
    def __init__(self) -> None:
        self.value: list[Any] = []


def acknowledgements(*came: Acknowledgement) -> Acknowledgements:
    context: Any = SimpleNamespace(accumulator=lambda value, param: Accumulator())
    made = Acknowledgements(context)
    made.accumulator.value.extend(came)
    return made


def task(shard: int, left: int | None = None, epoch: str = "e", rows: int = 0) -> Acknowledgement:
    waiting = {} if left is None else {3: (RowsLeft(left, 99, 5, 50),)}
    return Acknowledgement(epoch=epoch, stage=0, shard=shard, left=waiting, input_rows=rows)


def test_of_two_attempts_that_agree_the_newest_counts() -> None:
    """Its output is the one that Spark kept."""
    taken = acknowledgements(task(1, 10, rows=1), task(0), task(1, 10, rows=2)).take("e", 2, STAGES)
    assert [(t.shard, t.input_rows) for t in taken] == [(0, 0), (1, 2)]


def test_attempts_that_stopped_at_different_rows_fail_the_epoch() -> None:
    """What was made of the first one's output may hold rows that the second one says are still to be done: they would
    count twice. The error can pass, so the epoch is run again in the process."""
    came = acknowledgements(task(0), task(1, 10), task(1, 20))
    with pytest.raises(TasksDisagree, match="operator 'legs', shard 1") as disagreed:
        came.take("e", 2, STAGES)
    assert can_pass(disagreed.value)


def test_an_attempt_that_left_nothing_disagrees_with_one_that_did() -> None:
    """One was done in time and the other was not."""
    with pytest.raises(TasksDisagree):
        acknowledgements(task(0), task(1), task(1, 20)).take("e", 2, STAGES)


def test_a_late_attempt_of_another_action_says_nothing() -> None:
    """Spark does not wait for tasks of an action that failed."""
    taken = acknowledgements(task(1, 10, epoch="before"), task(0), task(1, 20)).take("e", 2, STAGES)
    assert [t.left for t in taken] == [{}, {3: (RowsLeft(20, 99, 5, 50),)}]


def test_a_shard_without_an_acknowledgement_fails_the_epoch() -> None:
    """A step that stops reading early ends a task before its shard is done."""
    with pytest.raises(InvalidPipeline, match="only 1 of 2 shards"):
        acknowledgements(task(0)).take("e", 2, STAGES)
    assert len(acknowledgements(task(0), task(EMPTY_TASK)).take("e", 2, STAGES)) == 1
