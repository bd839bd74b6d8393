"""The launcher of `spark-submit`: what it says to it, and what it knows of a driver that it cannot see."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_submit import __file__ as FAKE_SUBMIT
from job_roots import SECRET, JobRoot

from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import InvalidConfiguration, JobAlreadyRunning
from state_runtime.snapshot.control import asked_to_stop
from state_runtime.snapshot.term_files import RunStatus
from stillstate.orchestration.config.spec import JobSpec, load_spec
from stillstate.orchestration.config.start_options import StartOptions
from stillstate.orchestration.launchers import (
    LaunchFailed,
    LocalLauncher,
    SparkSubmitLauncher,
    StopTimedOut,
    build_launcher,
)
from stillstate.orchestration.launchers.log_files import redacted
from stillstate.orchestration.launchers.spark_submit import find_spark_submit
from stillstate.orchestration.launchers.submit_command import (
    APPLICATION,
    properties_text,
    submit_command,
    submit_properties,
)

CLIENT = "kind: spark-submit, master: 'spark://m:7077'"
CLUSTER = "kind: spark-submit, master: yarn, deploy_mode: cluster"
Make = Callable[..., SparkSubmitLauncher]


def section(write_config: Callable[..., Path], launcher: str, extra: str = "") -> tuple[Path, JobSpec]:
    config = write_config(extra=f"launcher: {{{launcher}}}\n{extra}")
    return config, load_spec(config, environ={}).job("flights")


# -- what spark-submit is told ------------------------------------------------------------------------------------


def command(config: Path, job: JobSpec, *options: str, cause: str = "") -> list[str]:
    return submit_command(
        job, config, program="spark-submit", properties_file=Path("/p.conf"), cause=cause, options=options
    )


def test_a_driver_of_this_machine_gets_the_file_where_it_is(write_config: Callable[..., Path]) -> None:
    config, job = section(
        write_config,
        f"{CLIENT}, py_files: [code.zip, 'hdfs:///more.py'], archives: ['env.tar.gz#env'], submit_args: [--queue, etl]",
    )
    here = config.parent
    assert command(config, job, "--takeover") == [
        "spark-submit",
        *("--master", "spark://m:7077", "--deploy-mode", "client", "--name", "flights"),
        *("--properties-file", "/p.conf", "--load-spark-defaults"),
        *("--py-files", f"{here}/code.zip,hdfs:///more.py", "--archives", f"{here}/env.tar.gz#env"),
        *("--queue", "etl"),
        str(APPLICATION),
        *("run", "flights", "--config", str(config), "--log-file", "-", "--takeover"),
    ]


def test_a_driver_of_the_cluster_gets_the_file_with_it(write_config: Callable[..., Path]) -> None:
    """It works in a folder of its own, where what was shipped lies."""
    config, job = section(write_config, f"{CLUSTER}, files: [log4j2.xml, 'local:/opt/x.json']")
    assert command(config, job, "--until-idle", cause="recovery of term 3") == [
        "spark-submit",
        *("--master", "yarn", "--deploy-mode", "cluster", "--name", "flights"),
        *("--properties-file", "/p.conf", "--load-spark-defaults"),
        *("--files", f"{config},{config.parent}/log4j2.xml,local:/opt/x.json"),
        str(APPLICATION),
        *("--cause", "recovery of term 3", "run", "flights", "--config", "stillstate.yaml", "--log-file", "-"),
        "--until-idle",
    ]
    assert APPLICATION.is_file()


def test_settings_of_the_launcher_win_over_those_of_the_job(write_config: Callable[..., Path]) -> None:
    spark = "spark: {conf: {spark.cores.max: 2, spark.executor.memory: 1g}}"
    _, job = section(write_config, f"{CLIENT}, conf: {{spark.cores.max: 4}}", spark)
    assert submit_properties(job, "/usr/bin/python3") == {
        "spark.cores.max": "4",
        "spark.executor.memory": "1g",
        "spark.pyspark.driver.python": "/usr/bin/python3",
    }
    _, job = section(write_config, f"{CLUSTER}, conf: {{spark.yarn.maxAppAttempts: 3}}", spark)
    said = submit_properties(job, "/usr/bin/python3")
    assert said["spark.yarn.maxAppAttempts"] == "3", "what the file says wins"
    assert said["spark.yarn.submit.waitAppCompletion"] == "false", "else the start would wait for the job's end"
    assert "spark.pyspark.driver.python" not in said, "the interpreter of this machine is nothing to a node"


def test_a_setting_is_one_line_whatever_is_in_it() -> None:
    text = properties_text({"b": "back\\slash\nline", "a key:=#!": "x = y: #!"})
    assert text.splitlines() == ["a\\ key\\:\\=\\#\\!=x = y: #!", "b=back\\\\slash\\nline"]


# -- what the file may say ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launcher", "key", "message"),
    [
        ("kind: spark-submit", "launcher", "`kind: spark-submit` needs the master"),
        (f"{CLIENT}, deploy_mode: cluster", "launcher.deploy_mode", "a standalone cluster does not run Python drivers"),
        ("kind: spark-submit, master: 'local[2]', deploy_mode: cluster", "launcher.deploy_mode", "needs a master yarn"),
        (f"{CLIENT}, restarts: 3", "launcher.restarts", "is of `kind: local`"),
        ("kind: local, master: yarn", "launcher.master", "is of `kind: spark-submit`"),
        ("py_files: [a.zip]", "launcher.py_files", "is of `kind: spark-submit`"),
        (f"{CLIENT}, submit_args: [--conf, a=b]", "launcher.submit_args[0]", "is said by launcher.conf"),
        (f"{CLIENT}, submit_args: ['--conf=a=b']", "launcher.submit_args[0]", "is said by launcher.conf"),
        (f"{CLIENT}, submit_args: [--kill, x]", "launcher.submit_args[0]", "does not go with a driver"),
        (f"{CLIENT}, conf: {{spark.master: yarn}}", "launcher.conf.spark.master", "is said by launcher.master"),
        (f"{CLIENT}, py_files: ['a.zip,b.zip']", "launcher.py_files[0]", "should match pattern"),
        (f"{CLIENT}, deploy_mode: remote", "launcher.deploy_mode", "must be 'client' or 'cluster'"),
        (f"{CLIENT}, pyfiles: [a]", "launcher.pyfiles", "did you mean `py_files`?"),
    ],
)
def test_what_does_not_go_together_is_said_with_its_place(
    write_config: Callable[..., Path], launcher: str, key: str, message: str
) -> None:
    config = write_config(
        text=(f"version: 1\njobs:\n  flights:\n    entry_point: a:b\n    store: state\n    launcher: {{{launcher}}}\n")
    )
    with pytest.raises(InvalidConfiguration) as caught:
        load_spec(config, environ={})
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{config}:6: jobs.flights.{key}")
    assert message in line


def test_the_kind_says_who_launches(write_config: Callable[..., Path]) -> None:
    for launcher, adapter in (("kind: local", LocalLauncher), (CLIENT, SparkSubmitLauncher)):
        config = write_config(extra=f"launcher: {{{launcher}}}\n")
        spec = load_spec(config, environ={})
        assert type(build_launcher(spec, spec.job("flights"))) is adapter


def test_spark_submit_is_looked_for_where_it_may_be(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    _, job = section(write_config, CLIENT)
    assert find_spark_submit(job).endswith("/pyspark/bin/spark-submit")
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    with pytest.raises(
        InvalidConfiguration, match=f"there is no spark-submit .{tmp_path}/bin/spark-submit.*SPARK_HOME"
    ):
        find_spark_submit(job)
    _, job = section(write_config, f"{CLIENT}, spark_submit: tools/bin/spark-submit")
    with pytest.raises(InvalidConfiguration, match=f"{tmp_path}/tools/bin/spark-submit"):
        find_spark_submit(job)


def test_secrets_of_spark_s_settings_are_in_no_log_and_no_repr(write_config: Callable[..., Path]) -> None:
    secret_key = "spark.hadoop.fs.s3a.secret.key"
    _, job = section(write_config, f"{CLIENT}, conf: {{{secret_key}: {SECRET}, spark.cores.max: 2022}}")
    assert redacted(job, f"denied for {SECRET} by 2022") == "denied for *** by 2022"
    assert SECRET not in repr(job.launcher)


# -- a driver of this machine -------------------------------------------------------------------------------------


@pytest.fixture
def make(write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Build a launcher of fake drivers; whatever it started is ended with the test."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    program = tmp_path / "spark" / "bin" / "spark-submit"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE_SUBMIT}" "$@"\n')
    program.chmod(0o755)
    made: list[SparkSubmitLauncher] = []

    def build(behaviour: str = "normal", launcher: str = CLIENT, extra: str = "") -> SparkSubmitLauncher:
        config, job = section(
            write_config,
            f"{launcher}, start_timeout_s: 60, stop_timeout_s: 60, spark_submit: '{program}', "
            f"conf: {{spark.hadoop.fs.s3a.secret.key: {SECRET}}}",
            f"options: {{behaviour: {behaviour}}}\n{extra}",
        )
        made.append(SparkSubmitLauncher(config, job))
        return made[-1]

    yield build
    for launcher in made:
        status = launcher._catalog.status()
        if status is not None and launcher._is_here(status):
            launcher.end_lost(status)
    elsewhere = tmp_path / "spark" / "driver.pid"
    if elsewhere.exists() and psutil.pid_exists(pid := int(elsewhere.read_text())):
        os.kill(pid, signal.SIGKILL)


def status_of(launcher: SparkSubmitLauncher) -> RunStatus:
    status = launcher._catalog.status()
    assert status is not None
    return status


def noted(launcher: SparkSubmitLauncher) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((launcher._config.parent / "spark" / "submitted.json").read_text())
    return found


def limits(launcher: SparkSubmitLauncher, **changes: float) -> SparkSubmitLauncher:
    """The same launcher with other limits."""
    section = launcher._job.launcher.model_copy(update=changes)
    launcher._job = launcher._job.model_copy(update={"launcher": section})
    return launcher


def test_a_secret_setting_goes_through_a_private_file_that_is_gone_once_the_driver_runs(make: Make) -> None:
    launcher = make()
    launched = launcher.start(cause="because")
    seen = noted(launcher)
    assert SECRET not in " ".join([*seen["options"], *seen["driver"]])
    assert f"spark.hadoop.fs.s3a.secret.key={SECRET}" in seen["properties"]
    assert seen["properties_mode"] == 0o600
    assert [file.name for file in Path(launched.log).parent.iterdir()] == [Path(launched.log).name]
    assert status_of(launcher).cause == "because"


def test_a_driver_of_this_machine_is_started_watched_and_stopped_like_a_local_one(make: Make) -> None:
    launcher = make()
    launched = launcher.start()
    assert (launched.term, launched.state) == (1, "running")
    assert os.getsid(launched.pid) not in (launched.pid, os.getsid(0)), "spark-submit's session is one of its own"
    assert launcher.is_alive(status_of(launcher)) == "alive"
    with pytest.raises(JobAlreadyRunning, match=f"process {launched.pid}"):
        launcher.start()
    stopped = launcher.stop()
    assert (stopped.term, stopped.state) == (1, "stopped")


def test_what_is_left_of_a_hanging_driver_is_killed_and_the_next_start_takes_over(make: Make) -> None:
    launcher = make("ignore-all")
    launched = launcher.start()
    lost = status_of(launcher)
    assert f"killed process {launched.pid}" in launcher.end_lost(lost)
    assert launcher.is_alive(lost) == "dead"
    assert launcher.start(StartOptions(takeover=True), cause="recovery").term == 2


def test_a_driver_that_ends_early_gives_its_exit_code_and_log_without_secrets(make: Make) -> None:
    launcher = make("exit", extra=f"storage_options: {{secret: {SECRET}}}\n")
    with pytest.raises(LaunchFailed) as caught:
        launcher.start()
    assert caught.value.exit_code == 5
    assert "no luck with ***" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_submission_that_is_refused_says_why_without_secrets(make: Make) -> None:
    launcher = make(launcher=f"{CLUSTER}, submit_args: [--refuse]")
    with pytest.raises(LaunchFailed) as caught:
        launcher.start()
    assert "no such queue" in str(caught.value)
    assert SECRET not in str(caught.value)
    assert caught.value.exit_code == 1


def test_another_run_that_begins_meanwhile_is_not_taken_for_the_one_that_was_started(
    make: Make, flights: JobRoot
) -> None:
    launcher = limits(make("never-starts"), start_timeout_s=3)
    flights.clock.at_ms = SYSTEM_CLOCK.now_ms()
    begun: list[int] = []

    def poll(seconds: float) -> None:
        if not begun:
            begun.append(flights.start())

    launcher._poll = poll
    with pytest.raises(LaunchFailed, match="did not run within 3 s and was ended"):
        launcher.start()
    assert status_of(launcher).term == begun[0] == 1


# -- a driver of the cluster --------------------------------------------------------------------------------------


def test_a_driver_of_the_cluster_is_known_by_its_heartbeat_alone(make: Make) -> None:
    """The submission has ended, and nothing of the driver's process can be seen: it runs once it says so, it is asked
    to stop through the store, and it has stopped once it says so."""
    launcher = make(launcher=CLUSTER)
    launched = launcher.start()
    assert (launched.host, launched.state) == ("node-7", "running")
    status = status_of(launcher)
    assert launcher.is_alive(status) == "unknown"
    assert psutil.pid_exists(status.pid), "though a process of that number is here"
    assert "application_1_0001" in Path(launched.log).read_text()
    with pytest.raises(JobAlreadyRunning, match="node-7"):
        launcher.start()
    said = launcher.end_lost(status)
    assert "out of reach; the new run fences it" in said
    assert psutil.pid_exists(status.pid), "whose process that is here nobody knows"
    assert launcher.stop().state == "stopped"


def test_a_container_that_has_this_host_s_name_is_not_on_this_host(
    write_config: Callable[..., Path], flights: JobRoot
) -> None:
    """Its process ids are its own: one of the same number here is somebody else's, and none says nothing."""
    flights.start()
    status = flights.catalog.status()
    assert status is not None
    for launcher, alive in ((CLIENT, "dead"), (CLUSTER, "unknown")):
        config, job = section(write_config, launcher)
        assert SparkSubmitLauncher(config, job).is_alive(status) == alive
        elsewhere = replace(status, process_space="another boot:1")
        assert SparkSubmitLauncher(config, job).is_alive(elsewhere) == "unknown"


def test_a_driver_of_the_cluster_that_fails_before_it_runs_fails_the_start(make: Make) -> None:
    """Its exit code is the cluster's; what it was is in its last heartbeat."""
    with pytest.raises(LaunchFailed, match="UserCodeError: no before it ran") as caught:
        make("fails-at-once", CLUSTER).start()
    assert caught.value.exit_code == 7


def test_a_driver_that_the_cluster_does_not_start_in_time_is_not_said_to_be_gone(make: Make) -> None:
    launcher = limits(make("never-starts", CLUSTER), start_timeout_s=0.5)
    with pytest.raises(LaunchFailed, match="the cluster, which may still start it"):
        launcher.start()


def test_a_driver_of_the_cluster_that_falls_silent_ends_the_wait_for_its_first_checkpoint(make: Make) -> None:
    """No process id tells; without this the wait would end with "the driver lives"."""
    launcher = make(
        "goes-silent", CLUSTER, "recovery: {heartbeat_timeout_s: 5}\ncheckpoint: {heartbeat_interval_s: 1}\n"
    )
    launched = launcher.start()
    with pytest.raises(LaunchFailed, match="its last heartbeat was at 20"):
        launcher.wait_for_checkpoint(launched, 120)


def test_a_driver_of_the_cluster_that_does_not_stop_is_left_to_its_host(make: Make) -> None:
    launcher = limits(make("ignore-all", CLUSTER), stop_timeout_s=0.5)
    launched = launcher.start()
    with pytest.raises(StopTimedOut, match=r"on node-7.*end the process on its host"):
        launcher.stop()
    assert asked_to_stop(launcher._catalog.root, launched.term), "nobody brings it back"


def test_the_last_words_of_a_driver_elsewhere_are_what_its_heartbeat_says(
    write_config: Callable[..., Path], flights: JobRoot
) -> None:
    config, job = section(write_config, f"{CLUSTER}, conf: {{spark.x.password: {SECRET}}}")
    launcher = SparkSubmitLauncher(config, job)
    flights.host = "node-7"
    flights.start()
    status = status_of(launcher)
    assert launcher.last_words(status) is None, "it has said nothing yet"
    flights.beat("failed", f"UserCodeError: no access with {SECRET}")
    words = launcher.last_words(status_of(launcher))
    assert words is not None
    assert words.log == "heartbeat of term 1, which ran on node-7"
    assert words.text == "failed: UserCodeError: no access with ***"
