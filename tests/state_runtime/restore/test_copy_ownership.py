"""Local copies follow the job: they are found again wherever its root lies, met by nobody else, and go when it is gone."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from model import CountingIds

from state_runtime.base.progress import Progress
from state_runtime.maintenance.delete.roots import delete_root
from state_runtime.restore import copy_ownership as job_folder
from state_runtime.restore.copy_ownership import GONE_AFTER_S, HostedRoot, settle_in
from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import Store, open_store
from state_runtime.task import shard_access
from tests.faults.starts import Shop, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def local(tmp_path: Path) -> Shop:
    return Shop(str(tmp_path / "store"))


class HostClock:
    """A clock that runs beside the host's, so that files have ages."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        self.ahead_s = ahead_s

    def now_ms(self) -> int:
        return int((time.time() + self.ahead_s) * 1000)

    def monotonic_s(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    def advance(seconds: float) -> None:
        monkeypatch.setattr(shard_access, "SYSTEM_CLOCK", HostClock(seconds))

    return advance


def first_epoch(world: World, shop: Shop, job: str, until: int, **given: object) -> Progress:
    """The numbers of a run's first epoch."""
    catalog = Catalog(open_store(shop.url), job)
    last = catalog.latest()
    world.run(job, shop, until, take_output=True, **given)  # type: ignore[arg-type]
    world.check(job, shop, until)
    progress = catalog.manifest((last.snapshot_id if last is not None else 0) + 2).progress
    assert progress is not None
    return progress


def kinds(progress: Progress) -> tuple[int, int]:
    return progress.local_restores, progress.primary_restores + progress.stale_restores


def hosted(world: World) -> list[str]:
    """Folders of jobs on the host."""
    return sorted(n for n in os.listdir(world.folder / "host" / "state") if not n.startswith("."))


@pytest.mark.parametrize("how", ["renamed store", "renamed job", "by another path"])
def test_a_root_that_is_reached_by_another_url_finds_its_copies_again(world: World, local: Shop, how: str) -> None:
    world.run("job", local, 3)
    before, shop, name = hosted(world), local, "job"
    if how == "renamed store":
        shop = Shop(local.url + "-elsewhere")
        shutil.move(local.url, shop.url)
    elif how == "renamed job":
        name = "other"
        shutil.move(Path(local.url) / "job", Path(local.url) / name)
    else:
        shop = Shop(str(world.folder / "mounted"))
        os.symlink(local.url, shop.url)
    assert kinds(first_epoch(world, shop, name, 5)) == (2, 0)
    assert len(hosted(world)) == 1
    assert hosted(world) != before, "the folder is named after the place"


def test_a_new_job_of_the_same_name_and_place_never_meets_the_copies_of_the_deleted_one(
    world: World, local: Shop
) -> None:
    world.run("job", local, 3)
    (old,) = hosted(world)
    delete_root(local.root("job"), clock=world.clock, ids=world.ids, owner="h:1")
    shutil.rmtree(world.out)
    assert kinds(first_epoch(world, local, "job", 2)) == (0, 0)
    assert old in hosted(world)
    assert len(hosted(world)) == 2


def test_two_living_copies_of_a_root_keep_their_own_copies(world: World, local: Shop, tmp_path: Path) -> None:
    """`cp` and both are run: misuse, but none may take from the other what it works with."""
    world.run("job", local, 3)
    copies = Shop(str(tmp_path / "copies"))
    shutil.copytree(local.url, copies.url)
    assert kinds(first_epoch(world, copies, "job", 4))[0] == 0
    assert kinds(first_epoch(world, local, "job", 4)) == (2, 0)
    assert len(hosted(world)) == 2


def test_a_backup_does_not_take_the_copies_of_runs_that_it_does_not_know(
    world: World, local: Shop, tmp_path: Path
) -> None:
    """The root went on and was lost; the backup's history has no run that used them last."""
    world.run("job", local, 2)
    copies = Shop(str(tmp_path / "copies"))
    shutil.copytree(local.url, copies.url)
    world.run("job", local, 3)
    shutil.rmtree(local.url)
    assert kinds(first_epoch(world, copies, "job", 4))[0] == 0
    assert len(hosted(world)) == 2


@pytest.mark.parametrize("how", ["deleted", "moved", "claimed"])
def test_copies_of_roots_that_are_gone_are_removed_after_a_day(
    world: World, local: Shop, later: Callable[[float], None], how: str
) -> None:
    world.run("gone", local, 2)
    world.run("kept", local, 2)
    if how == "deleted":
        delete_root(local.root("gone"), clock=world.clock, ids=world.ids, owner="h:1")
    elif how == "moved":
        shutil.move(Path(local.url) / "gone", world.folder / "elsewhere")
    else:
        world.run("child", local, 3, local.start("gone", "CLAIM"), take_output=True)
    before = hosted(world)
    later(GONE_AFTER_S / 2)
    world.run("job", local, 1)
    assert len(hosted(world)) == len(before) + 1, "its root may have been moved, and be started tomorrow"
    later(GONE_AFTER_S + 60)
    world.run("job", local, 2)
    assert len(hosted(world)) == len(before)
    assert kinds(first_epoch(world, local, "kept", 3)) == (2, 0)


def test_what_cannot_be_known_to_be_gone_stays(
    world: World, local: Shop, tmp_path: Path, later: Callable[[float], None]
) -> None:
    """Of another store (it may only not be mounted), of an earlier version, and damaged ones."""
    other = Shop(str(tmp_path / "other-store"))
    world.run("away", other, 1)
    shutil.rmtree(other.url)
    state = world.folder / "host" / "state"
    world.run("job", local, 1)
    for name, place in (("0" * 16 + "-aa", None), ("1" * 16 + "-bb", b"{"), ("2" * 16 + "-cc", b'{"url":1}')):
        (state / name).mkdir()
        if place is not None:
            (state / name / "place.json").write_bytes(place)
    (state / "mine").mkdir()
    before = hosted(world)
    later(GONE_AFTER_S * 3)
    world.run("job", local, 2)
    assert hosted(world) == before


def test_a_store_that_is_not_mounted_is_no_reason_to_remove_anything(world: World, local: Shop) -> None:
    """All of its jobs look as if they were gone, and so does one's own."""
    world.run("job", local, 1)
    world.run("other", local, 1)
    mine = next(Path(p) for p in (world.folder / "host" / "state").iterdir() if "-" in p.name)
    uid = mine.name.partition("-")[2]
    shutil.move(local.url, local.url + "-unmounted")
    root: Store = local.root("job")
    folder = mine.with_name("f" * 16 + "-" + uid)
    settle_in(HostedRoot(root, uid, 9, "r", folder), open_store, HostClock(GONE_AFTER_S * 3), CountingIds())
    assert len(hosted(world)) == 3


def test_nothing_here_fails_a_run(world: World, local: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full or broken disk, a store that does not answer: local copies are worth time and nothing else."""
    world.run("job", local, 1)

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for until, name in enumerate(("_hosted", "_write_place", "_is_time_to_look"), 2):
        (world.folder / "host" / "state" / ".looked").unlink()
        with monkeypatch.context() as patched:
            patched.setattr(job_folder, name, broken)
            world.run("job", local, until)
        world.check("job", local, until)
        world.run("job", local, until)
        settle_in(hosted_root(world, local), open_store, HostClock(), CountingIds())


def hosted_root(world: World, local: Shop) -> HostedRoot:
    """The job as its next run would see it; leaves the stamp of a look behind."""
    root = local.root("job")
    info = Catalog(open_store(local.url), "job").job_info()
    (name,) = hosted(world)
    return HostedRoot(root, info.uid, 99, "next", world.folder / "host" / "state" / name)
