"""The space that local copies take on one host's disk, and the order in which they are removed.

    <local dir>/state/<root id>-<job uid>/<operator>/<parallelism>-<shard>/…

A shard that moved to another host leaves a copy behind; so does every earlier parallelism. They are kept as long as
there is room, because a shard that comes back then needs only the later changelog.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from state_runtime.base.clock import Clock
from state_runtime.base.limits import MAX_PARALLELISM
from state_runtime.snapshot.shard_versions import NO_VERSION, ShardVersions
from state_runtime.state.key_groups import hash_range_of_shard, shard_of_hash

__all__ = ["LocalDisk", "oldest_copies", "remove_outdated", "shard_folders"]

_FOLDER = re.compile(r"([1-9][0-9]{0,4})-(0|[1-9][0-9]{0,4})\Z")
_MEASURED_FOR_S = 20.0
_IDLE_S = 600.0
"""A shard's folder without a write for this time may belong to a shard that has moved away."""


def shard_folders(folder: Path) -> list[tuple[int, int, Path]]:
    """Return the shards of an operator with files on this host: parallelism, shard, folder. Never fails."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    found = []
    for name in names:
        match = _FOLDER.match(name)
        if match is not None and int(match[2]) < int(match[1]) <= MAX_PARALLELISM:
            found.append((int(match[1]), int(match[2]), folder / name))
    return sorted(found, key=lambda f: f[:2])


def remove_outdated(folder: Path, parallelism: int, known: ShardVersions) -> None:
    """Remove an operator's shards of other parallelisms that no shard of this one can need any more. Never fails.

    Args:
        folder: the operator's.
        known: the shards' versions at the newest checkpoint: a shard with a version is restored.
    """
    if len(known) != parallelism:
        return
    for other, shard, place in shard_folders(folder):
        if other == parallelism:
            continue
        first, last = (shard_of_hash(h, parallelism) for h in hash_range_of_shard(shard, other))
        if all(known[s] != NO_VERSION for s in range(first, last + 1)):
            shutil.rmtree(place, ignore_errors=True)


def oldest_copies(state: Path) -> list[Path]:
    """Return folders of the copies of all shards of all jobs on this host, the longest unwritten first. Never fails.

    Args:
        state: the folder of all jobs (`<local dir>/state`).
    """
    found = []
    for operator in (o for job in _folders(state) for o in _folders(Path(job))):
        for _, _, place in shard_folders(Path(operator)):
            changed_s = _changed_s(place)
            if changed_s is not None:
                found.append((changed_s, place))
    return [place for _, place in sorted(found)]


def _folders(folder: Path) -> list[str]:
    try:
        return [entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _changed_s(place: Path) -> float | None:
    """Return when a shard's folder was last written to; None if it has just been removed."""
    try:
        return max(entry.stat().st_mtime for entry in (place, place / "rocksdb") if entry.exists())
    except (OSError, ValueError):
        return None


@dataclass
class LocalDisk:
    """The copies of one job on this host, measured now and then; one per worker process.

    Attributes:
        folder: the job's, with a folder per operator.
    """

    folder: Path
    clock: Clock
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _measured_at_s: float = float("-inf")
    _bytes: int = 0

    def has_room(self, bytes_max: int, own: Path) -> bool:
        """Return whether another version may be written. First remove copies that may be out of use, the longest unused
        before others.

        Between two measurements a worker may write a little too much.

        Args:
            own: the folder of the calling shard; it is kept.
        """
        with self._lock:
            now_s = self.clock.monotonic_s()
            if now_s - self._measured_at_s > _MEASURED_FOR_S or self._bytes >= bytes_max:
                self._bytes = _bytes_below(self.folder)
                self._measured_at_s = now_s
                self._make_room(bytes_max, own)
            return self._bytes < bytes_max

    def _make_room(self, bytes_max: int, own: Path) -> None:
        for place in self._idle(own):
            if self._bytes < bytes_max:
                return
            size = _bytes_below(place)
            shutil.rmtree(place, ignore_errors=True)
            self._bytes -= size

    def _idle(self, own: Path) -> Iterator[Path]:
        found = []
        for operator in _folders(self.folder):
            for _, _, place in shard_folders(Path(operator)):
                changed_s = _changed_s(place)
                if changed_s is not None and place != own and self.clock.now_ms() / 1000 - changed_s > _IDLE_S:
                    found.append((changed_s, place))
        yield from (place for _, place in sorted(found))


def _bytes_below(folder: Path) -> int:
    """Return the bytes of the files in a folder; a file with several names counts once."""
    seen: dict[tuple[int, int], int] = {}
    waiting = [str(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        seen[status.st_dev, status.st_ino] = status.st_blocks * 512
        except OSError:
            continue  # another task has removed it
    return sum(seen.values())
