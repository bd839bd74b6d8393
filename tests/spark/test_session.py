"""What a session of `build_session` gives its tasks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from state_runtime.base.allocator import KEEPS_FREED_MEMORY
from state_runtime.spark.session import session_conf

pytestmark = pytest.mark.spark


def _seen(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        found = [f"{name}={os.environ.get(name)}" for name in KEEPS_FREED_MEMORY]
        yield pa.RecordBatch.from_pydict({"seen": [*found, pa.default_memory_pool().backend_name]})


def test_tasks_keep_the_memory_that_they_free_for_the_next_epoch(spark: SparkSession) -> None:
    """The allocator is chosen when a worker begins, so its environment must say it."""
    rows = spark.range(1, numPartitions=1).mapInArrow(_seen, "seen string").collect()
    assert [row.seen for row in rows] == [*(f"{n}={v}" for n, v in KEEPS_FREED_MEMORY.items()), "system"]


def test_a_setting_of_the_user_wins_over_a_recommended_one() -> None:
    """Tasks' environment as well as what Spark itself reads."""
    own = {"spark.executorEnv.MALLOC_TRIM_THRESHOLD_": "0", "spark.locality.wait.process": "1s"}
    assert session_conf("job", conf=own).items() >= own.items()
