"""Deletes old data of Stillstate's streams from Dagster's storage: finished runs and events older than a number of
days.

Sensors publish without a run, and Dagster purges ticks only: runs and events would stay for ever. Only data of streams
of the file is deleted. The newest events without a run of each asset and check are kept: by them Dagster knows that it
exists, and its state. The newest runs of each stream and kind are kept with their events: by them a recovery knows that
it has abandoned the job.

Dagster has a public call that deletes a run, but no call for events without one. Those are deleted in the tables of its
SQL storages (SQLite, PostgreSQL and MySQL share them; tried with 1.13). On any other storage they are kept, and the
result says so.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import dagster as dg
import sqlalchemy as sql
from dagster._core.events import DagsterEventType
from dagster._core.storage.event_log.schema import (
    AssetCheckExecutionsTable,
    AssetEventTagsTable,
    AssetKeyTable,
    SqlEventLogStorageTable,
)
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage

from state_runtime.base.clock import Clock
from stillstate.orchestration.run_statuses import FINISHED

__all__ = ["Pruned", "prune"]

EVENTS_KEPT: Final = 100
"""Of each asset and check, at any age: the first events of a page, and a plot of a stream that has stopped."""
RUNS_KEPT: Final = 100
"""Of each stream and tag, at any age. This many are read to decide about a stream (jobs/past_runs.py)."""
RUNS_PER_QUERY: Final = 200
RUNS_PER_PRUNING_MAX: Final = 20_000
_RUNLESS: Final = ""  # the id that Dagster gives the run of an event without one
_EVENTS, _TAGS, _CHECKS = SqlEventLogStorageTable.c, AssetEventTagsTable.c, AssetCheckExecutionsTable.c


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """The result of a pruning.

    Attributes:
        events: None: Dagster's storage is no SQL storage, and its events are kept.
    """

    runs: int
    events: int | None


def prune(
    instance: dg.DagsterInstance,
    keys: Collection[dg.AssetKey],
    tag_names: Collection[str],
    streams: Collection[str],
    *,
    keep_days: float,
    clock: Clock,
) -> Pruned:
    """Delete runs and events that are older than `keep_days`. May be ended at any point and run again.

    Args:
        keys: of Stillstate's assets.
        tag_names, streams: a run is Stillstate's if one of these tags has the name of one of these streams.
    """
    before_s = clock.now_ms() / 1000 - keep_days * 86_400
    runs = _prune_runs(instance, tag_names, streams, before_s)
    storage = instance.event_log_storage
    if not isinstance(storage, SqlEventLogStorage):
        return Pruned(runs=runs, events=None)
    before = datetime.fromtimestamp(before_s, UTC).replace(tzinfo=None)  # as the tables have it
    return Pruned(runs=runs, events=sum(_prune_events(storage, key, before) for key in keys))


def _prune_runs(
    instance: dg.DagsterInstance, tag_names: Collection[str], streams: Collection[str], before_s: float
) -> int:
    finished = dg.RunsFilter(statuses=list(FINISHED), created_before=datetime.fromtimestamp(before_s, UTC))
    found: list[str] = []
    kept: set[str] = set()
    seen: set[tuple[str, str]] = set()
    cursor: str | None = None
    while len(found) < RUNS_PER_PRUNING_MAX:
        records = instance.get_run_records(finished, limit=RUNS_PER_QUERY, cursor=cursor)
        runs = [record.dagster_run for record in records]
        ours = {run.run_id: [(n, run.tags[n]) for n in tag_names if run.tags.get(n) in streams] for run in runs}
        found += [run_id for run_id, tags in ours.items() if tags]
        for name, stream in {tag for tags in ours.values() for tag in tags} - seen:
            kept.update(_newest_runs(instance, name, stream))
            seen.add((name, stream))
        if len(runs) < RUNS_PER_QUERY:
            break
        cursor = runs[-1].run_id
    # Only now: the next page begins after a run which must still exist.
    old = [run_id for run_id in found if run_id not in kept]
    for run_id in old:
        instance.delete_run(run_id)
    return len(old)


def _newest_runs(instance: dg.DagsterInstance, tag_name: str, stream: str) -> list[str]:
    of_stream = dg.RunsFilter(statuses=list(FINISHED), tags={tag_name: stream})
    return [record.dagster_run.run_id for record in instance.get_run_records(of_stream, limit=RUNS_KEPT)][:RUNS_KEPT]


def _prune_events(storage: SqlEventLogStorage, key: dg.AssetKey, before: datetime) -> int:
    """Delete the events of one asset and its checks."""
    text = key.to_string()
    with storage.index_connection() as connection:
        deleted = sum(
            _prune_asset_events(connection, text, kind.value, before)
            for kind in (DagsterEventType.ASSET_MATERIALIZATION, DagsterEventType.ASSET_OBSERVATION)
        )
        deleted += _prune_checks(connection, text, before)
    # SQLite has another copy of each event without a run, in a file that nothing reads.
    copies = sql.and_(
        _EVENTS.run_id == _RUNLESS,
        _EVENTS.timestamp < before,
        sql.or_(
            _EVENTS.asset_key == text,
            _EVENTS.dagster_event_type == DagsterEventType.ASSET_CHECK_EVALUATION.value,
        ),
    )
    with storage.run_connection(_RUNLESS) as connection:
        if not _is_index(connection):
            connection.execute(SqlEventLogStorageTable.delete().where(copies))
    return deleted


def _is_index(connection: Any) -> bool:
    """Whether a connection leads to the tables in which Dagster looks assets up: other storages have one database."""
    return connection.execute(sql.select(AssetKeyTable.c.id).limit(1)).first() is not None


def _prune_asset_events(connection: Any, key: str, kind: str, before: datetime) -> int:
    of_asset = sql.and_(_EVENTS.asset_key == key, _EVENTS.dagster_event_type == kind)
    first_kept = _first_kept(connection, _EVENTS.id, of_asset)
    old = sql.and_(of_asset, _EVENTS.run_id == _RUNLESS, _EVENTS.timestamp < before, _EVENTS.id < first_kept)
    tags = sql.and_(_TAGS.asset_key == key, _TAGS.event_id.in_(sql.select(_EVENTS.id).where(old)))
    connection.execute(AssetEventTagsTable.delete().where(tags))
    return int(connection.execute(SqlEventLogStorageTable.delete().where(old)).rowcount)


def _prune_checks(connection: Any, key: str, before: datetime) -> int:
    names = connection.execute(sql.select(_CHECKS.check_name).where(_CHECKS.asset_key == key).distinct()).scalars()
    deleted = 0
    for name in list(names):
        of_check = sql.and_(_CHECKS.asset_key == key, _CHECKS.check_name == name)
        first_kept = _first_kept(connection, _CHECKS.id, of_check)
        old = sql.and_(of_check, _CHECKS.evaluation_event_timestamp < before, _CHECKS.id < first_kept)
        events = sql.select(_CHECKS.evaluation_event_storage_id).where(old)
        runless = sql.and_(_EVENTS.run_id == _RUNLESS, _EVENTS.id.in_(events))
        deleted += int(connection.execute(SqlEventLogStorageTable.delete().where(runless)).rowcount)
        connection.execute(AssetCheckExecutionsTable.delete().where(old))
    return deleted


def _first_kept(connection: Any, column: Any, condition: Any) -> int:
    """Return the lowest id of the newest `EVENTS_KEPT`."""
    newest = sql.select(column).where(condition).order_by(column.desc()).limit(EVENTS_KEPT)
    return min(connection.execute(newest).scalars(), default=0)
