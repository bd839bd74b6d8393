"""The order of jobs in a tick; pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["next_start", "turns"]


def turns(jobs: Sequence[str], start: str | None) -> list[str]:
    """Return the jobs in order, from `start` on and around; from the first if `start` is no job (any more)."""
    at = jobs.index(start) if start in jobs else 0
    return [*jobs[at:], *jobs[:at]]


def next_start(looked_at: Sequence[str], unreached: Collection[str]) -> str:
    """Return the job with which the next tick begins: the first that this one did not reach; any if it reached all."""
    return next((job for job in looked_at if job in unreached), looked_at[0] if looked_at else "")
