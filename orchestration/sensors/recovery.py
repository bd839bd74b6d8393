"""The recovery sensor: exactly one recovery run for each lost driver.

Three layers, each enough by itself for its own kind of race: the run key `job:term:attempt` (Dagster starts one run
for a key), no request while another start or recovery of the job is under way (and `dagster.yaml` runs one at a time
for each job), and the op, which looks again before it acts. Underneath, terms keep two drivers apart.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import dagster as dg

from orchestration.config.spec import Spec
from orchestration.jobs.tags import (
    ACTION_TAG,
    ATTEMPT_TAG,
    JOB_TAG,
    PROGRESS_TAG,
    STREAK_TAG,
    TERM_TAG,
    recovery_run_key,
    recovery_run_tags,
)
from orchestration.recovery.observe import progress_marker
from orchestration.recovery.plan import PastRun, RunPhase, plan_recovery
from orchestration.resources import StillstateResource
from state_runtime.base.errors import StillstateError

__all__ = ["build_recovery_sensor", "past_runs"]

# The newest decide; the rest only keeps attempt numbers of one term apart.
RUNS_READ_MAX: Final = 100

_PHASES: Final[Mapping[dg.DagsterRunStatus, RunPhase]] = {
    dg.DagsterRunStatus.NOT_STARTED: "abandoned",
    dg.DagsterRunStatus.QUEUED: "waiting",
    dg.DagsterRunStatus.MANAGED: "waiting",
    dg.DagsterRunStatus.STARTING: "active",
    dg.DagsterRunStatus.STARTED: "active",
    dg.DagsterRunStatus.CANCELING: "active",
    dg.DagsterRunStatus.SUCCESS: "ended",
    dg.DagsterRunStatus.FAILURE: "ended",
    dg.DagsterRunStatus.CANCELED: "ended",
}


def past_runs(instance: dg.DagsterInstance, job: str) -> list[PastRun]:
    """The job's newest runs, newest first."""
    records = instance.get_run_records(dg.RunsFilter(tags={JOB_TAG: job}), limit=RUNS_READ_MAX)
    return [_past_run(record) for record in records]


def _past_run(record: dg.RunRecord) -> PastRun:
    tags = record.dagster_run.tags
    return PastRun(
        run_id=record.dagster_run.run_id,
        action=tags.get(ACTION_TAG, ""),
        phase=_PHASES[record.dagster_run.status],
        term=_number(tags.get(TERM_TAG)),
        attempt=_number(tags.get(ATTEMPT_TAG)) or 0,
        streak=_number(tags.get(STREAK_TAG)) or 0,
        progress=_number(tags.get(PROGRESS_TAG)),
        ended_s=record.end_time or record.create_timestamp.timestamp(),
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def build_recovery_sensor(jobs: Sequence[str], recover_jobs: Mapping[str, dg.JobDefinition]) -> dg.SensorDefinition:
    """The sensor for the jobs that this code location knows."""

    @dg.sensor(
        name="stillstate_recovery",
        description="Starts one recovery run for each driver that is dead, silent or failed.",
        minimum_interval_seconds=5,
        default_status=dg.DefaultSensorStatus.RUNNING,
        jobs=[recover_jobs[name] for name in jobs],
    )
    def stillstate_recovery(context: dg.SensorEvaluationContext, stillstate: StillstateResource) -> dg.SensorResult:
        spec = stillstate.spec()
        requests, notes = [], []
        for name in jobs:
            try:
                request, note = _look_at(name, spec, stillstate, context.instance, recover_jobs[name])
            except StillstateError as error:
                # One job's unreadable store must not leave the others without a guard.
                context.log.error(f"{name}: {error}")
                request, note = None, f"{name}: {error}"
            notes.append(note)
            if request is not None:
                context.log.warning(note)
                requests.append(request)
        return dg.SensorResult(run_requests=requests) if requests else dg.SensorResult(skip_reason="; ".join(notes))

    return stillstate_recovery


def _look_at(
    name: str,
    spec: Spec,
    stillstate: StillstateResource,
    instance: dg.DagsterInstance,
    recover_job: dg.JobDefinition,
) -> tuple[dg.RunRequest | None, str]:
    """A request or none for one job, and one line that says why."""
    job = spec.job(name)
    seen = stillstate.observe(spec, job)
    summary = f"{name} is {seen.health.verdict}"
    if seen.status is None or not seen.health.needs_recovery:
        return None, summary
    summary = f"{summary}: {seen.health.reason}"
    if not job.recovery.enabled:
        return None, f"{summary}; recovery is switched off"
    term = seen.status.term
    progress = progress_marker(stillstate.catalog(job))
    plan = plan_recovery(
        term,
        progress,
        (seen.status.at_ms - seen.status.started_at_ms) / 1000,
        past_runs(instance, name),
        stillstate.clock().now_ms() / 1000,
        max_attempts=job.recovery.max_attempts,
        backoff_s=job.recovery.backoff_s,
    )
    summary = f"{summary}; {plan.reason}"
    if plan.attempt is None:
        return None, summary
    (op_name,) = (node.name for node in recover_job.nodes)
    return (
        dg.RunRequest(
            run_key=recovery_run_key(name, term, plan.attempt),
            job_name=recover_job.name,
            run_config={"ops": {op_name: {"config": {"term": term}}}},
            tags=recovery_run_tags(name, term, plan.attempt, plan.streak, progress),
        ),
        summary,
    )
