"""With the changelog off: the driver's index of all shards' files, and how the logs of seen files are carried on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from state_runtime.base.errors import CorruptData
from state_runtime.base.ids import Ids
from state_runtime.changelog.parts import sha256
from state_runtime.materialize.source_logs import fold_source_logs
from state_runtime.restore.uploaded_files import direct, read_listing
from state_runtime.snapshot.manifest import LayerEntry, Manifest, SegmentEntry, ShardFilesEntry
from state_runtime.snapshot.paths import listing_path
from state_runtime.snapshot.shard_files import ShardFiles, ShardListing, bottom_is_of_shape
from state_runtime.store import Created, Store
from state_runtime.task.acknowledgement import PersistedFiles
from state_runtime.task.listed_files import ListedFiles

__all__ = ["FileIndex", "carried_source_logs"]

_SOURCE_SEGMENTS_MAX = 64
"""Segments with lines of sources' logs that a manifest may name before they are folded into one file."""


@dataclass(frozen=True)
class FileIndex:
    """The files of all shards at the head.

    Life cycle: `begin` → (`after` an epoch | `written` for a checkpoint or a flush)*.

    Attributes:
        known: objects that were in the listing of the snapshot that the run began from: a shard of another parallelism
            may continue with them.
        entry: the object that holds `listing`; None if it is not written yet.
        flushed: the newest object with a listing. Later epochs may have changed shards; of all others it is current.
        new: objects that tasks uploaded since the newest manifest.
        complete: whether every shard with state is in it. If not, the first epoch must visit all of them.
    """

    listing: ShardListing
    known: frozenset[str] = field(default=frozenset(), repr=False)
    entry: ShardFilesEntry | None = None
    flushed: ShardFilesEntry | None = None
    new: frozenset[str] = field(default=frozenset(), repr=False)
    complete: bool = True

    @property
    def uploaded(self) -> set[str]:
        """Objects that tasks have uploaded since the newest manifest and that the listing still names."""
        return _paths(self.listing.shards) & self.new

    @staticmethod
    def begin(root: Store, last: Manifest, parallelism: int, operators: Collection[str]) -> FileIndex:
        """Return the index at the start of a run.

        Args:
            last: the snapshot that the run resumes from.
            operators: uids of the pipeline's.

        Raises:
            MissingFile, CorruptSegment, CorruptManifest: the listing cannot be trusted. StoreUnavailable: try again.
        """
        before = read_listing(direct(root), last)
        known = frozenset(_paths(before.shards)) if before is not None else frozenset()
        if before is not None and bottom_is_of_shape(last, parallelism):
            kept = before.only(operators)
            return FileIndex(kept, known, last.shards if kept == before else None, last.shards)
        stored = bool(last.segments or last.shards or any(layer.tables for layer in last.layers))
        return FileIndex(ShardListing(last.job_uid, parallelism), known, complete=not stored)

    def after(self, persisted: Iterable[PersistedFiles]) -> FileIndex:
        """Return the index after an epoch.

        Raises:
            CorruptData: a task continued with a file that no listing names: nothing would protect it from deletion.
        """
        changed = [(p, p.shard) for p in persisted if p.shard is not None]
        if not changed:
            return replace(self, complete=True)
        known = self.known | _paths(self.listing.shards)
        for files, shard in changed:
            if unknown := _paths([shard]) - known - set(files.uploaded):
                raise CorruptData(
                    f"operator {shard.operator!r}, shard {shard.shard} goes on with {sorted(unknown)[0]}, which no "
                    "snapshot names. Start the job again: the state of the newest snapshot is complete"
                )
        schemas = {d: text for files, _ in changed for d, text in (files.schemas or {}).items()}
        listing = self.listing.with_shards([shard for _, shard in changed], schemas)
        new = self.new.union(*(files.uploaded for files, _ in changed))
        return replace(self, listing=listing, entry=None, new=new, complete=True)

    def written(self, root: Store, *, term: int, snapshot_id: int, ids: Ids) -> FileIndex:
        """Write the listing to the store, for the next snapshot, and return the index with it.

        Raises:
            InvalidConfiguration: it is too large. StoreUnavailable, OutcomeUnknown: see `Store.create`.
        """
        if self.entry is not None:
            entry = replace(self.entry, snapshot_id=snapshot_id)
            return replace(self, entry=entry, flushed=entry)
        listing = self.listing
        body = listing.encode()
        path = listing_path(term, f"{snapshot_id:020d}-{ids.uid()}")
        if root.create(path, body) is not Created.MINE:  # a 128-bit random name: only a broken store gets here
            raise FileExistsError(f"{path} in {root.url} exists although its name was just drawn")
        # A mixed listing has the more frequent backend: shards that could not be written locally are Arrow.
        rocksdb = sum(s.backend == "rocksdb" for s in listing.shards)
        entry = ShardFilesEntry(
            path=path,
            bytes=len(body),
            digest=sha256(body),
            backend="rocksdb" if 2 * rocksdb > len(listing.shards) else "arrow",
            parallelism=listing.parallelism,
            snapshot_id=snapshot_id,
            total_bytes=listing.total_bytes,
            oldest_snapshot_id=listing.oldest_snapshot_id,
        )
        return replace(self, entry=entry, flushed=entry)

    def checkpointed(self) -> FileIndex:
        """Return the index after a manifest that names the listing: objects that only older listings named may go."""
        return replace(self, known=frozenset(), new=frozenset())

    def of_tasks(self) -> Mapping[str, ListedFiles]:
        """Return the listed files that tasks need, by operator uid."""
        by_operator: dict[str, list[ShardFiles]] = {}
        for shard in self.listing.shards:
            by_operator.setdefault(shard.operator, []).append(shard)
        return {uid: ListedFiles.of(shards) for uid, shards in by_operator.items()}


def carried_source_logs(
    root: Store, last: Manifest, pending: tuple[SegmentEntry, ...], *, in_shape: bool, ids: Ids
) -> tuple[tuple[LayerEntry, ...], tuple[SegmentEntry, ...]]:
    """Return layers and segments of the next manifest, which have only the logs of files that sources have seen.

    Args:
        in_shape: whether `last` has nothing else already.

    Raises:
        MissingFile, CorruptSegment: the log of a source is damaged. StoreUnavailable: try again.
    """
    if in_shape and len(last.segments) + len(pending) <= _SOURCE_SEGMENTS_MAX:
        return last.layers, (*last.segments, *pending)
    new, removed = fold_source_logs(root, last, ids.short(), everything=False)
    kept = [f for layer in last.layers for f in layer.source_logs if f.path not in removed]
    logs = (*kept, *new)
    return ((LayerEntry(0, last.snapshot_id, (), logs),) if logs else ()), pending


def _paths(shards: Iterable[ShardFiles]) -> set[str]:
    return {file.path for shard in shards for file in shard.files if file.path}
