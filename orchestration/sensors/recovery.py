"""The recovery sensor. It requests one recovery run for each lost driver, and one run that fails when no attempt is
left. It ends Stillstate's runs whose worker is gone, and publishes the check `driver_alive` of every job.

It may run twice, or lose its cursor: the run key is the failure, so Dagster starts one run per failure and attempt, and
the run itself looks again before it acts. The cursor only holds what was shown, so that a check is evaluated when
something changes and once an hour, and not with every tick.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import dagster as dg

from state_runtime.base.errors import StillstateError
from state_runtime.snapshot.term_files import RunStatus
from stillstate.assets.checks import alive_evaluation
from stillstate.assets.mount import Mount
from stillstate.orchestration.config.spec import JobSpec, Spec
from stillstate.orchestration.jobs.alive_check import AliveLook, judge_look, last_words
from stillstate.orchestration.jobs.driver import runtime_max_s
from stillstate.orchestration.jobs.tags import (
    ACTION_TAG,
    STREAM_TAGS,
    give_up_run_key,
    give_up_run_tags,
    prune_tag,
    recovery_run_key,
    recovery_run_tags,
)
from stillstate.orchestration.probes.look import Look
from stillstate.orchestration.probes.pool import NoLook, troubles
from stillstate.orchestration.resources import StillstateResource
from stillstate.orchestration.sensors.sensor import sensor_of
from stillstate.orchestration.workers import end_lost_runs

__all__ = ["AliveCursor", "build_recovery_sensor", "read_alive_cursor"]

CURSOR_VERSION: Final = 1
SHOWN_EVERY_S: Final = 3600.0
SHOWN_LATE_S: Final = 300.0


@dataclass(frozen=True)
class AliveCursor:
    """The state of a job that was shown.

    Attributes:
        shown: level and headline of the check, the term and the attempt.
        at_s: when.
        term: the newest term that was seen; 0 before the first.
        unreachable_since_s: since when its store does not answer.
    """

    shown: str = ""
    at_s: float = 0.0
    term: int = 0
    unreachable_since_s: float | None = None


@dataclass
class _Tick:
    mount: Mount
    cursors: dict[str, AliveCursor]
    next_start: str
    events: list[dg.AssetCheckEvaluation | dg.AssetObservation] = field(default_factory=list)
    requests: list[dg.RunRequest] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def cursor_text(self) -> str:
        jobs = {n: [c.shown, c.at_s, c.term, c.unreachable_since_s] for n, c in sorted(self.cursors.items())}
        return json.dumps({"version": CURSOR_VERSION, "start": self.next_start, "jobs": jobs}, separators=(",", ":"))


def read_alive_cursor(text: str | None) -> tuple[dict[str, AliveCursor], str]:
    """Parse a cursor: the shown state of each job, and the job to begin with. A cursor that cannot be parsed starts
    empty: every check is shown once more."""
    try:
        data = json.loads(text or "{}")
        if data.get("version") != CURSOR_VERSION:
            return {}, ""
        cursors = {
            str(name): AliveCursor(str(shown), float(at_s), int(term), None if since_s is None else float(since_s))
            for name, (shown, at_s, term, since_s) in data["jobs"].items()
        }
        return cursors, str(data.get("start", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}, ""


def build_recovery_sensor(
    mount: Mount, jobs: Sequence[str], recover_jobs: Mapping[str, dg.JobDefinition]
) -> dg.SensorDefinition:
    """Build the sensor for the jobs that this code location knows."""

    @sensor_of(
        mount,
        "stillstate_recovery",
        "Starts one recovery run for each driver that is dead, silent, stalled or failed, and says of "
        "every job whether its driver is alive.",
        5,
        list({made.name: made for made in recover_jobs.values()}.values()),
    )
    def stillstate_recovery(context: dg.SensorEvaluationContext, stillstate: StillstateResource) -> dg.SensorResult:
        spec = stillstate.spec()
        # First: a job is not recovered while a run of it counts as under way.
        streams = {mount.tag(name) for name in jobs} | {prune_tag(mount)}
        for line in end_lost_runs(context.instance, streams, STREAM_TAGS, ACTION_TAG, stillstate.clock()):
            context.log.error(line)
        before, start = read_alive_cursor(context.cursor)
        seen = stillstate.look(spec, jobs, start=start)
        tick = _Tick(mount, {name: cursor for name, cursor in before.items() if name in jobs}, seen.next_start)
        for trouble in troubles(seen.found):
            context.log.error(trouble)
        for name, look in seen.found.items():
            try:
                _judge(spec.job(name), look, spec, stillstate, context.instance, recover_jobs[name], tick)
            except StillstateError as error:
                # One job's trouble must not leave the other jobs unobserved.
                context.log.error(f"{name}: {error}")
                tick.notes.append(f"{name}: {error}")
        for request in tick.requests:
            context.log.warning(f"{request.run_key} is requested")
        return dg.SensorResult(
            run_requests=tick.requests or None,
            asset_events=tick.events,
            cursor=tick.cursor_text(),
            skip_reason=None if tick.requests else "; ".join(tick.notes),
        )

    return stillstate_recovery


def _judge(
    job: JobSpec,
    seen: Look | NoLook,
    spec: Spec,
    stillstate: StillstateResource,
    instance: dg.DagsterInstance,
    recover_job: dg.JobDefinition,
    tick: _Tick,
) -> None:
    before = tick.cursors.get(job.name, AliveCursor())
    if isinstance(seen, NoLook) and seen.why == "not-reached":
        tick.notes.append(f"{job.name} was not reached in this tick")
        return
    now_s = stillstate.clock().now_ms() / 1000
    well_term = before.term if before.shown.startswith("ok ") else 0
    look = judge_look(tick.mount, job, seen, instance, now_s, before.unreachable_since_s, well_term)
    request = _request(tick.mount, job, look, recover_job)
    if request is not None:
        tick.requests.append(request)
    note = f"{job.name} is {look.alive.verdict}"
    tick.notes.append(note if look.alive.level == "ok" else f"{note}: {look.alive.reason} ({look.alive.headline})")
    term = before.term if look.status is None else look.status.term
    if before.term and term > before.term and look.status is not None and look.status.cause:
        tick.events.append(_restarted(tick.mount.stream(job.name), look.status))
    shown = f"{look.alive.level} {look.alive.headline} {term} {look.alive.attempt} {look.alive.last_run_id}"
    is_shown = shown == before.shown and now_s - before.at_s < SHOWN_EVERY_S
    if not is_shown:
        words = last_words(stillstate, spec, job, look)
        stream, next_look_by_s = tick.mount.stream(job.name), now_s + SHOWN_EVERY_S + SHOWN_LATE_S
        tick.events.append(alive_evaluation(stream, look.alive, look.status, *words, next_look_by_s=next_look_by_s))
    tick.cursors[job.name] = AliveCursor(shown, before.at_s if is_shown else now_s, term, look.unreachable_since_s)


def _request(mount: Mount, job: JobSpec, look: AliveLook, recover_job: dg.JobDefinition) -> dg.RunRequest | None:
    plan, status = look.plan, look.status
    if plan is None or status is None or (plan.attempt is None and not plan.tell):
        return None
    (op_name,) = (node.name for node in recover_job.nodes)
    config: dict[str, Any] = {"term": status.term}
    if mount.is_shared:
        config["stream"] = job.name
    name = mount.tag(job.name)
    if plan.attempt is None:
        key, tags = give_up_run_key(name, status.term), give_up_run_tags(name, status.term)
        config["gave_up"] = look.alive.reason
    else:
        key = recovery_run_key(name, status.term, plan.attempt)
        tags = recovery_run_tags(name, status.term, plan.attempt, plan.streak, look.progress, plan.kind)
        if plan.kind:
            config["kind"] = plan.kind
    tags["dagster/max_runtime"] = str(runtime_max_s("recover", job))
    return dg.RunRequest(
        run_key=key, job_name=recover_job.name, run_config={"ops": {op_name: {"config": config}}}, tags=tags
    )


def _restarted(stream: dg.AssetKey, status: RunStatus) -> dg.AssetObservation:
    """Return an event of the stream for a run that was started automatically, not by a person."""
    return dg.AssetObservation(
        stream,
        description=f"term {status.term}: {status.cause}",
        metadata={"term": dg.IntMetadataValue(status.term), "cause": status.cause, "host": status.host},
    )
