"""200 jobs, of which twenty are on a store that never answers and twenty on one that refuses, on a real instance and
with Dagster's own server for the code location."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from black_holes import black_hole, refused
from dagster._core.scheduler.instigation import TickStatus
from dagster._core.test_utils import create_test_daemon_workspace_context, instance_for_test
from dagster._core.workspace.load_target import ModuleTarget
from dagster._daemon.sensor import execute_sensor_iteration
from house import House, write_house
from job_roots import FakeClock

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.definitions import build_definitions
from stillstate.orchestration.probes.pool import ProbePool
from stillstate.orchestration.resources import StillstateResource

ROOT = Path(__file__).resolve().parents[2]
SENSORS = ("stillstate_progress", "stillstate_recovery", "stillstate_desired_state", "stillstate_materialization")


@contextlib.contextmanager
def a_house(folder: Path, clock: FakeClock, *, jobs: int, bad: int) -> Iterator[House]:
    """`bad` stores that hang, and as many that refuse."""
    clock.at_ms = SYSTEM_CLOCK.now_ms()
    extra = "observation: {timeout_s: 2}"
    with black_hole() as hole:
        yield write_house(folder, clock, jobs=jobs, hanging=bad, refused=bad, hole=hole, closed=refused(), extra=extra)


@pytest.fixture
def house(tmp_path: Path, clock: FakeClock) -> Iterator[House]:
    with a_house(tmp_path, clock, jobs=200, bad=20) as made:
        yield made


@pytest.fixture
def smaller_house(tmp_path: Path, clock: FakeClock) -> Iterator[House]:
    """Dagster takes minutes to load and to serve two hundred jobs twice on a busy machine."""
    with a_house(tmp_path, clock, jobs=30, bad=10) as made:
        yield made


class Here:
    """Sensors of a house over a lookout of the test's own."""

    def __init__(self, house: House, clock: FakeClock, instance: dg.DagsterInstance) -> None:
        lookout = ProbePool()

        class Resource(StillstateResource):
            def clock(self) -> Clock:
                return clock

            def lookout(self) -> ProbePool:
                return lookout

        self.resource = Resource(config_file=str(house.file))
        self.defs = build_definitions(load_spec(house.file), self.resource)
        self.instance = instance

    def tick(self, name: str, cursor: str | None = None) -> dg.SensorResult:
        with dg.build_sensor_context(
            instance=self.instance, cursor=cursor, resources={"stillstate": self.resource}
        ) as context:
            result = self.defs.resolve_sensor_def(name)(context)
        assert isinstance(result, dg.SensorResult)
        return result


def test_every_healthy_job_is_published_in_the_first_tick(
    house: House, clock: FakeClock, instance: dg.DagsterInstance
) -> None:
    assert (len(house.healthy), len(house.hanging), len(house.refused)) == (160, 20, 20)
    result = Here(house, clock, instance).tick("stillstate_progress")
    published = {event.asset_key.path[0] for event in result.asset_events if event.asset_key.path[1] == "checkpoints"}
    assert published == set(house.healthy)
    assert result.skip_reason is not None
    said = str(result.skip_reason.skip_message)
    assert said.count(" and 10 more: ") == 2, "a line for each store, not for each job: every tick is stored"
    assert len(said) < 2000


def test_a_dead_job_among_them_gets_its_recovery_run_in_the_first_tick(
    house: House, clock: FakeClock, instance: dg.DagsterInstance
) -> None:
    clock.advance_s(3600)
    dead = house.healthy[-1]
    for name in house.healthy[:-1]:
        house.roots[name].beat()
    requests = Here(house, clock, instance).tick("stillstate_recovery").run_requests or []
    assert [(request.job_name, request.tags["stillstate/job"]) for request in requests] == [("recover", dead)]


def test_every_healthy_job_among_them_is_compared_with_the_file_in_the_first_tick(
    house: House, clock: FakeClock, instance: dg.DagsterInstance
) -> None:
    for name in house.healthy:
        house.roots[name].beat(parallelism=9, backend="arrow")
    house.file.write_text(house.file.read_text().replace("  store: state", "  parallelism: 4\n  store: state"))
    result = Here(house, clock, instance).tick("stillstate_desired_state")
    warned = {event.asset_key.path[0] for event in result.asset_events if not event.passed}
    assert warned == set(house.healthy)
    assert result.skip_reason is not None
    assert len(str(result.skip_reason.skip_message)) < 2000, "every tick is stored"


def test_the_sensors_share_breakers_and_leave_no_threads_behind(
    house: House, clock: FakeClock, instance: dg.DagsterInstance
) -> None:
    here = Here(house, clock, instance)
    for name in SENSORS:
        here.tick(name)
    for name in SENSORS:
        said = here.tick(name).skip_reason
        assert said is not None
        assert "does not answer; it is asked again at " in str(said.skip_message), "both stores are left alone now"
    looking = [thread for thread in threading.enumerate() if thread.name.startswith("look ")]
    assert len(looking) <= 8


def test_the_code_location_stays_loaded_and_answers_while_stores_hang(
    smaller_house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster's daemon loop over its own server of the code location, which is a process of its own: two rounds."""
    house = smaller_house
    monkeypatch.setenv("STILLSTATE_CONFIG", str(house.file))
    for root in house.roots.values():
        root.beat("finished")  # else 160 recovery runs are queued
    target = ModuleTarget("stillstate.orchestration.definitions", "defs", str(ROOT), "stillstate")
    with instance_for_test() as instance, create_test_daemon_workspace_context(target, instance) as workspace:
        for _ in range(2):
            list(execute_sensor_iteration(workspace, logging.getLogger("daemon"), None, None))
        entry = workspace.create_request_context().get_code_location_entries()["stillstate"]
        assert entry.load_error is None
        assert entry.code_location is not None
        (repository,) = entry.code_location.get_repositories().values()
        for sensor in repository.get_sensors():
            (tick, *_) = instance.get_ticks(sensor.get_remote_origin_id(), sensor.selector_id)
            assert tick.error is None, sensor.name
            assert tick.status is not TickStatus.FAILURE
        stored = {key.path[0] for key in instance.all_asset_keys() if key.path[1] == "checkpoints"}
        assert stored == set(house.healthy)
