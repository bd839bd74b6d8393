"""A real driver, started by the command line and by the launcher."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from state_runtime.base.errors import JobAlreadyRunning
from state_runtime.base.process_space import process_space
from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_store
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.launchers import LaunchFailed, LocalLauncher
from stillstate.orchestration.launchers.processes import process_of

PROJECT = str(Path(__file__).resolve().parents[2])

JOB = """
from state_runtime import ParquetSink
from state_runtime import aggregates

def build(context):
    job = context.job()
    (job.read(lambda spark: spark.readStream.schema("k string, v long").json(context.options["inbox"]))
        .key_by("k").aggregate(uid="by-k", n=aggregates.count())
        .write(ParquetSink(context.options["out"]), name="out"))
    return job

def forgot_to_return(context):
    context.job()

def deadly(context):
    order = context.options["order"]

    def rows(batch):
        import os, signal
        if open(order).read().strip() == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    def per_batch(batches):
        return map(rows, batches)

    job = context.job()
    (job.read(lambda spark: spark.readStream.schema("k string, v long").json(context.options["inbox"]))
        .transform(lambda frame: frame.mapInArrow(per_batch, frame.schema))
        .key_by("k").aggregate(uid="by-k", n=aggregates.count())
        .write(ParquetSink(context.options["out"]), name="out"))
    return job

def raises(context):
    raise KeyError("mine")
"""

CONFIG = """
version: 1
defaults:
  entry_point: tiny_job:build
  store: store
  local_dir: local
  parallelism: 1
  options: {inbox: in, out: out, order: order}
  path_options: [inbox, out, order]
  trigger: {processing_time_s: 0.2}
  spark: {master: "local[1]", conf: {spark.ui.enabled: false}}
  checkpoint: {heartbeat_interval_s: 0.2}
jobs:
  tiny: {}
  forgot: {entry_point: "tiny_job:forgot_to_return"}
  deadly: {entry_point: "tiny_job:deadly"}
  raises: {entry_point: "tiny_job:raises"}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PYTHONPATH", PROJECT)
    (tmp_path / "tiny_job.py").write_text(JOB)
    (tmp_path / "stillstate.yaml").write_text(CONFIG)
    (tmp_path / "in").mkdir()
    (tmp_path / "order").write_text("live")
    (tmp_path / "in" / "1.json").write_text('{"k": "a", "v": 1}\n{"k": "b", "v": 2}\n')
    yield tmp_path / "stillstate.yaml"
    status = Catalog(open_store(str(tmp_path / "store")), "tiny").status()
    process = None if status is None else process_of(status, "tiny")
    if process is not None:
        process.kill()
        process.wait(10)


def command(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stillstate.orchestration.cli", *arguments, "--config", str(config)],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
        cwd=config.parent,
    )


@pytest.mark.parametrize(("job", "code", "what"), [("forgot", 2, "return job"), ("raises", 7, "KeyError")])
def test_a_bad_entry_point_ends_before_spark_starts(config: Path, job: str, code: int, what: str) -> None:
    done = command(config, "run", job)
    assert done.returncode == code, done.stderr
    assert what in done.stderr
    assert not (config.parent / "store").exists()


@pytest.mark.spark
@pytest.mark.long
def test_run_until_idle_prints_its_progress_and_ends(config: Path) -> None:
    done = command(config, "run", "tiny", "--until-idle", "--json")
    assert done.returncode == 0, done.stderr
    *epochs, summary = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(epoch["input_rows"] for epoch in epochs) == 2
    assert summary["state"] == "finished"
    assert summary["last_snapshot_id"] == epochs[-1]["snapshot_id"]
    (row,) = [r for r in json.loads(command(config, "jobs", "--json").stdout) if r["job"] == "tiny"]
    assert (row["health"], row["state_rows"]) == ("finished", 2)


@pytest.mark.spark
@pytest.mark.long
def test_a_driver_of_the_launcher_is_alone_and_stops_on_sigterm(config: Path) -> None:
    spec = load_spec(config)
    launcher = LocalLauncher(config, spec.job("tiny"))
    launched = launcher.start()
    with pytest.raises(JobAlreadyRunning):
        launcher.start()
    second = command(config, "run", "tiny")
    assert second.returncode == 3, second.stderr
    assert "JobAlreadyRunning" in second.stderr

    # Its supervisor collects its exit code, and ends a moment after it. Gone is gone.
    processes = [psutil.Process(launched.pid), psutil.Process(_status(launcher).supervisor_pid)]
    processes[0].send_signal(signal.SIGTERM)
    _, left = psutil.wait_procs(processes, timeout=120)
    assert not left, Path(launched.log).read_text()
    assert launcher.is_alive(_status(launcher)) == "dead"
    assert _status(launcher).state == "stopped"
    assert _status(launcher).process_space == process_space()
    assert launcher.stop().how == "it was already over: stopped"


def _short(done: subprocess.CompletedProcess[str], folder: Path) -> str:
    """What a terminal shows: a message of ours, then the name of the log, which has the rest."""
    said = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    assert len(said) <= 4, done.stderr
    assert "Traceback" not in done.stderr
    assert "\tat " not in done.stderr
    (log,) = (folder / "logs").iterdir()
    assert said[0] == said[-1] == f"log: {log}"
    assert "Traceback" in log.read_text()
    return done.stderr


@pytest.mark.spark
@pytest.mark.long
def test_a_killed_python_process_of_spark_is_one_message(config: Path) -> None:
    """Spark says so in 1,100 lines."""
    (config.parent / "order").write_text("die")
    done = command(config, "run", "deadly", "--until-idle")
    assert done.returncode == 7, done.stderr
    assert "WorkerEnded: a Python process in which Spark runs the job's code" in _short(done, config.parent)


@pytest.mark.spark
@pytest.mark.long
def test_a_killed_java_is_one_message_and_the_next_run_goes_on(config: Path) -> None:
    """Spark's Java process takes with it all that py4j would say: a refused connection is no message."""
    driver = subprocess.Popen(
        [sys.executable, "-m", "stillstate.orchestration.cli", "run", "tiny", "--json", "--log-file", "mine.log", "-c", str(config)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=config.parent,
    )  # fmt: skip
    assert driver.stdout is not None
    assert driver.stdout.readline()
    javas = [p for p in psutil.Process(driver.pid).children(recursive=True) if p.name() == "java"]
    assert javas
    for java in javas:
        java.kill()
    _, said = driver.communicate(timeout=300)
    assert driver.returncode == 1, said
    lines = [line for line in said.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1, said
    assert "Spark's Java process ended" in json.loads(lines[0])["error"]["message"], said
    assert Catalog(open_store(str(config.parent / "store")), "tiny").status().state == "failed"  # type: ignore[union-attr]
    assert command(config, "run", "tiny", "--until-idle").returncode == 0


@pytest.mark.spark
@pytest.mark.long
def test_an_input_folder_that_changed_is_one_message(config: Path) -> None:
    """Spark's own words are 'Wrong basePath'; nobody knows from them what to do."""
    assert command(config, "run", "tiny", "--until-idle").returncode == 0
    shutil.rmtree(config.parent / "logs")
    (config.parent / "in").rename(config.parent / "other")
    (config.parent / "other" / "2.json").write_text('{"k": "c", "v": 1}\n')
    config.write_text(config.read_text().replace("inbox: in", "inbox: other"))
    done = command(config, "run", "tiny", "--until-idle")
    assert done.returncode == 2, done.stderr
    told = _short(done, config.parent)
    assert "InvalidConfiguration: the source reads from" in told
    assert "Wrong basePath" not in told


def test_the_launcher_passes_on_the_exit_code_of_a_driver_that_cannot_start(config: Path) -> None:
    config.write_text(config.read_text().replace("tiny_job:build", "tiny_job:biuld"))
    with pytest.raises(LaunchFailed, match="has no 'biuld'; close to it: build") as caught:
        LocalLauncher(config, load_spec(config).job("tiny")).start()
    assert caught.value.exit_code == 2


def _status(launcher: LocalLauncher):  # type: ignore[no-untyped-def]
    status = launcher._catalog.status()
    assert status is not None
    return status
