"""Runs of Dagster's whose worker process is gone: noticed by ourselves, ended, and gone on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import dagster as dg
import pytest
from dagster_world import FakeLauncher, World
from job_roots import FakeClock, JobRoot

from state_runtime.base.process_space import process_space
from stillstate.orchestration.jobs.tags import ACTION_TAG, STREAM_TAGS
from stillstate.orchestration.workers import (
    NO_WORD_S,
    SILENT_S,
    WORKER_TAG,
    Worker,
    add_tags,
    end_lost_runs,
    read_worker,
    why_lost,
)

HERE = process_space()
NOW_MS = time.time_ns() // 1_000_000
ME = Worker(pid=os.getpid(), host="h", space=HERE, beat_ms=NOW_MS)


@pytest.fixture(scope="module")
def gone() -> Worker:
    """A process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return replace(ME, pid=process.pid)


def test_of_a_worker_that_would_be_seen_here_its_process_says_whether_it_lives(gone: Worker) -> None:
    """Also when it has noted nothing for long: the laptop slept, or the worker holds its lock."""
    late_ms = NOW_MS + 86_400_000
    assert why_lost(ME, NOW_MS, late_ms, HERE) == ""
    assert "is gone" in why_lost(gone, NOW_MS, NOW_MS, HERE)
    given_again = replace(ME, beat_ms=NOW_MS - 86_400_000)
    assert "is gone" in why_lost(given_again, NOW_MS, NOW_MS, HERE), "a process that was born later got the number"


@pytest.mark.parametrize("space", ["", "another boot:1"])
def test_of_a_worker_elsewhere_its_silence_says_it(space: str) -> None:
    """Its number may be anybody's here: another container, or the host before it was started again."""
    elsewhere = replace(ME, space=space)
    assert why_lost(elsewhere, 0, NOW_MS + int(SILENT_S * 1000), HERE) == ""
    assert "last heard of" in why_lost(elsewhere, 0, NOW_MS + int(SILENT_S * 1000) + 1, HERE)


def test_a_run_that_nobody_has_begun_is_lost_after_a_while() -> None:
    assert why_lost(None, NOW_MS, NOW_MS + int(NO_WORD_S * 1000), HERE) == ""
    assert "no worker" in why_lost(None, NOW_MS, NOW_MS + int(NO_WORD_S * 1000) + 1, HERE)


def test_a_tag_reads_back_and_one_that_is_not_understood_says_nothing() -> None:
    assert read_worker(ME.text()) == ME
    for text in ("", "{}", "[1]", '["x","h","s",1]', "null"):
        assert read_worker(text) is None


# -- with Dagster's own record ----------------------------------------------------------------------------------------


def under_way(here: World, job: dg.JobDefinition, worker: Worker | None, **tags: str) -> dg.DagsterRun:
    """A run that its worker has begun."""
    noted = {} if worker is None else {WORKER_TAG: worker.text()}
    asked = {"set_source_flights": {"source": "orders", "to": "latest"}}.get(job.name)  # the only one with no default
    config = None if asked is None else {"ops": {f"{job.name}_driver": {"config": asked}}}
    run = here.instance.create_run_for_job(job, run_config=config, tags={**job.tags, **tags, **noted})
    here.set_status(run, dg.DagsterRunStatus.STARTED)
    return run


def status_of(here: World, run: dg.DagsterRun) -> dg.DagsterRunStatus:
    found = here.instance.get_run_by_id(run.run_id)
    assert found is not None
    return found.status


def test_every_kind_of_run_of_ours_is_ended_when_its_worker_is_gone(world: Callable[..., World], gone: Worker) -> None:
    """The default launcher has no health check: such a run would keep its job's turn for as long as any run may last,
    76 minutes of a recovery and 18 hours of a migration."""
    here = world()
    here.clock.at_ms = time.time_ns() // 1_000_000  # as runs are dated
    jobs = [job for job in here.defs.resolve_all_job_defs() if any(name in job.tags for name in STREAM_TAGS)]
    kinds = {job.name.removesuffix("_flights") for job in jobs}
    assert {"start", "stop", "recover", "migrate", "materialize", "savepoint", "retain", "verify", "drill"} <= kinds
    lost = [under_way(here, job, gone) for job in jobs]
    lives = [under_way(here, job, ME) for job in jobs]
    strange = under_way(here, jobs[0], gone, **dict.fromkeys(STREAM_TAGS, "of another mount"))
    here.recovery()
    assert {status_of(here, run) for run in lost} == {dg.DagsterRunStatus.FAILURE}
    assert {status_of(here, run) for run in [*lives, strange]} == {dg.DagsterRunStatus.STARTED}


def test_a_run_that_somebody_put_together_is_not_judged_by_the_process_of_one_of_its_steps(
    world: Callable[..., World], gone: Worker
) -> None:
    """A stream's asset beside a report of your own: a process for each step, and that of the first has ended."""
    here = world()
    here.clock.at_ms = time.time_ns() // 1_000_000  # as runs are dated

    @dg.job
    def report() -> None: ...

    run = under_way(here, report, gone, **{STREAM_TAGS[1]: "flights"})
    here.recovery()
    assert status_of(here, run) is dg.DagsterRunStatus.STARTED


def test_a_job_whose_recovery_run_has_died_gets_another_one_in_the_same_tick(
    world: Callable[..., World], flights: JobRoot, clock: FakeClock, gone: Worker
) -> None:
    here = world(extra="recovery: {backoff_s: 0.001}")
    clock.at_ms = time.time_ns() // 1_000_000  # as runs are dated
    flights.start()
    clock.advance_s(60)
    (request,) = here.recovery()
    run = here.submit(request, dg.DagsterRunStatus.STARTED)
    add_tags(here.instance, run.run_id, {WORKER_TAG: ME.text()})
    assert here.recovery() == [], "it is under way"
    add_tags(here.instance, run.run_id, {WORKER_TAG: gone.text()})
    assert [again.run_key for again in here.recovery()] == ["flights:1:2"]


def test_a_run_that_is_canceled_and_whose_worker_is_gone_is_canceled(world: Callable[..., World], gone: Worker) -> None:
    here = world()
    here.clock.at_ms = time.time_ns() // 1_000_000  # as runs are dated
    run = under_way(here, here.defs.resolve_job_def("migrate_flights"), gone)
    here.instance.report_run_canceling(run)
    here.recovery()
    assert status_of(here, run) is dg.DagsterRunStatus.CANCELED


def test_a_launcher_that_looks_after_its_workers_is_left_to_it(
    world: Callable[..., World], gone: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = world()
    here.clock.at_ms = time.time_ns() // 1_000_000  # as runs are dated
    job = here.defs.resolve_job_def("recover_flights")
    run = under_way(here, job, gone)
    launcher = here.instance.run_launcher
    monkeypatch.setattr(type(launcher), "supports_check_run_worker_health", property(lambda self: True))
    assert end_lost_runs(here.instance, {job.tags[STREAM_TAGS[0]]}, STREAM_TAGS, ACTION_TAG, here.clock) == []
    assert status_of(here, run) is dg.DagsterRunStatus.STARTED


def test_a_run_notes_who_does_it(world: Callable[..., World], flights: JobRoot) -> None:
    """By the resource, which every run of ours needs."""
    here = world()
    flights.start()
    here.launchers["flights"] = FakeLauncher(flights)
    done = here.defs.resolve_job_def("recover_flights").execute_in_process(instance=here.instance)
    run = here.instance.get_run_by_id(done.run_id)
    assert run is not None
    worker = read_worker(run.tags[WORKER_TAG])
    assert worker is not None
    assert (worker.pid, worker.space, worker.beat_ms) == (os.getpid(), HERE, here.clock.now_ms())
    needed = {job.name: job.resource_defs for job in here.defs.resolve_all_job_defs() if STREAM_TAGS[0] in job.tags}
    assert all("stillstate" in resources for resources in needed.values())
