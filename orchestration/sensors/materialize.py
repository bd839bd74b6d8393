"""The materialization sensor: starts runs for the jobs that Dagster is to fold, and shows every fold and every row of
failures.

At most one run of a job: the run key is the newest materialization and the attempt. No request is made while a run or a
materialization is under way or waits to be adopted. If two start all the same, the store's own records keep them apart.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import dagster as dg

from state_runtime.base.errors import CorruptData, StillstateError, UnsupportedFormat
from state_runtime.materialize.background import adoptable
from state_runtime.materialize.records import Record, record_ids
from state_runtime.snapshot.catalog import Catalog
from stillstate.assets.metadata import DATA_VERSION_TAG, tables_materialization
from stillstate.assets.mount import Mount
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.jobs.materialize import materialization_evaluation, materialization_tags
from stillstate.orchestration.jobs.past_runs import past_materializations
from stillstate.orchestration.jobs.tags import AFTER_TAG, ATTEMPT_TAG, MATERIALIZE_TAG
from stillstate.orchestration.materialization.health import (
    MaterializationHealth,
    log_bytes_left,
    materialization_health,
    new_records,
    why_due,
)
from stillstate.orchestration.materialization.plan import (
    MaterializationRun,
    decide_materialization,
    failed_in_a_row,
    materialization_run_key,
)
from stillstate.orchestration.probes.pool import NoLook, troubles
from stillstate.orchestration.resources import Reading, StillstateResource
from stillstate.orchestration.sensors.sensor import sensor_of

__all__ = ["MaterializationCursor", "build_materialization_sensor", "read_materialization_cursor"]

CURSOR_VERSION: Final = 1
RECORDS_PER_TICK_MAX: Final = 50
HISTORY_MAX: Final = 100  # of a job that is seen for the first time


@dataclass(frozen=True)
class MaterializationCursor:
    """The published state of a job: its newest record, and failures in a row as last shown (-1: never)."""

    uid: str
    record_id: int
    failed: int = -1


@dataclass
class _Tick:
    mount: Mount
    op: str
    cursors: dict[str, MaterializationCursor]
    events: list[dg.AssetMaterialization | dg.AssetCheckEvaluation] = field(default_factory=list)
    requests: list[dg.RunRequest] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    start: str = ""

    def cursor_text(self) -> str:
        jobs = {name: [c.uid, c.record_id, c.failed] for name, c in sorted(self.cursors.items())}
        return json.dumps({"version": CURSOR_VERSION, "start": self.start, "jobs": jobs}, separators=(",", ":"))


def read_materialization_cursor(text: str | None) -> tuple[dict[str, MaterializationCursor], str]:
    """Parse a cursor: the published state, and the job to begin with. One that cannot be parsed starts empty, since
    publishing twice is harmless."""
    if not text:
        return {}, ""
    try:
        data = json.loads(text)
        if data["version"] != CURSOR_VERSION:
            return {}, ""
        jobs = {
            str(n): MaterializationCursor(str(uid), int(last), int(failed))
            for n, (uid, last, failed) in data["jobs"].items()
        }
        return jobs, str(data.get("start", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}, ""


def build_materialization_sensor(
    mount: Mount, jobs: Sequence[str], materialization_jobs: Sequence[Any], op: str = ""
) -> dg.SensorDefinition:
    """Build the sensor for the jobs that this code location knows.

    Args:
        op: the op that gets the stream, where streams share one job.
    """

    @sensor_of(
        mount,
        "stillstate_materialization",
        "Starts a materialization where a log has grown and Dagster is to fold it; shows every materialization.",
        10,
        materialization_jobs,
    )
    def stillstate_materialization(
        context: dg.SensorEvaluationContext, stillstate: StillstateResource
    ) -> dg.SensorResult:
        spec = stillstate.spec()
        before, start = read_materialization_cursor(context.cursor)
        tick = _Tick(mount, op, {name: cursor for name, cursor in before.items() if name in jobs}, start=start)
        looks = stillstate.look(spec, jobs, start=tick.start)
        # A job that never started, or cannot be seen, is not looked at a second time.
        started = [name for name, look in looks.found.items() if not isinstance(look, NoLook) and look.uid]
        seen = stillstate.read(Reading(spec, started, "folds", _reader(tick.cursors), budget_s=looks.left_s))
        for trouble in troubles(looks.found):
            # One job's unreadable store must not let the others' logs grow.
            context.log.error(trouble)
            tick.notes.append(trouble)
        for name in started:  # the others were not started yet: nothing to fold, and nothing wrong
            try:
                _decide(spec.job(name), seen.of(name), stillstate.clock().now_ms(), context.instance, tick)
            except StillstateError as error:
                context.log.error(f"{name}: {error}")
                tick.notes.append(f"{name}: {error}")
        tick.start = looks.next_start
        notes = "; ".join(tick.notes) or "nothing new"
        return dg.SensorResult(
            run_requests=tick.requests or None,
            asset_events=tick.events,
            cursor=tick.cursor_text(),
            skip_reason=None if tick.requests else notes,
        )

    return stillstate_materialization


@dataclass(frozen=True, kw_only=True)
class _Materializations:
    """The result of one reading of a job's store.

    Attributes:
        known: where publishing continues: the cursor's, or the beginning for a root that is new to it.
        records: newer ones, at most as many as a tick publishes; `left` is the log after the newest of them.
        due: snapshot and reason of a fold that is due, if Dagster is to make it.
        waiting: a record that the driver will adopt.
        trouble: why the newest snapshot cannot be read, if so.
    """

    known: MaterializationCursor
    health: MaterializationHealth
    records: tuple[Record, ...]
    problems: tuple[str, ...]
    left: int | None
    due: tuple[int, str] | None = None
    waiting: int | None = None
    trouble: StillstateError | None = None


def _reader(cursors: Mapping[str, MaterializationCursor]) -> Callable[[JobSpec, Catalog], _Materializations]:
    def read(job: JobSpec, catalog: Catalog) -> _Materializations:
        uid = catalog.job_info().uid
        now_ms = catalog.clock.now_ms()
        health = materialization_health(catalog, now_ms)
        known = cursors.get(job.name)
        if known is None or known.uid != uid:
            done = record_ids(catalog.root)[0]
            known = MaterializationCursor(uid, done[-HISTORY_MAX] - 1 if len(done) >= HISTORY_MAX else 0)
        records, problems = new_records(catalog, known.record_id, RECORDS_PER_TICK_MAX)
        left, due, waiting, trouble = None, None, None, None
        try:
            left = log_bytes_left(catalog, records[-1].snapshot_id) if records else None
            if job.materialization.by == "dagster" and (due := why_due(job, catalog, health, now_ms)) is not None:
                latest = catalog.latest()
                found = None if latest is None else adoptable(catalog.root, latest, catalog.clock, refused=set())
                waiting = None if found is None else found.record_id
        except (CorruptData, UnsupportedFormat) as error:
            trouble = error  # of the newest snapshot; the results of folds are known all the same
        return _Materializations(
            known=known,
            health=health,
            records=tuple(records),
            problems=tuple(problems),
            left=left,
            due=due,
            waiting=waiting,
            trouble=trouble,
        )

    return read


def _decide(job: JobSpec, seen: _Materializations, now_ms: int, instance: dg.DagsterInstance, tick: _Tick) -> None:
    runs = past_materializations(instance, tick.mount.tag(job.name))
    known = seen.known
    if not any(run.phase == "active" for run in runs):
        # A run publishes its own record; while one is active, the newest record may be one that it is about to publish.
        known = _publish(job, seen, instance, tick)
    failed = max(seen.health.failed_in_a_row, failed_in_a_row(runs))
    if failed != known.failed:
        tick.events.append(materialization_evaluation(tick.mount, job.name, seen.health, failed_in_a_row(runs)))
        known = replace(known, failed=failed)
    tick.cursors[job.name] = known
    if seen.trouble is not None:
        raise seen.trouble
    if seen.due is not None:
        _request(job, seen, seen.due, runs, now_ms, tick)


def _publish(job: JobSpec, seen: _Materializations, instance: dg.DagsterInstance, tick: _Tick) -> MaterializationCursor:
    tick.notes.extend(f"{job.name}: {problem}" for problem in seen.problems)
    if not seen.records:
        return seen.known
    newest = seen.records[-1].record_id
    published = _published(instance, tick.mount.materialized(job.name))
    for record in seen.records:
        if str(record.record_id) not in published:
            left = seen.left if record.record_id == newest else None
            tick.events.append(tables_materialization(tick.mount.materialized(job.name), record, left))
    tick.notes.append(f"{job.name}: materializations up to {newest} published")
    return replace(seen.known, record_id=newest)


def _published(instance: dg.DagsterInstance, key: dg.AssetKey) -> set[str]:
    """Return the data versions of the newest materializations: those that runs published themselves."""

    newest = instance.fetch_materializations(key, limit=RECORDS_PER_TICK_MAX).records
    tags = [event.tags or {} for record in newest if (event := record.asset_materialization) is not None]
    return {tag[DATA_VERSION_TAG] for tag in tags if DATA_VERSION_TAG in tag}


def _request(
    job: JobSpec,
    seen: _Materializations,
    due: tuple[int, str],
    runs: Sequence[MaterializationRun],
    now_ms: int,
    tick: _Tick,
) -> None:
    snapshot_id, why = due
    decision = decide_materialization(why, seen.health, runs, now_ms / 1000, waiting=seen.waiting)
    tick.notes.append(f"{job.name}: {decision.reason}")
    if decision.attempt is None:
        return
    mount = tick.mount
    tick.requests.append(
        dg.RunRequest(
            run_key=materialization_run_key(mount.tag(job.name), seen.health.last_id, decision.attempt),
            job_name=mount.job_name("materialize", job.name),
            run_config={"ops": {tick.op: {"config": {"stream": job.name}}}} if mount.is_shared else {},
            asset_selection=[mount.materialized(job.name)] if mount.is_shared else None,
            asset_check_keys=[] if mount.is_shared else None,  # the check reads the past
            tags={
                **materialization_tags(job.materialization.timeout_s),
                MATERIALIZE_TAG: mount.tag(job.name),
                AFTER_TAG: str(seen.health.last_id),
                ATTEMPT_TAG: str(decision.attempt),
                "stillstate/snapshot": str(snapshot_id),
            },
        )
    )
