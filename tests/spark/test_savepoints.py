"""Savepoints of real streaming queries: under input, before a stop, and at the end of all input."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from state_runtime import ParquetSink, Progress, StreamingJob, aggregates, query_state, windows
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.maintenance.convert.snapshot import is_of_format
from state_runtime.reading.reader import SnapshotReader
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.control import request_savepoint
from state_runtime.snapshot.locate import open_snapshot
from state_runtime.snapshot.pins import read_pins
from state_runtime.snapshot.savepoint_record import SavepointThen, list_savepoints, read_savepoint
from state_runtime.store import Store, open_store

from ..s3_server import SECRET
from .homes import Home
from .jobs import SCHEMA, assert_equals_batch, rows_of, settings, two_step_job, write_input
from .timed import Batch, TimedJob

pytestmark = [pytest.mark.spark, pytest.mark.long]

FILES_MAX = 60  # of input, whatever happens


def ask(root: Store, name: str, then: SavepointThen = "continue") -> None:
    status = Catalog.of_root(root).status()
    assert status is not None
    request_savepoint(root, status.term, name, clock=SYSTEM_CLOCK, ids=SYSTEM_IDS, then=then)


def sums_job(root: Path, place: Home, out: str, **changes: Any) -> StreamingJob:
    job = StreamingJob("sums", store=place.url, storage_options=place.options, settings=settings(root, **changes))
    (
        job.read(lambda s: s.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(root / "in")))
        .key_by("name")
        .aggregate(uid="sums", n=aggregates.count(), total=aggregates.sum("amount"))
        .write(ParquetSink(str(root / out)))
    )
    return job


def sums(spark: SparkSession, root: Path, files: int) -> list[tuple[Any, ...]]:
    """The oracle: a batch query over the first files."""
    paths = [str(path) for path in sorted((root / "in").glob("*.parquet"))[:files]]
    spark.read.schema(SCHEMA).parquet(*paths).createOrReplaceTempView("input")
    return rows_of(spark.sql("SELECT name, count(*), sum(amount) FROM input GROUP BY name"))


def state_of(place: Home) -> list[tuple[Any, ...]]:
    found = query_state(open_store(place.url, place.options), "sums", "sums", "aggregate")
    return sorted((tuple(row.values()) for row in found.to_pylist()), key=repr)


def copy_with_plain_tools(home: Home, savepoint: str, to: str) -> Home:
    """The savepoint's folder as the job's root in another place."""
    home.copy(f"sums/savepoints/{savepoint}", f"{to}/sums")
    assert not home.options or home.holding(SECRET.encode()) == []
    return Home(home.place(to), home.options)


@pytest.mark.parametrize(
    ("home", "changes"),
    # The store makes no difference to the settings.
    [("local", {}), ("local", {"changelog": "off"}), ("local", {"checkpoint_batches": 50}), ("s3", {})],
    indirect=["home"],
    ids=str,
)
def test_a_savepoint_under_input_is_the_state_of_its_position_and_disturbs_nothing(
    spark: SparkSession, tmp_path: Path, home: Home, changes: dict[str, Any]
) -> None:
    """The job goes on while it is copied; from the copy another job ends with the same state."""
    root = open_store(home.url, home.options).child("sums")
    write_input(tmp_path / "in", 0, 3)
    job = sums_job(tmp_path, home, "out", **changes)
    state = {"files": 3, "asked": 0, "after": 0}

    def next_file(progress: Progress) -> None:
        if state["files"] == FILES_MAX:
            stop.set()
            return
        write_input(tmp_path / "in", state["files"], 1)
        state["files"] += 1
        if not state["asked"]:
            state["asked"] = progress.epoch
            ask(root, "one")
        elif any(record.state == "COMPLETED" for record in list_savepoints(root)):
            state["after"] += 1
            if state["after"] == 2:
                stop.set()

    stop = threading.Event()
    result = job.run(spark, on_progress=next_file, stop=stop)
    assert result.state == "stopped"
    record = read_savepoint(root, "one")
    assert record.state == "COMPLETED"
    saved = open_snapshot(root.child("savepoints/one"))
    assert saved.manifest.source is not None
    newest = Catalog.of_root(root).latest()
    assert newest is not None
    assert newest.source is not None
    assert saved.manifest.source.batch_id < newest.source.batch_id, "the job went on"
    assert read_pins(root) == []
    assert state_of(home) == sums(spark, tmp_path, newest.source.batch_id + 1)

    elsewhere = copy_with_plain_tools(home, "one", "elsewhere")
    assert state_of(elsewhere) == sums(spark, tmp_path, saved.manifest.source.batch_id + 1)
    shutil.rmtree(tmp_path / "local")
    sums_job(tmp_path, elsewhere, "out-2", parallelism=3).run(spark, trigger={"availableNow": True})
    assert state_of(elsewhere) == sums(spark, tmp_path, FILES_MAX), "the rest of the input, once"


# The command, for which every state is large: it folds in a Spark session of its own, and in no other way.
_LARGE = """
from stillstate.orchestration.cli import app
from stillstate.orchestration.running import make_savepoint as savepoints
savepoints.HERE_BYTES_MAX, savepoints.convert_small = 0, None
app()
"""


def test_a_large_state_becomes_a_canonical_savepoint_in_spark_tasks(spark: SparkSession, tmp_path: Path) -> None:
    """The same state, by its fingerprints, in one folder; another job begins with it and ends where it should."""
    write_input(tmp_path / "in", 0, 4)
    two_step_job(tmp_path).run(spark, trigger={"availableNow": True})
    config = tmp_path / "stillstate.yaml"
    config.write_text(f"version: 1\njobs:\n  steps: {{entry_point: 'nowhere:build', store: {tmp_path / 'store'}}}\n")
    command = ["savepoint", "steps", "one", "--format", "canonical", "-c", str(config)]
    done = subprocess.run([sys.executable, "-c", _LARGE, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    root = open_store(str(tmp_path / "store" / "steps"))
    record = read_savepoint(root, "one")
    assert (record.state, record.format) == ("COMPLETED", "canonical")
    assert read_pins(root) == []
    saved, newest = open_snapshot(root.child("savepoints/one")), Catalog.of_root(root).latest()
    assert newest is not None
    assert is_of_format(saved.manifest, "canonical")
    mine, theirs = SnapshotReader(saved.root, saved.manifest), SnapshotReader(root, newest)
    for operator in newest.operators:
        for state in operator.states:
            assert mine.fingerprint(operator.uid, state.name) == theirs.fingerprint(operator.uid, state.name)
    write_input(tmp_path / "in", 4, 3)
    shutil.copytree(tmp_path / "store" / "steps" / "savepoints" / "one", tmp_path / "elsewhere" / "steps")
    shutil.rmtree(tmp_path / "store")
    shutil.rmtree(tmp_path / "local")
    two_step_job(tmp_path, store=str(tmp_path / "elsewhere"), parallelism=3).run(spark, trigger={"availableNow": True})
    assert_equals_batch(spark, tmp_path)


@pytest.mark.parametrize(("home", "interval"), [("local", 1), ("local", 4), ("s3", 1)], indirect=["home"])
def test_a_job_that_stops_with_a_savepoint_goes_on_without_loss_or_duplicate(
    spark: SparkSession, tmp_path: Path, home: Home, interval: int
) -> None:
    """No epoch lies between the savepoint and the end of the run."""
    write_input(tmp_path / "in", 0, 9)
    root = open_store(home.url, home.options).child("steps")
    place: dict[str, Any] = {"store": home.url, "storage_options": home.options}

    def once(progress: Progress) -> None:
        if progress.epoch == 2:
            ask(root, "before-upgrade", "stop")

    result = two_step_job(tmp_path, checkpoint_batches=interval, **place).run(spark, on_progress=once)
    assert result.state == "stopped"
    record = read_savepoint(root, "before-upgrade")
    assert (record.state, record.then, record.snapshot_id) == ("COMPLETED", "stop", result.last_snapshot_id)
    newest = Catalog.of_root(root).latest()
    assert newest is not None
    assert open_snapshot(root.child("savepoints/before-upgrade")).manifest == replace(newest, outputs=())
    status = Catalog.of_root(root).status()
    assert status is not None
    assert status.state == "stopped"
    two_step_job(tmp_path, **place).run(spark, trigger={"availableNow": True})
    assert_equals_batch(spark, tmp_path)


# --- drain -------------------------------------------------------------------------------------------------------

BATCHES: tuple[Batch, ...] = tuple(
    [(f"k{n % 3}", 7 * n, 1), (f"k{(n + 1) % 3}", 7 * n + 2, 1), ("k9", 7 * n + 1, 1)] for n in range(12)
)


class Reminders(StatefulProcessor):
    """A timer an hour after the key's first row, which sets the next one, three times in all."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.fired = handle.getValueState("fired", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        first = min(int(row.at.timestamp() * 1000) for row in rows)
        if not self.fired.exists():
            self.fired.update((0,))
            self.handle.registerTimer(first + 3_600_000)
        yield Row(k=key[0], n=0)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        fired = self.fired.get()[0] + 1
        self.fired.update((fired,))
        if fired < 3:
            self.handle.registerTimer(expiredTimerInfo.getExpiryTimeInMs() + 3_600_000)
        yield Row(k=key[0], n=fired)

    def close(self) -> None:
        pass


def drained(spark: SparkSession, folder: Path, home: Home, build: Any, **changes: Any) -> tuple[TimedJob, int]:
    """Run the job, drain it after its first output; and how many batches it had."""
    timed = TimedJob(spark, folder, build, home=home, heartbeat_interval_s=0.1, **changes)
    timed.forever = True
    root = open_store(home.url, home.options).child("timed")

    def until(rows: list[tuple[Any, ...]]) -> bool:
        if not asked:
            asked.append(True)
            ask(root, "last", "drain")
        return False

    asked: list[bool] = []
    timed.until = until
    timed.run(*BATCHES)
    record = read_savepoint(root, "last")
    assert (record.state, record.drained, record.then) == ("COMPLETED", True, "drain")
    saved = open_snapshot(root.child("savepoints/last")).manifest
    assert saved.drained
    newest = timed.manifest()
    assert newest.drained
    assert newest.snapshot_id == saved.snapshot_id
    assert saved.source is not None
    with pytest.raises(InvalidConfiguration, match="was drained"):
        timed.run()
    assert timed.manifest() == newest, "nothing was written"
    return timed, saved.source.batch_id + 1


@pytest.mark.parametrize(("home", "interval"), [("local", 1), ("local", 5), ("s3", 1)], indirect=["home"])
def test_draining_closes_every_window_once(spark: SparkSession, tmp_path: Path, home: Home, interval: int) -> None:
    """The output is that of a batch query over the input that was read; no window is left, none is there twice."""

    def build(stream: Any) -> Any:
        return stream.key_by("k").window(
            windows.tumbling("10 seconds"), uid="w", output_mode="append", n=aggregates.count()
        )  # fmt: skip

    timed, batches = drained(spark, tmp_path, home, build, checkpoint_batches=interval)
    expected = Counter((k, second // 10) for batch in BATCHES[:batches] for k, second, _ in batch)
    rows = [row for epoch in timed.epochs.values() for row in epoch]
    first = min(row[1][0] for row in rows)
    found = [(row[0], int((row[1][0] - first).total_seconds()) // 10, row[2]) for row in rows]
    assert sorted(found) == sorted((k, number, n) for (k, number), n in expected.items())


def test_draining_fires_all_timers_and_those_that_they_set(spark: SparkSession, tmp_path: Path, home: Home) -> None:
    """Each round of timers is an epoch; all of them are in the last snapshot."""

    def build(stream: Any) -> Any:
        return stream.key_by("k").transform_with_state(
            Reminders(), "k string, n long", uid="reminders", time_mode="eventTime"
        )

    timed, batches = drained(spark, tmp_path, home, build)
    keys = {k for batch in BATCHES[:batches] for k, _, _ in batch}
    fired = sorted(row for epoch in timed.epochs.values() for row in epoch if row[1] > 0)
    assert fired == sorted((k, n) for k in keys for n in (1, 2, 3))
    assert timed.manifest().operators[0].next_due_ms is None
