"""How much memory is free here: for what pays only where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import psutil

__all__ = ["free_memory_bytes", "has_room_for_standby"]

STANDBY_FREE_BYTES_MIN: Final = 4 << 30
"""A standby takes about 1 GiB; the rest is for the job to grow."""
_GROUP: Final = Path("/sys/fs/cgroup")


def free_memory_bytes() -> int:
    """Return the memory that is free here: of the machine, and of this process's control group if that has a limit."""
    free = int(psutil.virtual_memory().available)
    limit = _limit_bytes()
    try:
        return free if limit is None else min(free, limit - int((_GROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        return free


def has_room_for_standby() -> bool:
    """Return whether an idle driver may wait here by itself. Half of all must be free, so that many jobs of one machine
    do not fill it with drivers that wait."""
    total = _limit_bytes() or int(psutil.virtual_memory().total)
    return free_memory_bytes() >= max(STANDBY_FREE_BYTES_MIN, total // 2)


def _limit_bytes() -> int | None:
    """Return the limit of this process's control group; None without one."""
    try:
        return int((_GROUP / "memory.max").read_text())
    except (OSError, ValueError):
        return None  # no control group here, or no limit
