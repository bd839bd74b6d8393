"""A job of two operators through a chain of parallelisms, and what cannot be rescaled."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from state_runtime import Progress, aggregates, windows
from state_runtime.base.errors import InvalidConfiguration, UserCodeError
from state_runtime.snapshot.catalog import Catalog, read_job_info
from state_runtime.snapshot.document import encode_document
from state_runtime.snapshot.paths import JOB_FILE
from state_runtime.store import open_store

from .jobs import assert_equals_batch, two_step_job, write_input
from .timed import SCHEMA, TimedJob

pytestmark = pytest.mark.spark

BREAKS = -1
"""A row that meets the fault."""


def test_a_chain_of_parallelisms_gives_the_output_of_an_unscaled_run(spark: SparkSession, tmp_path: Path) -> None:
    """2 → 4 → 3 → 7 → 1 → 2, the fourth time without local copies: output equals a recomputation of the whole input."""
    seen: list[list[Progress]] = []
    for number, parallelism in enumerate((2, 4, 3, 7, 1, 2)):
        if parallelism == 7:
            shutil.rmtree(tmp_path / "local")
        write_input(tmp_path / "in", 2 * number, 2)
        progress: list[Progress] = []
        job = two_step_job(tmp_path, parallelism=parallelism)
        job.run(spark, trigger={"availableNow": True}, on_progress=progress.append)
        seen.append(progress)
    assert_equals_batch(spark, tmp_path)
    for number, progress in enumerate(seen[1:], 1):
        stale, primary = (sum(getattr(p, f"{kind}_restores") for p in progress) for kind in ("stale", "primary"))
        assert (primary > 0) == (number == 3), f"run {number}"
        assert (stale > 0) == (number != 3), f"run {number}"
        assert max(p.restore_ms for p in progress) > 0


@pytest.mark.long
@pytest.mark.parametrize(("backend", "changelog"), [("arrow", "on"), ("rocksdb", "on"), ("arrow", "off")])
def test_sliding_windows_through_failures_and_rescaling_equal_a_spark_batch(
    spark: SparkSession, tmp_path: Path, backend: str, changelog: str
) -> None:
    """6 → 4 → 6 → 5 with local copies, then 6 without: each run fails in its second epoch and is started again."""
    broken, draw = tmp_path / "broken", random.Random(9)

    def is_calm(n: int) -> bool:
        if n == BREAKS and broken.exists():
            raise RuntimeError("the machine is broken")
        return True

    calm = F.udf(lambda n: is_calm(n), "boolean")

    def build(stream: Any) -> Any:
        return (
            stream.transform(lambda df: df.where(calm("n")))
            .key_by("k")
            .window(
                windows.sliding("10 seconds", "2 seconds"),
                uid="w",
                output_mode="append",
                rows=aggregates.count(),
                total=aggregates.sum("n"),
            )
            .transform(lambda df: df.selectExpr("k", "unix_seconds(window.start) AS s", "rows", "total"))
        )

    def rows(batch: int) -> list[tuple[str, int, int]]:
        marker = [("k0", 20 * batch, BREAKS)] if batch % 2 else []
        return [
            (f"k{draw.randrange(30)}", 20 * batch + draw.randrange(-9, 10), draw.randrange(99)) for _ in range(200)
        ] + marker

    job = TimedJob(spark, tmp_path, build, materialize_max_segments=3, backend=backend, changelog=changelog)
    for number, (parallelism, is_lost) in enumerate([(6, False), (4, False), (6, False), (5, False), (6, True)]):
        job.settings["parallelism"] = parallelism
        if is_lost:
            shutil.rmtree(tmp_path / "local")
        broken.touch()
        with pytest.raises(UserCodeError, match="the machine is broken"):
            job.run(rows(2 * number), rows(2 * number + 1))
        restored = [(p.stale_restores + p.local_restores, p.primary_restores) for p in job.progress]
        broken.unlink()
        job.run()
        if number:
            local, primary = map(sum, zip(*restored, strict=True))
            assert (local > 0, primary > 0) == (not is_lost, is_lost), f"run {number}"
    job.run([("end", 100_000, 0)])
    emitted = [row for epoch in job.epochs.values() for row in epoch]
    frame = spark.read.schema(SCHEMA).parquet(str(tmp_path / "in")).where("k <> 'end'")
    expected = (
        frame.groupBy("k", F.window("at", "10 seconds", "2 seconds").alias("window"))
        .agg(F.count("*").alias("rows"), F.sum("n").alias("total"))
        .selectExpr("k", "unix_seconds(window.start) AS s", "rows", "total")
    )
    assert sorted(emitted) == sorted(map(tuple, expected.collect()))


def test_another_max_parallelism_is_refused_before_anything_is_written(spark: SparkSession, tmp_path: Path) -> None:
    """Which shard a key belongs to follows from it."""
    write_input(tmp_path / "in", 0, 1)
    two_step_job(tmp_path).run(spark, trigger={"availableNow": True})
    store = open_store(str(tmp_path / "store"))
    root = store.child("steps")
    info = read_job_info(root)
    assert info is not None
    root.put(JOB_FILE, encode_document("job", replace(info, max_parallelism=4096)))
    newest = Catalog(store, "steps").latest()
    with pytest.raises(
        InvalidConfiguration, match=r"created with max_parallelism 4096.*has 32768.*nothing was changed"
    ):
        two_step_job(tmp_path).run(spark, trigger={"availableNow": True})
    assert Catalog(store, "steps").latest() == newest
