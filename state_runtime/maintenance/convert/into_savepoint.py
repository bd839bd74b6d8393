"""A savepoint in another format than its job writes. The process that works on the savepoint
(maintenance/copy/make_savepoint.py) folds the job's snapshot directly into the savepoint's folder.

1. fold and copy into the folder; compare with the snapshot, by rows and digest of each state
2. the manifest, create-if-absent. It has the job's uid and the snapshot's id, because it is the same state of the same
   job. Its commit id is derived from the snapshot's, so that every process makes the same manifest
3. remove the files of attempts that were killed

A kill before 2 leaves files that no manifest names; the next attempt folds again under new names. If two processes work
at once, the second finds the manifest of the first and uses it; step 3 removes the files that the second wrote itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import replace

from state_runtime.base.clock import Clock
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.ids import Ids
from state_runtime.base.limits import MIB
from state_runtime.maintenance.convert.compare import compare_here
from state_runtime.maintenance.convert.snapshot import (
    HERE_BYTES_MAX,
    CompareStates,
    refuse_rows_in_flight,
    write_converted,
)
from state_runtime.maintenance.copy.make_savepoint import Filled, LeftToOthers
from state_runtime.maintenance.copy.objects import needed_objects
from state_runtime.materialize.run import FoldUnits
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.locate import OpenedSnapshot
from state_runtime.snapshot.manifest import Manifest, OriginEntry, format_of
from state_runtime.snapshot.paths import manifest_path
from state_runtime.snapshot.savepoint_record import SavepointRecord
from state_runtime.store import Created, Store

__all__ = ["convert_savepoint", "convert_small"]

_DATA_FOLDERS = ("tables", "changelog", "files")


def convert_small(
    root: Store,
    manifest: Manifest,
    folder: Store,
    record: SavepointRecord,
    reached: Callable[[str, int, int], None],
    clock: Clock,
    ids: Ids,
) -> Filled:
    """Run `convert_savepoint` in this thread, for a snapshot that is small enough; a `Convert`.

    Raises:
        LeftToOthers: the snapshot is too large.
    """
    if manifest.total_bytes > HERE_BYTES_MAX:
        raise LeftToOthers(
            f"{manifest.total_bytes // MIB:,} MiB are rewritten by the command that waits for it, or by "
            f"`stillstate savepoint {record.job} {record.name} --resume`"
        )
    return convert_savepoint(root, manifest, folder, record, reached, clock, ids)


def convert_savepoint(
    root: Store,
    manifest: Manifest,
    folder: Store,
    record: SavepointRecord,
    reached: Callable[[str, int, int], None],
    clock: Clock,
    ids: Ids,
    *,
    fold: FoldUnits | None = None,
    compare: CompareStates = compare_here,
) -> Filled:
    """Write a savepoint in the canonical format. Atomic; repeat it after any error or crash. The caller has pinned the
    snapshot.

    Raises:
        MissingFile, CorruptData: the snapshot is damaged, or differs from the written data; nothing was published.
        InvalidConfiguration: the folder holds another snapshot, or rows are in flight in this one.
        Unavailable: repeat it.
    """
    commit_id = hashlib.sha256(f"canonical {manifest.commit_id}".encode()).hexdigest()[:32]
    path = manifest_path(manifest.snapshot_id)
    if not folder.exists(path):
        source = OpenedSnapshot(Catalog.of_root(root), Catalog.of_root(root).job_info(), manifest)
        refuse_rows_in_flight(source, "canonical")
        origin = OriginEntry(source.info.name, manifest.job_uid, manifest.snapshot_id, manifest.commit_id, "CONVERT")

        def adopt(draft: Manifest) -> Manifest:
            return replace(
                draft,
                format_version=format_of(draft),
                commit_id=commit_id,
                epoch=manifest.epoch or manifest.snapshot_id,
                outputs=(),
                versions={},
                origins=(*manifest.origins, origin),
            )

        made = write_converted(
            source,
            folder,
            "canonical",
            adopt,
            clock=clock,
            ids=ids,
            on_progress=reached,
            fold=fold,
            compare=compare,
            independent=record.independent,
        )
        _publish(folder, path, made.manifest)
    there = Catalog.of_root(folder).manifest(manifest.snapshot_id)
    if there.commit_id != commit_id:
        raise InvalidConfiguration(
            f"{folder.url} holds snapshot {there.snapshot_id} in another format already; nothing was overwritten"
        )
    needed = needed_objects(folder, there)
    _sweep(folder, needed)
    return Filled(len(needed), sum(need.bytes_known for need in needed.values()))


def _publish(folder: Store, path: str, manifest: Manifest) -> None:
    if folder.create(path, manifest.encode()) is Created.LOST:
        return  # another owner was quicker: the caller reads that manifest next


def _sweep(folder: Store, needed: Collection[str]) -> None:
    for top in _DATA_FOLDERS:
        for found in list(folder.list_objects(top)):
            if found.path not in needed:
                folder.delete(found.path)
