"""A real job, rescaled while it runs, and taken back by itself from a setting with which its driver dies."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from orchestration.config.driver_settings import driver_settings
from orchestration.config.spec import load_spec
from orchestration.launchers import LocalLauncher
from orchestration.launchers.processes import process_of
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.migration import RunSettings, read_migration
from state_runtime.store import open_store

PROJECT = str(Path(__file__).resolve().parents[2])
KEYS = 12

JOB = """
from state_runtime import ParquetSink, aggregates

def build(context):
    breaks = context.settings.parallelism == 5

    def per_batch(batches):
        for batch in batches:
            if breaks and batch.num_rows:
                raise ValueError("not with five")
            yield batch

    job = context.job()
    (job.read(lambda spark: spark.readStream.schema("k string, v long").json(context.options["inbox"]))
        .transform(lambda frame: frame.mapInArrow(per_batch, frame.schema))
        .key_by("k").aggregate(uid="by-k", n=aggregates.count(), total=aggregates.sum("v"))
        .write(ParquetSink(context.options["out"]), name="out"))
    return job
"""

CONFIG = """
version: 1
defaults:
  entry_point: migrated:build
  store: store
  local_dir: local
  parallelism: 2
  options: {inbox: in, out: out}
  path_options: [inbox, out]
  trigger: {processing_time_s: 0.2}
  spark: {master: "local[1]", conf: {spark.ui.enabled: false}}
  checkpoint: {heartbeat_interval_s: 0.2}
jobs:
  tiny: {}
"""


class Feeder:
    """Writes input all the time, and knows what comes of it."""

    def __init__(self, inbox: Path) -> None:
        self._inbox, self._ended = inbox, threading.Event()
        self.rows = 0
        self._thread = threading.Thread(target=self._feed, daemon=True)
        inbox.mkdir()
        self._write()
        self._thread.start()

    def _feed(self) -> None:
        while not self._ended.wait(0.5):
            self._write()

    def _write(self) -> None:
        lines = [json.dumps({"k": f"k{n % KEYS}", "v": n}) for n in range(self.rows, self.rows + 20)]
        part = self._inbox / f".{self.rows:08d}.tmp"
        part.write_text("\n".join(lines) + "\n")
        part.rename(self._inbox / f"{self.rows:08d}.json")
        self.rows += 20

    def end(self) -> dict[str, tuple[int, int]]:
        """Stop; count and sum of each key, computed anew."""
        self._ended.set()
        self._thread.join()
        counts: Counter[str] = Counter()
        totals: Counter[str] = Counter()
        for n in range(self.rows):
            counts[f"k{n % KEYS}"] += 1
            totals[f"k{n % KEYS}"] += n
        return {key: (counts[key], totals[key]) for key in counts}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PYTHONPATH", PROJECT)
    (tmp_path / "migrated.py").write_text(JOB)
    (tmp_path / "stillstate.yaml").write_text(CONFIG)
    yield tmp_path / "stillstate.yaml"
    job = load_spec(tmp_path / "stillstate.yaml").job("tiny")
    for store in ("store", "elsewhere"):
        status = Catalog(open_store(str(tmp_path / store)), "tiny").status()
        if status is not None:
            LocalLauncher(tmp_path / "stillstate.yaml", job).end_lost(status)


def command(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "orchestration.cli", *arguments, "--config", str(config)],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        cwd=config.parent,
    )


def output(folder: Path) -> list[tuple[str, int, int]]:
    files = sorted(f for f in folder.rglob("*.parquet") if not f.name.startswith(("_", ".")))
    return [(r["k"], r["n"], r["total"]) for f in files for r in pq.read_table(f).to_pylist()]


def newest_of_each_key(rows: list[tuple[str, int, int]]) -> dict[str, tuple[int, int]]:
    newest: dict[str, tuple[int, int]] = {}
    for key, count, total in rows:
        newest[key] = max(newest.get(key, (0, 0)), (count, total))
    return newest


@pytest.mark.spark
@pytest.mark.long
def test_a_job_is_rescaled_as_it_runs_and_taken_back_from_what_breaks_it(config: Path) -> None:
    folder = config.parent
    feeder = Feeder(folder / "in")
    spec = load_spec(config).job("tiny")
    launcher = LocalLauncher(config, spec)
    launched = launcher.start()
    launcher.wait_for_checkpoint(launched, 120)

    done = command(config, "rescale", "tiny", "3", "--yes")
    assert done.returncode == 0, done.stderr
    assert "runs with parallelism 3" in done.stdout
    catalog = Catalog(open_store(str(folder / "store")), "tiny")
    assert _status(catalog).parallelism == 3
    assert dict(_status(catalog).settings) == driver_settings(spec), "a run says what it was started with"
    head = catalog.latest()
    assert head is not None
    assert head.parallelism == 3

    broken = command(config, "migrate", "tiny", "--parallelism", "5", "--yes", "--timeout-s", "120")
    assert broken.returncode == 1, broken.stderr
    assert "RolledBack" in broken.stderr
    assert "not with five" in broken.stderr
    record = read_migration(catalog.root)
    assert record is not None
    assert (record.step, record.settings) == ("rolled-back", RunSettings(3, "arrow"))
    status = _status(catalog)
    assert (status.state, status.parallelism) == ("running", 3)
    assert process_of(status, "tiny") is not None

    expected = feeder.end()
    deadline_s = time.monotonic() + 120
    while newest_of_each_key(output(folder / "out")) != expected:
        assert time.monotonic() < deadline_s, Path(launched.log).read_text()[-3000:]
        threading.Event().wait(0.5)
    rows = output(folder / "out")
    assert len(rows) == len(set(rows)), "no output came twice"
    assert command(config, "stop", "tiny").returncode == 0


@pytest.mark.spark
@pytest.mark.long
def test_a_job_is_moved_to_another_store_as_it_runs(config: Path) -> None:
    folder = config.parent
    config.write_text(CONFIG.replace("  parallelism: 2", "  parallelism: 2\n  migration: {to_store: elsewhere}"))
    feeder = Feeder(folder / "in")
    launcher = LocalLauncher(config, load_spec(config).job("tiny"))
    launched = launcher.start()
    launcher.wait_for_checkpoint(launched, 120)

    done = command(config, "migrate", "tiny", "--move", "--yes")
    assert done.returncode == 0, done.stderr
    assert "take migration.to_store out" in done.stdout
    assert [path.name for path in (folder / "store" / "tiny").iterdir()] == ["moving.json"]
    catalog = Catalog(open_store(str(folder / "elsewhere")), "tiny")
    status = _status(catalog)
    assert (status.state, status.term > launched.term) == ("running", True)
    (row,) = json.loads(command(config, "jobs", "--json").stdout)
    assert (row["health"], row["term"]) == ("healthy", status.term), "who has the old file sees it where it is"

    # Killed: its supervisor starts it again, there.
    process = process_of(status, "tiny")
    assert process is not None
    process.kill()
    expected = feeder.end()
    deadline_s = time.monotonic() + 120
    while newest_of_each_key(output(folder / "out")) != expected:
        assert time.monotonic() < deadline_s, f"{_status(catalog)}"
        threading.Event().wait(0.5)
    rows = output(folder / "out")
    assert len(rows) == len(set(rows)), "no output came twice"
    assert _status(catalog).term > status.term
    assert command(config, "stop", "tiny").returncode == 0

    # The old place does not begin anew, for whoever has edited the file by half.
    config.write_text(CONFIG)
    assert "use it there" in command(config, "run", "tiny", "--until-idle").stderr
    config.write_text(CONFIG.replace("store: store", "store: elsewhere"))
    assert command(config, "run", "tiny", "--until-idle").returncode == 0


def _status(catalog: Catalog) -> Any:
    status = catalog.status()
    assert status is not None
    return status
