"""The recovery sensor, on job roots that state_runtime itself wrote."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest
from dagster_world import FakeLauncher, World
from job_roots import FakeClock, JobRoot

from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.snapshot.control import request_stop
from state_runtime.snapshot.term_files import RunState
from stillstate.orchestration.jobs.past_runs import past_runs


def test_a_healthy_stopped_finished_or_fenced_job_is_left_alone(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    assert here.recovery() == []
    flights.start()
    assert here.recovery() == []
    for state in ("stopped", "finished", "fenced"):
        flights.beat(state)
        here.clock.advance_s(3600)
        assert here.recovery() == [], state


def test_a_lost_driver_gets_exactly_one_run(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    term = flights.start()
    here.clock.advance_s(5)
    (request,) = here.recovery()
    assert request.run_key == f"flights:{term}:1"
    assert request.job_name == "recover_flights"
    assert request.tags["stillstate/job"] == "flights"
    assert request.tags["stillstate/action"] == "recover"
    # The daemon evaluates again before the run was dequeued: same key, which Dagster starts once.
    (repeated,) = here.recovery()
    assert repeated.run_key == request.run_key
    here.submit(request, dg.DagsterRunStatus.STARTED)
    for _ in range(3):
        assert here.recovery() == []


def test_a_failed_recovery_is_tried_again_later_and_gives_up_in_the_end(
    world: Callable[..., World], flights: JobRoot
) -> None:
    """How long each wait is, `test_driver_health.py` says; here it is only never at once."""
    here = world(extra="recovery: {max_attempts: 3, backoff_s: 600}")
    flights.start()
    asked = []
    for _ in range(6):
        here.clock.at_ms = _now_ms() + 2 * 3600_000  # long after every wait
        for request in here.recovery():
            asked.append(request.run_key)
            here.submit(request, dg.DagsterRunStatus.FAILURE)
            here.clock.at_ms = _now_ms()
            again = [str(r.run_key) for r in here.recovery()]
            assert again in ([], ["flights:1:gave-up"]), "a failed attempt is not repeated at once"
    here.clock.at_ms = _now_ms() + 2 * 3600_000
    assert asked == ["flights:1:1", "flights:1:2", "flights:1:3", "flights:1:gave-up"]
    reason = here.tick("stillstate_recovery").skip_reason
    assert reason is not None
    assert "gave up" in str(reason.skip_message)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000  # Dagster stamps its runs with the real clock


def test_a_stop_request_to_a_driver_that_died_is_respected(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    term = flights.start()
    request_stop(flights.store, "flights", term, clock=here.clock, ids=SYSTEM_IDS)
    here.clock.advance_s(3600)
    assert here.recovery() == []


def test_switched_off_recovery_only_reports(world: Callable[..., World], flights: JobRoot) -> None:
    here = world(extra="recovery: {enabled: false}")
    flights.start()
    here.clock.advance_s(3600)
    result = here.tick("stillstate_recovery")
    assert not result.run_requests
    assert result.skip_reason is not None
    assert "switched off" in str(result.skip_reason.skip_message)


def test_a_damaged_job_does_not_leave_the_others_without_a_guard(
    world: Callable[..., World], flights: JobRoot, tmp_path: Path, clock: FakeClock
) -> None:
    here = world("flights", "trains")
    flights.start()
    (tmp_path / "state" / "flights" / "terms" / f"{1:020d}.heartbeat.json").write_text("{")
    trains = JobRoot(tmp_path / "state", "trains", clock)
    trains.start()
    clock.advance_s(60)
    assert [request.run_key for request in here.recovery()] == ["trains:1:1"]


def test_a_damaged_newest_manifest_gets_one_run_that_looks_and_one_that_says_so(
    world: Callable[..., World], flights: JobRoot
) -> None:
    """The driver refuses it, so a restart could only fail; the run says what could be gone back to."""
    here = world()
    flights.start()
    flights.checkpoint()
    flights.damage(2)
    here.clock.at_ms = _now_ms() + 60_000
    (request,) = here.recovery()
    here.launchers["flights"] = FakeLauncher(flights)
    assert not execute(here, request).success
    here.clock.advance_s(3600)
    (told,) = here.recovery()
    assert told.run_key == "flights:1:gave-up"
    execute(here, told)
    assert here.recovery() == []
    assert here.launchers["flights"].starts == []


def execute(here: World, request: dg.RunRequest) -> dg.ExecuteInProcessResult:
    assert request.job_name is not None
    return here.defs.resolve_job_def(request.job_name).execute_in_process(
        run_config=dict(request.run_config),
        instance=here.instance,
        tags=dict(request.tags),
        raise_on_error=False,
    )


def test_the_recovery_run_starts_the_driver_once_and_repeats_do_nothing(
    world: Callable[..., World], flights: JobRoot
) -> None:
    here = world()
    flights.start()
    launcher = here.launchers["flights"] = FakeLauncher(flights)
    here.clock.advance_s(60)
    (request,) = here.recovery()
    done = execute(here, request)
    assert done.success
    assert done.output_for_node("recover_flights_driver")["term"] == 2
    repeated = execute(here, request)
    assert repeated.output_for_node("recover_flights_driver")["outcome"] == "nothing to do"
    assert launcher.starts == [True]
    assert launcher.ended == [1]
    assert here.recovery() == []


def test_a_recovery_run_for_an_older_term_leaves_the_newer_failure_alone(
    world: Callable[..., World], flights: JobRoot
) -> None:
    here = world()
    flights.start()
    here.clock.advance_s(60)
    (request,) = here.recovery()
    flights.start()
    here.clock.advance_s(60)
    launcher = here.launchers["flights"] = FakeLauncher(flights)
    done = execute(here, request)
    assert done.output_for_node("recover_flights_driver")["outcome"] == "nothing to do"
    assert launcher.starts == []


def test_drivers_that_die_at_once_are_one_failure_until_a_checkpoint(
    world: Callable[..., World], flights: JobRoot
) -> None:
    here = world(extra="recovery: {max_attempts: 3, backoff_s: 1}")
    flights.start()
    flights.checkpoint()
    here.launchers["flights"] = FakeLauncher(flights)
    here.clock.at_ms = _now_ms()
    keys_seen = []
    for _ in range(30):
        here.clock.advance_s(60)
        for request in here.recovery():
            keys_seen.append(request.run_key)
            assert execute(here, request).success == ("gave-up" not in str(request.run_key))
    assert keys_seen == ["flights:1:1", "flights:2:1", "flights:3:1", "flights:4:gave-up"]
    flights.checkpoint()
    here.clock.advance_s(60)
    assert [request.run_key for request in here.recovery()] == ["flights:4:1"]


def test_past_runs_are_read_newest_first(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    flights.start()
    here.clock.advance_s(60)
    (request,) = here.recovery()
    here.submit(request, dg.DagsterRunStatus.FAILURE)
    here.submit(request, dg.DagsterRunStatus.STARTED)
    runs = past_runs(here.instance, "flights")
    assert [(run.phase, run.term, run.attempt, run.streak, run.progress) for run in runs] == [
        ("active", 1, 1, 1, 0),
        ("failed", 1, 1, 1, 0),
    ]


@pytest.mark.parametrize("state", ["running", "stopped", "finished", "fenced"])
def test_a_recovery_by_hand_of_a_job_that_needs_none_does_nothing(
    world: Callable[..., World], flights: JobRoot, state: RunState
) -> None:
    here = world()
    flights.start(state)
    launcher = here.launchers["flights"] = FakeLauncher(flights)
    done = execute(here, dg.RunRequest(job_name="recover_flights"))
    assert done.output_for_node("recover_flights_driver")["outcome"] == "nothing to do"
    assert launcher.starts == launcher.ended == []
