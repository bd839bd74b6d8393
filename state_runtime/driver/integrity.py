"""Which snapshots of a root have integrity: every object that they need is there with its size. Savepoints too.

In a root that was copied by plain tools while its job ran, manifests may be newer than the copied data. One pass of
listings shows which ones; only the indexes of segments are read.
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
"""Number of snapshots to check: a copy that lacks more than the newest hundred was not cut at its end."""


def refuse_cut_copy(source: OpenedSnapshot) -> None:
    """Refuse to begin with a snapshot whose files a copy of a live root lacks, before anything is written.

    This applies only if the folder is at another place than at its newest run. Files that are missing in place are
    damage, and copying the snapshot reports that.

    Raises:
        MissingFile: files of it are missing; the message names the newest complete snapshot.
        UnsupportedFormat, StoreUnavailable: it cannot be checked.
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
    """Return the newest snapshot that has all its objects; None if the newest hundred all lack some. An older snapshot
    that needs no data does not count: to go back to it would be to begin empty.

    Raises:
        UnsupportedFormat, StoreUnavailable: it cannot be checked.
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
    """Return the savepoint below a root that has all its objects and the newest snapshot of the job above `above`.

    Args:
        job_uid: of the job; savepoints of other jobs are skipped.
        until: the newest id of the job. Ids only grow, so the job cannot go back to a higher id.

    Raises:
        StoreUnavailable: it cannot be checked.
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
        return False  # an index or a listing of files is missing, or was cut
    return all(need.path in sizes and need.fits_size(sizes[need.path]) for need in needed)
