"""The handle of a run: it is there at once, says what the run does, waits for it and ends it, as Spark's own handle."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from state_runtime import JobSettings, StreamingJob
from state_runtime.base.errors import InvalidPipeline, JobAlreadyRunning, SavepointExists, StillstateError, Unavailable
from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_store
from stillstate import errors, reading
from tests.job_settings import job_settings

from .jobs import Flaky, Steps, assert_equals_batch, two_step_job, write_input

pytestmark = pytest.mark.spark
OFTEN = {"heartbeat_interval_s": 0.2}


class Fails(Steps):
    """Raises on its first row."""

    def handleInputRows(self, key: object, rows: object, timerValues: object) -> object:
        raise RuntimeError("a poison row")


def catalog_of(folder: Path) -> Catalog:
    return Catalog(open_store(str(folder / "store")), "steps")


def test_a_handle_has_what_sparks_own_has(spark: SparkSession, tmp_path: Path) -> None:
    """Started, looked at, fed while it runs, stopped and started again, in one process."""
    write_input(tmp_path / "in", 0, 3)
    query = two_step_job(tmp_path, Steps(), **OFTEN).start(spark)
    query.processAllAvailable()
    assert_equals_batch(spark, tmp_path)
    assert query.isActive
    assert query.name == "steps"
    assert query.id == catalog_of(tmp_path).job_info().uid
    assert set(query.status) == {"message", "isDataAvailable", "isTriggerActive"}
    assert query.lastProgress is not None
    assert query.recentProgress[-1] == query.lastProgress
    assert sum(p.input_rows for p in query.recentProgress) == spark.read.parquet(str(tmp_path / "in")).count()
    assert not query.awaitTermination(0.01)
    write_input(tmp_path / "in", 3, 2)
    query.processAllAvailable()
    assert_equals_batch(spark, tmp_path)
    first = query.runId
    query.stop()
    assert (query.isActive, query.exception(), query.status["message"]) == (False, None, "Stopped")
    assert query.result is not None
    assert query.result.last_snapshot_id == catalog_of(tmp_path).snapshot_ids()[-1]
    assert query.awaitTermination()

    write_input(tmp_path / "in", 5, 1)
    again = two_step_job(tmp_path, Steps()).start(spark, trigger={"availableNow": True})
    assert again.awaitTermination(120)
    assert again.runId == first + 1
    assert again.status["message"] == "Finished: the source has ended"
    assert_equals_batch(spark, tmp_path)


def test_what_is_wrong_before_the_first_write_is_raised_by_start(spark: SparkSession, tmp_path: Path) -> None:
    """A handle of a run that never was would hide it."""
    write_input(tmp_path / "in", 0, 1)
    job = StreamingJob("steps", store=str(tmp_path / "store"), settings=job_settings(JobSettings()))
    schema = spark.read.parquet(str(tmp_path / "in")).schema
    job.read(lambda s: s.readStream.schema(schema).parquet(str(tmp_path / "in"))).key_by("nobody").deduplicate(uid="d")
    with pytest.raises(InvalidPipeline, match="nobody"):
        job.start(spark)
    assert not (tmp_path / "store" / "steps").exists()
    query = two_step_job(tmp_path, Steps()).start(spark)
    query.processAllAvailable()
    with pytest.raises(JobAlreadyRunning):
        two_step_job(tmp_path, Steps()).start(spark)
    query.stop()


def test_an_error_that_ends_a_run_is_the_handles(spark: SparkSession, tmp_path: Path) -> None:
    """Whoever waits gets it, as often as they wait; `stop` does not raise it, as Spark's does not."""
    write_input(tmp_path / "in", 0, 1)
    query = two_step_job(tmp_path, Fails()).start(spark)
    for wait in (query.awaitTermination, query.processAllAvailable, query.awaitTermination):
        with pytest.raises(errors.UserCodeError, match="a poison row"):
            wait()
    error = query.exception()
    assert isinstance(error, errors.UserCodeError)
    assert not query.isActive
    assert query.status["message"].startswith("Terminated with exception: UserCodeError: ")
    assert query.result is None
    query.stop()


def test_savepoints_of_a_handle(spark: SparkSession, tmp_path: Path) -> None:
    """Of the run while it goes on, as its end, and of its newest snapshot once it has ended."""
    write_input(tmp_path / "in", 0, 2)
    query = two_step_job(tmp_path, Steps(), **OFTEN).start(spark)
    query.processAllAvailable()
    made = query.savepoint("one", tags=("release",))
    assert (made.state, made.tags, query.isActive) == ("COMPLETED", ("release",), True)
    with pytest.raises((SavepointExists, errors.InvalidConfiguration), match="one"):
        query.savepoint("one")
    query.savepoint("two", stop=True)
    assert not query.isActive
    assert query.savepoint("three").snapshot_id == catalog_of(tmp_path).snapshot_ids()[-1]
    for name in ("one", "two", "three"):
        place = str(tmp_path / "store" / "steps" / "savepoints" / name)
        assert reading.open(place).state("steps", "steps").to_arrow().num_rows > 0


def test_a_stop_that_takes_too_long_says_so_and_still_comes(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path / "in", 0, 1)
    go_on, reached = threading.Event(), threading.Event()

    def hold(progress: object) -> None:
        reached.set()
        go_on.wait(60)

    query = two_step_job(tmp_path, Steps()).start(spark, on_progress=hold)
    assert reached.wait(120)
    with pytest.raises(Unavailable, match=r"did not end in 0\.01 s"):
        query.stop(timeout=0.01)
    go_on.set()
    assert query.awaitTermination(60)


def test_an_attempt_that_failed_is_no_error_of_the_handle(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path / "in", 0, 3)
    query = two_step_job(tmp_path, Flaky()).start(spark)
    query.processAllAvailable()
    query.stop()
    assert query.exception() is None
    assert_equals_batch(spark, tmp_path)


@pytest.mark.long
def test_a_script_that_ends_while_its_run_is_there_ends_it_with_a_checkpoint(tmp_path: Path) -> None:
    """Without a session of its own making: it is active, or made. What was read is processed once."""
    script = textwrap.dedent(
        """
        import sys
        from stillstate import ParquetSink, StreamingJob

        store, out = sys.argv[1:]
        job = StreamingJob("rates", store=store)
        job.query(
            lambda spark: spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
            .selectExpr("value % 3 AS k").groupBy("k").count(), output_mode="update"
        ).write(ParquetSink(out))
        query = job.start(trigger={"processingTime": "100 milliseconds"})
        while query.lastProgress is None:
            query.awaitTermination(0.1)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "store"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    status = Catalog(open_store(str(tmp_path / "store")), "rates").status()
    assert status is not None
    assert status.state == "stopped"


def test_errors_of_the_face_are_those_of_the_runtime() -> None:
    """All that a caller may meet, and no other."""
    from state_runtime.base import errors as raised

    kinds = {
        name for name, each in vars(raised).items() if isinstance(each, type) and issubclass(each, StillstateError)
    }
    assert set(errors.__all__) == kinds - {"ChangesPending", "TooMuchForOneTask"}
    assert all(getattr(errors, name) is getattr(raised, name) for name in errors.__all__)
