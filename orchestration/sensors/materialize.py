"""The materialization sensor: starts runs where Dagster is to fold, and shows every fold and every row of failures.

At most one run of a job: the run key is the newest materialization and the attempt, no request is made while a run or a
materialization is under way or waits to be adopted, and the store's own records keep two that start all the same apart.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import dagster as dg

from assets.metadata import DATA_VERSION_TAG, fold_materialization
from assets.specs import materialized_key
from orchestration.config.spec import JobSpec
from orchestration.folding.health import FoldHealth, fold_health, log_bytes_left, new_records, why_due
from orchestration.folding.plan import FoldRun, decide_fold, failed_in_a_row, fold_run_key
from orchestration.jobs.materialize import fold_evaluation
from orchestration.jobs.past_runs import past_folds
from orchestration.jobs.tags import ACTION_TAG, AFTER_TAG, ATTEMPT_TAG, MATERIALIZE_TAG
from orchestration.resources import StillstateResource
from state_runtime.base.errors import JobNotFound, StillstateError
from state_runtime.materialize.background import adoptable
from state_runtime.materialize.records import record_ids
from state_runtime.snapshot.catalog import Catalog

__all__ = ["FoldCursor", "build_materialization_sensor", "read_fold_cursor"]

CURSOR_VERSION: Final = 1
RECORDS_PER_TICK_MAX: Final = 50
HISTORY_MAX: Final = 100  # of a job that is seen for the first time


@dataclass(frozen=True)
class FoldCursor:
    """What was published of a job: its newest record, and failures in a row as last shown (-1: never)."""

    uid: str
    record_id: int
    failed: int = -1


@dataclass
class _Tick:
    cursors: dict[str, FoldCursor]
    events: list[dg.AssetMaterialization | dg.AssetCheckEvaluation] = field(default_factory=list)
    requests: list[dg.RunRequest] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def cursor_text(self) -> str:
        jobs = {name: [c.uid, c.record_id, c.failed] for name, c in sorted(self.cursors.items())}
        return json.dumps({"version": CURSOR_VERSION, "jobs": jobs}, separators=(",", ":"))


def read_fold_cursor(text: str | None) -> dict[str, FoldCursor]:
    """Parse a cursor; one that is not understood starts anew, since publishing twice is harmless."""
    if not text:
        return {}
    try:
        data = json.loads(text)
        if data["version"] != CURSOR_VERSION:
            return {}
        return {str(n): FoldCursor(str(uid), int(last), int(failed)) for n, (uid, last, failed) in data["jobs"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def build_materialization_sensor(jobs: Sequence[str], fold_jobs: Mapping[str, Any]) -> dg.SensorDefinition:
    """The sensor for the jobs that this code location knows."""

    @dg.sensor(
        name="stillstate_materialization",
        description="Starts a materialization where a log has grown and Dagster is to fold it; "
        "shows every materialization.",
        minimum_interval_seconds=10,
        default_status=dg.DefaultSensorStatus.RUNNING,
        jobs=[fold_jobs[name] for name in jobs],
    )
    def stillstate_materialization(
        context: dg.SensorEvaluationContext, stillstate: StillstateResource
    ) -> dg.SensorResult:
        spec = stillstate.spec()
        before = read_fold_cursor(context.cursor)
        tick = _Tick({name: cursor for name, cursor in before.items() if name in jobs})
        for name in jobs:
            try:
                job = spec.job(name)
                _look_at(job, stillstate.catalog(job), stillstate.clock().now_ms(), context.instance, tick)
            except StillstateError as error:
                # One job's unreadable store must not keep the others' logs growing.
                context.log.error(f"{name}: {error}")
                tick.notes.append(f"{name}: {error}")
        notes = "; ".join(tick.notes) or "nothing new"
        return dg.SensorResult(
            run_requests=tick.requests or None,
            asset_events=tick.events,
            cursor=tick.cursor_text(),
            skip_reason=None if tick.requests else notes,
        )

    return stillstate_materialization


def _look_at(job: JobSpec, catalog: Catalog, now_ms: int, instance: dg.DagsterInstance, tick: _Tick) -> None:
    try:
        uid = catalog.job_info().uid
    except JobNotFound:
        return  # not started yet: nothing to fold, and nothing wrong
    runs = past_folds(instance, job.name)
    health = fold_health(catalog, now_ms)
    known = tick.cursors.get(job.name)
    if known is None or known.uid != uid:
        done = record_ids(catalog.root)[0]
        known = FoldCursor(uid, done[-HISTORY_MAX] - 1 if len(done) >= HISTORY_MAX else 0)
    if not any(run.phase == "active" for run in runs):
        # A run publishes its own; while one is active, the newest record may be one that it is about to publish.
        known = _publish(job, catalog, known, instance, tick)
    failed = max(health.failed_in_a_row, failed_in_a_row(runs))
    if failed != known.failed:
        tick.events.append(fold_evaluation(job.name, health, failed_in_a_row(runs)))
        known = replace(known, failed=failed)
    tick.cursors[job.name] = known
    if job.materialization.by == "dagster":
        _request(job, catalog, health, runs, now_ms, tick)


def _publish(
    job: JobSpec, catalog: Catalog, known: FoldCursor, instance: dg.DagsterInstance, tick: _Tick
) -> FoldCursor:
    records, problems = new_records(catalog, known.record_id, RECORDS_PER_TICK_MAX)
    tick.notes.extend(f"{job.name}: {problem}" for problem in problems)
    if not records:
        return known
    left = {record.record_id: log_bytes_left(catalog, record.snapshot_id) for record in records[-1:]}
    published = _published(instance, job.name)
    for record in records:
        if str(record.record_id) not in published:
            tick.events.append(fold_materialization(job.name, record, left.get(record.record_id)))
    tick.notes.append(f"{job.name}: materializations up to {records[-1].record_id} published")
    return replace(known, record_id=records[-1].record_id)


def _published(instance: dg.DagsterInstance, job: str) -> set[str]:
    """Data versions of the newest materializations: those that runs published themselves."""

    newest = instance.fetch_materializations(materialized_key(job), limit=RECORDS_PER_TICK_MAX).records
    tags = [event.tags or {} for record in newest if (event := record.asset_materialization) is not None]
    return {tag[DATA_VERSION_TAG] for tag in tags if DATA_VERSION_TAG in tag}


def _request(
    job: JobSpec, catalog: Catalog, health: FoldHealth, runs: Sequence[FoldRun], now_ms: int, tick: _Tick
) -> None:
    due = why_due(job, catalog, health, now_ms)
    if due is None:
        return
    snapshot_id, why = due
    latest = catalog.latest()
    waiting = None if latest is None else adoptable(catalog.root, latest, catalog.clock, refused=set())
    decision = decide_fold(why, health, runs, now_ms / 1000, waiting=None if waiting is None else waiting.record_id)
    tick.notes.append(f"{job.name}: {decision.reason}")
    if decision.attempt is None:
        return
    tick.requests.append(
        dg.RunRequest(
            run_key=fold_run_key(job.name, health.last_id, decision.attempt),
            job_name=f"materialize_{job.identifier}",
            tags={
                MATERIALIZE_TAG: job.name,
                ACTION_TAG: "materialize",
                AFTER_TAG: str(health.last_id),
                ATTEMPT_TAG: str(decision.attempt),
                "stillstate/snapshot": str(snapshot_id),
            },
        )
    )
