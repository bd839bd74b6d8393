"""Both testers give the same rows and the same state: the one without Java is the job's own operator."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from state_runtime import JobContext, ParquetSink, StreamingJob
from stillstate.testing import JobTester, ProcessorTester

from .processors import OUT, ROWS, Accounts, AccountsInColumns, AccountsInPandas

pytestmark = pytest.mark.spark
START = datetime(2026, 1, 1, 12, tzinfo=UTC)


def job_of(kind: str, folder: Path) -> Any:
    def build(context: JobContext) -> StreamingJob:
        job = context.job()
        rows = job.read(
            lambda s: s.readStream.schema(ROWS).parquet(str(folder / "in")).withWatermark("at", "10 seconds")
        ).key_by("user")
        sink = ParquetSink(str(folder / "out"))
        if kind == "columns":
            made = rows.process(AccountsInColumns(), OUT, uid="accounts", outputs={"large": OUT})
            made.output("large").write(sink, name="large")
            made.output("late").write(sink, name="late")
            made.write(sink, name="main")
        elif kind == "pandas":
            processor: Any = AccountsInPandas(by_watermark=True)
            rows.transform_with_state_in_pandas(processor, OUT, uid="accounts", time_mode="eventTime").write(sink)
        else:
            processor = Accounts(by_watermark=kind == "event", ttl_ms=None if kind == "event" else 90_000)
            mode = "eventTime" if kind == "event" else "processingTime"
            rows.transform_with_state(processor, OUT, uid="accounts", time_mode=mode).write(sink)
        return job

    return build


def processor_of(kind: str) -> ProcessorTester:
    given: dict[str, Any] = {"key": "user", "watermark": ("at", "10 seconds")}
    if kind == "columns":
        return ProcessorTester(AccountsInColumns(), ROWS, OUT, outputs={"large": OUT}, **given)
    if kind == "pandas":
        return ProcessorTester(
            AccountsInPandas(by_watermark=True), ROWS, OUT, pandas=True, time_mode="eventTime", **given
        )
    if kind == "event":
        return ProcessorTester(Accounts(by_watermark=True), ROWS, OUT, time_mode="eventTime", **given)
    processor = Accounts(by_watermark=False, ttl_ms=90_000)
    return ProcessorTester(processor, ROWS, OUT, time_mode="processingTime", **given)


def drawn_rows(draw: random.Random, step: int) -> list[tuple[str, datetime, int]]:
    """Rows around a time that goes on, some of them late."""
    middle = START + timedelta(seconds=40 * step)
    return [
        (draw.choice("abcde"), middle + timedelta(seconds=draw.randint(-60, 30)), draw.randint(0, 90))
        for _ in range(draw.randint(0, 8))
    ]


def ordered(rows: Any) -> list[Any]:
    return sorted(rows, key=repr)


@pytest.mark.parametrize("kind", ["event", "processing", "pandas", "columns"])
def test_a_processor_gives_the_same_in_both_testers(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    """Step by step: rows, side outputs, late rows; with other shards in between, and time that passes."""
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    draw, alone = random.Random(kind), processor_of(kind)
    with JobTester(job_of(kind, tmp_path), spark=spark) as whole:
        for step in range(5):
            rows = drawn_rows(draw, step)
            if step == 2:
                whole.restart(parallelism=3)
            given, expected = whole.send(rows), alone.send(rows)
            if kind == "columns":
                assert ordered(given["large"]) == ordered(alone.output("large"))
                assert ordered(given["late"]) == ordered(alone.output("late"))
                given = given["main"]
            assert ordered(given) == ordered(expected)
            if kind == "processing":
                assert ordered(whole.advance_time("45 seconds")) == ordered(alone.advance_time("45 seconds"))
        end = START + timedelta(hours=1)
        if kind != "processing":
            given = whole.advance_watermark(end)
            assert ordered(given["main"] if kind == "columns" else given) == ordered(alone.advance_watermark(end))
        for name in ("sums", "amounts", "days"):
            stored = {row.user for row in whole.state("accounts", name)}
            assert stored == {key[0] for key in alone.states(name)}
