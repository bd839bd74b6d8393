"""A real driver that stands by for a real one, killed with SIGKILL."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.term_files import RunStatus
from state_runtime.store import open_store
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.launchers import LocalLauncher
from stillstate.orchestration.launchers.processes import process_of
from stillstate.orchestration.running.first_run import small_jobs

pytestmark = [pytest.mark.spark, pytest.mark.long]

PROJECT = str(Path(__file__).resolve().parents[2])
WAIT_S = 240.0

JOB = """
from state_runtime import ParquetSink, aggregates

def build(context):
    job = context.job()
    (job.read(lambda spark: spark.readStream.schema("k string, v long").json(context.options["inbox"]))
        .key_by("k").aggregate(uid="by-k", n=aggregates.count(), total=aggregates.sum("v"))
        .write(ParquetSink(context.options["out"]), name="out"))
    return job
"""

CONFIG = """
version: 1
jobs:
  tiny:
    entry_point: tiny_job:build
    store: store
    local_dir: local
    parallelism: 2
    options: {inbox: in, out: out}
    path_options: [inbox, out]
    trigger: {processing_time_s: 0.2}
    spark: {master: "local[1]", conf: {spark.ui.enabled: false}}
    checkpoint: {heartbeat_interval_s: 0.2}
    launcher: {standby: true, start_timeout_s: 200}
"""


def until(what: str, look: Callable[[], Any]) -> Any:
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.1)):
        if found := look():
            return found
        pause.wait(0.1)
    raise AssertionError(f"waited for {what}")


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalLauncher]:
    monkeypatch.setenv("PYTHONPATH", PROJECT)
    (tmp_path / "tiny_job.py").write_text(JOB)
    config = tmp_path / "stillstate.yaml"
    config.write_text(CONFIG)
    (tmp_path / "in").mkdir()
    made = LocalLauncher(config, load_spec(config).job("tiny"))
    yield made
    status = Catalog(open_store(str(tmp_path / "store")), "tiny").status()
    if status is not None:
        made.end_lost(status)


def test_a_driver_that_stood_by_goes_on_where_the_killed_one_was(launcher: LocalLauncher, tmp_path: Path) -> None:
    """Nothing lost, nothing twice; and of a configuration that was changed meanwhile it reads the new one."""
    catalog = Catalog(open_store(str(tmp_path / "store")), "tiny")
    rows = 0

    def feed(number: int) -> None:
        nonlocal rows
        lines = [json.dumps({"k": f"k{n % 7}", "v": n}) for n in range(rows, rows + 100)]
        part = tmp_path / "in" / f".{number}.tmp"
        part.write_text("\n".join(lines) + "\n")
        part.rename(tmp_path / "in" / f"{number}.json")
        rows += 100

    def counted() -> dict[str, tuple[int, int]]:
        newest: dict[str, tuple[int, int]] = {}
        files = (
            f for f in (tmp_path / "out").rglob("*.parquet") if "_" not in f.relative_to(tmp_path / "out").parts[0][:1]
        )
        for file in files:
            for row in pq.read_table(file).to_pylist():
                newest[row["k"]] = max(newest.get(row["k"], (0, 0)), (row["n"], row["total"]))
        return newest

    def expected() -> dict[str, tuple[int, int]]:
        return {f"k{k}": (len(range(k, rows, 7)), sum(range(k, rows, 7))) for k in range(7)}

    def stands_by(log: Path, number: int) -> int:
        """The id of the process that is the so-manieth to stand by."""
        lines = until(
            "a driver that stands by",
            lambda: [line for line in log.read_text().splitlines() if line.endswith(" stands by")][number - 1 :],
        )
        return int(lines[0].split()[-3])

    def killed() -> RunStatus:
        """How the run of the next term is, once it says whose it is."""
        status = catalog.status()
        assert status is not None
        process = process_of(status, "tiny")
        assert process is not None
        process.kill()
        feed(status.term)
        after = until("the next run", lambda: (s := catalog.status()) and s.term > status.term and s.cause and s)
        assert "SIGKILL" in after.cause
        assert after.supervisor_pid == status.supervisor_pid
        return after

    feed(0)
    log = Path(launcher.start().log)
    until("the output", lambda: counted() == expected())
    stood_by = stands_by(log, 1)
    assert killed().pid == stood_by
    until("the output", lambda: counted() == expected())

    stood_by = stands_by(log, 2)
    (tmp_path / "stillstate.yaml").write_text(CONFIG.replace("parallelism: 2", "parallelism: 3"))
    assert killed().pid == stood_by
    until("the output", lambda: counted() == expected())
    assert "the configuration was changed; a new driver starts" in log.read_text()
    newest = catalog.latest()
    assert newest is not None
    assert newest.parallelism == 3


def test_a_small_job_of_one_that_stands_by_ends_when_it_is_called(spark: SparkSession, tmp_path: Path) -> None:
    """What it warms up for does not wait for it."""
    asked = 0

    def is_called() -> bool:
        nonlocal asked
        asked += 1
        return True

    for run in small_jobs(spark, tmp_path):
        run(is_called)
    assert asked == 2, "each was left at the first look"
    assert not spark.streams.active
