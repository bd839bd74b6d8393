"""Which snapshot of a root is whole: every object that it needs is there with its size.

A root that was copied by plain tools while its job ran may hold manifests that were written after the data's folder had
been copied. One pass of listings shows which ones; nothing is read but the indexes of segments.
"""

from __future__ import annotations

from state_runtime.base.errors import CorruptData, MissingSnapshot
from state_runtime.maintenance.copy.objects import needed_objects
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest
from state_runtime.store import Store

__all__ = ["newest_whole"]

_FOLDERS = ("changelog", "files", "tables")
_LOOKED_AT_MAX = 100
"""Snapshots: a copy that lacks more than the newest hundred was not cut at its end."""


def newest_whole(catalog: Catalog) -> Manifest | None:
    """The newest snapshot that is whole; None if none of the newest hundred is. An older one that needs no data at all
    does not count: to go back to it would be to begin empty.

    Raises:
        UnsupportedFormat, StoreUnavailable: it cannot be known.
    """
    root = catalog.root
    sizes = {found.path: found.bytes for folder in _FOLDERS for found in root.list_objects(folder)}
    is_newest = True
    for snapshot_id in reversed(catalog.snapshot_ids()[-_LOOKED_AT_MAX:]):
        try:
            manifest = catalog.manifest(snapshot_id)
        except MissingSnapshot:
            continue
        if _is_whole(root, manifest, sizes) and (is_newest or not _is_empty(manifest)):
            return manifest
        is_newest = False
    return None


def _is_empty(manifest: Manifest) -> bool:
    return not manifest.segments and not manifest.layers and manifest.shards is None


def _is_whole(root: Store, manifest: Manifest, sizes: dict[str, int]) -> bool:
    try:
        needed = needed_objects(root, manifest).values()
    except CorruptData:
        return False  # an index or a listing of files is not there, or was cut
    return all(need.path in sizes and need.fits_size(sizes[need.path]) for need in needed)
