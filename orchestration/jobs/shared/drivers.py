"""`start`, `stop`, `recover`, `migrate` and `rollback` of any stream."""

from collections.abc import Sequence
from typing import Any

import dagster as dg

from stillstate.assets.mount import Mount
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.jobs.driver import (
    VALUE,
    DriverJobs,
    StartConfig,
    one_op_job,
    recover_stream,
    start_stream,
    stillstate_of,
    stop_stream,
)
from stillstate.orchestration.jobs.migrate import MIGRATE_TEXT, MigrateConfig, migrate_stream
from stillstate.orchestration.jobs.recover import RecoverConfig
from stillstate.orchestration.jobs.rollback import ROLLBACK_TEXT, RollbackConfig, rollback_stream
from stillstate.orchestration.jobs.shared.stream import StreamConfig, tag_run
from stillstate.orchestration.jobs.tags import JOB_TAG
from stillstate.orchestration.resources import StillstateResource

__all__ = ["build_shared_driver_jobs", "build_shared_migrate_job", "build_shared_rollback_job"]


class StartStreamConfig(StartConfig):
    """Which stream, and how to start it."""

    stream: str


class RecoverStreamConfig(RecoverConfig):
    """Which stream, and which failure to recover."""

    stream: str


class MigrateStreamConfig(MigrateConfig):
    """Which stream, and what is to change."""

    stream: str


class RollbackStreamConfig(RollbackConfig):
    """Which stream, and where it goes back to."""

    stream: str


def build_shared_driver_jobs(mount: Mount, jobs: Sequence[JobSpec], stillstate: StillstateResource) -> DriverJobs:
    """The three jobs of all streams."""

    def one_op(action: str, op: dg.OpDefinition, description: str) -> dg.JobDefinition:
        return one_op_job(mount, stillstate, mount.name(action), action, op, description, jobs, {})

    return DriverJobs(
        start=one_op("start", _start_op(mount), "Start the driver of a stream and wait until it runs."),
        stop=one_op("stop", _stop_op(mount), "Ask the driver of a stream to stop after its epoch; it stays stopped."),
        recover=one_op(
            "recover",
            _recover_op(mount),
            "Bring a stream back after its driver was lost, until its first checkpoint. Does nothing if it runs, "
            "stopped or finished. With `from_snapshot` it goes back to that snapshot.",
        ),
    )


def build_shared_migrate_job(mount: Mount, jobs: Sequence[JobSpec], stillstate: StillstateResource) -> dg.JobDefinition:
    """The job that migrates any stream."""

    @dg.op(name=mount.name("migrate", "driver"), out=VALUE, required_resource_keys={mount.resource})
    def migrate(context: dg.OpExecutionContext, config: MigrateStreamConfig) -> dg.Output[dict[str, Any]]:
        tag_run(context, JOB_TAG, mount.tag(config.stream))
        return migrate_stream(context, config, mount, config.stream)

    what = MIGRATE_TEXT.format("a stream")
    return one_op_job(mount, stillstate, mount.name("migrate"), "migrate", migrate, what, jobs, {})


def build_shared_rollback_job(
    mount: Mount, jobs: Sequence[JobSpec], stillstate: StillstateResource
) -> dg.JobDefinition:
    """The job that takes any stream back."""

    @dg.op(name=mount.name("rollback", "driver"), out=VALUE, required_resource_keys={mount.resource})
    def rollback(context: dg.OpExecutionContext, config: RollbackStreamConfig) -> dg.Output[dict[str, Any]]:
        tag_run(context, JOB_TAG, mount.tag(config.stream))
        return rollback_stream(context, config, mount, config.stream)

    what = ROLLBACK_TEXT.format("a stream")
    return one_op_job(mount, stillstate, mount.name("rollback"), "rollback", rollback, what, jobs, {})


def _start_op(mount: Mount) -> dg.OpDefinition:
    @dg.op(name=mount.name("start", "driver"), out=VALUE, required_resource_keys={mount.resource})
    def start(context: dg.OpExecutionContext, config: StartStreamConfig) -> dg.Output[dict[str, Any]]:
        tag_run(context, JOB_TAG, mount.tag(config.stream))
        return start_stream(context, config, stillstate_of(context, mount), config.stream)

    return start


def _stop_op(mount: Mount) -> dg.OpDefinition:
    @dg.op(name=mount.name("stop", "driver"), out=VALUE, required_resource_keys={mount.resource})
    def stop(context: dg.OpExecutionContext, config: StreamConfig) -> dg.Output[dict[str, Any]]:
        tag_run(context, JOB_TAG, mount.tag(config.stream))
        return stop_stream(context, stillstate_of(context, mount), config.stream)

    return stop


def _recover_op(mount: Mount) -> dg.OpDefinition:
    @dg.op(name=mount.name("recover", "driver"), out=VALUE, required_resource_keys={mount.resource})
    def recover(context: dg.OpExecutionContext, config: RecoverStreamConfig) -> dg.Output[dict[str, Any]]:
        tag_run(context, JOB_TAG, mount.tag(config.stream))
        return recover_stream(context, config, mount, config.stream)

    return recover
