"""The overview: one table of all jobs, on change and every minute."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import dagster as dg
from dagster_world import FakeLauncher, World
from job_roots import SECRET, FakeClock, JobRoot, checkpoint_of

from stillstate.assets.mount import Mount
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
    assert "last heartbeat is 60.0 s old" in trouble["why"]
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
    assert "is gone; its last heartbeat is" in row["cause"]
    assert row["restored_from"].startswith("snapshot 2 of 2023-11-14")
    assert row["down"]
    clock.at_ms = time.time_ns() // 1_000_000 + 3_600_000  # as runs are dated, and later
    flights.start()
    flights.beat(cause=f"{RESTARTED} after exit code 1")
    here.cursor = None
    ((newest, _),) = written(here, "restarts")
    assert (newest["outcome"], newest["cause"]) == ("in place", f"{RESTARTED} after exit code 1")
