"""The actors that copy and take over: copies to another root or store, children that claim or do not."""

from __future__ import annotations

from model import empty_manifest

from state_runtime.base.errors import CorruptData, Invalid, InvalidConfiguration, MissingSnapshot
from state_runtime.driver.start_position import StartFrom, StartPosition
from state_runtime.maintenance.copy.objects import copy_snapshot
from state_runtime.maintenance.delete.claimed import end_claim
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.job_info import ClaimMode

from .actors import Body, commit_epochs
from .turns import Actor
from .world import ROOT, World

COPY = "/copies/job"


def copier(world: World, actor: Actor) -> None:
    """Copies snapshots to a root of its own, in this store or another; a copy that was cut is repeated by the next one."""
    clock, ids = world.wrong_clock(), world.ids()
    while True:
        world.time_passes(clock)
        try:
            opened = world.snapshot_to_use(actor, clock)
            if opened is None:
                world.turns.pause(actor)
                continue
            bucket = world.far if world.rng.random() < 0.3 else world.near
            target = world.store(actor, COPY, bucket)
            done = copy_snapshot(opened.root, opened.manifest, target, clock=clock, ids=ids)
            world.seen["copied"] += 1
            if not world.laws.root(bucket, COPY).shows(done.manifest.snapshot_id):
                world.laws.broken(f"copy of {done.manifest.snapshot_id} was said to be complete, and it is no snapshot")
        except (MissingSnapshot, InvalidConfiguration):
            world.seen["copy came too late"] += 1
        except CorruptData as error:
            if opened is not None and world.laws.root(world.near, ROOT).shows(opened.manifest.snapshot_id):
                world.laws.broken(f"a live snapshot could not be copied: {error}")
            world.seen["gone while it was copied"] += 1


def child(number: int, mode: ClaimMode) -> Body:
    """A job that starts from the job's newest snapshot or an older one, and then makes snapshots of its own."""
    job = f"child-{number}"

    def body(world: World, actor: Actor) -> None:
        clock, ids = world.wrong_clock(), world.ids()
        catalog = Catalog(world.store(actor, "/children"), job, clock)
        while True:
            world.time_passes(clock)
            world.turns.pause(actor)
            try:
                opened = world.snapshot_to_use(actor, clock, old=0.3)
                if opened is None:
                    continue
                newest = mode == "CLAIM" or world.rng.random() < 0.6
                place = opened.root.url if newest else str(opened.place)
                beginning = StartPosition(catalog, start_from=StartFrom(place, mode), clock=clock, ids=ids)
                beginning.look()
                committer = beginning.open(lambda info: empty_manifest(info.uid), host="h", pid=number)
            except CorruptData as error:
                if (
                    opened is not None
                    and world.laws.root(world.near, ROOT).shows(opened.manifest.snapshot_id)
                    and not newest
                ):
                    world.laws.broken(f"a child could not start from a live snapshot: {error}")
                continue
            except Invalid as error:
                world.seen[f"no {mode} child: {type(error).__name__}"] += 1
                continue
            world.seen[f"{mode} child"] += 1
            actor.essential = True
            started = committer.info.started_from
            if mode == "CLAIM" and started is not None:
                world.laws.is_heir(world.near, ROOT, started.job_uid, f"/children/{job}")
            commit_epochs(world, actor, committer, f"/children/{job}")
            if mode == "CLAIM":
                for _ in range(4):
                    left = end_claim(world.root(actor), committer.info.uid, owner=actor.name, clock=clock, ids=ids)
                    world.seen["claimed root gone" if left.gone else "claimed root held"] += 1
                    if left.gone:
                        break
                    world.turns.rest(actor, 40)
            return

    return body
