"""The checks of a job that have a limit, as a person runs them; the sensor `stillstate_checks` evaluates them too."""

from collections.abc import Callable, Collection, Iterator

import dagster as dg

from state_runtime.base.errors import JobNotFound
from stillstate.assets.mount import Mount
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.jobs.driver import stillstate_of, typed_failures
from stillstate.orchestration.upkeep.checks import CheckName, Judged, judge, limits_of

__all__ = ["build_checks", "check_specs", "check_stream", "evaluation_of", "result_of", "stream_check"]

_DESCRIPTIONS: dict[CheckName, str] = {
    "replay_time_bounded": "Whether a restart replays its log in time (`checks.replay_s`).",
    "rows_on_time": "Whether the newest checkpoints dropped all of their rows as late (`checks.late_checkpoints`).",
    "state_growth": "How many times the rows of a day before the state has (`checks.state_growth`).",
    "savepoint_recent": "Whether the newest savepoint is young enough (`checks.savepoint_age_s`).",
    "backlog": "How far the watermark is behind the clock, and how long rows in flight wait (`checks.backlog_s`).",
    "source_lag": "How old the oldest record or file is that the job has not read (`checks.source_lag_s`).",
    "retention_margin": "How soon a source removes what the job has not read (`checks.retention_margin_s`).",
}


def stream_check(
    mount: Mount,
    name: str,
    spec: dg.AssetCheckSpec,
    evaluate: Callable[[dg.AssetCheckExecutionContext, Mount, str], dg.AssetCheckResult],
) -> dg.AssetChecksDefinition:
    """Build one check of one stream that a person can run."""

    @dg.asset_check(
        asset=spec.asset_key,
        name=spec.name,
        description=spec.description,
        required_resource_keys={mount.resource},
    )
    def check(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        return evaluate(context, mount, name)

    return check


def check_key(mount: Mount, job: str, check: CheckName) -> dg.AssetKey:
    """Return the asset that a check is about."""
    return mount.savepoints(job) if check == "savepoint_recent" else mount.checkpoints(job)


def check_specs(mount: Mount, job: JobSpec) -> list[dg.AssetCheckSpec]:
    """Return the checks of a job that have a limit."""
    return [
        dg.AssetCheckSpec(check, asset=check_key(mount, job.name, check), description=_DESCRIPTIONS[check])
        for check in limits_of(job)
    ]


def build_checks(mount: Mount, job: JobSpec) -> dg.AssetChecksDefinition | None:
    """Build the checks of a job; None if no check has a limit."""
    name, limits = job.name, limits_of(job)
    if not limits:
        return None

    @dg.multi_asset_check(
        name=mount.name("checks", name),
        specs=check_specs(mount, job),
        required_resource_keys={mount.resource},
    )
    def checks(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        yield from check_stream(context, mount, name, limits)

    return checks


def check_stream(
    context: dg.AssetCheckExecutionContext, mount: Mount, name: str, limits: Collection[str]
) -> Iterator[dg.AssetCheckResult]:
    """Judge a stream by its limits.

    Args:
        limits: the requested checks.
    """
    stillstate = stillstate_of(context, mount)
    with typed_failures():
        now = stillstate.spec().job(name)
        try:
            found = judge(now, stillstate.catalog(now))
        except JobNotFound as error:
            said = f"nothing is known: {error}"
            found = [Judged(check, False, said, is_known=False) for check in limits_of(now)]
    for judged in found:
        if judged.check in limits:
            yield result_of(evaluation_of(mount, name, judged))


def result_of(seen: dg.AssetCheckEvaluation) -> dg.AssetCheckResult:
    """Convert an event that needs no run to the result of a run."""
    return dg.AssetCheckResult(
        asset_key=seen.asset_key,
        check_name=seen.check_name,
        passed=seen.passed,
        severity=seen.severity,
        description=seen.description,
        metadata=seen.metadata,
    )


def evaluation_of(mount: Mount, job: str, judged: Judged) -> dg.AssetCheckEvaluation:
    """Convert a verdict to Dagster's form: over the limit is an error; an unknown value is a warning, and so is a
    limit that only warns."""
    is_error = judged.is_known and not judged.is_warning
    return dg.AssetCheckEvaluation(
        asset_key=check_key(mount, job, judged.check),
        check_name=judged.check,
        passed=judged.passed,
        severity=dg.AssetCheckSeverity.ERROR if is_error else dg.AssetCheckSeverity.WARN,
        description=judged.text,
        metadata={name: dg.MetadataValue.float(float(value)) for name, value in judged.numbers.items()},
    )
