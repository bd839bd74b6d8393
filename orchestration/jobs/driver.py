"""Jobs about one driver, and those of them that start, stop and recover it.

Each is a single op over a plain function of the launcher. None relies on Dagster for safety: a driver that should not
run is fenced by its term.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import dagster as dg

from state_runtime.base.errors import StillstateError
from stillstate.assets.mount import Mount
from stillstate.orchestration.config.effective_settings import refuse_while_migrating
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
from stillstate.orchestration.workers import add_tags

__all__ = [
    "RECOVER",
    "START",
    "STOP",
    "DriverWork",
    "StartConfig",
    "StreamConfig",
    "build_driver_job",
    "observe_stream",
    "runtime_max_s",
    "stillstate_of",
    "tag_run",
    "typed_failures",
    "value_output",
]

VALUE: Final = dg.Out(dict[str, Any])

LOOK_FOR_DAMAGE_S: Final = 3600
"""For reading a damaged snapshot and those below it."""


class StartConfig(dg.Config):
    """How to start.

    Attributes:
        takeover: take the job from a driver that still runs (it is fenced and ends).
        until_idle: process the input that is there, then finish.
        accept_session_settings: start although settings of Spark's session that change results (such as its time zone)
            are others than in the newest snapshot; the new ones are recorded.
    """

    takeover: bool = False
    until_idle: bool = False
    accept_session_settings: bool = False


class StreamConfig(dg.Config):
    """Which stream.

    Attributes:
        stream: the name of the job in `stillstate.yaml`.
    """

    stream: str


@dataclass(frozen=True, kw_only=True)
class DriverWork:
    """One kind of work on the driver of a stream.

    Attributes:
        text: for people; {} is the stream.
        act: does it, for the stream of a name.
        config: the configuration of a run.
    """

    action: str
    text: str
    act: Callable[[dg.OpExecutionContext, Any, Mount, str], dg.Output[dict[str, Any]]]
    config: type[dg.Config] | None = None


def build_driver_job(
    mount: Mount, stillstate: StillstateResource, work: DriverWork, streams: Sequence[JobSpec]
) -> dg.JobDefinition:
    """Build the Dagster job of one stream or, where the mount's jobs are shared, of all: then a run's configuration
    names its stream. Names are Dagster identifiers (`-` becomes `_`)."""
    name = "" if mount.is_shared else streams[0].name
    told = [c for c in (work.config, StreamConfig if mount.is_shared else None) if c is not None]

    @dg.op(
        name=mount.name(work.action, *([name] if name else []), "driver"),
        out=VALUE,
        required_resource_keys={mount.resource},
        config_schema=dg.Field(
            {key: field for config in told for key, field in config.to_fields_dict().items()},
            description="\n\n".join(inspect.getdoc(config) or "" for config in told),
        )
        if told
        else None,
    )
    def on_driver(context: dg.OpExecutionContext) -> dg.Output[dict[str, Any]]:
        given = dict(context.op_config or {})
        about = name or given.pop("stream")
        if not name:
            tag_run(context, JOB_TAG, mount.tag(about))
        return work.act(context, None if work.config is None else work.config(**given), mount, about)

    return one_op_job(
        mount,
        stillstate,
        mount.job_name(work.action, name) if name else mount.name(work.action),
        work.action,
        on_driver,
        work.text.format(name or "a stream"),
        streams,
        {JOB_TAG: mount.tag(name)} if name else {},
    )


def start_stream(
    context: dg.OpExecutionContext, config: StartConfig, mount: Mount, name: str
) -> dg.Output[dict[str, Any]]:
    """Start the driver of a stream."""
    stillstate = stillstate_of(context, mount)
    with typed_failures():
        spec = stillstate.spec()
        now = spec.job(name)
        launcher = stillstate.launcher(spec, now)
        refuse_while_migrating(name, stillstate.catalog(now).root)
        context.log.info(f"starting the driver of {name} (takeover: {config.takeover})")
        launched = launcher.start(
            StartOptions(
                takeover=config.takeover,
                until_idle=config.until_idle,
                accept_session_settings=config.accept_session_settings,
            )
        )
    return _launched_output(context, launched)


def stop_stream(context: dg.OpExecutionContext, config: None, mount: Mount, name: str) -> dg.Output[dict[str, Any]]:
    """Stop the driver of a stream."""
    stillstate = stillstate_of(context, mount)
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
    # Also an event of the stream, so that a reader of the stream need not search for the run.
    said = f"term {done.launched.term} goes on from {done.restored_from}; {value['how']}"
    observe_stream(context, mount, name, said, metadata)
    return dg.Output(value, metadata=metadata)


START: Final = DriverWork(
    action="start",
    text="Start the driver of {} and wait until it runs.",
    act=start_stream,
    config=StartConfig,
)
STOP: Final = DriverWork(
    action="stop", text="Ask the driver of {} to stop after its epoch; it stays stopped.", act=stop_stream
)
RECOVER: Final = DriverWork(
    action="recover",
    text="Bring {} back after its driver was lost, until its first checkpoint. Does nothing if it runs, stopped or "
    "finished. With `from_snapshot` it goes back to that snapshot.",
    act=recover_stream,
    config=RecoverConfig,
)


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
    """Build a job of one op.

    Args:
        streams: those that a run may be about: a run lasts as long as the longest limit among them.
        tags: known before a run names its stream.
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
            # Otherwise a worker that hangs would keep the job's only slot for ever (see dagster.yaml).
            "dagster/max_runtime": str(max(runtime_max_s(action, stream) for stream in streams)),
            # Only the recovery sensor tries again; two mechanisms would start two drivers.
            "dagster/max_retries": "0",
        },
    )
    def one_op() -> None:
        op()

    return one_op


def runtime_max_s(action: str, job: JobSpec) -> int:
    """Return how long Dagster lets a run continue."""
    there_s = job.launcher.start_timeout_s + job.launcher.stop_timeout_s
    more_s = {
        "recover": job.recovery.first_checkpoint_s + LOOK_FOR_DAMAGE_S,
        # The snapshot to go back to is read first.
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


def observe_stream(
    context: dg.OpExecutionContext, mount: Mount, name: str, said: str, metadata: Mapping[str, Any]
) -> None:
    """Show something as an event of a stream: a run that fails has no output."""
    context.log_event(dg.AssetObservation(mount.stream(name), description=said, metadata=metadata))


def value_output(value: dict[str, Any]) -> dg.Output[dict[str, Any]]:
    """Return an output that is its metadata too."""
    return dg.Output(value, metadata=value)


def _metadata(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if isinstance(item, str | int | float)}


def stillstate_of(context: Any, mount: Mount) -> StillstateResource:
    """Return the mount's resource from any of Dagster's contexts."""
    found: StillstateResource = getattr(context.resources, mount.resource)
    return found


@contextmanager
def typed_failures(on_error: Callable[[StillstateError], None] = lambda error: None) -> Iterator[None]:
    """Turn Stillstate's errors into a readable Dagster failure without a retry; `on_error` gets each error first."""
    try:
        yield
    except StillstateError as error:
        on_error(error)
        raise dg.Failure(
            description="\n".join([str(error), *getattr(error, "__notes__", [])]),
            metadata={"kind": error.kind, "exit_code": error.exit_code},
            allow_retries=False,
        ) from error


def tag_run(context: Any, tag: str, value: str) -> None:
    """Give a run that a person launched the tag that sensors and schedules put on their runs.

    From here on the queue counts it. Two runs that people launch at the same moment may both begin: terms, records and
    plans on the store keep them from doing harm, not Dagster.
    """
    if context.run.tags.get(tag) != value:
        add_tags(context.instance, context.run.run_id, {tag: value})
