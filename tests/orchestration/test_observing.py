"""One look at a job: the heartbeat on the store and the process on this host, read one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from dagster_world import FakeLauncher
from job_roots import NO_SUCH_PID, FakeClock, JobRoot

from state_runtime.base.process_space import process_space
from state_runtime.snapshot.term_files import RunStatus
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.launchers import Launcher
from stillstate.orchestration.recovery.observe import Observation, observe


def look(root: JobRoot, launcher: Launcher) -> Observation:
    file = root.store_path.parent / "stillstate.yaml"
    file.write_text("version: 1\njobs: {flights: {entry_point: 'nowhere.job:build', store: state}}\n")
    return observe(load_spec(file).job("flights"), root.catalog, launcher, root.clock)


@pytest.mark.parametrize(
    ("said", "verdict"), [(process_space(), "dead"), ("another-boot:4026531836", "healthy"), ("", "healthy")]
)
def test_only_a_driver_of_this_very_process_space_is_dead_before_its_heartbeats_stop(
    tmp_path: Path, said: str, verdict: str
) -> None:
    """In another container of this host the same number is another process, or none, while the driver lives."""
    root = JobRoot(tmp_path / "state", "flights", FakeClock())
    root.start()
    root.beat(process_space=said)
    assert look(root, FakeLauncher()).health.verdict == verdict


def test_a_driver_that_another_user_hides_is_not_dead_while_its_heart_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hidepid` of /proc: the process cannot be seen, and it lives. Else Dagster would take a healthy job over."""

    def unseen(pid: int) -> psutil.Process:
        raise psutil.NoSuchProcess(pid)

    monkeypatch.setattr("stillstate.orchestration.launchers.processes.psutil.Process", unseen)
    root = JobRoot(tmp_path / "state", "flights", FakeClock(), pid=os.getpid())
    root.start()
    root.beat(process_space=process_space())
    assert look(root, FakeLauncher()).health.verdict == "healthy"
    root.pid = NO_SUCH_PID
    root.beat(process_space=process_space())
    assert look(root, FakeLauncher()).health.verdict == "dead"


class EndsMeanwhile(FakeLauncher):
    """The driver says its last word right before its process is looked for."""

    def __init__(self, last_word: Callable[[], object]) -> None:
        super().__init__()
        self.last_word = last_word

    def is_alive(self, status: RunStatus) -> str:
        self.last_word()
        return "dead"


def test_a_driver_that_ends_between_the_two_looks_is_what_it_said_last(tmp_path: Path) -> None:
    """Else a job that has finished would be brought back."""
    root = JobRoot(tmp_path / "state", "flights", FakeClock())
    root.start()
    root.beat(process_space=process_space())
    for state in ("finished", "stopped", "failed"):
        root.beat(process_space=process_space())
        seen = look(root, EndsMeanwhile(lambda: root.beat(state, process_space=process_space())))  # noqa: B023
        assert seen.health.verdict == state


def test_a_process_space_tells_boots_and_namespaces_apart(tmp_path: Path) -> None:
    boot, other = tmp_path / "boot", tmp_path / "other"
    boot.write_text("7f3c\n")
    other.write_text("91aa\n")
    spaces = {process_space(boot, tmp_path), process_space(other, tmp_path), process_space(boot, boot)}
    assert len(spaces) == 3
    assert process_space(boot, tmp_path) == process_space(boot, tmp_path)


def test_where_the_system_does_not_tell_no_process_space_is_known(tmp_path: Path) -> None:
    assert process_space(tmp_path / "nowhere", tmp_path) == ""
