"""The command line: output, JSON, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from black_holes import black_hole
from house import write_house
from job_roots import SECRET, FakeClock, JobRoot
from typer.testing import CliRunner, Result

from state_runtime.base.errors import JobAlreadyRunning
from state_runtime.base.settings import Backend, MaterializationMode, VerifyLevel
from state_runtime.snapshot.manifest import SnapshotFormat
from state_runtime.snapshot.savepoint_record import SavepointFormat, SavepointTrigger
from stillstate.orchestration.cli import SECTIONS, app
from stillstate.orchestration.config.start_options import StartOptions
from stillstate.orchestration.launchers import Launched, LaunchFailed, LocalLauncher, Stopped
from stillstate.orchestration.show.views import JobRow, jobs_table
from stillstate.orchestration.text import time_text

COMMANDS = ["run", "start", "stop", "jobs", "snapshots", "describe", "query", "materialize", "savepoint", "savepoints"]
COMMANDS += ["migrate", "rescale", "fork", "epochs", "explain"]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"Example: stillstate {command}" in result.output
    assert "--json" in result.output
    assert "--config" in result.output


def test_the_main_help_lists_commands_and_exit_codes() -> None:
    text = call("--help").output
    assert all(command in text for command in COMMANDS)
    assert "  3  fenced" in text
    assert "  7  the job's own code raised" in text


def test_the_main_help_shows_each_command_once_with_a_text_that_is_not_cut() -> None:
    """A command that no section names would be there and not be found."""
    named = [name for names in SECTIONS.values() for name in names]
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert sorted(named) == sorted(commands)
    lines = [line for line in call("--help").output.splitlines() if line.split() and line.split()[0] in commands]
    assert [line.split()[0] for line in lines] == named
    assert not [line for line in lines if line.endswith("...") or len(line.split()) < 3]


@pytest.mark.parametrize(
    ("command", "choices"),
    [
        (("materialize", "flights", "--mode"), MaterializationMode),
        (("savepoint", "flights", "--format"), SavepointFormat),
        (("savepoint", "flights", "--trigger"), SavepointTrigger),
        (("migrate", "flights", "--backend"), Backend),
        (("migrate", "flights", "--verify"), VerifyLevel),
        (("verify", "flights", "--level"), VerifyLevel),
        (("convert", "flights", "there", "--to"), SnapshotFormat),
    ],
)
def test_an_option_takes_the_words_of_the_engine_and_no_others(command: tuple[str, ...], choices: Any) -> None:
    """The engine's `Literal` is the only list of them."""
    refused = call(*command, "other")
    assert refused.exit_code == 2
    assert f"'other' is not one of {', '.join(map(repr, get_args(choices)))}" in " ".join(refused.output.split())


def test_jobs_shows_what_runs(write_config: Callable[..., Path], flights: JobRoot) -> None:
    config = str(write_config("flights", "trains"))
    flights.start()
    flights.checkpoint()
    rows = {row["job"]: row for row in json.loads(call("jobs", "--json", "-c", config).stdout)}
    assert rows["trains"]["health"] == "never-started"
    assert rows["flights"]["health"] == "dead"
    assert rows["flights"]["term"] == 1
    assert rows["flights"]["last_snapshot_id"] == 2
    assert rows["flights"]["rows_per_s"] == 200
    assert (rows["flights"]["parallelism"], rows["trains"]["parallelism"]) == (4, None), "of the newest snapshot"
    flights.beat(parallelism=6)
    rows = {row["job"]: row for row in json.loads(call("jobs", "--json", "-c", config).stdout)}
    assert rows["flights"]["parallelism"] == 6, "of the run"
    table = call("jobs", "-c", config)
    assert table.exit_code == 0
    assert "never-started" in table.stdout
    assert "4,321" in table.stdout


def test_jobs_shows_the_others_and_fails_when_one_cannot_be_read(
    write_config: Callable[..., Path], flights: JobRoot
) -> None:
    config = str(write_config("flights", "trains"))
    flights.start()
    flights.checkpoint()
    flights.damage(2)
    result = call("jobs", "--json", "-c", config)
    assert result.exit_code == 5
    rows = {row["job"]: row for row in json.loads(result.stdout)}
    assert rows["flights"]["health"] == "unreadable"
    assert rows["flights"]["term"] == 1, "how its driver is, is known all the same"
    assert rows["trains"]["health"] == "never-started"


def test_jobs_looks_as_sensors_do_so_that_a_store_that_hangs_costs_its_own_deadline_only(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the retries of a run, one hung store kept the table away for two minutes; the ages were of two minutes ago."""
    monkeypatch.setattr("stillstate.orchestration.commands.jobs.SYSTEM_CLOCK", clock)
    with black_hole() as hole:
        house = write_house(
            tmp_path, clock, jobs=4, hanging=1, refused=0, hole=hole, closed="", extra="observation: {timeout_s: 1}"
        )
        clock.advance_s(7)
        result = call("jobs", "--json", "-c", str(house.file))
    rows = {row["job"]: row for row in json.loads(result.stdout)}
    assert result.exit_code == 4
    (hanging,) = house.hanging
    assert rows[hanging]["health"] == "not seen"
    # Whose patience ends first, ours or the client's, is the machine's choice.
    assert re.search("has not answered within 1 s|Read timeout", rows[hanging]["reason"])
    seen = [rows[name] for name in house.healthy]
    assert {(row["seen_at_ms"], row["last_snapshot_age_s"]) for row in seen} == {(clock.now_ms(), 7.0)}
    table = jobs_table([JobRow(**row) for row in rows.values()])
    assert table.caption == f"looked at {time_text(clock.now_ms())}", "an age says when it was one"


def test_snapshots_are_listed_newest_first_damaged_ones_included(
    write_config: Callable[..., Path], flights: JobRoot
) -> None:
    config = str(write_config())
    flights.start()
    for _ in range(3):
        flights.checkpoint()
    flights.damage(3)
    rows = json.loads(call("snapshots", "--json", "-c", config).stdout)
    assert [(row["snapshot_id"], row["kind"]) for row in rows] == [
        (4, "checkpoint"),
        (3, "corrupt"),
        (2, "checkpoint"),
        (1, "fencing"),
    ]
    assert "damaged" in rows[1]["error"]
    assert len(json.loads(call("snapshots", "flights", "-n", "2", "--json", "-c", config).stdout)) == 2
    assert "fencing" in call("snapshots", "flights", "-c", config).stdout


def test_describe_shows_every_part_of_a_snapshot(write_config: Callable[..., Path], flights: JobRoot) -> None:
    config = str(write_config())
    flights.start()
    flights.checkpoint()
    data = json.loads(call("describe", "latest", "--json", "-c", config).stdout)
    assert data["snapshot_id"] == 2
    assert data["operators"][0]["uid"] == "plane-day"
    assert data["log_bytes"] == 1024
    text = call("describe", "2", "--job", "flights", "-c", config).stdout
    for part in (
        "plane-day",
        "legs",
        "tailnum STRING",
        "after batch 2",
        "changelog/x/2.seg",
        "tables/plane-day",
        "phase process",
        "checkpoint_ms",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["describe", "99"], 2, "MissingSnapshot"),
        (["describe", "../../etc"], 2, "MissingSnapshot"),
        (["describe", "latest", "--job", "nope"], 2, "JobNotFound"),
        (["snapshots", "nope"], 2, "JobNotFound"),
        (["start", "nope"], 2, "JobNotFound"),
        (["stop", "flights"], 2, "JobNotFound"),
        (["run", "flights"], 2, "InvalidConfiguration"),
        (["materialize", "nope"], 2, "JobNotFound"),
        (["materialize", "trains"], 2, "JobNotFound"),
    ],
)
def test_errors_have_an_exit_code_and_go_to_stderr(
    write_config: Callable[..., Path], flights: JobRoot, arguments: list[str], code: int, kind: str
) -> None:
    config = str(write_config("flights", "trains") if "trains" in arguments else write_config())
    if arguments[0] != "stop":
        flights.start()
    plain = call(*arguments, "-c", config)
    assert plain.exit_code == code, plain.output
    assert plain.stdout == ""
    assert plain.stderr.startswith(f"{kind}: ")
    as_json = call(*arguments, "--json", "-c", config)
    assert json.loads(as_json.stderr)["error"]["type"] == kind
    assert as_json.exit_code == code


def test_reading_a_job_that_never_started_says_so(write_config: Callable[..., Path]) -> None:
    result = call("snapshots", "-c", str(write_config()))
    assert result.exit_code == 2
    assert "JobNotFound" in result.stderr


def test_with_several_jobs_one_must_be_named(write_config: Callable[..., Path]) -> None:
    result = call("snapshots", "-c", str(write_config("flights", "trains")))
    assert result.exit_code == 2
    assert "flights, trains" in result.stderr


def test_a_bad_configuration_lists_every_problem(write_config: Callable[..., Path]) -> None:
    result = call("jobs", "-c", str(write_config(text="version: 2\njobs: {a: {storee: x}}\n")))
    assert result.exit_code == 2
    assert "stillstate.yaml:1: version: must be 1" in result.stderr
    assert "did you mean `store`" in result.stderr


@pytest.mark.parametrize(
    ("command", "answer", "code", "shown"),
    [
        (
            "start",
            Launched(job="flights", term=2, state="running", pid=42, host="h", log="/x.log"),
            0,
            "term 2, process 42",
        ),
        ("start", JobAlreadyRunning("it runs"), 3, "JobAlreadyRunning: it runs"),
        ("start", LaunchFailed("it ended", 7), 7, "LaunchFailed: it ended"),
        ("stop", Stopped("flights", 2, "stopped", "its run ended: stopped"), 0, "its run ended"),
    ],
)
def test_start_and_stop_pass_on_what_the_launcher_says(
    write_config: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    answer: Any,
    code: int,
    shown: str,
) -> None:
    def scripted(self: LocalLauncher, *_: StartOptions) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(LocalLauncher, command, scripted)
    config = str(write_config())
    result = call(command, "flights", "-c", config)
    assert result.exit_code == code
    assert shown in result.output
    if code == 0:
        assert json.loads(call(command, "flights", "--json", "-c", config).stdout)["term"] == 2


def test_no_secret_is_ever_printed(write_config: Callable[..., Path], flights: JobRoot) -> None:
    config = str(write_config(extra=f"storage_options: {{key: {SECRET}}}"))
    flights.start()
    flights.checkpoint()
    for arguments in (["jobs"], ["snapshots"], ["describe", "latest"], ["describe", "77"], ["run", "flights"]):
        for extra in ([], ["--json"]):
            assert SECRET not in call(*arguments, *extra, "-c", config).output


def test_reading_commands_start_without_spark_or_dagster(write_config: Callable[..., Path], flights: JobRoot) -> None:
    """They are typed while people wait."""
    config = str(write_config())
    flights.start()
    code = (
        "import sys\n"
        "from stillstate.orchestration.cli import app\n"
        f"for arguments in (['jobs'], ['snapshots'], ['describe', 'latest'], ['epochs']):\n"
        f"    app([*arguments, '--json', '-c', {config!r}], standalone_mode=False)\n"
        "print([m for m in ('pyspark', 'dagster', 'pandas', 'pyarrow') if m in sys.modules], file=sys.stderr)\n"
    )
    project = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": project},
    )
    assert done.stderr.strip() == "[]"
    assert done.returncode == 0


@pytest.mark.parametrize(
    "arguments", [["snapshots", "--json"], ["snapshots"], ["jobs"], ["--help"], ["describe", "latest"]]
)
def test_a_reader_that_has_seen_enough_ends_a_command_quietly(
    write_config: Callable[..., Path], flights: JobRoot, arguments: list[str]
) -> None:
    """`stillstate snapshots | head` is no error that anybody wants to read about."""
    config = str(write_config())
    flights.start()
    flights.checkpoint()
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "stillstate.orchestration.cli",
            *arguments,
            *([] if "--help" in arguments else ["-c", config]),
        ],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == (1 if "--help" in arguments else 141)  # help is printed by the library of the commands


def test_a_connection_that_breaks_is_no_reader_that_is_gone(
    write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of a store must never end a command as if all were well."""

    def broken(*_: object) -> None:
        raise BrokenPipeError("the store's connection")

    monkeypatch.setattr("stillstate.orchestration.commands.snapshots.catalog_of", broken)
    result = call("snapshots", "-c", str(write_config()))
    assert isinstance(result.exception, BrokenPipeError)


def test_jobs_shows_how_far_a_restore_is(
    write_config: Callable[..., Path], flights: JobRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore of a large state takes a while, and a job that shows nothing seems to hang."""
    monkeypatch.setattr("stillstate.orchestration.commands.jobs.SYSTEM_CLOCK", flights.clock)
    flights.pid, config = os.getpid(), str(write_config())
    flights.start()
    flights.beat(restoring=(3, 8))
    (row,) = json.loads(call("jobs", "--json", "-c", config).stdout)
    assert (row["restored"], row["restoring"]) == (3, 8)
    monkeypatch.setattr("stillstate.orchestration.launchers.local.LocalLauncher.is_alive", lambda *_: "alive")
    assert "restoring 3 of 8 shards" in call("jobs", "-c", config).stdout
    flights.beat()
    assert "restoring" not in call("jobs", "-c", config).stdout
