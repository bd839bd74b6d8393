"""What a job can go back to: its snapshots and its savepoints alike, by one way of naming them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from state_runtime.base.errors import JobRootMismatch, MissingFile, MissingSnapshot, SnapshotInUse
from state_runtime.maintenance.copy.make_savepoint import SavepointWork, savepoint_of_stopped
from state_runtime.maintenance.delete.snapshots import delete_snapshots
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.savepoint_record import SavepointRecord, rewrite_savepoint
from state_runtime.store import open_store
from tests.faults.starts import BATCHES, Shop, World
from tests.faults.test_start_from import collect_all, grown


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def local(tmp_path: Path) -> Shop:
    return Shop(str(tmp_path / "store"))


def work(world: World, shop: Shop, job: str) -> SavepointWork:
    return SavepointWork(shop.root(job), "h:1", world.clock, world.ids)


def saved(world: World, shop: Shop, name: str) -> SavepointRecord:
    record = savepoint_of_stopped(work(world, shop, "job"), name)
    assert record.state == "COMPLETED"
    return record


def copied_while_it_ran(world: World, local: Shop, tmp_path: Path) -> Shop:
    """A copy that was made in the wrong order: manifests of the last batches, a savepoint of batch 5, data of batch 4."""
    grown(world, local, "job")
    copied = tmp_path / "copies" / "job"
    shutil.copytree(Path(local.url) / "job", copied)
    world.run("job", local, 5, inline_bytes_max=0)
    saved(world, local, "five")
    world.run("job", local, 7, inline_bytes_max=0)
    for folder in ("snapshots", "savepoints"):
        shutil.rmtree(copied / folder, ignore_errors=True)
        shutil.copytree(Path(local.url) / "job" / folder, copied / folder)
    return Shop(str(tmp_path / "copies"))


def test_a_copy_of_a_live_root_goes_on_from_a_savepoint_that_is_newer_than_any_whole_snapshot(
    world: World, local: Shop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copies = copied_while_it_ran(world, local, tmp_path)
    newest = world.newest("job", copies).snapshot_id
    with caplog.at_level("WARNING"):
        committer = world.open(world.beginning("job", copies))
    assert "savepoints/five" in caplog.text
    assert committer.last.snapshot_id == newest + 1
    world.check("job", copies, 5)
    world.beat(committer, copies.root("job"), "stopped")
    shutil.rmtree(tmp_path / "copies" / "job" / "savepoints")
    world.run("job", copies, 8, take_output=True)
    world.check("job", copies, 8)


def test_a_savepoint_that_is_not_whole_or_not_complete_is_passed_over(
    world: World, local: Shop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copies = copied_while_it_ran(world, local, tmp_path)
    folder = tmp_path / "copies" / "job" / "savepoints" / "five"
    whole = tmp_path / "whole"
    shutil.copytree(folder, whole)
    next((folder / "changelog").rglob("*.seg")).unlink()
    assert_goes_back_to_batch_4(world, copies, caplog)
    shutil.rmtree(folder)
    shutil.copytree(whole, folder)
    (folder / "savepoint.json").write_bytes(b"{")
    assert_goes_back_to_batch_4(world, copies, caplog)
    shutil.rmtree(folder)
    shutil.copytree(whole, folder)
    (folder / "savepoint.json").unlink()
    assert_goes_back_to_batch_4(world, copies, caplog)


def assert_goes_back_to_batch_4(world: World, copies: Shop, caplog: pytest.LogCaptureFixture) -> None:
    beginning = world.beginning("job", copies)
    caplog.clear()
    with caplog.at_level("WARNING"):
        content = beginning.look()
    assert content is not None
    assert "the newest one that is whole" in caplog.text
    assert "savepoints/five" not in caplog.messages[-1]


def test_with_no_whole_snapshot_a_whole_savepoint_serves(world: World, local: Shop, tmp_path: Path) -> None:
    copies = copied_while_it_ran(world, local, tmp_path)
    for folder in ("changelog", "tables"):
        shutil.rmtree(tmp_path / "copies" / "job" / folder)
    world.open(world.beginning("job", copies))
    world.check("job", copies, 5)


def test_in_place_nothing_is_passed_over_for_a_savepoint(world: World, local: Shop) -> None:
    """What is missing where the job ran is damage: somebody has to say what is to be gone back to."""
    world.run("job", local, 3)
    saved(world, local, "three")
    newest = world.newest("job", local)
    local.root("job").delete(newest.segments[-1].path)
    assert world.beginning("job", local).look() == newest
    with pytest.raises(MissingFile):
        world.run("job", local, 4, parallelism=3)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_start_goes_back_to_a_savepoint_by_its_name(world: World, local: Shop, is_kept: bool) -> None:
    """Whether or not the job still has the snapshot that it is of."""
    grown(world, local, "job")
    target = saved(world, local, "before").snapshot_id
    world.run("job", local, 6)
    bad = world.newest("job", local).snapshot_id
    root = local.root("job")
    if not is_kept:
        old = [i for i in Catalog(open_store(local.url), "job").snapshot_ids() if i < bad]
        delete_snapshots(root, old, clock=world.clock, ids=world.ids)
        collect_all(root)
    committer = world.open(world.beginning("job", local, from_snapshot="before"))
    assert committer.last.abandoned == ((target + 1, bad),)
    world.check("job", local, 4)
    world.beat(committer, root, "stopped")
    other = [*BATCHES[:4], ["key-1"] * 7, ["key-9"]]
    world.run("job", local, 6, batches=other)
    world.check("job", local, 6, other)


def test_a_start_from_a_savepoint_that_was_killed_while_it_copied_is_repeated(world: World, local: Shop) -> None:
    """Nothing of the job has changed until the fencing snapshot."""
    grown(world, local, "job")
    saved(world, local, "before")
    world.run("job", local, 6, inline_bytes_max=0)
    bad = world.newest("job", local)
    root = local.root("job")
    old = [i for i in Catalog(open_store(local.url), "job").snapshot_ids() if i < bad.snapshot_id]
    delete_snapshots(root, old, clock=world.clock, ids=world.ids)
    collect_all(root)

    class Killed(Exception):
        pass

    def die(_: object) -> None:
        raise Killed

    with pytest.raises(Killed):
        world.open(world.beginning("job", local, from_snapshot="before", on_copy=die))
    assert world.newest("job", local) == bad
    world.open(world.beginning("job", local, from_snapshot="before"))
    world.check("job", local, 4)


def test_only_a_complete_savepoint_of_this_job_is_gone_back_to(world: World, local: Shop) -> None:
    world.run("job", local, 2)
    with pytest.raises(MissingSnapshot, match="no savepoint 'nope'"):
        world.beginning("job", local, from_snapshot="nope").look()
    record = saved(world, local, "mine")
    root = local.root("job")
    rewrite_savepoint(root, SavepointRecord(**{**vars(record), "state": "IN_PROGRESS"}))
    with pytest.raises(SnapshotInUse, match="IN_PROGRESS"):
        world.beginning("job", local, from_snapshot="mine").look()
    world.run("other", local, 1)
    shutil.copytree(Path(local.url) / "job" / "savepoints", Path(local.url) / "other" / "savepoints")
    rewrite_savepoint(local.root("other"), record)
    with pytest.raises(JobRootMismatch, match="of another job"):
        world.beginning("other", local, from_snapshot="mine").look()
