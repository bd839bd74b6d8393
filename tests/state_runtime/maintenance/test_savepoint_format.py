"""Savepoints in a format of their own: the same state, whoever writes them, and whatever kills him."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from state_runtime.base.actor import Actor
from state_runtime.driver.rollback import execute_rollback, plan_rollback
from state_runtime.maintenance.convert.into_savepoint import convert_small
from state_runtime.maintenance.convert.snapshot import is_of_format
from state_runtime.maintenance.copy.make_savepoint import SavepointWork, resume_savepoint, savepoint_of_stopped
from state_runtime.maintenance.delete.snapshots import delete_snapshots
from state_runtime.maintenance.links import Shared, find_links
from state_runtime.maintenance.verify.places import verify_place
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.pins import read_pins
from state_runtime.snapshot.savepoint_record import SavepointRecord, read_savepoint
from state_runtime.store import Store, open_store
from tests.faults.starts import BATCHES, Shop, World, expected_output
from tests.faults.test_start_from import collect_all, grown


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def local(world: World, tmp_path: Path) -> Shop:
    shop = Shop(str(tmp_path / "store"))
    grown(world, shop, "job")
    return shop


def work(world: World, shop: Shop) -> SavepointWork:
    return SavepointWork(shop.root("job"), "h:1", world.clock, world.ids, wait=lambda _: False, convert=convert_small)


def is_whole(world: World, root: Store, name: str) -> Manifest:
    """The folder holds a canonical snapshot with batches 1 to 4, nothing else, and no pin is left."""
    shop = Shop(f"{root.url}/savepoints")
    manifest = world.check(name, shop, 4)
    assert is_of_format(manifest, "canonical")
    folder = shop.root(name)
    report = verify_place(folder, snapshot_id=None, level="full", clock=world.clock, ids=world.ids)
    assert report.exit_code == 0
    there = {o.path for top in ("tables", "changelog", "files") for o in folder.list_objects(top)}
    assert len(there) == report.objects
    assert not [pin for pin in read_pins(root) if pin.reason == "savepoint"]
    return manifest


@pytest.mark.parametrize("changelog", ["on", "off"])
def test_a_canonical_savepoint_is_the_same_snapshot_and_any_job_begins_with_it(
    world: World, tmp_path: Path, changelog: str
) -> None:
    shop = Shop(str(tmp_path / "store"))
    if changelog == "off":
        world.run("job", shop, 4, changelog="off")
    else:
        grown(world, shop, "job")
    record = savepoint_of_stopped(work(world, shop), "one", format="canonical")
    assert (record.state, record.format, record.message) == ("COMPLETED", "canonical", "")
    made = is_whole(world, shop.root("job"), "one")
    newest = world.newest("job", shop)
    assert (made.job_uid, made.snapshot_id, made.epoch) == (newest.job_uid, newest.snapshot_id, newest.epoch)
    assert find_links(shop.root("job")).of_owner("one") == Shared()
    world.run("child", shop, 6, replace(shop.start("job"), place=f"{shop.url}/job/savepoints/one"))
    world.check("child", shop, 6)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_job_goes_back_to_its_canonical_savepoint(world: World, local: Shop, is_kept: bool) -> None:
    """To the snapshot itself where the job still has it; else to what the savepoint holds. Its history is its own."""
    root = local.root("job")
    savepoint_of_stopped(work(world, local), "one", format="canonical")
    world.run("job", local, 6)
    newest = world.newest("job", local)
    if not is_kept:
        old = [i for i in Catalog(open_store(local.url), "job").snapshot_ids() if i < newest.snapshot_id]
        delete_snapshots(root, old, clock=world.clock, ids=world.ids)
        collect_all(root)
    catalog = Catalog(open_store(local.url), "job", world.clock)
    plan = plan_rollback(catalog, f"{local.url}/job/savepoints/one")
    committed = execute_rollback(catalog, plan, Actor(world.clock, world.ids, "h", 9))
    assert (committed.snapshot_id, committed.origins) == (newest.snapshot_id + 1, ())
    world.check("job", local, 4)
    other = [*BATCHES[:4], ["key-1"] * 7, ["key-9"]]
    world.run("job", local, 6, batches=other)
    world.check("job", local, 6, other)
    assert world.published("job") == expected_output(0, 6) + expected_output(4, 6, other)


class Killed(BaseException):
    """Nothing that catches errors catches it."""


def killed_at(world: World, local: Shop, name: str, step: int) -> bool:
    """A savepoint whose process dies at the step-th change of its record or of its progress; whether it came so far."""
    seen = 0

    def watch(_: SavepointRecord) -> None:
        nonlocal seen
        seen += 1
        if seen == step:
            raise Killed

    try:
        savepoint_of_stopped(replace(work(world, local), watch=watch), name, format="canonical")
    except Killed:
        return True
    return False


def test_a_killed_conversion_is_resumed_wherever_it_was_and_leaves_nothing(world: World, local: Shop) -> None:
    step = 1
    while killed_at(world, local, f"at-{step}", step):
        world.clock.advance_s(61)
        record = resume_savepoint(work(world, local), f"at-{step}")
        assert (record.state, record.format) == ("COMPLETED", "canonical")
        is_whole(world, local.root("job"), f"at-{step}")
        step += 1
    assert step > 4, "fold, copy, comparison and end are steps"


def test_two_that_convert_at_once_end_with_one_savepoint(world: World, local: Shop) -> None:
    """The one who slept is told that he was relieved, and what he wrote is removed by the other."""
    root, went = local.root("job"), []

    def watch(record: SavepointRecord) -> None:
        if record.message.startswith("compare") and not went:
            went.append(record)
            world.clock.advance_s(61)
            assert resume_savepoint(work(world, local), "one").state == "COMPLETED"

    with pytest.raises(Exception, match="taken over by its owner number 2"):
        savepoint_of_stopped(replace(work(world, local), watch=watch), "one", format="canonical")
    assert went
    assert read_savepoint(root, "one").state == "COMPLETED"
    is_whole(world, root, "one")


def test_what_is_too_large_for_a_driver_is_left_to_whoever_waits(
    world: World, local: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No attempt is counted as failed, the snapshot stays pinned, and `--resume` may go on at once."""
    root = local.root("job")
    with monkeypatch.context() as small:
        small.setattr("state_runtime.maintenance.convert.into_savepoint.HERE_BYTES_MAX", 10)
        left = savepoint_of_stopped(work(world, local), "one", format="canonical")
    assert left.state == "IN_PROGRESS"
    assert "savepoint job one --resume" in left.message
    assert left.is_stale(world.clock.now_ms())
    assert [pin.holder for pin in read_pins(root)] == ["savepoint one"]
    assert resume_savepoint(work(world, local), "one").state == "COMPLETED"
    is_whole(world, root, "one")
