"""A drill restores as a task does, compares what came back, and leaves nothing behind."""

from __future__ import annotations

import fcntl
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from local_job import LocalJob
from maintenance_root import Job
from model import ALL_HASHES, OPERATOR, CountingIds, FakeClock
from test_restore import changes, job_of

from state_runtime.base.actor import Actor
from state_runtime.maintenance.verify.drill import DrillReport, drill
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.pins import read_pins
from state_runtime.state.local import LocalShard
from state_runtime.store import open_store
from tests.stored import read_states

BACKENDS = ("arrow", "rocksdb")


def drilled(root: Path, folder: Path, manifest: Any, backend: str = "arrow", **more: Any) -> DrillReport:
    catalog = Catalog(open_store(str(root)), "job")
    actor = Actor(FakeClock(), CountingIds(prefix=77), "host", 1)
    return drill(catalog, manifest, folder, backend=backend, actor=actor, **more)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(open_store(str(tmp_path / "store"))).checkpoints(6).ended()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_kind_of_state_comes_back_as_the_store_has_it(tmp_path: Path, backend: str) -> None:
    made: LocalJob = job_of(tmp_path, backend)
    rng = random.Random(5)
    for _ in range(4):
        made.epoch(changes(rng, made))
    seen: list[tuple[int, int]] = []
    report = drilled(
        tmp_path / "store", tmp_path / "drills", made.manifest, backend, on_progress=lambda *now: seen.append(now)
    )
    assert report.problems == ()
    assert report.exit_code == 0
    assert {state.state for state in report.states} == set(made.shapes)
    states = read_states(made.root, made.manifest, OPERATOR, made.operator.state_schemas, *ALL_HASHES)
    expected = sum(batch.num_rows for batch in states.values())
    assert report.rows == expected > 0
    assert seen[0] == (0, 2)
    assert seen[-1] == (2, 2)


def test_a_drill_leaves_nothing_behind(tmp_path: Path, job: Job) -> None:
    before = sorted(f.name for f in (tmp_path / "store").rglob("*") if f.is_file())
    report = drilled(tmp_path / "store", tmp_path / "drills", job.committer.last)
    assert report.is_restorable
    assert report.rows == 4
    assert [f.name for f in (tmp_path / "drills").iterdir()] == [".lock"]
    assert read_pins(job.root) == []
    assert sorted(f.name for f in (tmp_path / "store").rglob("*") if f.is_file()) == before


def test_what_is_damaged_is_named_and_nothing_is_left_either(tmp_path: Path, job: Job) -> None:
    file = tmp_path / "store" / "job" / job.committer.last.segments[0].path
    body = bytearray(file.read_bytes())
    body[len(body) // 3] ^= 1
    file.write_bytes(bytes(body))
    report = drilled(tmp_path / "store", tmp_path / "drills", job.committer.last)
    assert report.exit_code == 5
    assert file.name in " ".join(report.problems)
    assert [f.name for f in (tmp_path / "drills").iterdir()] == [".lock"]


def test_a_restore_that_loses_a_row_is_found(tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """All digests are right, and the local files lack a row: only comparing rows finds it."""
    right = LocalShard.write_restored

    def loses(self: LocalShard, version: str, states: Any, now_ms: int, **more: Any) -> Any:
        def cut(batches: Any) -> Any:
            for batch in [batches] if isinstance(batches, pa.RecordBatch) else batches:
                yield batch.slice(0, max(0, batch.num_rows - 1))

        return right(self, version, {s: cut(b) for s, b in states.items()}, now_ms, **more)

    monkeypatch.setattr(LocalShard, "write_restored", loses)
    report = drilled(tmp_path / "store", tmp_path / "drills", job.committer.last)
    assert report.exit_code == 5
    assert "in the store" in report.problems[0]
    assert "after the restore" in report.problems[0]
    assert report.rows < 4


def test_what_a_killed_drill_left_is_removed_by_the_next_and_a_live_one_is_not(tmp_path: Path, job: Job) -> None:
    dead, live = tmp_path / "drills" / "job-7-dead", tmp_path / "drills" / "job-8-live"
    for folder in (dead, live):
        (folder / "0").mkdir(parents=True)
        (folder / "0" / "state").write_text("rows")
        (folder / ".lock").touch()
    held = os.open(live / ".lock", os.O_RDWR)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert drilled(tmp_path / "store", tmp_path / "drills", job.committer.last).is_restorable
        assert not dead.exists()
        assert (live / "0" / "state").exists()
    finally:
        os.close(held)


def test_the_snapshot_is_pinned_while_it_is_restored(tmp_path: Path, job: Job) -> None:
    held: list[Any] = []
    drilled(
        tmp_path / "store",
        tmp_path / "drills",
        job.committer.last,
        on_progress=lambda *_: held.append([p.snapshot_id for p in read_pins(job.root)]),
    )
    assert held[0] == [job.committer.last.snapshot_id]
