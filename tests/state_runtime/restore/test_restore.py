"""A shard's state comes back from local copies, from stale ones and the tail, and from the primary: always the same state."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from local_job import LocalJob
from model import FakeClock, seeds
from shapes import KEYS, SHAPES, Change

from state_runtime.materialize import apply, materialize
from state_runtime.snapshot.lineage import gone_back
from tests.job_settings import job_settings

BACKENDS = ("arrow", "rocksdb")


def changes(rng: random.Random, job: LocalJob) -> dict[str, Change]:
    """A random change of every state: rows put and removed, keys cleared."""
    made = {}
    for shape in job.shapes:
        schema = SHAPES[shape]
        rows: dict[Any, Any] = {}
        for key in rng.sample(KEYS, 4):
            part: Any = None
            if schema.entries is not None:
                part = rng.randrange(-3, 12) if shape == "timers" else rng.randrange(1, 9)
                part = rng.choice(("a", "b", None)) if len(schema.entries) else part
            rows[key, part] = rng.choice([None, (rng.randrange(99), "x", rng.choice([None, rng.randrange(-3, 12)]))])
        cleared = frozenset(rng.sample(KEYS, 1)) if schema.entries is not None and rng.random() < 0.3 else frozenset()
        made[shape] = Change(cleared, rows)
    return made


def job_of(tmp_path: Path, backend: str, **settings: Any) -> LocalJob:
    return LocalJob(tmp_path, settings=job_settings(backend=backend, **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_matching_copy_serves_a_restart_without_the_primary(tmp_path: Path, backend: str) -> None:
    job, rng = job_of(tmp_path, backend), random.Random(1)
    for _ in range(3):
        job.epoch(changes(rng, job))
    job.restart()
    assert set(job.epoch(changes(rng, job)).values()) == {"local"}
    assert all(numbers.bytes == 0 for numbers in job.numbers.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stale_copy_and_the_tail_give_the_state_of_the_primary(tmp_path: Path, backend: str) -> None:
    """A shard ran elsewhere for some epochs and comes back to where it was."""
    for number, rng in seeds(4):
        job = job_of(tmp_path / str(number), backend)
        for _ in range(3):
            job.epoch(changes(rng, job))
        job.host_of = lambda shard: "elsewhere"
        assert set(job.epoch(changes(rng, job)).values()) <= {"primary", ""}
        job.epoch(changes(rng, job))
        job.host_of = lambda shard: "host"
        assert set(job.epoch(changes(rng, job)).values()) == {"stale"}
        job.epoch(changes(rng, job))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_that_no_manifest_names_is_not_believed(tmp_path: Path, backend: str) -> None:
    """An epoch that was never committed left its version; what it holds did not happen."""
    job, rng = job_of(tmp_path, backend), random.Random(2)
    job.epoch(changes(rng, job))
    job.epoch(changes(rng, job), commit=False)
    # Another attempt at that snapshot is committed elsewhere: what lies here claims to be its state.
    job.host_of = lambda shard: "elsewhere"
    job.epoch(changes(rng, job))
    job.host_of = lambda shard: "host"
    assert set(job.epoch(changes(rng, job)).values()) == {"stale"}


@pytest.mark.parametrize(("copies_max", "kind"), [(1, "primary"), (4, "stale")])
def test_so_many_copies_of_a_shard_are_looked_at_as_is_set(tmp_path: Path, copies_max: int, kind: str) -> None:
    """The newest one belongs to an epoch that never was; the one below it serves, if a restart gets that far."""
    job, rng = job_of(tmp_path, "arrow", local_copies_max=copies_max), random.Random(2)
    job.epoch(changes(rng, job))
    job.epoch(changes(rng, job), commit=False)
    job.host_of = lambda shard: "elsewhere"
    job.epoch(changes(rng, job))
    job.host_of = lambda shard: "host"
    assert set(job.epoch(changes(rng, job)).values()) == {kind}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_restored_version_serves_the_next_attempt(tmp_path: Path, backend: str) -> None:
    """A job that fails in its first epoch again and again reads the primary once."""
    job, rng = job_of(tmp_path, backend), random.Random(3)
    for _ in range(2):
        job.epoch(changes(rng, job))
    job.host_of = lambda shard: "new"
    job.versions = ["f" * 16] * job.parallelism
    assert "primary" in job.epoch(changes(rng, job), commit=False).values()
    for _ in range(3):
        assert set(job.epoch(changes(rng, job), commit=False).values()) == {"stale"}
    folders = [f for f in job.local("new").rglob("*") if f.is_file() and "objects" not in f.parts]
    job.epoch(changes(rng, job))
    job.epoch(changes(rng, job))
    assert len(folders) > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_outdated_local_files_go_before_the_rows_are_processed_and_none_after(tmp_path: Path, backend: str) -> None:
    """What comes after the rows is the checkpoint's time, and removing the inputs of a large merge takes long."""
    job, rng = job_of(tmp_path, backend, runs_max=2), random.Random(4)

    def files(shard: int) -> set[Path]:
        return {f for f in job.shard_folder(shard).rglob("*") if f.is_file()}

    for _ in range(6):
        job.epoch(changes(rng, job))
    for shard in range(job.parallelism):
        access, reader = job.open(shard)
        at_first, attempt = files(shard), job.ids.short()
        reader = access.tidied(attempt, job.versions[shard], reader)
        processed = files(shard)
        assert at_first - processed
        version, failed = access.write(attempt, reader, {}, job.versions[shard], False, {"timers": 1})
        assert (version, failed) == (attempt, False)
        assert processed <= files(shard)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("local", [True, False], ids=["local", "primary"])
def test_a_chain_of_parallelisms_is_a_job_that_was_never_rescaled(tmp_path: Path, backend: str, local: bool) -> None:
    """2 → 4 → 3 → 7 → 1 → 2, each shard compared with the plain history, from local copies or without any."""
    for number, rng in seeds(2):
        job = job_of(tmp_path / str(number), backend, local_recovery=local)
        for parallelism in (2, 4, 3, 7, 1, 2):
            job.restart(parallelism)
            kinds = set(job.epoch(changes(rng, job)).values())
            assert "stale" in kinds or parallelism == 2 or not local
            assert not kinds & {"stale", "local"} or local
            job.epoch(changes(rng, job))


@pytest.mark.parametrize("backend", BACKENDS)
def test_local_recovery_off_reads_no_copy(tmp_path: Path, backend: str) -> None:
    job, rng = job_of(tmp_path, backend, local_recovery=False), random.Random(5)
    job.epoch(changes(rng, job))
    job.restart()
    assert set(job.epoch(changes(rng, job)).values()) <= {"primary", ""}
    assert not any(numbers.local_failed for numbers in job.numbers.values()), "nothing local was asked for"
    assert set(job.epoch(changes(rng, job)).values()) == {""}, "within a run the version at hand serves"


def test_rows_beside_the_tables_of_the_base_are_read_up_to_their_very_edges(tmp_path: Path) -> None:
    """A base has no table where it has no rows; what the log put there since is all there is. Where it has one, what was
    removed since hides its rows."""
    places = dict(zip(KEYS, (0, 99, 100, 150, 200, 201, 1 << 63), strict=True))
    job = LocalJob(tmp_path, ("value",), parallelism=1, hash_of=places.__getitem__)

    def put(n: int, *hashes: int) -> None:
        job.epoch({"value": Change(rows={(key, None): (n, "x", None) for key in KEYS if places[key] in hashes})})

    put(1, 100, 150, 200)
    folded = apply(job.manifest, materialize(job.root, job.manifest, "major", clock=FakeClock(), ids=job.ids))
    (table,) = folded.layers[0].tables
    cut = replace(folded.layers[0], tables=(replace(table, hash_low=100, hash_high=200),))
    job.adopt(replace(folded, layers=(cut,)))
    put(2, *places.values())
    gone = next(key for key in KEYS if places[key] == 150)
    job.epoch({"value": Change(rows={(gone, None): None})})
    job.host_of = lambda shard: "elsewhere"
    assert job.epoch({"value": Change()}) == {0: "primary"}


@pytest.mark.parametrize("mode", ["major", "minor"])
def test_a_copy_older_than_the_base_gives_way_to_the_primary(tmp_path: Path, mode: Any) -> None:
    """The changes that it lacks are in the base, where removed rows left no trace; a delta keeps them, and the copy serves."""
    for number, rng in seeds(3):
        job = LocalJob(tmp_path / str(number), ("value", "list"))
        for _ in range(2):
            job.epoch(changes(rng, job))
        job.adopt(apply(job.manifest, materialize(job.root, job.manifest, "major", clock=FakeClock(), ids=job.ids)))
        job.epoch(changes(rng, job))
        job.host_of = lambda shard: "elsewhere"
        for _ in range(2):
            job.epoch(changes(rng, job))
        job.adopt(apply(job.manifest, materialize(job.root, job.manifest, mode, clock=FakeClock(), ids=job.ids)))
        job.host_of = lambda shard: "host"
        kinds = set(job.epoch(changes(rng, job)).values())
        assert "primary" in kinds or mode == "minor"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_of_an_abandoned_history_does_not_serve(tmp_path: Path, backend: str) -> None:
    """An older snapshot was gone back to. Snapshots since then are still there and prove the copies, but lead on to another state."""
    for number, rng in seeds(4):
        job = job_of(tmp_path / str(number), backend)
        for _ in range(3):
            job.epoch(changes(rng, job))
        target, history = job.manifest, {shape: list(batches) for shape, batches in job.history.items()}
        for _ in range(2):
            job.epoch(changes(rng, job))
        job.manifest = job._put(
            replace(gone_back(target, job.manifest), snapshot_id=job.manifest.snapshot_id + 1, kind="fencing")
        )
        job.history = history
        job.versions, job.trusted = ["f" * 16] * job.parallelism, [False] * job.parallelism
        # Nothing changes in this epoch: a copy that served would be the whole difference.
        assert set(job.epoch({}, commit=False).values()) <= {"primary", ""}
        job.epoch(changes(rng, job))
        job.epoch(changes(rng, job))
