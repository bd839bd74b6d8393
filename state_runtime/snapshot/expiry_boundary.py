"""The boundary: which snapshots were given up; the one place where a snapshot ends to exist.

    boundary/<20-digit sequence>.json     create-if-absent; the newest counts, older ones are history
    boundary/run-<term>-<run uid>         a run's own mark, written as it starts; goes with the root, or when newer runs
                                          have taken over

A boundary says: of the ids up to `snapshot_id` only those in `kept` are snapshots, now and for ever. Deleting a
snapshot is writing the next boundary without it; what it leaves in the store is removed after that, in any order, as
often as it takes. Readers pass over whatever else lies there: a manifest that is being removed, or one that a sleeper
created anew under a collected name (a store forgets deleted names; RFC 0026 of SlateDB). A committer looks after its
create: an id at or below the boundary is lost.

A snapshot is given up in two steps, because a pin may be placed at the same moment (snapshot/pins.py):

    kept ──announce──▶ going ──settle──▶ gone        pinned meanwhile: going ──settle──▶ kept

One that is `going` is no snapshot any more, and all that it needs is still there; whoever settles it looks at the pins
after it was announced. Nobody touches the data of one that is not gone, and nothing comes back that is. So two
collectors may do any of this at once: they agree through create-if-absent of the next sequence, and the loser reads
again and decides again.

A *tombstone* gives a whole root up: no id is kept, and none that a run still commits will be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from state_runtime.base.clock import Clock
from state_runtime.base.errors import Unavailable, check
from state_runtime.base.ids import Ids
from state_runtime.base.limits import BOUNDARY_BYTES_MAX, CLAIM_ATTEMPTS_MAX, SMALL_JSON_BYTES_MAX
from state_runtime.snapshot.create_once import Proposal, create_next, read_newest
from state_runtime.snapshot.document import decode_document, encode_document
from state_runtime.snapshot.paths import (
    BOUNDARY_DIR,
    SNAPSHOT_ID_MAX,
    boundary_path,
    run_mark_path,
    run_mark_term,
    sequence_of,
)
from state_runtime.snapshot.term_files import Term
from state_runtime.store import Store

__all__ = [
    "NO_BOUNDARY",
    "ExpiryBoundary",
    "advance_boundary",
    "boundary_for_run",
    "leave_mark",
    "newest_boundary_sequence",
    "place_of_newest_run",
    "read_boundary",
    "read_boundary_document",
    "remove_older_marks",
    "take_back_boundary",
]


@dataclass(frozen=True)
class ExpiryBoundary:
    """What was given up.

    Attributes:
        sequence: its number; 0 is the boundary of a root where nothing was ever given up.
        snapshot_id: up to here only `kept` ones are snapshots. Never falls; reaches the newest snapshot only as a
            tombstone.
        kept: ascending.
        uid: drawn by the writer, so that it recognises its own.
        going: announced and not settled, ascending.
    """

    sequence: int
    snapshot_id: int
    kept: tuple[int, ...]
    at_ms: int
    uid: str
    going: tuple[int, ...] = ()

    @property
    def is_tombstone(self) -> bool:
        """Whether the whole root was given up."""
        return self.snapshot_id >= SNAPSHOT_ID_MAX

    def keeps(self, snapshot_id: int) -> bool:
        """Whether that id is (or may become) a snapshot."""
        return snapshot_id > self.snapshot_id or snapshot_id in self.kept

    def is_gone(self, snapshot_id: int) -> bool:
        """Whether what lies under that id may be removed."""
        return not self.keeps(snapshot_id) and snapshot_id not in self.going

    def announcing(self, doomed: Iterable[int], existing: Iterable[int]) -> ExpiryBoundary | None:
        """The next one, that gives some up; None if none of them is a snapshot any more.

        Args:
            existing: all snapshots that there are; the newest is not among the doomed.
        """
        leaving = {i for i in doomed if self.keeps(i)}
        if not leaving:
            return None
        last = max(self.snapshot_id, *leaving)
        passed = {i for i in existing if self.snapshot_id < i <= last}
        # `existing` may be older than this boundary, which never reaches the newest.
        is_passed = max(leaving) <= self.snapshot_id
        check(is_passed or any(i > last for i in existing), "the newest snapshot never expires alone")
        kept, going = (set(self.kept) | passed) - leaving, set(self.going) | leaving
        return replace(self, snapshot_id=last, kept=tuple(sorted(kept)), going=tuple(sorted(going)))

    def settling(self, announced: Collection[int], pinned: Collection[int]) -> ExpiryBoundary | None:
        """The next one, in which announced ones are gone, or back if somebody needs them; None if others have settled
        all of them."""
        mine = set(self.going) & set(announced)
        if not mine:
            return None
        kept = set(self.kept) | {i for i in mine if i in pinned}
        return replace(self, kept=tuple(sorted(kept)), going=tuple(sorted(set(self.going) - mine)))

    def tombstone(self) -> ExpiryBoundary | None:
        """The next one, of a root that is given up whole; None if it is."""
        if self.is_tombstone:
            return None
        return replace(self, snapshot_id=SNAPSHOT_ID_MAX, kept=(), going=())


NO_BOUNDARY = ExpiryBoundary(sequence=0, snapshot_id=0, kept=(), at_ms=0, uid="")


def newest_boundary_sequence(root: Store) -> int:
    """One listing; 0 if there is none."""
    return _newest(root.list_names(BOUNDARY_DIR))


def boundary_for_run(root: Store, run: Term) -> int | None:
    """The same, for a run whose root this still is; None if its mark is gone. One listing."""
    names = root.list_names(BOUNDARY_DIR)
    return _newest(names) if run_mark_path(run.term, run.run_uid).rpartition("/")[2] in names else None


def leave_mark(root: Store, run: Term) -> None:
    """Leave a run's mark, for `boundary_for_run`.

    A mark that all runs of a job shared would not do: a run that starts while the root is removed would write it anew,
    and an older run, which slept through the removal, would believe that nothing has happened.
    """
    # The place is for whoever finds the folder elsewhere: see `place_of_newest_run`.
    root.put(run_mark_path(run.term, run.run_uid), f"{run.run_uid}\n{root.url}".encode())


def place_of_newest_run(root: Store) -> str:
    """URL of the root when its newest run started there; empty if it is not known (no run, or one of an older version).

    Another one than the root's own means that the folder was copied, moved or renamed since.
    """
    terms = {name: run_mark_term(name) for name in root.list_names(BOUNDARY_DIR)}
    newest = max(((term, name) for name, term in terms.items() if term is not None), default=None)
    if newest is None:
        return ""
    try:
        body = root.read(f"{BOUNDARY_DIR}/{newest[1]}", SMALL_JSON_BYTES_MAX)
    except FileNotFoundError:
        return ""
    return body.partition(b"\n")[2].decode(errors="replace")


def remove_older_marks(root: Store, run: Term) -> None:
    """Tidy away the marks of runs that are fenced, so that the listing at every commit stays short.

    That of the last one before stays: it may be between its commit and its look at the mark, and that commit counts.
    """
    terms = {name: run_mark_term(name) for name in root.list_names(BOUNDARY_DIR)}
    older = sorted((term, name) for name, term in terms.items() if term is not None and term < run.term)
    for _, name in older[:-1]:
        root.delete(f"{BOUNDARY_DIR}/{name}")


def _newest(names: Iterable[str]) -> int:
    return max((s for s in map(sequence_of, names) if s is not None), default=0)


def read_boundary(root: Store) -> ExpiryBoundary:
    """The newest boundary.

    Raises:
        CorruptManifest, UnsupportedFormat: it cannot be trusted; nothing may be read as a snapshot then, or deleted.
    """
    return read_boundary_document(root)[0]


def read_boundary_document(root: Store) -> tuple[ExpiryBoundary, bytes]:
    """The newest boundary, and its object as it was read; no bytes where nothing was ever given up.

    Raises:
        CorruptManifest, UnsupportedFormat: see `read_boundary`.
        Unavailable: boundaries came and went while they were read.
    """

    def read(sequence: int) -> tuple[ExpiryBoundary, bytes]:
        path = boundary_path(sequence)
        body = root.read(path, BOUNDARY_BYTES_MAX)
        return decode_document("boundary", ExpiryBoundary, body, f"{root.url}/{path}"), body

    found = read_newest(lambda: newest_boundary_sequence(root), read, f"the boundary in {root.url}")
    return found or (NO_BOUNDARY, b"")


def advance_boundary(
    root: Store,
    decide: Callable[[ExpiryBoundary], ExpiryBoundary | None],
    *,
    clock: Clock,
    ids: Ids,
    before: Callable[[ExpiryBoundary], None] | None = None,
    after: Callable[[ExpiryBoundary], None] | None = None,
) -> ExpiryBoundary:
    """Write the next boundary.

    Args:
        decide: from the newest boundary the next one (its sequence, time and uid are filled in here); None if nothing
            is to change. Called again when another collector was quicker.
        before, after: called right before a create with the boundary that the new one follows, and right after one
            that succeeded with the new one; what they raise ends it (snapshot/ownership.py).

    Returns:
        The boundary that counts now.

    Raises:
        OutcomeUnknown, StoreUnavailable: it may have been written; delete nothing, decide again later.
    """
    now = NO_BOUNDARY

    def propose() -> Proposal[ExpiryBoundary] | None:
        nonlocal now
        now = read_boundary(root)
        decided = decide(now)
        if decided is None:
            return None
        following = replace(
            decided,
            sequence=now.sequence + 1,
            snapshot_id=max(now.snapshot_id, decided.snapshot_id),
            at_ms=clock.now_ms(),
            uid=ids.uid(),
        )
        if before is not None:
            before(now)
        return Proposal(boundary_path(following.sequence), encode_document("boundary", following), following)

    def counts(following: ExpiryBoundary) -> bool:
        if after is not None:
            after(following)
        # Old ones are tidied away, and the store forgets their names: a sleeper can create one anew. It is told from
        # one that counts by what is the newest after the create.
        return newest_boundary_sequence(root) == following.sequence

    written = create_next(
        root,
        propose,
        contended=lambda: Unavailable(
            f"{CLAIM_ATTEMPTS_MAX} others changed the boundary in {root.url} at the same time; try again later"
        ),
        counts=counts,
    )
    return now if written is None else written


def take_back_boundary(root: Store, written: ExpiryBoundary) -> None:
    """Remove a boundary that its writer has just created where the root was not his any more; nobody else's."""
    path = boundary_path(written.sequence)
    try:
        body = root.read(path, BOUNDARY_BYTES_MAX)
    except FileNotFoundError:
        return
    if decode_document("boundary", ExpiryBoundary, body, f"{root.url}/{path}").uid == written.uid:
        root.delete(path)
