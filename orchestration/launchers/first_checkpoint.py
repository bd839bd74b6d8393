"""Waits for the proof that a driver which was brought back is well: its first checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Final

from state_runtime.base.errors import EXIT_OF_KIND, MissingSnapshot, Unavailable
from state_runtime.base.progress import together
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.term_files import RunStatus
from stillstate.orchestration.launchers.port import LOG_FOLLOWS, FirstCheckpoint, Launched, LaunchFailed, Liveness
from stillstate.orchestration.text import time_text

__all__ = ["Waiting"]

_CHECKPOINTS_READ_MAX: Final = 100


class Waiting:
    """Looks at one driver again and again.

    Args:
        is_alive: what is known about its process.
        tail: the end of its log.
        silent_s: a driver whose process this host cannot see has ended if its heartbeat does not change for this long.
        monotonic_s: this process's clock; another host's clock is not comparable.
    """

    def __init__(
        self,
        launched: Launched,
        catalog: Catalog,
        is_alive: Callable[[RunStatus], Liveness],
        tail: Callable[[], str],
        *,
        silent_s: float,
        monotonic_s: Callable[[], float],
    ) -> None:
        self._launched, self._catalog, self._is_alive, self._tail = launched, catalog, is_alive, tail
        self._silent_s, self._monotonic_s = silent_s, monotonic_s
        self._read_id = 0
        self._beat: tuple[int, int] = (0, 0)
        self._beat_seen_s = 0.0

    def look(self) -> FirstCheckpoint | None:
        """Look once; None: nothing is decided yet.

        Raises:
            LaunchFailed: the driver ended without a checkpoint.
        """
        term = self._launched.term
        try:
            status = self._catalog.status()
            if status is None or status.term < term:
                return None
            made = self._checkpoints(status)
        except Unavailable:
            return None  # a temporary error of the store says nothing about the driver
        if made:
            first = made[0]
            return FirstCheckpoint(
                snapshot_id=first.snapshot_id,
                how=f"checkpoint {first.snapshot_id} is the first of term {first.term}",
                at_ms=first.created_at_ms,
                progress=reduce(together, [m.progress for m in made if m.progress is not None], None),
            )
        if status.state in ("finished", "stopped"):
            return FirstCheckpoint(snapshot_id=None, how=f"term {status.term} {status.state}")
        liveness = self._is_alive(status)
        if liveness == "restarting":
            return None  # its supervisor brings it back; the next look sees the next term
        gone = "its process is gone" if liveness == "dead" else self._fallen_silent(status, liveness)
        if status.state in ("failed", "fenced") or gone:
            raise LaunchFailed(
                f"the driver of {self._launched.job!r} (term {status.term}) ended before its first checkpoint: "
                f"{status.message or gone}. {LOG_FOLLOWS} {self._launched.log}:\n{self._tail()}",
                EXIT_OF_KIND.get(status.error_kind, 1),
            )
        if status.state == "running" and status.quiet:
            # One heartbeat is enough: this run has polled its source, and nothing is due at which it could fail.
            how = f"term {status.term} runs, and its source is quiet: it was asked, and has nothing new"
            return FirstCheckpoint(snapshot_id=None, how=how)
        return None

    def _fallen_silent(self, status: RunStatus, liveness: Liveness) -> str:
        """Return a message about a driver on another host whose heartbeats have stopped; empty: they go on."""
        now_s = self._monotonic_s()
        if (status.term, status.at_ms) != self._beat:
            self._beat, self._beat_seen_s = (status.term, status.at_ms), now_s
        silent_for_s = now_s - self._beat_seen_s
        if liveness != "unknown" or silent_for_s <= self._silent_s:
            return ""
        return f"its last heartbeat was at {time_text(status.at_ms)}"

    def _checkpoints(self, status: RunStatus) -> list[Manifest]:
        """Return the checkpoints of this run, or of the one after it, ascending: a shard without rows is restored by a
        later one than the first. They are read only when the heartbeat names another snapshot."""
        if status.snapshot_id == self._read_id:
            return []
        newest = self._catalog.latest()
        if newest is None:
            return []
        self._read_id = status.snapshot_id
        found: list[Manifest] = []
        for snapshot_id in reversed(self._catalog.snapshot_ids()[-_CHECKPOINTS_READ_MAX:]):
            if snapshot_id > newest.snapshot_id:
                continue
            try:
                manifest = self._catalog.manifest(snapshot_id)
            except MissingSnapshot:
                break  # expired: retention keeps fewer snapshots than there were
            if manifest.kind != "checkpoint" or manifest.term < self._launched.term:
                break
            found.insert(0, manifest)
        return found
