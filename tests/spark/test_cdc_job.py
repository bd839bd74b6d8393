"""The job of docs/cdc.md makes the very table that the database has: over repetitions, kills, other shards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from examples.servers.kafka import KafkaBroker
from examples.servers.postgres import PostgresServer
from state_runtime.base.errors import InvalidData
from tests.cdc_events import Customers, envelope, send
from tests.conftest import ROOT

from .drive_cdc import job_of_page

pytestmark = [pytest.mark.spark, pytest.mark.servers]
AVAILABLE = {"availableNow": True}
TIMEOUT_S = 240


class Ends:
    """A topic with changes, and the two tables that the job makes of it."""

    def __init__(self, root: Path, spark: SparkSession, kafka: KafkaBroker, server: PostgresServer) -> None:
        self.root, self.spark, self.kafka, self.server = root, spark, kafka, server
        self.database = server.database()
        self.topic = f"customers-{uuid.uuid4().hex[:8]}"
        kafka.create_topic(self.topic, 2)
        self.model = Customers(seed=11)
        self._sent = 0

    def send(self, times: int) -> None:
        """What the database has changed since the last time, with repetitions."""
        events = self.model.log[self._sent :]
        send(self.kafka.bootstrap, self.topic, self.model.repeated(events, times))
        self._sent = len(self.model.log)

    def run(self, parallelism: int = 2) -> None:
        job_of_page(self.root, self.kafka.bootstrap, self.topic, parallelism).run(self.spark, trigger=AVAILABLE)

    def run_and_die(self, point: str) -> None:
        given = [str(self.root), self.kafka.bootstrap, self.topic]
        done = subprocess.run(
            [sys.executable, "-m", "tests.spark.drive_cdc", *given],
            cwd=ROOT, env={**os.environ, "STILLSTATE_KILL_AT": point}, check=False, capture_output=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]

    def tables(self) -> list[list[dict[str, Any]]]:
        lake = DeltaTable(str(self.root / "store" / "lake" / "customers")).to_pyarrow_table().to_pylist()
        found = [lake, self.server.rows("SELECT * FROM customers", self.database)]
        return [sorted(({n: row[n] for n in ("id", "name", "city")} for row in rows), key=str) for rows in found]

    @property
    def expected(self) -> list[dict[str, Any]]:
        rows = self.model.rows.values()
        return sorted(({n: row[n] for n in ("id", "name", "city")} for row in rows), key=str)

    def check(self) -> None:
        for table in self.tables():
            assert table == self.expected


@pytest.fixture
def ends(
    tmp_path: Path,
    spark: SparkSession,
    kafka: KafkaBroker,
    postgres_server: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
) -> Ends:
    made = Ends(tmp_path, spark, kafka, postgres_server)
    monkeypatch.setenv("SHOP_DATABASE", postgres_server.url(made.database))
    return made


def test_both_tables_are_the_databases_over_repetitions_and_other_shards(ends: Ends) -> None:
    """Snapshot reads, changes of keys, rows that go and come again; with a connector that was restarted many times."""
    ends.model.snapshot(12)
    for parallelism in (2, 3, 2):
        ends.model.change(120)
        ends.send(times=8)
        ends.run(parallelism)
        ends.check()


@pytest.mark.kill
def test_a_driver_that_is_killed_leaves_both_tables_exact_for_the_next_one(ends: Ends) -> None:
    ends.model.snapshot(12)
    for point in ("manifest-written:2", "delta-committed:2", "sql-written:1"):
        ends.model.change(100)
        ends.send(times=4)
        ends.run_and_die(point)
        ends.run()
        ends.check()


def test_an_old_update_that_comes_after_the_delete_does_not_bring_the_row_back(ends: Ends) -> None:
    """Neither in the epoch of the delete nor after a restart; and a row that is created again does come back."""
    ends.model.snapshot(3)
    ends.model.change(20)
    if 1 not in ends.model.rows:
        ends.model.rows[1] = {"id": 1, "name": "x", "city": None}
    old = envelope("u", None, {"id": 1, "name": "old", "city": None}, ends.model.lsn)
    late = [(b'{"id": 1}', json.dumps(old).encode())]
    ends.model.remove(1)
    ends.send(times=0)
    send(ends.kafka.bootstrap, ends.topic, late)
    ends.run()
    ends.check()
    send(ends.kafka.bootstrap, ends.topic, late)
    ends.run(parallelism=3)
    ends.check()
    again = {"id": 1, "name": "again", "city": None}
    ends.model.rows[1] = again
    created = json.dumps(envelope("c", None, again, ends.model.lsn + 1)).encode()
    send(ends.kafka.bootstrap, ends.topic, [(b'{"id": 1}', created)])
    ends.run()
    ends.check()


def test_a_truncated_table_ends_the_run_and_nothing_of_the_epoch_is_written(ends: Ends) -> None:
    ends.model.snapshot(3)
    ends.send(times=0)
    ends.run()
    truncated = json.dumps(envelope("t", None, None, ends.model.lsn + 1)).encode()
    send(ends.kafka.bootstrap, ends.topic, [(b'{"id": 1}', truncated)])
    with pytest.raises(InvalidData, match="the table was truncated"):
        ends.run()
    ends.check()
