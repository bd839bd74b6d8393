"""What killed writers leave on a local store: hidden from every listing but the one that collects it."""

from __future__ import annotations

import os
from pathlib import Path

from maintenance_root import DAY_S, Job
from model import FakeClock

from state_runtime.maintenance.delete.roots import delete_root
from state_runtime.maintenance.gc.collect import apply_gc, plan_gc
from state_runtime.store import open_store

FOLDERS = ("", "changelog/00000000000000000001", "tables/a/b", "snapshots/00000000000000000001", "savepoints/s", "new")


def plant(root: Path, *, at_ms: int) -> set[Path]:
    planted = {root / folder / f".tmp-{number:032x}" for number, folder in enumerate(FOLDERS)}
    for path in planted:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
        os.utime(path, (at_ms / 1000, at_ms / 1000))
    return planted


def real_job(tmp_path: Path) -> Job:
    """By the clock of the disk, that files can be old by."""
    clock = FakeClock()
    clock.at_ms = int(tmp_path.stat().st_mtime * 1000)
    return Job(open_store(str(tmp_path)), clock).checkpoints(2)


def test_no_other_listing_shows_what_killed_writers_left(tmp_path: Path) -> None:
    """A half-written file is nobody's object."""
    job = real_job(tmp_path)
    before = {found.path for found in job.root.list_objects("")}
    planted = plant(tmp_path / "job", at_ms=job.clock.at_ms)
    assert {found.path for found in job.root.list_objects("")} == before
    assert {tmp_path / "job" / found.path for found in job.root.list_debris()} == planted


def test_a_collection_removes_what_killed_writers_left_once_it_is_old(tmp_path: Path) -> None:
    """A writer at work has such a file too; one that is older than the floor has no writer any more."""
    job = real_job(tmp_path)
    planted = plant(tmp_path / "job", at_ms=job.clock.at_ms)
    apply_gc(job.root, plan_gc(job.root, clock=job.clock), clock=job.clock, ids=job.ids, owner="test")
    assert all(path.exists() for path in planted)
    job.clock.advance_s(3 * DAY_S)
    plan = plan_gc(job.root, clock=job.clock)
    assert apply_gc(job.root, plan, clock=job.clock, ids=job.ids, owner="test").failures == ()
    assert not any(path.exists() for path in planted)
    job.check()


def test_a_deleted_root_leaves_nothing_of_killed_writers(tmp_path: Path) -> None:
    """Nobody writes there any more, so all of it goes, with the folders."""
    job = real_job(tmp_path).ended()
    plant(tmp_path / "job", at_ms=job.clock.at_ms)
    assert delete_root(job.root, clock=job.clock, ids=job.ids, owner="test").failures == ()
    assert not (tmp_path / "job").exists()
