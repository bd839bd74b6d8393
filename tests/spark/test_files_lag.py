"""How far a job is behind a folder: what is counted as listed is what Spark itself lists, and a run tells it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from state_runtime.base.source_state import SourceState
from state_runtime.snapshot.catalog import Catalog
from state_runtime.sources.files_listed import listed
from state_runtime.store import open_store

from .jobs import Steps, two_step_job, write_input

pytestmark = pytest.mark.spark


@pytest.mark.parametrize(
    ("names", "is_certain"),
    [
        (["a", "b c", "d%20", "é"], True),
        (["a", "_hidden", ".hidden", "x._COPYING_", "_a=b"], True),
        (["a", "archive/b", "archive/2026/c"], True),
        (["day=1/a", "day=2/b", "day=2/_x", "_SUCCESS"], True),
        (["day=1/hour=2/a", "day=1/hour=3/b"], True),
        (["a", "day=1/b"], True),
        (["_k=1/a", "_k=2/b"], True),
        (["_hidden/a", "b", ".hidden/day=1/c"], True),
        (["archive/day=1/b", "archive/day=2/c"], False),
        (["day=1/a", "day=1/hour=2/b"], False),
        (["day=1/a", "archive/b"], False),
        (["a", "_metadata"], False),
        (["_spark_metadata/0", "a"], False),
    ],
)
def test_what_is_listed_is_what_spark_lists(
    spark: SparkSession, tmp_path: Path, names: Sequence[str], is_certain: bool
) -> None:
    """Where it is not certain, nothing is told."""
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("{}")
    found = listed(str(tmp_path / "in"))
    assert (found is not None) == is_certain
    if found is not None:
        assert sorted(found) == listed_by_spark(spark, tmp_path / "in")


def listed_by_spark(spark: SparkSession, folder: Path) -> list[str]:
    files = spark.read.schema("value string").text(str(folder)).inputFiles()
    return sorted(unquote(urlsplit(file).path).removeprefix(f"{folder}/") for file in files)


def test_an_empty_folder_has_nothing_that_waits(spark: SparkSession, tmp_path: Path) -> None:
    assert listed(str(tmp_path)) == {}
    try:
        assert listed_by_spark(spark, tmp_path) == []
    except PySparkException:
        pytest.fail("Spark does not list an empty folder")


def test_a_run_tells_which_files_wait_also_after_a_restart(spark: SparkSession, tmp_path: Path) -> None:
    """Its first batch takes one file, and the next one comes in an hour; the log of the first run is compacted."""
    write_input(tmp_path / "in", 0, 11)
    two_step_job(tmp_path, Steps()).run(spark, trigger={"availableNow": True})
    write_input(tmp_path / "in", 11, 4)
    running = two_step_job(tmp_path, Steps()).start(spark, trigger={"processingTime": "1 hour"})
    catalog = Catalog(open_store(str(tmp_path / "store")), "steps")
    while not any(source.behind == 3 for source in told(catalog)):
        assert not running.awaitTermination(0.2)
    running.stop()
    (state,) = told(catalog)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "in").glob("*.parquet"))[-3:]]
    assert (state.name, state.unit, state.behind_bytes) == (str(tmp_path / "in"), "files", sum(sizes))
    assert (state.retention_left_s, state.kept_s, state.away_since_ms) == (-1.0, -1.0, 0)


def told(catalog: Catalog) -> Sequence[SourceState]:
    status: Any = catalog.status()
    return () if status is None else status.sources
