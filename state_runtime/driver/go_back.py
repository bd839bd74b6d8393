"""Content outside its own root that a job goes back to: where it is found, and how it is copied into the root.

A savepoint or a copy holds a snapshot of the job under the same names. The named bytes are used: an object of the root
counts only if its bytes are those that the manifest says. Before a fencing snapshot names them, all other objects are
replaced by those of the place, whose bytes are checked too. Names of objects are used once, so every other snapshot
that names a replaced object needs the same bytes. A crash in between leaves objects unchanged or repaired, and objects
that garbage collection removes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from state_runtime.base.actor import Actor
from state_runtime.base.errors import (
    CorruptManifest,
    InvalidConfiguration,
    JobRootMismatch,
    MissingSnapshot,
    SnapshotInUse,
    UnsupportedFormat,
)
from state_runtime.maintenance.copy.objects import Copier, CopyProgress, needed_objects
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.claim import refuse_if_claimed
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.locate import OpenedSnapshot
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.savepoint_record import read_record
from state_runtime.store import Store

__all__ = ["bringing", "brought_content", "past_of"]

_LOG = logging.getLogger(__name__)


def past_of(catalog: Catalog, opened: OpenedSnapshot, newest: Manifest) -> Manifest:
    """Return a snapshot stored elsewhere as content for a job to go back to; `bringing` copies its data into the root.

    Args:
        newest: of the job.

    Raises:
        JobRootMismatch, InvalidConfiguration, SnapshotInUse: the job cannot go back to it.
    """
    refuse_if_claimed(opened.root)
    record = read_record(opened.root)
    if record is not None and record.state != "COMPLETED":
        raise SnapshotInUse(f"{opened.place} is a savepoint that is {record.state}; go back to it once it is COMPLETED")
    manifest, root = opened.manifest, catalog.root
    if manifest.job_uid != newest.job_uid:
        raise JobRootMismatch(
            f"{opened.place} is of another job ({opened.info.name!r}, {manifest.job_uid}), and a job goes back only to "
            f"its own snapshots. Start a new job from it: `stillstate run NAME --from {opened.place}`"
        )
    if manifest.snapshot_id > newest.snapshot_id:
        raise InvalidConfiguration(
            f"{opened.place} is newer than anything in {root.url}, whose newest snapshot is {newest.snapshot_id}: this "
            "root was put back from an older copy. Begin a new job from that place, or remove this root and begin it "
            "from there (--from)"
        )
    own = _own_one(catalog, opened)
    if own is None:
        return brought_content(manifest)
    # A savepoint names no output. Unpublished output of the job's own manifest must still be published.
    return own if own.commit_id == manifest.commit_id else replace(brought_content(manifest), outputs=own.outputs)


def _own_one(catalog: Catalog, opened: OpenedSnapshot) -> Manifest | None:
    """Return the manifest of the same snapshot in the job's own root; None if it is missing or cannot be read."""
    manifest, root = opened.manifest, catalog.root
    if not read_boundary(root).keeps(manifest.snapshot_id):
        return None
    try:
        own = catalog.manifest(manifest.snapshot_id)
    except (MissingSnapshot, CorruptManifest, UnsupportedFormat):
        # Expired meanwhile, or damaged: then the content of the place is used.
        return None
    if own.commit_id not in (manifest.commit_id, _converted_from(manifest)):
        raise InvalidConfiguration(
            f"snapshot {manifest.snapshot_id} in {root.url} is another one than that in {opened.root.url}: the two "
            "have gone on apart from each other. Begin a new job from that place"
        )
    return own


def brought_content(manifest: Manifest) -> Manifest:
    """Return a snapshot of another root as content for this one. It has no versions of local copies: they are a hint
    for the root that the snapshot was made in. A savepoint of another format still counts as the job's own."""
    origins = manifest.origins[:-1] if _converted_from(manifest) else manifest.origins
    return replace(manifest, versions={}, origins=origins)


def _converted_from(manifest: Manifest) -> str:
    """Return the commit id of the job's snapshot that a savepoint of another format was made of; empty of others."""
    came = manifest.origins[-1] if manifest.origins else None
    return came.commit_id if came is not None and came.mode == "CONVERT" and came.job_uid == manifest.job_uid else ""


@contextmanager
def bringing(
    source: Store,
    root: Store,
    content: Manifest,
    actor: Actor,
    progress: Callable[[CopyProgress], None] | None = None,
) -> Iterator[None]:
    """Copy the content's data into the root, and keep it there while a fencing snapshot is committed in the body.

    A garbage collection that read the manifests before the fencing snapshot was committed may still remove files that
    no snapshot needed then. So after the body all files are checked once more, and missing files are copied again.
    Repeat it after any error.

    Raises:
        MissingFile, CorruptData: an object is missing or damaged in the source, and not right in the root either.
        StoreUnavailable: try again.
    """
    needed = list(needed_objects(source, content).values())
    record = read_record(source)
    # A copy, or a savepoint with separate bytes, stays independent: the root gets no second name of its files.
    by_link = record is not None and not record.independent
    with Copier(source, root, progress=progress, ids=actor.ids, verified=True, by_link=by_link) as copier:
        copier.copy(needed)
        if copier.replaced:
            _LOG.warning(
                "%d objects of snapshot %d in %s were damaged (%s is the first) and have been replaced by those of %s",
                len(copier.replaced),
                content.snapshot_id,
                root.url,
                min(copier.replaced),
                source.url,
            )
        yield
        copier.copy_what_is_gone(needed)
