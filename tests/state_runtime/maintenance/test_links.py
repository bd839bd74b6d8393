"""Copies that are hard links: told of, and avoided by who asks for it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from model import CountingIds, FakeClock

from state_runtime.base.actor import Actor
from state_runtime.maintenance.copy.make_savepoint import SavepointWork, savepoint_of_stopped
from state_runtime.maintenance.links import Links, Shared, find_links
from state_runtime.maintenance.move.execute import execute_move
from state_runtime.maintenance.move.plan import plan_move
from state_runtime.maintenance.verify.places import verify_place
from state_runtime.maintenance.verify.report import VerifyReport
from state_runtime.store import LocalStore, Store, open_store
from tests.faults.starts import Shop, World
from tests.faults.test_start_from import grown


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def root(world: World, tmp_path: Path) -> Store:
    shop = Shop(str(tmp_path / "store"))
    grown(world, shop, "job")
    return shop.root("job")


def saved(world: World, root: Store, name: str, *, independent: bool = False) -> Store:
    work = SavepointWork(root, "h:1", world.clock, world.ids)
    assert savepoint_of_stopped(work, name, independent=independent).state == "COMPLETED"
    return root.child(f"savepoints/{name}")


def verified(root: Store, parent: Store | None = None, snapshot_id: int | None = None) -> VerifyReport:
    return verify_place(
        root, snapshot_id=snapshot_id, level="full", parent=parent, clock=FakeClock(), ids=CountingIds()
    )


def overwrite_a_byte(root: Store, folder: str) -> None:
    """What a disk does to a block, and a person to a file: the inode stays."""
    path = Path(root.url) / next(o.path for o in root.list_objects(folder))
    with path.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 0xFF]))


def test_verify_says_which_files_are_shared_and_with_whom(world: World, root: Store) -> None:
    one = saved(world, root, "one")
    files = {o.path: o.bytes for folder in ("changelog", "tables") for o in one.list_objects(folder)}
    shared = Shared(len(files), sum(files.values()), ("",), 0)
    assert dict(verified(root).shared)["one"] == shared
    assert dict(verified(root).shared)[""] == Shared(shared.files, shared.bytes, ("one",), 0)
    assert verified(one, parent=root).shared == (("one", shared),)
    assert "the job" in str(shared)
    # Of the folder alone nobody knows with whom: only that the bytes have other names.
    assert dict(verified(one).shared)[""] == Shared(shared.files, shared.bytes, (), shared.files)


def test_files_outside_of_the_root_are_told_of(root: Store, tmp_path: Path) -> None:
    path = next(o.path for o in root.list_objects("tables"))
    os.link(Path(root.url) / path, tmp_path / "elsewhere")
    found = find_links(root).of_owner("")
    assert (found.files, found.owners, found.elsewhere) == (1, (), 1)


def test_an_independent_savepoint_survives_a_damaged_byte_of_its_job(world: World, root: Store) -> None:
    """And one that is not does not: that is why it is said."""
    linked = saved(world, root, "linked")
    alone = saved(world, root, "alone", independent=True)
    assert find_links(root).of_owner("alone") == Shared()
    for folder in ("changelog", "tables"):
        overwrite_a_byte(root, folder)
    assert verified(linked).exit_code == 5
    assert verified(alone).exit_code == 0


def test_an_independent_copy_of_damaged_bytes_is_refused(world: World, root: Store) -> None:
    """The bytes are compared as they are written anew; nothing wrong is kept."""
    overwrite_a_byte(root, "tables")
    work = SavepointWork(root, "h:1", world.clock, world.ids, wait=lambda _: False)
    record = savepoint_of_stopped(work, "one", independent=True)
    assert record.state == "FAILED"
    assert "another size or digest" in record.message


@pytest.mark.parametrize("place", ["root", "savepoint"])
def test_an_independent_copy_replaces_the_links_of_an_attempt_before(
    world: World, root: Store, place: str, tmp_path: Path
) -> None:
    source = root if place == "root" else saved(world, root, "one")
    target = open_store(str(tmp_path / "archive" / "copy"))
    for folder in ("tables", "changelog"):
        shutil.copytree(Path(source.url) / folder, tmp_path / "archive" / "copy" / folder, copy_function=os.link)
    assert isinstance(target, LocalStore)
    shutil.rmtree(tmp_path / "archive" / "copy" / "changelog")
    kept = tmp_path / "kept"
    shutil.move(tmp_path / "archive" / "copy", kept)
    plan = plan_move(source, target, mode="copy", snapshot_id=None, clock=world.clock)
    shutil.copytree(kept, tmp_path / "archive" / "copy", copy_function=os.link)
    execute_move(source, target, plan, independent=True, actor=Actor(world.clock, world.ids, "h", 1))  # fmt: skip
    assert find_links(target) == Links({}, {})
    assert verified(target).exit_code == 0
