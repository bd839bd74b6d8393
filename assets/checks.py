"""The checks of a job's stream, as Dagster shows them: `driver_alive` and `matches_configuration`; pure."""

from __future__ import annotations

from typing import Any, Final

import dagster as dg

from state_runtime.snapshot.term_files import RunStatus
from stillstate.assets.tables import markdown
from stillstate.orchestration.migration.desired import Desired
from stillstate.orchestration.recovery.alive import Alive

__all__ = ["ALIVE_CHECK", "MATCHES_CHECK", "alive_evaluation", "alive_metadata", "matches_evaluation"]

ALIVE_CHECK: Final = "driver_alive"
MATCHES_CHECK: Final = "matches_configuration"


def alive_metadata(alive: Alive, status: RunStatus | None, log: str = "", log_tail: str = "") -> dict[str, Any]:
    """Return the facts that a person needs at 3 a.m.: the state, since which run, the next action, the end of the
    log."""
    found: dict[str, Any] = {"verdict": alive.verdict, "reason": alive.reason}
    if status is not None:
        # Dagster would plot a number, and a plot of process ids is useless.
        found |= {"term": dg.IntMetadataValue(status.term), "process": f"{status.pid} on {status.host}"}
        found |= {"cause": status.cause} if status.cause else {}
        found |= {"error_kind": status.error_kind} if status.error_kind else {}
        found["last_heartbeat"] = dg.MetadataValue.timestamp(status.at_ms / 1000)
    if alive.attempt:
        found["attempt"] = dg.IntMetadataValue(alive.attempt)
    if alive.next_s is not None:
        found["next_attempt"] = dg.MetadataValue.timestamp(alive.next_s)
    if alive.last_run_id:
        found["last_recovery_run"] = dg.MetadataValue.dagster_run(alive.last_run_id)
    if log:
        found["log"] = dg.MetadataValue.path(log)
        # Text is on the page at once, but loses its line ends there; Markdown keeps them, behind a click.
        said = [line.strip() for line in log_tail.splitlines() if line.strip()]
        found["log_last_line"] = said[-1] if said else "nothing was said"
        found["log_tail"] = dg.MetadataValue.md(f"```\n{log_tail.replace('```', '` ` `')}\n```")
    return found


def alive_evaluation(
    stream: dg.AssetKey,
    alive: Alive,
    status: RunStatus | None,
    log: str = "",
    log_tail: str = "",
    *,
    next_look_by_s: float | None = None,
) -> dg.AssetCheckEvaluation:
    """Return the check's verdict as an event that needs no run.

    Args:
        next_look_by_s: when the next verdict is due, unless the sensor has stopped; None: a person has looked.
    """
    metadata = alive_metadata(alive, status, log, log_tail)
    if next_look_by_s is not None:
        metadata["next_look_by"] = dg.MetadataValue.timestamp(next_look_by_s)
    return dg.AssetCheckEvaluation(
        asset_key=stream,
        check_name=ALIVE_CHECK,
        passed=alive.level == "ok",
        severity=dg.AssetCheckSeverity.WARN if alive.level == "warn" else dg.AssetCheckSeverity.ERROR,
        description=alive.headline if alive.level == "ok" else f"{alive.headline}: {alive.reason}",
        metadata=metadata,
    )


def matches_evaluation(stream: dg.AssetKey, job: str, desired: Desired, launch: str) -> dg.AssetCheckEvaluation:
    """Return whether a job runs with the settings of the file, as an event that needs no run.

    Args:
        launch: the Dagster job that migrates, in words.
    """
    how = desired.how(job, launch)
    lines = [f"{desired.headline}." if how or desired.why else desired.headline, *(f"{line}." for line in how)]
    found: dict[str, Any] = {"term": dg.IntMetadataValue(desired.term)}
    if desired.unmatched:
        rows = [(one.setting, one.runs_with, one.file_says, one.by) for one in desired.unmatched]
        found["differences"] = markdown(["setting", "runs with", "file says", "taken by"], rows)
    if how:
        found["apply"] = dg.MetadataValue.md("\n".join(f"- {line}" for line in how))
    if desired.why:
        found["migration"] = desired.why
    if desired.run_id:
        found["run"] = dg.MetadataValue.dagster_run(desired.run_id)
    return dg.AssetCheckEvaluation(
        asset_key=stream,
        check_name=MATCHES_CHECK,
        passed=desired.passed,
        severity=dg.AssetCheckSeverity.WARN,  # the job is well; only its settings differ from the wanted ones
        description=" ".join([*lines, desired.why]).strip(),
        metadata=found,
    )
