"""Jobs that start, stop and recover one driver.

Each is a single op over a plain function of the launcher. None of them relies on Dagster for safety: a driver
that should not run is fenced by its term.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import dagster as dg

from state_runtime.base.errors import StillstateError
from stillstate.assets.mount import Mount
from stillstate.orchestration.config.held import refuse_while_migrating
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.config.start_options import StartOptions
from stillstate.orchestration.jobs.recover import (
    RecoverConfig,
    note_exit,
    note_recovered,
    recover_driver,
    recovered_value,
)
from stillstate.orchestration.jobs.tags import ACTION_TAG, JOB_TAG
from stillstate.orchestration.launchers import Launched
from stillstate.orchestration.resources import StillstateResource

__all__ = [
    "VALUE",
    "DriverJobs",
    "StartConfig",
    "build_driver_jobs",
    "one_op_job",
    "recover_stream",
    "runtime_max_s",
    "start_stream",
    "stillstate_of",
    "stop_stream",
    "typed_failures",
]

VALUE: Final = dg.Out(dict[str, Any])

LOOK_FOR_DAMAGE_S: Final = 3600
"""For reading a damaged snapshot and those below it."""


class StartConfig(dg.Config):
    """How to start.

    Attributes:
        takeover: take the job from a driver that still runs (it is fenced and ends).
        until_idle: process the input that is there, then finish.
    """

    takeover: bool = False
    until_idle: bool = False


@dataclass(frozen=True)
class DriverJobs:
    """The Dagster jobs of one streaming job."""

    start: dg.JobDefinition
    stop: dg.JobDefinition
    recover: dg.JobDefinition

    def all(self) -> list[dg.JobDefinition]:
        return [self.start, self.stop, self.recover]


def build_driver_jobs(mount: Mount, job: JobSpec, stillstate: StillstateResource) -> DriverJobs:
    """Build the three jobs of one stream; names are Dagster identifiers (`-` becomes `_`)."""
    tags = {JOB_TAG: mount.tag(job.name)}

    def one_op(action: str, op: dg.OpDefinition, description: str) -> dg.JobDefinition:
        name = mount.job_name(action, job.name)
        return one_op_job(mount, stillstate, name, action, op, description, [job], tags)

    return DriverJobs(
        start=one_op("start", _start_op(mount, job.name), f"Start the driver of {job.name} and wait until it runs."),
        stop=one_op(
            "stop",
            _stop_op(mount, job.name),
            f"Ask the driver of {job.name} to stop after its epoch; it stays stopped.",
        ),
        recover=one_op(
            "recover",
            _recover_op(mount, job.name),
            f"Bring {job.name} back after its driver was lost, until its first checkpoint. Does nothing if it runs, "
            "stopped or finished. With `from_snapshot` it goes back to that snapshot.",
        ),
    )


def _start_op(mount: Mount, name: str) -> dg.OpDefinition:
    @dg.op(name=mount.name("start", name, "driver"), out=VALUE, required_resource_keys={mount.resource})
    def start(context: dg.OpExecutionContext, config: StartConfig) -> dg.Output[dict[str, Any]]:
        return start_stream(context, config, stillstate_of(context, mount), name)

    return start


def _stop_op(mount: Mount, name: str) -> dg.OpDefinition:
    @dg.op(name=mount.name("stop", name, "driver"), out=VALUE, required_resource_keys={mount.resource})
    def stop(context: dg.OpExecutionContext) -> dg.Output[dict[str, Any]]:
        return stop_stream(context, stillstate_of(context, mount), name)

    return stop


def _recover_op(mount: Mount, name: str) -> dg.OpDefinition:
    @dg.op(name=mount.name("recover", name, "driver"), out=VALUE, required_resource_keys={mount.resource})
    def recover(context: dg.OpExecutionContext, config: RecoverConfig) -> dg.Output[dict[str, Any]]:
        return recover_stream(context, config, mount, name)

    return recover


def start_stream(
    context: dg.OpExecutionContext, config: StartConfig, stillstate: StillstateResource, name: str
) -> dg.Output[dict[str, Any]]:
    """Start the driver of a stream."""
    with typed_failures():
        spec = stillstate.spec()
        now = spec.job(name)
        launcher = stillstate.launcher(spec, now)
        refuse_while_migrating(name, stillstate.catalog(now).root)
        context.log.info(f"starting the driver of {name} (takeover: {config.takeover})")
        launched = launcher.start(StartOptions(takeover=config.takeover, until_idle=config.until_idle))
    return _launched_output(context, launched)


def stop_stream(context: dg.OpExecutionContext, stillstate: StillstateResource, name: str) -> dg.Output[dict[str, Any]]:
    """Stop the driver of a stream."""
    with typed_failures():
        spec = stillstate.spec()
        stopped = stillstate.launcher(spec, spec.job(name)).stop()
    context.log.info(f"term {stopped.term} of {name}: {stopped.how}")
    value = {"job": name, "term": stopped.term, "state": stopped.state, "how": stopped.how}
    return dg.Output(value, metadata=_metadata(value))


def recover_stream(
    context: dg.OpExecutionContext, config: RecoverConfig, mount: Mount, name: str
) -> dg.Output[dict[str, Any]]:
    """Bring the driver of a stream back."""
    launch = mount.launch_text("recover", name)
    with typed_failures(lambda error: note_exit(context, error)):
        done = recover_driver(context, config, stillstate_of(context, mount), name, launch)
    value = recovered_value(name, done)
    if done.launched is None:
        context.log.info(f"nothing to do for {name}: {done.reason}")
        return dg.Output(value, metadata=_metadata(value))
    note_recovered(context, done)
    metadata = {**_metadata(value), "log": dg.MetadataValue.path(done.launched.log)}
    # An event of the stream too: whoever looks at that need not look for the run.
    said = f"term {done.launched.term} goes on from {done.restored_from}; {value['how']}"
    context.log_event(dg.AssetObservation(mount.stream(name), description=said, metadata=metadata))
    return dg.Output(value, metadata=metadata)


def one_op_job(
    mount: Mount,
    stillstate: StillstateResource,
    name: str,
    action: str,
    op: dg.OpDefinition,
    description: str,
    streams: Sequence[JobSpec],
    tags: Mapping[str, str],
) -> dg.JobDefinition:
    """A job of one op.

    Args:
        streams: those that it may be about: a run lasts as long as any of them allows.
        tags: what is known before a run says which it is.
    """

    @dg.job(
        name=name,
        description=description,
        # Bound here and not by `Definitions`: that would copy the sensor that targets these jobs, through a
        # parameter that Dagster still calls beta.
        resource_defs={mount.resource: stillstate},
        executor_def=dg.in_process_executor,  # one op: a second process would only cost a second start
        tags={
            **tags,
            ACTION_TAG: action,
            # A worker that hangs would otherwise keep the job's only slot for ever (see dagster.yaml).
            "dagster/max_runtime": str(max(runtime_max_s(action, stream) for stream in streams)),
            # The recovery sensor is the only one that tries again; two mechanisms would start two drivers.
            "dagster/max_retries": "0",
        },
    )
    def one_op() -> None:
        op()

    return one_op


def runtime_max_s(action: str, job: JobSpec) -> int:
    """How long Dagster lets a run go on."""
    there_s = job.launcher.start_timeout_s + job.launcher.stop_timeout_s
    more_s = {
        "recover": job.recovery.first_checkpoint_s + LOOK_FOR_DAMAGE_S,
        # What is gone back to is read before.
        "rollback": job.verification.timeout_s,
        # There and back, with a savepoint that is made and read.
        "migrate": there_s + job.recovery.first_checkpoint_s + job.savepoints.timeout_s + job.verification.timeout_s,
    }
    return int(there_s + more_s.get(action, 0.0)) + 120


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


def _metadata(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if isinstance(item, str | int | float)}


def stillstate_of(context: Any, mount: Mount) -> StillstateResource:
    """The mount's resource, of any of Dagster's contexts."""
    found: StillstateResource = getattr(context.resources, mount.resource)
    return found


@contextmanager
def typed_failures(on_error: Callable[[StillstateError], None] = lambda error: None) -> Iterator[None]:
    """Our errors as a Dagster failure that reads like one and is not retried; `on_error` is told of them first."""
    try:
        yield
    except StillstateError as error:
        on_error(error)
        raise dg.Failure(
            description="\n".join([str(error), *getattr(error, "__notes__", [])]),
            metadata={"kind": error.kind, "exit_code": error.exit_code},
            allow_retries=False,
        ) from error
