"""`savepoint_<job>`: made with its tags, or skipped with a word; by schedule only if the yaml says so."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.test_utils import instance_for_test
from dagster_world import World
from job_roots import FakeClock, JobRoot
from maintenance_root import Job as RealJob
from tenacity import retry, retry_if_result, stop_after_delay, wait_fixed

from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.driver.savepoint_requests import Savepoints
from state_runtime.maintenance.retention.apply import make_retention_plan
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.control import new_requests
from state_runtime.snapshot.savepoint_record import list_savepoints, rewrite_savepoint
from state_runtime.snapshot.term_files import RunStatus
from state_runtime.store import open_store
from stillstate.orchestration.config.spec import JobSpec, Spec, load_spec, to_policy
from stillstate.orchestration.definitions import build_definitions
from stillstate.orchestration.jobs.savepoints import SavepointConfig
from stillstate.orchestration.launchers import Launcher, LocalLauncher
from stillstate.orchestration.resources import StillstateResource
from stillstate.orchestration.running.make_savepoint import savepoint_rows
from stillstate.orchestration.upkeep.scheduled_savepoint import PATIENCE_S, SavepointWish

FAKE_DRIVER = str(Path(__file__).parent / "fake_driver.py")
KEY = dg.AssetKey(["flights", "savepoints"])


def run(world: World, **config: Any) -> Any:
    job = world.defs.resolve_job_def("savepoint_flights")
    run_config = {"ops": {"flights__savepoints": {"config": config}}} if config else {}
    return job.execute_in_process(run_config=run_config, instance=world.instance, raise_on_error=False)


def failure_of(done: Any) -> Any:
    """What a run that failed says, and its metadata."""
    (event,) = [e for e in done.all_events if e.is_step_failure]
    return event.step_failure_data.user_failure_data


class Drivers:
    """Drivers of one job that hear requests whenever somebody waits, until the test ends them.

    Attributes:
        on_poll: what happens meanwhile, one thing at each look; afterwards the driver that is left does its work.
        pauses_s: how long was waited each time.
    """

    def __init__(self, root: JobRoot, here: World) -> None:
        self.root = root
        self.on_poll: list[Callable[[], object]] = []
        self.pauses_s: list[float] = []
        self.here: Savepoints | None = None
        here.polls.append(self.poll)
        self.start()

    def start(self) -> None:
        """The next run; what the last one left is looked for first."""
        term = self.root.start()
        assert self.root.committer is not None
        self.here = Savepoints(
            self.root.catalog.root, self.root.committer.info, term, clock=self.root.clock, ids=SYSTEM_IDS
        )
        self.here.look_back()
        while self.here.do_one():
            pass

    def die(self) -> None:
        """Without a last word; nobody hears of it for a while, and its process is gone."""
        self.here = None
        self.root.clock.advance_s(10)

    def hear(self) -> None:
        """Take the name of what was asked for."""
        assert self.here is not None
        assert self.root.committer is not None
        for request in new_requests(self.root.catalog.root, self.root.committer.term.term, ()).values():
            assert request is not None
            self.here.hear(request)

    def begin(self) -> None:
        assert self.here is not None
        assert self.root.committer is not None
        self.here.begin(self.root.committer.last)

    def poll(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.root.clock.advance_s(seconds)
        if self.on_poll:
            self.on_poll.pop(0)()
        elif self.here is not None:
            self.root.beat()
            self.hear()
            self.begin()
            self.here.do_one()

    def asked_again(self) -> int:
        return sum(seconds >= 1 for seconds in self.pauses_s)


def events(world: World) -> list[Any]:
    return [r.asset_materialization for r in world.instance.fetch_materializations(KEY, limit=10).records]


def test_a_savepoint_is_made_tagged_and_shown_with_the_way_back(world: Callable[..., World], flights: JobRoot) -> None:
    house = world(extra="savepoints: {tags: [nightly]}")
    flights.start("stopped")
    assert run(house).success
    (record,) = list_savepoints(flights.catalog.root)
    assert (record.state, record.trigger, record.tags) == ("COMPLETED", "schedule", ("nightly",))
    assert record.name.startswith("20231114t"), "named by the time"
    (event,) = events(house)
    (row,) = [r.data for r in event.metadata["savepoints"].records]
    assert row["go back to it"] == f"stillstate rollback flights {record.name}"
    assert row["made by"] == "schedule: nightly"
    assert "state" not in row, "all are complete: a column for the others"
    assert event.metadata["place"].value.endswith("flights/savepoints/NAME")
    assert event.tags["dagster/data_version"] == record.name


def test_what_the_command_takes_dagster_takes(world: Callable[..., World], flights: JobRoot) -> None:
    """A person who launches the job from its page names a savepoint, as on the command line."""
    house = world(extra="savepoints: {tags: [nightly]}")
    drivers = Drivers(flights, house)
    asked = {"name": "before-upgrade", "tags": ["release"], "note": "version 2", "independent": True}
    assert run(house, **asked, drain_inflight=True).success
    (made,) = list_savepoints(flights.catalog.root)
    assert (made.name, made.tags, made.note, made.independent) == ("before-upgrade", ("release",), "version 2", True)
    assert (made.state, made.trigger, made.drain_inflight) == ("COMPLETED", "user", True)
    assert "has a savepoint" in failure_of(run(house, name="before-upgrade")).description, (
        "a name belongs to one savepoint"
    )
    assert [SavepointConfig(**{end: True}).wish() for end in ("stop", "drain")] == [
        SavepointWish(then="stop"),
        SavepointWish(then="drain"),
    ]
    assert "give one of stop and drain" in failure_of(run(house, stop=True, drain=True)).description
    drivers.die()
    assert run(house, name="again").success, "what a person asks for is made where nothing is new too"
    with pytest.raises(dg.DagsterInvalidConfigError, match="not in enum type"):
        run(house, format="parquet")


@pytest.mark.parametrize("reached", ["asked", "heard"])
def test_a_named_savepoint_whose_driver_dies_is_asked_for_again_or_fails_with_the_reason(
    reached: str, world: Callable[..., World], flights: JobRoot
) -> None:
    """Asked again by its name where that is free; a name that the dead run's request has spoiled is said at once."""
    house = world()
    drivers = Drivers(flights, house)
    drivers.on_poll = [*([drivers.hear] if reached == "heard" else []), drivers.die, drivers.start]
    done = run(house, name="mine")
    assert done.success is (reached == "asked")
    if not done.success:
        assert "savepoint 'mine' is ABANDONED" in failure_of(done).description
    assert drivers.asked_again() == 1


def test_a_savepoint_whose_bytes_are_the_jobs_too_is_told_from_one_that_has_its_own(
    world: Callable[..., World], tmp_path: Path
) -> None:
    """Damage to a shared file is damage to the savepoint."""
    job = RealJob(open_store(str(tmp_path / "state")), FakeClock(), name="flights")
    job.checkpoints(2).ended()
    house = world()
    assert run(house).success
    assert files(house)[0].endswith("with the job")
    for segment in (tmp_path / "state" / "flights" / "changelog").rglob("*.seg"):
        body = segment.read_bytes()
        segment.unlink()
        segment.write_bytes(body)  # the same bytes, and a copy of its own
    job.start()
    job.ended()
    house.clock.advance_s(60)
    assert run(house).success
    now = files(house)
    assert (now[0].endswith("with the job"), now[1]) == (True, "its own")


def files(house: World) -> list[str]:
    """The column of the newest table, newest savepoint first."""
    return [r.data["files"] for r in events(house)[0].metadata["savepoints"].records]


def test_where_nothing_is_new_none_is_made(world: Callable[..., World], flights: JobRoot) -> None:
    house = world()
    assert run(house).success, "never started: skipped with a word"
    flights.start("stopped")
    assert run(house).success
    assert run(house).success
    assert len(list_savepoints(flights.catalog.root)) == 1
    assert flights.committer is not None
    flights.committer.commit(flights.committer.last)
    flights.clock.advance_s(60)
    assert run(house).success
    assert len(list_savepoints(flights.catalog.root)) == 2
    assert len(events(house)) == 2


@retry(
    retry=retry_if_result(lambda status: status is None or status.term < 2),
    stop=stop_after_delay(20),
    wait=wait_fixed(0.05),
)
def brought_back(catalog: Catalog) -> RunStatus | None:
    """By its supervisor, a process of its own."""
    return catalog.status()


@pytest.mark.parametrize("reached", ["asked", "heard"])
def test_a_driver_that_dies_before_its_savepoint_is_made_is_asked_again_once_it_is_back(
    reached: str, world: Callable[..., World], flights: JobRoot
) -> None:
    """What the first run was asked for is void and stays so: one savepoint comes of it."""
    house = world()
    drivers = Drivers(flights, house)
    drivers.on_poll = [*([drivers.hear] if reached == "heard" else []), drivers.die, drivers.start]
    assert run(house).success
    rows = savepoint_rows(flights.catalog, flights.clock)
    (made,) = [r for r in list_savepoints(flights.catalog.root) if r.state == "COMPLETED"]
    assert (made.term, made.trigger, drivers.asked_again()) == (2, "schedule", 1)
    assert {r.state for r in rows if r.name != made.name} <= {"ABANDONED"}
    assert [e.tags["dagster/data_version"] for e in events(house)] == [made.name]


def test_a_savepoint_that_the_next_run_goes_on_with_is_not_asked_for_twice(
    world: Callable[..., World], flights: JobRoot
) -> None:
    """The driver died between the first write of its record and its answer."""
    house = world()
    drivers = Drivers(flights, house)

    def dies_copying() -> None:
        drivers.hear()
        (asked,) = list_savepoints(flights.catalog.root)
        rewrite_savepoint(flights.catalog.root, asked.to("IN_PROGRESS", flights.clock.now_ms(), snapshot_id=1))
        drivers.die()

    drivers.on_poll = [dies_copying, drivers.start]
    assert run(house).success
    (made,) = list_savepoints(flights.catalog.root)
    assert (made.state, made.term, made.snapshot_id) == ("COMPLETED", 1, 1)


def test_of_a_job_that_stays_down_the_newest_snapshot_is_saved(world: Callable[..., World], flights: JobRoot) -> None:
    """It is what a recovery would go on from, and there may be none."""
    house = world()
    drivers = Drivers(flights, house)
    drivers.on_poll = [drivers.hear, drivers.die]
    done = run(house)
    assert done.success
    (made,) = [r for r in list_savepoints(flights.catalog.root) if r.state == "COMPLETED"]
    assert (made.term, made.snapshot_id) == (0, 1)


def test_a_job_that_changes_hands_all_the_time_is_given_up_with_the_reason(
    world: Callable[..., World], flights: JobRoot
) -> None:
    """Each run is replaced before it hears: later each time it is asked again, and not for ever."""
    house = world()
    drivers = Drivers(flights, house)
    drivers.on_poll = [drivers.start] * 1000
    began_ms = flights.clock.now_ms()
    done = run(house)
    assert not done.success
    failure = failure_of(done)
    assert "ended without answering" in failure.description
    assert "none helped" in failure.description
    assert failure.metadata["exit_code"].value == 4
    pauses = [seconds for seconds in drivers.pauses_s if seconds >= 1]
    assert all(a <= b for a, b in pairwise(pauses))
    assert pauses[-1] == 30
    assert (flights.clock.now_ms() - began_ms) / 1000 <= PATIENCE_S


def test_a_savepoint_that_failed_is_not_asked_for_again(world: Callable[..., World], flights: JobRoot) -> None:
    """A file of the snapshot is missing: that does not pass."""
    house = world()
    drivers = Drivers(flights, house)
    flights.checkpoint()  # its table was never written
    done = run(house)
    assert not done.success
    assert "is FAILED" in failure_of(done).description
    assert drivers.asked_again() == 0
    (record,) = list_savepoints(flights.catalog.root)
    assert record.state == "FAILED"


def test_what_dagster_makes_goes_by_the_rules_and_what_a_user_made_does_not(
    world: Callable[..., World], flights: JobRoot, write_config: Callable[..., Path]
) -> None:
    house = world()
    flights.start("stopped")
    for _ in range(3):
        assert run(house).success
        assert flights.committer is not None
        flights.committer.commit(flights.committer.last)
        flights.clock.advance_s(60)
    policy = to_policy(load_spec(write_config(extra="retention: {keep_last: 1}")).job("flights"))
    plan = make_retention_plan(flights.catalog.root, policy, clock=flights.clock, share_max=1.0)
    savepoints = [d for d in plan.decisions if d.item.kind == "savepoint"]
    assert [d.kept for d in savepoints] == [True, False, False]
    assert [row.trigger for row in savepoint_rows(flights.catalog, flights.clock)] == ["schedule"] * 3


def test_a_schedule_is_there_if_the_file_has_one(write_config: Callable[..., Path]) -> None:
    def found(extra: str) -> dict[str, Any]:
        schedules = build_definitions(load_spec(write_config(extra=extra))).get_repository_def().schedule_defs
        return {s.name: s.cron_schedule for s in schedules if s.name.startswith("savepoint_")}

    assert found("") == {}
    assert found("savepoints: {schedule: 0 4 * * *}") == {"savepoint_flights_schedule": "0 4 * * *"}


def test_a_savepoint_waits_for_no_verification_and_holds_up_no_recovery(write_config: Callable[..., Path]) -> None:
    tags = build_definitions(load_spec(write_config())).resolve_job_def("savepoint_flights").run_tags
    assert tags["stillstate/savepoint"] == "flights"
    assert not {"stillstate/upkeep", "stillstate/job"} & set(tags)


@pytest.fixture
def killed_when_asked(write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalLauncher]:
    """A driver with a supervisor, that is gone as soon as it hears of a savepoint; ended with the test."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    config = write_config(extra="launcher: {start_timeout_s: 30, restarts: 3}\noptions: {behaviour: dies-asked}")
    launcher = LocalLauncher(config, load_spec(config).job("flights"), command=(sys.executable, FAKE_DRIVER))
    yield launcher
    status = launcher._catalog.status()
    if status is not None:
        launcher.end_lost(status)


def test_a_driver_killed_when_it_is_asked_costs_no_failed_run(killed_when_asked: LocalLauncher) -> None:
    """A real process, its real supervisor, and a real instance: one run, one savepoint."""
    launcher = killed_when_asked

    class Resource(StillstateResource):
        def launcher(self, spec: Spec, job: JobSpec) -> Launcher:
            return launcher

    launcher.start()
    defs = build_definitions(load_spec(launcher._config), Resource(config_file=str(launcher._config)))
    with instance_for_test() as instance:
        done = defs.resolve_job_def("savepoint_flights").execute_in_process(instance=instance, raise_on_error=False)
        assert done.success, failure_of(done)
        assert len(instance.fetch_materializations(KEY, limit=10).records) == 1
    root = launcher._catalog.root
    (made,) = [r for r in list_savepoints(root) if r.state == "COMPLETED"]
    assert made.trigger == "schedule"
    status = brought_back(Catalog(launcher._store, "flights"))
    assert status is not None
    assert status.state in ("starting", "running")
