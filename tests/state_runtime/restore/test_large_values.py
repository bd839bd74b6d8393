"""Large values: versions of a key, and keys side by side, are put together within a bound, however many there are.

A column of text ends at 2 GiB in Arrow. Eleven versions of a text of 200 MB under one key were too much for a restore,
although ten of them were out of date. The bounds are small here, so that small values are large.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_job import LocalJob
from model import colliding, examples
from shapes import KEYS, SHAPES, Change, batch_of_change, changes_of, plain
from test_stage_task import Gather, job, operator, rows, stage_task  # noqa: F401 - a fixture

from state_runtime.base.errors import InvalidData
from state_runtime.base.settings import JobSettings
from state_runtime.materialize import write_tables as folding
from state_runtime.restore import sources, stream
from state_runtime.snapshot.shard_versions import ShardVersions
from state_runtime.state import table
from state_runtime.state.table import StateSchema, bounded_slices, fold, hashes_of
from state_runtime.task import persist
from state_runtime.task.shard_access import TaskJob

BOUND = 20_000
LARGE = "x" * 1_000
PARTS = ("a", "b", "abc")


@contextmanager
def small_bounds(bound: int = BOUND) -> Iterator[list[int]]:
    """Yields the bytes of whatever is put together within it."""
    together: list[int] = []
    concat = pa.concat_batches

    def recorded(batches: Sequence[pa.RecordBatch], **options: Any) -> pa.RecordBatch:
        together.append(sum(batch.nbytes for batch in batches))
        return concat(batches, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "FOLD_BYTES_MAX", bound)
        patch.setattr(stream, "_WINDOW_BYTES", bound // 4)
        patch.setattr(sources, "_GROUP_BYTES", 1)
        patch.setattr(pa, "concat_batches", recorded)
        yield together


def large_change(job: LocalJob, number: int) -> dict[str, Change]:  # noqa: F811 - not the fixture
    """Of every state the value of one key that changes each time, and of another one."""
    made = {}
    for shape in job.shapes:
        is_map, is_plain = shape.startswith("map"), SHAPES[shape].entries is None
        part: Any = None if is_plain else PARTS[number % 3] if is_map else 1 + number % 3
        keys = (KEYS[0], KEYS[1 + number % 6])
        made[shape] = Change(rows={(key, part): (number, LARGE, None) for key in keys})
    return made


@pytest.mark.parametrize("backend", ["arrow", "rocksdb"])
def test_a_restore_puts_no_more_together_than_the_bound(tmp_path: Path, backend: str) -> None:
    """All versions and keys together are ten times as much as it. Local merges keep to it, too."""
    shapes = ("value", "map", "list", "value-expires")
    given_job = LocalJob(tmp_path, shapes, parallelism=1, settings=JobSettings(backend=backend))  # type: ignore[arg-type]
    with small_bounds(3_000) as together:
        for number in range(60):
            given_job.epoch(large_change(given_job, number), check=False)
        assert max(together, default=0) <= 10_000, "of one key two versions, in the merges of epochs"
    given_job.host_of = lambda shard: "elsewhere"
    given_job.restart()
    with small_bounds() as together:
        access, reader = given_job.open(0)
        assert access.numbers.kind == "primary"
        assert max(together, default=0) <= BOUND
    given_job.check(reader, 0)


@given(st.data())
@examples(60)
def test_folding_by_halves_is_folding(data: Any) -> None:
    """Clear markers, tombstones and expiry included."""
    shape = data.draw(st.sampled_from(sorted(SHAPES)))
    batches = [batch_of_change(shape, c, colliding) for c in data.draw(st.lists(changes_of(shape), max_size=6))]
    for drop_deleted, now_ms in ((False, None), (True, 3)):
        expected = fold(batches, SHAPES[shape], drop_deleted=drop_deleted, now_ms=now_ms)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(table, "FOLD_BYTES_MAX", 1)
            found = fold(batches, SHAPES[shape], drop_deleted=drop_deleted, now_ms=now_ms)
        assert plain(found.to_pylist()) == plain(expected.to_pylist())


def versions_of(counts: Sequence[int], schema: StateSchema) -> list[pa.RecordBatch]:
    """Batches of large values under the first so many of a few keys."""
    hashes = np.sort(np.random.default_rng(0).integers(0, 1 << 64, 40, np.uint64))
    return [schema.batch(hashes[:n], None, [pa.array(range(n), pa.int64())], [pa.array([LARGE] * n)]) for n in counts]


ONE = StateSchema(pa.schema([("k", pa.int64())]), pa.schema([("s", pa.string())]))


def test_of_one_key_two_versions_are_put_together_at_a_time() -> None:
    """What is out of date goes first."""
    batches = versions_of([1] * 100, ONE)
    with small_bounds() as together:
        assert fold(batches, ONE, drop_deleted=True).num_rows == 1
    assert max(together) <= BOUND < sum(batch.nbytes for batch in batches)


def test_a_merge_is_given_no_more_than_the_bound_at_a_time() -> None:
    """Keys side by side, each in a source of its own: no version of one is out of date."""
    (batch,) = versions_of([40], ONE)
    given_bytes: list[int] = []

    def recorded(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        given_bytes.append(sum(part.nbytes for part in parts))
        return fold(parts, ONE, drop_deleted=True)

    with small_bounds():
        merged = list(stream.merge_sorted([iter([batch.slice(n, 1)]) for n in range(40)], recorded))
    assert max(given_bytes) <= BOUND
    assert pa.Table.from_batches(merged).to_pylist() == batch.to_pylist()


@given(st.lists(st.integers(0, 40), max_size=5), st.integers(1, 30_000))
@examples(60)
def test_bounded_slices_are_the_batches_again(counts: list[int], bytes_max: int) -> None:
    batches = versions_of(counts, ONE)
    ends = 0
    taken: list[pa.RecordBatch] = []
    for part in bounded_slices(batches, bytes_max):
        first, last = min(int(hashes_of(b)[0]) for b in part), max(int(hashes_of(b)[-1]) for b in part)
        assert first == last or sum(b.nbytes for b in part) <= bytes_max
        assert not taken or ends < first, "in ascending order, no hash in two of them"
        ends = last
        taken += part
    assert sorted(n for b in taken for n in b.column(2).to_pylist()) == sorted(n for c in counts for n in range(c))


def test_the_log_of_a_fold_is_kept_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys whose values are more together than a column holds: each keeps its newest version only."""
    batches = versions_of([40] * 6, ONE)
    parts = [(SimpleNamespace(snapshot_id=n, path=""), b) for n, b in enumerate(batches)]
    monkeypatch.setattr(folding, "read_parts", lambda root, log: (((part,), (batch,)) for part, batch in parts))
    versions = SimpleNamespace(read=lambda batch, *_: batch, fold=lambda b, **k: fold(b, ONE, **k))
    unit: Any = SimpleNamespace(log=(), low=0, high=(1 << 64) - 1)
    context: Any = SimpleNamespace(sizes=SimpleNamespace(unfolded_bytes=BOUND))
    work: Any = folding._Work(None, unit, context, versions, None, None, None)  # type: ignore[arg-type]
    with small_bounds() as together:
        log = work.log()
    assert max(together) <= BOUND
    assert fold(log, ONE, drop_deleted=True).num_rows == 40


def test_a_key_with_more_than_is_read_back_is_refused_before_it_is_committed(
    job: TaskJob,  # noqa: F811 - the fixture
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the task that would write it: two versions of a key must fit into one column when they are read."""
    gather = Gather()
    monkeypatch.setattr(persist.refuse_large_keys, "__defaults__", (1_000,))
    task = stage_task(job, operator(), ShardVersions.none(1), gather, trusted=[0])
    list(task([rows(*(f"small {n}" for n in range(200)))]))
    assert len(gather.got) == 1, "many keys may have more"
    task = stage_task(job, operator(), ShardVersions.none(1), gather, trusted=[0])
    with pytest.raises(
        InvalidData, match=r"operator 'counts', state '.*': the key with the hash .* has .* bytes in this"
    ):
        list(task([rows("small", "x" * 2_000)]))
    assert len(gather.got) == 1


def test_more_than_a_column_holds_is_told_and_not_arrows_error() -> None:
    """Nothing is copied: Arrow adds up the offsets first."""
    text = pa.array(["x" * (64 << 20)])
    batch = ONE.batch(np.zeros(1, np.uint64), None, [pa.array([1], pa.int64())], [text])
    with pytest.raises(InvalidData, match=r"2,147,\d+,\d+ bytes in 32 rows .*parallelism"):
        table.concat([batch] * 32, ONE.arrow)
