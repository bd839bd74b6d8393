"""The result of one look at a job in numbers: for the overview's table and for metrics; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from state_runtime.base.errors import CorruptData
from state_runtime.base.progress import Progress
from state_runtime.materialize.plan import replay_s
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.term_files import RunStatus
from stillstate.orchestration.probes.look import Look
from stillstate.orchestration.probes.pool import NOT_SEEN, NoLook

__all__ = ["DAMAGED", "Vitals", "vitals_of"]

DAMAGED: Final = "damaged"


@dataclass(frozen=True, kw_only=True)
class Vitals:
    """A job at one moment; None and empty for unknown values.

    Attributes:
        health: the verdict on its driver, `damaged` if its newest snapshot cannot be read or its driver has failed with
            damaged data, or `not seen`.
        is_well: no person need look.
        why: it is not well.
        since_ms: when that began, if the driver has reported it; 0: it has not.
        status: its newest heartbeat.
        head: its newest snapshot.
        progress: numbers of that snapshot's epochs.
        lag_s: how far its watermark is behind its clock; 0 without one.
        replay_s: about how long a restart replays the log.
    """

    health: str
    is_well: bool
    why: str = ""
    since_ms: int = 0
    status: RunStatus | None = None
    head: Manifest | None = None
    progress: Progress | None = None
    lag_s: float = 0.0
    replay_s: float = 0.0


def vitals_of(look: Look | NoLook) -> Vitals:
    """Return the vitals from a look."""
    if isinstance(look, NoLook):
        return Vitals(health=NOT_SEEN, is_well=False, why=str(look.error))
    health, head = look.seen.health, look.head
    is_well = health.is_well and look.trouble is None
    progress = None if head is None else head.progress
    lag_ms = progress.timestamp_ms - progress.watermark_ms if progress is not None and progress.watermark_ms else 0
    status = look.seen.status
    is_damaged = health.verdict == "failed" and status is not None and status.error_kind == CorruptData.kind
    return Vitals(
        health=DAMAGED if look.trouble is not None or is_damaged else health.verdict,
        is_well=is_well,
        why=str(look.trouble) if look.trouble is not None else "" if is_well else health.reason,
        since_ms=0 if is_well else health.since_ms,
        status=status,
        head=head,
        progress=progress,
        lag_s=max(0, lag_ms) / 1000,
        replay_s=0.0 if head is None else replay_s(head.log_bytes),
    )
