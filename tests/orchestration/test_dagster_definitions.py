"""The code location: what it holds, and that it loads without Spark."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from job_roots import SECRET

from state_runtime.base.errors import JobAlreadyRunning
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.config.start_options import StartOptions
from stillstate.orchestration.definitions import build_definitions
from stillstate.orchestration.launchers import Launched, Stopped
from stillstate.orchestration.resources import SparkSessionResource, StillstateResource

PROJECT = Path(__file__).resolve().parents[2]


def python(code: str, config: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "STILLSTATE_CONFIG": config, "PYTHONPATH": str(PROJECT)},
    )


def test_the_code_location_loads_without_spark(write_config: Callable[..., Path]) -> None:
    done = python(
        "import sys; from stillstate.orchestration.definitions import defs; repository = defs().get_repository_def(); "
        "print(sorted(j.name for j in repository.get_all_jobs()), [m for m in ('pyspark', 'dagster_pyspark') if m in sys.modules])",
        str(write_config("flights", "plane-delays")),
    )
    assert done.returncode == 0, done.stderr
    for action in (
        "start",
        "stop",
        "recover",
        "materialize",
        "savepoint",
        "retain",
        "collect",
        "compact_output",
        "verify",
        "drill",
    ):
        assert f"'{action}_flights', '{action}_plane_delays'" in done.stdout
    assert done.stdout.strip().endswith("[]")


def test_a_missing_configuration_fails_with_the_typed_error(tmp_path: Path) -> None:
    done = python("from stillstate.orchestration.definitions import defs; defs()", str(tmp_path / "none.yaml"))
    assert done.returncode != 0
    assert "InvalidConfiguration" in done.stderr
    assert "none.yaml" in done.stderr


def test_definitions_hold_assets_jobs_and_running_sensors(write_config: Callable[..., Path]) -> None:
    defs = build_definitions(load_spec(write_config("flights", "plane-delays")))
    dg.Definitions.validate_loadable(defs)
    keys = {key.to_user_string() for key in defs.resolve_asset_graph().get_all_asset_keys()}
    of_a_job = (
        "stream",
        "checkpoints",
        "materialized_state",
        "savepoints",
        "retained_snapshots",
        "deleted_snapshots",
        "garbage",
        "collected_garbage",
        "compacted_output",
    )
    of_jobs = {f"{job}/{thing}" for job in ("flights", "plane-delays") for thing in of_a_job}
    assert keys == {"stillstate/overview", *of_jobs}
    for name in ("stillstate_progress", "stillstate_recovery"):
        sensor = defs.resolve_sensor_def(name)
        assert sensor.default_status is dg.DefaultSensorStatus.RUNNING
        assert sensor.minimum_interval_seconds == 5
    for action in ("start", "stop", "recover", "rollback", "set_source"):
        job = defs.resolve_job_def(f"{action}_plane_delays")
        assert job.tags["stillstate/job"] == "plane-delays"
        assert job.tags["stillstate/action"] == action


def test_the_session_of_a_materialization_is_a_resource_with_fields(write_config: Callable[..., Path]) -> None:
    """What a person sets there wins over the file's settings of the session; dagster-pyspark makes it."""
    job = "spark: {conf: {spark.sql.shuffle.partitions: 4, spark.executor.memory: 1g}}"
    file = write_config(extra=job)
    shown = build_definitions(load_spec(file)).get_repository_def().get_top_level_resources()
    assert set(shown["stillstate_spark"].config_schema.config_type.fields) == {"spark_config"}
    made = SparkSessionResource(spark_config={"spark.executor.memory": "3g"}).of_job(load_spec(file).job("flights"))
    assert type(made).__name__ == "LazyPySparkResource"
    assert made.spark_config["spark.executor.memory"] == "3g"
    assert str(made.spark_config["spark.sql.shuffle.partitions"]) == "4"


def test_no_secret_reaches_the_definitions(write_config: Callable[..., Path]) -> None:
    defs = build_definitions(load_spec(write_config(extra=f"storage_options: {{key: {SECRET}}}")))
    repository = defs.get_repository_def()
    seen = repr(list(defs.resolve_all_asset_specs()))
    for job in repository.get_all_jobs():
        seen += repr(job.tags) + repr(job.get_job_snapshot())
    assert SECRET not in seen


@pytest.mark.parametrize(
    ("workspace", "config", "stream"),
    [
        ("workspace.yaml", None, "flights"),
        ("orchestration/starter/files/workspace.yaml", "orchestration/starter/files/stillstate.yaml", "legs"),
    ],
)
def test_each_workspace_file_loads_from_any_folder(
    tmp_path: Path, workspace: str, config: str | None, stream: str
) -> None:
    """A clone's own opens the example's jobs as it stands, without a configuration of the reader's."""
    environment = {name: value for name, value in os.environ.items() if name != "STILLSTATE_CONFIG"}
    if config is not None:
        environment["STILLSTATE_CONFIG"] = str(PROJECT / config)
    listed = subprocess.run(
        [sys.executable, "-m", "dagster", "job", "list", "-w", str(PROJECT / workspace)],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(PROJECT), "DAGSTER_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert listed.returncode == 0, listed.stderr
    assert f"start_{stream}" in listed.stdout


def test_instance_files_are_what_dagster_reads(tmp_path: Path) -> None:
    (tmp_path / "dagster.yaml").write_text(
        (PROJECT / "orchestration" / "starter" / "files" / "dagster.yaml").read_text()
    )
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert instance.telemetry_enabled is False
        limits = instance.get_concurrency_config().run_queue_config.tag_concurrency_limits
        assert limits == [
            {"key": key, "value": {"applyLimitPerUniqueValue": True}, "limit": 1}
            for key in ("stillstate/job", "stillstate/materialize", "stillstate/upkeep", "stillstate/savepoint")
        ] + [{"key": "stillstate/slots", "value": "upkeep", "limit": 8}]
        assert instance.get_concurrency_config().run_queue_config.max_concurrent_runs > 8, "slots stay for recoveries"
        assert instance.run_coordinator.dequeue_interval_seconds == 1, "a recovery waits for the queue"
        assert instance.run_monitoring_enabled is True
        assert instance.run_retries_enabled is False


class ScriptedLauncher:
    """Answers as it is told."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls: list[tuple[StartOptions, ...]] = []

    def start(self, *options: StartOptions) -> Any:
        self.calls.append(options)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    stop = start


def run_job(config: Path, name: str, answer: Any, run_config: dict[str, Any] | None = None) -> Any:
    launcher = ScriptedLauncher(answer)

    class TestResource(StillstateResource):
        def launcher(self, spec: Any, job: Any) -> Any:
            return launcher

    defs = build_definitions(load_spec(config), TestResource(config_file=str(config)))
    result = defs.resolve_job_def(name).execute_in_process(run_config=run_config, raise_on_error=False)
    return result, launcher


def test_the_start_job_reports_where_the_driver_is(write_config: Callable[..., Path]) -> None:
    launched = Launched(job="flights", term=3, state="running", pid=42, host="h", log="/logs/flights.log")
    result, launcher = run_job(
        write_config(),
        "start_flights",
        launched,
        {"ops": {"start_flights_driver": {"config": {"until_idle": True}}}},
    )
    assert result.success
    assert launcher.calls == [(StartOptions(until_idle=True),)]
    (output,) = [e for e in result.all_events if e.event_type_value == "STEP_OUTPUT"]
    metadata = output.step_output_data.metadata
    assert metadata["term"].value == 3
    assert metadata["log"].value == "/logs/flights.log"


def test_the_stop_job_says_how_it_ended(write_config: Callable[..., Path]) -> None:
    result, _ = run_job(write_config(), "stop_flights", Stopped("flights", 3, "stopped", "its run ended: stopped"))
    assert result.output_for_node("stop_flights_driver")["how"] == "its run ended: stopped"


def test_a_typed_error_fails_the_run_with_its_message_and_is_not_retried(write_config: Callable[..., Path]) -> None:
    result, _ = run_job(write_config(), "start_flights", JobAlreadyRunning("term 3 runs already"))
    assert not result.success
    (failure,) = [e for e in result.all_events if e.event_type_value == "STEP_FAILURE"]
    data = failure.step_failure_data.user_failure_data
    assert data.description == "term 3 runs already"
    assert data.metadata["exit_code"].value == 3
    assert not [e for e in result.all_events if e.event_type_value == "STEP_UP_FOR_RETRY"]


@pytest.mark.parametrize("action", ["start", "stop", "recover", "rollback", "set_source"])
def test_a_lost_worker_frees_its_slot(write_config: Callable[..., Path], action: str) -> None:
    job = build_definitions(load_spec(write_config())).resolve_job_def(f"{action}_flights")
    assert int(job.tags["dagster/max_runtime"]) > 0
