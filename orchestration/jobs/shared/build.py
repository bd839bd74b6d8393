"""The Dagster jobs that all streams share, with their assets, checks and schedules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from state_runtime.maintenance.plans import Kind
from stillstate.assets.mount import Mount
from stillstate.orchestration.config.schedules import Period, cron_of, is_due
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.jobs.deletions import ACTIONS, DELETION_TEXTS, safe_spec
from stillstate.orchestration.jobs.materialize import materialization_tags
from stillstate.orchestration.jobs.output import ACTION, OUTPUT_TEXT
from stillstate.orchestration.jobs.shared.assets import (
    build_deletions,
    build_materializations,
    build_outputs,
    build_savepoints,
)
from stillstate.orchestration.jobs.shared.checks import build_drills, build_look_checks, build_verifications
from stillstate.orchestration.jobs.tags import MATERIALIZE_TAG, SAVEPOINT_TAG, UPKEEP_TAG
from stillstate.orchestration.jobs.upkeep import upkeep_tags

__all__ = ["SharedJobs", "build_shared_jobs"]


@dataclass(frozen=True, kw_only=True)
class SharedJobs:
    """The Dagster objects for all streams."""

    materialize_op: str
    fold: Any  # an asset job is resolved by `Definitions`; Dagster does not export the class
    upkeep: Sequence[Any]
    assets: Sequence[dg.AssetsDefinition]
    checks: Sequence[dg.AssetChecksDefinition]
    schedules: Sequence[dg.ScheduleDefinition]


@dataclass(frozen=True, kw_only=True)
class _Work:
    """One kind of work on any stream.

    Attributes:
        targets, checks: the assets of a stream that a run makes, and the checks that it evaluates.
        tag: of which one run of a stream goes at a time.
        timeout_s: of a stream's run.
        times: of each schedule the suffix of its name, a stream's line in the file, the period of `auto`, and more run
            configuration.
    """

    action: str
    node: str
    selection: dg.AssetSelection
    description: str
    tag: str
    tags: Callable[[float], dict[str, str]]
    timeout_s: Callable[[JobSpec], float]
    targets: Callable[[str], Sequence[dg.AssetKey]] = lambda name: ()
    checks: Callable[[str], Sequence[dg.AssetCheckKey]] = lambda name: ()
    times: Sequence[tuple[str, Callable[[JobSpec], str], Period, Mapping[str, Any]]] = ()


def build_shared_jobs(mount: Mount, jobs: Sequence[JobSpec]) -> SharedJobs:
    """Build the shared jobs; a run of each is about one stream, and takes that stream's slot among runs."""
    folds, savepoints = build_materializations(mount, jobs), build_savepoints(mount, jobs)
    retained, garbage = build_deletions(mount, jobs, "retention"), build_deletions(mount, jobs, "gc")
    outputs = build_outputs(mount, jobs)
    intact, restorable = build_verifications(mount, jobs), build_drills(mount, jobs)
    works = [
        _materialize_work(mount, folds),
        _savepoint_work(mount, savepoints),
        _deletion_work(mount, retained, "retention"),
        _deletion_work(mount, garbage, "gc"),
        _output_work(mount, outputs),
        _verify_work(intact),
        _drill_work(restorable),
    ]
    made = {work.action: _job(mount, work, jobs) for work in works}
    fold = made.pop("materialize")
    return SharedJobs(
        materialize_op=folds.op.name,
        fold=fold,
        upkeep=list(made.values()),
        assets=[folds, savepoints, retained, garbage, outputs],
        checks=[*build_look_checks(mount, jobs), intact, restorable],
        schedules=[s for w in works for s in _schedules(mount, w, {"materialize": fold, **made}[w.action], jobs)],
    )


def _materialize_work(mount: Mount, folds: dg.AssetsDefinition) -> _Work:
    return _Work(
        action="materialize",
        node=folds.op.name,
        selection=dg.AssetSelection.assets(folds).without_checks(),
        description="Fold the changelog of a stream into state tables, in a separate Spark job.",
        tag=MATERIALIZE_TAG,
        tags=materialization_tags,
        timeout_s=lambda job: job.materialization.timeout_s,
        targets=lambda name: [mount.materialized(name)],
        times=[("", lambda job: job.materialization.schedule or "off", "night", {})],
    )


def _savepoint_work(mount: Mount, savepoints: dg.AssetsDefinition) -> _Work:
    return _Work(
        action="savepoint",
        node=savepoints.op.name,
        selection=dg.AssetSelection.assets(savepoints).without_checks(),
        description="Make a savepoint of a stream, named by the time; running or not.",
        tag=SAVEPOINT_TAG,
        tags=lambda timeout_s: upkeep_tags("savepoint", timeout_s),
        timeout_s=lambda job: job.savepoints.timeout_s,
        targets=lambda name: [mount.savepoints(name)],
        times=[("", lambda job: job.savepoints.schedule, "night", {})],
    )


def _deletion_work(mount: Mount, deletions: dg.AssetsDefinition, kind: Kind) -> _Work:
    def section(job: JobSpec) -> Any:
        return job.retention if kind == "retention" else job.garbage

    return _Work(
        action=ACTIONS[kind],
        node=deletions.op.name,
        selection=dg.AssetSelection.assets(deletions),
        description=DELETION_TEXTS[kind].format("a stream"),
        tag=UPKEEP_TAG,
        tags=lambda timeout_s: upkeep_tags(ACTIONS[kind], timeout_s),
        timeout_s=lambda job: float(section(job).timeout_s),
        targets=lambda name: [mount.planned(name, kind), mount.applied(name, kind)],
        checks=lambda name: [safe_spec(mount, name, kind).key],
        times=[("", lambda job: str(section(job).schedule), "night" if kind == "retention" else "six_hours", {})],
    )


def _output_work(mount: Mount, outputs: dg.AssetsDefinition) -> _Work:
    return _Work(
        action=ACTION,
        node=outputs.op.name,
        selection=dg.AssetSelection.assets(outputs).without_checks(),
        description=OUTPUT_TEXT.format("a stream"),
        tag=UPKEEP_TAG,
        tags=lambda timeout_s: upkeep_tags(ACTION, timeout_s),
        timeout_s=lambda job: job.output.timeout_s,
        targets=lambda name: [mount.compacted(name)],
        times=[("", lambda job: job.output.schedule, "night", {})],
    )


def _verify_work(intact: dg.AssetChecksDefinition) -> _Work:
    return _Work(
        action="verify",
        node=intact.node_def.name,
        selection=dg.AssetSelection.checks(intact),
        description="Read again what a stream has stored, and compare.",
        tag=UPKEEP_TAG,
        tags=lambda timeout_s: upkeep_tags("verify", timeout_s),
        timeout_s=lambda job: job.verification.timeout_s,
        checks=_checks_by_stream(intact),
        times=[
            ("", lambda job: job.verification.sample, "night", {"level": "sample"}),
            ("_full", lambda job: job.verification.full, "week", {"level": "full"}),
        ],
    )


def _drill_work(restorable: dg.AssetChecksDefinition) -> _Work:
    return _Work(
        action="drill",
        node=restorable.node_def.name,
        selection=dg.AssetSelection.checks(restorable),
        description="Restore the newest snapshot of a stream into a scratch folder, and compare.",
        tag=UPKEEP_TAG,
        tags=lambda timeout_s: upkeep_tags("drill", timeout_s),
        timeout_s=lambda job: job.drill.timeout_s,
        checks=_checks_by_stream(restorable),
        times=[("", lambda job: job.drill.schedule, "week", {})],
    )


def _checks_by_stream(check: dg.AssetChecksDefinition) -> Callable[[str], Sequence[dg.AssetCheckKey]]:
    keys = {key.asset_key.path[-2]: key for key in check.check_keys}
    return lambda name: [keys[name]]


def _job(mount: Mount, work: _Work, jobs: Sequence[JobSpec]) -> Any:
    return dg.define_asset_job(
        mount.name(work.action),
        selection=work.selection,
        description=f"{work.description} Which one: `stream` in the configuration of `{work.node}`.",
        executor_def=dg.in_process_executor,  # one step: a second process would only cost a second start
        # For a run that does not name its stream: the longest limit of all streams.
        tags=work.tags(max(work.timeout_s(job) for job in jobs)),
    )


def _schedules(mount: Mount, work: _Work, job_def: Any, jobs: Sequence[JobSpec]) -> list[dg.ScheduleDefinition]:
    """Build one schedule for all streams, with the times of each."""
    found = []
    for suffix, line, period, config in work.times:
        crons = [(job, cron) for job in jobs if (cron := cron_of(line(job), period, job.name)) is not None]
        if crons:
            found.append(_schedule(mount, work, job_def, f"{mount.name(work.action)}{suffix}_schedule", crons, config))
    return found


def _schedule(
    mount: Mount,
    work: _Work,
    job_def: Any,
    name: str,
    crons: Sequence[tuple[JobSpec, str]],
    config: Mapping[str, Any],
) -> dg.ScheduleDefinition:
    def due(context: dg.ScheduleEvaluationContext) -> Iterator[dg.RunRequest]:
        at = context.scheduled_execution_time
        fields = (at.minute, at.hour, at.day, at.month, at.isoweekday() % 7)
        for job, cron in crons:
            if is_due(cron, fields):
                yield dg.RunRequest(
                    run_key=f"{mount.tag(job.name)}:{at.isoformat()}",
                    run_config={"ops": {work.node: {"config": {"stream": job.name, **config}}}},
                    tags={**work.tags(work.timeout_s(job)), work.tag: mount.tag(job.name)},
                    asset_selection=list(work.targets(job.name)),
                    # Always set: without a list Dagster would run all checks of those assets.
                    asset_check_keys=list(work.checks(job.name)),
                )

    return dg.ScheduleDefinition(
        name=name,
        job=job_def,
        cron_schedule=sorted({cron for _, cron in crons}),
        execution_timezone="UTC",
        execution_fn=due,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description=work.description,
    )
