"""One task for all shards, through whole jobs: the same output, state and numbers as with a task for each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from state_runtime import ParquetSink, Progress, StreamingJob, aggregates, reading, windows
from state_runtime.driver import engine, stage_tasks
from state_runtime.driver import single_task as narrow
from state_runtime.task.single_task import SingleTaskLimits

from .jobs import SCHEMA, Steps, positive, rows_of, settings, write_input

pytestmark = pytest.mark.spark

ROWS_MAX = 3_000
STEPS = "id long, name string, seen long, total long, previous long"


def two_steps(stream: Any, root: Path) -> None:
    """A processor, the user's code, an aggregate, and a sink on each."""
    (
        stream.key_by("name")
        .transform_with_state(Steps(), STEPS, uid="steps")
        .write(ParquetSink(str(root / "out" / "a")), name="a")
        .transform(positive)
        .key_by("bucket", "even")
        .aggregate(uid="buckets", n=aggregates.count(), total=aggregates.sum("total"))
        .write(ParquetSink(str(root / "out" / "b")), name="b")
    )


def windowed(stream: Any, root: Path) -> None:
    """Windows that close in epochs without rows, by partial rows, and what they give added up; a sink behind code of the
    user's, which is a stage of its own."""
    (
        stream.key_by("name")
        .window(windows.tumbling("20 seconds"), uid="w", output_mode="append", n=aggregates.count(), t=aggregates.sum("amount"))
        .key_by("n")
        .aggregate(uid="a", windows=aggregates.count(), most=aggregates.max("t"))
        .transform(lambda df: df.selectExpr("*", "n % 3 AS third"))
        .write(ParquetSink(str(root / "out" / "a")))
    )  # fmt: skip


def deduplicated(stream: Any, root: Path) -> None:
    """Keys that are forgotten by event time."""
    (
        stream.key_by("name", "amount")
        .deduplicate(uid="d", within_watermark=True)
        .write(ParquetSink(str(root / "out" / "a")))
    )


PIPELINES: Mapping[str, Callable[[Any, Path], None]] = {
    "two steps": two_steps, "windows": windowed, "deduplicate": deduplicated,
}  # fmt: skip


class Plans:
    """Which epochs were planned narrow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, allowed: bool) -> None:
        self.narrow: list[bool] = []
        plan = engine.plan_epoch

        def noting(*arguments: Any, **named: Any) -> Any:
            self.narrow.append(named["in_one_task"])
            return plan(*arguments, **named)

        monkeypatch.setattr(engine, "plan_epoch", noting)
        # Whatever the machine takes.
        monkeypatch.setattr(narrow, "TASKS_MS_MAX", float("inf"))
        monkeypatch.setattr(stage_tasks, "LIMITS", SingleTaskLimits(rows_max=ROWS_MAX, time_max_s=float("inf")))
        if not allowed:
            monkeypatch.setattr(engine, "may_be_single_task", lambda *_, **__: False)


def run(spark: SparkSession, root: Path, inbox: Path, build: Callable[[Any, Path], None]) -> dict[str, Any]:
    """Play the files, an epoch each; what readers see of it."""
    job = StreamingJob("job", store=str(root / "store"), settings=settings(root, parallelism=3))
    build(
        job.read(
            lambda s: (
                s.readStream.schema(SCHEMA)
                .option("maxFilesPerTrigger", 1)
                .parquet(str(inbox))
                .selectExpr("*", "timestamp_seconds(id) AS at")
                .withWatermark("at", "40 seconds")
            )
        ),
        root,
    )
    seen: list[Progress] = []
    job.run(spark, trigger={"availableNow": True}, on_progress=seen.append)
    snapshot = reading.open(f"{root}/store/job")
    names = ("input_rows", "late_rows", "changed_rows", "output_rows", "state_rows")
    return {
        "numbers": [[getattr(p, name) for name in names] for p in seen],
        "state": {
            (o.uid, s.name): str(snapshot.state(o.uid, s.name).fingerprint())
            for o in snapshot.manifest.operators
            for s in o.states
        },
        "output": {f.name: rows_of(spark.read.parquet(str(f))) for f in sorted((root / "out").iterdir()) if f.name[0] != "_"},
    }  # fmt: skip


@pytest.mark.parametrize("name", PIPELINES)
def test_a_job_of_narrow_epochs_gives_what_a_task_for_each_shard_gives(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Rows, state, and the numbers of each epoch."""
    write_input(tmp_path / "in", 0, 6)
    given = {}
    for allowed in (False, True):
        with monkeypatch.context() as patch:
            plans = Plans(patch, allowed=allowed)
            given[allowed] = run(spark, tmp_path / str(allowed), tmp_path / "in", PIPELINES[name])
        assert any(plans.narrow) == allowed, plans.narrow
        assert not plans.narrow[0]
    assert given[True] == given[False]
    assert given[True]["output"]["a"]


def test_what_is_too_much_for_one_task_is_run_again_with_a_task_for_each_shard_and_nothing_staged_is_left(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A burst after small batches. The lower operator refuses it, when the upper one has staged its output."""
    write_input(tmp_path / "in", 0, 3)
    rows = np.arange(ROWS_MAX * 2 // 3, dtype=np.int64)
    burst = pa.table({"id": rows + 10_000, "name": pa.array([f"n{n % 40}" for n in rows]), "amount": rows % 7})
    pq.write_table(burst, tmp_path / "in" / "00009.parquet")

    def build(stream: Any, root: Path) -> None:
        (
            stream.key_by("id")
            .aggregate(uid="ids", n=aggregates.count(), total=aggregates.sum("amount"))
            .write(ParquetSink(str(root / "out" / "a")), name="a")
            .transform(lambda df: df.selectExpr("explode(sequence(1, 2)) AS twice", "id % 50 AS id", "n"))
            .key_by("id")
            .aggregate(uid="again", n=aggregates.max("n"))
            .write(ParquetSink(str(root / "out" / "b")), name="b")
        )

    with caplog.at_level(logging.INFO):
        plans = Plans(monkeypatch, allowed=True)
        given = run(spark, tmp_path, tmp_path / "in", build)
    assert plans.narrow == [False, True, True, True, False]
    assert "is run again with a task for each shard" in caplog.text
    assert len(given["output"]["a"]) == len(rows) + 3 * 60
    assert not list((tmp_path / "out").glob("*/_stillstate/staging/*/*/*.parquet"))
