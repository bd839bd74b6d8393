"""`stillstate source set`: planned, shown, and one snapshot with another position and nothing else changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_world import World
from job_roots import NO_SUCH_PID, FakeClock, JobRoot, checkpoint_of
from typer.testing import CliRunner

from state_runtime.base.actor import Actor
from state_runtime.base.errors import InvalidConfiguration, JobAlreadyRunning, MissingSnapshot, StoreUnavailable
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.driver.rollback import execute_rollback, plan_rollback
from state_runtime.driver.set_source import SetSourcePlan, execute_set_source, plan_set_source
from state_runtime.snapshot import fencing
from state_runtime.snapshot.manifest import Manifest, SourcePosition, TimeEntry
from state_runtime.snapshot.migration import Migration, RunSettings, begin_migration, record_step
from state_runtime.sources.kafka_offsets import Partition, Positions
from state_runtime.sources.kafka_seek import Seek, To, seek
from stillstate.orchestration.cli import app
from stillstate.orchestration.running import kafka_sources

ORDERS = Positions({("orders", 0): 40, ("orders", 1): 7}, {"orders": "id-1"})
FILES = '{"logOffset":3}'
OFFSETS = "\n".join(["v1", '{"batchWatermarkMs":0}', FILES, json.dumps(ORDERS.to_json())])
POSITION = SourcePosition(5, "{}", OFFSETS, "v1\n{}\n-\n-", "{}", logs=(0,), names=("clicks", "shop"))


class Topics:
    def newest(self, topics: Sequence[str]) -> Positions:
        return Positions({("orders", 0): 100, ("orders", 1): 20}, {"orders": "id-1"})

    def earliest(self, parts: Sequence[Partition]) -> dict[Partition, int]:
        return dict.fromkeys(parts, 0)

    def at_time(self, parts: Sequence[Partition], time_ms: int) -> dict[Partition, int]:
        return dict.fromkeys(parts, -1)


def to_earliest(old: Positions) -> Seek:
    return seek(Topics(), ["orders"], old, "earliest", "source 'orders'")


def stopped(root: JobRoot, position: SourcePosition | None = POSITION) -> Manifest:
    """The newest snapshot of a job that has read and was stopped."""
    root.start()
    assert root.committer is not None
    draft = replace(checkpoint_of(root.committer.last), source=position, time=TimeEntry(1, root.clock.now_ms()))
    newest = draft.segments[-1]
    root.catalog.root.put(newest.path, b"x" * newest.bytes)
    made = root.committer.commit(draft)
    root.beat("stopped")
    return made


def actor(root: JobRoot) -> Actor:
    return Actor(root.clock, SYSTEM_IDS, root.host, NO_SUCH_PID)


def planned(root: JobRoot, source: str = "shop") -> SetSourcePlan:
    return plan_set_source(root.catalog, source, to_earliest)


@pytest.mark.parametrize("source", ["shop", "orders"])
def test_only_the_position_of_that_source_changes_and_a_rollback_takes_it_back(flights: JobRoot, source: str) -> None:
    """By its name, or by its topics. State, output and clocks are those of the snapshot before."""
    before = stopped(flights)
    made = execute_set_source(flights.catalog, planned(flights, source), actor(flights))
    assert flights.catalog.latest() == made
    assert made.source is not None
    *others, line = made.source.offsets.split("\n")
    assert others == OFFSETS.split("\n")[:3]
    assert Positions.from_json(json.loads(line)) == Positions({("orders", 0): 0, ("orders", 1): 0}, {"orders": "id-1"})
    named = ("snapshot_id", "term", "commit_id", "created_at_ms", "kind", "epoch", "previous", "format_version")
    as_before = {name: getattr(before, name) for name in named}
    assert replace(made, source=before.source, **as_before) == before
    assert (made.snapshot_id, made.kind, made.abandoned) == (before.snapshot_id + 1, "fencing", ())
    status = flights.catalog.status()
    assert status is not None
    assert (status.state, status.message) == ("stopped", f"source {source} was given another position")
    execute_rollback(flights.catalog, plan_rollback(flights.catalog, f"@{before.snapshot_id}"), actor(flights))
    back = flights.catalog.latest()
    assert back is not None
    assert back.source == before.source


def test_a_job_that_runs_is_left_alone(flights: JobRoot) -> None:
    before = stopped(flights)
    plan = planned(flights)
    flights.host = "elsewhere"
    flights.beat("running")
    with pytest.raises(JobAlreadyRunning):
        planned(flights)
    with pytest.raises(JobAlreadyRunning):
        execute_set_source(flights.catalog, plan, actor(flights))
    assert flights.catalog.latest() == before


def test_a_plan_is_of_one_snapshot(flights: JobRoot, clock: FakeClock) -> None:
    """A run that has been there since has read on: its work is not undone."""
    stopped(flights)
    plan = planned(flights)
    since = stopped(flights)
    with pytest.raises(InvalidConfiguration, match="has gone on since the plan was made"):
        execute_set_source(flights.catalog, plan, actor(flights))
    assert flights.catalog.latest() == since


def test_a_crash_leaves_the_old_position_or_the_new_one(flights: JobRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    before = stopped(flights)

    def dies(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("the process dies here")

    with monkeypatch.context() as patch:
        patch.setattr(fencing, "create_next", dies)
        with pytest.raises(StoreUnavailable):
            execute_set_source(flights.catalog, planned(flights), actor(flights))
    assert flights.catalog.latest() == before
    flights.clock.advance_s(60)
    with monkeypatch.context() as patch:
        patch.setattr("state_runtime.driver.set_source.write_stopped", dies)
        with pytest.raises(StoreUnavailable):
            execute_set_source(flights.catalog, planned(flights), actor(flights))
    after = flights.catalog.latest()
    assert after is not None
    assert after.source is not None
    assert after.source.offsets != before.source.offsets  # type: ignore[union-attr]


def test_what_is_no_source_of_topics_is_refused_with_what_there_is(flights: JobRoot) -> None:
    flights.start()
    flights.beat("stopped")
    with pytest.raises(MissingSnapshot, match="has read nothing yet"):
        planned(flights)
    stopped(flights)
    with pytest.raises(InvalidConfiguration, match=r"no source 'pay'.*clicks \(not Kafka\); shop \(orders\)"):
        planned(flights, "pay")
    with pytest.raises(InvalidConfiguration, match="no position in topics of Kafka"):
        planned(flights, "clicks")
    twice = replace(
        POSITION, names=("shop", "shop"), offsets=OFFSETS.replace(FILES, json.dumps(ORDERS.to_json())), logs=()
    )
    stopped(flights, twice)
    with pytest.raises(InvalidConfiguration, match="has 2 streams under 'shop'"):
        planned(flights)


class Asked:
    """What asks Kafka, as the job's code opens it."""

    def seek(self, old: Positions, to: To) -> Seek:
        return seek(Topics(), ["orders"], old, to, "source 'orders'")


def test_the_command_shows_each_partition_and_asks_before_it_does_anything(
    flights: JobRoot, write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stopped(flights)
    config = str(write_config())
    monkeypatch.setattr(kafka_sources, "kafka_source", lambda spec, folder, position: Asked())

    def called(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["source", "set", "flights", "shop", "-c", config, *arguments])

    shown = called("--to", '{"orders": {"0": 10, "1": 9}}', "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert "would do this" in shown.output
    assert "2 records are skipped and 30 records are read again, and count again" in shown.output
    assert "older than the watermark" in shown.output
    assert [line.split() for line in shown.output.splitlines()[1:3]] == [
        ["orders", "0", "40", "10", "0", "30"],
        ["orders", "1", "7", "9", "2", "0"],
    ]
    assert called("--to", "earliest").exit_code == 2, "there is nobody to ask"
    assert called("--to", "yesterday", "--yes").exit_code == 2
    assert flights.catalog.latest() == before
    done = called("--to", "latest", "--yes", "--json")
    values = json.loads(done.output)
    assert values["made"] == before.snapshot_id + 1
    assert [(p["was"], p["will_be"]) for p in values["partitions"]] == [(40, 100), (7, 20)]


# --- by Dagster ------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(kafka_sources, "kafka_source", lambda spec, folder, position: Asked())
    return world("flights")


def by_dagster(here: World, **config: object) -> dg.ExecuteInProcessResult:
    return here.defs.resolve_job_def("set_source_flights").execute_in_process(
        run_config={"ops": {"set_source_flights_driver": {"config": config}}},
        instance=here.instance,
        raise_on_error=False,
    )


def why_failed(done: dg.ExecuteInProcessResult) -> dg.Failure:
    (failure,) = [e for e in done.all_events if e.is_step_failure]
    return failure.step_failure_data.user_failure_data  # type: ignore[return-value]


def shown(here: World) -> list[tuple[str, dict[str, Any]]]:
    """The stream's observations, oldest first."""
    records = here.instance.fetch_observations(dg.AssetKey(["flights", "stream"]), limit=10).records
    found = [r.asset_observation for r in reversed(records) if r.asset_observation is not None]
    return [(str(one.description), {key: item.value for key, item in one.metadata.items()}) for one in found]


def test_a_run_of_dagster_shows_the_plan_and_only_a_run_that_is_told_to_applies_it(
    here: World, flights: JobRoot
) -> None:
    """Whoever has Dagster's pages only can do what the command does."""
    before = stopped(flights)
    to = {"source": "shop", "to": '{"orders": {"0": 10, "1": 9}}'}
    planned = by_dagster(here, **to)
    assert planned.success
    assert flights.catalog.latest() == before, "only looked at"
    assert planned.output_for_node("set_source_flights_driver")["outcome"] == "planned"
    done = by_dagster(here, **to, apply=True)
    assert done.success
    made = flights.catalog.latest()
    assert made is not None
    assert made.source is not None
    assert Positions.from_json(json.loads(made.source.offsets.split("\n")[-1])).next == {
        ("orders", 0): 10,
        ("orders", 1): 9,
    }
    output = done.output_for_node("set_source_flights_driver")
    assert (output["outcome"], output["made"], output["next"]) == ("set", made.snapshot_id, "start_flights")
    (first, plan), (second, again), (last, result) = shown(here)
    assert first == second == "the plan of a new position of a source"
    assert plan == again
    assert "2 records are skipped and 30 records are read again, and count again" in plan["plan"]
    assert plan["partitions"].splitlines()[2:] == ["|orders|0|40|10|0|30|", "|orders|1|7|9|2|0|"]
    assert last == f"snapshot {made.snapshot_id} is the newest; the next start goes on from it"
    assert (result["skipped"], result["again"], result["made"]) == (2, 30, made.snapshot_id)


@pytest.mark.parametrize(
    ("source", "to", "kind", "says"),
    [
        ("shop", "yesterday", "invalid", "a place to go on is earliest, latest, a time"),
        ("pay", "latest", "invalid", "no source 'pay'"),
        ("shop", '{"orders": {"0": 101}}', "invalid", "has offsets from 0 to 100, and not 101"),
    ],
)
def test_what_the_command_refuses_fails_a_run_of_dagster_with_the_same_words(
    here: World, flights: JobRoot, source: str, to: str, kind: str, says: str
) -> None:
    before = stopped(flights)
    failure = why_failed(by_dagster(here, source=source, to=to, apply=True))
    assert says in str(failure.description)
    assert failure.metadata["kind"].value == kind
    assert flights.catalog.latest() == before
    assert shown(here) == []


def test_a_run_of_dagster_leaves_a_job_alone_that_runs_or_is_being_migrated(here: World, flights: JobRoot) -> None:
    before = stopped(flights)
    root, settings = flights.catalog.root, RunSettings(2, "arrow")
    migration = begin_migration(
        root,
        Migration(
            uid="m",
            number=1,
            step="save",
            at_ms=0,
            began_ms=0,
            owner="h:1",
            before=settings,
            target=settings,
            was_running=False,
            savepoint="s",
            checkpoints=1,
            timeout_s=60,
        ),
    )
    failure = why_failed(by_dagster(here, source="shop", to="earliest", apply=True))
    assert "`stillstate migrate flights --resume` goes on with it" in str(failure.description)
    assert flights.catalog.latest() == before
    record_step(root, record_step(root, migration, "start-old", flights.clock), "rolled-back", flights.clock)
    flights.host = "elsewhere"
    flights.beat("running")
    failure = why_failed(by_dagster(here, source="shop", to="earliest", apply=True))
    assert "flights' is run by term 1" in str(failure.description)
    assert flights.catalog.latest() == before
