"""`verify_<job>` with the check `intact`, and `drill_<job>` with the check `restorable`: both are checks of
`<job>/checkpoints`, run by separate jobs."""

from typing import Any, Final, Literal

import dagster as dg

from state_runtime.base.errors import JobNotFound, MissingSnapshot
from stillstate.assets.mount import Mount
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.jobs.checks import stream_check
from stillstate.orchestration.jobs.driver import stillstate_of, typed_failures
from stillstate.orchestration.jobs.tags import UPKEEP_TAG
from stillstate.orchestration.jobs.upkeep import LogsSteps, UpkeepJob, actor_of, upkeep_job, upkeep_tags
from stillstate.orchestration.text import counted_text
from stillstate.orchestration.upkeep.drill import drill_job
from stillstate.orchestration.upkeep.verification import verify_job

__all__ = [
    "INTACT",
    "LEVEL",
    "RESTORABLE",
    "build_drill_job",
    "build_verify_job",
    "drill_stream",
    "intact_spec",
    "restorable_spec",
    "verify_stream",
]

_NAMED_MAX: Final = 20


INTACT: Final = "intact"
RESTORABLE: Final = "restorable"
LEVEL: Final = dg.Field(dg.Enum("Level", [dg.EnumValue("sample"), dg.EnumValue("full")]), default_value="sample")


def build_verify_job(mount: Mount, job: JobSpec) -> UpkeepJob:
    """Build the job that reads the stored data again: a share of it nightly, all of it weekly."""
    name = job.name
    spec = intact_spec(mount, name)

    @dg.asset_check(
        asset=spec.asset_key,
        name=spec.name,
        description=spec.description,
        required_resource_keys={mount.resource},
        config_schema={"level": LEVEL},
    )
    def intact(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        return verify_stream(context, mount, name, context.op_execution_context.op_config["level"])

    made, schedules = upkeep_job(
        mount,
        job,
        "verify",
        dg.AssetSelection.checks(intact),
        f"Read again what {name} has stored, and compare.",
        {**upkeep_tags("verify", job.verification.timeout_s), UPKEEP_TAG: mount.tag(name)},
        [
            ("", job.verification.sample, "night", _level(intact, "sample")),
            ("_full", job.verification.full, "week", _level(intact, "full")),
        ],
    )
    return UpkeepJob(job=made, checks=(intact,), schedules=schedules)


def _level(check: dg.AssetChecksDefinition, level: str) -> dict[str, Any]:
    return {"ops": {check.node_def.name: {"config": {"level": level}}}}


def intact_spec(mount: Mount, name: str) -> dg.AssetCheckSpec:
    """Return the spec of a stream's check `intact`."""
    return dg.AssetCheckSpec(
        INTACT,
        asset=mount.checkpoints(name),
        description=f"Whether every file that snapshots and savepoints of {name} need is there and is what was "
        "written. `sample` reads a share of them, another one each time; `full` reads and decodes all.",
    )


def verify_stream(
    context: dg.AssetCheckExecutionContext, mount: Mount, name: str, level: Literal["sample", "full"]
) -> dg.AssetCheckResult:
    """Read a stream's stored data again."""
    stillstate = stillstate_of(context, mount)
    with typed_failures():
        now = stillstate.spec().job(name)
        try:
            report = verify_job(
                now,
                stillstate.catalog(now),
                actor_of(stillstate),
                level,
                seed=context.run.run_id,
                on_progress=LogsSteps(context.log, f"{name}: verify", "bytes"),
            )
        except JobNotFound as error:
            return _nothing_known(mount, name, INTACT, error)
    # An unreachable object says nothing about the data: the check is not green, and no alarm of damage either.
    damaged = report.exit_code not in (0, 4)
    named = "; ".join(f"{f.kind}: {f.path}: {f.detail}" for f in report.findings[:_NAMED_MAX])
    unread = "" if report.complete else "the store did not answer any more, and not all was looked at; "
    return dg.AssetCheckResult(
        asset_key=mount.checkpoints(name),
        check_name=INTACT,
        passed=report.exit_code == 0,
        severity=dg.AssetCheckSeverity.ERROR if damaged else dg.AssetCheckSeverity.WARN,
        description=f"{unread}{named}"
        if report.exit_code
        else f"nothing wrong in {counted_text(report.objects, 'object')}",
        metadata={
            "level": level,
            "snapshots": len(report.snapshots),
            "savepoints": report.savepoints,
            "objects": report.objects,
            "bytes": report.bytes,
            "objects_read": report.objects_read,
            "bytes_read": report.bytes_read,
            "findings": len(report.findings) + report.findings_left_out,
            "duration_s": float(report.seconds),
        },
    )


def build_drill_job(mount: Mount, job: JobSpec) -> UpkeepJob:
    """Build the job that restores the newest snapshot into a scratch folder, and compares."""
    name = job.name
    restorable = stream_check(mount, name, restorable_spec(mount, name), drill_stream)
    made, schedules = upkeep_job(
        mount,
        job,
        "drill",
        dg.AssetSelection.checks(restorable),
        f"Restore the newest snapshot of {name} into a scratch folder, and compare.",
        {**upkeep_tags("drill", job.drill.timeout_s), UPKEEP_TAG: mount.tag(name)},
        [("", job.drill.schedule, "week", {})],
    )
    return UpkeepJob(job=made, checks=(restorable,), schedules=schedules)


def restorable_spec(mount: Mount, name: str) -> dg.AssetCheckSpec:
    """Return the spec of a stream's check `restorable`."""
    return dg.AssetCheckSpec(
        RESTORABLE,
        asset=mount.checkpoints(name),
        description=f"Whether the newest snapshot of {name}, restored into a scratch folder as a restart would, gives "
        "the rows that the store has.",
    )


def drill_stream(context: dg.AssetCheckExecutionContext, mount: Mount, name: str) -> dg.AssetCheckResult:
    """Restore the newest snapshot of a stream into a scratch folder."""
    stillstate = stillstate_of(context, mount)
    with typed_failures():
        now = stillstate.spec().job(name)
        try:
            report = drill_job(
                now,
                stillstate.catalog(now),
                actor_of(stillstate),
                on_progress=LogsSteps(context.log, f"{name}: drill", "shards"),
            )
        except (JobNotFound, MissingSnapshot) as error:
            return _nothing_known(mount, name, RESTORABLE, error)
    return dg.AssetCheckResult(
        asset_key=mount.checkpoints(name),
        check_name=RESTORABLE,
        passed=report.is_restorable,
        severity=dg.AssetCheckSeverity.ERROR,
        description="; ".join(report.problems[:_NAMED_MAX])
        or f"snapshot {report.snapshot_id} came back with {counted_text(report.rows, 'row')}",
        metadata={
            "snapshot_id": report.snapshot_id,
            "rows": report.rows,
            "inflight_rows": report.inflight_rows,
            "states": len(report.states),
            "bytes_read": report.bytes_read,
            "restore_s": float(report.restore_s),
            "duration_s": float(report.seconds),
            "problems": len(report.problems),
        },
    )


def _nothing_known(mount: Mount, name: str, check: str, error: Exception) -> dg.AssetCheckResult:
    """Return a warning: a stream with nothing to look at is not green."""
    return dg.AssetCheckResult(
        asset_key=mount.checkpoints(name),
        check_name=check,
        passed=False,
        severity=dg.AssetCheckSeverity.WARN,
        description=f"nothing is known yet: {error}",
    )
