"""Jobs that read Delta tables: exact over restarts, other shards, a rollback, and upkeep of the table in between."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from state_runtime import JobContext, JobSettings, ParquetSink, StreamingJob, aggregates, sources
from state_runtime.base.errors import InvalidConfiguration, MissingSource
from state_runtime.base.source_state import SourceState
from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_store

from .jobs import settings

pytestmark = pytest.mark.spark
PAGE = Path(__file__).resolve().parents[2] / "docs" / "delta-in.md"


def add(table: Path, ids: range) -> None:
    rows = pa.table({"id": pa.array(list(ids), pa.int64()), "shop": pa.array([n % 7 for n in ids], pa.int32())})
    write_deltalake(str(table), rows, mode="append", partition_by=["shop"])


def job_on(root: Path, parallelism: int = 2, **how: Any) -> StreamingJob:
    job = StreamingJob("shops", store=str(root / "store"), settings=settings(root, parallelism=parallelism))
    orders = job.read(sources.delta(str(root / "table"), **{"max_files_per_trigger": 4, **how}), name="orders")
    orders.key_by("id").deduplicate(uid="once").write(ParquetSink(str(root / "orders")))
    orders.key_by("shop").aggregate(uid="count", orders=aggregates.count()).write(ParquetSink(str(root / "shops")))
    return job


def run(spark: SparkSession, job: StreamingJob, **how: Any) -> None:
    job.run(spark, trigger={"availableNow": True}, **how)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


def counted(root: Path) -> dict[int, int]:
    newest: dict[int, int] = {}
    for row in rows_of(root / "shops"):
        newest[row["shop"]] = max(newest.get(row["shop"], 0), row["orders"])
    return newest


def test_a_table_is_read_exactly_over_restarts_other_shards_and_upkeep(spark: SparkSession, tmp_path: Path) -> None:
    """The oracle is the table. Each count comes from all rows, so one that came twice would show."""
    table = tmp_path / "table"
    for ids, parallelism in ((range(100), 2), (range(100, 150), 3), (range(150, 150), 2), (range(150, 200), 2)):
        if ids:
            add(table, ids)
        run(spark, job_on(tmp_path, parallelism))
        opened = DeltaTable(str(table))
        opened.optimize.compact()
        opened.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
        there = DeltaTable(str(table)).to_pyarrow_table()
        assert sorted(row["id"] for row in rows_of(tmp_path / "orders")) == sorted(there.column("id").to_pylist())
        assert counted(tmp_path) == Counter(there.column("shop").to_pylist())


def test_a_rollback_reads_again_what_came_after_the_snapshot_and_a_copy_goes_on_from_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The position is the snapshot's: in another root, too."""
    add(tmp_path / "table", range(70))
    run(spark, job_on(tmp_path))
    first = Catalog(open_store(str(tmp_path / "store")), "shops").snapshot_ids()[-1]
    shutil.copytree(tmp_path / "store", tmp_path / "copy" / "store")
    add(tmp_path / "table", range(70, 140))
    run(spark, job_on(tmp_path))
    run(spark, job_on(tmp_path), from_snapshot=first)
    assert counted(tmp_path) == dict.fromkeys(range(7), 20), "its counts go on from those of the snapshot"
    (tmp_path / "copy" / "table").symlink_to(tmp_path / "table")
    add(tmp_path / "table", range(140, 147))
    elsewhere = tmp_path / "copy"
    run(spark, job_on(elsewhere))
    assert counted(elsewhere) == dict.fromkeys(range(7), 21)
    assert sorted(row["id"] for row in rows_of(elsewhere / "orders")) == list(range(70, 147))


def test_a_run_tells_which_files_of_its_table_wait_and_of_no_other_jobs_table(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Its first batch takes four of 21 files, and the next one comes in an hour."""
    for ids in (range(7), range(7, 14), range(14, 21)):
        add(tmp_path / "table", ids)
    write_deltalake(str(tmp_path / "other"), pa.table({"id": [1]}))
    sources.delta(str(tmp_path / "other")).load(spark)
    sizes = [size for _, size in sorted(files_of(tmp_path / "table"))]
    running = job_on(tmp_path).start(spark, trigger={"processingTime": "1 hour"})
    catalog = Catalog(open_store(str(tmp_path / "store")), "shops")
    while not any(source.behind_bytes == sum(sizes[4:]) for source in told(catalog)):
        assert not running.awaitTermination(0.2)
    running.stop()
    (state,) = told(catalog)
    assert (state.name, state.unit, state.behind, state.behind_versions) == (str(tmp_path / "table"), "files", 17, 1)
    assert state.away_since_ms == 0


def told(catalog: Catalog) -> Sequence[SourceState]:
    status = catalog.status() if catalog.root.exists("job.json") else None
    return () if status is None else status.sources


def files_of(table: Path) -> list[tuple[tuple[int, str], int]]:
    rows = pa.table(DeltaTable(str(table)).get_add_actions()).to_pylist()
    return [((row["modification_time"], row["path"]), row["size_bytes"]) for row in rows]


def test_a_version_that_changes_rows_ends_the_run_and_the_state_goes_on_with_another_word(
    spark: SparkSession, tmp_path: Path
) -> None:
    add(tmp_path / "table", range(14))
    run(spark, job_on(tmp_path))
    DeltaTable(str(tmp_path / "table")).delete("id = 3")
    add(tmp_path / "table", range(14, 21))
    with pytest.raises(InvalidConfiguration, match="version 1 of the table removes or changes rows") as raised:
        run(spark, job_on(tmp_path))
    assert raised.value.is_final
    run(spark, job_on(tmp_path, skip_changes=True))
    assert counted(tmp_path) == dict.fromkeys(range(7), 3)


def test_a_table_that_was_replaced_ends_the_run_by_name_and_no_restart_is_tried(
    spark: SparkSession, tmp_path: Path
) -> None:
    add(tmp_path / "table", range(10))
    run(spark, job_on(tmp_path))
    shutil.rmtree(tmp_path / "table")
    add(tmp_path / "table", range(30))
    add(tmp_path / "table", range(30, 40))
    with pytest.raises(MissingSource, match="replaced by another one since the job read it") as raised:
        run(spark, job_on(tmp_path))
    assert raised.value.is_final
    assert len(rows_of(tmp_path / "orders")) == 10


def test_a_table_that_is_not_there_is_named_at_the_start(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(MissingSource, match="there is no Delta table"):
        run(spark, job_on(tmp_path))


def test_the_job_of_the_page_runs_as_it_stands_there(spark: SparkSession, tmp_path: Path) -> None:
    table = tmp_path / "lake"
    rows = pa.table({"id": [1, 2, 3], "shop": ["a", "b", "a"], "amount": [3, 4, 5]})
    write_deltalake(str(table), rows, configuration={"delta.enableChangeDataFeed": "true"})
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(PAGE.read_text().split("```python\n")[1].split("```")[0], str(PAGE), "exec"), names)
    context = JobContext(
        "page", str(tmp_path), {"lake": str(table)}, settings=JobSettings(local_dir=str(tmp_path / "local"))
    )
    run(spark, names["build"](context))
    DeltaTable(str(table)).update({"amount": "10"}, predicate="id = 1")
    DeltaTable(str(table)).delete("id = 2")
    run(spark, names["build"](context))
    newest: dict[str, tuple[int, int]] = {}
    for row in sorted(rows_of(tmp_path / "totals"), key=lambda row: row["seen"]):
        newest[row["shop"]] = (row["orders"], row["sales"])
    assert newest == {"a": (2, 15), "b": (0, 0)}
