"""The sensor of checks with a limit: a light look at each job every few minutes; a verdict is stored when it changes,
and once an hour.

Jobs are looked at as by other sensors (orchestration/probes/): one store that does not answer does not keep other jobs
from being judged. The job whose last look is the oldest comes first.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import dagster as dg

from state_runtime.base.clock import Clock
from state_runtime.base.errors import JobNotFound
from stillstate.assets.mount import Mount
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.jobs.checks import evaluation_of
from stillstate.orchestration.probes.pool import NoLook, troubles
from stillstate.orchestration.resources import Reading, StillstateResource
from stillstate.orchestration.sensors.sensor import sensor_of
from stillstate.orchestration.upkeep.checks import CheckName, Judged, judge, limits_of

__all__ = ["CheckCursor", "build_checks_sensor", "read_check_cursor"]

CURSOR_VERSION: Final = 1
LOOK_EVERY_S: Final = 300.0
STORE_EVERY_S: Final = 3600.0


@dataclass(frozen=True)
class CheckCursor:
    """Of one job: when it was looked at, when its verdicts were stored, and the verdicts (`name:passed,…`)."""

    looked_ms: int = 0
    stored_ms: int = 0
    verdicts: str = ""


def read_check_cursor(text: str | None) -> dict[str, CheckCursor]:
    """Parse a cursor; one that cannot be parsed starts empty: then every verdict is stored once more."""
    if not text:
        return {}
    try:
        data = json.loads(text)
        if data["version"] != CURSOR_VERSION:
            return {}
        return {
            str(n): CheckCursor(int(looked), int(stored), str(v)) for n, (looked, stored, v) in data["jobs"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def build_checks_sensor(mount: Mount, jobs: Mapping[str, Collection[CheckName]]) -> dg.SensorDefinition:
    """Build the sensor for the jobs that have such checks, with their names; a limit that is new in the file takes
    effect after a reload."""

    @sensor_of(
        mount,
        "stillstate_checks",
        "Judges replay time, growth of state, age of savepoints and backlog of all jobs by their limits.",
        60,
    )
    def stillstate_checks(context: dg.SensorEvaluationContext, stillstate: StillstateResource) -> dg.SensorResult:
        spec, clock = stillstate.spec(), stillstate.clock()
        before = read_check_cursor(context.cursor)
        cursors = {name: before.get(name, CheckCursor()) for name in jobs if name in spec.jobs}
        events: list[dg.AssetCheckEvaluation] = []
        due = [name for name, c in cursors.items() if clock.now_ms() - c.looked_ms >= LOOK_EVERY_S * 1000]
        due.sort(key=lambda name: cursors[name].looked_ms)
        seen = stillstate.read(Reading(spec, due, "checks", judge)).found
        for name, outcome in seen.items():
            if isinstance(outcome, NoLook) and outcome.why == "not-reached":
                continue  # it comes first in the next tick
            cursors[name], new = _stored(cursors[name], _found(spec.jobs[name], outcome), clock)
            events += [evaluation_of(mount, name, judged) for judged in new if judged.check in jobs[name]]
        notes = troubles({n: o for n, o in seen.items() if not _is_no_job(o)})
        return dg.SensorResult(
            asset_events=events,
            cursor=_cursor_text(cursors),
            skip_reason="; ".join([f"{len(events)} verdicts", *notes]),
        )

    return stillstate_checks


def _is_no_job(outcome: object) -> bool:
    """Whether the job was not started yet: nothing to judge, and nothing wrong."""
    return isinstance(outcome, NoLook) and isinstance(outcome.error, JobNotFound)


def _found(job: JobSpec, outcome: list[Judged] | NoLook) -> list[Judged]:
    """Return the verdicts on a job. A job that cannot be looked at is not green."""
    if not isinstance(outcome, NoLook):
        return outcome
    if _is_no_job(outcome):
        return []
    return [Judged(check, False, f"nothing is known: {outcome.error}", is_known=False) for check in limits_of(job)]


def _stored(cursor: CheckCursor, found: list[Judged], clock: Clock) -> tuple[CheckCursor, list[Judged]]:
    """Return the cursor after a look, and the verdicts to store."""
    now_ms = clock.now_ms()
    verdicts = ",".join(f"{j.check}:{int(j.passed)}{int(j.is_known)}{int(j.is_warning)}" for j in found)
    if not found or (verdicts == cursor.verdicts and now_ms - cursor.stored_ms < STORE_EVERY_S * 1000):
        return CheckCursor(now_ms, cursor.stored_ms, cursor.verdicts), []
    return CheckCursor(now_ms, now_ms, verdicts), found


def _cursor_text(cursors: dict[str, CheckCursor]) -> str:
    jobs = {name: [c.looked_ms, c.stored_ms, c.verdicts] for name, c in sorted(cursors.items())}
    return json.dumps({"version": CURSOR_VERSION, "jobs": jobs}, separators=(",", ":"))
