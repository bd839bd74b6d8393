"""Migrations of a job: the record of one while it is under way, and the settings of a run that follow from it.

    migrations/<20-digit number>.json     create-if-absent; the newest counts, and has all known facts

A document is one step of a migration, and is written *before* that step's effect. So after a crash at any point the
newest one says which effect may have happened, and the next owner repeats it: each effect may be repeated. Documents
are only ever created. If two processes migrate one job at once, or continue one migration at once, the first to create
the next number wins, and the other one stops before its effect.

    save ──▶ verify ──▶ (go-back ──▶) start ──▶ watch ──▶ kept
      │         │           │           │         │
      │         │           └───────────┴─────────┴──▶ stop-new ──▶ restore ──┐
      └─────────┴────────────────────────────────────────────────────────▶ start-old ──▶ rolled-back

A migration to another store records its steps in the old root until `move`, and in the new one from `start` on. The
newest document of the old root is copied to the new one before the new one counts. From `start-old` on the steps are in
the old root again:

    save ──▶ verify ──▶ move ──▶ start ──▶ watch ──▶ leave ──▶ kept
      │         │         │        │         │
      │         │         │        └─────────┴──▶ stop-new ──▶ go-home ──┐   (go-home ──▶ leave, if it has committed)
      └─────────┴─────────┴──────────────────────────────────────▶ start-old ──▶ rolled-back

A fork is a job that begins beside another one with that one's state. All of its documents are in its own root; `save`
is left out if nothing is saved for it:

    save ──▶ copy ──▶ verify ──▶ start ──▶ watch ──▶ kept
      │        │         │         │         │
      │        │         │         └─────────┴──▶ stop-new ──┐   (clear ──▶ kept, if it has committed)
      └────────┴─────────┴───────────────────────────────────┴──▶ clear ──▶ rolled-back

The newest document also has the parallelism and the backend of every run that starts: from `start` on the requested
ones; before that, and once the migration goes back, those that the job had. They are permanent: the job runs with them
until its next migration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from state_runtime.base.clock import Clock
from state_runtime.base.errors import SnapshotInUse, StillstateError, check
from state_runtime.base.limits import MIGRATION_REASON_CHARS_MAX, SMALL_JSON_BYTES_MAX
from state_runtime.base.settings import VerifyLevel
from state_runtime.snapshot.create_once import Proposal, create_next, read_newest
from state_runtime.snapshot.document import decode_document, encode_document
from state_runtime.snapshot.paths import MIGRATIONS_DIR, migration_path, sequence_of
from state_runtime.store import Created, Store

__all__ = [
    "FOLLOWING",
    "Migration",
    "MigrationStep",
    "RunSettings",
    "begin_migration",
    "carry_migration",
    "encode_migration",
    "newest_migration",
    "read_migration",
    "record_step",
    "take_migration_over",
]

MigrationStep = Literal[
    "save",
    "verify",
    "move",
    "copy",
    "go-back",
    "start",
    "watch",
    "leave",
    "kept",
    "stop-new",
    "restore",
    "go-home",
    "start-old",
    "clear",
    "rolled-back",
]

FOLLOWING: Final[dict[MigrationStep, tuple[MigrationStep, ...]]] = {
    "save": ("verify", "copy", "start-old", "clear"),
    "verify": ("move", "go-back", "start", "start-old", "clear"),
    "move": ("start", "start-old"),
    "copy": ("verify", "clear"),
    "go-back": ("start", "stop-new"),
    "start": ("watch", "stop-new"),
    "watch": ("leave", "kept", "stop-new"),
    "leave": ("kept",),
    "kept": (),
    "stop-new": ("restore", "go-home", "clear"),
    "restore": ("start-old",),
    "go-home": ("leave", "start-old"),
    "start-old": ("rolled-back",),
    "clear": ("kept", "rolled-back"),
    "rolled-back": (),
}
"""The steps that may follow each step."""

_YOUNGER: Final = {"fork_of": "", "fork_at": "", "owner_space": "", "accept_session_settings": False}
"""Fields that earlier versions do not know, with the value at which they are not written."""
_WITH_TARGET: Final = frozenset({"start", "watch", "leave", "kept"})


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run that change by migration.

    Attributes:
        parallelism: 0: the value of the file or of the job.
        backend: empty: the value of the file or of the job.
    """

    parallelism: int = 0
    backend: Literal["", "arrow", "rocksdb"] = ""

    def __str__(self) -> str:
        return f"parallelism {self.parallelism or 'as it was'}, backend {self.backend or 'as it was'}"


@dataclass(frozen=True, kw_only=True)
class Migration:
    """One step of a migration, and the facts known by then.

    Attributes:
        uid: of the migration; all of its documents have it.
        number: of the document; also in its name.
        step: the step whose effect comes next; `kept` and `rolled-back` have no effect.
        at_ms: when the document was written. began_ms: when the first one was.
        owner: the process that works on it, `host:pid`. owner_space: where that number is one process
            (base/process_space.py); or empty.
        before, target: settings before it and after it.
        was_running: whether the job ran, or should have run, at the begin; False once a user has stopped its new run.
        go_back_to: a place (snapshot/locate.py) that the job is taken back to before the new run starts; or empty.
        savepoint: the name of the savepoint that it makes, and goes back to.
        checkpoints: number of checkpoints of the new run to wait for.
        timeout_s: how long to wait for them.
        verify: how much of the savepoint is read before the new run starts.
        snapshot_id: of the savepoint; 0 until it is made.
        stopped_term: the newest run when the job was stopped; a newer one is a run of this migration.
        run_term: of the new run; once that run was abandoned, the newest term then.
        deadline_ms: when the new run must have made its checkpoints; 0 until it is watched.
        reason: one line for people: why it was kept, or taken back.
        from_root, to_root: URLs of the root that the job is moved from, and to; empty: it stays where it is.
        fork_of: name of the job whose state this one begins with; empty: it is no fork. Then `savepoint` is one of that
            job, or empty, and `uid` is also the uid that the new job gets.
        fork_at: of a fork, the place (snapshot/locate.py) that it begins with.
        accept_session_settings: its runs start although settings of Spark's session that change results are others
            than in the snapshot; the run that it goes back to as well, which has the file's settings too.
    """

    uid: str
    number: int
    step: MigrationStep
    at_ms: int
    began_ms: int
    owner: str
    before: RunSettings
    target: RunSettings
    was_running: bool
    savepoint: str
    checkpoints: int
    timeout_s: float
    verify: VerifyLevel = "full"
    go_back_to: str = ""
    snapshot_id: int = 0
    stopped_term: int = 0
    run_term: int = 0
    deadline_ms: int = 0
    reason: str = ""
    from_root: str = ""
    to_root: str = ""
    fork_of: str = ""
    fork_at: str = ""
    owner_space: str = ""
    accept_session_settings: bool = False

    @property
    def is_open(self) -> bool:
        """Whether a process should be at work on it."""
        return self.step not in ("kept", "rolled-back")

    @property
    def is_tried(self) -> bool:
        """Whether a run that starts now is the new one; its result decides if the migration is kept or taken back."""
        return self.step in ("start", "watch")

    @property
    def settings(self) -> RunSettings:
        """The settings with which a run starts now."""
        return self.target if self.step in _WITH_TARGET else self.before

    @property
    def what(self) -> str:
        """The name of the migration, for people."""
        if self.fork_of:
            return f"the fork of job {self.fork_of!r} at {self.fork_at}"
        return f"the migration to {self.target}" + (f" in {self.to_root}" if self.to_root else "")

    def __str__(self) -> str:
        return f"{self.what} (step {self.step!r}, by {self.owner})"


def newest_migration(root: Store) -> int:
    """Return the number of the newest document; 0 if the job was never migrated."""
    return max((n for n in map(sequence_of, root.list_names(MIGRATIONS_DIR)) if n is not None), default=0)


def read_migration(root: Store) -> Migration | None:
    """Read the newest step of the newest migration of a job; None if it was never migrated.

    Raises:
        CorruptManifest, UnsupportedFormat: it cannot be read: the settings of the job's runs are unknown.
    """

    def read(number: int) -> Migration:
        path = migration_path(number)
        return decode_document("migration", Migration, root.read(path, SMALL_JSON_BYTES_MAX), f"{root.url}/{path}")

    return read_newest(lambda: newest_migration(root), read, f"the newest migration in {root.url}")


def begin_migration(root: Store, first: Migration) -> Migration:
    """Record the first step. Atomic: of several that begin, one does.

    Args:
        first: its number does not matter.

    Raises:
        SnapshotInUse: another migration is under way. OutcomeUnknown: this one may be; read it again.
    """

    def propose() -> Proposal[Migration]:
        newest = read_migration(root)
        if newest is not None and newest.is_open:
            raise SnapshotInUse(
                f"{root.url}: {newest} is under way. To go on with it after a crash: `stillstate migrate JOB --resume`"
            )
        return _proposal(replace(first, number=1 + (newest.number if newest is not None else 0)))

    lost = SnapshotInUse(f"{root.url}: other migrations began at the same time; look at `stillstate jobs`")
    return create_next(root, propose, contended=lambda: lost)


def record_step(root: Store, last: Migration, step: MigrationStep, clock: Clock, **changes: Any) -> Migration:
    """Record the next step of a migration; `last` is the step that its owner has recorded before.

    Raises:
        SnapshotInUse: another process continues it; the owner stops and has no further effect.
        OutcomeUnknown: it may be recorded; read it again.
    """
    check(step in FOLLOWING[last.step], f"a migration cannot go from {last.step} to {step}")
    reason = str(changes.pop("reason", last.reason))[:MIGRATION_REASON_CHARS_MAX]
    following = replace(last, number=last.number + 1, step=step, at_ms=clock.now_ms(), reason=reason, **changes)
    return _create(root, last, following)


def take_migration_over(
    root: Store, last: Migration, owner: str, clock: Clock, space: str = "", *, accept_session_settings: bool = False
) -> Migration:
    """Become the owner of a migration whose owner is gone. Atomic: of several that try, one does.

    Args:
        accept_session_settings: from now on; what was accepted before stays accepted.

    Raises:
        SnapshotInUse: another process was quicker. OutcomeUnknown: read it again.
    """
    check(last.is_open, "a migration that has ended cannot be continued")
    taken = replace(
        last,
        number=last.number + 1,
        owner=owner,
        owner_space=space,
        at_ms=clock.now_ms(),
        accept_session_settings=last.accept_session_settings or accept_session_settings,
    )
    return _create(root, last, taken)


def encode_migration(migration: Migration) -> bytes:
    """Return the bytes of a step's document."""
    return encode_document("migration", migration, younger=_YOUNGER)


def carry_migration(root: Store, migration: Migration) -> None:
    """Copy the newest step to the root that a job is moved to; the migration continues there. Repeated, it changes
    nothing.

    Raises:
        SnapshotInUse: another process has continued it there.
    """
    if newest_migration(root) > migration.number:
        raise SnapshotInUse(f"{root.url}: somebody else goes on with {migration}; this process stops")
    if root.create(migration_path(migration.number), encode_migration(migration)) is not Created.MINE:
        raise SnapshotInUse(f"{root.url}: somebody else goes on with {migration}; this process stops")


def _create(root: Store, last: Migration, following: Migration) -> Migration:
    def propose() -> Proposal[Migration] | None:
        return _proposal(following) if newest_migration(root) == last.number else None

    def lost() -> StillstateError:
        return SnapshotInUse(
            f"{root.url}: somebody else goes on with {last}; this process stops, and changes nothing more"
        )

    # One attempt: the loser has to read the winner's record first.
    made = create_next(root, propose, contended=lost, attempts_max=1)
    if made is None:
        raise lost()
    return made


def _proposal(migration: Migration) -> Proposal[Migration]:
    return Proposal(migration_path(migration.number), encode_migration(migration), migration)
