"""The rows of all shards in one task: handed on shard by shard, or refused."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from model import FakeClock, first_hash_of_shard, seeds

from state_runtime.base.errors import TooMuchForOneTask
from state_runtime.spark.columns import HASH_COLUMN
from state_runtime.state.key_groups import shard_of_hash
from state_runtime.task.single_task import SingleTaskLimits, by_shard

LIMITS = SingleTaskLimits()


def some_rows(draw: random.Random, shards: int) -> pa.RecordBatch:
    count = draw.randrange(0, 40)
    return pa.RecordBatch.from_pydict(
        {
            "n": pa.array(range(count), pa.int64()),
            HASH_COLUMN: pa.array([draw.randrange(-(1 << 63), 1 << 63) for _ in range(count)], pa.int64()),
        }
    )


def of_shards(shards: list[int], parallelism: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({HASH_COLUMN: [first_hash_of_shard(shard, parallelism) for shard in shards]})


def test_each_shard_gets_its_rows_in_the_order_in_which_they_came() -> None:
    """As a shuffle gives them to a task of its own; a shard without rows is there, and gets nothing."""
    for seed, draw in seeds(50):
        shards = draw.randrange(1, 6)
        rows = some_rows(draw, shards)
        pieces = [rows.slice(at, 7) for at in range(0, rows.num_rows, 7)]
        got = [list(batches) for batches in by_shard(pieces, shards, LIMITS, FakeClock())]
        expected = [
            [r for r in rows.to_pylist() if shard_of_hash(r[HASH_COLUMN] % (1 << 64), shards) == s]
            for s in range(shards)
        ]
        where = f"STILLSTATE_TEST_SEED={seed}"
        assert [[r for batch in batches for r in batch.to_pylist()] for batches in got] == expected, where
        assert all(batches or not rows_of for batches, rows_of in zip(got, expected, strict=True)), where


@pytest.mark.parametrize(
    "limits", [SingleTaskLimits(rows_max=999), SingleTaskLimits(bytes_max=6_000)], ids=["rows", "bytes"]
)
def test_more_than_one_task_should_have_is_refused_before_anything_is_done(limits: SingleTaskLimits) -> None:
    """A backlog after a pause, for which there are several cores; or more than a task may hold in memory."""
    with pytest.raises(TooMuchForOneTask, match="came for one task"):
        next(iter(by_shard([of_shards([0] * 1000, 2)], 2, limits, FakeClock())))
    assert list(by_shard([of_shards([0] * 700, 2)], 2, limits, FakeClock()))[1] == []


def test_once_it_takes_too_long_no_further_shard_is_begun() -> None:
    """Code of a user's may take a second a row: shards beside each other are done sooner."""
    clock = FakeClock()
    shards = by_shard([of_shards([0, 1, 2], 3)], 3, LIMITS, clock)
    next(shards)
    clock.advance_s(LIMITS.time_max_s)
    next(shards)
    clock.advance_s(0.1)
    with pytest.raises(TooMuchForOneTask, match="2 of 3 shards"):
        next(shards)
