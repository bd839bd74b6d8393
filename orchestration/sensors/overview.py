"""The overview's data beside a look: savepoints of the store, and recoveries from Dagster's own record."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import dagster as dg

from state_runtime.snapshot.catalog import Catalog
from stillstate.assets.mount import Mount
from stillstate.assets.overview import (
    OVERVIEW_S,
    OverviewRow,
    RestartRow,
    overview_materialization,
    overview_row,
    well_evaluation,
)
from stillstate.orchestration.config.spec import JobSpec, Spec
from stillstate.orchestration.jobs.overview_check import red_jobs
from stillstate.orchestration.jobs.tags import (
    ACTION_TAG,
    DAMAGE_TAG,
    DOWN_TAG,
    JOB_TAG,
    LOST_TAG,
    RESTORED_TAG,
    TERM_TAG,
)
from stillstate.orchestration.probes.look import Look
from stillstate.orchestration.probes.newest_savepoint import savepoints_seen
from stillstate.orchestration.probes.pool import NoLook
from stillstate.orchestration.probes.vitals import DAMAGED, Vitals, vitals_of
from stillstate.orchestration.resources import Reading, Seen, StillstateResource
from stillstate.orchestration.run_phases import PHASES, RunPhase
from stillstate.orchestration.standby import RESTARTED
from stillstate.orchestration.text import time_text

__all__ = ["OverviewCursor", "overview"]

CHANGES_EVERY_S: Final = 60.0
"""A change is shown at the next tick, unless one was shown just before. A job that keeps changing must not write the
table at every tick: each write is some twenty kilobytes for fifty jobs."""
RECOVERIES_READ_MAX: Final = 500
RESTARTS_MAX: Final = 15
_SAID: Final[Mapping[RunPhase, str]] = {"succeeded": "", "failed": "failed ", "canceled": "canceled "}


@dataclass(frozen=True)
class OverviewCursor:
    """The state that the next look needs.

    Attributes:
        at_ms: when the table was last written.
        digest: of the health of each job.
        unwell_ms: when a look first found a job unwell, for jobs whose driver does not report it (the store does not
            answer, the root is damaged). A reloaded process keeps these times.
    """

    at_ms: int = 0
    digest: str = ""
    unwell_ms: Mapping[str, int] = field(default_factory=dict)


def overview(
    mount: Mount,
    spec: Spec,
    looks: Seen[Look],
    stillstate: StillstateResource,
    instance: dg.DagsterInstance,
    before: OverviewCursor,
) -> tuple[Sequence[dg.AssetMaterialization | dg.AssetCheckEvaluation], OverviewCursor]:
    """Return the table and its check if they are due, and the next cursor."""
    now_ms = stillstate.clock().now_ms()
    unwell = {name: vitals_of(look) for name, look in looks.found.items()}
    unwell = {name: seen for name, seen in unwell.items() if not seen.is_well}
    unwell_ms = _unwell_ms(looks.found, unwell, before.unwell_ms, now_ms)
    red = red_jobs(instance, mount, list(unwell))
    digest = _digest(looks.found, red)
    since_s = (now_ms - before.at_ms) / 1000
    if since_s < (OVERVIEW_S if digest == before.digest else CHANGES_EVERY_S):
        return (), replace(before, unwell_ms=unwell_ms)
    started = [name for name, look in looks.found.items() if not isinstance(look, NoLook) and look.uid]
    ages = Reading(spec, started, "savepoint", _newest_savepoint, budget_s=looks.left_s)
    savepoints = stillstate.read(ages).found
    runs = _recovery_runs(instance)
    recoveries = _recoveries(runs)
    rows: list[OverviewRow] = []
    for name, look in looks.found.items():
        savepoint = savepoints.get(name, "")
        shown = "unknown" if isinstance(savepoint, NoLook) else savepoint
        recovery = recoveries.get(mount.tag(name), _Recovery())
        since_ms = unwell_ms.get(name, 0)
        row = overview_row(name, look, savepoint=shown, recovery=recovery.text, unwell_since_ms=since_ms)
        is_explained = recovery.damage and (row.health, row.term) == (DAMAGED, recovery.term)
        rows.append(replace(row, why=recovery.damage) if is_explained else row)
    restarts = _restarts(runs, {mount.tag(name): name for name in looks.found}, looks.found)
    key = mount.overview()
    table = overview_materialization(key, rows, restarts, looked_at_ms=now_ms)
    return (table, well_evaluation(key, rows, red)), OverviewCursor(now_ms, digest, unwell_ms)


def _unwell_ms(
    found: Mapping[str, Look | NoLook], unwell: Mapping[str, Vitals], before: Mapping[str, int], now_ms: int
) -> dict[str, int]:
    """Return `unwell_ms` of `OverviewCursor`; a job that this tick did not reach is unchanged."""
    since_ms: dict[str, int] = {}
    for name, look in found.items():
        if isinstance(look, NoLook) and look.why == "not-reached":
            since_ms |= {name: before[name]} if name in before else {}
        elif name in unwell and not unwell[name].since_ms:
            first_ms = now_ms - (round(look.away_s * 1000) if isinstance(look, NoLook) else 0)
            since_ms[name] = min(first_ms, before.get(name, first_ms))
    return since_ms


def _digest(found: Mapping[str, Look | NoLook], red: Collection[str]) -> str:
    """Return a digest of the facts whose change is shown: health and term of each job, and which jobs are red."""
    lines = sorted(red)
    for name, look in sorted(found.items()):
        if isinstance(look, NoLook):
            # A tick that did not reach a job has seen no change of it.
            lines.append(f"{name} {look.why}" if look.why != "not-reached" else name)
        else:
            status = look.seen.status
            lines.append(f"{name} {look.seen.health.verdict} {0 if status is None else status.term} {look.trouble}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _newest_savepoint(job: JobSpec, catalog: Catalog) -> str:
    """Return when the newest savepoint was complete; only the number of savepoints if they are too many to read."""
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
        damage: the damage that it found in the newest snapshot, if it has left the choice to a person.
    """

    text: str = ""
    term: str = ""
    damage: str = ""


def _recovery_runs(instance: dg.DagsterInstance) -> Sequence[dg.RunRecord]:
    """Return the recovery runs, newest first."""
    return instance.get_run_records(dg.RunsFilter(tags={ACTION_TAG: "recover"}), limit=RECOVERIES_READ_MAX)


def _recoveries(records: Sequence[dg.RunRecord]) -> dict[str, _Recovery]:
    """Return the last recovery by the tag of the job."""
    found: dict[str, _Recovery] = {}
    for record in records:
        run = record.dagster_run
        ended = _SAID.get(PHASES[run.status.value], "under way ")
        last = _Recovery(f"{ended}{_asked_at(record)}", run.tags.get(TERM_TAG, ""), run.tags.get(DAMAGE_TAG, ""))
        found.setdefault(run.tags.get(JOB_TAG, ""), last)
    return found


def _restarts(
    records: Sequence[dg.RunRecord], names: Mapping[str, str], found: Mapping[str, Look | NoLook]
) -> list[RestartRow]:
    """Return the newest restarts of all jobs: recoveries by Dagster, and of each job the newest restart in place, by
    its supervisor."""
    rows = []
    for record in records:
        tags = record.dagster_run.tags
        if tags.get(JOB_TAG, "") in names:
            ended = PHASES[record.dagster_run.status.value]
            rows.append(
                RestartRow(
                    job=names[tags[JOB_TAG]],
                    at=_asked_at(record),
                    outcome="recovered" if ended == "succeeded" and LOST_TAG in tags else f"recovery {ended}",
                    cause=tags.get(LOST_TAG) or tags.get(DAMAGE_TAG, ""),
                    restored_from=tags.get(RESTORED_TAG, ""),
                    down=tags.get(DOWN_TAG, ""),
                )
            )
    for name, look in found.items():
        status = None if isinstance(look, NoLook) else look.seen.status
        if status is not None and status.cause.startswith(RESTARTED):
            at = time_text(status.started_at_ms)
            rows.append(RestartRow(job=name, at=at, outcome="in place", cause=status.cause))
    return sorted(rows, key=lambda row: (row.at, row.job), reverse=True)[:RESTARTS_MAX]


def _asked_at(record: dg.RunRecord) -> str:
    return time_text(int(record.create_timestamp.timestamp() * 1000))
