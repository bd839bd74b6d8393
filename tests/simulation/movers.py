"""The actors that carry whole job roots elsewhere: copies, moves, moves that are cut and repeated, moves that are taken back."""

from __future__ import annotations

from state_runtime.base import actor as acting
from state_runtime.base.errors import CorruptData, Invalid, Unavailable
from state_runtime.maintenance.move.execute import abort_move, execute_move
from state_runtime.maintenance.move.plan import MoveMode, plan_move
from state_runtime.store import Store

from .turns import Actor
from .world import ROOT, World


def mover(world: World, actor: Actor) -> None:
    """Copies the root to one place after the other; once in a while it moves it, and the job is at home there."""
    clock, ids = world.wrong_clock(), world.ids()
    number = 0
    while True:
        world.time_passes(clock)
        world.turns.pause(actor)
        bucket = world.far if number % 2 else world.near
        path = f"/moved/{actor.name[-1]}-{number}"
        source, target = world.root(actor), world.store(actor, path, bucket)
        mode: MoveMode = "move" if world.rng.random() < 0.3 else "copy"

        try:
            plan = plan_move(source, target, mode=mode, snapshot_id=None, clock=clock)
            done = execute_move(source, target, plan, threads=1, actor=acting.Actor(clock, ids, "h", number))
            world.seen[f"root {mode} done"] += 1
            number += 1
            if done.snapshots and mode == "move":
                world.laws.is_heir(world.near, ROOT, plan.job.uid, path, bucket)
                return
        except CorruptData as error:
            world.laws.broken(f"a root could not be carried to {path}: {error}")
        except (Invalid, Unavailable) as error:
            world.seen[f"no {mode}: {type(error).__name__}"] += 1
            if world.rng.random() < 0.3:
                _take_back(world, source, target, clock, ids)
                number += 1


def _take_back(world: World, source: Store, target: Store, clock: object, ids: object) -> None:
    try:
        abort_move(source, target, clock=clock, ids=ids)  # type: ignore[arg-type]
        world.seen["move taken back"] += 1
    except (Invalid, Unavailable):
        world.seen["nothing to take back"] += 1
