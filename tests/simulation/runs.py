"""Runs of a job with all that a driver's process does beside its epochs, and what happens to their root under them.

The threads are the real ones (`BackgroundRetention`, `BackgroundCollection`, `BackgroundMaterializer`, `Savepoints`, `Heartbeat`), made and ended in the
order of `JobRun` and `Checkpointer`; each may fall asleep before any of its requests, alone or with its process, and wake in a root
that was deleted and begun anew, or that a backup has replaced.
"""

from __future__ import annotations

import threading as real_threading
from dataclasses import dataclass
from typing import Any

from model import empty_manifest

from state_runtime.base import actor as acting
from state_runtime.base.errors import Fenced, Invalid, Unavailable
from state_runtime.base.settings import JobSettings, MaterializationSettings, RetentionSettings
from state_runtime.driver.heartbeat import Heartbeat
from state_runtime.driver.savepoint_requests import Savepoints
from state_runtime.maintenance.delete.roots import delete_root
from state_runtime.maintenance.gc.background import BackgroundCollection
from state_runtime.maintenance.retention.background import BackgroundRetention
from state_runtime.materialize import BackgroundMaterializer
from state_runtime.materialize.records import Record
from state_runtime.snapshot import fencing
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.control import request_savepoint
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.term_files import newest_term

from .actors import Body, acknowledged, changes_of, epoch_name
from .formats import applied
from .laws import NOTHING, Meant, content_of
from .turns import Actor
from .world import HOUR_MS, JOB, ROOT, World

SETTINGS = JobSettings(
    retention=RetentionSettings(retained_checkpoints=2),
    materialization=MaterializationSettings(max_segments=3, ratio=0.3, interval_s=1e6),
)
HEARTBEAT_S = 1.0
EPOCHS_STEPS = (0, 10, 40, 120)


@dataclass
class Beside:
    """The threads of one driver."""

    heartbeat: Heartbeat
    savepoints: Savepoints
    folds: BackgroundMaterializer
    retention: BackgroundRetention
    collection: BackgroundCollection

    @staticmethod
    def of(world: World, committer: Committer) -> Beside:
        root, clock, ids = committer._root, committer._actor.clock, committer._actor.ids
        prove = committer.ownership.check
        savepoints = Savepoints(
            root,
            committer.info,
            committer.term.term,
            clock=clock,
            ids=ids,
            prove=prove,
        )
        savepoints._work.ended = world.threading.Event()  # type: ignore[assignment]

        def fold(manifest: Manifest) -> Record:
            return world.format.fold(
                root, manifest, clock=clock, ids=ids, major=world.rng.random() < 0.5, prove=folds._prove
            )

        folds = BackgroundMaterializer(root, SETTINGS, ids, clock, fold, prove)
        folds._fold_here = fold  # type: ignore[method-assign]
        return Beside(
            Heartbeat(root, committer, HEARTBEAT_S, clock, real_threading.Event(), savepoints),
            savepoints,
            folds,
            BackgroundRetention(root, SETTINGS, ids, clock, committer.ownership),
            BackgroundCollection(root, SETTINGS, ids, clock, committer.ownership, "h:1"),
        )


def whole_driver(number: int) -> Body:
    """A run with all of its threads: as `JobRun` opens it, works, and ends it."""

    def body(world: World, actor: Actor) -> None:
        clock, ids = world.wrong_clock(), world.ids()
        catalog = Catalog(world.store(actor), JOB, clock)
        info = fencing.open_job_root(catalog.root, JOB, clock=clock, ids=ids)
        committer = fencing.open_run(
            catalog, info, empty_manifest(info.uid), actor=acting.Actor(clock, ids, "h", number)
        )
        world.laws.lives_in(world.near, ROOT, actor, committer.last)
        world.laws.opened(world.near, ROOT, committer.term.term, committer.last)
        beside = Beside.of(world, committer)
        beside.heartbeat.start()
        beside.savepoints.start()
        reason = "failed"
        try:
            beside.heartbeat.running()
            _epochs(world, actor, committer, beside)
            reason = "finished"
        except Fenced as error:
            world.seen["fenced"] += 1
            if actor.slept:
                world.seen["woken and fenced"] += 1
            reason = str(error)
            raise
        finally:
            if not actor.killed:
                beside.savepoints.close(reason)
                beside.folds.join(0.0)
                beside.retention.join(0.0)
                beside.collection.join(0.0)
                beside.heartbeat.finish("finished" if reason == "finished" else "failed", reason)

    return body


def _epochs(world: World, actor: Actor, committer: Committer, beside: Beside) -> None:
    clock, ids, root = committer._actor.clock, committer._actor.ids, committer._root
    beside.folds.look(committer.last)
    for number in range(world.plan.commits):
        world.time_passes(clock)  # type: ignore[arg-type]
        world.turns.rest(actor, world.rng.choice(EPOCHS_STEPS))
        if beside.heartbeat.fenced is not None:
            raise Fenced(beside.heartbeat.fenced)
        last = committer.last
        meant = world.laws.meant.get(content_of(last), NOTHING)
        changes = changes_of(world)
        epoch = epoch_name(committer, number)
        draft = world.format.epoch(
            root, last, changes, uid=committer.info.uid, term=committer.term.term, ids=ids,
            direct=world.rng.random() < 0.3,
        )  # fmt: skip
        draft = beside.folds.take(draft)
        world.laws.meant[content_of(draft)] = Meant(applied(meant.state, changes), (*meant.epochs, epoch))
        adopted = beside.folds.completed
        manifest = committer.commit(draft, [record] if (record := beside.folds.record_of(draft)) else [])
        acknowledged(world, ROOT, manifest, epoch)
        beside.folds.settled(manifest)
        world.seen["adopted"] += beside.folds.completed - adopted
        beside.folds.start_if_due(manifest)
        given_up = beside.retention.given_up
        beside.retention.committed(manifest)
        collected = beside.collection.collected
        beside.collection.committed()
        world.seen["collected by a driver"] += collected - world.collected.get(actor.name, 0)
        world.collected[actor.name] = collected
        world.seen["given up by a driver"] += given_up - world.given_up.get(actor.name, 0)
        world.given_up[actor.name] = given_up
        if beside.savepoints.is_asked():
            beside.savepoints.begin(manifest)
            world.seen["savepoint begun by a driver"] += 1


def asker(world: World, actor: Actor) -> None:
    """Asks whichever run there is for savepoints; of few names, so that those of the job before are met again."""
    clock, ids, root = world.wrong_clock(), world.ids(), world.root(actor)
    while True:
        world.turns.rest(actor, world.rng.choice(EPOCHS_STEPS))
        try:
            term = newest_term(root)
            if term:
                request_savepoint(root, term, f"sp-{world.rng.randrange(3)}", clock=clock, ids=ids)
        except (Invalid, Unavailable):
            world.seen["nobody to ask"] += 1


def successor(number: int) -> Body:
    """`stillstate delete --root` while nothing was heard of the runs for an hour, and then a job of the same name in that place."""

    def body(world: World, actor: Actor) -> None:
        clock, ids = world.wrong_clock(), world.ids()
        world.turns.rest(actor, world.rng.randrange(40, 400))
        for _ in range(world.rng.choice((3, 12))):
            world.clock.at_ms += HOUR_MS
            try:
                delete_root(world.root(actor), clock=clock, ids=ids, owner=actor.name, with_savepoints=True, threads=1)
                world.seen["deleted and begun anew"] += 1
                break
            except (Invalid, Unavailable, Fenced) as error:
                world.seen[f"not deleted: {type(error).__name__}"] += 1
                world.turns.rest(actor, 20)
        whole_driver(number)(world, actor)

    return body


def restorer(number: int) -> Body:
    """Keeps a copy of the folder, puts it back in place of what became of it, and starts the job there."""

    def body(world: World, actor: Actor) -> None:
        world.turns.rest(actor, world.rng.randrange(30, 250))
        while not world.laws.root(world.near, ROOT).live:
            world.turns.rest(actor, 20)
            if not any(a.essential and not a.done and a is not actor for a in world.turns.actors):
                return  # nobody makes any snapshot any more
        backup = world.near.below(ROOT)
        world.turns.rest(actor, world.rng.randrange(30, 400))
        world.clock.at_ms += HOUR_MS
        world.laws.is_restored(world.near, ROOT, backup)
        world.seen["backup put back"] += 1
        world.turns.rest(actor, world.rng.choice((0, 20, 200)))
        whole_driver(number)(world, actor)

    return body


def cast_of(world: World, plan: Any) -> None:
    """The runs of a plan that plays whole drivers."""
    for number in range(plan.drivers):
        late = world.rng.randrange(200) * number
        world.add(f"driver {number}", whole_driver(number), essential=True, asleep=late)
    if plan.fate == "deleted":
        world.add("successor", successor(90), essential=True)
    elif plan.fate == "restored":
        world.add("restorer", restorer(91), essential=True)
    world.add("asker", asker, essential=False, asleep=30)
