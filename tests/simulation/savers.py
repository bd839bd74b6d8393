"""The actors that make savepoints, go on with those of others, and delete them."""

from __future__ import annotations

from state_runtime.base.errors import Invalid, Unavailable
from state_runtime.maintenance.copy.make_savepoint import SavepointWork, resume_savepoint, savepoint_of_stopped
from state_runtime.maintenance.delete.roots import delete_savepoint
from state_runtime.snapshot.paths import savepoint_path

from .turns import Actor
from .world import ROOT, World


def saver(world: World, actor: Actor) -> None:
    """Makes savepoints of the newest snapshot, goes on with those that were left, and deletes some."""
    clock, ids = world.wrong_clock(), world.ids()
    root = world.root(actor)
    # Nobody waits: a pause between two attempts ends the work, and whoever comes next goes on with it.
    work = SavepointWork(root, actor.name, clock, ids, wait=lambda seconds: True)
    names = [f"sp-{actor.name[-1]}-{n}" for n in range(3)]
    while True:
        world.time_passes(clock)
        name = world.rng.choice(names)
        try:
            draw = world.rng.random()
            if draw < 0.55:
                record = savepoint_of_stopped(work, name)
            elif draw < 0.8:
                record = resume_savepoint(work, name, force=True)
            else:
                delete_savepoint(root, name, clock=clock, ids=ids, owner=actor.name, threads=1)
                world.seen["savepoint deleted"] += 1
                continue
            world.seen[f"savepoint {record.state}"] += 1
            saved = world.laws.root(world.near, f"{ROOT}/{savepoint_path(name)}")
            if record.state == "COMPLETED" and not saved.shows(record.snapshot_id) and not saved.boundary.is_tombstone:
                world.laws.broken(f"savepoint {name} was said to be complete, and it is no snapshot")
        except (Invalid, Unavailable):
            world.seen["no savepoint"] += 1
            world.turns.pause(actor)
