"""Health verdicts and recovery plans: pure decisions."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from state_runtime.base.errors import StoreRefused, kind_of_exit
from state_runtime.snapshot.term_files import RunState, RunStatus
from stillstate.orchestration.config.sections import RecoverySpec
from stillstate.orchestration.launchers.port import Liveness
from stillstate.orchestration.recovery.alive import judge_alive
from stillstate.orchestration.recovery.health import (
    BACKOFF_MAX_S,
    Health,
    Verdict,
    decide,
    recovery_wait_s,
)
from stillstate.orchestration.recovery.plan import (
    GIVE_UP,
    Loss,
    PastRun,
    RecoveryPlan,
    plan_recovery,
)
from stillstate.orchestration.standby import SETTLED_S

NOW_MS = 1_700_000_000_000
POLICY = RecoverySpec(heartbeat_timeout_s=30, start_grace_s=120, stall_timeout_s=0)


def status(state: RunState, age_s: float, interval_s: float = 2.0) -> RunStatus:
    return RunStatus(
        term=3,
        run_uid="u",
        state=state,
        at_ms=NOW_MS - int(age_s * 1000),
        started_at_ms=NOW_MS - 1_000_000,
        heartbeat_interval_s=interval_s,
        pid=42,
        host="h",
        message="why" if state in ("failed", "fenced") else "",
    )


@pytest.mark.parametrize(
    ("state", "age_s", "process", "verdict", "recover"),
    [
        ("running", 1, "alive", "healthy", False),
        ("running", 30, "alive", "healthy", False),
        ("running", 31, "alive", "silent", True),
        ("running", 31, "unknown", "silent", True),
        ("running", 29, "unknown", "healthy", False),
        ("running", 5, "dead", "dead", True),
        ("running", 3, "dead", "healthy", False),
        ("starting", 100, "alive", "starting", False),
        ("starting", 121, "unknown", "silent", True),
        ("starting", 10, "dead", "dead", True),
        ("failed", 0, "alive", "failed", True),
        ("failed", 9999, "dead", "failed", True),
        ("stopped", 9999, "dead", "stopped", False),
        ("finished", 9999, "dead", "finished", False),
        ("fenced", 9999, "dead", "fenced", False),
    ],
)
def test_verdicts(state: RunState, age_s: float, process: Liveness, verdict: Verdict, recover: bool) -> None:
    health = decide(status(state, age_s), NOW_MS, POLICY, process)
    assert (health.verdict, health.needs_recovery) == (verdict, recover)
    assert "term 3" in health.reason


@pytest.mark.parametrize("process", ["alive", "dead", "restarting", "unknown"])
@pytest.mark.parametrize("age_s", [1, 60, 9_999])
@pytest.mark.parametrize("state", ["starting", "running", "failed", "stopped", "finished", "fenced"])
def test_a_verdict_says_when_and_not_how_long(state: RunState, age_s: float, process: Liveness) -> None:
    """It stands on a page until it changes: "its last heartbeat is 60.0 s old" was read half an hour later."""
    policy = POLICY.model_copy(update={"stall_timeout_s": 900.0})
    for advanced_at_ms in (0, NOW_MS - 2_000_000):
        seen = replace(status(state, age_s), advanced_at_ms=advanced_at_ms)
        health = decide(seen, NOW_MS, policy, process)
        text = re.sub(r"limit 30 s|within 120 s", "", health.reason)
        assert re.search(r"\d (s|min|h|d)\b", text) is None, health.reason
        assert health.since_ms in (seen.at_ms, seen.started_at_ms, seen.advanced_at_ms)
        assert health.since_ms, "since when is always known of a job that ran"


def test_a_job_that_never_ran_is_not_recovered() -> None:
    health = decide(None, NOW_MS, POLICY, "unknown")
    assert (health.verdict, health.needs_recovery) == ("never-started", False)


def test_a_heart_that_beats_outweighs_a_process_we_cannot_see() -> None:
    """Two containers may share a host name: recovering the other one's driver would fence it for ever."""
    assert decide(status("running", 1), NOW_MS, POLICY, "dead").verdict == "healthy"


def test_a_process_that_would_be_seen_here_and_is_not_is_dead_at_once() -> None:
    """The boot and the namespace of process ids are the driver's own: a heartbeat of a second ago was its last."""
    for state in ("running", "starting"):
        health = decide(status(state, 1), NOW_MS, POLICY, "dead", is_near=True)
        assert (health.verdict, health.needs_recovery) == ("dead", True)
    assert decide(status("running", 1), NOW_MS, POLICY, "alive", is_near=True).verdict == "healthy"
    # Its supervisor is bringing it back: that is waited for, near or not.
    assert decide(status("running", 1), NOW_MS, POLICY, "restarting", is_near=True).verdict == "restarting"
    assert decide(status("finished", 1), NOW_MS, POLICY, "dead", is_near=True).verdict == "finished"


def test_a_heartbeat_from_the_future_is_fresh_not_an_error() -> None:
    assert decide(status("running", -500), NOW_MS, POLICY, "unknown").verdict == "healthy"


def test_a_run_that_died_while_it_stopped_stays_stopped() -> None:
    """Bringing it back would undo what a person asked for."""
    for lost in (status("running", 99), status("failed", 1), status("starting", 999)):
        health = decide(lost, NOW_MS, POLICY, "dead", stop_requested=True)
        assert (health.verdict, health.needs_recovery) == ("stopped", False)
    assert decide(status("running", 1), NOW_MS, POLICY, "alive", stop_requested=True).verdict == "healthy"


def test_back_off_is_nothing_then_doubles_up_to_a_bound() -> None:
    assert [recovery_wait_s(n, 10) for n in range(5)] == [0, 10, 20, 40, 80]
    assert recovery_wait_s(10_000, 10) == BACKOFF_MAX_S


def recovered(term: int, attempt: int, progress: int, streak: int = 1, ended_s: float = 0.0) -> PastRun:
    return PastRun(
        run_id="r" * 12,
        action="recover",
        phase="failed",
        term=term,
        attempt=attempt,
        streak=streak,
        progress=progress,
        ended_s=ended_s,
    )


STARTED = PastRun(run_id="s" * 12, action="start", phase="succeeded", ended_s=0.0)


def plan(
    term: int, progress: int, runs: list[PastRun], now_s: float = 1000.0, lived_s: float = 1.0
) -> tuple[int | None, str]:
    made = planned(Loss(term=term, progress=progress, lived_s=lived_s), runs, now_s)
    return made.attempt, made.reason


def planned(loss: Loss, runs: list[PastRun], now_s: float = 1000.0) -> RecoveryPlan:
    return plan_recovery(loss, runs, now_s, max_attempts=3, backoff_s=10)


def test_the_first_attempt_is_immediate() -> None:
    assert plan(1, 7, [])[0] == 1
    assert plan(1, 7, [STARTED])[0] == 1


@pytest.mark.parametrize("phase", ["waiting", "active"])
@pytest.mark.parametrize("action", ["start", "recover", "stop"])
def test_nothing_is_requested_while_a_run_of_the_job_is_under_way(phase: str, action: str) -> None:
    attempt, reason = plan(1, 7, [replace(STARTED, action=action, phase=phase)])  # type: ignore[arg-type]
    assert attempt is None
    assert phase in reason


def test_a_failed_attempt_is_followed_by_a_later_one() -> None:
    runs = [recovered(1, 1, 7, ended_s=995.0), STARTED]
    assert plan(1, 7, runs)[0] is None
    assert plan(1, 7, runs, now_s=1005.0)[0] == 2


def test_attempts_count_over_terms_while_there_is_no_progress() -> None:
    """A driver that starts and dies at once is one failure that repeats, not many new ones."""
    runs = [recovered(3, 1, 7, 3), recovered(2, 1, 7, 2), recovered(1, 1, 7, 1), STARTED]
    attempt, reason = plan(4, 7, runs)
    assert attempt is None
    assert "gave up after 3" in reason


def test_progress_starts_the_count_again() -> None:
    assert plan(4, 8, [recovered(3, 1, 7, 3), recovered(2, 1, 7, 2), recovered(1, 1, 7, 1)])[0] == 1


def test_a_person_who_starts_or_recovers_by_hand_starts_the_count_again() -> None:
    old = [recovered(3, 3, 7, 3), recovered(3, 2, 7, 2), recovered(3, 1, 7, 1)]
    by_hand = PastRun(run_id="h" * 12, action="recover", phase="succeeded")
    assert plan(4, 7, [STARTED, *old])[0] == 1
    assert plan(4, 7, [by_hand, *old])[0] == 1


def test_an_attempt_number_is_never_used_twice_for_one_term() -> None:
    """Dagster ignores a run key that it has seen, for ever: a repeated number would mean no recovery at all."""
    assert plan(3, 7, [STARTED, recovered(3, 2, 7), recovered(3, 1, 7)])[0] == 3


def test_an_abandoned_run_is_requested_again_under_its_own_key() -> None:
    """The daemon died between creating and submitting it; Dagster then takes up the same run."""
    assert plan(3, 7, [replace(recovered(3, 1, 7), phase="abandoned")])[0] == 1


def test_a_stop_in_between_does_not_reset_the_count() -> None:
    runs = [replace(STARTED, action="stop"), recovered(3, 1, 7, 3), recovered(2, 1, 7, 2)]
    assert plan(3, 7, runs)[0] is None


def test_a_driver_that_lived_for_a_while_ends_the_row() -> None:
    """Its source may have been quiet: five failures in a year are not five failures in a row."""
    row = [recovered(3, 1, 7, 3), recovered(2, 1, 7, 2)]
    assert plan(4, 7, row, lived_s=SETTLED_S)[0] == 1
    assert plan(4, 7, row, lived_s=SETTLED_S - 1)[0] is None
    # The attempts for the very term that failed still count, however long it had lived.
    assert plan(3, 7, row, lived_s=SETTLED_S)[0] is None


# -- stalled, and supervised ------------------------------------------------------------------------------------


def test_a_driver_that_beats_and_never_gets_on_is_stalled() -> None:
    policy = POLICY.model_copy(update={"stall_timeout_s": 900.0})
    stuck = replace(status("running", 1), advanced_at_ms=NOW_MS - 1000 - 900_000)
    assert decide(stuck, NOW_MS, policy, "alive").verdict == "stalled"
    assert decide(stuck, NOW_MS, policy, "alive").needs_recovery
    assert decide(replace(stuck, state="starting"), NOW_MS, policy, "alive").verdict == "stalled"
    moving = replace(stuck, advanced_at_ms=stuck.advanced_at_ms + 1)
    assert decide(moving, NOW_MS, policy, "alive").verdict == "healthy"
    assert decide(stuck, NOW_MS, POLICY, "alive").verdict == "healthy", "0 is never"
    assert decide(replace(stuck, advanced_at_ms=0), NOW_MS, policy, "alive").verdict == "healthy", "an older version"


def test_a_stall_is_judged_by_the_drivers_own_clock() -> None:
    """Its heartbeat is seen half a minute late: it did not stand still for that."""
    late = replace(status("running", 29), advanced_at_ms=NOW_MS - 29_000 - 890_000)
    assert decide(late, NOW_MS, POLICY.model_copy(update={"stall_timeout_s": 900.0}), "unknown").verdict == "healthy"


def test_a_stalled_driver_that_was_asked_to_stop_is_neither_stopped_nor_brought_back() -> None:
    stuck = replace(status("running", 1), advanced_at_ms=NOW_MS - 5_000_000)
    health = decide(stuck, NOW_MS, POLICY.model_copy(update={"stall_timeout_s": 900.0}), "alive", stop_requested=True)
    assert (health.verdict, health.needs_recovery) == ("stalled", False)


def test_a_driver_that_its_supervisor_brings_back_is_left_to_it_for_as_long_as_a_start_may_take() -> None:
    assert decide(status("running", 60), NOW_MS, POLICY, "restarting").verdict == "restarting"
    assert decide(status("failed", 60), NOW_MS, POLICY, "restarting").verdict == "restarting"
    assert not decide(status("running", 60), NOW_MS, POLICY, "restarting").needs_recovery
    assert decide(status("running", 121), NOW_MS, POLICY, "restarting").verdict == "dead"


def test_stalls_are_counted_in_a_row_however_long_each_lived() -> None:
    """It lived for a quarter of an hour and did nothing: that is no driver that had settled."""
    row = [recovered(3, 1, 7, 3), recovered(2, 1, 7, 2), recovered(1, 1, 7, 1)]
    stalled = Loss(term=4, progress=7, lived_s=2 * SETTLED_S, verdict="stalled")
    assert planned(stalled, row).gave_up
    assert planned(replace(stalled, verdict="dead"), row).attempt == 1


# -- what cannot pass, and what passes in the end ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "attempts"),
    [("invalid", 0), ("unsupported", 0), ("corrupt", 1), ("user-code", 1), ("refused", 3), ("internal", 3), ("", 3)],
)
def test_errors_that_cannot_pass_are_not_tried_like_those_that_can(kind: str, attempts: int) -> None:
    runs: list[PastRun] = []
    for tried in range(attempts):
        made = planned(Loss(term=1, progress=7, lived_s=1, kind=kind), runs, now_s=10_000.0 * (tried + 1))
        assert made.attempt == tried + 1
        runs.insert(0, replace(recovered(1, tried + 1, 7, made.streak, ended_s=0.0), kind=made.kind))
    made = planned(Loss(term=1, progress=7, lived_s=1, kind=kind), runs, now_s=1e6)
    assert (made.attempt, made.gave_up, made.tell) == (None, True, True)


@pytest.mark.parametrize("has_term", [True, False], ids=["ends in its term", "ends before it has a term"])
def test_a_store_or_an_output_that_refuses_is_told_after_a_bounded_number_of_recoveries(has_term: bool) -> None:
    """An output folder that became read-only has answered: no start can help until somebody mounts it. Its exit code is
    that of a store that is away, which is tried for ever; its kind is not."""
    refused = StoreRefused("cannot write part in file:///out: Read-only file system (EROFS)")
    assert (refused.exit_code, refused.kind) != (4, kind_of_exit(4))
    loss, runs = Loss(term=1, progress=7, lived_s=30, kind=refused.kind), list[PastRun]()
    for tick in range(50):
        made = planned(loss, runs, now_s=10_000.0 * (tick + 1))
        if made.attempt is None:
            break
        ended = recovered(loss.term, made.attempt, 7, made.streak, ended_s=10_000.0 * tick)
        runs.insert(0, replace(ended, kind=made.kind, exit_code=refused.exit_code))
        loss = replace(loss, term=loss.term + has_term)
    assert (len(runs), made.gave_up, made.tell) == (3, True, True)
    assert "output folder" in made.reason
    failed = Health("failed", f"term {loss.term} failed: {refused}")
    alive = judge_alive(failed, made, now_s=1e6, is_recovered=True, max_attempts=3)
    assert (alive.level, alive.headline) == ("error", "the driver has failed: recovery gave up")
    assert "Read-only file system" in alive.reason
    assert planned(replace(loss, progress=8), runs).attempt is not None, "it was repaired, and failed anew later"


def test_an_unreachable_store_is_tried_for_ever_at_most_ten_minutes_apart() -> None:
    loss = Loss(term=1, progress=7, lived_s=1, kind="unavailable")
    runs = [replace(recovered(1, 400, 7, 400, ended_s=1000.0), kind="unavailable")]
    waiting = planned(loss, runs, now_s=1000.0 + BACKOFF_MAX_S - 1)
    assert (waiting.attempt, waiting.gave_up, waiting.next_s) == (None, False, 1000.0 + BACKOFF_MAX_S)
    assert planned(loss, runs, now_s=1000.0 + BACKOFF_MAX_S).attempt == 401


def test_the_exit_code_of_a_driver_that_died_before_it_had_a_term_counts() -> None:
    loss = Loss(term=1, progress=7, lived_s=1, kind="")
    assert planned(loss, [replace(recovered(1, 1, 7), exit_code=2)], now_s=1e6).gave_up
    damaged = planned(loss, [replace(recovered(1, 1, 7), exit_code=5)], now_s=1e6)
    assert (damaged.attempt, damaged.kind) == (2, "corrupt"), "the run that follows is told what to look for"
    assert not planned(loss, [replace(recovered(1, 9, 7, 9), exit_code=4)], now_s=1e6).gave_up
    newer = Loss(term=2, progress=7, lived_s=1, kind="unavailable")
    assert not planned(newer, [replace(recovered(1, 1, 7), exit_code=2)], now_s=1e6).gave_up, "that was another term"


CAUSES = ("", "corrupt", "user-code", "refused", "unavailable")


@pytest.mark.parametrize("first", CAUSES)
@pytest.mark.parametrize("then", [cause for cause in CAUSES if cause != "unavailable"])
def test_attempts_for_one_cause_are_not_taken_from_another(first: str, then: str) -> None:
    """Damage is found by the restart after a kill: the attempt that was spent on the kill must not be the one that
    damaged data gets, or nobody ever looks what could be gone back to. And it stays bounded: each cause has its own.
    """
    runs: list[PastRun] = []
    tried = {first: 0, then: 0}
    for kind in (*[first] * 3, *[then] * 9, *[first] * 9):
        made = planned(Loss(term=len(runs) + 1, progress=7, lived_s=1, kind=kind), runs, now_s=1e6)
        if made.attempt is None:
            assert made.gave_up
            continue
        tried[kind] += 1
        made_run = replace(recovered(len(runs) + 1, made.attempt, 7, made.streak), kind=made.kind)
        runs.insert(0, made_run)
    alone = {"": 3, "corrupt": 1, "user-code": 1, "refused": 3, "unavailable": 12}
    assert tried == {kind: alone[kind] for kind in (first, then)}


def test_a_job_that_is_given_up_for_damage_says_what_a_person_can_go_back_to() -> None:
    loss = Loss(term=2, progress=7, lived_s=1, kind="corrupt")
    looked = replace(recovered(2, 1, 7, 2), kind="corrupt", damage="newest 9 damaged in x; 8 restorable")
    made = planned(loss, [looked, recovered(1, 1, 7, 1)], now_s=1e6)
    assert made.gave_up
    assert "8 restorable" in made.reason


def test_giving_up_is_told_once() -> None:
    loss = Loss(term=1, progress=7, lived_s=1, kind="invalid")
    told = PastRun(run_id="g" * 12, action=GIVE_UP, phase="failed", term=1)
    assert planned(loss, []).tell
    assert (planned(loss, [told]).gave_up, planned(loss, [told]).tell) == (True, False)
    assert planned(loss, [replace(told, phase="abandoned")]).tell, "the daemon died before it was submitted"
    assert planned(replace(loss, term=2), [told]).tell, "another failure"


def test_a_run_that_gave_up_is_no_attempt_and_ends_no_row() -> None:
    row = [recovered(3, 1, 7, 3), recovered(2, 1, 7, 2), recovered(1, 1, 7, 1)]
    told = PastRun(run_id="g" * 12, action=GIVE_UP, phase="failed", term=3)
    assert planned(Loss(term=3, progress=7, lived_s=1), [told, *row]).gave_up
