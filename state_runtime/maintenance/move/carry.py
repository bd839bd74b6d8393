"""The copying part of a copy or move, from one root to another: snapshots, oldest first, then their other documents.
`job.json` is written elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from state_runtime.base.actor import Actor
from state_runtime.base.clock import Clock
from state_runtime.base.errors import (
    InvalidConfiguration,
    JobNotFound,
    OutcomeUnknown,
    SnapshotExpired,
    StoreRefused,
    Unavailable,
)
from state_runtime.base.limits import MANIFEST_BYTES_MAX, SMALL_JSON_BYTES_MAX
from state_runtime.maintenance.copy.objects import (
    Copier,
    CopyProgress,
    create_manifest,
    needed_objects,
    outputs_below_root,
)
from state_runtime.maintenance.delete.roots import remove_debris
from state_runtime.maintenance.move.plan import MovePlan, complete_savepoints, kept_pins, live_manifests
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.document import encode_document
from state_runtime.snapshot.expiry_boundary import read_boundary, read_boundary_document
from state_runtime.snapshot.kept_pin import KeptPin, kept_pin
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.migration import encode_migration, read_migration
from state_runtime.snapshot.paths import (
    JOB_FILE,
    PUBLISHED_FILE,
    SAVEPOINTS_DIR,
    boundary_path,
    heartbeat_path,
    manifest_path,
    migration_path,
    term_path,
)
from state_runtime.snapshot.pins import unpin
from state_runtime.snapshot.savepoint_record import YOUNGER, read_record, record_path, savepoint_names
from state_runtime.snapshot.term_files import RunStatus, Term
from state_runtime.store import Created, Store

__all__ = ["ROUNDS_MAX", "Carrier", "MoveProgress", "create_document", "read_job", "stopped"]

ROUNDS_MAX = 8
"""How often a source may change while it is copied."""


@dataclass(frozen=True)
class MoveProgress:
    """Progress against the plan's numbers; objects that appear after the plan increase the total."""

    objects_done: int
    objects: int
    bytes_done: int
    bytes: int


class Carrier:
    """One execution of a plan's copying. From one thread; repeat `carry` until it finds nothing new.

    Args:
        uid: of the move.
        verified: every object is read in the target and compared.
        independent: see `Copier`.
        progress: called in the caller's thread, after each object.

    Attributes:
        snapshots, savepoints: complete in the target. expired: snapshots that expired in the source meanwhile.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        plan: MovePlan,
        uid: str,
        *,
        verified: bool,
        independent: bool,
        progress: Callable[[MoveProgress], None] | None,
        threads: int,
        actor: Actor,
    ) -> None:
        self._source, self._target, self._plan, self._uid = source, target, plan, uid
        self._verified, self._progress, self._threads = verified, progress, threads
        self._independent = independent
        self._actor, self._clock = actor, actor.clock
        self._pin: KeptPin | None = None
        self._known: dict[str, set[str]] = {}
        self.snapshots: list[int] = []
        self.savepoints: list[str] = []
        self.expired: list[int] = []
        self.objects = self.bytes = self.objects_copied = self.bytes_copied = 0

    def carry(self) -> None:
        """Copy all objects of the plan that the target does not have yet.

        Raises:
            SnapshotExpired: the only snapshot of the plan expired. JobNotFound: the whole source was deleted.
            MissingFile, CorruptData: the source is damaged. StoreUnavailable, OutcomeUnknown: repeat it.
        """
        plan = self._plan
        with self._held():
            self._carry_folder("", plan.snapshot_id or None)
        if plan.what != "root":
            return
        for folder in complete_savepoints(self._source, self._clock)[0]:
            name = folder.url.rsplit("/", 1)[-1]
            there = self._target.child(f"{SAVEPOINTS_DIR}/{name}")
            try:
                self._carry_folder(f"{SAVEPOINTS_DIR}/{name}", None)
                create_document(there, JOB_FILE, read_job(folder, self._target), folder)
            except JobNotFound:
                # Deleted meanwhile. A complete copy of it, made by an earlier attempt, stays. Any other copy can never
                # become complete.
                if not there.exists(JOB_FILE):
                    remove_debris(there, clock=self._clock, ids=self._actor.ids, threads=self._threads)
                continue
            if name not in self.savepoints:
                self.savepoints.append(name)

    def found_in_source(self) -> tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]:
        """Return the current content of the source: ids of snapshots, names of savepoints, paths of people's pins."""
        catalog = Catalog.of_root(self._source, self._clock)
        snapshots = [manifest.snapshot_id for manifest in live_manifests(catalog)]
        savepoints = [s.url.rsplit("/", 1)[-1] for s in complete_savepoints(self._source, self._clock)[0]]
        pins = [pin.path for pin in kept_pins(self._source, None, self._clock.now_ms())]
        return tuple(snapshots), tuple(savepoints), tuple(pins)

    def give_pins_up(self) -> None:
        """Remove people's pins at the source once the target has them: they move with the snapshots that they hold."""
        for folder in ["", *(f"{SAVEPOINTS_DIR}/{name}" for name in savepoint_names(self._source))]:
            source = self._source.child(folder) if folder else self._source
            target = self._target.child(folder) if folder else self._target
            for pin in kept_pins(source, self._plan.snapshot_id or None, self._clock.now_ms()):
                if target.exists(pin.path):
                    unpin(source, pin)

    # --- one folder --------------------------------------------------------------------------------------------------

    def _carry_folder(self, folder: str, only: int | None) -> None:
        source = self._source.child(folder) if folder else self._source
        target = self._target.child(folder) if folder else self._target
        if only is None:
            # Before the manifests: the target must not take an expired snapshot for a valid one either.
            self._carry_boundary(source, target)
        newest: Manifest | None = None
        copier = Copier(
            source,
            target,
            ids=self._actor.ids,
            verified=self._verified,
            independent=self._independent,
            known=self._known.setdefault(folder, set()),
            progress=self._report,
            threads=self._threads,
        )
        carried: set[int] = set()
        with copier:
            for _ in range(ROUNDS_MAX):
                for manifest in live_manifests(Catalog.of_root(source, self._clock), only):
                    if manifest.snapshot_id not in carried and self._carry_snapshot(
                        copier, source, target, manifest, only=only is not None
                    ):
                        carried.add(manifest.snapshot_id)
                        newest = manifest
                # And after them, so that snapshots that expired meanwhile are not missed in the target. This boundary
                # may keep newer snapshots than were copied.
                if only is not None or carried.issuperset(self._carry_boundary(source, target)):
                    break
            else:
                raise Unavailable(
                    f"{source.url} gave snapshots up {ROUNDS_MAX} times while newer ones were copied; repeat the copy"
                )
        self.objects += copier.objects
        self.bytes += copier.bytes
        self.objects_copied += copier.objects_copied
        self.bytes_copied += copier.bytes_copied
        for pin in kept_pins(source, only, self._clock.now_ms()):
            # Written as it was read: its holder may renew or remove it meanwhile.
            target.put(pin.path, encode_document("pin", pin))
        record = read_record(source) if only is None else None
        if record is not None:
            target.put(record_path(record.number), encode_document("savepoint", record, younger=YOUNGER))
        elif newest is not None:
            self._carry_published(source, target)
            self._carry_migration(source, target)
            if newest.term:
                self._carry_term(source, target, newest)

    @staticmethod
    def _carry_boundary(source: Store, target: Store) -> Collection[int]:
        """Copy the newest boundary; return the ids that it keeps.

        Raises:
            JobNotFound: the whole source was deleted. Unavailable: boundaries came and went; repeat the copy.
        """
        boundary, body = read_boundary_document(source)
        if boundary.is_tombstone:
            raise _gone(source, target)
        if body:
            create_document(target, boundary_path(boundary.sequence), body, source)
        return boundary.kept

    def _carry_snapshot(self, copier: Copier, source: Store, target: Store, manifest: Manifest, *, only: bool) -> bool:
        """Copy a snapshot's data, then its manifest. False if it expired meanwhile, and is one of several."""
        snapshot_id = manifest.snapshot_id
        try:
            copier.copy([*needed_objects(source, manifest).values(), *outputs_below_root(manifest)])
            body = source.read(manifest_path(snapshot_id), MANIFEST_BYTES_MAX)
        except FileNotFoundError as error:
            if read_boundary(source).keeps(snapshot_id):
                read_job(source, target)  # raises if the folder was deleted with its boundary
                raise
            if only:
                raise SnapshotExpired(
                    f"snapshot {snapshot_id} in {source.url} expired while it was copied; choose a newer one"
                ) from error
            self.expired.append(snapshot_id)
            return False
        create_manifest(target, manifest, body)
        if source is self._source and snapshot_id not in self.snapshots:
            self.snapshots.append(snapshot_id)
        return True

    def _carry_term(self, source: Store, target: Store, newest: Manifest) -> None:
        """Copy the newest snapshot's term, with a status without a live run; the target's next run counts from it."""
        number = newest.term
        try:
            body = source.read(term_path(number), SMALL_JSON_BYTES_MAX)
        except FileNotFoundError:
            body = encode_document("term", Term(number, newest.commit_id, "", 0, newest.created_at_ms))
        target.create(term_path(number), body)
        if not target.exists(heartbeat_path(number)):
            verb = "copied" if self._plan.mode == "copy" else "moved"
            term = Term(number, newest.commit_id, "", 0, newest.created_at_ms)
            status = stopped(term, newest, f"{verb} from {source.url}", self._clock)
            target.put(heartbeat_path(number), encode_document("heartbeat", status))

    @staticmethod
    def _carry_published(source: Store, target: Store) -> None:
        """Copy the record that the newest output is published: the output folder may not be copied."""
        try:
            target.put(PUBLISHED_FILE, source.read(PUBLISHED_FILE, SMALL_JSON_BYTES_MAX))
        except FileNotFoundError:
            return  # the job has no output, or its run was killed: the sinks decide

    @staticmethod
    def _carry_migration(source: Store, target: Store) -> None:
        """Copy the result of the last migration, so that the next run has the same settings. A migration that is under
        way is not copied: it belongs to the job at the source."""
        found = read_migration(source)
        if found is not None and not found.is_open:
            create_document(target, migration_path(found.number), encode_migration(found), source)

    # --- along the way -----------------------------------------------------------------------------------------------

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Pin the snapshot that must not expire while it is copied, if the source accepts pins.

        Not for a whole root that is moved: its newest snapshot never expires, and no run makes newer ones.
        """
        plan = self._plan
        newest = Catalog.of_root(self._source, self._clock).latest()
        wanted = plan.snapshot_id or (newest.snapshot_id if newest is not None else 0)
        if wanted and not (plan.mode == "move" and plan.what == "root"):
            with kept_pin(
                self._source,
                wanted,
                reason="copy",
                holder=f"{plan.mode} to {self._target.url}",
                note=self._uid,
                actor=self._actor,
                # A read-only source. The copy does not depend on the pin: each file is checked as it is copied.
                do_without=(StoreRefused, OutcomeUnknown),
            ) as self._pin:
                yield
            self._pin = None
        else:
            yield

    def _report(self, now: CopyProgress) -> None:
        if self._pin is not None:
            self._pin.beat()
        if self._progress is not None:
            objects, size = self.objects + now.objects_done, self.bytes + now.bytes_done
            self._progress(MoveProgress(objects, max(self._plan.objects, objects), size, max(self._plan.bytes, size)))


def read_job(source: Store, target: Store) -> bytes:
    """Read the bytes of `job.json`.

    Raises:
        JobNotFound: the source was deleted while it was copied.
    """
    try:
        return source.read(JOB_FILE, SMALL_JSON_BYTES_MAX)
    except FileNotFoundError as error:
        raise _gone(source, target) from error


def _gone(source: Store, target: Store) -> JobNotFound:
    return JobNotFound(
        f"{source.url} was deleted, or moved elsewhere, while it was copied; the objects in {target.url} are of no "
        "use: remove it with `stillstate delete --root`"
    )


def create_document(target: Store, path: str, body: bytes, source: Store) -> None:
    """Write a document that was read in the source.

    Raises:
        InvalidConfiguration: the target has another document at that path.
    """
    if target.create(path, body) is not Created.MINE:
        raise InvalidConfiguration(
            f"{target.url}/{path} exists and is another than in {source.url}; nothing was overwritten. Choose an empty "
            "target"
        )


def stopped(term: Term, newest: Manifest, message: str, clock: Clock) -> RunStatus:
    """Make the heartbeat of a term without a live run."""
    return RunStatus(
        term=term.term,
        run_uid=term.run_uid,
        state="stopped",
        at_ms=clock.now_ms(),
        started_at_ms=term.started_at_ms,
        heartbeat_interval_s=0.0,
        pid=term.pid,
        host=term.host,
        snapshot_id=newest.snapshot_id,
        message=message,
    )
