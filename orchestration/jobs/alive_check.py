"""One look at a job for the recovery sensor and for the check `driver_alive`: the driver's health, the planned
recovery, and the text for people. The sensor publishes the check; a person may also run it."""

from dataclasses import dataclass, replace

import dagster as dg

from state_runtime.base.errors import CorruptData, Unavailable
from state_runtime.snapshot.term_files import RunStatus
from stillstate.assets.checks import ALIVE_CHECK, alive_evaluation
from stillstate.assets.mount import Mount
from stillstate.orchestration.config.spec import JobSpec, Spec
from stillstate.orchestration.jobs.checks import result_of, stream_check
from stillstate.orchestration.jobs.driver import stillstate_of, typed_failures
from stillstate.orchestration.jobs.past_runs import past_migrations, past_runs
from stillstate.orchestration.migration.desired import is_left_by_its_run
from stillstate.orchestration.probes.look import Look
from stillstate.orchestration.probes.pool import NoLook
from stillstate.orchestration.recovery.alive import Alive, judge_alive
from stillstate.orchestration.recovery.observe import Observation
from stillstate.orchestration.recovery.plan import Loss, RecoveryPlan, plan_recovery
from stillstate.orchestration.resources import StillstateResource

__all__ = ["AliveLook", "alive_of_stream", "alive_spec", "build_alive_check", "judge_look", "last_words"]


@dataclass(frozen=True, kw_only=True)
class AliveLook:
    """The result of one look.

    Attributes:
        status: the newest heartbeat; None if the job has no heartbeat, or it could not be read.
        plan: of the recovery, if one is needed and may be planned.
        progress: the job's progress marker, if a recovery is planned.
        unreachable_since_s: wall clock; None if the store answered.
    """

    alive: Alive
    status: RunStatus | None = None
    plan: RecoveryPlan | None = None
    progress: int = 0
    unreachable_since_s: float | None = None


def judge_look(
    mount: Mount,
    job: JobSpec,
    look: Look | NoLook,
    instance: dg.DagsterInstance,
    now_s: float,
    unreachable_since_s: float | None = None,
    well_term: int = 0,
) -> AliveLook:
    """Judge the result of a look at the store, and plan the recovery; read no store, and request nothing.

    Args:
        well_term: the run that the previous look found well; 0: none. It stays well, also if it now works on its first
            rows after its source was quiet.
        unreachable_since_s: the value that the previous look returned.
    """
    recovery = job.recovery
    seen = None if isinstance(look, NoLook) else look.seen
    trouble, since_s = _trouble(look, now_s, unreachable_since_s)
    plan, progress = None, 0
    status = seen.status if seen is not None else None
    if not isinstance(look, NoLook) and status is not None and _wants_recovery(job, look.seen):
        progress, loss = _loss(look, status)
        plan = plan_recovery(
            loss,
            past_runs(instance, mount.tag(job.name)),
            now_s,
            max_attempts=recovery.max_attempts,
            backoff_s=recovery.backoff_s,
        )
    health = seen.health if seen is not None else None
    if health is not None and seen is not None and seen.migration is not None and not health.is_overdue:
        past = past_migrations(instance).get(mount.tag(job.name), [])
        health = replace(health, is_overdue=is_left_by_its_run(seen.migration, past))
    alive = judge_alive(
        health,
        plan,
        now_s=now_s,
        is_recovered=seen is not None and _is_recovered(job, seen),
        max_attempts=recovery.max_attempts,
        is_unproven=not isinstance(look, NoLook) and status is not None and _is_unproven(look, status, well_term),
        trouble=trouble,
        unreachable_since_s=since_s,
    )
    return AliveLook(alive=alive, status=status, plan=plan, progress=progress, unreachable_since_s=since_s)


def _trouble(look: Look | NoLook, now_s: float, before_s: float | None) -> tuple[str, float | None]:
    """Return why nothing was seen, and since when the store does not answer."""
    if not isinstance(look, NoLook):
        return "", None
    if look.why == "failed" and not isinstance(look.error, Unavailable):
        return str(look.error), None
    return str(look.error), now_s - look.away_s if before_s is None else min(before_s, now_s - look.away_s)


def _is_unproven(look: Look, status: RunStatus, well_term: int) -> bool:
    """Whether a run that was started automatically, not by a person, has not yet shown that it can commit. A recovery
    waits for the same proof: a checkpoint, or a source that has nothing new."""
    if not status.cause or status.quiet or status.term == well_term or look.trouble is not None:
        return False
    return look.head is None or look.head.kind != "checkpoint" or look.head.term < status.term


def _is_recovered(job: JobSpec, seen: Observation) -> bool:
    return job.recovery.enabled and (seen.health.verdict != "stalled" or job.recovery.restart_stalled)


def _wants_recovery(job: JobSpec, seen: Observation) -> bool:
    return seen.health.needs_recovery and _is_recovered(job, seen)


def _loss(look: Look, status: RunStatus) -> tuple[int, Loss]:
    """Return the job's progress, and the loss."""
    try:
        progress, kind = look.progress(), status.error_kind
    except CorruptData as error:
        # The progress is unknown; the recovery run then reports the snapshots that the job could go back to.
        progress, kind = 0, error.kind
    return progress, Loss(
        term=status.term,
        progress=progress,
        lived_s=(status.at_ms - status.started_at_ms) / 1000,
        verdict=look.seen.health.verdict,
        kind=kind,
    )


def last_words(stillstate: StillstateResource, spec: Spec, job: JobSpec, look: AliveLook) -> tuple[str, str]:
    """Return the driver's log and its end, for a job that is not well; empty if this machine has no log."""
    if look.status is None or look.alive.level == "ok":
        return "", ""
    found = stillstate.launcher(spec, job).last_words(look.status)
    return ("", "") if found is None else (found.log, found.text)


def build_alive_check(mount: Mount, job: JobSpec) -> dg.AssetChecksDefinition:
    """Build the check that a person may run; the sensor evaluates it on every change and once an hour."""
    return stream_check(mount, job.name, alive_spec(mount, job.name), alive_of_stream)


def alive_spec(mount: Mount, name: str) -> dg.AssetCheckSpec:
    """Return the spec of a stream's check `driver_alive`."""
    return dg.AssetCheckSpec(
        ALIVE_CHECK,
        asset=mount.stream(name),
        description="Red when the driver is down and is not being recovered; a warning while it starts, is silent, is "
        "being recovered, or was brought back and has made no checkpoint yet. Evaluated by the recovery "
        "sensor on every change, and once an hour: if `next_look_by` has passed, the sensor has stopped.",
    )


def alive_of_stream(context: dg.AssetCheckExecutionContext, mount: Mount, name: str) -> dg.AssetCheckResult:
    """Look at a stream, and judge."""
    stillstate = stillstate_of(context, mount)
    with typed_failures():
        spec = stillstate.spec()
        job = spec.job(name)
        seen_now = stillstate.look(spec, [name]).found[name]
        look = judge_look(mount, job, seen_now, context.instance, stillstate.clock().now_ms() / 1000)
        words = last_words(stillstate, spec, job, look)
    return result_of(alive_evaluation(mount.stream(name), look.alive, look.status, *words))
