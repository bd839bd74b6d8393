"""The progress sensor: publishes the progress of jobs as run-less materializations.

Each is published once: the cursor has the published state, and before an event is published, Dagster's own record is
checked for one that was stored by a tick whose cursor was lost. A tick reads a bounded number of manifests, and
publishes a job's newest snapshot only: after a pause there is no backlog to publish.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import dagster as dg

from state_runtime.base.errors import StillstateError
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest
from stillstate.assets.metadata import ROOT_TAG, checkpoint_materialization, run_materialization, shape_of
from stillstate.assets.mount import Mount
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.probes.look import Look
from stillstate.orchestration.probes.points import Points, read_points
from stillstate.orchestration.probes.pool import NoLook, troubles
from stillstate.orchestration.resources import Reading, Seen, StillstateResource
from stillstate.orchestration.sensors.overview import overview
from stillstate.orchestration.sensors.publishing import (
    ProgressCursor,
    Published,
    published_before,
    read_cursor,
    why_publish,
)
from stillstate.orchestration.sensors.sensor import sensor_of
from stillstate.orchestration.text import counted_text

__all__ = ["JOBS_PER_TICK_MAX", "build_progress_sensor"]

JOBS_PER_TICK_MAX: Final = 500
"""Jobs that are published in one tick; the rest follows in the next, the longest waiting first. Dagster stores some ten
events in a second."""


@dataclass
class _Tick:
    mount: Mount
    published: dict[str, Published]
    events: list[dg.AssetMaterialization | dg.AssetCheckEvaluation] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def build_progress_sensor(mount: Mount, jobs: Iterable[str]) -> dg.SensorDefinition:
    """Build the sensor for the jobs that this code location knows."""
    names = list(jobs)

    @sensor_of(
        mount,
        "stillstate_progress",
        "Publishes runs and checkpoints of all jobs, and the overview, as materializations.",
        5,
    )
    def stillstate_progress(context: dg.SensorEvaluationContext, stillstate: StillstateResource) -> dg.SensorResult:
        spec = stillstate.spec()
        cursor = read_cursor(context.cursor)
        looks = stillstate.look(spec, names, start=cursor.start)
        tick = _Tick(mount, {name: known for name, known in cursor.jobs.items() if name in names})
        tick.problems += troubles(looks.found)
        due = _due(looks, tick, context.instance, stillstate.clock().now_ms(), spec.observation.interval_s)

        def read(job: JobSpec, catalog: Catalog) -> Points:
            return read_points(catalog, looks.of(job.name))

        points = stillstate.read(Reading(spec, list(due), "points", read, budget_s=looks.left_s))
        for name in due:
            _publish(name, looks.of(name), points, due[name], stillstate.clock().now_ms(), tick)
        shown, overview_cursor = overview(
            mount, spec, replace(looks, left_s=points.left_s), stillstate, context.instance, cursor.overview
        )
        tick.events.extend(shown)
        for problem in tick.problems:
            context.log.error(problem)
        said = f"{counted_text(len(due), 'job')} published" if due else "no new snapshots"
        # No runs are requested, so every tick counts as skipped; people see its reason in the list.
        return dg.SensorResult(
            asset_events=tick.events,
            cursor=ProgressCursor(tick.published, looks.next_start, overview_cursor).text(),
            skip_reason="; ".join([said, *tick.problems]),
        )

    return stillstate_progress


def _due(
    looks: Seen[Look], tick: _Tick, instance: dg.DagsterInstance, now_ms: int, interval_s: float
) -> Mapping[str, tuple[Published, str | None]]:
    """Return the jobs that have something to publish: the state published before, and why a checkpoint is published."""
    due: dict[str, tuple[Published, str | None]] = {}
    for name, look in looks.found.items():
        if isinstance(look, NoLook):
            continue
        if look.trouble is not None:
            # Reported at every tick until it is repaired, because it keeps the job from starting.
            tick.problems.append(f"{name}: {look.trouble}")
        if look.head is None:
            continue  # not started yet: no progress, and nothing wrong
        known = tick.published.get(name)
        if known is None or known.uid != look.uid:
            known = Published(uid=look.uid)
        if _is_due(look.head, known, now_ms, interval_s):
            known = _read_back(tick.mount, instance, name, look.uid, known)
            if _is_due(look.head, known, now_ms, interval_s):
                due[name] = known, why_publish(look.head, known, now_ms, interval_s)
        tick.published[name] = known
    waited = sorted(due, key=lambda name: due[name][0].at_ms)
    return {name: due[name] for name in waited[:JOBS_PER_TICK_MAX]}


def _is_due(head: Manifest, known: Published, now_ms: int, interval_s: float) -> bool:
    return head.term > known.run_term or why_publish(head, known, now_ms, interval_s) is not None


def _read_back(mount: Mount, instance: dg.DagsterInstance, job: str, uid: str, known: Published) -> Published:
    checkpoint, at_ms = _newest_of_root(instance, mount.checkpoints(job), uid)
    run, _ = _newest_of_root(instance, mount.stream(job), uid)
    return published_before(uid, checkpoint, at_ms, run, known)


def _newest_of_root(instance: dg.DagsterInstance, key: dg.AssetKey, uid: str) -> tuple[Mapping[str, str], int]:
    """Return the tags of an asset's newest materialization and when it was stored; empty if it is of another root."""
    for record in instance.fetch_materializations(key, limit=1).records:
        event = record.asset_materialization
        if event is not None and event.tags and event.tags.get(ROOT_TAG) == uid:
            return event.tags, int(record.timestamp * 1000)
    return {}, 0


def _publish(
    name: str, look: Look, points: Seen[Points], due: tuple[Published, str | None], now_ms: int, tick: _Tick
) -> None:
    before, why = due
    try:
        found = points.of(name)
    except StillstateError as error:
        tick.problems.append(f"{name}: {error}")  # nothing is lost: it is due at the next tick too
        return
    head = look.head
    if head is None:
        raise AssertionError("only what has a snapshot is due")
    tick.problems.extend(f"{name}: {problem}" for problem in found.problems)
    runs = [point for point in found.newest if point.kind == "fencing" and point.term > before.run_term]
    if head.term > before.run_term and not any(point.term == head.term for point in runs):
        runs.append(found.newest[-1])  # the snapshot at which it took over has expired long ago
    # Ascending: Dagster shows the event that it stores last as the newest.
    stream, status = tick.mount.stream(name), look.seen.status
    tick.events.extend(run_materialization(stream, look.uid, point, status) for point in runs)
    after = replace(before, run_term=max(before.run_term, head.term))
    if why is not None:
        key = tick.mount.checkpoints(name)
        tick.events.append(
            checkpoint_materialization(key, look.uid, head, found.newest, status, after=before.snapshot_id, why=why)
        )
        after = replace(after, snapshot_id=head.snapshot_id, term=head.term, shape=shape_of(head), at_ms=now_ms)
    tick.published[name] = after
