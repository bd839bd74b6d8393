"""Rows of a shard as passes: however they are held, cut and left, an operator gets each row once, in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import CountingIds, examples

from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.changelog.inflight import InflightPass, RowsLeft, RowsPart, cut_by_shards, left_of_shard
from state_runtime.changelog.parts import PartEntry, encode_part, sha256
from state_runtime.changelog.rows import decode_rows
from state_runtime.processors.grouping import GroupedRows
from state_runtime.snapshot.manifest import RowsLayout
from state_runtime.spark.columns import HASH_COLUMN, SEQUENCE_COLUMN, WAKE_SEQUENCE
from state_runtime.state.key_groups import hash_range_of_shard, shard_of_hash
from state_runtime.task.gathered import gather
from state_runtime.task.slicing import Slicer, StageBudget
from state_runtime.task.sorted_input import (
    KeyColumns,
    MemoryPass,
    RowPass,
    SortedRows,
    SpilledPass,
    StoredPass,
    Taken,
    batch_of,
)

KEYS = KeyColumns(("k",), pa.schema([("k", pa.string())]))
Row = tuple[int, int, str]
"""Hash, place, key. Two keys may share a hash."""

# Few hashes, all over the range, so that keys meet and shards have some.
HASHES = st.sampled_from([0, 1, (1 << 62) + 5, 1 << 63, (3 << 62) - 1, (1 << 64) - 1])


@st.composite
def inputs(draw: st.DrawFn) -> list[Row]:
    """Rows with different places, in the order of arrival; two keys of each hash."""
    hashes = draw(st.lists(st.tuples(HASHES, st.booleans()), min_size=1, max_size=60))
    places = draw(st.permutations(range(len(hashes))))
    return [(h, place, f"{h}{'b' if second else 'a'}") for (h, second), place in zip(hashes, places)]


def sorted_rows(rows: list[Row]) -> SortedRows:
    rows = sorted(rows)
    data = pa.RecordBatch.from_pydict(
        {"k": pa.array([k for _, _, k in rows], pa.string()), "n": pa.array([p for _, p, _ in rows], pa.int64())}
    )
    return SortedRows(
        data, np.array([h for h, _, _ in rows], dtype=np.uint64), np.array([p for _, p, _ in rows], dtype=np.int64)
    )


def grouped(rows: list[Row]) -> GroupedRows:
    made = sorted_rows(rows)
    return KEYS.group(made.rows, made.hashes, made.places)


def rows_in(pieces: list[GroupedRows]) -> list[Row]:
    """The rows of slices, in the order in which an operator gets them."""
    found = []
    for piece in pieces:
        hashes = np.repeat(piece.hashes, piece.stops - piece.starts).tolist()
        found += list(zip(hashes, piece.sequence.tolist(), piece.rows.column("k").to_pylist()))
    return found


def by_key(rows: list[Row]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for _, place, key in rows:
        places.setdefault(key, []).append(place)
    return places


def part_of(rows: list[Row], number: int = 0) -> tuple[RowsPart, bytes]:
    body = encode_part(batch_of(grouped(rows)) if len({k for _, _, k in rows}) == 1 else _stored(rows)).to_pybytes()
    entry = PartEntry(
        kind="rows", operator="o", state="", path="", offset=number, length=len(body), digest=sha256(body), rows=len(rows),
        raw_bytes=1 << 20, hash_low=min(rows)[0], hash_high=max(rows)[0],
    )  # fmt: skip
    return RowsPart("segment", entry), body


def _stored(rows: list[Row]) -> pa.RecordBatch:
    from state_runtime.changelog.rows import rows_batch

    made = sorted_rows(rows)
    return rows_batch(made.hashes, made.places, made.rows)


def stored_pass(
    rows: list[Row], part_rows: int, parallelism: int = 1
) -> tuple[InflightPass, Callable[[RowsPart], SortedRows]]:
    """A pass in parts of so many rows, and what reads them."""
    rows = sorted(rows)
    parts = [part_of(rows[at : at + part_rows], at) for at in range(0, len(rows), part_rows)]
    bodies = {part.part.digest: body for part, body in parts}

    def read(held: RowsPart) -> SortedRows:
        batch = decode_rows(bodies[held.part.digest], held.part, "here")
        data = pa.RecordBatch.from_arrays(batch.columns[2:], names=["k", "n"])
        return SortedRows(data, batch.column(0).to_numpy(), batch.column(1).to_numpy())

    left = (RowsLeft(rows[0][0], rows[-1][0], len(rows), 100 * len(rows)),)
    return cut_by_shards(InflightPass("o", 7, 0, RowsLayout(""), tuple(p for p, _ in parts), left), parallelism), read


def opened(passed: InflightPass, read: Callable[[RowsPart], SortedRows], shard: int, parallelism: int) -> StoredPass:
    low, high = hash_range_of_shard(shard, parallelism)
    empty = sorted_rows([]).rows
    return StoredPass(passed.epoch, passed.parts, left_of_shard(passed, low, high), read, KEYS, empty)


def taken(passed: RowPass, sizes: list[int]) -> list[Taken]:
    """So many rows at a time; the last size again and again, until nothing is left."""
    found = []
    for size in sizes:
        got = passed.take(size)
        if got is None:
            break
        found.append(got)
    return found


def check_order(slices: list[list[GroupedRows]], rows: list[Row]) -> None:
    """Every row once; no key in two slices; slices in order of the hashes; the rows of a key in order of their places."""
    flat = rows_in([piece for pieces in slices for piece in pieces])
    assert sorted(flat) == sorted(rows)
    assert all(places == sorted(places) for places in by_key(flat).values())
    keys = [{k for _, _, k in rows_in(pieces)} for pieces in slices]
    assert sum(map(len, keys)) == len(set().union(*keys))
    ranges = [(min(rows_in(p))[0], max(rows_in(p))[0]) for p in slices]
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ranges))


SIZES = st.lists(st.integers(1, 25), min_size=1, max_size=8)


@examples(100)
@given(inputs(), SIZES)
def test_rows_in_memory_are_handed_out_once_and_in_order(rows: list[Row], sizes: list[int]) -> None:
    passed = MemoryPass(grouped(rows))
    got = taken(passed, sizes)
    done = sum(t.rows.rows.num_rows for t in got)
    assert passed.rows_left == len(rows) - done
    got += taken(passed, [1000])
    check_order([list(t.pieces()) for t in got], rows)
    assert passed.left() == ()
    assert passed.take(1) is None


@examples(100)
@given(inputs(), SIZES, st.integers(1, 4), st.integers(1, 30))
def test_sorted_runs_are_merged_as_they_are_handed_out(
    rows: list[Row], sizes: list[int], runs: int, held_max: int
) -> None:
    """A key whose rows lie in several runs gets them in the order of the source, also if there are too many to be held."""
    chunks = [rows[n::runs] for n in range(runs) if rows[n::runs]]
    passed = SpilledPass([sorted_rows(chunk) for chunk in chunks], KEYS, held_max)
    slices = [list(t.pieces()) for t in taken(passed, [*sizes, *[7] * 100])]
    check_order(slices, rows)
    for pieces in slices:
        for piece in pieces[1:]:
            assert piece.first_place > 0
        counts = [p.rows.num_rows for p in pieces]
        assert len(pieces) == 1 or counts[:-1] == [held_max] * (len(pieces) - 1)
        assert max(counts) <= max(held_max, 25)


@examples(150)
@given(inputs(), st.integers(1, 20), SIZES, st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_what_is_left_is_gone_on_with_at_any_parallelism_and_nothing_is_lost(
    rows: list[Row], part_rows: int, sizes: list[int], parallelisms: list[int]
) -> None:
    """FLIP-76's hard case: a chain of rescales, each before what the one before it restored is done."""
    passed, read = stored_pass(rows, part_rows)
    done: list[Row] = []
    for parallelism in parallelisms:
        passed = cut_by_shards(passed, parallelism)
        for shard in range(parallelism):
            low, high = hash_range_of_shard(shard, parallelism)
            own = opened(passed, read, shard, parallelism)
            slices = [list(t.pieces()) for t in taken(own, sizes)]
            some = rows_in([piece for pieces in slices for piece in pieces])
            assert all(shard_of_hash(h, parallelism) == shard for h, _, _ in some)
            done += some
            passed = passed.after(low, high, own.left())
            counted = sum(1 for r in rows if low <= r[0] <= high and r not in done)
            assert bool(own.left()) >= bool(counted)
    last = cut_by_shards(passed, 1)
    rest = opened(last, read, 0, 1)
    done += rows_in([piece for t in taken(rest, [5] * 100) for piece in t.pieces()])
    assert rest.left() == ()
    assert sorted(done) == sorted(rows)
    assert all(places == sorted(places) for places in by_key(done).values())


def test_a_part_is_named_as_long_as_a_range_meets_it() -> None:
    """A segment is held for its rows exactly so long."""
    rows = [(h, n, str(h)) for n, h in enumerate([10, 20, 30, 40])]
    passed, read = stored_pass(rows, 2)
    own = opened(passed, read, 0, 1)
    own.take(2)
    after = passed.after(0, (1 << 64) - 1, own.left())
    assert [p.part.hash_low for p in after.parts] == [30]
    assert after.rows == 2


def test_a_range_that_nothing_was_taken_of_is_left_as_it_was() -> None:
    """A task that only looks must not lose count: estimates of a cut range would drift otherwise."""
    passed, read = stored_pass([(h, n, str(h)) for n, h in enumerate([10, 20, 30, 40])], 2)
    assert opened(passed, read, 0, 1).left() == passed.left


def test_a_range_without_a_row_is_done_once_it_was_looked_at() -> None:
    """A rescale cuts ranges by shards and guesses how many rows each gets. One that has none would be gone on with for ever, and
    nothing would be read any more."""
    passed, read = stored_pass([(h, n, str(h)) for n, h in enumerate([10, 20, 30, 40])], 2)
    own = opened(replace(passed, left=(RowsLeft(11, 19, 1, 100), RowsLeft(21, 29, 1, 100))), read, 0, 1)
    assert own.take(5) is None
    assert own.left() == ()
    assert own.rows_left == 0


@pytest.mark.parametrize(
    ("later", "there"), [(RowsLeft(25, 45, 0, 0), [30, 40]), (RowsLeft(21, 29, 1, 100), [])], ids=["rows", "no row"]
)
@pytest.mark.parametrize("does_due", [True, False])
def test_what_is_due_is_done_once_and_after_the_last_row_whatever_is_guessed_of_ranges(
    later: RowsLeft, there: list[int], does_due: bool
) -> None:
    """Of the second pass nothing is thought to be left, although there are rows; or a row is, although there is none."""
    rows = [(h, n, str(h)) for n, h in enumerate([10, 20, 30, 40])]
    first, read = stored_pass(rows[:2], 2)
    second, read_second = stored_pass(rows, 4)
    passes: list[RowPass] = [
        opened(first, read, 0, 1),
        opened(replace(second, left=(later,)), read_second, 0, 1),
        MemoryPass(grouped([])),
    ]
    slicer = Slicer(
        passes, StageBudget(does_due=does_due), SYSTEM_CLOCK, shard=0, began_s=0.0, began_ms=0, rows_max=100
    )
    slices = list(slicer.slices())
    given = [h for part in slices for h, _, _ in rows_in([part.rows])]
    assert given == [10, 20, *there]
    assert [part.is_last for part in slices[:-1]] == [False] * (len(slices) - 1)
    assert slices[-1].is_last == slicer.did_due == does_due
    assert slicer.is_done


def arrived(rows: list[Row]) -> pa.RecordBatch:
    """Rows as Spark hands them to a task."""
    made = pa.RecordBatch.from_pydict(
        {
            "k": pa.array([k for _, _, k in rows], pa.string()),
            HASH_COLUMN: pa.array(np.array([h for h, _, _ in rows], dtype=np.uint64).view(np.int64)),
            SEQUENCE_COLUMN: pa.array([p for _, p, _ in rows], pa.int64()),
        }
    )
    return made


@examples(100)
@given(inputs(), st.integers(1, 5), st.integers(1, 400))
def test_input_beyond_the_bound_waits_on_disk_and_comes_back_whole(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], batches: int, bytes_max: int
) -> None:
    folder = tmp_path_factory.mktemp("spill") / "rows"
    chunks = [arrived(rows[n::batches]) for n in range(batches) if rows[n::batches]]
    got = gather([*chunks, arrived([(0, WAKE_SEQUENCE, "")])], KEYS, 1, bytes_max, folder, CountingIds())
    assert got is not None
    assert got.input_rows == len(rows)
    for _ in range(2):  # an operator may have to begin anew
        passed = got.begin()
        check_order([list(t.pieces()) for t in taken(passed, [9] * 100)], rows)
    assert not list(folder.glob("*")), "a run has no name once it is open"


def test_a_disk_that_takes_no_rows_costs_memory_and_nothing_else(tmp_path: Path) -> None:
    """Invariant 5: a local failure never fails an epoch."""
    (tmp_path / "rows").write_text("in the way")
    rows = [(n, n, str(n)) for n in range(100)]
    got = gather([arrived(rows[:50]), arrived(rows[50:])], KEYS, 1, 1, tmp_path / "rows", CountingIds())
    assert got is not None
    assert got.spilled_bytes == 0
    check_order([list(t.pieces()) for t in taken(got.begin(), [7] * 100)], rows)


def test_a_task_without_a_row_has_nothing() -> None:
    assert gather([], KEYS, 1, 1, Path("/nowhere"), CountingIds()) is None


def test_a_row_that_only_wakes_a_shard_does_so_whatever_may_be_held() -> None:
    """Its shard has something due, or rows that wait; without it the task would not know which one it is."""
    first, _ = hash_range_of_shard(3, 5)
    got = gather([arrived([(first, WAKE_SEQUENCE, "")])], KEYS, 5, 1, Path("/nowhere"), CountingIds())
    assert got is not None
    assert (got.shard, got.input_rows, got.begin().rows_left) == (3, 0, 0)
