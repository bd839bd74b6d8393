"""Drivers as real processes, killed with SIGKILL at named points, frozen, and raced; each time the result is exact."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import SparkSession

from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.faults import (
    DELTA_KILL_POINTS,
    ICEBERG_KILL_POINTS,
    INTERVAL_KILL_POINTS,
    KAFKA_KILL_POINTS,
    KILL_POINTS,
    RESTORE_KILL_POINTS,
    RETENTION_KILL_POINTS,
    SQL_KILL_POINTS,
)
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.base.settings import JobSettings, RetentionSettings
from state_runtime.maintenance.retention.background import checkpoints_in_a_round
from state_runtime.maintenance.verify.roots import verify_root
from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_store

from ..conftest import ROOT
from .branches import write_input as write_orders
from .jobs import (
    DATABASE_ENV,
    assert_delta_equals_batch,
    assert_equals_batch,
    assert_iceberg_equals_batch,
    assert_kafka_equals_batch,
    assert_sql_equals_batch,
    write_input,
)
from .plain_queries import write_rows
from .test_joins import check

if TYPE_CHECKING:
    from examples.servers.kafka import KafkaBroker
    from examples.servers.postgres import PostgresServer

pytestmark = pytest.mark.kill
TIMEOUT_S = 240


class Driver:
    """One driver process; its lines are read as they come."""

    def __init__(self, root: Path, *arguments: str, kill_at: str = "", module: str = "tests.spark.drive") -> None:
        environment = {**os.environ, "STILLSTATE_KILL_AT": kill_at}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(root), *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []

    def read_until(self, word: str) -> str:
        """The first line with `word`; fails if the process ends before it prints one."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if word in line:
                return line
        raise AssertionError(f"the driver ended without {word!r}: {self.lines}")

    def end(self) -> tuple[int, list[str]]:
        """Exit code and all lines."""
        rest, _ = self.process.communicate(timeout=TIMEOUT_S)
        self.lines.extend(rest.splitlines())
        return self.process.returncode, self.lines

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    """Whatever happens, no driver outlives its test."""
    started: list[Driver] = []
    yield started
    for driver in started:
        if driver.process.poll() is None:
            driver.signal(signal.SIGKILL)
            driver.process.wait()


def dies_and_is_gone_on_with(drivers: list[Driver], point: str, first: Driver, then: Callable[[], Driver]) -> None:
    """A driver that dies at its point, and one that starts again and comes to the end of its input."""
    drivers.append(first)
    code, lines = first.end()
    assert code == -signal.SIGKILL, f"{point}: the driver should have been killed, but: {code} {lines}"
    drivers.append(then())
    code, lines = drivers[-1].end()
    assert code == 0, f"{point}: {lines}"


def crash_tables(
    root: Path, drivers: list[Driver], sinks: str, points: Sequence[str], assert_equal: Callable[[], None]
) -> None:
    """Of a job with tables of one kind: at the points of each checkpoint, and at those of the tables; each time new input
    comes, and the tables are compared with a batch query."""
    for number, point in enumerate(("before-manifest", "manifest-written", "before-publish", "published", *points)):
        write_input(root / "in", 2 * number, 2)
        kill_at = point if ":" in point else f"{point}:{1 + number % 2}"
        first = Driver(root, sinks, "parallelism=3", kill_at=kill_at)
        dies_and_is_gone_on_with(drivers, point, first, lambda: Driver(root, sinks))
        assert_equal()


def test_every_crash_between_the_first_task_and_sparks_commit_log_is_repaired(
    spark: SparkSession, tmp_path: Path, drivers: list[Driver]
) -> None:
    """For each kill point: new input, a driver that dies there, one that starts again, and the comparison."""
    files = 0
    for number, point in enumerate(KILL_POINTS):
        write_input(tmp_path / "in", files, 3)
        files += 3
        # The first passage of a run is a special one (restored state, a fresh directory): take it every other time.
        dies_and_is_gone_on_with(
            drivers, point, Driver(tmp_path, kill_at=f"{point}:{1 + number % 2}"), lambda: Driver(tmp_path)
        )
        assert_equals_batch(spark, tmp_path)
    catalog = Catalog(open_store(str(tmp_path / "store")), "steps")
    newest = catalog.latest()
    assert newest is not None
    assert newest.term == 2 * len(KILL_POINTS)
    staged = list((tmp_path / "out-steps" / "_stillstate" / "staging").rglob("*.parquet"))
    assert staged == [], "staged files of dead runs are removed by the next one"


def test_every_crash_of_a_job_with_several_sources_and_joins_is_repaired_by_one_with_other_shards_and_order(
    spark: SparkSession, tmp_path: Path, drivers: list[Driver]
) -> None:
    """The one that starts again reads the sources in the other order, with another parallelism."""
    joins, files = "tests.spark.drive_joins", 0
    for number, point in enumerate(KILL_POINTS):
        for name in ("orders", "refunds"):
            write_orders(tmp_path / name, files=2, first=files)
        files += 2
        dies_and_is_gone_on_with(
            drivers,
            point,
            Driver(tmp_path, "orders,refunds", "3", kill_at=f"{point}:{1 + number % 2}", module=joins),
            lambda: Driver(tmp_path, "refunds,orders", "2", module=joins),
        )
    check(spark, tmp_path, "left-outer")


def test_every_crash_of_a_job_that_writes_delta_tables_is_repaired(
    spark: SparkSession, tmp_path: Path, drivers: list[Driver]
) -> None:
    """Appended rows and merged ones, whatever of an epoch was in the table when its driver died."""
    # An epoch passes the last two points twice, the first one once: rows of merges get no names in the table's folder.
    of_delta = {"delta-moved": (1, 2), "delta-before-commit": (1, 2), "delta-committed": (1, 2, 3)}
    assert set(of_delta) == set(DELTA_KILL_POINTS)
    points = [f"{point}:{passage}" for point, passages in of_delta.items() for passage in passages]
    crash_tables(tmp_path, drivers, "--delta", points, lambda: assert_delta_equals_batch(spark, tmp_path))


def test_every_crash_of_a_job_that_writes_iceberg_tables_is_repaired(
    spark: SparkSession, tmp_path: Path, drivers: list[Driver]
) -> None:
    """Appended rows and merged ones, whatever of an epoch was in the table when its driver died. A start makes a commit
    for each table, too: whose it is."""
    points = [f"{point}:{passage}" for point in ICEBERG_KILL_POINTS for passage in (1, 2, 3)]  # two passages an epoch
    crash_tables(tmp_path, drivers, "--iceberg", points, lambda: assert_iceberg_equals_batch(spark, tmp_path))


@pytest.mark.servers
def test_every_crash_of_a_job_that_writes_sql_tables_is_repaired(
    spark: SparkSession,
    tmp_path: Path,
    drivers: list[Driver],
    postgres_server: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Appended rows and merged ones, whatever of an epoch was in the database when its driver died."""
    database = postgres_server.database()
    monkeypatch.setenv(DATABASE_ENV, postgres_server.url(database))
    points = [f"{point}:{passage}" for point in SQL_KILL_POINTS for passage in (1, 2, 3)]  # two passages an epoch
    crash_tables(
        tmp_path, drivers, "--sql", points, lambda: assert_sql_equals_batch(spark, tmp_path, postgres_server, database)
    )


@pytest.mark.servers
def test_every_crash_of_a_job_with_a_kafka_sink_is_repaired(
    spark: SparkSession, tmp_path: Path, drivers: list[Driver], kafka: KafkaBroker
) -> None:
    """Rows and the newest record of each key, whatever of an epoch's transaction was there when its driver died."""
    kafka.create_topic("steps", 2)
    kafka.create_topic("buckets", 2)
    servers, files = f"--kafka={kafka.bootstrap}", 0
    # A start passes these points once for each sink, with the number alone; an epoch once more for each sink.
    passages = {"kafka-begun": (3,), "kafka-produced": (4,), "kafka-before-commit": (1, 3), "kafka-committed": (3, 4)}
    assert set(passages) == set(KAFKA_KILL_POINTS)
    points = ["manifest-written", *(f"{point}:{n}" for point, numbers in passages.items() for n in numbers)]
    for point in points:
        write_input(tmp_path / "in", files, 2)
        files += 2
        dies_and_is_gone_on_with(
            drivers, point, Driver(tmp_path, servers, "parallelism=3", kill_at=point), lambda: Driver(tmp_path, servers)
        )
        assert_kafka_equals_batch(spark, tmp_path, kafka.bootstrap)


def test_every_crash_of_a_plain_query_is_repaired_by_one_with_other_shards(
    spark: SparkSession, tmp_path: Path, drivers: list[Driver]
) -> None:
    """Its rows are those of a run that nothing disturbed."""
    queries, files = "tests.spark.drive_queries", 0
    for number, point in enumerate(KILL_POINTS):
        write_rows(tmp_path, range(files, files + 2), late=0)
        files += 2
        dies_and_is_gone_on_with(
            drivers,
            point,
            Driver(tmp_path, "3", kill_at=f"{point}:{1 + number % 2}", module=queries),
            lambda: Driver(tmp_path, "2", module=queries),
        )
    undisturbed = tmp_path / "undisturbed"
    write_rows(undisturbed, range(files), late=0)
    drivers.append(Driver(undisturbed, "2", module=queries))
    assert drivers[-1].end()[0] == 0
    found, wanted = (
        Counter(map(str, spark.read.parquet(str(root / "out")).select("window.end", "shop", "n", "paid").collect()))
        for root in (tmp_path, undisturbed)
    )
    assert found == wanted
    assert len(found) > 2 * files


# With the passage at which the driver dies: in the first interval of a run, in a later one, and at its end.
INTERVAL_CRASHES = (
    "epoch-pending:2",
    "pending-flushed:1",
    "task-logged:4",
    "before-manifest:2",
    "one-file-published:3",
    "one-output-published:2",
)


def test_every_crash_inside_an_interval_repeats_its_epochs_and_publishes_them_once(
    spark: SparkSession, tmp_path: Path, drivers: list[Driver]
) -> None:
    """Every other driver flushes after each epoch; the one that starts again makes other intervals than the one that died."""
    assert {crash.partition(":")[0] for crash in INTERVAL_CRASHES} >= set(INTERVAL_KILL_POINTS)
    files = 0
    for number, crash in enumerate(INTERVAL_CRASHES):
        write_input(tmp_path / "in", files, 5)
        files += 5
        flushing = () if number % 2 == 0 else ("pending_bytes_max=0",)
        drivers.append(Driver(tmp_path, "checkpoint_batches=3", *flushing, kill_at=crash))
        code, lines = drivers[-1].end()
        assert code == -signal.SIGKILL, f"{crash}: the driver should have been killed, but: {code} {lines}"
        drivers.append(Driver(tmp_path, f"checkpoint_batches={1 + number % 3}"))
        code, lines = drivers[-1].end()
        assert code == 0, f"{crash}: {lines}"
        assert_equals_batch(spark, tmp_path)
    catalog = Catalog(open_store(str(tmp_path / "store")), "steps")
    newest = catalog.latest()
    assert newest is not None
    commits = (tmp_path / "out-steps" / "_stillstate" / "commits").rglob("*.json")
    epochs = sorted(int(path.stem) for path in commits)
    assert len(epochs) == files, "each batch was published as one epoch"
    assert epochs[-1] == newest.epoch


def test_a_crash_in_a_restore_leaves_what_the_next_restore_needs(
    spark: SparkSession, tmp_path: Path, drivers: list[Driver]
) -> None:
    """Whole and half-written local versions of a dead restore are no obstacle, with all of the local state gone and with a part."""
    write_input(tmp_path / "in", 0, 3)
    drivers.append(Driver(tmp_path))
    assert drivers[-1].end()[0] == 0
    files = 3
    for point, left in product(RESTORE_KILL_POINTS, (0, 1)):
        crash = f"{point} with {left} local folders left"
        folders = sorted((tmp_path / "local" / "state").glob("*/*/*"))
        assert folders
        for folder in folders[left:]:
            shutil.rmtree(folder)
        write_input(tmp_path / "in", files, 2)
        files += 2
        drivers.append(Driver(tmp_path, kill_at=point))
        code, lines = drivers[-1].end()
        assert code == -signal.SIGKILL, f"{crash}: the driver should have been killed, but: {code} {lines}"
        drivers.append(Driver(tmp_path))
        code, lines = drivers[-1].end()
        assert code == 0, f"{crash}: {lines}"
        assert_equals_batch(spark, tmp_path)


def test_a_crash_while_old_checkpoints_go_takes_nothing_that_is_needed(
    spark: SparkSession, tmp_path: Path, drivers: list[Driver]
) -> None:
    """Wherever retention dies, every snapshot that is left verifies in full, and the next driver ends what was begun."""
    kept = 3
    root = open_store(str(tmp_path / "store")).child("steps")
    files = 0
    for point in RETENTION_KILL_POINTS:
        # A run looks for old checkpoints at its first epoch, once there are enough.
        count = checkpoints_in_a_round(JobSettings(retention=RetentionSettings(retained_checkpoints=kept))) + 2
        write_input(tmp_path / "in", files, count)
        files += count
        drivers.append(Driver(tmp_path, f"retained_checkpoints={kept}", kill_at=point))
        code, lines = drivers[-1].end()
        assert code == -signal.SIGKILL, f"{point}: the driver should have been killed, but: {code} {lines}"
        shutil.rmtree(tmp_path / "local")
        write_input(tmp_path / "in", files, 1)
        files += 1
        drivers.append(Driver(tmp_path, f"retained_checkpoints={kept}"))
        code, lines = drivers[-1].end()
        assert code == 0, f"{point}: {lines}"
        assert_equals_batch(spark, tmp_path)
        report = verify_root(root, level="full", clock=SYSTEM_CLOCK, ids=SYSTEM_IDS)
        assert report.complete
        assert not report.findings, point
        newest = Catalog.of_root(root).latest()
        assert newest is not None
        assert len(report.snapshots) < newest.snapshot_id, "nothing was given up"


def test_a_frozen_driver_that_wakes_up_is_fenced_and_publishes_nothing(
    spark: SparkSession, tmp_path: Path, drivers: list[Driver]
) -> None:
    """The zombie of section 7: frozen in the middle of the stream, replaced, woken: exit code 3, exact output."""
    write_input(tmp_path / "in", 0, 4)
    zombie = Driver(tmp_path, "--forever")
    drivers.append(zombie)
    zombie.read_until("epoch")
    zombie.signal(signal.SIGSTOP)
    write_input(tmp_path / "in", 4, 3)
    successor = Driver(tmp_path, "--takeover")
    drivers.append(successor)
    code, lines = successor.end()
    assert code == 0, lines
    write_input(tmp_path / "in", 7, 2)
    zombie.signal(signal.SIGCONT)
    code, lines = zombie.end()
    assert code == 3, lines
    assert any(line.startswith("Fenced") for line in lines)
    last = Driver(tmp_path)
    drivers.append(last)
    assert last.end()[0] == 0
    assert_equals_batch(spark, tmp_path)


def test_a_second_driver_is_turned_away_while_the_first_lives(
    spark: SparkSession, tmp_path: Path, drivers: list[Driver]
) -> None:
    """Started by hand beside a live run it ends with its own exit code; the first one is not disturbed."""
    write_input(tmp_path / "in", 0, 3)
    first = Driver(tmp_path, "--forever")
    drivers.append(first)
    first.read_until("epoch")
    second = Driver(tmp_path)
    drivers.append(second)
    code, lines = second.end()
    assert code == 3
    assert any(line.startswith("JobAlreadyRunning") for line in lines)
    write_input(tmp_path / "in", 3, 2)
    first.read_until("epoch 6")
    first.signal(signal.SIGKILL)
    first.end()
    third = Driver(tmp_path)
    drivers.append(third)
    assert third.end()[0] == 0, "a driver that is dead on this host may be replaced at once"
    assert_equals_batch(spark, tmp_path)
