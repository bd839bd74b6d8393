"""The actors that read and write snapshots: drivers (of which all but the newest are zombies), folds, readers, holders of pins."""

from __future__ import annotations

from collections.abc import Callable

from model import empty_manifest

from state_runtime.base import actor as acting
from state_runtime.base.errors import CorruptData, Fenced, MissingSnapshot, SnapshotExpired
from state_runtime.materialize.background import adoptable
from state_runtime.materialize.records import apply, fits, holds, is_too_old
from state_runtime.snapshot import fencing
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.pins import pin_snapshot, renew_pin, unpin

from .formats import Changes, applied
from .laws import NOTHING, Meant, content_of
from .turns import Actor
from .world import HOUR_MS, JOB, ROOT, World

Body = Callable[[World, Actor], None]
KEYS = 6
RECORDS_WAIT = 0.7
EPOCHS_STEPS = (0, 10, 40, 120)  # of the others, between two epochs


def driver(number: int, store: str = "/state", job: str = JOB) -> Body:
    """A run of the job: it takes over, commits epochs, and adopts what was folded. It sleeps anywhere, and wakes as a zombie."""
    root_path = f"{store}/{job}"

    def body(world: World, actor: Actor) -> None:
        clock, ids = world.wrong_clock(), world.ids()
        catalog = Catalog(world.store(actor, store), job, clock)
        info = fencing.open_job_root(catalog.root, job, clock=clock, ids=ids)
        committer: Committer | None = None
        try:
            empty = empty_manifest(info.uid)
            committer = fencing.open_run(catalog, info, empty, actor=acting.Actor(clock, ids, "h", number))
            world.laws.opened(world.near, ROOT, committer.term.term, committer.last)
            commit_epochs(world, actor, committer, root_path)
        except Fenced:
            world.seen["fenced"] += 1
            if actor.slept:
                world.seen["woken and fenced"] += 1
            if committer is not None:
                _stays_fenced(world, committer)
            raise

    return body


def commit_epochs(world: World, actor: Actor, committer: Committer, root_path: str) -> None:
    """What a driver does after its fencing snapshot."""
    clock, ids, root = committer._actor.clock, committer._actor.ids, committer._root
    refused: set[int] = set()
    for number in range(world.plan.commits):
        world.time_passes(clock)  # type: ignore[arg-type]
        world.turns.rest(actor, world.rng.choice(EPOCHS_STEPS))
        last = committer.last
        meant = world.laws.meant.get(content_of(last), NOTHING)
        record = adoptable(root, last, clock, refused=refused) if world.rng.random() < RECORDS_WAIT else None
        changes = changes_of(world)
        epoch = epoch_name(committer, number)
        draft = world.format.epoch(
            root,
            last,
            changes,
            uid=committer.info.uid,
            term=committer.term.term,
            ids=ids,
            direct=world.rng.random() < 0.3,
        )
        if record is not None and fits(last, record) and not is_too_old(record, clock.now_ms()):
            draft = apply(draft, record)
        after = Meant(applied(meant.state, changes), (*meant.epochs, epoch))
        world.laws.meant[content_of(draft)] = after
        manifest = committer.commit(draft)
        acknowledged(world, root_path, manifest, epoch)
        if record is not None and holds(manifest, record):
            refused.add(record.record_id)
            world.seen["adopted"] += 1


def changes_of(world: World) -> Changes:
    """What an epoch does to the state."""
    return {
        f"k{world.rng.randrange(KEYS)}": world.rng.randrange(100) if world.rng.random() < 0.8 else None
        for _ in range(2)
    }


def epoch_name(committer: Committer, number: int) -> str:
    """Unique."""
    return f"{committer.term.term}-{number}-{committer._actor.ids.uid()}"


def acknowledged(world: World, root_path: str, manifest: Manifest, epoch: str) -> None:
    """Somebody was told that an epoch is durable."""
    if world.laws.is_lost_with_the_folder(world.near, root_path, manifest):
        world.seen["acknowledged while a backup replaced it"] += 1
        return
    world.laws.acknowledged.append(("near", root_path, manifest, epoch))
    world.seen["acknowledged"] += 1


def _stays_fenced(world: World, committer: Committer) -> None:
    try:
        committer.commit(committer.last)
    except Fenced:
        return
    world.laws.broken("a committer that was fenced committed once more")


def folder(world: World, actor: Actor) -> None:
    """Materializations by a process of its own, now of the newest snapshot, now of an older one that it was told of."""
    clock, ids = world.wrong_clock(), world.ids()
    while True:
        world.time_passes(clock)
        try:
            opened = world.snapshot_to_use(actor, clock, old=0.2)
            if opened is None or not opened.manifest.segments:
                world.turns.pause(actor)
                continue
            world.format.fold(opened.root, opened.manifest, clock=clock, ids=ids, major=world.rng.random() < 0.5)
            world.seen["folded"] += 1
        except MissingSnapshot:
            world.seen["fold came too late"] += 1
        except CorruptData:
            # The snapshot was given up while it was folded; that costs this fold, and nothing else.
            world.seen["fold lost its snapshot"] += 1


def reader(world: World, actor: Actor) -> None:
    """Reads snapshots, with and without a pin. Without one it may come too late; with one it may not."""
    clock, ids = world.wrong_clock(), world.ids()
    while True:
        world.time_passes(clock)
        try:
            opened = world.snapshot_to_use(actor, clock)
        except MissingSnapshot:
            world.seen["gone before it was opened"] += 1
            continue
        if opened is None:
            world.turns.pause(actor)
            continue
        pin = None
        if world.rng.random() < 0.5:
            try:
                pin = pin_snapshot(
                    opened.root, opened.manifest.snapshot_id, reason="read", holder="reader", clock=clock, ids=ids
                )
            except SnapshotExpired:
                world.seen["gone before it was pinned"] += 1
                continue
            world.laws.was_pinned(world.near, ROOT, pin)
        try:
            state = world.format.state_of(opened.root, opened.manifest)
            world.laws.read(world.near, ROOT, opened.manifest, state)
            world.seen["read"] += 1
        except CorruptData as error:
            if pin is not None:
                world.laws.broken(f"a pinned snapshot could not be read: {error}")
            elif world.laws.root(world.near, ROOT).shows(opened.manifest.snapshot_id):
                world.laws.broken(f"a live snapshot could not be read: {error}")
            world.seen["gone while it was read"] += 1
        if pin is not None:
            world.laws.is_unpinned(world.near, ROOT, pin)
            unpin(opened.root, pin)


def pinner(world: World, actor: Actor) -> None:
    """Pins snapshots, renews pins, and takes them off; also such that end by themselves."""
    clock, ids = world.wrong_clock(), world.ids()
    while True:
        world.time_passes(clock)
        try:
            opened = world.snapshot_to_use(actor, clock, old=0.8)
            if opened is None:
                world.turns.pause(actor)
                continue
            pin = pin_snapshot(
                opened.root, opened.manifest.snapshot_id, reason="user", holder="somebody", clock=clock, ids=ids
            )
        except MissingSnapshot:
            world.seen["gone before it was pinned"] += 1
            continue
        world.laws.was_pinned(world.near, ROOT, pin)
        world.seen["pinned"] += 1
        try:
            for _ in range(world.rng.randrange(4)):
                world.turns.pause(actor)
                if world.rng.random() < 0.3:
                    world.laws.ends_by_itself(world.near, ROOT, pin, clock.now_ms() + 100 * HOUR_MS)
                    pin = renew_pin(opened.root, pin, lasts_ms=100 * HOUR_MS, clock=clock)
                    world.laws.was_pinned(world.near, ROOT, pin)
        except SnapshotExpired:
            world.laws.is_unpinned(world.near, ROOT, pin)
            world.seen["pin ran out"] += 1
            continue
        world.laws.is_unpinned(world.near, ROOT, pin)
        unpin(opened.root, pin)
