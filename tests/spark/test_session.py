"""What a session of `build_session` gives its tasks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from state_runtime import JobSettings, StreamingJob, aggregates
from state_runtime.base.allocator import KEEPS_FREED_MEMORY
from state_runtime.spark.java_log import JavaWarnings
from state_runtime.spark.jvm import classes
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


def test_a_warning_of_javas_reaches_a_run_and_the_sessions_log_level_stays(spark: SparkSession) -> None:
    """`build_session` lets errors through only. What a source warns of is collected while a run lasts; what Java
    prints, and the level that the session has afterwards, are as before."""
    log4j = classes(spark).org.apache.logging.log4j
    logger, root = log4j.LogManager.getLogger("org.apache.kafka.Client"), log4j.LogManager.getRootLogger()
    before = (str(root.getLevel()), sorted(root.getAppenders()))
    logger.warn("nobody listens")
    warnings = JavaWarnings.begin(spark)
    try:
        logger.warn("a broker is away")
        logger.info("hello")
        taken = warnings.take()
        assert "org.apache.kafka.Client\x1fa broker is away" in taken
        assert "nobody listens" not in taken
        assert "hello" not in taken
        assert "broker" not in warnings.take()
    finally:
        warnings.end()
    assert (str(root.getLevel()), sorted(root.getAppenders())) == before
    assert warnings.take() == ""


def test_a_setting_of_the_user_wins_over_a_recommended_one() -> None:
    """Tasks' environment as well as what Spark itself reads."""
    own = {"spark.executorEnv.MALLOC_TRIM_THRESHOLD_": "0", "spark.locality.wait.process": "1s"}
    assert session_conf("job", conf=own).items() >= own.items()


class Counting(StatefulProcessor):
    """How many rows each key has had."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._n = handle.getValueState("n", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        n = (self._n.get() or (0,))[0] + sum(1 for _ in rows)
        self._n.update((n,))
        yield Row(k=key[0], n=n)

    def close(self) -> None:
        pass


@pytest.fixture
def rocksdb(spark: SparkSession) -> Iterator[None]:
    """Spark's own state store; its transformWithState has no other."""
    name = "spark.sql.streaming.stateStore.providerClass"
    spark.conf.set(name, "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider")
    yield
    spark.conf.unset(name)


@pytest.mark.usefixtures("rocksdb")
def test_sparks_own_stateful_queries_run_in_it_too(spark: SparkSession, tmp_path: Path) -> None:
    """A second query of the user's, in another format than ours: nothing that we set may break it."""
    for number in range(2):
        spark.range(6).selectExpr("id % 2 AS k").coalesce(1).write.mode("append").parquet(str(tmp_path / "in"))
        frame = spark.readStream.schema("k bigint").parquet(str(tmp_path / "in")).groupBy("k")
        query = (
            frame.transformWithState(Counting(), "k bigint, n bigint", "Update", "None")
            .writeStream.outputMode("update")
            .foreachBatch(lambda rows, _: rows.write.mode("overwrite").parquet(str(tmp_path / "out")))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        rows = spark.read.parquet(str(tmp_path / "out")).collect()
        assert sorted(map(tuple, rows)) == [(0, 3 * (number + 1)), (1, 3 * (number + 1))]


def test_files_of_the_driver_have_no_checksum_files_beside_them(spark: SparkSession, tmp_path: Path) -> None:
    spark.range(3).write.parquet(str(tmp_path / "out"))
    names = [path.name for path in (tmp_path / "out").iterdir()]
    assert any(name.endswith(".parquet") for name in names)
    assert not any(name.endswith(".crc") for name in names)


@pytest.mark.parametrize(("set_to", "expected"), [(None, ["3", "4"]), ("200", ["3", "4"]), ("7", ["7", "7"])])
def test_what_a_transform_shuffles_is_as_wide_as_the_job_unless_the_user_says_otherwise(
    spark: SparkSession, tmp_path: Path, set_to: str | None, expected: list[str]
) -> None:
    """Spark's 200 tasks would run for each epoch's few rows. A restart with more shards is wider; the session keeps its
    own setting."""
    name = "spark.sql.shuffle.partitions"
    seen: list[str] = []

    def grouped(frame: DataFrame) -> DataFrame:
        seen.append(str(frame.sparkSession.conf.get(name)))
        return frame.groupBy("k").count()

    before = str(spark.conf.get(name))
    spark.conf.unset(name)
    if set_to is not None:
        spark.conf.set(name, set_to)
    try:
        for parallelism in (3, 4):
            spark.range(9).selectExpr("id % 3 AS k").coalesce(1).write.mode("append").parquet(str(tmp_path / "in"))
            settings = JobSettings(parallelism=parallelism, local_dir=str(tmp_path / "local"))
            job = StreamingJob("wide", store=str(tmp_path / "store"), settings=settings)
            source = job.read(lambda s: s.readStream.schema("k bigint").parquet(str(tmp_path / "in")))
            source.transform(grouped).key_by("k").aggregate(uid="n", n=aggregates.sum("count"))
            seen.clear()
            job.run(spark, trigger={"availableNow": True})
            assert seen[-1] == expected[parallelism - 3]
            assert spark.conf.get(name, None) == set_to
    finally:
        spark.conf.set(name, before)
