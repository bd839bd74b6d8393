"""Who plays in a run: what administers snapshots, and everybody else by the plan."""

from __future__ import annotations

import random
from typing import Any

from state_runtime.base.errors import Invalid, Unavailable
from state_runtime.base.settings import RetentionPolicy
from state_runtime.maintenance.delete.snapshots import delete_snapshots
from state_runtime.maintenance.gc.collect import apply_gc, plan_gc
from state_runtime.maintenance.marks import read_existing
from state_runtime.maintenance.retention.apply import apply_retention, make_retention_plan
from state_runtime.snapshot.job_info import ClaimMode

from . import actors, movers, others, runs, savers
from .turns import Actor
from .world import Plan, World


def collector(world: World, actor: Actor) -> None:
    """Garbage collection, both passes, again and again; now and then the second one is a good while after the first."""
    clock, ids = world.wrong_clock(), world.ids()
    root = world.root(actor)
    while True:
        world.time_passes(clock)
        try:
            plan = plan_gc(root, clock=clock, min_age_s=world.plan.floor_ms / 1000, unsafe_min_age=True)
            if world.rng.random() < 0.2:
                world.time_passes(clock)
            done = apply_gc(root, plan, clock=clock, ids=ids, owner=actor.name, threads=1)
            world.seen["collected"] += done.total
            world.seen["candidates that stayed"] += done.kept
            world.seen["not collected"] += len(done.failures)
        except (Invalid, Unavailable) as error:
            world.seen[f"no collection: {type(error).__name__}"] += 1
            world.turns.pause(actor)


def retainer(world: World, actor: Actor) -> None:
    """A policy that keeps few, as a plan that is carried out; now and then snapshots that somebody names."""
    clock, ids = world.wrong_clock(), world.ids()
    root = world.root(actor)
    while True:
        world.time_passes(clock)
        try:
            if world.rng.random() < 0.7:
                policy = RetentionPolicy(keep_last=world.rng.choice([1, 2, 4]))
                plan = make_retention_plan(root, policy, clock=clock, share_max=1.0)
                done = apply_retention(root, plan, clock=clock, ids=ids, owner=actor.name, threads=1)
                world.seen["given up"] += len(done.snapshot_ids)
                world.seen["kept for somebody who came"] += len(done.kept)
            else:
                found = read_existing(root).snapshot_ids
                if found:
                    deleted = delete_snapshots(root, [world.rng.choice(found)], clock=clock, ids=ids, threads=1)
                    world.seen["deleted by hand"] += len(deleted.snapshot_ids)
        except (Invalid, Unavailable) as error:
            world.seen[f"nothing given up: {type(error).__name__}"] += 1
            world.turns.pause(actor)


HEAVY = 4


def seed_plan(seed: int, **given: Any) -> Plan:
    """The plan that a seed draws, but for what is given."""
    return Plan.drawn(random.Random(seed ^ 0x5EED), **given)


def play(seed: int, plan: Plan | None = None) -> World:
    """Run one seed; the result holds what happened and which laws broke."""
    plan = plan or seed_plan(seed)
    world = World(seed, plan)
    if plan.whole:
        runs.cast_of(world, plan)
    for number in range(0 if plan.whole else plan.drivers):
        late = world.rng.randrange(120) * number
        world.add(f"driver {number}", actors.driver(number), essential=True, asleep=late)
    for count, name, body in (
        (plan.folders, "fold", actors.folder),
        (plan.readers, "reader", actors.reader),
        (plan.pinners, "pinner", actors.pinner),
        (plan.retainers, "retention", retainer),
        (plan.collectors, "collector", collector),
        (plan.copiers, "copier", others.copier),
        (plan.savers, "saver", savers.saver),
        (plan.movers, "mover", movers.mover),
    ):
        for number in range(count):
            weight = HEAVY if name in ("retention", "collector", "mover") else 1
            world.add(f"{name} {number}", body, essential=False, asleep=world.rng.randrange(20, 60), weight=weight)
    for number in range(plan.children):
        mode: ClaimMode = "CLAIM" if plan.claims else "NO_CLAIM"
        # It waits until there is something to take over, and then it must come to its end.
        world.add(f"child {number}", others.child(number, mode), essential=False, asleep=40)
    return world.run()
