"""One look at jobs for the sensor `desired_state` and for the check `matches_configuration`: compares their effective
settings with the file. The sensor publishes the check; a person may also run it."""

from collections.abc import Mapping

import dagster as dg

from state_runtime.base.errors import Unavailable
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.migration import Migration, read_migration
from stillstate.assets.checks import MATCHES_CHECK, matches_evaluation
from stillstate.assets.mount import Mount
from stillstate.orchestration.config.spec import JobSpec, Spec
from stillstate.orchestration.jobs.checks import result_of, stream_check
from stillstate.orchestration.jobs.driver import stillstate_of, typed_failures
from stillstate.orchestration.jobs.past_runs import past_migrations
from stillstate.orchestration.launchers.processes import is_owner_gone
from stillstate.orchestration.migration.desired import judge_desired, needs_record
from stillstate.orchestration.probes.look import Look
from stillstate.orchestration.probes.pool import NoLook
from stillstate.orchestration.resources import Reading, Seen, StillstateResource

__all__ = ["Records", "build_matches_check", "matches_of_stream", "matches_spec", "read_records"]

Records = Mapping[str, Migration | NoLook | None]
"""The record of each job's last migration, for the jobs that need it for a judgement."""


def read_records(spec: Spec, looks: Seen[Look], stillstate: StillstateResource) -> Records:
    """Read the records in the same way as looks are made."""
    wanted = [name for name, look in looks.found.items() if isinstance(look, Look) and needs_record(look.seen)]
    return stillstate.read(Reading(spec, wanted, "migration", _read, budget_s=looks.left_s)).found


def _read(job: JobSpec, catalog: Catalog) -> Migration | None:
    return read_migration(catalog.root)


def build_matches_check(mount: Mount, job: JobSpec) -> dg.AssetChecksDefinition:
    """Build the check that a person may run; the sensor evaluates it on every change and once a day."""
    return stream_check(mount, job.name, matches_spec(mount, job.name), matches_of_stream)


def matches_spec(mount: Mount, name: str) -> dg.AssetCheckSpec:
    """Return the spec of a stream's check `matches_configuration`."""
    return dg.AssetCheckSpec(
        MATCHES_CHECK,
        asset=mount.stream(name),
        description="Warns when the job runs with other settings than the file has, and says how to apply them. "
        "Evaluated by the sensor of the desired state on every change, and once a day.",
    )


def matches_of_stream(context: dg.AssetCheckExecutionContext, mount: Mount, name: str) -> dg.AssetCheckResult:
    """Look at a stream, and compare."""
    stillstate = stillstate_of(context, mount)
    launch = mount.launch_text("migrate", name)
    with typed_failures():
        spec = stillstate.spec()
        job = spec.job(name)
        looks = stillstate.look(spec, [name])
        look = looks.of(name)
        record = read_records(spec, looks, stillstate).get(name)
        if isinstance(record, NoLook):
            raise record.error
        now_s = stillstate.clock().now_ms() / 1000
        past = past_migrations(context.instance).get(mount.tag(name), [])
        is_gone = record is not None and is_owner_gone(record)
        desired = judge_desired(job, look.seen, record, past, now_s=now_s, launch=launch, is_owner_gone=is_gone)
        if desired is None:
            raise Unavailable(f"job {name!r} is {look.seen.health.verdict}: there is nothing to compare yet")
    return result_of(matches_evaluation(mount.stream(name), name, desired, launch))
