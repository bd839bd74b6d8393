"""What must hold after every step, checked at each change of a bucket by what it can break; and of everything, at the end.

A *root* is any folder with a job.json. The watcher sees the bucket as it is, not as an actor thinks it to be:

1. Every snapshot that `Catalog` shows (a manifest that the boundary keeps) has all that it references, with the right sizes.
2. Nothing that a live snapshot, or one that somebody was told to have pinned, needs is ever deleted.
3. An id is one snapshot for ever: a manifest that is created anew under a name that was given up is nobody's.
4. Whoever was told that a commit is durable finds it in the history of every later snapshot of that root.
5. Whoever runs a job changes nothing in a root that became another's under it: deleted and begun anew, or replaced by a backup.
   But for the one request that it was at: no store has a conditional delete, so nobody who sleeps right there wakes up here.
6. Content is state: any snapshot in any root with the same files holds the state that its writer meant.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from state_runtime.base.errors import StillstateError
from state_runtime.reading.references import StoredRef, references
from state_runtime.snapshot.document import decode_document
from state_runtime.snapshot.expiry_boundary import NO_BOUNDARY, ExpiryBoundary
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import JOB_FILE, sequence_of, snapshot_id_of
from state_runtime.snapshot.pins import SnapshotPin
from state_runtime.store import Store

from .stores import Bucket, Connection, Faults, QuickStore
from .turns import Actor, Turns, whoever_runs

Content = tuple[Any, ...]
NUMBERED = ("snapshots/", "boundary/")
"""What has a name that the next job, or the next run, gives too, and that counts for it.

A heartbeat of a term is its run's own; and a materialization that does not fit is passed over."""
MANIFEST = "/manifest.json"
CLOCKS_OFF_MS = 2 * 3_600_000


@dataclass(frozen=True)
class Meant:
    """What a writer meant a content to be: the state, and the names of the epochs that made it."""

    state: Mapping[str, Any]
    epochs: tuple[str, ...]


NOTHING = Meant({}, ())


def content_of(manifest: Manifest) -> Content:
    """What decides the state of a snapshot; names of files are unique, so equal contents are equal states."""
    return (
        tuple(s.path for s in manifest.segments),
        tuple(tuple(t.path for t in layer.tables) for layer in manifest.layers),
        manifest.shards.path if manifest.shards is not None else "",
    )


@dataclass
class Root:
    """What the watcher knows of a job root or a savepoint's folder.

    Attributes:
        stored: manifests that lie there, whether they are snapshots or not.
        needs: of each of these, what it references and how large that is (-1: not recorded).
        needed_by: ids by path.
        was: the one commit of each id that ever was a snapshot.
        removed: its job.json was: nobody opens it any more.
        job_uid: whose it is; empty without a job.json. Manifests of others are what a late writer left in a root that was removed.
        time: which time of the folder this is: another one each time that the job is deleted, or a backup put back.
        pinned: who was told to hold the snapshot, and until when (0: until it says otherwise).
    """

    path: str
    boundary: ExpiryBoundary = NO_BOUNDARY
    stored: dict[int, Manifest] = field(default_factory=dict)
    needs: dict[int, dict[str, StoredRef]] = field(default_factory=dict)
    needed_by: dict[str, set[int]] = field(default_factory=dict)
    was: dict[int, str] = field(default_factory=dict)
    pinned: dict[int, dict[str, int]] = field(default_factory=dict)
    removed: bool = False
    job_uid: str = ""
    time: int = 0
    restored_at: int = 0

    def shows(self, snapshot_id: int) -> bool:
        """Whether readers take it for a snapshot."""
        manifest = self.stored.get(snapshot_id)
        if manifest is None or self.removed or self.job_uid not in ("", manifest.job_uid):
            return False
        return self.boundary.keeps(snapshot_id)

    @property
    def live(self) -> list[int]:
        return sorted(i for i in self.stored if self.shows(i))

    @property
    def newest(self) -> Manifest | None:
        live = self.live
        return self.stored[live[-1]] if live else None


def _term_of(name: str) -> int | None:
    digits = name.removesuffix(".json")
    return int(digits) if digits.isdigit() else None


class Laws:
    """Watches buckets."""

    def __init__(self, turns: Turns, state_of: Callable[[Store, Manifest], Mapping[str, Any]]) -> None:
        self.turns = turns
        self.state_of = state_of
        self.violations: list[str] = []
        self.roots: dict[tuple[str, str], Root] = {}
        self.buckets: dict[str, Bucket] = {}
        self.meant: dict[Content, Meant] = {((), (), ""): NOTHING}
        self.acknowledged: list[tuple[str, str, Manifest, str]] = []  # bucket, root, manifest, epoch
        self.heirs: dict[tuple[str, str, str], tuple[str, str]] = {}  # by bucket, root and uid of the job
        self.deleted = 0
        self.gaps = 0
        self.opened_runs: list[tuple[int, Manifest]] = []  # of the job's root: term, fencing snapshot
        self.lives: dict[tuple[str, str], dict[str, int]] = {}  # of a root: the time in it that a process is of
        # Of an object: the time of its root in which it was written, by which process, and the digest of what.
        self.writers: dict[tuple[str, str], tuple[int, str, bytes]] = {}
        self.made_by: dict[str, list[str]] = {}  # of a process: its commits
        self.created: dict[str, int] = {}  # of a commit: the same
        self._nobody = Actor("watcher", lambda actor: None)

    def watch(self, bucket: Bucket) -> None:
        self.buckets[bucket.name] = bucket
        bucket.watch = lambda what, path, body: self._changed(bucket, what, path, body)
        bucket.requested = lambda actor, path, writes: self._requested(bucket, actor, path, writes=writes)

    def broken(self, why: str) -> None:
        self.violations.append(f"step {self.turns.step}: {why}")

    def quiet_store(self, bucket: Bucket, path: str) -> QuickStore:
        """A store that takes no turn and fails never; only while `turns.frozen`."""
        connection = Connection(bucket, self.turns, self._nobody, random.Random(0), Faults())
        return QuickStore(connection, path, path, retry_wait_max_s=0.0)

    def root(self, bucket: Bucket, path: str) -> Root:
        return self.roots.setdefault((bucket.name, path), Root(path))

    # --- what actors were told ---

    def was_pinned(self, bucket: Bucket, path: str, pin: SnapshotPin) -> None:
        if f"{path}/{pin.path}" not in bucket.objects and self._went_along(pin.path):
            return  # between the look that told him so and now: it holds in the other place
        root = self.root(bucket, path)
        root.pinned.setdefault(pin.snapshot_id, {})[pin.uid] = pin.expires_at_ms
        # Of a root that is given up as a whole, whoever came before keeps what it needs until it is done.
        if root.boundary.is_gone(pin.snapshot_id) and not root.boundary.is_tombstone:
            self.broken(f"somebody was told to hold {path}@{pin.snapshot_id}, which is gone")
        self._complete(bucket, root, pin.snapshot_id, "is pinned")

    def ends_by_itself(self, bucket: Bucket, path: str, pin: SnapshotPin, ends_ms: int) -> None:
        """Its holder is about to say so: whether he hears of it or not, he counts on no more."""
        held = self.root(bucket, path).pinned.setdefault(pin.snapshot_id, {})
        held[pin.uid] = min(held.get(pin.uid, 0) or ends_ms, ends_ms)

    def is_unpinned(self, bucket: Bucket, path: str, pin: SnapshotPin) -> None:
        self.root(bucket, path).pinned[pin.snapshot_id].pop(pin.uid, None)

    def read(self, bucket: Bucket, path: str, manifest: Manifest, state: Mapping[str, Any] | None) -> None:
        """Somebody read a snapshot, and this is what he saw."""
        root = self.root(bucket, path)
        if root.was.get(manifest.snapshot_id) != manifest.commit_id:
            self.broken(f"a reader took {path}@{manifest.snapshot_id} for a snapshot, and it never was one")
        meant = self.meant.get(content_of(manifest))
        if state is not None and (meant is None or dict(meant.state) != dict(state)):
            self.broken(f"a reader of {path}@{manifest.snapshot_id} got another state than was written")

    def is_heir(self, bucket: Bucket, path: str, job_uid: str, heir: str, where: Bucket | None = None) -> None:
        """Somebody was told that a root, with all that was acknowledged in it, is his now."""
        mine = ((where or bucket).name, heir)
        found = self.heirs.setdefault((bucket.name, path, job_uid), mine)
        if found != mine:
            self.broken(f"{mine} and {found} were both told that {path} is theirs")

    def opened(self, bucket: Bucket, path: str, term: int, last: Manifest) -> None:
        """A run was told that it has taken the job over."""
        if not self.is_lost_with_the_folder(bucket, path, last):
            self.opened_runs.append((term, last))

    # --- whose the root is ---

    def lives_in(self, bucket: Bucket, path: str, actor: Actor, last: Manifest) -> None:
        """From here on everything that the process does there is work on the root as it was when `last` was committed."""
        self.lives.setdefault((bucket.name, path), {})[actor.name] = self.created[last.commit_id]

    def is_lost_with_the_folder(self, bucket: Bucket, path: str, manifest: Manifest) -> bool:
        """Whether a backup replaced the folder after the commit: then it is as if nobody had been told of it."""
        return self.created.get(manifest.commit_id, 0) < self.root(bucket, path).restored_at

    def is_restored(self, bucket: Bucket, path: str, backup: Mapping[str, tuple[bytes, int]]) -> None:
        """The folder is removed, and an older copy of it put in its place; what was told of it since then is void."""
        before = self.root(bucket, path)
        watch, bucket.watch = bucket.watch, lambda what, path, body: None
        for name in bucket.below(path):
            bucket.remove(name)
        for key in [k for k in self.roots if k[0] == bucket.name and f"{k[1]}/".startswith(f"{path}/")]:
            del self.roots[key]
        root = self.root(bucket, path)
        root.time = root.restored_at = before.time + 1
        bucket.watch = watch
        violations = len(self.violations)
        # What leads to other objects after them, as whoever restores a backup need not do: nobody looks meanwhile.
        for name in sorted(backup, key=lambda n: (n.endswith("/manifest.json"), "/boundary/" in n, n)):
            body, modified_ms = backup[name]
            bucket.write(name, body)
            bucket.modified_ms[name] = modified_ms
        del self.violations[violations:]
        live = {m.commit_id for m in root.stored.values()}
        newest = max(root.stored, default=0)
        self.acknowledged = [a for a in self.acknowledged if a[:2] != (bucket.name, path) or a[2].snapshot_id <= newest]
        terms = [t for t in map(_term_of, bucket.names(f"{path}/terms")) if t is not None]
        # A term may be in the backup whose run fenced the root after it was made.
        self.opened_runs = [
            (t, m)
            for t, m in self.opened_runs
            if t <= max(terms, default=0) and (m.commit_id in live or m.snapshot_id < min(root.stored, default=0))
        ]
        for commit_id in live:
            self.created[commit_id] = root.time
        # Whose newest snapshot is in the backup finds the root as it knows it, until a newer run takes it over.
        for name in self.lives.get((bucket.name, path), {}):
            if self._newest_known_to(name) in live:
                self.lives[(bucket.name, path)][name] = root.time

    def _newest_known_to(self, process: str) -> str:
        """The newest commit of which it was told: the very last one may lie there, and nobody have heard of it."""
        made = self.made_by.get(process, [])
        if len(made) > 1 and not any(a[2].commit_id == made[-1] for a in self.acknowledged):
            return made[-2]
        return made[-1] if made else ""

    def _requested(self, bucket: Bucket, actor: Actor, path: str, *, writes: bool) -> bool:
        """Remember in which time of the root a thread was heard of before the request that it makes now.

        Returns:
            Whether it is the gap that remains: asleep between the proof and the one request that follows it. No store has
            a conditional delete, so whoever wakes there does harm; here he never wakes.
        """
        is_in_gap = False
        for name, root_path in self.lives:
            if name == bucket.name and path.startswith(root_path):
                key = f"heard {root_path}"
                now = self.root(bucket, root_path).time
                last_path, last, before_last, heard = actor.memory.get(key, ("", now, now, now))
                # A request that is repeated, or looked at because its answer was lost, is the same one. So are looks at
                # manifests in a row: a proof of the newest follows a run that goes on.
                both_manifests = path.endswith(MANIFEST) and last_path.endswith(MANIFEST) and not writes
                if path != last_path and not both_manifests:
                    before_last, heard = heard, last
                actor.memory[key] = (path, now, before_last, heard)
                # The proof of a boundary is of two things that no one request tells: asleep between those two is the
                # same gap. (What it leaves then it takes back.)
                is_boundary = path.startswith(f"{root_path}/boundary/")
                is_in_gap |= writes and (now != heard or (is_boundary and now != before_last))
                # A commit looks at several things at the same time, at its term first of those that come one by one
                # here: asleep between two of these looks is asleep after all of them.
                looks = f"looks {root_path}"
                if not writes and path.startswith(f"{root_path}/terms/"):
                    actor.memory[looks] = now
                if writes and path.endswith(MANIFEST):
                    is_in_gap |= now != actor.memory.pop(looks, now)
        self.gaps += is_in_gap
        return is_in_gap

    def _check_foreign(self, bucket: Bucket, what: str, path: str, body: bytes) -> None:
        """Law 5, of the thread that does it.

        The bytes that lie there already harm nobody: a savepoint of before is made by both jobs of a restored root.
        """
        actor = whoever_runs()
        for (name, root_path), lives in self.lives.items():
            mine = lives.get((actor.process or actor).name)
            if name != bucket.name or not path.startswith(f"{root_path}/") or mine is None:
                continue
            root = self.root(bucket, root_path)
            if root.time == mine:
                continue
            written = self.writers.get((bucket.name, path))
            # Who repeats a write whose answer was lost writes over his own.
            of_next = written is not None and written[0] != mine and written[1] != (actor.process or actor).name
            is_same = written is not None and written[2] == hashlib.sha256(body).digest()
            below = path[len(root_path) + 1 :]
            if root.removed and below.startswith("snapshots/"):
                # Nobody's yet: a commit under way is told of the deletion right after it; whoever removes what it left
                # does no harm.
                continue
            if root.time == root.restored_at and below.startswith("terms/") and below.endswith(".heartbeat.json"):
                continue  # of its own term: its mark is in the backup, and nobody has taken the job over yet
            if what == "delete" and self._is_given_up(root, below):
                continue  # the backup has the boundary that he acts on: it is no snapshot there, and anybody may remove it
            if what == "delete" and of_next:
                self.broken(f"{actor.name}, whose root {root_path} was, deleted {below} of the next one")
            elif what == "write" and ((of_next and not is_same) or below.startswith(NUMBERED)):
                self.broken(f"{actor.name}, whose root {root_path} was, wrote {below} into the next one")

    @staticmethod
    def _is_given_up(root: Root, below: str) -> bool:
        """A manifest of a snapshot that the newest boundary in the root gives up for good."""
        folder, _, number = below.removesuffix(MANIFEST).partition("/")
        snapshot_id = snapshot_id_of(number) if folder == "snapshots" and below.endswith(MANIFEST) else None
        return snapshot_id is not None and root.boundary.is_gone(snapshot_id)

    # --- at each change ---

    def _changed(self, bucket: Bucket, what: str, path: str, body: bytes) -> None:
        frozen, self.turns.frozen = self.turns.frozen, True
        try:
            self._check_foreign(bucket, what, path, body)
            if what == "delete":
                self._deleted(bucket, path)
            else:
                self._written(bucket, path, body)
        finally:
            self.turns.frozen = frozen

    def _written(self, bucket: Bucket, path: str, body: bytes) -> None:
        folder, _, name = path.rpartition("/")
        digest = hashlib.sha256(body).digest()
        for root, _ in self._roots_above(bucket, path):
            writer = whoever_runs()
            self.writers[(bucket.name, path)] = (root.time, (writer.process or writer).name, digest)
        if name == "manifest.json":
            above, _, number = folder.rpartition("/")
            snapshot_id = snapshot_id_of(number)
            if snapshot_id is not None and above.endswith("/snapshots"):
                self._manifest(bucket, self.root(bucket, above.removesuffix("/snapshots")), snapshot_id, body)
        elif name == JOB_FILE:
            root = self.root(bucket, folder)
            before, root.job_uid = root.job_uid, decode_document("job", JobInfo, body, folder).uid
            if root.removed:
                # A move that was taken back leaves the root whose it was; a new job has a uid of its own.
                root.time -= root.job_uid == before
                root.removed, root.was = False, {}
            for snapshot_id in root.live:
                if snapshot_id not in root.needs:  # a sleeper's, of a folder that was removed; it is made anew now
                    self._learn(bucket, root, snapshot_id)
        elif folder.endswith("/boundary") and sequence_of(name) is not None:
            self._boundary(bucket, self.root(bucket, folder.removesuffix("/boundary")), body)
        else:
            # An object that is written anew with other bytes breaks whoever names it.
            for root, below in self._roots_above(bucket, path):
                for snapshot_id in root.needed_by.get(below, ()):
                    if self._is_held(bucket, root, snapshot_id):
                        self._complete(bucket, root, snapshot_id, f"after {path} was written")

    def _manifest(self, bucket: Bucket, root: Root, snapshot_id: int, body: bytes) -> None:
        manifest = Manifest.decode(body, root.path)
        root.stored[snapshot_id] = manifest
        self.created.setdefault(manifest.commit_id, root.time)  # a savepoint holds the same commit
        writer = whoever_runs()
        if not writer.process:
            self.made_by.setdefault(writer.name, []).append(manifest.commit_id)
        if not root.shows(snapshot_id):
            return
        if root.was.setdefault(snapshot_id, manifest.commit_id) != manifest.commit_id:
            self.broken(f"{root.path}@{snapshot_id} was another snapshot before")
        self._learn(bucket, root, snapshot_id)
        self._complete(bucket, root, snapshot_id, "was committed")
        if content_of(manifest) not in self.meant:
            self.broken(f"{root.path}@{snapshot_id} has a content that nobody meant")

    def _learn(self, bucket: Bucket, root: Root, snapshot_id: int) -> None:
        """What a snapshot needs, by the project's own mark function."""
        needs: dict[str, StoredRef] = {}
        try:
            for ref in references(self.quiet_store(bucket, root.path), root.stored[snapshot_id]):
                needs[ref.path] = ref
        except (StillstateError, FileNotFoundError) as error:
            self.broken(f"{root.path}@{snapshot_id} cannot be read when it is committed: {error}")
        root.needs[snapshot_id] = needs
        for path in needs:
            root.needed_by.setdefault(path, set()).add(snapshot_id)

    def _boundary(self, bucket: Bucket, root: Root, body: bytes) -> None:
        boundary = decode_document("boundary", ExpiryBoundary, body, root.path)
        if 0 < boundary.sequence <= root.boundary.sequence and not root.path.startswith("/moved/"):
            return  # a sleeper's, under a name that was tidied away: the newest one counts
        before, root.boundary = root.boundary, boundary
        # A copy of a root gets the newest boundary of the original, and no older ones.
        follows = boundary.sequence == before.sequence + 1 or root.path.startswith("/moved/")
        if not follows or boundary.snapshot_id < before.snapshot_id:
            self.broken(f"boundary {boundary} of {root.path} follows {before}")
        # A copy that is not complete yet may have none for a moment: what it had was given up in the original, newer ones come.
        if root.stored and not root.live and not boundary.is_tombstone and root.job_uid:
            self.broken(f"boundary {boundary.sequence} of {root.path} gives up its newest snapshot")
        for snapshot_id in root.live:
            if not before.keeps(snapshot_id):
                if snapshot_id not in root.needs:  # a copy that came after the boundary that announced it
                    root.was.setdefault(snapshot_id, root.stored[snapshot_id].commit_id)
                    self._learn(bucket, root, snapshot_id)
                self._complete(bucket, root, snapshot_id, "was taken back")

    def _deleted(self, bucket: Bucket, path: str) -> None:
        self.deleted += 1
        folder, _, name = path.rpartition("/")
        for root, below in self._roots_above(bucket, path):
            for snapshot_id in root.needed_by.get(below, ()):
                if self._is_held(bucket, root, snapshot_id):
                    held = "live" if root.shows(snapshot_id) else "pinned"
                    self.broken(f"{path} was deleted, and {held} snapshot {root.path}@{snapshot_id} needs it")
        if name == JOB_FILE:
            self.root(bucket, folder).removed = True
            self.root(bucket, folder).time += 1
        if folder.endswith("/boundary") and not any(map(sequence_of, bucket.names(folder))):
            # The folder was given up as a whole, and is gone; whoever gives it up once more begins anew.
            self.root(bucket, folder.removesuffix("/boundary")).boundary = NO_BOUNDARY
        if folder.endswith("/pins") and self._went_along(f"pins/{name}"):
            # It went along with what it holds.
            for held in self.root(bucket, folder.removesuffix("/pins")).pinned.values():
                held.pop(name.removesuffix(".json").rpartition("-")[2], None)
        if name == "manifest.json" and folder.rpartition("/")[0].endswith("/snapshots"):
            root_path = folder.rpartition("/")[0].removesuffix("/snapshots")
            self._forget(self.root(bucket, root_path), snapshot_id_of(folder.rpartition("/")[2]))

    def _went_along(self, pin: str) -> bool:
        """Whether a pin lies in the place to which its root was moved."""
        return any(p.startswith("/moved/") and p.endswith(f"/{pin}") for b in self.buckets.values() for p in b.objects)

    def _forget(self, root: Root, snapshot_id: int | None) -> None:
        if snapshot_id is None:
            return
        root.stored.pop(snapshot_id, None)
        for path in root.needs.pop(snapshot_id, ()):
            root.needed_by[path].discard(snapshot_id)

    def _is_held(self, bucket: Bucket, root: Root, snapshot_id: int) -> bool:
        if root.shows(snapshot_id):
            return True
        ends = root.pinned.get(snapshot_id, {}).values()
        # Clocks are off by an hour at most, the holder's and the collector's.
        return any(not end or bucket.clock.at_ms < end - CLOCKS_OFF_MS for end in ends)

    def _roots_above(self, bucket: Bucket, path: str) -> list[tuple[Root, str]]:
        """A savepoint's folder lies inside a job root; what it needs lies inside of it."""
        found = []
        at = path
        while at := at.rpartition("/")[0]:
            root = self.roots.get((bucket.name, at))
            if root is not None:
                found.append((root, path[len(at) + 1 :]))
        return found

    def _complete(self, bucket: Bucket, root: Root, snapshot_id: int, when: str) -> None:
        for ref in root.needs.get(snapshot_id, {}).values():
            body = bucket.objects.get(f"{root.path}/{ref.path}")
            if body is None:
                self.broken(f"{root.path}@{snapshot_id} {when}, and {ref.path} is missing")
            elif ref.kind not in ("manifest", "direct") and len(body) != ref.bytes:
                self.broken(f"{root.path}@{snapshot_id} {when}, and {ref.path} has another size")

    # --- at the end ---

    def check_all(self) -> None:
        """Each snapshot of each root: its files byte for byte, its state, and the history of the newest one."""
        self.turns.frozen = True
        for (name, path), root in self.roots.items():
            bucket = self.buckets[name]
            for snapshot_id in root.live:
                self._check_snapshot(bucket, root, snapshot_id)
            newest = root.newest
            if newest is not None:
                self._check_history(name, path, newest)
        for (name, path, _), heir in self.heirs.items():
            newest = self.root(self.buckets[heir[0]], heir[1]).newest
            if newest is None:
                self.broken(f"{heir}, to which {path} went, has no snapshot")
            else:
                self._check_history(name, path, newest)

    def _check_snapshot(self, bucket: Bucket, root: Root, snapshot_id: int) -> None:
        manifest = root.stored[snapshot_id]
        for ref in root.needs[snapshot_id].values():
            body = bucket.objects.get(f"{root.path}/{ref.path}")
            if body is None or (ref.digest and hashlib.sha256(body).hexdigest() != ref.digest):
                self.broken(f"at the end {root.path}@{snapshot_id} lacks {ref.path}, or it was altered")
                return
        try:
            state = self.state_of(self.quiet_store(bucket, root.path), manifest)
        except StillstateError as error:
            self.broken(f"at the end {root.path}@{snapshot_id} cannot be read: {error}")
            return
        meant = self.meant.get(content_of(manifest), NOTHING)
        if dict(state) != dict(meant.state):
            self.broken(f"at the end the state of {root.path}@{snapshot_id} is {state}, and was to be {meant.state}")

    def _check_history(self, bucket: str, path: str, newest: Manifest) -> None:
        epochs = set(self.meant.get(content_of(newest), NOTHING).epochs)
        for name, where, manifest, epoch in self.acknowledged:
            if (name, where) != (bucket, path) or epoch in epochs or manifest.job_uid not in newest.job_uids:
                continue  # there, or of another job that was begun in that place
            if any(low <= manifest.snapshot_id <= high for low, high in newest.abandoned):
                continue  # somebody went back to an older snapshot, on purpose
            self.broken(f"snapshot {path}@{manifest.snapshot_id} was acknowledged, and the newest one lacks it")
