"""A real job, and a new version of it that begins beside it with its state; versions that do not come up leave nothing
behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fed_job import KEYS, PROJECT, Feeder, command, newest_of_each_key, output

from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.migration import read_migration
from state_runtime.store import open_store
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.launchers import LocalLauncher

JOB = """
from state_runtime import ParquetSink, aggregates

def build(context, uid="by-k", breaks=False):
    def per_batch(batches):
        for batch in batches:
            if breaks and batch.num_rows:
                raise ValueError("not this version")
            yield batch

    job = context.job()
    (job.read(lambda spark: spark.readStream.schema("k string, v long").json(context.options["inbox"]))
        .transform(lambda frame: frame.mapInArrow(per_batch, frame.schema))
        .key_by("k").aggregate(uid=uid, n=aggregates.count(), total=aggregates.sum("v"))
        .write(ParquetSink(context.options["out"]), name="out"))
    return job

def build_broken(context):
    return build(context, breaks=True)

def build_other_uid(context):
    return build(context, uid="by-something-else")
"""

CONFIG = """
version: 1
defaults:
  entry_point: forked:build
  store: store
  local_dir: local
  parallelism: 2
  path_options: [inbox, out]
  trigger: {processing_time_s: 0.2}
  spark: {master: "local[1]", conf: {spark.ui.enabled: false}}
  checkpoint: {heartbeat_interval_s: 0.2}
jobs:
  tiny: {options: {inbox: in, out: out}}
  tiny-next: {options: {inbox: in, out: out-next}, parallelism: 3}
  tiny-broken: {options: {inbox: in, out: out-broken}, entry_point: "forked:build_broken"}
  tiny-other: {options: {inbox: in, out: out-other}, entry_point: "forked:build_other_uid"}
  tiny-same-out: {options: {inbox: in, out: out}}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PYTHONPATH", PROJECT)
    (tmp_path / "forked.py").write_text(JOB)
    (tmp_path / "stillstate.yaml").write_text(CONFIG)
    yield tmp_path / "stillstate.yaml"
    for job in load_spec(tmp_path / "stillstate.yaml").jobs.values():
        status = Catalog(open_store(str(tmp_path / "store")), job.name).status()
        if status is not None:
            LocalLauncher(tmp_path / "stillstate.yaml", job).end_lost(status)


@pytest.mark.spark
@pytest.mark.long
def test_a_new_version_runs_beside_the_old_one_with_its_state(config: Path) -> None:
    folder = config.parent
    feeder = Feeder(folder / "in")
    launcher = LocalLauncher(config, load_spec(config).job("tiny"))
    launched = launcher.start()
    launcher.wait_for_checkpoint(launched, 120)

    same = command(config, "fork", "tiny", "tiny-same-out", "--dry-run")
    assert (same.returncode, "options.out of job 'tiny-same-out'" in same.stderr) == (2, True), same.stderr

    done = command(config, "fork", "tiny", "tiny-next", "--yes")
    assert done.returncode == 0, done.stderr
    assert "tiny-next runs beside tiny" in done.stdout
    assert _status(folder, "tiny").term == launched.term, "nobody has restarted it"
    assert _status(folder, "tiny-next").parallelism == 3

    for version, words in (("tiny-broken", "not this version"), ("tiny-other", "by-k")):
        failed = command(config, "fork", "tiny", version, "--yes", "--timeout-s", "120")
        assert failed.returncode == 1, failed.stderr
        assert "RolledBack" in failed.stderr
        assert words in failed.stderr
        assert [path.name for path in (folder / "store" / version).iterdir()] == ["migrations"]
        assert output(folder / f"out-{version.removeprefix('tiny-')}") == []
    assert [path.name.startswith("fork-") for path in (folder / "store/tiny/savepoints").iterdir()] == [True]

    expected = feeder.end()
    for out in ("out", "out-next"):
        _within(120, lambda out=out: newest_of_each_key(output(folder / out)) == expected)
        rows = output(folder / out)
        assert len(rows) == len(set(rows)), "no output came twice"
    assert (_status(folder, "tiny").term, _status(folder, "tiny").state) == (launched.term, "running")

    # What was counted before is in the old output alone: the new job goes on counting from there.
    first = {key: min(n for k, n, _ in output(folder / "out-next") if k == key) for key in expected}
    record = read_migration(Catalog(open_store(str(folder / "store")), "tiny-next").root)
    assert record is not None
    assert len(first) == KEYS
    assert all(n > 1 for n in first.values()), "it did not begin empty"

    # And what becomes of the old one does not reach it.
    assert command(config, "stop", "tiny").returncode == 0
    gone = command(config, "delete", "tiny", "--root", "--with-savepoints", "--yes")
    assert gone.returncode == 0, gone.stderr
    assert command(config, "stop", "tiny-next").returncode == 0
    assert command(config, "verify", "tiny-next", "--level", "full").returncode == 0
    assert command(config, "run", "tiny-next", "--until-idle").returncode == 0


def _status(folder: Path, job: str) -> Any:
    status = Catalog(open_store(str(folder / "store")), job).status()
    assert status is not None
    return status


def _within(seconds: float, holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.5)
