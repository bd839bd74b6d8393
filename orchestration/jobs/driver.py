"""Jobs that start, stop and recover one driver.

Each is a single op over a plain function of the launcher. None of them relies on Dagster for safety: a driver
that should not run is fenced by its term.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import dagster as dg

from orchestration.config.spec import JobSpec
from orchestration.jobs.tags import ACTION_TAG, JOB_TAG
from orchestration.launchers import Launched
from orchestration.resources import STILLSTATE, StillstateResource
from state_runtime.base.errors import StillstateError

__all__ = ["DriverJobs", "RecoverConfig", "StartConfig", "build_driver_jobs", "typed_failures"]


class StartConfig(dg.Config):
    """How to start.

    Attributes:
        takeover: take the job from a driver that still runs (it is fenced and ends).
        until_idle: process the input that is there, then finish.
    """

    takeover: bool = False
    until_idle: bool = False


class RecoverConfig(dg.Config):
    """Which failure to recover.

    Attributes:
        term: the term that was lost; 0 takes the newest. A newer term means that somebody was faster.
    """

    term: int = 0


@dataclass(frozen=True)
class DriverJobs:
    """The Dagster jobs of one streaming job."""

    start: dg.JobDefinition
    stop: dg.JobDefinition
    recover: dg.JobDefinition

    def all(self) -> list[dg.JobDefinition]:
        return [self.start, self.stop, self.recover]


def build_driver_jobs(job: JobSpec, stillstate: StillstateResource) -> DriverJobs:
    """Build the three jobs; names are Dagster identifiers (`-` becomes `_`)."""
    return DriverJobs(
        start=_one_op_job(
            job, stillstate, "start", _start_op(job), f"Start the driver of {job.name} and wait until it runs."
        ),
        stop=_one_op_job(
            job,
            stillstate,
            "stop",
            _stop_op(job),
            f"Ask the driver of {job.name} to stop after its epoch; it stays stopped.",
        ),
        recover=_one_op_job(
            job,
            stillstate,
            "recover",
            _recover_op(job),
            f"Bring {job.name} back after its driver was lost. Does nothing if it runs, stopped or finished.",
        ),
    )


def _start_op(job: JobSpec) -> dg.OpDefinition:
    name = job.name

    @dg.op(name=f"start_{job.identifier}_driver", out=dg.Out(dict[str, Any]))
    def start(
        context: dg.OpExecutionContext, config: StartConfig, stillstate: StillstateResource
    ) -> dg.Output[dict[str, Any]]:
        with typed_failures():
            spec = stillstate.spec()
            launcher = stillstate.launcher(spec, spec.job(name))
            context.log.info(f"starting the driver of {name} (takeover: {config.takeover})")
            launched = launcher.start(takeover=config.takeover, until_idle=config.until_idle)
        return _launched_output(context, launched)

    return start


def _stop_op(job: JobSpec) -> dg.OpDefinition:
    name = job.name

    @dg.op(name=f"stop_{job.identifier}_driver", out=dg.Out(dict[str, Any]))
    def stop(context: dg.OpExecutionContext, stillstate: StillstateResource) -> dg.Output[dict[str, Any]]:
        with typed_failures():
            spec = stillstate.spec()
            stopped = stillstate.launcher(spec, spec.job(name)).stop()
        context.log.info(f"term {stopped.term} of {name}: {stopped.how}")
        value = {"job": name, "term": stopped.term, "state": stopped.state, "how": stopped.how}
        return dg.Output(value, metadata=_metadata(value))

    return stop


def _recover_op(job: JobSpec) -> dg.OpDefinition:
    name = job.name

    @dg.op(name=f"recover_{job.identifier}_driver", out=dg.Out(dict[str, Any]))
    def recover(
        context: dg.OpExecutionContext, config: RecoverConfig, stillstate: StillstateResource
    ) -> dg.Output[dict[str, Any]]:
        with typed_failures():
            spec = stillstate.spec()
            job = spec.job(name)
            seen = stillstate.observe(spec, job)
            # Asked again here: between the sensor's tick and this run somebody may have started it.
            if seen.status is None or not seen.health.needs_recovery:
                return _nothing_to_do(context, name, seen.health.reason)
            if config.term and seen.status.term != config.term:
                return _nothing_to_do(
                    context, name, f"term {config.term} was followed by {seen.health.reason}: another failure"
                )
            launcher = stillstate.launcher(spec, job)
            context.log.warning(f"{name} is {seen.health.verdict}: {seen.health.reason}")
            context.log.info(launcher.end_lost(seen.status))
            # It was just judged lost, so its last heartbeat must not turn the new driver away.
            launched = launcher.start(takeover=True)
        return _launched_output(context, launched)

    return recover


def _one_op_job(
    job: JobSpec, stillstate: StillstateResource, action: str, op: dg.OpDefinition, description: str
) -> dg.JobDefinition:
    # A lost worker would otherwise keep the job's only slot for ever (see dagster.yaml).
    runtime_max_s = int(job.launcher.start_timeout_s + job.launcher.stop_timeout_s) + 120

    @dg.job(
        name=f"{action}_{job.identifier}",
        description=description,
        # Bound here and not by `Definitions`: that would copy the sensor that targets these jobs, through a
        # parameter that Dagster still calls beta.
        resource_defs={STILLSTATE: stillstate},
        executor_def=dg.in_process_executor,  # one op: a second process would only cost a second start
        tags={
            JOB_TAG: job.name,
            ACTION_TAG: action,
            "dagster/max_runtime": str(runtime_max_s),
            # The recovery sensor is the only one that tries again; two mechanisms would start two drivers.
            "dagster/max_retries": "0",
        },
    )
    def one_op() -> None:
        op()

    return one_op


def _launched_output(context: dg.OpExecutionContext, launched: Launched) -> dg.Output[dict[str, Any]]:
    context.log.info(
        f"{launched.job} is {launched.state}: term {launched.term}, process {launched.pid} on {launched.host}, "
        f"log {launched.log}"
    )
    value = {
        "job": launched.job,
        "outcome": "started",
        "term": launched.term,
        "state": launched.state,
        "pid": launched.pid,
        "host": launched.host,
        "log": launched.log,
    }
    return dg.Output(value, metadata={**_metadata(value), "log": dg.MetadataValue.path(launched.log)})


def _nothing_to_do(context: dg.OpExecutionContext, job: str, reason: str) -> dg.Output[dict[str, Any]]:
    context.log.info(f"nothing to do for {job}: {reason}")
    value = {"job": job, "outcome": "nothing to do", "reason": reason}
    return dg.Output(value, metadata=_metadata(value))


def _metadata(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if isinstance(item, str | int | float)}


@contextmanager
def typed_failures() -> Iterator[None]:
    """Our errors as a Dagster failure that reads like one and is not retried."""
    try:
        yield
    except StillstateError as error:
        raise dg.Failure(
            description=str(error),
            metadata={"kind": error.kind, "exit_code": error.exit_code},
            allow_retries=False,
        ) from error
