"""A real job, rescaled while it runs, and taken back by itself from a setting with which its driver dies."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fed_job import PROJECT, Feeder, command, newest_of_each_key, output

from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.migration import RunSettings, read_migration
from state_runtime.store import open_store
from stillstate.orchestration.config.driver_settings import driver_settings
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.launchers import LocalLauncher
from stillstate.orchestration.launchers.processes import process_of

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
