"""Where a run begins: at its own newest snapshot, at an older one of its own, or at a snapshot of any other root.

    look    reads only: finds the snapshot and refuses an impossible start before anything is written; also asks
            the caller whether the run may resume from it (`Decide`)
    open    writes: CLAIM takes the source over and fences it; job.json records what the job begins with; all objects
            that the snapshot needs are copied, and its manifest last: the job's first snapshot, with the id that it has
            in the source. Then a run is opened as always: term, fencing snapshot (source id + 1). The caller is asked
            again, about the exact content to resume from: another run may have committed since the look

From its first snapshot on a job needs nothing of the source, and a restart that names the same source again resumes
from the job's own newest snapshot. A restart that names another source is refused: it would resume from a state that
was not requested. A crash before the first snapshot leaves a root that has a job.json and no snapshot. The next start
takes the same snapshot of the source, and keeps the copied files. A start without `start_from` refuses such a root: it
would begin empty.

`fill` copies another root's snapshot as `open` does with NO_CLAIM, and opens no run: the copy can be examined before a
driver starts.

NO_CLAIM reads the source and, where it may write there, pins the snapshot as long as it copies. CLAIM also makes the
source the job's own: no other job runs it or starts from it (snapshot/claim.py), and it is removed after the job's
first checkpoint (maintenance/delete/claimed.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from state_runtime.base import faults
from state_runtime.base.actor import Actor
from state_runtime.base.clock import Clock
from state_runtime.base.errors import (
    InvalidConfiguration,
    JobAlreadyRunning,
    JobRootMismatch,
    MissingFile,
    MissingSnapshot,
    SnapshotExpired,
    SnapshotInUse,
    Unavailable,
    check,
)
from state_runtime.base.ids import Ids
from state_runtime.base.limits import MAX_PARALLELISM
from state_runtime.driver.go_back import bringing, brought_content, past_of
from state_runtime.driver.integrity import newest_intact, newest_intact_savepoint, refuse_cut_copy
from state_runtime.maintenance.copy.objects import CopyProgress, copy_snapshot
from state_runtime.maintenance.delete.claimed import ClaimEnding
from state_runtime.snapshot.catalog import Catalog, read_job_info
from state_runtime.snapshot.claim import Claim, claim_root, read_claim, refuse_if_claimed
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.expiry_boundary import place_of_newest_run, read_boundary
from state_runtime.snapshot.fencing import open_job_root, open_run, refuse_if_live
from state_runtime.snapshot.handover import refuse_if_handed_over
from state_runtime.snapshot.job_info import ClaimMode, JobInfo, StartedFrom
from state_runtime.snapshot.kept_pin import KeptPin, kept_pin
from state_runtime.snapshot.lineage import check_belongs, gone_back, pending_outputs, taken_over
from state_runtime.snapshot.locate import OpenedSnapshot, Place, open_snapshot
from state_runtime.snapshot.manifest import Manifest, StagedOutput
from state_runtime.snapshot.paths import savepoint_path
from state_runtime.snapshot.pins import read_pins
from state_runtime.snapshot.publication_log import is_published
from state_runtime.snapshot.savepoint_record import read_record, read_savepoint
from state_runtime.snapshot.term_files import newest_term, write_stopped
from state_runtime.store import Store, open_store

__all__ = ["Decide", "StartFrom", "StartPosition"]

_LOG = logging.getLogger(__name__)

Decide = Callable[[Manifest | None, JobInfo | None], None]
"""Raises to refuse a content that a run must not resume from. Called with the content, which has the newest snapshot's
id and the output that the run would publish first (None: the job begins empty), and with the job's identity if it has
one."""


@dataclass(frozen=True)
class StartFrom:
    """A snapshot of another root, and its owner once the job has begun with it.

    Attributes:
        place: `<store>/<job>` (its newest snapshot), `<store>/<job>@<id>`, or the folder of a savepoint.
        mode: "NO_CLAIM" leaves the source as it is. "CLAIM" takes it over: it is removed after the job's first
            checkpoint.
        storage_options: for fsspec; None takes those of the job's own store. Never stored, never shown.
    """

    place: str
    mode: ClaimMode = "NO_CLAIM"
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)


class StartPosition:
    """The start of one run.

    Life cycle: made → `look` (reads) → `open` or `fill` (write); each once.

    Args:
        catalog: of the job that begins.
        start_from: where a job without a snapshot begins; for a job with snapshots it must be the place that the job
            began with.
        from_snapshot: an older snapshot of the job's own to go back to: its id, or the name of a savepoint.
        storage_options: of the job's own store.
        on_copy: called while the source is copied, after each object.

    Attributes:
        info: of the job, after `look`; None if it has no root yet.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        start_from: StartFrom | None = None,
        from_snapshot: int | str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        clock: Clock,
        ids: Ids,
        on_copy: Callable[[CopyProgress], None] | None = None,
    ) -> None:
        self._catalog = catalog
        self._root = catalog.root
        self._start = start_from
        self._savepoint = from_snapshot if isinstance(from_snapshot, str) else ""
        self._from_snapshot = from_snapshot if isinstance(from_snapshot, int) else None
        self._past: tuple[Manifest, Store] | None = None
        self._storage_options = storage_options
        self._clock = clock
        self._ids = ids
        self._on_copy = on_copy
        self._decide: Decide | None = None
        self._withdraw: Collection[str] = ()
        self._own: Manifest | None = None
        self._source: OpenedSnapshot | None = None
        self.info: JobInfo | None = None

    # --- looking -------------------------------------------------------------------------------------------------

    def look(self, decide: Decide | None = None) -> Manifest | None:
        """Return the content that the run will resume from; None if the job begins empty. Nothing is written.

        Args:
            decide: asked about that content now, and in `open` about the content that is then really used.

        Raises:
            the errors of `decide`.
            SnapshotInUse: the job's root, or the source, was claimed; or the source cannot be claimed now: its holder
                is named. Or an import, a move or a conversion fills the root, or was cut while it did.
            JobRootMismatch: files of two roots were mixed.
            InvalidConfiguration, MissingSnapshot, JobNotFound: there is no such snapshot, or the job was begun with
                another.
            CorruptManifest, UnsupportedFormat, StoreUnavailable: see `Catalog.latest`.
        """
        self._decide = decide
        found = self._look()
        if decide is not None:
            decide(found, self.info)
        return found

    def _look(self) -> Manifest | None:
        refuse_if_claimed(self._root)
        info = self.info = read_job_info(self._root)
        refuse_if_handed_over(self._root)
        goes_back = self._from_snapshot is not None or bool(self._savepoint)
        own = self._own = self._catalog.latest_to_go_back_from() if goes_back else self._catalog.latest()
        if own is not None:
            if info is None:
                raise JobRootMismatch(
                    f"{self._root.url} has snapshots and no job.json: it was not copied whole, or a run that slept "
                    "while the job was "
                    "deleted or moved left them. Restore it from a copy, or remove the folder to start an empty job"
                )
            check_belongs(own, info, self._root.url, own=True)
            if self._start is not None:
                self._refuse_another_beginning(self._start, info)
                _LOG.info(
                    "job %r has snapshots of its own and goes on from the newest; it does not start from %s again",
                    info.name,
                    self._start.place,
                )
            if self._savepoint:
                self._choose_savepoint(own)
            elif not goes_back:
                self._pass_over_what_a_copy_lacks(own, info)
            return self._looked_back(own)
        if goes_back:
            raise MissingSnapshot(f"job {self._catalog.job!r} in {self._root.url} has no snapshot yet to go back to")
        if self._start is None:
            if info is not None and info.started_from is not None:
                raise self._unfinished(info.started_from)
            self._refuse_remains()
            return None
        source = self._source = self._find(self._start, info)
        return replace(source.manifest, outputs=self._outputs(source))

    def _refuse_another_beginning(self, start: StartFrom, info: JobInfo) -> None:
        """Refuse, for a job with snapshots, any place but the one that it began with. That one is accepted, because a
        file or a script names it at each start.

        The place is compared by its name alone: the source may be gone by now, or have newer snapshots.
        """
        began = info.started_from
        place = Place.parse(start.place)
        if began is not None:
            same_place = open_store(place.root_url, self._source_options()).url == began.place
            if same_place and place.snapshot_id in (None, began.snapshot_id) and start.mode == began.mode:
                return
        raise InvalidConfiguration(
            f"job {info.name!r} in {self._root.url} has snapshots of its own, so it cannot begin with {start.place} "
            f"({start.mode}); it began {f'with {began}' if began is not None else 'without one'}. Nothing was changed. "
            "To go on from its newest snapshot, leave --from (or start_from in the file) out. To go back, in place, to "
            f"a savepoint or a copy of this job: `stillstate rollback {info.name} {start.place}`; to an older snapshot "
            "of its own also: --from-snapshot ID. To begin a new job from that place, give it a name of its own, or "
            "first remove this one with `stillstate delete --root`. (The place that it began with may be named in "
            "start_from.)"
        )

    def _refuse_remains(self) -> None:
        """Refuse a root that has data and no snapshot: every run commits a snapshot before it writes data.

        It is a copy without its `snapshots/`, or left by an import of an earlier version. To begin empty here would
        look as if the job had no state.
        """
        folders = sorted({"changelog", "files", "tables"} & set(self._root.list_names("")))
        if not folders or read_boundary(self._root).is_tombstone:
            return
        found = next((o.path for folder in folders for o in self._root.list_objects(folder)), None)
        if found is not None:
            raise MissingSnapshot(
                f"{self._root.url} holds data ({found}) and no snapshot that names it, so this job would begin empty "
                "and its state would be lost to it. If the folder was copied or restored, copy its snapshots/ too; if "
                "an import was cut here, repeat the import; else remove the folder to start an empty job"
            )

    def _choose_savepoint(self, own: Manifest) -> None:
        """Go back to the content of a savepoint of the job.

        Raises:
            MissingSnapshot, JobNotFound: no savepoint has that name. SnapshotInUse: it is not complete.
            JobRootMismatch, InvalidConfiguration: it is no past of this job.
        """
        read_savepoint(self._root, self._savepoint)  # raises the error for an unknown name
        opened = open_snapshot(self._root.child(savepoint_path(self._savepoint)), None, self._clock)
        self._past = past_of(self._catalog, opened, own), opened.root

    def _pass_over_what_a_copy_lacks(self, own: Manifest, info: JobInfo) -> None:
        """Go back, in a folder that was copied while its job ran, to the newest snapshot that has all its objects. It
        may be a savepoint's.

        This applies only if the folder is at another place than at its newest run. Files that are missing in place are
        damage, and such a snapshot is never skipped.

        Raises:
            MissingFile: every snapshot lacks objects.
        """
        place = place_of_newest_run(self._root)
        if place == self._root.url:
            return
        whole = newest_intact(self._catalog)
        if whole is not None and whole.snapshot_id == own.snapshot_id:
            return
        least = whole.snapshot_id if whole is not None else 0
        savepoint = newest_intact_savepoint(self._catalog, info.uid, above=least, until=own.snapshot_id)
        if savepoint is not None:
            self._past = brought_content(savepoint.manifest), savepoint.root
        elif whole is not None:
            self._from_snapshot = whole.snapshot_id
        else:
            raise MissingFile(
                f"no snapshot in {self._root.url} is whole: files that it needs are missing. The folder was copied "
                f"from elsewhere ({place or 'unknown'}); copy it again, snapshots/ first and everything else after it. "
                "`stillstate verify` names the files"
            )
        found = savepoint.manifest if savepoint is not None else whole
        _LOG.warning(
            "job %r in %s was copied from %s while it ran: files of snapshot %d are missing here. It goes back to "
            "snapshot %d, the newest one that is whole%s",
            info.name,
            self._root.url,
            place or "elsewhere",
            own.snapshot_id,
            found.snapshot_id if found is not None else 0,
            f", in the savepoint {savepoint.root.url}" if savepoint is not None else "",
        )

    def _looked_back(self, own: Manifest) -> Manifest:
        if self._past is not None:
            return replace(gone_back(self._past[0], own), snapshot_id=own.snapshot_id)
        wanted = self._from_snapshot
        if wanted is None:
            return own
        if not read_boundary(self._root).keeps(wanted):
            raise SnapshotExpired(f"snapshot {wanted} of job {self._catalog.job!r} has expired; choose a newer one")
        # The id is the newest's: the pipeline is reconciled with this content as of the run's first epoch.
        return replace(gone_back(self._catalog.manifest(wanted), own), snapshot_id=own.snapshot_id)

    def _unfinished(self, started: StartedFrom) -> InvalidConfiguration:
        return InvalidConfiguration(
            f"job {self._catalog.job!r} in {self._root.url} was begun from {started} and has no snapshot yet; it does "
            "not begin empty. Start it from there again: the copied objects are kept. Or remove that folder to start "
            "an empty job"
        )

    def _find(self, start: StartFrom, info: JobInfo | None) -> OpenedSnapshot:
        place = Place.parse(start.place)
        root = open_store(place.root_url, self._source_options())
        if root.url == self._root.url:
            raise InvalidConfiguration(
                f"job {self._catalog.job!r} cannot start from itself; to go back to one of its snapshots, name its id "
                "(--from-snapshot)"
            )
        recorded = info.started_from if info is not None else None
        if info is not None and recorded is None:
            raise InvalidConfiguration(
                f"job {info.name!r} in {self._root.url} was begun empty and has no snapshot yet. If no driver is about "
                "to start it, remove its job.json, and start it again"
            )
        wanted = recorded.snapshot_id if recorded is not None and place.snapshot_id is None else place.snapshot_id
        try:
            source = open_snapshot(root, wanted, self._clock)
            if not read_boundary(root).keeps(source.manifest.snapshot_id):
                raise SnapshotExpired(
                    f"snapshot {source.manifest.snapshot_id} in {root.url} has expired; choose a newer one"
                )
        except MissingSnapshot as error:
            if recorded is None:
                raise
            raise type(error)(f"{error}. {self._unfinished(recorded)}") from error
        if source.info.max_parallelism != MAX_PARALLELISM:
            raise InvalidConfiguration(
                f"{root.url} was created with max_parallelism {source.info.max_parallelism}, and this version has "
                f"{MAX_PARALLELISM}: keys would belong to other shards. Nothing was changed"
            )
        if recorded is not None and not _is_same(recorded, self._started_from(source)):
            raise self._unfinished(recorded)
        self._refuse_if_held(source, info)
        _refuse_if_unfinished(source)
        return source

    def _refuse_if_held(self, source: OpenedSnapshot, info: JobInfo | None) -> None:
        if not self._claims:
            refuse_if_claimed(source.root)
            return
        claim = read_claim(source.root)
        if claim is not None:
            # Claimed by this job, in an attempt that did not end; or by another job.
            mine = info.uid if info is not None else claim.job_uid if claim.place == self._root.url else ""
            refuse_if_claimed(source.root, by=mine)
            return
        try:
            refuse_if_live(source.catalog, self._clock)
        except JobAlreadyRunning as error:
            raise SnapshotInUse(f"{source.root.url} cannot be claimed: {error}") from error
        now_ms = self._clock.now_ms()
        for pin in read_pins(source.root):
            own = info is not None and pin.reason == "start" and pin.note == info.uid
            if pin.snapshot_id == source.manifest.snapshot_id and not pin.is_void(now_ms) and not own:
                raise SnapshotInUse(
                    f"{source.place} cannot be claimed: it is pinned ({pin.reason}) for {pin.holder}. Take the pin off "
                    "first, or start with NO_CLAIM, which leaves the snapshot as it is"
                )

    # --- opening -------------------------------------------------------------------------------------------------

    def open(
        self,
        empty: Callable[[JobInfo], Manifest],
        *,
        host: str,
        pid: int,
        process_space: str = "",
        clock: Clock | None = None,
        withdraw: Collection[str] = (),
    ) -> Committer:
        """Begin the run; the job has a fencing snapshot when it returns. Repeat it after an error or a crash.

        Args:
            empty: returns the content of a job that begins with nothing.
            host, pid, process_space: the run's process, see `Actor`.
            clock: for processing time and the dates of the run's snapshots, if it is another one.
            withdraw: see `open_run`.

        Raises:
            the errors of `decide` of `look`: the run may not resume from what others have committed since. No older run
                of the job was fenced. With CLAIM the source is claimed by then, for this job's next attempt.
            SnapshotInUse: another job has claimed the source meanwhile.
            SnapshotExpired, MissingFile, CorruptData: the source expired meanwhile, or is damaged; the job has no
                snapshot.
            Fenced, StoreUnavailable, OutcomeUnknown: see `open_run` and `copy_snapshot`.
        """
        actor = Actor(clock or self._clock, self._ids, host, pid, process_space)
        self._withdraw = withdraw
        source = self._source
        if source is None:
            info = open_job_root(self._root, self._catalog.job, clock=self._clock, ids=self._ids)
            if self._own is None and info.started_from is not None and self._catalog.latest() is None:
                raise self._unfinished(info.started_from)
            if self._past is not None:
                return self._open_past(*self._past, info, empty, actor)
            if self._from_snapshot is None:
                return self._open_run(info, empty, actor)
            # Pinned until the fencing snapshot names the objects that it needs.
            with self._pinned(self._root, self._from_snapshot, info, actor):
                return self._open_run(info, empty, actor)
        uid = ""
        refuse_cut_copy(source)
        if self._claims:
            uid, source = self._take_over(source, actor)
            faults.reach("start-claimed")
            if self._decide is not None:
                # Asked before job.json records what the job begins with: the source may have ended meanwhile with a
                # snapshot that the caller does not resume from.
                self._decide(replace(source.manifest, outputs=self._outputs(source)), self.info)
        return self._open_run(self._bring(source, uid, actor), empty, actor)

    def fill(self, uid: str, *, host: str, pid: int) -> JobInfo:
        """Give the job the snapshot of another root that `look` has found as its first snapshot, without a run. Repeat
        it after an error or a crash at any point.

        Args:
            uid: of a new job.

        Returns:
            The job, which has a snapshot now. If its uid is not the given one, another start has begun it.

        Raises:
            the errors of `open` before it opens a run.
        """
        check(self._start is not None and not self._claims, "a root is filled from another one, which stays")
        if self._source is not None:
            refuse_cut_copy(self._source)
            return self._bring(self._source, uid, Actor(self._clock, self._ids, host, pid))
        # An earlier attempt has already finished.
        check(self.info is not None, "a job that has a snapshot has a job.json")
        assert self.info is not None
        return self.info

    def _bring(self, source: OpenedSnapshot, uid: str, actor: Actor) -> JobInfo:
        """Copy everything that a snapshot of another root needs, and its manifest last."""
        started = self._started_from(source)
        info = open_job_root(
            self._root, self._catalog.job, clock=self._clock, ids=self._ids, uid=uid, started_from=started
        )
        if info.started_from != started:
            source = self._agreed(info, source)
            started = self._started_from(source)
        faults.reach("start-recorded")
        rewritten = taken_over(source.manifest, started, info, self._outputs(source))
        # A source may be read-only. The copy checks each file, so it notices if the snapshot expires meanwhile.
        with self._pinned(source.root, source.manifest.snapshot_id, info, actor, do_without=(Unavailable,)) as kept:

            def copied(progress: CopyProgress) -> None:
                kept.beat()
                faults.reach("start-object-copied")
                if self._on_copy is not None:
                    self._on_copy(progress)

            copy_snapshot(
                source.root,
                source.manifest,
                self._root,
                rewrite=lambda _: rewritten,
                progress=copied,
                clock=self._clock,
                ids=self._ids,
            )
        faults.reach("start-copied")
        return info

    def ending(self, info: JobInfo, owner: str) -> ClaimEnding | None:
        """Return the removal of the root that the job has claimed, once it has a checkpoint; None without a claim.

        Args:
            owner: the process that removes it, `host:pid`.
        """
        started = info.started_from
        if started is None or started.mode != "CLAIM":
            return None
        options = self._source_options()
        return ClaimEnding(lambda: open_store(started.place, options), info.uid, owner, Actor(self._clock, self._ids))

    def _source_options(self) -> Mapping[str, Any] | None:
        given = self._start.storage_options if self._start is not None else None
        return given if given is not None else self._storage_options

    def _pinned(
        self,
        root: Store,
        snapshot_id: int,
        info: JobInfo,
        actor: Actor,
        do_without: tuple[type[Unavailable], ...] = (),
    ) -> AbstractContextManager[KeptPin]:
        # The note is the job's uid: a repeated start, and the end of a claim, find the pins of killed runs by it.
        return kept_pin(
            root,
            snapshot_id,
            reason="start",
            holder=f"the start of job {info.name!r} ({self._root.url})",
            note=info.uid,
            actor=actor,
            do_without=do_without,
        )

    def _open_past(
        self,
        content: Manifest,
        source: Store,
        info: JobInfo,
        empty: Callable[[JobInfo], Manifest],
        actor: Actor,
    ) -> Committer:
        """Resume from a savepoint's content, which is copied into the root first, as a rollback does."""
        with bringing(source, self._root, content, actor, self._on_copy):
            faults.reach("start-copied")
            return self._open_run(info, empty, actor, content)

    def _open_run(
        self, info: JobInfo, empty: Callable[[JobInfo], Manifest], actor: Actor, past: Manifest | None = None
    ) -> Committer:
        decide = self._decide
        return open_run(
            self._catalog,
            info,
            empty(info),
            actor=actor,
            back_to=past if past is not None else self._from_snapshot,
            decide=(lambda content: decide(content, info)) if decide is not None else None,
            withdraw=self._withdraw,
        )

    @property
    def _claims(self) -> bool:
        return self._start is not None and self._start.mode == "CLAIM"

    def _started_from(self, source: OpenedSnapshot) -> StartedFrom:
        manifest = source.manifest
        mode: ClaimMode = "CLAIM" if self._claims else "NO_CLAIM"
        return StartedFrom(
            place=source.root.url,
            job=source.info.name,
            job_uid=manifest.job_uid,
            snapshot_id=manifest.snapshot_id,
            commit_id=manifest.commit_id,
            mode=mode,
        )

    def _outputs(self, source: OpenedSnapshot) -> tuple[StagedOutput, ...]:
        """Return the output that the claimed job may have left unpublished. A savepoint, or another folder in which no
        job ever ran, has none."""
        if not self._claims or newest_term(source.root) == 0:
            return ()
        pending = pending_outputs(source.manifest, source.catalog.latest() or source.manifest)
        return () if is_published(source.root, pending) else pending

    def _take_over(self, source: OpenedSnapshot, actor: Actor) -> tuple[str, OpenedSnapshot]:
        """Claim the source, and fence its runs: data read from it after that is final.

        Returns:
            The uid of this job, and the source with the snapshot to start from.
        """
        info = read_job_info(self._root)
        held = read_claim(source.root)
        if info is not None and held is None:
            raise SnapshotInUse(
                f"the claim on {source.root.url} was taken back since job {info.name!r} began to start from it, so its "
                f"job may have gone on. Remove {self._root.url}, which has no snapshot, and start again"
            )
        again = held is not None and held.place == self._root.url
        uid = info.uid if info is not None else held.job_uid if held is not None and again else self._ids.uid()
        claim = Claim(self._catalog.job, uid, self._root.url, self._clock.now_ms())
        claim_root(source.root, claim)
        if info is not None or newest_term(source.root) == 0:
            return uid, source
        faults.reach("source-claimed")
        opened = open_run(
            source.catalog,
            source.info,
            source.manifest,
            actor=actor,
            claimed_by=uid,
        )
        write_stopped(source.root, opened.term, opened.last.snapshot_id, f"claimed by {claim}", self._clock)
        asked_for = Place.parse(self._start.place).snapshot_id if self._start is not None else None
        return uid, replace(source, manifest=opened.last) if asked_for is None else source

    def _agreed(self, info: JobInfo, source: OpenedSnapshot) -> OpenedSnapshot:
        """Return the source with the snapshot that a concurrent start of this job has begun with."""
        recorded = info.started_from
        asked_for = Place.parse(self._start.place).snapshot_id if self._start is not None else None
        if recorded is None:
            raise InvalidConfiguration(
                f"job {info.name!r} was begun empty by another start at the same time; start it again"
            )
        if not _is_same(recorded, self._started_from(source)) and asked_for is not None:
            raise self._unfinished(recorded)
        agreed = open_snapshot(source.root, recorded.snapshot_id, self._clock)
        if not _is_same(recorded, self._started_from(agreed)):
            raise self._unfinished(recorded)
        return agreed


def _refuse_if_unfinished(source: OpenedSnapshot) -> None:
    """Refuse a savepoint that is not complete yet, or that is being deleted."""
    record = read_record(source.root)
    if record is not None and record.state != "COMPLETED":
        raise SnapshotInUse(
            f"{source.place} is a savepoint that is {record.state}, owned by {record.owner}; start from it once it is "
            "COMPLETED"
        )


def _is_same(one: StartedFrom, other: StartedFrom) -> bool:
    """Return whether both are one snapshot, taken in one mode, even if its root has moved."""
    return replace(one, place="") == replace(other, place="")
