"""The check `all_jobs_well` of the overview. The progress sensor publishes it with each table; people may run it."""

from collections.abc import Collection, Sequence

import dagster as dg

from stillstate.assets.checks import ALIVE_CHECK
from stillstate.assets.mount import Mount
from stillstate.assets.overview import overview_row, well_evaluation, well_spec
from stillstate.orchestration.jobs.checks import result_of
from stillstate.orchestration.jobs.driver import stillstate_of, typed_failures
from stillstate.orchestration.jobs.past_checks import is_red, newest_evaluations

__all__ = ["build_overview_check", "red_jobs"]


def red_jobs(instance: dg.DagsterInstance, mount: Mount, names: Sequence[str]) -> set[str]:
    """Return the jobs whose check `driver_alive` was an error when it was last evaluated; read no store."""
    keys = {dg.AssetCheckKey(mount.stream(name), ALIVE_CHECK): name for name in names}
    return {keys[key] for key, record in newest_evaluations(instance, list(keys)).items() if is_red(record)}


def build_overview_check(mount: Mount, names: Collection[str]) -> dg.AssetChecksDefinition:
    """Build the check of the jobs that this code location knows."""
    spec = well_spec(mount)

    @dg.asset_check(
        asset=spec.asset_key,
        name=spec.name,
        description=spec.description,
        required_resource_keys={mount.resource},
    )
    def check(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        stillstate = stillstate_of(context, mount)
        with typed_failures():
            found = stillstate.look(stillstate.spec(), list(names)).found
        rows = [overview_row(name, look) for name, look in found.items()]
        ill = [row.job for row in rows if not row.is_well]
        return result_of(well_evaluation(mount.overview(), rows, red_jobs(context.instance, mount, ill)))

    return check
