"""What the overview shows beside a look: savepoints of the store, recoveries of Dagster's own record."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import dagster as dg

from assets.mount import Mount
from assets.overview import OVERVIEW_S, OverviewRow, overview_materialization, overview_row
from orchestration.config.spec import JobSpec, Spec
from orchestration.jobs.tags import ACTION_TAG, DAMAGE_TAG, JOB_TAG, TERM_TAG
from orchestration.looking.look import Look
from orchestration.looking.lookout import NoLook
from orchestration.looking.newest_savepoint import savepoints_seen
from orchestration.looking.vitals import DAMAGED
from orchestration.resources import Reading, Seen, StillstateResource
from orchestration.run_phases import PHASES, RunPhase
from orchestration.text import time_text
from state_runtime.snapshot.catalog import Catalog

__all__ = ["OverviewCursor", "overview"]

CHANGES_EVERY_S: Final = 60.0
"""A change is shown at the next tick, if there was none just before: a job that comes and goes must not write the table
at every tick, for each is some twenty kilobytes for fifty jobs."""
RECOVERIES_READ_MAX: Final = 500
_SAID: Final[Mapping[RunPhase, str]] = {"succeeded": "", "failed": "failed ", "canceled": "canceled "}


@dataclass(frozen=True)
class OverviewCursor:
    """When the table was last written, and a digest of who was how."""

    at_ms: int = 0
    digest: str = ""


def overview(
    mount: Mount,
    spec: Spec,
    looks: Seen[Look],
    stillstate: StillstateResource,
    instance: dg.DagsterInstance,
    before: OverviewCursor,
) -> tuple[dg.AssetMaterialization | None, OverviewCursor]:
    """The table if it is due, and what to remember."""
    now_ms = stillstate.clock().now_ms()
    digest = _digest(looks.found)
    since_s = (now_ms - before.at_ms) / 1000
    if since_s < (OVERVIEW_S if digest == before.digest else CHANGES_EVERY_S):
        return None, before
    started = [name for name, look in looks.found.items() if not isinstance(look, NoLook) and look.uid]
    ages = Reading(spec, started, "savepoint", _newest_savepoint, budget_s=looks.left_s)
    savepoints = stillstate.read(ages).found
    recoveries = _recoveries(instance)
    rows: list[OverviewRow] = []
    for name, look in looks.found.items():
        savepoint = savepoints.get(name, "")
        shown = "unknown" if isinstance(savepoint, NoLook) else savepoint
        recovery = recoveries.get(mount.tag(name), _Recovery())
        row = overview_row(name, look, savepoint=shown, recovery=recovery.text)
        is_explained = recovery.damage and (row.health, row.term) == (DAMAGED, recovery.term)
        rows.append(replace(row, why=recovery.damage) if is_explained else row)
    return overview_materialization(mount.overview(), rows), OverviewCursor(now_ms, digest)


def _digest(found: Mapping[str, Look | NoLook]) -> str:
    """Of what makes a change: health and term of each job."""
    lines = []
    for name, look in sorted(found.items()):
        if isinstance(look, NoLook):
            # A tick that did not get so far has seen no change.
            lines.append(f"{name} {look.why}" if look.why != "not-reached" else name)
        else:
            status = look.seen.status
            lines.append(f"{name} {look.seen.health.verdict} {0 if status is None else status.term} {look.trouble}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _newest_savepoint(job: JobSpec, catalog: Catalog) -> str:
    """When it was complete; only how many there are, where they are too many to read."""
    seen = savepoints_seen(catalog)
    if not seen.is_known:
        return f"{seen.count} in all"
    if seen.newest is None:
        return ""
    return time_text(seen.newest.finished_at_ms)


@dataclass(frozen=True)
class _Recovery:
    """The last recovery run of a job.

    Attributes:
        text: when it was requested, and how it ended if not well.
        term: that it was for.
        damage: what it found of a damaged newest snapshot, if it has left the choice to a person.
    """

    text: str = ""
    term: str = ""
    damage: str = ""


def _recoveries(instance: dg.DagsterInstance) -> dict[str, _Recovery]:
    """By the tag of the job."""
    records = instance.get_run_records(dg.RunsFilter(tags={ACTION_TAG: "recover"}), limit=RECOVERIES_READ_MAX)
    found: dict[str, _Recovery] = {}
    for record in records:  # newest first
        run = record.dagster_run
        at = time_text(int(record.create_timestamp.timestamp() * 1000))
        ended = _SAID.get(PHASES[run.status.value], "under way ")
        last = _Recovery(f"{ended}{at}", run.tags.get(TERM_TAG, ""), run.tags.get(DAMAGE_TAG, ""))
        found.setdefault(run.tags.get(JOB_TAG, ""), last)
    return found
