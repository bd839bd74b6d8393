"""Who comes first in a tick; pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["next_start", "turns"]


def turns(jobs: Sequence[str], start: str | None) -> list[str]:
    """The jobs in their order, from `start` on and around; from the first if there is no such job (any more)."""
    at = jobs.index(start) if start in jobs else 0
    return [*jobs[at:], *jobs[:at]]


def next_start(looked_at: Sequence[str], unreached: Collection[str]) -> str:
    """With whom the next tick begins: the first that this one did not reach; if it reached all, any will do."""
    return next((job for job in looked_at if job in unreached), looked_at[0] if looked_at else "")
