"""The overview: one table of all jobs, on change and every minute."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_world import FakeLauncher, World
from job_roots import SECRET, FakeClock, JobRoot, checkpoint_of

from state_runtime.base.errors import StoreUnavailable
from stillstate.assets.mount import Mount
from stillstate.assets.overview import NEXT_LOOK_S, OVERVIEW_S
from stillstate.orchestration.standby import RESTARTED

SENSOR = "stillstate_progress"


def as_read(cell: str) -> str:
    """Blanks do not break; everything else can be copied into a command: job-001 is found by its name."""
    return cell.replace("\N{NO-BREAK SPACE}", " ")


def written(here: World, name: str) -> list[list[dict[str, str]]]:
    """A table of each overview that a tick wrote, as a person reads it."""
    events = [e for e in here.tick(SENSOR).asset_events if e.asset_key == Mount().overview()]
    found = [event.metadata.get(name) for event in events]
    return [
        [{column: as_read(str(cell)) for column, cell in r.data.items()} for r in t.records]
        for t in found
        if isinstance(t, dg.TableMetadataValue)
    ]


def tables(here: World) -> list[list[dict[str, str]]]:
    """Of all jobs."""
    return written(here, "jobs")


def test_the_table_names_whom_to_look_at_first(
    world: Callable[..., World], flights: JobRoot, tmp_path: Path, clock: FakeClock
) -> None:
    here = world("buses", "flights", "trains", extra=f"storage_options: {{key: {SECRET}}}")
    flights.start()
    flights.checkpoint()
    trains = JobRoot(tmp_path / "state", "trains", clock)
    trains.start()
    clock.advance_s(60)
    flights.beat()
    (table,) = tables(here)
    here.cursor = None
    ((trouble,),) = written(here, "ill")
    assert [(row["job"], row["health"]) for row in table] == [
        ("trains", "dead"),
        ("buses", "never-started"),
        ("flights", "healthy"),
    ]
    assert trouble["job"] == "trains"
    assert trouble["why"].startswith("dead: ")
    assert "its last heartbeat was at 2023-11-14 22:13:20Z" in trouble["why"]
    assert trouble["since"] == "2023-11-14 22:13:20Z"
    assert table[2] == {
        "job": "flights", "health": "healthy", "term": "1", "checkpoint": "2023-11-14 22:13:20Z",
    }  # fmt: skip
    assert SECRET not in repr((table, trouble))


def test_a_house_that_is_well_has_no_table_of_the_ill(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    flights.start()
    assert written(here, "ill") == []
    here.cursor = None
    assert len(tables(here)) == 1


def test_a_column_is_there_once_a_job_has_something_for_it(world: Callable[..., World], flights: JobRoot) -> None:
    """Dagster gives the table half of the window: columns that say nothing push those that do out of it."""
    here = world("buses", "flights")
    flights.start()
    flights.checkpoint()
    assert {"lag", "replay", "savepoint", "recovery"}.isdisjoint(tables(here)[0][0])
    here.cursor = None
    assert flights.committer is not None
    usual = checkpoint_of(flights.committer.last).progress
    assert usual is not None
    late = dataclasses.replace(usual, timestamp_ms=1_700_000_130_000, watermark_ms=1_700_000_000_000)
    flights.checkpoint(progress=late)
    ((bus, flight),) = tables(here)
    assert (bus["lag"], flight["lag"]) == ("", "2 min")


def test_it_is_written_on_a_change_and_every_half_hour(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    flights.start()
    assert len(tables(here)) == 1
    for _ in range(359):
        here.clock.advance_s(5)
        flights.beat()
        flights.checkpoint()
        assert tables(here) == [], "nothing that a person looks for has changed"
    here.clock.advance_s(5)
    flights.beat()
    assert len(tables(here)) == 1
    here.clock.advance_s(60)
    flights.beat("stopped")
    assert [table[0]["health"] for table in tables(here)] == ["stopped"]


def test_a_job_that_comes_and_goes_does_not_write_it_at_every_tick(
    world: Callable[..., World], flights: JobRoot
) -> None:
    here = world()
    written = 0
    for n in range(120):
        if n % 2:
            flights.beat("failed")
        else:
            flights.start()
        written += len(tables(here))
        here.clock.advance_s(5)
    assert written <= 10


def test_a_damaged_job_and_its_last_recovery_are_shown(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    flights.start()
    flights.checkpoint()
    flights.damage(2)
    here.clock.advance_s(60)
    job = here.defs.resolve_job_def("recover_flights")
    here.instance.create_run_for_job(job, tags=dict(job.tags), status=dg.DagsterRunStatus.FAILURE)
    ((row,),) = tables(here)
    assert row["health"] == "damaged"
    here.cursor = None
    assert "is damaged" in written(here, "ill")[0][0]["why"]
    assert row["recovery"].startswith("failed ")


def test_restarts_of_all_jobs_are_in_one_table_with_cause_restore_point_and_time_down(
    world: Callable[..., World], flights: JobRoot
) -> None:
    """They were two or three events of each stream, and nobody saw that ten streams had restarted in one night."""
    here = world("flights", "trains")
    here.launchers["flights"] = FakeLauncher(flights)
    flights.start()
    flights.checkpoint()
    assert written(here, "restarts") == []
    clock = here.clock
    clock.advance_s(3600)
    (request,) = here.recovery()
    job = here.defs.resolve_job_def(request.job_name)
    assert job.execute_in_process(run_config=request.run_config, tags=request.tags, instance=here.instance).success
    here.cursor = None
    ((row,),) = written(here, "restarts")
    assert (row["job"], row["outcome"]) == ("flights", "recovered")
    assert "is gone; its last heartbeat was at 2023-11-14" in row["cause"]
    assert row["restored_from"].startswith("snapshot 2 of 2023-11-14")
    assert row["down"]
    clock.at_ms = time.time_ns() // 1_000_000 + 3_600_000  # as runs are dated, and later
    flights.start()
    flights.beat(cause=f"{RESTARTED} after exit code 1")
    here.cursor = None
    ((newest, _),) = written(here, "restarts")
    assert (newest["outcome"], newest["cause"]) == ("in place", f"{RESTARTED} after exit code 1")


def check_of(here: World) -> dg.AssetCheckEvaluation:
    """What the newest tick says of all jobs together."""
    (seen,) = [e for e in here.tick(SENSOR).asset_events if isinstance(e, dg.AssetCheckEvaluation)]
    assert seen.asset_key == Mount().overview()
    return seen


def test_an_overview_with_ill_jobs_is_told_from_one_that_is_well_at_a_glance(
    world: Callable[..., World], flights: JobRoot
) -> None:
    """They were all green ticks. As red as `driver_alive` of the worst job: a recovery is no reason to get up."""
    here = world("flights", extra="recovery: {max_attempts: 1}")
    flights.start()
    seen = check_of(here)
    assert (seen.passed, seen.description) == (True, "the job is well")
    flights.beat("failed", "InvalidData: row 7", error_kind="unavailable")
    here.clock.advance_s(60)
    seen = check_of(here)
    assert (seen.passed, seen.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert seen.description == "1 of 1 job needs a look: flights"
    flights.beat("failed", "InvalidData: row 7", error_kind="invalid")
    for event in here.tick("stillstate_recovery").asset_events:
        here.instance.report_runless_asset_event(event)
    here.clock.advance_s(60)
    assert check_of(here).severity is dg.AssetCheckSeverity.ERROR, "a job that is given up on is shown at once"


def test_a_person_can_run_the_check_of_the_overview(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    flights.start()
    here.clock.advance_s(60)
    key = dg.AssetCheckKey(Mount().overview(), "all_jobs_well")
    (check,) = [c for c in here.defs.asset_checks or () if key in c.check_keys]  # type: ignore[union-attr]
    done = dg.materialize(
        [check],  # type: ignore[list-item]
        instance=here.instance,
        resources={"stillstate": here.resource},
        selection=dg.AssetSelection.checks(key),
    )
    (seen,) = done.get_asset_check_evaluations()
    assert (seen.passed, seen.severity) == (False, dg.AssetCheckSeverity.WARN)


def test_an_overview_says_by_when_somebody_should_have_looked_again(
    world: Callable[..., World], flights: JobRoot
) -> None:
    """A daemon that stands still leaves green pages: it cannot say so, but what it wrote last can."""
    here = world()
    flights.start()
    (table,) = [
        e for e in here.tick(SENSOR).asset_events if isinstance(e, dg.AssetMaterialization) and "jobs" in e.metadata
    ]
    now_s = here.clock.at_ms / 1000
    assert (table.metadata["looked_at"].value, table.metadata["next_look_by"].value) == (now_s, now_s + NEXT_LOOK_S)
    assert NEXT_LOOK_S > OVERVIEW_S, "a daemon that is well has always written the next one by then"


def test_since_when_a_store_is_away_is_known_after_the_code_location_was_reloaded(
    world: Callable[..., World], flights: JobRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look of a test has a process's memory of its own. It was counted anew: 11 minutes of a store away for 42."""
    here = world()
    flights.start()
    assert tables(here)

    def away(*_: Any) -> Any:
        raise StoreUnavailable("it does not answer")

    with monkeypatch.context() as patched:
        patched.setattr("stillstate.orchestration.probes.watch.look_at", away)
        for _ in range(5):
            here.tick(SENSOR)
            here.clock.advance_s(60)
        here.clock.advance_s(OVERVIEW_S)
        ((row,),) = written(here, "ill")
        assert (row["job"], row["since"]) == ("flights", "2023-11-14 22:13:20Z")
        assert re.search(r"\d (s|min|h|d)\b", row["why"]) is None, "a duration goes stale"
    here.clock.advance_s(60)
    flights.beat()
    assert written(here, "ill") == []
    with monkeypatch.context() as patched:
        patched.setattr("stillstate.orchestration.probes.watch.look_at", away)
        here.clock.advance_s(60)
        ((row,),) = written(here, "ill")
        assert row["since"] > "2023-11-14 22:13:20Z", "it had answered in between"
