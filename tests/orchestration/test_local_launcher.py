"""The local launcher, with real processes and real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from job_roots import SECRET, FakeClock, JobRoot

from state_runtime.base.errors import InvalidConfiguration, JobAlreadyRunning, JobNotFound
from state_runtime.base.process_space import process_space
from state_runtime.snapshot.control import pending_stop
from state_runtime.snapshot.term_files import RunStatus, write_status
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.config.start_options import StartOptions
from stillstate.orchestration.launchers import LaunchFailed, LocalLauncher, StopTimedOut
from stillstate.orchestration.launchers.log_files import LOGS_KEPT
from stillstate.orchestration.launchers.processes import process_of
from stillstate.orchestration.probes.look import Look
from stillstate.orchestration.recovery.health import Health
from stillstate.orchestration.recovery.observe import Observation
from stillstate.orchestration.running.run import _is_unwanted
from stillstate.orchestration.show.views import JobRow
from stillstate.orchestration.standby import RESTARTED

FAKE_DRIVER = str(Path(__file__).parent / "fake_driver.py")
Make = Callable[..., LocalLauncher]
UNSUPERVISED = "launcher: {start_timeout_s: 30, stop_timeout_s: 20, restarts: 0}\n"


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
            extra=("" if "launcher:" in extra else "launcher: {start_timeout_s: 30, stop_timeout_s: 20}\n")
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
        if status is not None:
            launcher.end_lost(status)


def test_start_returns_once_the_driver_runs_in_a_session_of_its_own(make: Make) -> None:
    launched = make().start()
    assert (launched.term, launched.state) == (1, "running")
    assert os.getsid(launched.pid) != os.getsid(0)
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
    status = launcher._catalog.status()
    assert status is not None
    second = launcher.start(StartOptions(takeover=True))
    assert second.term == 2
    assert "supervisor" in launcher.end_lost(status)
    assert not psutil.pid_exists(first.pid) or psutil.Process(first.pid).status() == psutil.STATUS_ZOMBIE


def test_a_killed_driver_is_dead_at_once_and_can_be_started_again(make: Make) -> None:
    """It is our child and nobody has collected its exit code: a zombie counts as dead."""
    launcher = make(extra=UNSUPERVISED)
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
    monkeypatch.setattr("stillstate.orchestration.launchers.through_store.TERMINATE_WAIT_S", 0.5)
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


def test_processes_of_containers_with_this_host_s_name_are_unknown_and_never_touched(
    make: Make, flights: JobRoot
) -> None:
    """Their ids are others' here, or nobody's: neither says that the run is dead."""
    flights.pid = 2**22 - 1
    flights.start()
    status = flights.catalog.status()
    assert status is not None
    launcher = make()
    for space, alive in (("another boot:1", "unknown"), (process_space(), "dead"), ("", "dead")):
        assert launcher.is_alive(replace(status, process_space=space)) == alive
    assert "out of reach" in launcher.end_lost(replace(status, process_space="another boot:1"))


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


# -- supervised ---------------------------------------------------------------------------------------------------


def status_of(launcher: LocalLauncher) -> RunStatus:
    status = launcher._catalog.status()
    assert status is not None
    return status


def test_a_killed_driver_is_brought_back_in_place_and_says_why(make: Make) -> None:
    launcher = make()
    first = launcher.start()
    os.kill(first.pid, signal.SIGKILL)
    eventually(lambda: status_of(launcher).term == 2 and status_of(launcher).state == "running")
    status = status_of(launcher)
    assert status.pid != first.pid
    assert "restarted by its supervisor after signal 9 (SIGKILL)" in status.cause
    assert launcher.is_alive(status) == "alive"
    assert "restart 1 of 3" in Path(first.log).read_text()


def test_while_its_supervisor_lives_a_dead_driver_is_restarting(make: Make) -> None:
    launcher = make()
    launched = launcher.start()
    status = status_of(launcher)
    psutil.Process(status.supervisor_pid).suspend()
    os.kill(launched.pid, signal.SIGKILL)
    eventually(lambda: launcher.is_alive(status) == "restarting")
    with pytest.raises(JobAlreadyRunning):
        launcher.start()
    assert "supervisor" in launcher.stop().how
    assert launcher.is_alive(status) == "dead"


def test_a_stop_is_not_undone_by_the_supervisor(make: Make) -> None:
    launcher = make()
    launcher.start()
    supervisor = psutil.Process(status_of(launcher).supervisor_pid)
    launcher.stop()
    eventually(lambda: has_ended(supervisor))
    assert (status_of(launcher).term, status_of(launcher).state) == (1, "stopped")


def test_a_stop_of_a_run_that_has_failed_is_not_undone_by_its_supervisor(make: Make) -> None:
    """It is over, and its supervisor is about to start the next one: a stop is a wish for the job."""
    launcher = make()
    launched = launcher.start()
    status = status_of(launcher)
    supervisor = psutil.Process(status.supervisor_pid)
    supervisor.suspend()
    os.kill(launched.pid, signal.SIGKILL)
    eventually(lambda: launcher.is_alive(status) == "restarting")
    write_status(launcher._catalog.root, replace(status, state="failed", message="it broke"))
    assert "supervisor" in launcher.stop().how
    eventually(lambda: has_ended(supervisor))
    assert pending_stop(launcher._catalog.root, 1) is not None, "the sensor must see that nobody wants it back"
    assert status_of(launcher).term == 1


@pytest.mark.parametrize("supervisor_pid", [7, 0])
def test_a_stop_goes_on_to_the_run_that_a_supervisor_has_started_meanwhile(
    make: Make, flights: JobRoot, supervisor_pid: int
) -> None:
    """Of another host, where no process can be ended from here. A run that somebody else has started is wanted."""
    launcher = make()
    flights.host = "elsewhere"
    flights.start()
    flights.beat(supervisor_pid=supervisor_pid)

    def poll(seconds: float) -> None:
        status = status_of(launcher)
        if status.term == 1:
            flights.start()
            flights.beat(supervisor_pid=supervisor_pid)
        elif pending_stop(flights.catalog.root, status.term) is not None:
            flights.beat("stopped")

    launcher._poll = poll
    stopped = launcher.stop()
    assert (stopped.term, stopped.state) == ((2, "stopped") if supervisor_pid else (1, "fenced"))


def test_a_restart_in_place_whose_run_was_asked_to_stop_meanwhile_does_not_begin(make: Make, flights: JobRoot) -> None:
    """Java takes seconds to start, in which no run hears anything. Whoever starts a stopped job by hand wants it."""
    flights.start()
    assert not _is_unwanted(flights.catalog, f"{RESTARTED} after signal 9")
    flights.beat("failed")
    make().stop()
    assert _is_unwanted(flights.catalog, f"{RESTARTED} after signal 9")
    assert not _is_unwanted(flights.catalog, "")
    assert not _is_unwanted(flights.catalog, "recovery of term 1, which was dead")


@pytest.mark.parametrize(
    ("kind", "code"), [("user-code", 7), ("corrupt", 5), ("unavailable", 4), ("refused", 4), ("", 1)]
)
def test_a_driver_that_failed_is_shown_with_the_exit_code_of_its_error(
    flights: JobRoot, clock: FakeClock, kind: str, code: int
) -> None:
    flights.start()
    flights.beat("failed", "it broke", error_kind=kind)
    status = flights.catalog.status()
    failed, stopped = Observation(status, Health("failed", "it broke")), Observation(status, Health("stopped", ""))
    assert JobRow.of("flights", Look(at_ms=clock.now_ms(), uid="uid", seen=failed)).exit_code == code
    assert JobRow.of("flights", Look(at_ms=clock.now_ms(), uid="uid", seen=stopped)).exit_code == 0


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_crash_loop_is_given_up_in_place_after_its_attempts(make: Make) -> None:
    launcher = make(extra="launcher: {start_timeout_s: 30, restarts: 1}\n")
    first = launcher.start()
    supervisor = psutil.Process(status_of(launcher).supervisor_pid)
    os.kill(first.pid, signal.SIGKILL)
    eventually(lambda: status_of(launcher).term == 2 and status_of(launcher).state == "running")
    os.kill(status_of(launcher).pid, signal.SIGKILL)
    eventually(lambda: has_ended(supervisor))
    assert status_of(launcher).term == 2
    assert launcher.is_alive(status_of(launcher)) == "dead"


def test_an_error_that_cannot_pass_is_not_tried_in_place(make: Make) -> None:
    launcher = make("fails")
    launched = launcher.start()
    supervisor = psutil.Process(status_of(launcher).supervisor_pid)
    os.kill(launched.pid, signal.SIGTERM)  # here: fail now
    eventually(lambda: has_ended(supervisor))
    assert status_of(launcher).term == 1
    with pytest.raises(LaunchFailed) as caught:
        launcher.wait_for_checkpoint(launched, 30)
    assert caught.value.exit_code == 7
    assert "it broke with ***" in str(caught.value)


def test_ending_a_lost_driver_ends_its_supervisor_first(make: Make) -> None:
    """Else the driver that was just ended would come back, beside the one that is started for it."""
    launcher = make("ignore-all")
    launcher.start()
    status = status_of(launcher)
    assert "and its supervisor" in launcher.end_lost(status)
    assert launcher.is_alive(status) == "dead"
    assert status_of(launcher).term == 1


def test_waiting_ends_at_the_first_checkpoint_at_a_quiet_source_or_at_the_limit(make: Make) -> None:
    launcher = make("checkpoints", UNSUPERVISED)
    first = launcher.wait_for_checkpoint(launcher.start(), 30)
    made = launcher._catalog.manifest(2)
    assert (first.snapshot_id, first.at_ms, first.progress) == (2, made.created_at_ms, made.progress)
    launcher.stop()
    launcher = make("quiet", UNSUPERVISED)
    first = launcher.wait_for_checkpoint(launcher.start(StartOptions(takeover=True)), 30)
    assert (first.snapshot_id, "quiet" in first.how) == (None, True)
    launcher.stop()
    launcher = make("normal", UNSUPERVISED)
    first = launcher.wait_for_checkpoint(launcher.start(StartOptions(takeover=True)), 0.3)
    assert "the driver lives" in first.how


def test_a_driver_that_dies_before_its_first_checkpoint_fails_the_wait(make: Make) -> None:
    launcher = make(extra=UNSUPERVISED)
    launched = launcher.start()
    os.kill(launched.pid, signal.SIGKILL)
    with pytest.raises(LaunchFailed, match="before its first checkpoint"):
        launcher.wait_for_checkpoint(launched, 30)


def test_the_last_words_of_a_run_elsewhere_are_not_looked_for_here(make: Make, flights: JobRoot) -> None:
    launcher = make()
    launcher.start()
    assert launcher.last_words(status_of(launcher)) is not None
    flights.host = "elsewhere"
    flights.start()
    assert launcher.last_words(status_of(launcher)) is None
