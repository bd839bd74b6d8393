"""Which snapshots of an Iceberg table expire, and which files nothing needs then.

pyiceberg takes expired snapshots out of the metadata and leaves their files. It writes no `replace` snapshots, so small
files are not written anew here: as an `overwrite` they would stop everybody who reads the table as a stream.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from state_runtime.sinks.iceberg_catalog import iceberg_library

__all__ = ["expired_ids", "files_of", "without_needed"]


def expired_ids(table: Any, before_ms: int) -> list[int]:
    """Return the snapshots that are older, but for those that a branch or a tag names."""
    named = {ref.snapshot_id for ref in table.metadata.refs.values()}
    return [s.snapshot_id for s in table.snapshots() if s.timestamp_ms < before_ms and s.snapshot_id not in named]


def files_of(table: Any, ids: Collection[int]) -> set[str]:
    """Return the files that snapshots have, and no other one: lists of manifests, manifests, data files and deletes."""
    ids = frozenset(ids)
    gone = [s for s in table.snapshots() if s.snapshot_id in ids]
    lists = {s.manifest_list for s in gone if s.manifest_list}
    kept = {path for path, _ in _manifests(table, (s for s in table.snapshots() if s.snapshot_id not in ids))}
    manifests = {path: manifest for path, manifest in _manifests(table, gone) if path not in kept}
    data = {entry.data_file.file_path for manifest in manifests.values() for entry in _entries(table, manifest, False)}
    return without_needed(table, lists | manifests.keys() | data, ids)


def without_needed(table: Any, files: Collection[str], ids: Collection[int] = ()) -> set[str]:
    """Return files without those that a table's snapshots need.

    Args:
        ids: of snapshots that do not count.
    """
    left = set(files)
    kept = [s for s in table.snapshots() if s.snapshot_id not in ids]
    left -= {s.manifest_list for s in kept}
    for path, manifest in _manifests(table, kept):
        left.discard(path)
        left.difference_update(entry.data_file.file_path for entry in _entries(table, manifest, True))
    return left


def _manifests(table: Any, snapshots: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each manifest of some snapshots once."""
    seen: set[str] = set()
    for snapshot in snapshots:
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path not in seen:
                seen.add(manifest.manifest_path)
                yield manifest.manifest_path, manifest


def _entries(table: Any, manifest: Any, is_needed: bool) -> Iterator[Any]:
    """Yield the entries of a manifest.

    Args:
        is_needed: without those that say that a file is not part of the table any more.
    """
    deleted = iceberg_library().manifest.ManifestEntryStatus.DELETED
    for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False):
        if not is_needed or entry.status != deleted:
            yield entry
