"""Acknowledgements that tasks send to the driver, on an accumulator (docs/design/0002-acknowledgements.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pyspark import SparkContext
from pyspark.accumulators import Accumulator, AccumulatorParam

from state_runtime.base.errors import InvalidPipeline, TasksDisagree
from state_runtime.pipeline.compile import Stage
from state_runtime.task.acknowledgement import EMPTY_TASK, Acknowledgement

__all__ = ["Acknowledgements"]


class _Append(AccumulatorParam[list[Any]]):
    """Collects acknowledgements on the driver."""

    def zero(self, value: list[Any]) -> list[Any]:
        return []

    def addInPlace(self, value1: list[Any], value2: list[Any]) -> list[Any]:
        value1.extend(value2)
        return value1


class Acknowledgements:
    """The acknowledgements of one action after the other.

    Life cycle: made with the run → per action `expecting` around it, then `take` if it succeeded. `so_far` returns at
    any time the acknowledgements that have arrived.

    Attributes:
        accumulator: for the tasks.
    """

    def __init__(self, context: SparkContext) -> None:
        self.accumulator: Accumulator[list[Any]] = context.accumulator([], _Append())
        self._expected = ""

    @contextmanager
    def expecting(self, epoch: str) -> Iterator[None]:
        """Collect acknowledgements while an action runs. Earlier acknowledgements are discarded.

        Args:
            epoch: of the action (`TaskJob.epoch`).
        """
        self.accumulator.value.clear()
        self._expected = epoch
        try:
            yield
        finally:
            self._expected = ""

    def so_far(self) -> list[Acknowledgement]:
        """Return the acknowledgements that have arrived; of a failed action, those of some of its tasks."""
        return list(self.accumulator.value)

    def arrived(self) -> int | None:
        """Count the acknowledgements of the running action; None if no action runs. For other threads."""
        expected = self._expected
        return sum(a.epoch == expected for a in self.so_far()) if expected else None

    def take(self, epoch: str, parallelism: int, stages: Sequence[Stage]) -> list[Acknowledgement]:
        """Take, after an action, one acknowledgement per stage and shard, in their order. All are removed from here.

        A stage that Spark re-ran (lost shuffle files) acknowledges some shards twice. Input order is reproduced, so
        both attempts hold the same result; the newest is the one whose output Spark kept.

        Args:
            epoch: of the action (`TaskJob.epoch`): a late task of an earlier action may have come back meanwhile.

        Raises:
            InvalidPipeline: some shards were not processed to the end. TasksDisagree: a shard's two attempts stopped at
                different rows, and a task that read the output of the first may not have read that of the second.
        """
        chosen: dict[tuple[int, int], Acknowledgement] = {}
        empty = Counter[int]()
        for acknowledgement in self.accumulator.value:
            if acknowledgement.epoch != epoch:
                continue
            if acknowledgement.shard == EMPTY_TASK:
                empty[acknowledgement.stage] += 1
            else:
                key = (acknowledgement.stage, acknowledgement.shard)
                _check_same_rows(chosen.get(key), acknowledgement, stages)
                chosen[key] = acknowledgement
        for number, stage in enumerate(stages):
            if stage.operator is None:
                continue
            finished = sum(1 for key in chosen if key[0] == number) + empty[number]
            if finished < parallelism:
                raise InvalidPipeline(
                    f"operator {stage.operator.uid!r}: only {finished} of {parallelism} shards were processed to the "
                    "end. A step after it stops reading early (limit, take, head); remove it, or put it into the "
                    "consumer of the output"
                )
        self.accumulator.value.clear()
        return [chosen[key] for key in sorted(chosen)]


def _check_same_rows(earlier: Acknowledgement | None, later: Acknowledgement, stages: Sequence[Stage]) -> None:
    if earlier is not None and earlier.left != later.left:
        operator = stages[later.stage].operator
        raise TasksDisagree(
            f"operator {operator.uid if operator else ''!r}, shard {later.shard}: Spark ran its task twice, because an "
            "executor was lost, and it came to another row the second time. The epoch is run again"
        )
