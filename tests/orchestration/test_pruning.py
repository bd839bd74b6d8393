"""What streams leave in Dagster's storage ends: in a real instance, with events and runs of others beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import sqlalchemy as sql
from dagster._core.storage.event_log.schema import SqlEventLogStorageTable
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage
from dagster._core.test_utils import instance_for_test
from dagster_world import World
from job_roots import FakeClock

from state_runtime.base.clock import SYSTEM_CLOCK
from stillstate.assets.mount import Mount
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.jobs.past_runs import RUNS_READ_MAX, past_runs
from stillstate.orchestration.jobs.tags import ACTION_TAG, JOB_TAG, UPKEEP_TAG, prune_tag, recovery_run_tags
from stillstate.orchestration.recovery.plan import Loss, RecoveryPlan, plan_recovery
from stillstate.orchestration.upkeep import pruning

DAY_MS = 86_400_000
KEPT = 3
RUNS_KEPT = pruning.RUNS_KEPT
OURS, YOURS = Mount().checkpoints("flights"), dg.AssetKey("report")


@pytest.fixture(autouse=True)
def few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "EVENTS_KEPT", KEPT)
    monkeypatch.setattr(pruning, "RUNS_KEPT", 0)


@pytest.fixture
def house(world: Callable[..., World]) -> World:
    """Ten events and evaluations of a stream's and of another asset, and finished runs of both."""
    here = world()
    publish(here.instance)
    job = here.defs.resolve_job_def("start_flights")
    for tags, status in (
        ({JOB_TAG: "flights"}, dg.DagsterRunStatus.FAILURE),
        ({JOB_TAG: "flights"}, dg.DagsterRunStatus.SUCCESS),
        ({JOB_TAG: "flights"}, dg.DagsterRunStatus.STARTED),
        ({JOB_TAG: "flights-of-another-file"}, dg.DagsterRunStatus.SUCCESS),
        ({}, dg.DagsterRunStatus.SUCCESS),
    ):
        here.instance.create_run_for_job(job, tags=tags, status=status)
    return here


def publish(instance: dg.DagsterInstance) -> None:
    for number in range(10):
        for key in (OURS, YOURS):
            event = dg.AssetMaterialization(key, metadata={"n": number}, tags={"dagster/data_version": str(number)})
            instance.report_runless_asset_event(event)
            instance.report_runless_asset_event(dg.AssetCheckEvaluation(asset_key=key, check_name="c", passed=True))


def later(days: float) -> FakeClock:
    return FakeClock(SYSTEM_CLOCK.now_ms() + int(days * DAY_MS))


def numbers(instance: dg.DagsterInstance, key: dg.AssetKey) -> list[Any]:
    records = instance.fetch_materializations(key, limit=100).records
    return [r.asset_materialization.metadata["n"].value for r in records if r.asset_materialization is not None]


def evaluations(instance: dg.DagsterInstance, key: dg.AssetKey) -> int:
    return len(instance.event_log_storage.get_asset_check_execution_history(dg.AssetCheckKey(key, "c"), limit=100))


def stored(instance: dg.DagsterInstance, run_id: str | None) -> int:
    """Events of no run: in the tables that Dagster looks into, or (run_id "") in SQLite's copy."""
    storage = instance.event_log_storage
    assert isinstance(storage, SqlEventLogStorage)
    connect = storage.index_connection() if run_id is None else storage.run_connection(run_id)
    with connect as connection:
        count = sql.select(sql.func.count()).where(SqlEventLogStorageTable.c.run_id == "")
        return int(connection.execute(count).scalar())


def pruned(here: World, clock: FakeClock) -> pruning.Pruned:
    return pruning.prune(here.instance, [OURS], [JOB_TAG], {"flights"}, keep_days=30, clock=clock)


def test_old_events_and_runs_of_streams_go_and_those_of_others_stay(house: World) -> None:
    """The newest of each asset and check stay, however old, and so does what has not ended."""
    before = stored(house.instance, None)
    assert pruned(house, later(29)) == pruning.Pruned(runs=0, events=0)
    assert numbers(house.instance, OURS) == list(range(9, -1, -1))
    done = pruned(house, later(31))
    assert done == pruning.Pruned(runs=2, events=2 * (10 - KEPT))
    assert numbers(house.instance, OURS) == [9, 8, 7]
    assert evaluations(house.instance, OURS) == KEPT
    assert numbers(house.instance, YOURS) == list(range(9, -1, -1))
    assert evaluations(house.instance, YOURS) == 10
    assert stored(house.instance, None) == before - 2 * (10 - KEPT)
    left = [(r.tags.get(JOB_TAG), r.status.value) for r in house.instance.get_runs()]
    assert sorted(left, key=str) == [("flights", "STARTED"), ("flights-of-another-file", "SUCCESS"), (None, "SUCCESS")]
    assert pruned(house, later(31)) == pruning.Pruned(runs=0, events=0), "again: nothing is left to do"
    newest = house.instance.get_latest_materialization_event(OURS)
    assert newest is not None
    house.instance.report_runless_asset_event(dg.AssetMaterialization(OURS, metadata={"n": 10}))
    assert numbers(house.instance, OURS)[0] == 10


def test_a_job_that_was_given_up_on_stays_so_however_long_it_is_left(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known of it is in its runs: without them its driver would be started again, unasked, after a month."""
    assert RUNS_KEPT >= RUNS_READ_MAX, "as many stay as are read to decide"
    here = world()
    job = here.defs.resolve_job_def("start_flights")
    for tags in ({JOB_TAG: "flights"}, recovery_run_tags("flights", 7, 1, 1, 0, "corrupt")):
        here.instance.create_run_for_job(job, tags=tags, status=dg.DagsterRunStatus.FAILURE)
    loss = Loss(term=7, verdict="failed", kind="corrupt", progress=0, lived_s=10.0)

    def plan() -> RecoveryPlan:
        runs = past_runs(here.instance, "flights")
        return plan_recovery(loss, runs, later(31).now_ms() / 1000, max_attempts=3, backoff_s=1.0)

    assert plan().gave_up
    for kept, deleted in ((RUNS_KEPT, 0), (1, 1)):
        monkeypatch.setattr(pruning, "RUNS_KEPT", kept)
        assert pruned(here, later(31)).runs == deleted
        assert plan().gave_up


def test_sqlites_copy_of_events_without_a_run_goes_too() -> None:
    """It is in a file of its own, which nothing reads and which grew without end."""
    with instance_for_test() as instance:
        publish(instance)
        assert (stored(instance, ""), stored(instance, None)) == (40, 40)
        done = pruning.prune(instance, [OURS], [JOB_TAG], {"flights"}, keep_days=30, clock=later(31))
        assert done == pruning.Pruned(runs=0, events=2 * (10 - KEPT))
        assert stored(instance, "") == 10, "the other asset's materializations"
        assert numbers(instance, OURS) == [9, 8, 7]
        assert evaluations(instance, YOURS) == 10


def test_a_month_is_kept_by_default_and_the_job_prunes_every_night(write_config: Callable[..., Path]) -> None:
    from stillstate.orchestration.definitions import build_definitions

    def made(house: str) -> tuple[str, str]:
        defs = build_definitions(load_spec(write_config(house=house)))
        schedule = defs.resolve_schedule_def("stillstate_prune_schedule")
        return schedule.cron_schedule, schedule.default_status.value

    assert made("") == ("25 4 * * *", "RUNNING")
    assert made("dagster: {keep_days: 0}") == ("25 4 * * *", "STOPPED")


def test_the_job_prunes_all_assets_of_all_streams(house: World) -> None:
    house.clock.advance_s((SYSTEM_CLOCK.now_ms() - house.clock.now_ms()) / 1000 + 31 * 86_400)
    job = house.defs.resolve_job_def("stillstate_prune")
    assert job.execute_in_process(instance=house.instance).success
    assert numbers(house.instance, OURS) == [9, 8, 7]


def test_runs_that_prune_end_and_go_as_those_of_streams_do(house: World) -> None:
    job = house.defs.resolve_job_def("stillstate_prune")
    tag = prune_tag(Mount())
    assert (job.tags[ACTION_TAG], job.tags[UPKEEP_TAG]) == ("prune", tag)
    assert int(job.tags["dagster/max_runtime"]) > 0
    house.instance.create_run_for_job(job, tags=dict(job.tags), status=dg.DagsterRunStatus.SUCCESS)
    assert pruning.prune(house.instance, [], [UPKEEP_TAG], {tag}, keep_days=30, clock=later(31)).runs == 1
