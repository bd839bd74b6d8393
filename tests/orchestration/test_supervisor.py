"""The process beside a driver: what it starts again, and what it leaves to others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from state_runtime.base.errors import MissingJava
from stillstate.orchestration import supervisor
from stillstate.orchestration.running import prepare
from stillstate.orchestration.standby import SETTLED_S
from stillstate.orchestration.supervisor import Death, Life, _beside, decide_restart, restart_wait_s, supervise

ROOT = Path(__file__).resolve().parents[2]
LOST = Life(progress_before=7, progress=7, lived_s=1.0, is_stop_asked=False)


@pytest.mark.parametrize("code", [0, 2, 3, 5, 6, 7, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP])
def test_what_cannot_pass_or_was_asked_for_is_no_death(code: int) -> None:
    assert decide_restart(Death(code), LOST, 0, 3) is None


@pytest.mark.parametrize("code", [1, 4, -signal.SIGKILL, -signal.SIGSEGV, 137])
def test_a_death_is_followed_by_a_restart(code: int) -> None:
    assert decide_restart(Death(code), LOST, 0, 3) == 1


def test_a_stop_that_was_asked_for_is_not_undone() -> None:
    asked = Life(progress_before=7, progress=7, lived_s=1.0, is_stop_asked=True)
    assert decide_restart(Death(-signal.SIGKILL), asked, 0, 3) is None


def test_attempts_in_a_row_are_bounded_and_progress_begins_a_new_row() -> None:
    death = Death(-signal.SIGKILL)
    assert [decide_restart(death, LOST, tried, 3) for tried in range(5)] == [1, 2, 3, None, None]
    assert decide_restart(death, Life(7, 8, 1.0, False), 3, 3) == 1
    assert decide_restart(death, Life(7, 7, SETTLED_S, False), 3, 3) == 1


def test_the_first_restart_is_at_once_and_later_ones_wait_longer() -> None:
    assert [restart_wait_s(n) for n in (1, 2, 3, 4, 40)] == [0, 2, 4, 8, 30]


class Driver:
    """A process that ends as the test says."""

    pid = 7

    def __init__(self, code: int) -> None:
        self._code = code

    def wait(self) -> int:
        return self._code


def play(
    codes: list[int], look: Callable[[], tuple[int | None, bool]] = lambda: (7, False), ends_in: int = 99
) -> tuple[int, list[str]]:
    """Drivers that end one after the other; the supervisor's exit code, and with what causes it started them."""
    left, causes, waits = list(codes), [], []

    def start(cause: str) -> Any:
        causes.append(cause)
        return Driver(left.pop(0))

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) > ends_in

    code = supervise(start, look, 3, cause="by hand", wait=wait, monotonic_s=lambda: 0.0, say=lambda line: None)
    return code, causes


def test_a_killed_driver_is_started_again_with_its_cause() -> None:
    code, causes = play([-signal.SIGKILL, 0])
    assert code == 0
    assert causes == ["by hand", "restarted by its supervisor after signal 9 (SIGKILL) (restart 1 of 3 in a row)"]


def test_a_crash_loop_ends_with_the_drivers_own_exit_code() -> None:
    assert play([1, 1, 1, 1]) == (
        1,
        ["by hand", *[f"restarted by its supervisor after exit code 1 (restart {n} of 3 in a row)" for n in (1, 2, 3)]],
    )
    assert play([-signal.SIGKILL] * 4)[0] == 137


def test_checkpoints_in_between_make_a_crash_loop_a_series_of_deaths() -> None:
    progress = iter(range(100))
    code, causes = play([1] * 8 + [7], look=lambda: (next(progress), False))
    assert (code, len(causes)) == (7, 9)


def test_a_root_that_cannot_be_read_is_no_progress() -> None:
    """Else an unreachable store would make the row endless."""
    # From the third death on a second look follows, after the wait.
    seen = iter([(progress, False) for progress in (None, 7, None, None, 7, 7, None, None)])
    assert len(play([1] * 6, look=lambda: next(seen))[1]) <= 5


def test_a_supervisor_that_is_asked_to_end_starts_nothing() -> None:
    assert len(play([-signal.SIGKILL, 0], ends_in=0)[1]) == 1
    assert len(play([-signal.SIGKILL, 0], ends_in=1)[1]) == 1


def test_a_stop_that_is_asked_for_while_a_restart_waits_holds() -> None:
    """The run that died is over, so nobody else would obey it."""
    seen = iter([(7, False), (7, False), (7, True)])
    code, causes = play([1, 1, 0], look=lambda: next(seen))
    assert (code, len(causes)) == (1, 2)


@pytest.mark.parametrize("has_taken", [True, False])
def test_a_first_start_with_options_of_its_own_is_followed_only_if_it_had_taken_the_job(has_taken: bool) -> None:
    left, asked = [-signal.SIGKILL, -signal.SIGKILL, 0], []

    def start(cause: str) -> Any:
        return Driver(left.pop(0))

    def may_go_on(pid: int) -> bool:
        asked.append(pid)
        return has_taken

    code = supervise(
        start,
        lambda: (7, False),
        3,
        cause="",
        wait=lambda seconds: False,
        monotonic_s=lambda: 0.0,
        say=lambda line: None,
        may_go_on=may_go_on,
    )
    assert code == (0 if has_taken else 128 + signal.SIGKILL)
    assert asked == [Driver.pid]  # of the first one only


def test_a_restart_does_not_go_back_again(tmp_path: Path) -> None:
    """A real supervisor: its first driver gets `--from-snapshot`, dies when it has taken the job, and the second does
    not get it."""
    config = tmp_path / "stillstate.yaml"
    config.write_text("version: 1\njobs:\n  flights: {entry_point: a:b, store: store}\n")
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import json, os, signal, sys\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests' / 'orchestration')!r}]\n"
        f"told = {str(tmp_path / 'told')!r}\n"
        "with open(told, 'a') as file:\n"
        "    file.write(json.dumps(sys.argv[1:]) + '\\n')\n"
        "if '--from-snapshot' in sys.argv:\n"
        "    from pathlib import Path\n"
        "    from job_roots import FakeClock, JobRoot\n"
        f"    root = JobRoot(Path({str(tmp_path / 'store')!r}), 'flights', FakeClock(), pid=os.getpid())\n"
        "    root.start()\n"
        "    root.beat()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ours = [sys.executable, "-m", "stillstate.orchestration.supervisor", str(config), "flights", "3", "false"]
    ours += ["--from-snapshot", "2", "--"]
    ended = subprocess.run(
        [*ours, sys.executable, str(driver), "run", "flights"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert told == [["run", "flights", "--from-snapshot", "2"], ["run", "flights"]]


@pytest.fixture
def prepares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration of a job with a checkpoint; whoever prepares the host writes its process id and waits."""
    config = tmp_path / "stillstate.yaml"
    config.write_text("version: 1\njobs:\n  flights: {entry_point: a:b, store: store}\n")
    os.mkfifo(tmp_path / "made")
    code = f"import os, signal; open({str(tmp_path / 'made')!r}, 'w').write(str(os.getpid())); signal.pause()"
    monkeypatch.setattr(supervisor, "PREPARE", (sys.executable, "-c", code))
    monkeypatch.setattr(supervisor, "_look", lambda *_: (7, False))
    monkeypatch.setattr(prepare, "is_wanted_by_itself", lambda: True)
    return config


def test_a_supervisor_prepares_the_host_behind_a_checkpoint_and_takes_it_along(prepares: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """What it began ends with it: nobody would look after it."""
    looks = iter([(None, False), (0, False), (7, False)])
    monkeypatch.setattr(supervisor, "_look", lambda *_: next(looks))
    said: list[str] = []
    began: list[int] = []

    def wait(seconds: float) -> bool:
        if not said:
            return False  # it waits for a checkpoint
        began.append(int((prepares.parent / "made").read_text()))  # a pipe: until the process writes
        return True  # the supervisor ends

    _beside(str(prepares), "flights", said.append, wait)
    assert next(looks, None) is None
    assert said == ["prepares this host, so that drivers start faster: once, with low priority (launcher.prepare)"]
    assert not psutil.pid_exists(began[0])


@pytest.mark.parametrize("why", ["a setting", "it is done", "no Java"])
def test_a_host_is_not_prepared_where_nobody_wants_it(
    prepares: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def no_java() -> bool:
        raise MissingJava("no Java")

    if why == "a setting":
        prepares.write_text(prepares.read_text().replace("store: store", "store: store, launcher: {prepare: false}"))
    else:
        monkeypatch.setattr(prepare, "is_wanted_by_itself", (lambda: False) if why == "it is done" else no_java)
    said: list[str] = []
    monkeypatch.setattr(supervisor.subprocess, "Popen", lambda *_, **__: pytest.fail("nobody wants it"))
    _beside(str(prepares), "flights", said.append, lambda seconds: False)
    assert said == (["this host is not prepared: no Java"] if why == "no Java" else [])
