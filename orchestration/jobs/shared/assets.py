"""`materialize`, `savepoint`, `retain`, `collect` and `compact_output` of any stream: one op each, with all assets."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import dagster as dg

from state_runtime.maintenance.plans import Kind
from stillstate.assets.mount import Mount
from stillstate.assets.specs import materialized_spec
from stillstate.assets.upkeep import applied_spec, compacted_spec, planned_spec, savepoints_spec
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.jobs.deletions import ACTIONS, PlanConfig, apply_plan, check_plan, plan_stream, safe_spec
from stillstate.orchestration.jobs.driver import tag_run, typed_failures
from stillstate.orchestration.jobs.materialize import MaterializeConfig, materialization_of_stream
from stillstate.orchestration.jobs.output import ACTION, compact_stream
from stillstate.orchestration.jobs.savepoints import SavepointConfig, savepoint_stream
from stillstate.orchestration.jobs.shared.stream import chosen
from stillstate.orchestration.jobs.tags import MATERIALIZE_TAG, SAVEPOINT_TAG, UPKEEP_TAG

__all__ = ["build_deletions", "build_materializations", "build_outputs", "build_savepoints"]

Made = Iterator[dg.MaterializeResult[None]]


class MaterializeStreamConfig(MaterializeConfig):
    """Which stream, and how to fold.

    Attributes:
        stream: its name; empty: the one whose asset was selected.
    """

    stream: str = ""


class SavepointStreamConfig(SavepointConfig):
    """Which stream, and what to make.

    Attributes:
        stream: its name; empty: the one whose asset was selected.
    """

    stream: str = ""


class OutputConfig(dg.Config):
    """Which stream.

    Attributes:
        stream: its name; empty: the one whose asset was selected.
    """

    stream: str = ""


class DeleteConfig(PlanConfig):
    """Which stream, how to plan, and what to delete.

    Attributes:
        stream: its name; empty: the one whose assets were selected.
        digest: of a plan of an earlier run that a person has reviewed; empty: the plan of this run.
    """

    stream: str = ""
    digest: str = ""


def build_materializations(mount: Mount, jobs: Sequence[JobSpec]) -> dg.AssetsDefinition:
    """Build the state tables of all streams."""
    names = {mount.materialized(job.name): job.name for job in jobs}

    @dg.multi_asset(
        name=mount.name("materialize", "stream"),
        specs=[materialized_spec(mount, job) for job in jobs],
        can_subset=True,
        required_resource_keys={mount.resource, mount.spark},
    )
    def materialized_states(context: dg.AssetExecutionContext, config: MaterializeStreamConfig) -> Made:
        name = _stream(context, config.stream, names)
        tag_run(context, MATERIALIZE_TAG, mount.tag(name))
        yield from materialization_of_stream(context, mount, name, config.mode)

    return materialized_states


def build_savepoints(mount: Mount, jobs: Sequence[JobSpec]) -> dg.AssetsDefinition:
    """Build the savepoints of all streams."""
    names = {mount.savepoints(job.name): job.name for job in jobs}

    @dg.multi_asset(
        name=mount.name("savepoint", "stream"),
        specs=[savepoints_spec(mount, job) for job in jobs],
        can_subset=True,
        required_resource_keys={mount.resource},
    )
    def savepoints(context: dg.AssetExecutionContext, config: SavepointStreamConfig) -> Made:
        name = _stream(context, config.stream, names)
        tag_run(context, SAVEPOINT_TAG, mount.tag(name))
        yield from savepoint_stream(context, mount, name, config)

    return savepoints


def build_outputs(mount: Mount, jobs: Sequence[JobSpec]) -> dg.AssetsDefinition:
    """Build the compacted output of all streams."""
    names = {mount.compacted(job.name): job.name for job in jobs}

    @dg.multi_asset(
        name=mount.name(ACTION, "stream"),
        specs=[compacted_spec(mount, job) for job in jobs],
        can_subset=True,
        required_resource_keys={mount.resource},
    )
    def outputs(context: dg.AssetExecutionContext, config: OutputConfig) -> Made:
        name = _stream(context, config.stream, names)
        tag_run(context, UPKEEP_TAG, mount.tag(name))
        yield from compact_stream(context, mount, name)

    return outputs


def build_deletions(mount: Mount, jobs: Sequence[JobSpec], kind: Kind) -> dg.AssetsDefinition:
    """Build the plans of all streams, the check that they must pass, and the results of their deletions.

    One op and not three: Dagster would skip the last of three if the plan of any other stream was not made.
    """
    planned = {mount.planned(job.name, kind): job.name for job in jobs}
    applied = {mount.applied(job.name, kind): job.name for job in jobs}

    @dg.multi_asset(
        name=mount.name(ACTIONS[kind], "stream"),
        specs=[build(mount, job, kind) for job in jobs for build in (planned_spec, applied_spec)],
        check_specs=[safe_spec(mount, job.name, kind) for job in jobs],
        can_subset=True,
        required_resource_keys={mount.resource},
    )
    def deletions(context: dg.AssetExecutionContext, config: DeleteConfig) -> Iterator[Any]:
        name = _stream(context, config.stream, planned | applied)
        tag_run(context, UPKEEP_TAG, mount.tag(name))
        yield from _delete(context, config, mount, name, kind)

    return deletions


def _delete(
    context: dg.AssetExecutionContext, config: DeleteConfig, mount: Mount, name: str, kind: Kind
) -> Iterator[Any]:
    """Plan → check → apply of that same plan, as far as they were selected."""
    made, is_checked = "", False
    if mount.planned(name, kind) in context.selected_asset_keys:
        for result in plan_stream(context, mount, name, kind, config):
            made = result.data_version.value if result.data_version is not None else ""
            yield result
        if not made:
            return  # the stream was never started
    spec = safe_spec(mount, name, kind)
    if made and spec.key in context.selected_asset_check_keys:
        verdict = check_plan(context, mount, name, kind, made)
        yield verdict
        if not verdict.passed:
            return  # Dagster fails the step, because the check blocks
        is_checked = True
    if mount.applied(name, kind) in context.selected_asset_keys:
        # A plan that no check of this run has seen is checked before it is executed.
        asked = config.digest or ("" if is_checked else made)
        yield from apply_plan(context, mount, name, kind, asked, made)


def _stream(context: dg.AssetExecutionContext, asked: str, names: Mapping[dg.AssetKey, str]) -> str:
    selected: Collection[str] = {names[key] for key in context.selected_asset_keys}
    with typed_failures():
        return chosen(asked, selected)
