"""The checks of all streams: those that only look are run for every selected stream, the others for one stream."""

from collections.abc import Callable, Collection, Iterator, Sequence

import dagster as dg

from stillstate.assets.mount import Mount
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.jobs.alive_check import alive_of_stream, alive_spec
from stillstate.orchestration.jobs.checks import check_specs, check_stream
from stillstate.orchestration.jobs.driver import tag_run, typed_failures
from stillstate.orchestration.jobs.matches_check import matches_of_stream, matches_spec
from stillstate.orchestration.jobs.materialize import materializations_of_stream, materializations_spec
from stillstate.orchestration.jobs.shared.stream import chosen
from stillstate.orchestration.jobs.tags import UPKEEP_TAG
from stillstate.orchestration.jobs.verification import LEVEL, drill_stream, intact_spec, restorable_spec, verify_stream

__all__ = ["build_drills", "build_look_checks", "build_verifications"]

Results = Iterator[dg.AssetCheckResult]
Specs = Sequence[tuple[str, dg.AssetCheckSpec]]


def build_look_checks(mount: Mount, jobs: Sequence[JobSpec]) -> list[dg.AssetChecksDefinition]:
    """Build `driver_alive`, `matches_configuration`, `materializations_succeed` and those with a limit."""
    return [
        _looked_at(mount, jobs, ("driver", "alive"), alive_spec, alive_of_stream),
        _looked_at(mount, jobs, ("matches", "configuration"), matches_spec, matches_of_stream),
        _looked_at(mount, jobs, ("materializations", "succeed"), materializations_spec, materializations_of_stream),
        *_limits(mount, jobs),
    ]


def _looked_at(
    mount: Mount,
    jobs: Sequence[JobSpec],
    words: tuple[str, str],
    spec_of: Callable[[Mount, str], dg.AssetCheckSpec],
    evaluate: Callable[[dg.AssetCheckExecutionContext, Mount, str], dg.AssetCheckResult],
) -> dg.AssetChecksDefinition:
    """Build one check of each stream."""
    specs = [(job.name, spec_of(mount, job.name)) for job in jobs]

    @dg.multi_asset_check(
        name=mount.name(*words),
        specs=[spec for _, spec in specs],
        can_subset=True,
        required_resource_keys={mount.resource},
    )
    def looked_at(context: dg.AssetCheckExecutionContext) -> Results:
        for name in _selected(context, specs):
            yield evaluate(context, mount, name)

    return looked_at


def _limits(mount: Mount, jobs: Sequence[JobSpec]) -> list[dg.AssetChecksDefinition]:
    specs = [(job.name, spec) for job in jobs for spec in check_specs(mount, job)]
    if not specs:
        return []

    @dg.multi_asset_check(
        name=mount.name("checks"),
        specs=[spec for _, spec in specs],
        can_subset=True,
        required_resource_keys={mount.resource},
    )
    def checks(context: dg.AssetCheckExecutionContext) -> Results:
        for name in _selected(context, specs):
            asked = {s.name for of, s in specs if of == name and s.key in context.selected_asset_check_keys}
            yield from check_stream(context, mount, name, asked)

    return [checks]


def build_verifications(mount: Mount, jobs: Sequence[JobSpec]) -> dg.AssetChecksDefinition:
    """Build the check `intact`."""
    specs = [(job.name, intact_spec(mount, job.name)) for job in jobs]

    @dg.multi_asset_check(
        name=mount.name("verify", "stream"),
        specs=[spec for _, spec in specs],
        can_subset=True,
        required_resource_keys={mount.resource},
        config_schema={"level": LEVEL, "stream": dg.Field(str, default_value="")},
    )
    def intact(context: dg.AssetCheckExecutionContext) -> Results:
        config = context.op_execution_context.op_config
        name = _one(context, mount, config["stream"], specs)
        yield verify_stream(context, mount, name, config["level"])

    return intact


def build_drills(mount: Mount, jobs: Sequence[JobSpec]) -> dg.AssetChecksDefinition:
    """Build the check `restorable`."""
    specs = [(job.name, restorable_spec(mount, job.name)) for job in jobs]

    @dg.multi_asset_check(
        name=mount.name("drill", "stream"),
        specs=[spec for _, spec in specs],
        can_subset=True,
        required_resource_keys={mount.resource},
        config_schema={"stream": dg.Field(str, default_value="")},
    )
    def restorable(context: dg.AssetCheckExecutionContext) -> Results:
        name = _one(context, mount, context.op_execution_context.op_config["stream"], specs)
        yield drill_stream(context, mount, name)

    return restorable


def _selected(context: dg.AssetCheckExecutionContext, specs: Specs) -> Collection[str]:
    """Return the streams of which a check was selected, in their order."""
    return list(dict.fromkeys(name for name, s in specs if s.key in context.selected_asset_check_keys))


def _one(context: dg.AssetCheckExecutionContext, mount: Mount, asked: str, specs: Specs) -> str:
    with typed_failures():
        name = chosen(asked, _selected(context, specs))
    tag_run(context, UPKEEP_TAG, mount.tag(name))
    return name
