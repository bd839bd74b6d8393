"""A driver that `spark-submit` starts on a standalone cluster: its code is shipped, and the store tells how it is."""

from __future__ import annotations

import os
import signal
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pyarrow.dataset
import pytest
import yaml

from state_runtime.base.errors import JobAlreadyRunning
from state_runtime.snapshot.term_files import RunStatus
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.definitions import build_definitions
from stillstate.orchestration.launchers import SparkSubmitLauncher
from stillstate.orchestration.launchers.processes import process_of
from stillstate.orchestration.resources import StillstateResource

from ..conftest import ROOT
from .standalone import SPARK_HOME, Standalone

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster")]

SMALL = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
SECRET = "s3cr3t-sentinel-7f1e"
ODD = "a\\b = c:\td #! "
WAIT_S = 300

JOB = '''
import os
from pathlib import Path
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from state_runtime import ParquetSink

class Counts(StatefulProcessor):
    """How many rows a key has had, and which process counted."""

    def init(self, handle):
        self.n = handle.getValueState("n", "n long")

    def handleInputRows(self, key, rows, timers):
        n = (self.n.get()[0] if self.n.exists() else 0) + sum(1 for _ in rows)
        self.n.update((n,))
        yield Row(k=key[0], n=n, pid=os.getpid(), code=__file__)

    def close(self):
        pass

def build(context):
    def read(spark):
        Path(context.options["said"]).write_text(spark.conf.get("spark.stillstate.odd"))
        return spark.readStream.schema("k string").json(context.options["inbox"])

    job = context.job()
    columns = "k string, n long, pid long, code string"
    counts = job.read(read).key_by("k").transform_with_state(Counts(), columns, uid="n")
    counts.write(ParquetSink(context.options["out"]), name="out")
    return job
'''


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    cluster = Standalone(tmp_path_factory.mktemp("one-host"), 1)
    yield cluster
    cluster.close()


@pytest.fixture
def config(tmp_path: Path, one_host: Standalone, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A job whose code is in an archive only: neither the driver nor an executor finds it anywhere else."""
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    with zipfile.ZipFile(tmp_path / "shipped.zip", "w") as archive:
        archive.writestr("shipped_job.py", JOB)
    job = {
        "entry_point": "shipped_job:build",
        "store": "store",
        "local_dir": "local",
        "parallelism": 2,
        "options": {"inbox": "in", "out": "out", "said": "said"},
        "path_options": ["inbox", "out", "said"],
        "trigger": {"processing_time_s": 0.2},
        "checkpoint": {"heartbeat_interval_s": 0.5},
        "spark": {
            "conf": {
                "spark.ui.enabled": "false",
                "spark.driver.memory": "1g",
                "spark.driver.host": "127.0.0.1",
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.executor.memory": "512m",
                "spark.cores.max": "1",
                "spark.executor.extraJavaOptions": SMALL,
                "spark.executorEnv.PYTHONPATH": str(ROOT),
                "spark.local.dir": str(tmp_path / "scratch"),
                "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
            }
        },
        "launcher": {
            "kind": "spark-submit",
            "master": one_host.url,
            "conf": {"spark.stillstate.odd": ODD, "spark.stillstate.password": SECRET},
            "py_files": ["shipped.zip"],
            "submit_args": ["--driver-java-options", SMALL],
            "spark_submit": str(SPARK_HOME / "bin" / "spark-submit"),
            "start_timeout_s": WAIT_S,
            "stop_timeout_s": WAIT_S,
        },
    }
    file = tmp_path / "stillstate.yaml"
    file.write_text(yaml.safe_dump({"version": 1, "jobs": {"tiny": job}}))
    (tmp_path / "in").mkdir()
    yield file
    launcher = launcher_of(file)
    status = launcher._catalog.status()
    if status is not None:
        launcher.end_lost(status)


def launcher_of(config: Path) -> SparkSubmitLauncher:
    return SparkSubmitLauncher(config, load_spec(config).job("tiny"))


def give(config: Path, number: int, *keys: str) -> None:
    inbox = config.parent / "in"
    (inbox / f".{number}.json").write_text("".join(f'{{"k": "{key}"}}\n' for key in keys))
    (inbox / f".{number}.json").rename(inbox / f"{number}.json")


def output(config: Path) -> list[dict[str, Any]]:
    files = [str(file) for file in (config.parent / "out").glob("*.parquet")]
    rows: list[dict[str, Any]] = pyarrow.dataset.dataset(files).to_table().to_pylist() if files else []
    return rows


def eventually(condition: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "did not happen in time"
        os.sched_yield()
    return found


def status_of(launcher: SparkSubmitLauncher) -> RunStatus:
    status = launcher._catalog.status()
    assert status is not None
    return status


def test_a_submitted_driver_is_started_killed_brought_back_and_stopped(config: Path, one_host: Standalone) -> None:
    """Its whole life: started by the launcher, a second start turned away, killed with SIGKILL, found dead and brought
    back by what the recovery sensor asks for, stopped through the store; and the output is that of one run."""
    launcher = launcher_of(config)
    give(config, 1, "a", "b", "a")
    launched = launcher.start()
    first = launcher.wait_for_checkpoint(launched, WAIT_S)
    assert first.snapshot_id is not None
    assert (config.parent / "said").read_text() == ODD, "a setting comes as it is written"
    java = psutil.Process(launched.pid).parent()
    assert java is not None
    assert launcher.is_alive(status_of(launcher)) == "alive"
    assert_nobody_sees_the_secret(config, one_host, launched.pid)
    with pytest.raises(JobAlreadyRunning):
        launcher.start()

    lost = process_of(status_of(launcher), "tiny")
    assert lost is not None
    give(config, 2, "b", "c")
    os.kill(launched.pid, signal.SIGKILL)
    psutil.wait_procs([lost, java], timeout=WAIT_S)
    assert not java.is_running(), "Java ends with its Python, and its executors with it"
    assert launcher.is_alive(status_of(launcher)) == "dead"
    brought_back = recovered(config)
    assert (brought_back["outcome"], brought_back["term"]) == ("recovered", 2)
    assert brought_back["first_checkpoint"] > first.snapshot_id
    assert status_of(launcher).cause == "recovery of term 1, which was dead"

    # It publishes after the checkpoint that the recovery waits for.
    eventually(lambda: len(output(config)) == 4)
    stopped = launcher.stop()
    assert (stopped.term, stopped.state) == (2, "stopped")
    rows = output(config)
    assert Counter((row["k"], row["n"]) for row in rows) == Counter([("a", 2), ("b", 1), ("b", 2), ("c", 1)])
    assert {Path(row["code"]).parent.name for row in rows} == {"shipped.zip"}, "the code came from what was shipped"
    assert not {row["pid"] for row in rows} & {launched.pid, brought_back["pid"]}, "executors have counted"


def assert_nobody_sees_the_secret(config: Path, cluster: Standalone, driver: int) -> None:
    """Not on a command line of the driver, of Java, of an executor; not in a file that is left."""
    process = psutil.Process(driver)
    seen = [process, *process.parents(), *(e for worker in cluster.workers.values() for e in worker.executors())]
    assert len([p for p in seen if "java" in p.name()]) >= 2, "Spark's submission and an executor"
    assert not [p.pid for p in seen if SECRET in " ".join(p.cmdline())]
    for file in (config.parent / "logs").rglob("*"):
        assert SECRET not in file.read_text()


def recovered(config: Path) -> dict[str, Any]:
    """What the recovery sensor sees, asks for, and gets."""
    spec = load_spec(config)
    resource = StillstateResource(config_file=str(config))
    definitions = build_definitions(spec, resource)
    with dg.DagsterInstance.ephemeral() as instance:

        def tick() -> Any:
            with dg.build_sensor_context(instance=instance, resources={"stillstate": resource}) as context:
                result = definitions.resolve_sensor_def("stillstate_recovery")(context)
            assert isinstance(result, dg.SensorResult)
            return result.run_requests

        (request,) = eventually(tick)
        done = definitions.resolve_job_def(request.job_name).execute_in_process(
            run_config=dict(request.run_config), instance=instance, tags=dict(request.tags)
        )
        value: dict[str, Any] = done.output_for_node("recover_tiny_driver")
        return value
