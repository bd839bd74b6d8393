"""A dead job is red: the check `driver_alive`, recovery runs that end at the first checkpoint, and giving up."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_world import FakeLauncher, World
from job_roots import SECRET, FakeClock, JobRoot, checkpoint_of

from state_runtime.base.errors import StoreUnavailable
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.snapshot.control import request_stop
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.launchers import FirstCheckpoint, LastWords, Launched, LaunchFailed, LocalLauncher
from stillstate.orchestration.launchers.first_checkpoint import Waiting
from stillstate.orchestration.recovery.alive import UNREACHABLE_S, judge_alive
from stillstate.orchestration.recovery.health import Health
from stillstate.orchestration.recovery.plan import RecoveryPlan
from stillstate.orchestration.sensors.recovery import SHOWN_EVERY_S, read_alive_cursor

WARN, ERROR = dg.AssetCheckSeverity.WARN, dg.AssetCheckSeverity.ERROR


def checks(here: World) -> list[dg.AssetCheckEvaluation]:
    """What one tick says of the jobs; kept by the instance as the daemon would."""
    events = here.tick("stillstate_recovery").asset_events
    for event in events:
        here.instance.report_runless_asset_event(event)
    return [event for event in events if isinstance(event, dg.AssetCheckEvaluation)]


def only(here: World) -> dg.AssetCheckEvaluation:
    (found,) = checks(here)
    return found


def real_now(here: World) -> None:
    here.clock.at_ms = time.time_ns() // 1_000_000  # Dagster stamps its runs with the real clock


def run(here: World, request: dg.RunRequest) -> dg.ExecuteInProcessResult:
    assert request.job_name is not None
    job = here.defs.resolve_job_def(request.job_name)
    return job.execute_in_process(
        run_config=dict(request.run_config),
        instance=here.instance,
        tags=dict(request.tags),
        raise_on_error=False,
    )


def failure_of(done: dg.ExecuteInProcessResult) -> str:
    (step,) = [event for event in done.all_events if event.is_step_failure]
    return str(step.step_failure_data.user_failure_data.description)  # type: ignore[union-attr]


# -- the check ----------------------------------------------------------------------------------------------------


def test_the_check_is_shown_on_every_change_and_once_an_hour(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    flights.start()
    assert only(here).passed
    for _ in range(3):
        here.clock.advance_s(2)
        flights.beat()
        assert checks(here) == []
    here.clock.advance_s(SHOWN_EVERY_S)
    flights.beat()
    assert only(here).passed
    flights.beat("stopped")
    assert only(here).description == "the driver has stopped"


def test_the_check_says_by_when_somebody_should_have_looked_again(
    world: Callable[..., World], flights: JobRoot
) -> None:
    """Of a daemon that stands still it stays green: then that moment has passed."""
    here = world()
    flights.start()
    by_s = only(here).metadata["next_look_by"].value
    here.clock.advance_s(SHOWN_EVERY_S)
    flights.beat()
    assert only(here).passed
    assert here.clock.at_ms / 1000 < by_s, "a daemon that is well has always looked again by then"


def test_a_cursor_that_is_not_understood_shows_every_check_once_more() -> None:
    for text in (None, "", "garbage", "[]", '{"version": 9}', '{"version":1,"jobs":{"a":5}}', "null"):
        assert read_alive_cursor(text) == ({}, "")


def test_a_job_that_dies_is_a_warning_while_it_is_recovered(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    flights.start("starting")
    seen = only(here)
    assert (seen.passed, seen.severity) == (False, WARN)
    here.clock.advance_s(60)
    seen = only(here)
    assert (seen.passed, seen.severity) == (False, WARN)
    assert "is gone" in str(seen.description)
    assert seen.metadata["term"].value == 1
    assert seen.metadata["attempt"].value == 1


def test_a_dead_job_with_recovery_off_is_red(world: Callable[..., World], flights: JobRoot) -> None:
    here = world(extra="recovery: {enabled: false}")
    flights.start()
    here.clock.advance_s(60)
    seen = only(here)
    assert (seen.passed, seen.severity) == (False, ERROR)
    assert "switched off" in str(seen.description)


def test_a_damaged_root_is_red_and_hides_no_other_job(
    world: Callable[..., World], flights: JobRoot, tmp_path: Path, clock: FakeClock
) -> None:
    here = world("flights", "trains")
    flights.start()
    (tmp_path / "state" / "flights" / "terms" / f"{1:020d}.heartbeat.json").write_text("{")
    trains = JobRoot(tmp_path / "state", "trains", clock)
    trains.start()
    by_job = {seen.asset_key.path[0]: seen for seen in checks(here)}
    assert (by_job["flights"].passed, by_job["flights"].severity) == (False, ERROR)
    assert "damaged" in str(by_job["flights"].description)
    assert by_job["trains"].passed


def test_an_unreachable_store_is_a_warning_and_red_after_two_minutes(
    world: Callable[..., World], flights: JobRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = world()
    flights.start()
    assert only(here).passed

    def away(*_: Any) -> Any:
        raise StoreUnavailable("it does not answer")

    with monkeypatch.context() as patched:
        patched.setattr("stillstate.orchestration.probes.watch.look_at", away)
        assert only(here).severity is WARN
        here.clock.advance_s(UNREACHABLE_S - 1)
        assert checks(here) == []
        here.clock.advance_s(1)
        assert only(here).severity is ERROR
    flights.beat()
    assert only(here).passed


def test_a_stalled_driver_is_shown_and_brought_back_only_if_the_policy_says_so(
    world: Callable[..., World], flights: JobRoot
) -> None:
    flights.start()
    stood_since_ms = flights.clock.at_ms
    flights.clock.advance_s(901)
    flights.beat(advanced_at_ms=stood_since_ms)
    off = world(extra="recovery: {restart_stalled: false}")
    result = off.tick("stillstate_recovery")
    assert not result.run_requests
    (seen,) = result.asset_events
    assert isinstance(seen, dg.AssetCheckEvaluation)
    assert (seen.passed, seen.severity) == (False, ERROR)
    assert "stalled" in str(seen.description)
    on = world()
    assert [request.run_key for request in on.recovery()] == ["flights:1:1"]
    quiet = world(extra="recovery: {stall_timeout_s: 0}")
    assert quiet.recovery() == []


def test_a_stalled_driver_that_cannot_stop_is_red(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    term = flights.start()
    request_stop(flights.store, "flights", term, clock=here.clock, ids=SYSTEM_IDS)
    stood_since_ms = here.clock.at_ms
    here.clock.advance_s(901)
    flights.beat(advanced_at_ms=stood_since_ms)
    assert only(here).severity is ERROR


def test_the_last_words_of_a_job_that_is_not_well_are_shown(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    flights.start()
    here.launchers["flights"] = launcher = FakeLauncher(flights)
    launcher.words = LastWords("/logs/flights.log", "  it broke\n  ``` here\n")
    assert "log_tail" not in only(here).metadata, "a job that is well needs no log"
    here.clock.advance_s(60)
    seen = only(here)
    assert seen.metadata["log_last_line"].value == "``` here", "on the page, not behind a click"
    assert "it broke" in str(seen.metadata["log_tail"].value)
    assert str(seen.metadata["log_tail"].value).count("```") == 2, "nothing in a log leaves its frame"
    assert seen.metadata["log"].value == "/logs/flights.log"


def test_a_person_can_run_the_check(world: Callable[..., World], flights: JobRoot) -> None:
    here = world(extra="recovery: {enabled: false}")
    flights.start()
    here.clock.advance_s(60)
    key = dg.AssetCheckKey(dg.AssetKey(["flights", "stream"]), "driver_alive")
    (check,) = [c for c in here.defs.asset_checks or () if key in c.check_keys]  # type: ignore[union-attr]
    done = dg.materialize(
        [check],  # type: ignore[list-item]
        instance=here.instance,
        resources={"stillstate": here.resource},
        selection=dg.AssetSelection.checks(key),
    )
    (seen,) = done.get_asset_check_evaluations()
    assert (seen.passed, seen.severity) == (False, ERROR)


def test_a_restart_by_the_supervisor_is_an_event_of_the_stream_with_its_cause(
    world: Callable[..., World], flights: JobRoot
) -> None:
    here = world()
    flights.start()
    here.tick("stillstate_recovery")
    flights.start()
    flights.beat(cause="restarted by its supervisor after signal 9 (SIGKILL)")
    events = here.tick("stillstate_recovery").asset_events
    (seen,) = [event for event in events if isinstance(event, dg.AssetObservation)]
    assert seen.description == "term 2: restarted by its supervisor after signal 9 (SIGKILL)"
    assert here.tick("stillstate_recovery").asset_events == []


def test_a_driver_that_was_brought_back_is_coming_until_its_first_checkpoint(
    world: Callable[..., World], flights: JobRoot
) -> None:
    """It was green 44 s before it had shown that it can restore and commit."""
    here = world()
    flights.start()
    flights.checkpoint()
    assert only(here).passed, "a person who starts a job looks"
    flights.start()
    cause = "recovery of term 1, which was dead"
    flights.beat(cause=cause)
    seen = only(here)
    assert (seen.passed, seen.severity) == (False, WARN)
    assert "its first checkpoint has not come yet" in str(seen.description)
    flights.checkpoint()
    flights.beat(cause=cause)
    assert only(here).passed


def test_a_driver_that_was_brought_back_to_a_quiet_source_is_well_and_stays_so(
    world: Callable[..., World], flights: JobRoot
) -> None:
    """There is nothing to commit. At the first row it works on that, as any driver that is well."""
    here = world()
    flights.start()
    flights.start()
    flights.beat(cause="recovery of term 1, which was dead", quiet=True)
    assert only(here).passed
    flights.beat(cause="recovery of term 1, which was dead")
    assert checks(here) == []


def test_shards_that_a_later_checkpoint_restored_are_counted_with_the_first(flights: JobRoot) -> None:
    """A look a second later sees the third checkpoint as the newest: 7 of 8 shards were restored by those before it."""
    flights.start()
    flights.checkpoint()
    term = flights.start()
    assert flights.committer is not None
    usual = checkpoint_of(flights.committer.last).progress
    assert usual is not None
    for local, primary, restored_bytes in ((5, 0, 0), (2, 0, 0), (0, 1, 700)):
        numbers = {"local_restores": local, "primary_restores": primary, "restored_bytes": restored_bytes}
        flights.clock.advance_s(1)
        made = flights.checkpoint(progress=dataclasses.replace(usual, **numbers))
    flights.beat()
    launched = Launched(job="flights", term=term, state="running", pid=7, host="h", log="x")
    waiting = Waiting(launched, flights.catalog, lambda _: "alive", str, silent_s=60, monotonic_s=lambda: 0.0)
    first = waiting.look()
    assert first is not None
    assert first.progress is not None
    assert (first.snapshot_id, first.how) == (
        made.snapshot_id - 2,
        f"checkpoint {made.snapshot_id - 2} is the first of term 2",
    )
    assert first.at_ms == made.created_at_ms - 2_000
    assert (first.progress.local_restores, first.progress.primary_restores) == (7, 1)
    assert first.progress.restored_bytes == 700


# -- giving up ----------------------------------------------------------------------------------------------------


def test_when_no_attempt_is_left_exactly_one_run_fails_and_the_check_is_red(
    world: Callable[..., World], flights: JobRoot
) -> None:
    here = world()
    flights.start()
    flights.beat("failed", "InvalidData: row 7", error_kind="invalid")
    here.launchers["flights"] = launcher = FakeLauncher(flights)
    launcher.words = LastWords("/logs/x", "  the last line")
    result = here.tick("stillstate_recovery")
    (request,) = result.run_requests or []
    done = run(here, request)
    assert not done.success
    assert "gave up" in failure_of(done)
    assert "the last line" in failure_of(done)
    assert here.instance.get_run_by_id(done.run_id).tags["stillstate/exit-code"] == "2"  # type: ignore[union-attr]
    assert launcher.starts == []
    (seen,) = result.asset_events
    assert isinstance(seen, dg.AssetCheckEvaluation)
    assert (seen.passed, seen.severity) == (False, ERROR)
    assert "gave up" in str(seen.description)
    here.clock.advance_s(7200)
    assert here.recovery() == []


def test_a_recovery_run_fails_with_the_last_words_if_the_driver_dies_before_its_first_checkpoint(
    world: Callable[..., World], flights: JobRoot
) -> None:
    here = world()
    flights.start()
    real_now(here)
    here.clock.advance_s(60)
    here.launchers["flights"] = launcher = FakeLauncher(flights)
    launcher.outcome = LaunchFailed("it ended before its first checkpoint. The end of its log:\n  boom", 7)
    (request,) = here.recovery()
    done = run(here, request)
    assert not done.success
    assert "boom" in failure_of(done)
    tags = here.instance.get_run_by_id(done.run_id).tags  # type: ignore[union-attr]
    assert tags["stillstate/exit-code"] == "7"


def test_a_start_that_ends_before_it_has_a_term_is_judged_by_its_exit_code(
    world: Callable[..., World], flights: JobRoot
) -> None:
    here = world()
    flights.start()
    real_now(here)
    here.clock.advance_s(60)
    here.launchers["flights"] = launcher = FakeLauncher(flights)
    launcher.outcome, launcher.before_term = LaunchFailed("unknown key in stillstate.yaml", 2), True
    (request,) = here.recovery()
    run(here, request)
    (told,) = here.recovery()
    assert told.run_key == "flights:1:gave-up"


def test_a_recovery_run_says_which_checkpoint_was_the_first_and_why_it_ran(
    world: Callable[..., World], flights: JobRoot
) -> None:
    here = world()
    flights.start()
    here.clock.advance_s(60)
    here.launchers["flights"] = launcher = FakeLauncher(flights)
    (request,) = here.recovery()
    value = run(here, request).output_for_node("recover_flights_driver")
    assert (value["term"], value["first_checkpoint"]) == (2, 7)
    assert launcher.causes == ["recovery of term 1, which was dead"]


def test_a_recovery_run_says_from_where_and_how_long_until_the_first_checkpoint(
    world: Callable[..., World], flights: JobRoot
) -> None:
    """In its own output, and as an event of the stream."""
    here = world()
    flights.start()
    made = flights.checkpoint()
    assert made.progress is not None
    here.clock.advance_s(60)
    here.launchers["flights"] = launcher = FakeLauncher(flights)
    numbers = dataclasses.replace(
        made.progress, local_restores=3, primary_restores=1, restored_bytes=700, restore_ms=250
    )
    at_ms = here.clock.at_ms + 4500
    launcher.outcome = FirstCheckpoint(snapshot_id=4, how="checkpoint 4", at_ms=at_ms, progress=numbers)
    (request,) = here.recovery()
    value = run(here, request).output_for_node("recover_flights_driver")
    assert value["restored_from"].startswith(f"snapshot {made.snapshot_id} of 2023-")
    assert value["restored_from"].endswith("/state/flights")
    assert (value["first_checkpoint_after_s"], value["down_s"]) == (4.5, 64.5)
    assert (value["shards_restored"], value["restored_bytes"], value["restore_s"]) == ("3 local, 1 primary", 700, 0.25)
    (event, *_) = here.instance.fetch_observations(dg.AssetKey(["flights", "stream"]), limit=5).records
    assert event.asset_observation is not None
    assert event.asset_observation.metadata["first_checkpoint_after_s"].value == 4.5


def test_the_check_links_the_last_recovery_run_and_says_when_the_next_comes(
    world: Callable[..., World], flights: JobRoot
) -> None:
    here = world(extra="recovery: {backoff_s: 600}")
    flights.start()
    real_now(here)
    (request,) = here.recovery()
    failed = here.submit(request, dg.DagsterRunStatus.FAILURE)
    real_now(here)
    seen = only(here)
    assert seen.metadata["last_recovery_run"].value == failed.run_id
    assert float(seen.metadata["next_attempt"].value) > here.clock.at_ms / 1000  # type: ignore[arg-type]


def test_no_secret_of_a_log_is_in_its_last_words(
    write_config: Callable[..., Path], flights: JobRoot, tmp_path: Path
) -> None:
    config = write_config(extra=f"storage_options: {{secret: {SECRET}}}\n")
    flights.start()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "flights.20260101T000000.00000000.log").write_text(f"no access with {SECRET}\n")
    status = flights.catalog.status()
    assert status is not None
    words = LocalLauncher(config, load_spec(config).job("flights")).last_words(status)
    assert words is not None
    assert words.text == "  no access with ***"


# -- the pure verdict -----------------------------------------------------------------------------------------------


def test_a_row_of_attempts_without_end_turns_red_when_others_would_have_given_up() -> None:
    def level(streak: int) -> str:
        plan = RecoveryPlan(None, "attempt follows", streak, next_s=9.0)
        return judge_alive(Health("failed", "x"), plan, now_s=1.0, is_recovered=True, max_attempts=5).level

    assert (level(5), level(6)) == ("warn", "error")


def test_since_when_a_store_does_not_answer_is_a_time_and_stays_true() -> None:
    """The text is read long after it was written: "for 11 min" was wrong a minute later."""
    said = [
        judge_alive(
            None, None, now_s=now_s, is_recovered=True, max_attempts=5, trouble="s3 hangs", unreachable_since_s=1_000.0
        ).reason
        for now_s in (1_010.0, 9_000.0)
    ]
    assert said == ["no answer since 1970-01-01 00:16:40Z: s3 hangs"] * 2
