"""A manifest made durable: create-if-absent of the next id, and then the look whether it counts.

0. `prepare` looks whether the root is still the one that this run knows: the last snapshot lies there with this run's
   commit id, the run's term as it was written, and every object that the new manifest is the first to lead to. A run
   that slept while an older backup was put in the root's place, or while the job was deleted and began anew, ends
   here, and the run that goes on there notices nothing. A look that the store does not answer has changed nothing: it
   may be repeated.
1. `create` creates `snapshots/<last + 1>/manifest.json`. It exists and is mine (same bytes, the commit id is inside):
   done. It exists and is not mine: this run is fenced.
2. `create` then reads the boundary (one listing as long as nothing was given up since). An id at or below it was
   collected once already: a run that slept has created an old name anew, and nobody will look at it. It is fenced.
3. An unknown outcome is raised as such; nothing is cleaned up. The next run reads what is there.

The caller publishes output only after `create` returned; `commit` is both. How a run gets there, and what stops those
before it: snapshot/fencing.py.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from state_runtime.base.actor import Actor
from state_runtime.base.clock import Clock
from state_runtime.base.errors import Fenced
from state_runtime.snapshot.expiry_boundary import ExpiryBoundary, boundary_for_run, read_boundary
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.snapshot.manifest import Manifest, format_of
from state_runtime.snapshot.ownership import Landmark, Ownership
from state_runtime.snapshot.paths import manifest_path
from state_runtime.snapshot.term_files import Term, newest_term
from state_runtime.store import Created, Store

__all__ = ["Committer", "check_not_given_up", "next_manifest"]


_LOOKS = 16
"""Requests at a time. A commit with small changes has three; each object that a task uploaded is one more."""


class Committer:
    """Commits snapshots of one run.

    Life cycle: open (the fencing snapshot is committed) → (prepare → create)* → fenced or dropped. After `Fenced` it
    refuses every further commit. Not thread-safe; the driver calls it from one thread at a time.

    Attributes:
        last: the newest snapshot that the run knows to be durable.
        follows_ms: when the snapshot before the run's own first one was written; 0: there was none.
    """

    def __init__(
        self,
        root: Store,
        info: JobInfo,
        term: Term,
        last: Manifest,
        actor: Actor,
        boundary: ExpiryBoundary | None = None,
        follows_ms: int = 0,
    ) -> None:
        self._root = root
        self._actor = actor
        self._fenced: str | None = None
        self._boundary = boundary
        self._landmark = _landmark(last, last.encode())
        self.ownership = Ownership(root, info.uid, term, newest=lambda: self._landmark)
        self.info = info
        self.term = term
        self.last = last
        self.follows_ms = follows_ms

    @property
    def clock(self) -> Clock:
        """What snapshots are dated by, and processing time goes by."""
        return self._actor.clock

    def commit(self, draft: Manifest, objects: Collection[str] = ()) -> Manifest:
        """Make `draft` the next snapshot: `prepare` and `create`. Durable when it returns.

        Raises:
            Fenced, OutcomeUnknown, StoreUnavailable: see `create`.
        """
        return self.create(self.prepare(draft, objects))

    def prepare(self, draft: Manifest, objects: Collection[str] = ()) -> Manifest:
        """The next snapshot as it is to be created. Identity fields (id, term, commit id, time) are filled in here.

        Nothing is written: whatever it raises but `Fenced`, the caller may try again.

        Args:
            objects: paths of what the draft is the first to lead to, and does not name itself: what tasks uploaded, and
                the record of a materialization whose tables it takes over.

        Raises:
            Fenced: another run owns the job, or the root was replaced; publish nothing, stop.
            StoreUnavailable: a look at what the commit stands on was not answered.
        """
        if self._fenced:
            raise Fenced(self._fenced)
        manifest = next_manifest(draft, self.last, self.info, self.term, self._actor)
        try:
            self._check_root(manifest, objects)
        except Fenced as error:
            self._fenced = str(error)
            raise
        return manifest

    def create(self, manifest: Manifest) -> Manifest:
        """Make what `prepare` gave the next snapshot, right after it. Durable when it returns.

        Raises:
            Fenced: another run owns the job, or the root was replaced; publish nothing, stop.
            OutcomeUnknown, StoreUnavailable: not confirmed; the run must end without cleaning up.
        """
        body = manifest.encode()
        if not _create(self._root, manifest, body):
            self._fenced = (
                f"snapshot {manifest.snapshot_id} was committed by another run (newest term {newest_term(self._root)}, "
                f"this is term {self.term.term}); this run stops and publishes nothing"
            )
            raise Fenced(self._fenced)
        try:
            self._boundary = check_not_given_up(self._root, manifest, self.term, self._boundary)
        except Fenced as error:
            self._fenced = str(error)
            raise
        self.last, self._landmark = manifest, _landmark(manifest, body)
        return manifest

    def _check_root(self, manifest: Manifest, objects: Collection[str]) -> None:
        """Look at what the commit stands on; at the same time, because each look is one small request.

        Raises:
            Fenced: the root is not the one that this run knows.
            StoreUnavailable: it is not known; nothing was committed.
        """
        # All of them: a backup may have been made after some were written, and put in place after others.
        known = _named(self.last)
        named = {path: size for path, size in _named(manifest).items() if path not in known}
        with ThreadPoolExecutor(_LOOKS, thread_name_prefix="commit") as pool:
            looks = [
                pool.submit(self.ownership.check_term),
                pool.submit(self._check_last),
                *(pool.submit(self._check_object, path, size) for path, size in named.items()),
                *(pool.submit(self._check_object, path, None) for path in objects if path not in named),
            ]
        for look in looks:
            look.result()

    def _check_last(self) -> None:
        if self._landmark is not None and not self._landmark.is_in(self._root):
            raise self._replaced(f"snapshot {self.last.snapshot_id} is not the one that this run has committed")

    def _check_object(self, path: str, size: int | None) -> None:
        try:
            found = self._root.size(path)
        except FileNotFoundError:
            found = -1
        if found < 0 or size not in (None, found):
            raise self._replaced(f"{path}, which this run has just written, is not there")

    def _replaced(self, why: str) -> Fenced:
        return Fenced(
            f"{self._root.url} was replaced while this run (term {self.term.term}) slept, for instance by an older "
            f"backup: {why}. This run stops and publishes nothing; start the job again, which goes on from the newest "
            "snapshot that is there now"
        )


def next_manifest(draft: Manifest, last: Manifest, info: JobInfo, term: Term, actor: Actor) -> Manifest:
    """`draft` as what follows `last`: identity fields (id, term, commit id, time) are filled in."""
    return replace(
        draft,
        format_version=format_of(draft),
        job_uid=info.uid,
        snapshot_id=last.snapshot_id + 1,
        term=term.term,
        commit_id=actor.ids.uid(),
        created_at_ms=actor.clock.now_ms(),
    )


def _named(manifest: Manifest) -> dict[str, int]:
    """What a run writes itself before its manifest, by path, with its size; not what folds have written."""
    named = {s.path: s.bytes for s in manifest.stored_segments}
    named |= {log.path: log.bytes for layer in manifest.layers for log in layer.source_logs}
    if manifest.shards is not None:
        named[manifest.shards.path] = manifest.shards.bytes
    return named


def _create(root: Store, manifest: Manifest, body: bytes) -> bool:
    return root.create(manifest_path(manifest.snapshot_id), body) is Created.MINE


def _landmark(manifest: Manifest, encoded: bytes) -> Landmark | None:
    """None: nothing was ever committed."""
    if manifest.snapshot_id == 0:
        return None
    return Landmark(manifest_path(manifest.snapshot_id), encoded.partition(b"\n")[0])


def check_not_given_up(root: Store, manifest: Manifest, run: Term, known: ExpiryBoundary | None) -> ExpiryBoundary:
    """See, after a manifest was created, whether it is a snapshot.

    Args:
        known: the boundary that was read last.

    Returns:
        The boundary that counts now.

    Raises:
        Fenced: its id was given up, or its root was removed, while the run slept; nobody will ever read it.
    """
    # Only after the create: garbage collection advances the boundary before it deletes, so either it sees our
    # manifest, or we see its boundary. Of a root that was deleted whole the boundary is gone too; so is this run's
    # mark.
    boundary, snapshot_id = known, manifest.snapshot_id
    sequence = boundary_for_run(root, run)
    if sequence is not None and (boundary is None or sequence != boundary.sequence):
        boundary = read_boundary(root)
        if boundary.sequence < sequence:
            sequence = None  # boundaries only advance, so the root was removed between the listing and the reading
    if sequence is None or boundary is None:
        raise Fenced(
            f"{root.url} was removed, or newer runs have taken it over, while this run slept before snapshot "
            f"{snapshot_id} was confirmed; it stops and publishes nothing"
        )
    if boundary.is_tombstone:
        raise Fenced(
            f"{root.url} was deleted as a whole: snapshot {snapshot_id} will never be read; this run stops and "
            "publishes nothing. Let `stillstate delete --root` end, then start the job again"
        )
    if snapshot_id <= boundary.snapshot_id:
        raise Fenced(
            f"snapshot {snapshot_id} lies at or below the collected boundary {boundary.snapshot_id}: this run slept "
            "while others continued, and its snapshot will never be read; it stops and publishes nothing"
        )
    return boundary
