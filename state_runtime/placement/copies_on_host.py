"""Finding local state on the disk of an executor's host; runs inside Spark tasks.

The result is not trusted: it only decides where a shard is tried first. Readers of a copy check it (state/backend.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from state_runtime.placement.assignment import CopyFound
from state_runtime.snapshot.shard_versions import NO_VERSION, ShardVersions

__all__ = ["find_copies"]

_FOLDER = re.compile(r"([0-9]{1,5})-([0-9]{1,5})\Z")


def find_copies(folder: Path, parallelism: int, versions: Mapping[str, ShardVersions]) -> list[CopyFound]:
    """Look for local versions under `<folder>/<operator>/<parallelism>-<shard>/`. Unreadable ones count as missing.

    Args:
        folder: the job's local state on this host.
        parallelism: of the newest snapshot.
        versions: per operator uid the wanted version of each shard of that parallelism.
    """
    matching: dict[int, int] = {}
    newest_ms: dict[int, int] = {}
    for uid, wanted in versions.items():
        for shard, held, changed_ms in _shards_in(folder / uid, parallelism):
            version = wanted[shard] if shard < len(wanted) else NO_VERSION
            found = version != NO_VERSION and any(name.startswith(version) for name in held)
            matching[shard] = matching.get(shard, 0) + found
            newest_ms[shard] = max(newest_ms.get(shard, 0), changed_ms)
    return [CopyFound(parallelism, shard, matching[shard], newest_ms[shard]) for shard in sorted(matching)]


def _shards_in(folder: Path, parallelism: int) -> list[tuple[int, list[str], int]]:
    """Return shard, names in its folder, and the time of its last change; empty folders and links are left out."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                named = _FOLDER.match(entry.name)
                if named is None or int(named[1]) != parallelism or not entry.is_dir(follow_symlinks=False):
                    continue
                if held := os.listdir(entry.path):
                    changed_ms = entry.stat(follow_symlinks=False).st_mtime_ns // 1_000_000
                    found.append((int(named[2]), held, changed_ms))
    except OSError:
        # No folder yet, or not readable: an unreadable copy is as good as missing.
        return []
    return found
