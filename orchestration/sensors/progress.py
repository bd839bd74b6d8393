"""The progress sensor: new snapshots of every job become run-less materializations.

At least once: if the daemon dies between storing a tick's events and its cursor, they are published again with the
same data version. A tick reads a bounded number of manifests, so a long absence is caught up over several ticks.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import dagster as dg

from assets.metadata import checkpoint_materialization, run_materialization
from orchestration.resources import StillstateResource
from state_runtime.base.errors import CorruptData, JobNotFound, MissingSnapshot, StillstateError, UnsupportedFormat
from state_runtime.snapshot.catalog import Catalog

__all__ = ["CURSOR_VERSION", "JobCursor", "ProgressTick", "build_progress_sensor", "read_cursor", "read_progress"]

CURSOR_VERSION: Final = 1
MANIFESTS_PER_TICK_MAX: Final = 200
MANIFESTS_PER_JOB_MIN: Final = 10  # a share of its own, however many jobs there are
HISTORY_MAX: Final = 500  # of a job that is seen for the first time


@dataclass(frozen=True)
class JobCursor:
    """The last published snapshot of a job root; `uid` tells a root that was made anew from the one we knew."""

    uid: str
    snapshot_id: int


@dataclass
class ProgressTick:
    """What one tick found."""

    cursors: dict[str, JobCursor] = field(default_factory=dict)
    events: list[dg.AssetMaterialization] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def cursor_text(self) -> str:
        """The cursor as small versioned JSON."""
        jobs = {name: [c.uid, c.snapshot_id] for name, c in sorted(self.cursors.items())}
        return json.dumps({"version": CURSOR_VERSION, "jobs": jobs}, separators=(",", ":"))


def read_cursor(text: str | None) -> dict[str, JobCursor]:
    """Parse a cursor; one that we do not understand (a newer version, edited by hand) starts again from the newest
    snapshots, since publishing twice is harmless and publishing nothing is not."""
    if not text:
        return {}
    try:
        data = json.loads(text)
        if data["version"] != CURSOR_VERSION:
            return {}
        return {str(name): JobCursor(str(uid), int(last)) for name, (uid, last) in data["jobs"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def read_progress(catalogs: Mapping[str, Catalog], before: Mapping[str, JobCursor]) -> ProgressTick:
    """Read what is new in every job. A problem of one job never hides another's progress."""
    tick = ProgressTick({name: cursor for name, cursor in before.items() if name in catalogs})
    share = max(MANIFESTS_PER_JOB_MIN, MANIFESTS_PER_TICK_MAX // max(1, len(catalogs)))
    for name, catalog in catalogs.items():
        try:
            _read_job(name, catalog, share, tick)
        except JobNotFound:
            continue  # not started yet: no progress, and nothing wrong
        except StillstateError as error:
            tick.problems.append(f"{name}: {error}")
    return tick


def _read_job(name: str, catalog: Catalog, share: int, tick: ProgressTick) -> None:
    uid = catalog.job_info().uid
    known = tick.cursors.get(name)
    if known is not None and known.uid == uid:
        ids = catalog.snapshot_ids(after=known.snapshot_id)
    else:
        ids = catalog.snapshot_ids()[-HISTORY_MAX:]
    for snapshot_id in ids[:share]:
        try:
            manifest = catalog.manifest(snapshot_id)
        except (MissingSnapshot, CorruptData, UnsupportedFormat) as error:
            newest = snapshot_id == ids[-1]
            if not isinstance(error, MissingSnapshot):
                tick.problems.append(f"{name}: {error}")
            if newest:
                # A folder without a manifest may be about to get one, and a damaged newest snapshot keeps the job
                # from starting: the cursor stays, so that every tick says it until somebody has repaired it.
                return
            tick.cursors[name] = JobCursor(uid, snapshot_id)
            continue
        if manifest.kind == "checkpoint":
            tick.events.append(checkpoint_materialization(name, manifest, catalog.progress(manifest)))
        else:
            tick.events.append(run_materialization(name, manifest))
        tick.cursors[name] = JobCursor(uid, snapshot_id)


def build_progress_sensor(jobs: Iterable[str]) -> dg.SensorDefinition:
    """The sensor for the jobs that this code location knows."""
    names = list(jobs)

    @dg.sensor(
        name="stillstate_progress",
        description="Publishes new checkpoints of all jobs as materializations.",
        minimum_interval_seconds=5,
        default_status=dg.DefaultSensorStatus.RUNNING,
    )
    def stillstate_progress(context: dg.SensorEvaluationContext, stillstate: StillstateResource) -> dg.SensorResult:
        spec = stillstate.spec()
        catalogs, broken = {}, []
        for name in names:
            try:
                catalogs[name] = stillstate.catalog(spec.job(name))
            except StillstateError as error:
                broken.append(f"{name}: {error}")
        tick = read_progress(catalogs, read_cursor(context.cursor))
        problems = broken + tick.problems
        for problem in problems:
            context.log.error(problem)
        published = f"{len(tick.events)} snapshots published" if tick.events else "no new snapshots"
        # No runs are requested, so every tick counts as skipped; its reason is what people see in the list.
        return dg.SensorResult(
            asset_events=tick.events,
            cursor=tick.cursor_text(),
            skip_reason="; ".join([published, *problems]),
        )

    return stillstate_progress
