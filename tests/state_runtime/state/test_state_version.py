"""Versions of every shape of state against a plain reader: whatever is written, merged, reopened and put on top."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import CountingIds, FakeClock, HashOf, examples, hash_functions, spread
from shapes import KEYS, SHAPES, Change, Model, batch_of_change, both, changes_of, check_same, handled

from state_runtime.state.local import LocalShard
from state_runtime.state.reader import StateReader
from state_runtime.state.runs import BUDGET_ROWS_MIN
from state_runtime.state.table import entries_of, entry_of_time, fold
from state_runtime.state.version import OpenVersion


@dataclass(frozen=True)
class Epoch:
    """What happens in one epoch.

    Attributes:
        later_ms: how far the batch time moves on.
        take: whether what is due by the batch time is handled.
        again_ms: handled rows get this time, None removes them.
    """

    change: Change
    later_ms: int
    take: bool
    again_ms: int | None


def always_marked() -> AbstractContextManager[Any]:
    """Pieces are marked for any number of rows, not only where it is worth it."""
    return patch.multiple("state_runtime.state.pieces", _MARKED_MIN=1, _MARKED_ROWS_MAX=1_000)


marks = st.sampled_from([nullcontext, always_marked])
"""Whether the few rows of these tests are looked up as many are."""


def epochs_of(shape: str) -> st.SearchStrategy[list[Epoch]]:
    one = st.builds(Epoch, changes_of(shape), st.integers(0, 3), st.booleans(), st.none() | st.integers(-3, 12))
    return st.lists(one, min_size=1, max_size=7)


class Shard:
    """A folder of versions beside the plain reader of the same history."""

    def __init__(self, folder: Path, shape: str, hash_of: HashOf, runs_max: int, merge_rows_min: int) -> None:
        self.shape, self.hash_of, self.runs_max = shape, hash_of, runs_max
        self.local = LocalShard(folder, SHAPES, FakeClock(), merge_rows_min=merge_rows_min)
        self.ids = CountingIds()
        self.now_ms = -1
        self.history: list[pa.RecordBatch] = []
        self.version = self.ids.short()
        self.local.write_restored(self.version, {}, self.now_ms)

    def open(self) -> OpenVersion:
        return self.local.open(self.version, self.now_ms, verify=True)

    def model(self) -> Model:
        return Model(self.shape, self.history, self.now_ms)

    def epoch(self, epoch: Epoch) -> None:
        """One committed epoch; what the operator sees is compared on the way."""
        self.now_ms += epoch.later_ms
        base = self.open()
        check_same(base, self.model(), self.shape, self.hash_of)
        change, due_taken = epoch.change, {}
        if epoch.take and SHAPES[self.shape].time == "due":
            due = base.due(self.shape, self.now_ms)
            change = both(change, handled(self.shape, due, epoch.again_ms))
            due_taken = {self.shape: self.now_ms}
        batch = batch_of_change(self.shape, change, self.hash_of)
        self.history.insert(0, batch)
        check_same(base.overlaid({self.shape: batch}, due_taken), self.model(), self.shape, self.hash_of)
        self.version = self.ids.short()
        self.local.write(
            self.version,
            base,
            {self.shape: batch},
            now_ms=self.now_ms,
            due_taken=due_taken,
            runs_max=self.runs_max,
        )


@pytest.mark.parametrize("shape", SHAPES)
@given(st.data(), hash_functions, st.integers(2, 5), st.sampled_from([1, 3, 10, BUDGET_ROWS_MIN]), marks)
@examples(40)
def test_a_version_is_the_history_of_its_changes(
    tmp_path_factory: pytest.TempPathFactory,
    shape: str,
    data: Any,
    hash_of: HashOf,
    runs_max: int,
    budget: int,
    marked: Any,
) -> None:
    """After every epoch, in every method, with merges over several epochs, expiry, and times that were handled."""
    shard = Shard(tmp_path_factory.mktemp("local"), shape, hash_of, runs_max, budget)
    with marked():
        for epoch in data.draw(epochs_of(shape)):
            shard.epoch(epoch)
        check_same(shard.open(), shard.model(), shape, hash_of)


@pytest.mark.parametrize("shape", SHAPES)
@given(st.data(), hash_functions, st.integers(-3, 12), marks)
@examples(40)
def test_changes_on_top_of_any_reader_are_a_reader(
    shape: str, data: Any, hash_of: HashOf, now_ms: int, marked: Any
) -> None:
    """A backend without runs is overlaid this way; here the plain reader is the backend."""
    below = [batch_of_change(shape, c, hash_of) for c in data.draw(st.lists(changes_of(shape), max_size=3))]
    bottom = Model(shape, below, now_ms)
    first, second = (batch_of_change(shape, data.draw(changes_of(shape)), hash_of) for _ in range(2))
    above = OpenVersion.on_top_of(bottom, {shape: first}, SHAPES, now_ms)
    with marked():
        check_same(above, Model(shape, [first, *below], now_ms), shape, hash_of, bound_only=True)
        expected = Model(shape, [second, first, *below], now_ms)
        check_same(above.overlaid({shape: second}), expected, shape, hash_of, bound_only=True)


@pytest.mark.parametrize("shape", SHAPES)
@given(st.data(), hash_functions, st.integers(-3, 12))
@examples(25)
def test_a_restored_version_is_what_was_restored(
    tmp_path_factory: pytest.TempPathFactory, shape: str, data: Any, hash_of: HashOf, now_ms: int
) -> None:
    """In memory and from disk; what has expired is as if it had never been."""
    history = [batch_of_change(shape, c, hash_of) for c in data.draw(st.lists(changes_of(shape), max_size=4))]
    model = Model(shape, history, now_ms)
    table = fold(history, SHAPES[shape], drop_deleted=True)
    check_same(OpenVersion.of_batches("", {shape: table}, SHAPES, now_ms), model, shape, hash_of)
    local = LocalShard(tmp_path_factory.mktemp("local"), SHAPES, FakeClock())
    check_same(local.write_restored("0" * 16, {shape: table}, now_ms), model, shape, hash_of)
    check_same(local.open("0" * 16, now_ms, verify=True), model, shape, hash_of)


# --- times -------------------------------------------------------------------------------------------------------

KEY = ("a", 1.5)
OTHER = ("b", 1.5)


def due_rows(*rows: tuple[Any, int | None], shape: str = "rows-due", key: Any = KEY) -> pa.RecordBatch:
    """Windows of one key by name, each with its time; None removes it."""
    change = Change(rows={(key, name): None if at is None else (1, name, at) for name, at in rows})
    return batch_of_change(shape, change, spread)


class Timed:
    """A chain of versions of one state with an index by time."""

    def __init__(self, folder: Path, runs_max: int = 16, merge_rows_min: int = BUDGET_ROWS_MIN) -> None:
        self.local = LocalShard(folder, SHAPES, FakeClock(), merge_rows_min=merge_rows_min)
        self.ids = CountingIds()
        self.runs_max = runs_max
        self.reader: OpenVersion = self.local.write_restored(self.ids.short(), {}, 0)

    def epoch(self, batch: pa.RecordBatch, taken_ms: int | None = None) -> OpenVersion:
        version = self.ids.short()
        taken = {} if taken_ms is None else {"rows-due": taken_ms}
        changes = {"rows-due": batch}
        self.local.write(version, self.reader, changes, now_ms=0, due_taken=taken, runs_max=self.runs_max)
        self.reader = self.local.open(version, 0, verify=True)
        return self.reader

    def due(self, through_ms: int) -> list[str]:
        return self.reader.due("rows-due", through_ms).sort_by("due").column("entry.name").to_pylist()


def test_what_an_epoch_took_is_not_looked_at_again(tmp_path: Path) -> None:
    """A version knows how far each run was handled; only so does the cost of an epoch follow what is newly due."""
    timed = Timed(tmp_path)
    timed.epoch(due_rows(("", 5), ("a", 7)))
    assert timed.due(5) == [""]
    timed.epoch(due_rows(key=OTHER), taken_ms=5)
    assert timed.due(7) == ["a"], "the row of 5 was taken, removed or not"
    assert timed.reader.next_due("rows-due") == 7


def test_a_row_that_the_taking_epoch_wrote_is_seen_by_the_next(tmp_path: Path) -> None:
    """Nobody has looked at it, though its time lies before the bound that the epoch took."""
    timed = Timed(tmp_path)
    timed.epoch(due_rows(("", 5)))
    timed.epoch(due_rows(("", None), ("abc", 3)), taken_ms=5)
    assert timed.reader.next_due("rows-due") == 3
    assert timed.due(5) == ["abc"]


def test_taking_without_changes_moves_the_bound(tmp_path: Path) -> None:
    """Where all that was due had been removed before."""
    timed = Timed(tmp_path)
    timed.epoch(due_rows(("", 5)))
    version = timed.ids.short()
    timed.local.write(version, timed.reader, {}, now_ms=0, due_taken={"rows-due": 5, "timers": 5}, runs_max=4)
    reader = timed.local.open(version, 0, verify=True)
    assert reader.due("rows-due", 5).num_rows == 0
    assert reader.next_due("rows-due") is None


def test_the_bound_never_falls(tmp_path: Path) -> None:
    """An operator that asks for less than before has not un-handled anything."""
    timed = Timed(tmp_path)
    timed.epoch(due_rows(("", 5)))
    timed.epoch(due_rows(("a", 9), key=OTHER), taken_ms=5)
    timed.epoch(due_rows(("b", 9), key=OTHER), taken_ms=4)
    assert timed.due(8) == []


@pytest.mark.parametrize("merge_rows_min", [1, BUDGET_ROWS_MIN])
def test_a_row_removed_but_not_merged_away_does_not_come_back(tmp_path: Path, merge_rows_min: int) -> None:
    """Its run is merged with an untaken one, so the bound falls; the newer run still hides it."""
    timed = Timed(tmp_path, runs_max=3, merge_rows_min=merge_rows_min)
    timed.epoch(due_rows(*((name, 5) for name in ("a", "b", "d"))))
    timed.epoch(due_rows(("a", None), ("b", 8)), taken_ms=4)
    for number in range(12):
        timed.epoch(due_rows(("abc", 20 + number), key=OTHER))
        assert timed.due(5) == ["d"]
        assert timed.due(10) == ["d", "b"]
        assert timed.reader.next_due("rows-due") == 5
    timed.epoch(due_rows(("d", None)), taken_ms=5)
    for number in range(12):
        timed.epoch(due_rows(("abc", 40 + number), key=OTHER))
        assert timed.due(10) == ["b"]
        assert timed.reader.next_due("rows-due") == 8


@pytest.mark.parametrize("in_runs", [True, False])
def test_what_is_taken_below_is_passed_over_but_not_what_is_on_top(in_runs: bool) -> None:
    """The runtime asks when the shard must be woken next, before anything is written."""
    stored = due_rows(("", 2), ("a", 5), ("b", 9))
    below: StateReader = OpenVersion.of_batches("", {"rows-due": stored}, SHAPES)
    if not in_runs:
        below = Model("rows-due", [stored], 0)
    changes = {"rows-due": due_rows(("abc", 3), key=OTHER)}
    above = OpenVersion.on_top_of(below, changes, SHAPES, 0, {"rows-due": 5})
    if in_runs:
        assert isinstance(below, OpenVersion)
        above = below.overlaid(changes, {"rows-due": 5})
    assert sorted(above.due("rows-due", 20).column("due").to_pylist()) == [3, 9]
    assert above.next_due("rows-due") == 3
    assert above.next_due("rows-due", 3) == 9
    assert above.next_due("rows-due", 9) is None
    again = above.overlaid({}, {"rows-due": 4})
    assert again.due("rows-due", 20).column("due").to_pylist() == [9], (
        "the bound does not fall, and counts for what is there"
    )
    assert again.next_due("rows-due") == 9


def test_next_due_passes_over_many_removed_rows_but_not_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked every epoch: exact where that is cheap, a bound where it is not."""
    schema = SHAPES["timers"]
    count = 1_000
    hashes = np.arange(count, dtype=np.uint64)
    keys = [pa.array([str(n) for n in range(count)]), pa.nulls(count, pa.float64())]
    times = np.arange(count, dtype=np.int64)

    def batch(rows: slice, deleted: bool) -> pa.RecordBatch:
        size = len(times[rows])
        at = pa.nulls(size, pa.int64()) if deleted else pa.array(times[rows])
        cut = [k[rows.start : rows.stop] for k in keys]
        return schema.batch(hashes[rows], np.full(size, deleted), cut, [], entries=entry_of_time(times[rows]), times=at)

    stored = OpenVersion.of_batches("", {"timers": batch(slice(0, count), False)}, SHAPES)
    above = stored.overlaid({"timers": batch(slice(0, 900), True)})
    assert above.next_due("timers") == 900
    monkeypatch.setattr("state_runtime.state.version._STALE_ROWS_MAX", 500)
    assert above.next_due("timers") == 500
    assert stored.overlaid({"timers": batch(slice(0, count), True)}).due("timers", count).num_rows == 0


def test_what_is_due_is_found_without_reading_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200,000 stored timers ten are due: ten rows are read, and a few dozen places of the index."""
    schema = SHAPES["timers"]
    count = 200_000
    times = np.random.default_rng(1).permutation(count).astype(np.int64)
    stored = schema.batch(
        np.arange(count, dtype=np.uint64),
        None,
        [pa.nulls(count, pa.string()), pa.array(np.arange(count, dtype=np.float64))],
        [],
        entries=entry_of_time(times),
        times=pa.array(times),
    )
    local = LocalShard(tmp_path, SHAPES, FakeClock())
    local.write_restored("0" * 16, {"timers": stored}, 0)
    reader = local.open("0" * 16, 0, verify=False)
    looked_at = [0]

    class Counting:
        """The due column, counting what is read of it."""

        def __init__(self, values: Any) -> None:
            self.values = values

        def __getitem__(self, at: Any) -> Any:
            looked_at[0] += np.size(at)
            return self.values[at]

    (piece,) = reader._pieces_of("timers")
    monkeypatch.setitem(piece.data.__dict__, "due", Counting(piece.data.due))
    before = pa.total_allocated_bytes()
    due = reader.due("timers", 9)
    assert sorted(due.column("due").to_pylist()) == list(range(10))
    assert looked_at[0] < 100
    assert pa.total_allocated_bytes() - before < 10_000


def test_changes_that_are_not_due_get_no_index_by_time() -> None:
    """An epoch asks for what is due, and when the next is, on top of what it has just changed: sorting that by time for
    it was a fifth of a deduplicating epoch."""
    changed = due_rows(*((f"row {n}", 100 + n) for n in range(50)))
    above = OpenVersion.of_batches("", {"rows-due": due_rows(("old", 3))}, SHAPES).overlaid({"rows-due": changed})
    assert above.due("rows-due", 99).column("due").to_pylist() == [3]
    assert above.next_due("rows-due") == 3
    newest = above._pieces_of("rows-due")[0]
    assert not newest.data.is_indexed
    assert above.next_due("rows-due", 120) == 121  # what is passed over lies in front of it in the index
    assert sorted(above.due("rows-due", 101).column("due").to_pylist()) == [3, 100, 101]


def test_the_next_due_of_a_stored_run_is_read_from_its_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that nothing comes to asks in each epoch; a look at all of its rows would cost what is stored."""
    local = LocalShard(tmp_path, SHAPES, FakeClock())
    local.write_restored("0" * 16, {"rows-due": due_rows(("a", 7), ("b", 5), ("c", None))}, 0)
    reader = local.open("0" * 16, 0, verify=False)
    monkeypatch.setattr("state_runtime.state.pieces.Piece.earliest_due", None)
    assert reader.next_due("rows-due") == 5


@pytest.mark.parametrize("shape", ["value-expires", "map-expires"])
def test_what_has_expired_does_not_stay_on_disk(tmp_path: Path, shape: str) -> None:
    """A merge down to the oldest run leaves it out; else a state with a TTL would only ever grow."""
    local = LocalShard(tmp_path, SHAPES, FakeClock())
    ids = CountingIds()
    reader = local.write_restored(ids.short(), {}, 0)
    part = None if shape == "value-expires" else "m"
    for epoch in range(40):
        version = ids.short()
        change = batch_of_change(shape, Change(rows={((f"key {epoch}", 1.5), part): (epoch, "", epoch + 5)}), spread)
        local.write(version, reader, {shape: change}, now_ms=epoch, due_taken={}, runs_max=3)
        reader = local.open(version, epoch, verify=True)
    assert sum(batch.num_rows for batch in reader.batches(shape)) < 20


@pytest.mark.parametrize("merge_rows_min", [1, BUDGET_ROWS_MIN])
@pytest.mark.parametrize(
    ("shape", "removal"),
    [
        *((shape, "tombstone") for shape in SHAPES),
        *((shape, "clear marker") for shape in SHAPES if SHAPES[shape].entries is not None),
        *((shape, "expired") for shape in SHAPES if SHAPES[shape].time == "expires"),
    ],
)
def test_what_hides_a_row_of_the_large_old_run_is_not_merged_away(
    tmp_path: Path, shape: str, removal: str, merge_rows_min: int
) -> None:
    """Merges of newer runs leave the old one alone, so what hides its rows must go on doing so."""
    schema = SHAPES[shape]
    part: Any = {"timers": 900, "list": 1, "list-expires": 1}.get(shape, "a" if schema.entries is not None else None)
    time = 900 if schema.time == "due" else None
    rows: dict[Any, Any] = {((f"filler {n}", 0.5), part): (n, None, time) for n in range(300)}
    local = LocalShard(tmp_path, SHAPES, FakeClock(), merge_rows_min=merge_rows_min)
    ids = CountingIds()
    old = batch_of_change(shape, Change(rows={**rows, (KEYS[5], part): (1, None, time)}), spread)
    reader = local.write_restored(ids.short(), {shape: old}, 0)
    removed = Change(rows={(KEYS[5], part): (2, None, 5) if removal == "expired" else None})
    if removal == "clear marker":
        removed = Change(frozenset({KEYS[5]}))
    history = [old]
    for epoch in range(14):
        change = removed if epoch == 0 else Change(rows={(("new", float(epoch)), part): (epoch, None, time)})
        batch = batch_of_change(shape, change, spread)
        version = ids.short()
        local.write(version, reader, {shape: batch}, now_ms=9, due_taken={}, runs_max=3)
        reader = local.open(version, 9, verify=False)
        history.insert(0, batch)
        check_same(reader, Model(shape, history, 9), shape, spread)
    assert len(reader.version.states[shape].runs) < 10, "nothing was merged, and this shows nothing"
    assert reader.batches(shape)[-1].num_rows == 301, "the old run was merged, and this shows nothing"


# --- memory ------------------------------------------------------------------------------------------------------


@dataclass
class Peak:
    """Private memory of Arrow and of numpy at its highest, in bytes."""

    bytes: int = 0


_POOLS: list[pa.MemoryPool] = []  # a pool must outlive what was allocated from it


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Measures what is allocated inside; mapped files do not count."""
    peak = Peak()
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    _POOLS.append(pool)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        yield peak
        peak.bytes = pool.max_memory() + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)


ENTRIES = 1_000_000


def one_key(shape: str, entries: Any, parts: Sequence[pa.Array]) -> pa.RecordBatch:
    """A batch of one key with many entries."""
    count = len(entries)
    return SHAPES[shape].batch(
        np.full(count, 7, dtype=np.uint64),
        None,
        [pa.repeat(pa.scalar("key"), count), pa.repeat(pa.scalar(1.5), count)],
        [pa.array(np.arange(count)), pa.nulls(count, pa.string())],
        entries=entries,
        entry_columns=parts,
    )


def opened(folder: Path, shape: str, newest_first: Sequence[pa.RecordBatch]) -> OpenVersion:
    """Batches as runs of a version on disk, mapped."""
    local = LocalShard(folder, SHAPES, FakeClock())
    ids = CountingIds()
    version = ids.short()
    reader = local.write_restored(version, {shape: newest_first[-1]}, 0)
    for batch in reversed(newest_first[:-1]):
        version = ids.short()
        local.write(version, reader, {shape: batch}, now_ms=0, due_taken={}, runs_max=99)
        reader = local.open(version, 0, verify=False)
    return local.open(version, 0, verify=False)


def test_a_list_of_a_million_elements_streams_in_little_memory(tmp_path: Path) -> None:
    """Appended in four runs. Whole, it is 37 MB."""
    runs = 4
    per_run = ENTRIES // runs
    places = [(np.uint64(run + 1) << np.uint64(28)) + np.arange(1, per_run + 1, dtype=np.uint64) for run in range(runs)]
    reader = opened(tmp_path, "list", [one_key("list", places[run], []) for run in reversed(range(runs))])
    key = [pa.array(["key"]), pa.array([1.5])]
    seen, last = 0, 0
    with peak_memory() as peak:
        for batch in reader.iter_entries("list", 7, key, 4096):
            entries = entries_of(batch)
            assert batch.num_rows <= 4096
            assert int(entries[0]) > last
            seen, last = seen + batch.num_rows, int(entries[-1])
    assert seen == ENTRIES
    assert peak.bytes < 500_000, f"{peak.bytes:,} bytes of private memory"


def test_one_entry_of_a_map_of_a_million_is_read_alone(tmp_path: Path) -> None:
    """And so are a hundred; the key columns beside a million entries are not copied, nor is a cleared past."""
    entries = np.arange(1, ENTRIES + 1, dtype=np.uint64)
    names = pa.array([f"m{n}" for n in range(ENTRIES)])
    clear = batch_of_change("map", Change(frozenset({KEY})), lambda key: 7)
    runs = [clear, one_key("map", entries[:10] + np.uint64(5), [names[5:15]]), one_key("map", entries, [names])]
    reader = opened(tmp_path, "map", runs)
    for count in (1, 100):
        wanted = np.linspace(0, ENTRIES - 1, count).astype(np.int64)
        hashes = np.full(count, 7, dtype=np.uint64)
        keys = [pa.repeat(pa.scalar("key"), count), pa.repeat(pa.scalar(1.5), count)]
        columns = [names.take(pa.array(wanted))]
        with peak_memory() as peak:
            found, values = reader.find_entries("map", hashes, keys, entries[wanted], columns)
            assert bool(found.all())
            assert values[0].to_pylist() == wanted.tolist()
        assert peak.bytes < 50_000, f"{peak.bytes:,} bytes of private memory for {count}"
    schema = SHAPES["map"]

    class Named:
        """Reads the row that it is asked for."""

        def __init__(self, batch: pa.RecordBatch) -> None:
            (self._names,), self._numbers = schema.entry_columns_of(batch), schema.values_of(batch)[0]

        def is_at(self, at: int, wanted: Any) -> bool:
            return bool(self._names[at].as_py() == wanted)

        def value_at(self, at: int) -> Any:
            return self._numbers[at].as_py()

    with peak_memory() as peak:
        find = reader.entry_finder("map", 7, [pa.array(["key"]), pa.array([1.5])], Named)
        for n in (0, 5, 14, ENTRIES // 2, ENTRIES - 1):
            assert find(int(entries[n]), f"m{n}") == (n - 5 if 5 <= n < 15 else n)  # the newer run counts anew
        assert find(3, "m7") is None
        assert find(ENTRIES + 100, "m7") is None
    assert peak.bytes < 50_000, f"{peak.bytes:,} bytes of private memory for one at a time"


def test_nothing_of_what_a_newer_run_cleared_is_read(tmp_path: Path) -> None:
    """A list that is written anew each epoch does not drag its past along."""
    places = np.arange(1, 100_001, dtype=np.uint64)
    cleared = one_key("list", np.concatenate([[np.uint64(0)], places[:3] + np.uint64(1 << 28)]), [])
    deleted = np.zeros(4, dtype=np.bool_)
    deleted[0] = True
    cleared = cleared.set_column(1, "deleted", pa.array(deleted)).cast(SHAPES["list"].arrow)
    reader = opened(tmp_path, "list", [cleared, one_key("list", places, [])])
    key = [pa.array(["key"]), pa.array([1.5])]
    with peak_memory() as peak:
        (batch,) = reader.iter_entries("list", 7, key, 1 << 20)
    assert batch.num_rows == 3
    assert peak.bytes < 100_000, f"{peak.bytes:,} bytes of private memory"
