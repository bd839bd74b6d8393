"""The sensor of the desired state. It publishes the check `matches_configuration` of every job. It requests a migration
of the jobs whose file asks for it (`migration.automatic`), and a run that continues a migration whose process has
ended, no matter who began it.

It may run twice, or lose its cursor: the run key is the difference, Dagster's own record has the requests, the run
itself looks again before it acts, and the job root records migrations that were taken back. The cursor only holds what
was shown, and since when the file is unchanged.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import dagster as dg

from state_runtime.snapshot.migration import Migration
from stillstate.assets.checks import matches_evaluation
from stillstate.assets.mount import Mount
from stillstate.orchestration.config.driver_settings import section_digest
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.jobs.driver import runtime_max_s
from stillstate.orchestration.jobs.matches_check import Records, read_records
from stillstate.orchestration.jobs.past_runs import past_migrations
from stillstate.orchestration.jobs.tags import (
    migration_run_key,
    migration_run_tags,
    resume_run_key,
    resume_run_tags,
)
from stillstate.orchestration.launchers.processes import is_owner_gone
from stillstate.orchestration.migration.desired import Desired, PastMigration, judge_desired, target_text
from stillstate.orchestration.probes.pool import NAMES_MAX, NoLook, troubles
from stillstate.orchestration.recovery.observe import Observation
from stillstate.orchestration.resources import StillstateResource
from stillstate.orchestration.run_phases import ENDED
from stillstate.orchestration.sensors.sensor import sensor_of

__all__ = ["DesiredCursor", "build_desired_state_sensor", "read_desired_cursor"]

CURSOR_VERSION: Final = 1
LOOK_EVERY_S: Final = 60
SHOWN_EVERY_S: Final = 86_400.0
"""An unchanged verdict is stored again after this time, because old events may be purged."""


@dataclass(frozen=True)
class DesiredCursor:
    """The state of a job that was shown.

    Attributes:
        shown: of the newest evaluation (`Desired.shown`), and the newest migration of Dagster's that had ended.
        at_s: when.
        taken_back: the number of the record that says that a migration was taken back; 0: none was seen.
        file: the digest of the job's part of the file when that was seen first.
        is_free: the file has changed since.
    """

    shown: str = ""
    at_s: float = 0.0
    taken_back: int = 0
    file: str = ""
    is_free: bool = False

    def with_file(self, digest: str) -> "DesiredCursor":
        """Return the cursor after a look at the file."""
        return replace(self, is_free=True) if self.taken_back and digest != self.file else self

    def with_record(self, record: Migration | None, digest: str) -> "DesiredCursor":
        """Return the cursor after a look at the record."""
        if record is None or record.step != "rolled-back" or record.number == self.taken_back:
            return self
        return replace(self, taken_back=record.number, file=digest, is_free=False)


@dataclass
class _Tick:
    mount: Mount
    cursors: dict[str, DesiredCursor]
    next_start: str
    past: Mapping[str, Sequence[PastMigration]]
    now_s: float
    events: list[dg.AssetCheckEvaluation] = field(default_factory=list)
    requests: list[dg.RunRequest] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        """Return one line for all jobs: every tick is stored with its text."""
        if not self.unmatched:
            return []
        more = len(self.unmatched) - NAMES_MAX
        names = ", ".join(self.unmatched[:NAMES_MAX]) + (f" and {more} more" if more > 0 else "")
        return [f"not as the file says: {names}"]

    def cursor_text(self) -> str:
        jobs = {n: [c.shown, c.at_s, c.taken_back, c.file, c.is_free] for n, c in sorted(self.cursors.items())}
        return json.dumps({"version": CURSOR_VERSION, "start": self.next_start, "jobs": jobs}, separators=(",", ":"))


def read_desired_cursor(text: str | None) -> tuple[dict[str, DesiredCursor], str]:
    """Parse a cursor: the shown state of each job, and the job to begin with. A cursor that cannot be parsed starts
    empty: every check is shown once more, and a migration that was taken back is not tried again."""
    try:
        data = json.loads(text or "{}")
        if data.get("version") != CURSOR_VERSION:
            return {}, ""
        cursors = {
            str(name): DesiredCursor(str(shown), float(at_s), int(taken_back), str(file), bool(is_free))
            for name, (shown, at_s, taken_back, file, is_free) in data["jobs"].items()
        }
        return cursors, str(data.get("start", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}, ""


def build_desired_state_sensor(
    mount: Mount, jobs: Sequence[str], migrate_jobs: Mapping[str, dg.JobDefinition]
) -> dg.SensorDefinition:
    """Build the sensor for the jobs that this code location knows."""

    @sensor_of(
        mount,
        "stillstate_desired_state",
        "Says of every job whether it runs with the settings of the file, migrates those of which the file asks "
        "for it, and goes on with a migration whose process has ended.",
        LOOK_EVERY_S,
        list({made.name: made for made in migrate_jobs.values()}.values()),
    )
    def stillstate_desired_state(
        context: dg.SensorEvaluationContext, stillstate: StillstateResource
    ) -> dg.SensorResult:
        spec = stillstate.spec()
        before, start = read_desired_cursor(context.cursor)
        looks = stillstate.look(spec, jobs, start=start)
        past = past_migrations(context.instance)
        records = read_records(spec, looks, stillstate)
        tick = _Tick(
            mount=mount,
            cursors={name: cursor for name, cursor in before.items() if name in jobs},
            next_start=looks.next_start,
            past=past,
            now_s=stillstate.clock().now_ms() / 1000,
        )
        for name, look in looks.found.items():
            if not isinstance(look, NoLook):
                _judge(spec.jobs[name], look.seen, records, migrate_jobs[name], tick)
        for request in tick.requests:
            context.log.warning(f"{request.run_key} is requested")
        notes = [*tick.notes(), *troubles({**looks.found, **{n: r for n, r in records.items() if r is not None}})]
        return dg.SensorResult(
            run_requests=tick.requests or None,
            asset_events=tick.events,
            cursor=tick.cursor_text(),
            skip_reason=None if tick.requests else "; ".join(notes) or "all jobs are as the file says",
        )

    return stillstate_desired_state


def _judge(job: JobSpec, seen: Observation, records: Records, migrate_job: dg.JobDefinition, tick: _Tick) -> None:
    record = records.get(job.name)
    if isinstance(record, NoLook):
        return  # nothing is known: the last verdict stays
    digest = section_digest(job)
    before = tick.cursors.get(job.name, DesiredCursor()).with_file(digest).with_record(record, digest)
    past = tick.past.get(tick.mount.tag(job.name), [])
    launch = tick.mount.launch_text("migrate", job.name)
    found = judge_desired(
        job,
        seen,
        record,
        past,
        now_s=tick.now_s,
        launch=launch,
        is_free=before.is_free,
        is_owner_gone=record is not None and is_owner_gone(record),
    )
    tick.cursors[job.name] = before
    if found is None:
        return
    if not found.passed:
        tick.unmatched.append(job.name)
    request = _request(tick.mount, job, found, record, migrate_job)
    if request is not None:
        tick.requests.append(request)
    # Judged again after each migration of Dagster's: the trouble of a failed one passes only by a newer verdict.
    ended = next((run.run_id for run in past if run.phase in ENDED), "")
    shown = f"{found.shown} {ended}"
    if shown != before.shown or tick.now_s - before.at_s >= SHOWN_EVERY_S:
        tick.events.append(matches_evaluation(tick.mount.stream(job.name), job.name, found, launch))
        tick.cursors[job.name] = replace(before, shown=shown, at_s=tick.now_s)


def _request(
    mount: Mount, job: JobSpec, found: Desired, record: Migration | None, migrate_job: dg.JobDefinition
) -> dg.RunRequest | None:
    name = mount.tag(job.name)
    if found.next == "begin":
        target = target_text(found.target)
        key, tags = migration_run_key(name, found.term, target), migration_run_tags(name, found.term, target)
        asked = {"parallelism": found.target.parallelism, "backend": found.target.backend, "if_term": found.term}
    elif found.next == "resume" and record is not None:
        key = resume_run_key(name, record.uid, found.attempt)
        tags, asked = resume_run_tags(name, record.uid, found.attempt), {"resume": True}
    else:
        return None
    (op_name,) = (node.name for node in migrate_job.nodes)
    config: dict[str, Any] = {**asked, **({"stream": job.name} if mount.is_shared else {})}
    tags["dagster/max_runtime"] = str(runtime_max_s("migrate", job))
    return dg.RunRequest(
        run_key=key, job_name=migrate_job.name, run_config={"ops": {op_name: {"config": config}}}, tags=tags
    )
