"""`stillstate/overview`: all jobs in one table, the page that is opened first; pure.

Dagster gives a table half of the window and shows every row of it at once. So a row is one line of a few short cells,
and a column that is empty for all jobs is left out. Facts that need sentences have a separate table: which jobs are
ill, and why.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import dagster as dg

from stillstate.assets.mount import Mount
from stillstate.assets.tables import table, unbroken
from stillstate.orchestration.probes.look import Look
from stillstate.orchestration.probes.pool import NoLook
from stillstate.orchestration.probes.vitals import vitals_of
from stillstate.orchestration.text import age_text, counted_text, time_text

__all__ = [
    "OVERVIEW_S",
    "WELL_CHECK",
    "OverviewRow",
    "RestartRow",
    "overview_materialization",
    "overview_row",
    "overview_spec",
    "well_evaluation",
    "well_spec",
]

OVERVIEW_S: Final = 1800.0
NEXT_LOOK_S: Final = OVERVIEW_S + 300.0
"""Time until the next table is due, unless the daemon has stopped or the sensor is off."""
WELL_CHECK: Final = "all_jobs_well"
_NAMED_MAX: Final = 5
_ALL_COLUMNS: Final = ("job", "health", "term", "checkpoint", "lag", "replay", "savepoint", "recovery")
_ILL_COLUMNS: Final = ("job", "since", "why")
_RESTART_COLUMNS: Final = ("at", "job", "outcome", "down", "restored_from", "cause")
_SENTENCES: Final = frozenset({"why", "restored_from", "cause"})
_OPTIONAL: Final = frozenset({"lag", "replay", "savepoint", "recovery"})
_LAG_SHOWN_S: Final = 1.0
_REPLAY_SHOWN_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class OverviewRow:
    """One job, as people read it; empty for unknown values.

    Attributes:
        checkpoint: when the newest was made.
        lag: of the watermark behind its clock.
        replay: about how long a restart replays the log, if that is a second or more.
        savepoint: when the newest was complete.
        recovery: when the last one was that Dagster made, and how it ended if not well.
        why: it needs a look.
        since: when that began.
    """

    job: str
    health: str
    is_well: bool
    term: str = ""
    checkpoint: str = ""
    lag: str = ""
    replay: str = ""
    savepoint: str = ""
    recovery: str = ""
    why: str = ""
    since: str = ""


@dataclass(frozen=True, kw_only=True)
class RestartRow:
    """One restart of a driver that was lost.

    Attributes:
        at: when its recovery was requested; of one in place, when the run began.
        cause: how the run before ended.
        restored_from: the snapshot that it continued from.
        down: from the last heartbeat to the first checkpoint.
        outcome: how the recovery ended.
    """

    job: str
    at: str
    outcome: str
    cause: str = ""
    restored_from: str = ""
    down: str = ""


def overview_row(
    job: str, look: Look | NoLook, *, savepoint: str = "", recovery: str = "", unwell_since_ms: int = 0
) -> OverviewRow:
    """Return the row for one look. It has times and not ages: the table is read long after it was written.

    Args:
        savepoint: the newest, as text.
        recovery: the last one that Dagster made, as text.
        unwell_since_ms: when a look first found it unwell; for conditions that the driver cannot have reported.
    """
    seen = vitals_of(look)
    head, since_ms = seen.head, seen.since_ms or unwell_since_ms
    return OverviewRow(
        job=job,
        health=seen.health,
        is_well=seen.is_well,
        term="" if seen.status is None else str(seen.status.term),
        checkpoint="" if head is None else time_text(head.created_at_ms),
        lag=age_text(seen.lag_s) if seen.lag_s >= _LAG_SHOWN_S else "",
        replay=age_text(seen.replay_s) if seen.replay_s >= _REPLAY_SHOWN_S else "",
        savepoint="" if isinstance(look, NoLook) else savepoint,
        recovery=recovery,
        why=seen.why,
        since=time_text(since_ms) if since_ms and not seen.is_well else "",
    )


def overview_materialization(
    key: dg.AssetKey, rows: Sequence[OverviewRow], restarts: Sequence[RestartRow] = (), *, looked_at_ms: int
) -> dg.AssetMaterialization:
    """Return all jobs: those that need a look first, the others by name; and the newest restarts of any of them.

    Args:
        looked_at_ms: when. A sensor that has stopped cannot report it: so the table says by when it is due again.
    """
    ordered = sorted(rows, key=lambda row: (row.is_well, row.job))
    ill = [row for row in ordered if not row.is_well]
    columns = [name for name in _ALL_COLUMNS if name not in _OPTIONAL or any(getattr(row, name) for row in rows)]
    return dg.AssetMaterialization(
        key,
        description=_headline(rows),
        metadata={
            # Dagster shows them in this order.
            **({"ill": _table(_ILL_COLUMNS, [_explained(row) for row in ill])} if ill else {}),
            "jobs": _table(columns, ordered),
            **({"restarts": _table(_RESTART_COLUMNS, restarts)} if restarts else {}),
            "jobs_ill": dg.IntMetadataValue(len(ill)),
            "jobs_well": dg.IntMetadataValue(len(rows) - len(ill)),
            "looked_at": dg.MetadataValue.timestamp(looked_at_ms / 1000),
            "next_look_by": dg.MetadataValue.timestamp(looked_at_ms / 1000 + NEXT_LOOK_S),
        },
    )


def well_evaluation(key: dg.AssetKey, rows: Sequence[OverviewRow], red: Collection[str]) -> dg.AssetCheckEvaluation:
    """Return whether all jobs are well: it distinguishes the events of the overview at a glance.

    Args:
        red: jobs whose check `driver_alive` is an error; others that are not well are a warning.
    """
    ill = {row.job for row in rows if not row.is_well}
    return dg.AssetCheckEvaluation(
        asset_key=key,
        check_name=WELL_CHECK,
        passed=not ill,
        severity=dg.AssetCheckSeverity.ERROR if ill & set(red) else dg.AssetCheckSeverity.WARN,
        description=_headline(rows),
    )


def _headline(rows: Sequence[OverviewRow]) -> str:
    ill = sorted(row.job for row in rows if not row.is_well)
    if not ill:
        return "the job is well" if len(rows) == 1 else f"all {len(rows)} jobs are well"
    more = f" and {len(ill) - _NAMED_MAX} more" if len(ill) > _NAMED_MAX else ""
    need = "needs" if len(ill) == 1 else "need"
    return f"{len(ill)} of {counted_text(len(rows), 'job')} {need} a look: {', '.join(ill[:_NAMED_MAX])}{more}"


def _explained(row: OverviewRow) -> OverviewRow:
    return replace(row, why=f"{row.health}: {row.why}")


def _table(columns: Sequence[str], rows: Sequence[OverviewRow] | Sequence[RestartRow]) -> dg.TableMetadataValue:
    return table(dict.fromkeys(columns, "string"), ([_cell(n, getattr(row, n)) for n in columns] for row in rows))


def _cell(name: str, text: str) -> str:
    """Return the text of a cell: a sentence may take several lines, `9 s` may not."""
    return text if name in _SENTENCES else unbroken(text)


def overview_spec(mount: Mount, jobs: int) -> dg.AssetSpec:
    """Return the spec of the overview's asset."""
    spec = dg.AssetSpec(
        mount.overview(),
        description="All jobs in one table: their health, and how old their newest checkpoints are; those that need "
        "attention come first. The tab Events shows it over the whole width. Materialized by the progress sensor when "
        "a job's health or term changes, and every half hour: if `next_look_by` has passed, the sensor has stopped, "
        "and this table and the checks are as old as `looked_at` says.",
        group_name=mount.group or mount.name("stillstate"),
        kinds={"spark"},
        metadata={"streams": jobs, "dagster_jobs": "shared" if mount.is_shared else "per_job"},
    )
    return mount.shown(spec)


def well_spec(mount: Mount) -> dg.AssetCheckSpec:
    """Return the spec of the overview's check `all_jobs_well`."""
    return dg.AssetCheckSpec(
        WELL_CHECK,
        asset=mount.overview(),
        description="A warning when a job needs a look, and red when `driver_alive` of one of them is. Evaluated by "
        "the progress sensor with each table.",
    )
