"""Batch work in Spark tasks: pieces in, results back, with progress and typed errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from functools import partial
from typing import TypeVar

from pyspark.accumulators import Accumulator
from pyspark.sql import SparkSession

from state_runtime.base.errors import StillstateError
from state_runtime.spark.errors import marked, typed_error

__all__ = ["SparkSession", "run_in_tasks"]

_TASKS_MAX = 1024
_LOOK_S = 0.3  # how often the progress of the Spark job is read

Piece = TypeVar("Piece")
"""A piece of work; pickled."""
Result = TypeVar("Result")
"""The result of a piece; pickled."""


def run_in_tasks(
    spark: SparkSession,
    pieces: Sequence[Piece],
    begin: Callable[[], Callable[[Piece], Result]],
    reached: Callable[[int, int], None],
    group: str,
    title: str,
) -> list[Result]:
    """Run pieces of work in tasks, one task each up to `_TASKS_MAX`, and report progress from this thread.

    Args:
        begin: called once in each task; its result is called with each of the task's pieces. A task may run twice.
        reached: called with (done, total) pieces.
        group: id of the Spark job group; all tasks are cancelled by it if anything fails.
        title: of the Spark job, for people.

    Raises:
        StillstateError: typed, also that of a task; all tasks were asked to end.
    """
    total = len(pieces)
    reached(0, total)
    if not total:
        return []
    sc = spark.sparkContext
    done: Accumulator[int] = sc.accumulator(0)
    rows = sc.parallelize(pieces, min(total, _TASKS_MAX)).mapPartitions(partial(_run, begin, done))

    def action() -> list[Result]:
        sc.setJobGroup(group, title, interruptOnCancel=True)
        found: list[Result] = rows.collect()
        return found

    with ThreadPoolExecutor(1, "stillstate-tasks") as pool:
        future = pool.submit(action)
        try:
            while True:
                try:
                    results = future.result(_LOOK_S)
                    break
                except NotYet:
                    reached(min(done.value, total), total)
        except BaseException as error:
            sc.cancelJobGroup(group)
            typed = typed_error(error)
            if typed is error:
                raise
            raise typed from error
    reached(total, total)
    return results


def _run(
    begin: Callable[[], Callable[[Piece], Result]], done: Accumulator[int], pieces: Iterable[Piece]
) -> Iterator[Result]:
    """Runs in a Spark task."""
    try:
        work = begin()
        for piece in pieces:
            yield work(piece)
            done.add(1)
    except StillstateError as error:
        raise marked(error) from error
