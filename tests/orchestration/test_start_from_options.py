"""Where a run begins, as the file and the command line say it."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from job_roots import SECRET, FakeClock, JobRoot
from rich.console import Console
from typer.testing import CliRunner

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.driver.start_position import StartFrom
from state_runtime.maintenance.copy.objects import CopyProgress
from state_runtime.snapshot.claim import Claim, claim_root
from stillstate.orchestration.cli import app
from stillstate.orchestration.commands.begin_options import BeginOptions
from stillstate.orchestration.config.begin_at import NEWEST, BeginAt
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.config.start_options import AS_IT_IS, StartOptions
from stillstate.orchestration.launchers import Launched, LocalLauncher
from stillstate.orchestration.show.runs import LiveLine, PlainLines, copy_line

MINIMAL = "version: 1\njobs:\n  flights:\n    entry_point: a.b:c\n    store: state\n"


def section(*lines: str) -> str:
    return MINIMAL + "    start_from:\n" + "".join(f"      {line}\n" for line in lines)


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_the_section_says_place_mode_and_options(write_config: Callable[..., Path]) -> None:
    """Paths are relative to the file, options come from the environment, and are never shown."""
    text = section("place: ../old/state/trips@12", "mode: CLAIM", "storage_options: {secret: '${SECRET}'}")
    file = write_config(text=text)
    job = load_spec(file, environ={"SECRET": SECRET}).job("flights")
    start = NEWEST.start_from(job)
    assert start is not None
    assert start.place == str(file.parent.parent / "old" / "state" / "trips@12")
    assert start.mode == "CLAIM"
    assert dict(start.storage_options or {}) == {"secret": SECRET}
    assert SECRET not in f"{job!r} {start!r} {job.start_from!r}"


def test_without_options_those_of_the_job_serve(write_config: Callable[..., Path]) -> None:
    job = load_spec(write_config(text=section("place: s3://bucket/state/trips"))).job("flights")
    assert NEWEST.start_from(job) == StartFrom("s3://bucket/state/trips", "NO_CLAIM", None)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["mode: CLAIM"], "jobs.flights.start_from.place: this key is required"),
        (["place: x", "mode: LEGACY"], "must be 'NO_CLAIM' or 'CLAIM'"),
        (["place: x@y"], "'y' is not a snapshot id"),
        (["place: x", "mod: CLAIM"], "unknown key; did you mean `mode`?"),
        (["place: 's3://user:word@bucket/x'"], "holds credentials or parameters"),
    ],
)
def test_a_mistake_is_found_with_its_place(write_config: Callable[..., Path], lines: list[str], problem: str) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        load_spec(write_config(text=section(*lines)))
    assert problem in str(caught.value)
    assert "word" not in str(caught.value)


def test_the_command_line_goes_before_the_file(write_config: Callable[..., Path]) -> None:
    job = load_spec(write_config(text=section("place: /there/trips", "storage_options: {a: b}"))).job("flights")
    start = BeginAt("/elsewhere/trips@7", claim=True).start_from(job)
    assert start is not None
    assert (start.place, start.mode, dict(start.storage_options or {})) == ("/elsewhere/trips@7", "CLAIM", {"a": "b"})


def test_contradictions_are_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="give both"):
        BeginAt(claim=True)
    with pytest.raises(InvalidConfiguration, match="give one of them"):
        BeginAt("/there/trips", from_snapshot=4)
    result = call("run", "flights", "--claim")
    assert result.exit_code == 2
    assert "--claim says what becomes of the place" in result.output


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (["--from", "/there/trips@7", "--claim"], StartOptions(begin=BeginAt("/there/trips@7", claim=True))),
        (["--from", "s3://b/trips"], StartOptions(begin=BeginAt("s3://b/trips"))),
        (["--from-snapshot", "12"], StartOptions(begin=BeginAt(from_snapshot=12))),
        (["--from-snapshot", "@12"], StartOptions(begin=BeginAt(from_snapshot=12))),
        (["--from-snapshot", "before-2"], StartOptions(begin=BeginAt(from_snapshot="before-2"))),
        (["--takeover"], StartOptions(takeover=True)),
        (["--until-idle"], StartOptions(until_idle=True)),
        (["--allow-dropped-state"], StartOptions(allow_dropped_state=True)),
        (["--allow-drained"], StartOptions(allow_drained=True)),
        (["--accept-session-settings"], StartOptions(accept_session_settings=True)),
        (["--take-output"], StartOptions(take_output=True)),
        ([], AS_IT_IS),
    ],
)
@pytest.mark.parametrize("command", ["run", "start"])
def test_both_commands_pass_it_on_and_a_driver_is_told_it_in_the_same_words(
    write_config: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    given: list[str],
    asked: StartOptions,
) -> None:
    seen: list[StartOptions] = []

    class Result:
        state, last_snapshot_id, epochs = "finished", 1, 1

    def run_job(spec: Any, folder: Path, options: StartOptions, **_: Any) -> Any:
        seen.append(options)
        return Result()

    def start(self: LocalLauncher, options: StartOptions, **_: Any) -> Launched:
        seen.append(options)
        return Launched(job="flights", term=1, state="running", pid=1, host="h", log="log")

    monkeypatch.setattr("stillstate.orchestration.running.run.run_job", run_job)
    monkeypatch.setattr(LocalLauncher, "start", start)
    for words in (given, [*asked.always(), *asked.once()]):
        result = call(command, "flights", *words, "-c", str(write_config()))
        assert result.exit_code == 0, result.output
    assert seen == [asked, asked]


def test_a_driver_in_the_background_is_told_the_same(write_config: Callable[..., Path], tmp_path: Path) -> None:
    """The launcher's driver is a process of its own: what it was called with is in its log."""
    spec = load_spec(write_config())
    program = "import sys; print('called with', sys.argv[1:]); sys.exit(5)"
    launcher = LocalLauncher(spec.file, spec.job("flights"), command=(sys.executable, "-c", program))
    with pytest.raises(Exception, match=r"'--from', '/there/trips@7', '--claim'"):
        launcher.start(StartOptions(begin=BeginAt("/there/trips@7", claim=True)))
    with pytest.raises(Exception, match=r"'--from-snapshot', '12'"):
        launcher.start(StartOptions(begin=BeginAt(from_snapshot=12)))
    with pytest.raises(Exception, match=r"'--take-output'"):
        launcher.start(StartOptions(take_output=True))


def test_a_claimed_root_is_refused_before_spark_starts(write_config: Callable[..., Path], flights: JobRoot) -> None:
    config = str(write_config())
    flights.start()
    flights.checkpoint()
    claim_root(flights.catalog.root, Claim("trips", "uid", "/elsewhere/trips", 1))
    result = call("run", "flights", "-c", config)
    assert result.exit_code == 2
    assert "was claimed by job 'trips' (/elsewhere/trips)" in result.output


def test_a_copy_is_shown_while_it_goes_on(clock: FakeClock) -> None:
    progress = CopyProgress(12, 40, 1_300_000, 32_000_000)
    assert copy_line("flights", progress) == "flights  copying  12 of 40 objects  1.2 MiB of 30.5 MiB"
    out = io.StringIO()
    view = PlainLines(Console(file=out), "flights", clock)
    for done in range(1, 41):
        view.copying(CopyProgress(done, 40, done, 40))
        clock.advance_s(0.1)
    assert [line.split()[2] for line in out.getvalue().splitlines()] == ["1", "11", "21", "31", "40"]
    terminal = io.StringIO()
    live = LiveLine(Console(file=terminal, force_terminal=True, width=120), "flights")
    live.copying(progress)
    live.close()
    assert "12 of 40 objects" in terminal.getvalue()
    assert "━" in terminal.getvalue()


def test_run_and_start_have_the_same_options() -> None:
    """A job that runs in the background must be startable in every way in which it runs in the foreground."""
    commands = typer.main.get_group(app).commands
    options = {name: [(p.name, p.opts, p.help) for p in commands[name].params] for name in ("run", "start")}
    # Where the foreground's log goes is no way to run a job; the background's is the launcher's matter.
    of_the_log = [option for option in options["run"] if option[0] in ("log_file", "verbose")]
    assert len(of_the_log) == 2
    assert [option for option in options["run"] if option not in of_the_log] == options["start"]
    assert {f.name for f in dataclasses.fields(BeginOptions)} <= {name for name, *_ in options["run"]}
