"""Which snapshot of a root is whole: every object that it needs is there with its size. Savepoints count too.

A root that was copied by plain tools while its job ran may hold manifests that were written after the data's folder had
been copied. One pass of listings shows which ones; nothing is read but the indexes of segments.
"""

from __future__ import annotations

import logging

from state_runtime.base.errors import CorruptData, JobNotFound, MissingFile, MissingSnapshot, UnsupportedFormat
from state_runtime.maintenance.copy.objects import needed_objects
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.expiry_boundary import place_of_newest_run
from state_runtime.snapshot.locate import OpenedSnapshot, open_snapshot
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import savepoint_path
from state_runtime.snapshot.savepoint_record import complete_savepoints
from state_runtime.store import Store

__all__ = ["newest_intact", "newest_intact_savepoint", "refuse_cut_copy"]

_LOG = logging.getLogger(__name__)
_FOLDERS = ("changelog", "files", "tables")
_LOOKED_AT_MAX = 100
"""Snapshots: a copy that lacks more than the newest hundred was not cut at its end."""


def refuse_cut_copy(source: OpenedSnapshot) -> None:
    """Refuse to begin with a snapshot that a copy of a live root lacks files of, before anything is written.

    Only where the folder lies elsewhere than its newest run left it: what is missing in place is damage, and the copy
    of the snapshot says so.

    Raises:
        MissingFile: it is not whole; the message names the newest one that is.
        UnsupportedFormat, StoreUnavailable: it cannot be known.
    """
    root, wanted = source.root, source.manifest.snapshot_id
    place = place_of_newest_run(root)
    if place in ("", root.url) or _is_intact(root, source.manifest, _sizes(root)):
        return
    whole = newest_intact(source.catalog)
    advice = (
        f"try `@{whole.snapshot_id}` ({root.url}@{whole.snapshot_id}), the newest one that is whole, or copy the folder"
        if whole is not None
        else "no other one there is whole either: copy the folder"
    )
    raise MissingFile(
        f"snapshot {wanted} in {root.url} is not whole: files that it needs are missing. The folder was copied from "
        f"{place}, taken while the job ran: {advice} again, snapshots/ first and everything else after it. Nothing was "
        "changed"
    )


def newest_intact(catalog: Catalog) -> Manifest | None:
    """The newest snapshot that is whole; None if none of the newest hundred is. An older one that needs no data at all
    does not count: to go back to it would be to begin empty.

    Raises:
        UnsupportedFormat, StoreUnavailable: it cannot be known.
    """
    root = catalog.root
    sizes = _sizes(root)
    is_newest = True
    for snapshot_id in reversed(catalog.snapshot_ids()[-_LOOKED_AT_MAX:]):
        try:
            manifest = catalog.manifest(snapshot_id)
        except MissingSnapshot:
            continue
        if _is_intact(root, manifest, sizes) and (is_newest or not _is_empty(manifest)):
            return manifest
        is_newest = False
    return None


def _sizes(root: Store) -> dict[str, int]:
    return {found.path: found.bytes for folder in _FOLDERS for found in root.list_objects(folder)}


def newest_intact_savepoint(catalog: Catalog, job_uid: str, *, above: int, until: int) -> OpenedSnapshot | None:
    """The savepoint below a root that is whole and holds the newest snapshot of the job above `above`.

    Args:
        job_uid: of the job; a savepoint of another one is passed over.
        until: the newest id of the job: ids only grow, so nothing newer can be gone back to.

    Raises:
        StoreUnavailable: it cannot be known.
    """
    root = catalog.root
    wanted = [
        record
        for record in complete_savepoints(root)
        if record.job_uid == job_uid and above < record.snapshot_id <= until
    ]
    for record in sorted(wanted, key=lambda r: (r.snapshot_id, r.requested_at_ms), reverse=True):
        folder = root.child(savepoint_path(record.name))
        try:
            opened = open_snapshot(folder, record.snapshot_id, catalog.clock)
            found = newest_intact(opened.catalog)
        except (CorruptData, MissingSnapshot, JobNotFound, UnsupportedFormat) as error:
            _LOG.warning("savepoint %s is passed over: %s", record.name, error)
            continue
        if found is not None and found.snapshot_id == record.snapshot_id and opened.manifest.job_uid == job_uid:
            return opened
    return None


def _is_empty(manifest: Manifest) -> bool:
    return not manifest.stored_segments and not manifest.layers and manifest.shards is None


def _is_intact(root: Store, manifest: Manifest, sizes: dict[str, int]) -> bool:
    try:
        needed = needed_objects(root, manifest).values()
    except CorruptData:
        return False  # an index or a listing of files is not there, or was cut
    return all(need.path in sizes and need.fits_size(sizes[need.path]) for need in needed)
