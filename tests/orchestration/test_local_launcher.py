"""The local launcher, with real processes and real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from job_roots import SECRET, JobRoot

from orchestration.config.spec import load_spec
from orchestration.launchers import LaunchFailed, LocalLauncher, StopTimedOut
from orchestration.launchers.local import process_of
from orchestration.launchers.log_files import LOGS_KEPT
from state_runtime.base.errors import InvalidConfiguration, JobAlreadyRunning, JobNotFound
from state_runtime.snapshot.control import pending_stop

FAKE_DRIVER = str(Path(__file__).parent / "fake_driver.py")
Make = Callable[..., LocalLauncher]


def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        os.sched_yield()


def with_launcher(launcher: LocalLauncher, **changes: float) -> LocalLauncher:
    """The same launcher with other limits."""
    limits = launcher._job.launcher.model_copy(update=changes)
    launcher._job = launcher._job.model_copy(update={"launcher": limits})
    return launcher


@pytest.fixture
def make(write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Build a launcher of fake drivers; whatever it started is ended with the test."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    made: list[LocalLauncher] = []

    def build(behaviour: str = "normal", extra: str = "") -> LocalLauncher:
        config = write_config(
            extra="launcher: {start_timeout_s: 30, stop_timeout_s: 20}\n"
            + f"options: {{behaviour: {behaviour}}}\nstorage_options: {{secret: {SECRET}}}\n"
            + extra
        )
        job = load_spec(config).job("flights")
        # The local store takes no options; the secret only has to be known to the launcher.
        launcher = LocalLauncher(config, job, command=(sys.executable, FAKE_DRIVER))
        made.append(launcher)
        return launcher

    yield build
    for launcher in made:
        status = launcher._catalog.status()
        process = None if status is None else process_of(status, "flights")
        if process is not None:
            process.kill()
            process.wait(10)


def test_start_returns_once_the_driver_runs_in_a_session_of_its_own(make: Make) -> None:
    launched = make().start()
    assert (launched.term, launched.state) == (1, "running")
    assert os.getsid(launched.pid) == launched.pid
    assert "fake driver: normal" in Path(launched.log).read_text()
    assert Path(launched.log).stat().st_mode & 0o777 == 0o600


def test_stop_ends_the_run_after_its_epoch_and_says_how(make: Make) -> None:
    launcher = make()
    launcher.start()
    stopped = launcher.stop()
    assert (stopped.term, stopped.state) == (1, "stopped")
    assert launcher.stop().how == "it was already over: stopped"


def test_a_second_start_is_turned_away_and_a_takeover_is_not(make: Make) -> None:
    launcher = make()
    first = launcher.start()
    with pytest.raises(JobAlreadyRunning, match=f"process {first.pid}"):
        launcher.start()
    second = launcher.start(takeover=True)
    assert second.term == 2
    os.kill(first.pid, signal.SIGKILL)


def test_a_killed_driver_is_dead_at_once_and_can_be_started_again(make: Make) -> None:
    """It is our child and nobody has collected its exit code: a zombie counts as dead."""
    launcher = make()
    launched = launcher.start()
    status = launcher._catalog.status()
    assert status is not None
    assert launcher.is_alive(status) == "alive"
    os.kill(launched.pid, signal.SIGKILL)
    eventually(lambda: launcher.is_alive(status) == "dead")
    assert launcher.start().term == 2


def test_a_driver_that_ends_early_gives_its_exit_code_and_log_without_secrets(make: Make) -> None:
    with pytest.raises(LaunchFailed) as caught:
        make("exit").start()
    assert caught.value.exit_code == 5
    assert "no luck with ***" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_driver_that_never_starts_is_ended_and_leaves_nothing(make: Make) -> None:
    launcher = with_launcher(make("never-starts"), start_timeout_s=1.0)
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(LaunchFailed, match="did not run within 1 s"):
        launcher.start()
    assert {child.pid for child in psutil.Process().children()} <= before


def test_a_job_that_finishes_at_once_counts_as_started(make: Make) -> None:
    launched = make("finishes").start()
    assert launched.state == "finished"


def test_stop_falls_back_to_sigterm_for_a_driver_that_does_not_look(make: Make) -> None:
    launcher = with_launcher(make("ignores-requests"), stop_timeout_s=0.5)
    launcher.start()
    stopped = launcher.stop()
    assert stopped.state == "stopped"
    assert "SIGTERM" in stopped.how


def test_a_driver_that_ignores_everything_is_a_clear_error(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestration.launchers.local.TERMINATE_WAIT_S", 0.5)
    launcher = with_launcher(make("ignore-all"), stop_timeout_s=0.5)
    launched = launcher.start()
    with pytest.raises(StopTimedOut, match=f"kill -9 {launched.pid}"):
        launcher.stop()


def test_stopping_a_job_that_never_ran_or_just_died(make: Make, flights: JobRoot) -> None:
    launcher = make()
    with pytest.raises(JobNotFound):
        launcher.stop()
    term = flights.start()
    assert "already gone" in launcher.stop().how
    assert pending_stop(flights.catalog.root, term) is not None, "the sensor must see that nobody wants it back"


def test_processes_of_other_hosts_are_unknown_and_never_touched(make: Make, flights: JobRoot) -> None:
    flights.host, flights.pid = "elsewhere", os.getpid()
    flights.start()
    status = flights.catalog.status()
    assert status is not None
    launcher = make()
    assert launcher.is_alive(status) == "unknown"
    assert "elsewhere" in launcher.end_lost(status)


def test_a_process_id_that_was_given_to_another_program_is_not_our_driver(make: Make, flights: JobRoot) -> None:
    """Process ids are used again: a stranger must be neither taken for the driver nor killed."""
    launcher = make()
    stranger = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        flights.pid = stranger.pid
        flights.start()  # the fake clock stands in 2023: the process was born long after
        status = flights.catalog.status()
        assert status is not None
        assert launcher.is_alive(status) == "dead"
        flights.clock.at_ms = time.time_ns() // 1_000_000
        flights.start()
        status = flights.catalog.status()
        assert status is not None
        assert launcher.is_alive(status) == "alive", "its age fits; only its command line tells"
        assert process_of(status, "flights") is None
        assert "gone" in launcher.end_lost(status)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_what_is_left_of_a_hanging_driver_is_killed(make: Make) -> None:
    launcher = make("ignore-all")
    launched = launcher.start()
    status = launcher._catalog.status()
    assert status is not None
    assert f"killed process {launched.pid}" in launcher.end_lost(status)
    assert launcher.is_alive(status) == "dead"


def test_logs_are_bounded_and_foreign_files_stay(make: Make) -> None:
    launcher = make("finishes")
    folder = Path(launcher._job.launcher.log_dir)
    folder.mkdir()
    for number in range(LOGS_KEPT + 5):
        (folder / f"flights.20130101T000000.{number:08x}.log").touch()
    (folder / "flights.notes.log").touch()
    (folder / "flights-2.20130101T000000.00000000.log").touch()
    launched = launcher.start()
    names = {path.name for path in folder.iterdir()}
    assert Path(launched.log).name in names
    assert len(names) == LOGS_KEPT + 2
    assert {"flights.notes.log", "flights-2.20130101T000000.00000000.log"} <= names


def test_an_unwritable_log_folder_is_a_configuration_error(make: Make) -> None:
    launcher = make()
    Path(launcher._job.launcher.log_dir).write_text("a file")
    with pytest.raises(InvalidConfiguration, match="log_dir"):
        launcher.start()
