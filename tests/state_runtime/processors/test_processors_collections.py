"""Lists and maps: what is read of the state and when, what is written, and what iterators see."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from memory_reader import MemoryReader
from model import spread
from pyspark.sql import Row
from spark_model import KEYS, Job, Setup, grouped, markers_in, operator_of, schemas_of
from test_processors_handle import Calls

from state_runtime.base.errors import InvalidData
from state_runtime.processors.operator import EpochClock, RowSlice
from state_runtime.processors.user import handler_input as flavours
from state_runtime.processors.user import list_state, map_state, scope
from state_runtime.processors.user.handle import StateDeclaration, layout_of
from state_runtime.processors.user.list_state import ORDINAL_BITS
from state_runtime.processors.user.map_state import MapState, entry_hashes
from state_runtime.processors.user.user_errors import InvalidStateValue
from state_runtime.state.table import StateSchema

ONE = grouped([("a", 0)], spread)


class Spy:
    """A reader that notes what it is asked for."""

    def __init__(self, reader: MemoryReader, calls: list[tuple[str, str]]) -> None:
        self._reader = reader
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._reader, name)

        def noted(state: Any, *arguments: Any) -> Any:
            if name == "overlaid":
                return Spy(method(state), self.calls)
            self.calls.append((name, state))
            return method(state, *arguments)

        return noted


def spied(job: Job, on_input: Any, rows: Any = ONE, now_ms: int = 0) -> tuple[list[tuple[str, str]], Any]:
    """Run an epoch and say what was asked of the reader."""
    calls: list[tuple[str, str]] = []
    reader = Spy(MemoryReader(job.schemas, job.batches, now_ms), calls)
    processor = Calls(job.setup, on_input=on_input)
    result = operator_of(job.setup, processor).process([RowSlice(rows)], reader, EpochClock(now_ms, epoch=99), 0)  # type: ignore[arg-type]
    list(result.outputs)
    return [c for c in calls if c[0] != "entry_bounds" and c[1] != "$timers"], result


def filled(*scripts: Any, setup: Setup = Setup(), rows: Any = ONE) -> Job:  # noqa: B008  (frozen)
    """A job after epochs that ran these handlers."""
    job = Job(setup)
    for number, script in enumerate(scripts):
        job.run(Calls(setup, on_input=script), rows, EpochClock(0, epoch=number + 1))
    return job


def fill_all(p: Any, key: Any, *_: Any) -> None:
    """Something in every state of the key."""
    p.value.update((1, key[0]))
    p.list.appendList([(n, key[0]) for n in range(3)])
    for n in range(3):
        p.map.updateValue((n, key[0]), (n, "x"))


# --- what is read ------------------------------------------------------------------------------------------------


def test_appending_reads_nothing() -> None:
    """Not even whether there is a list."""

    def on_input(p: Any, *_: Any) -> None:
        p.list.appendValue((7, "x"))
        p.list.appendList([(8, "x")])

    calls, result = spied(filled(fill_all), on_input)
    assert calls == []
    assert result.changes["l"].num_rows == 2


def test_a_state_that_nobody_touches_is_not_read() -> None:
    """Also not the values."""
    calls, result = spied(filled(fill_all), lambda *_: None)
    assert calls == []
    assert all(batch.num_rows == 0 for batch in result.changes.values())


def test_small_lists_and_maps_of_many_keys_are_read_at_once() -> None:
    """One call per state and window, however many keys and methods."""
    rows = grouped([(name, 0) for name in "abcdefgh"], spread)
    job = filled(fill_all, rows=rows)
    seen: list[Any] = []

    def on_input(p: Any, key: Any, *_: Any) -> None:
        seen.append(
            (
                key[0],
                list(p.list.get()),
                p.list.exists(),
                sorted(p.map.keys()),
                p.map.getValue((1, key[0])),
                p.value.get(),
            )
        )

    calls, _ = spied(job, on_input, rows)
    assert sorted(calls) == [("find", "v"), ("read_entries", "l"), ("read_entries", "m")]
    assert sorted(seen) == [
        (k, [(n, k) for n in range(3)], True, [(n, k) for n in range(3)], (1, "x"), (1, k)) for k in "abcdefgh"
    ]


def test_one_wanted_key_does_not_cost_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first window is small; the next ones grow while user code goes on reading."""
    monkeypatch.setattr(scope, "_WINDOW_FIRST", 6)
    monkeypatch.setattr(scope, "_WINDOW_MAX", 12)
    names = [f"k{n}" for n in range(30)]
    rows = grouped([(name, 0) for name in names], spread)
    job = filled(fill_all, rows=rows)
    read: list[int] = []
    whole = MemoryReader.read_entries

    def counting(self: Any, state: str, hashes: Any, keys: Any) -> Any:
        read.append(len(hashes))
        return whole(self, state, hashes, keys)

    monkeypatch.setattr(MemoryReader, "read_entries", counting)
    spied(job, lambda p, key, *_: p.list.exists() and None, rows)
    assert sum(read) == 30
    assert read[:2] == [2, 4]
    assert max(read) == 4
    read.clear()
    first = []
    spied(job, lambda p, key, *_: first.append(p.list.exists()) if not first else None, rows)
    assert read == [2]


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scope, "ENTRIES_PER_KEY_MAX", 0)


@pytest.mark.usefixtures("everything_is_large")
def test_single_entries_of_a_large_map_are_looked_up_and_nothing_else_is_loaded() -> None:
    """getValue and containsKey look one entry up, with what is found out once for the key; updates and removals are looked
    up together at the end."""

    def on_input(p: Any, *_: Any) -> None:
        assert p.map.getValue((1, "a")) == (1, "x")
        assert p.map.containsKey((1, "a"))
        assert not p.map.containsKey((9, "a"))
        p.map.updateValue((1, "a"), (11, "y"))
        p.map.updateValue((5, "a"), (5, "y"))
        p.map.removeKey((2, "a"))
        p.map.removeKey((8, "a"))
        assert p.map.getValue((1, "a")) == (11, "y")
        assert p.map.exists()

    calls, result = spied(filled(fill_all), on_input)
    assert calls == [("entry_finder", "m"), ("find_entries", "m")]
    rows = result.changes["m"].to_pylist()
    assert sorted((r["entry.a"], r["deleted"]) for r in rows) == [(1, False), (2, True), (5, False)]
    assert result.rows_added == 0


@pytest.mark.usefixtures("everything_is_large")
def test_a_large_list_is_streamed() -> None:
    """Each iterator on its own."""
    seen: list[Any] = []

    def on_input(p: Any, *_: Any) -> None:
        one, two = p.list.get(), p.list.get()
        seen.append((next(one), next(two), next(one), list(two), list(one)))

    calls, _ = spied(filled(fill_all), on_input)
    assert calls == [("iter_entries", "l")] * 2
    assert seen == [((0, "a"), (0, "a"), (1, "a"), [(1, "a"), (2, "a")], [(2, "a")])]


def test_a_million_entries_are_not_loaded_to_update_one() -> None:
    """Over a real reader: the memory that a look-up and an update take is nothing beside the map."""
    from state_runtime.state.version import OpenVersion

    setup = Setup("none")
    schemas = schemas_of(setup)
    count = 1_000_000
    a = pa.array(np.arange(count))
    b = pa.array(["x"]).take(pa.array(np.zeros(count, dtype=np.int64)))
    entries = entry_hashes([a, b])
    order = pa.array(np.argsort(entries))
    hashes = np.full(count, spread(("a",)), dtype=np.uint64)
    key = pa.array(["a"]).take(pa.array(np.zeros(count, dtype=np.int64)))
    stored = schemas["m"].batch(
        hashes, None, [key], [a.take(order), b], entries=entries[order.to_numpy()], entry_columns=[a.take(order), b]
    )
    version = OpenVersion.of_batches("v", {"m": stored}, schemas, 0)
    before = pa.total_allocated_bytes()
    seen: list[Any] = []

    def on_input(p: Any, *_: Any) -> None:
        seen.append(p.map.getValue((777_777, "x")))
        p.map.updateValue((777_777, "x"), (1, "new"))
        p.map.removeKey((5, "x"))
        p.map.updateValue((-1, "x"), (1, "new"))
        items = p.map.iterator()
        seen.append(len({next(items)[0] for _ in range(20_000)}))
        seen.append(pa.total_allocated_bytes() - before)

    result = operator_of(setup, Calls(setup, on_input=on_input)).process([RowSlice(ONE)], version, EpochClock(0), 0)
    list(result.outputs)
    assert seen[:2] == [(777_777, "x"), 20_000]
    assert seen[2] < 10_000_000
    assert (result.changes["m"].num_rows, result.rows_added) == (3, 0)


# --- what is written ---------------------------------------------------------------------------------------------


def test_clearing_leaves_a_marker_only_where_something_may_be_stored() -> None:
    """What was never stored leaves no trace."""

    def clear(p: Any, *_: Any) -> None:
        p.value.clear()
        p.list.clear()
        p.map.clear()
        p.map.removeKey((0, "a"))

    _, result = spied(Job(Setup()), clear)
    assert [b.num_rows for b in result.changes.values()] == [0, 0, 0, 0]
    assert result.rows_added == 0
    _, result = spied(filled(fill_all), clear)
    assert [(markers_in(result.changes[n]), result.changes[n].num_rows) for n in ("l", "m")] == [(1, 1), (1, 1)]


def test_what_is_cleared_after_it_was_read_is_counted_as_lost() -> None:
    """And what was not read is not: nobody knows how much it is."""

    def clear(p: Any, *_: Any) -> None:
        p.list.clear()
        p.map.clear()

    def read_and_clear(p: Any, *_: Any) -> None:
        assert p.list.exists()
        assert p.map.exists()
        clear(p)
        clear(p)
        p.list.appendValue((1, ""))

    assert spied(filled(fill_all), read_and_clear)[1].rows_added == -5
    assert spied(filled(fill_all), clear)[1].rows_added == 0


def test_replacing_a_list_is_a_marker_and_the_new_elements() -> None:
    """And stays cheap: nothing is read."""
    calls, result = spied(filled(fill_all), lambda p, *_: p.list.put([(7, "x"), (8, "x")]))
    assert calls == []
    rows = result.changes["l"].to_pylist()
    assert [(r["entry"] == 0, r["deleted"], r["value.n"]) for r in rows] == [(True, True, None), (False, False, 7), (False, False, 8)]  # fmt: skip


def test_places_of_elements_grow_with_epochs_and_passes() -> None:
    """So later elements come later, whichever handler appended them, without a look at what is stored."""
    job = Job(Setup())

    def on_input(p: Any, *_: Any) -> None:
        p.list.appendValue((2, ""))
        p.handle.registerTimer(0)

    append = Calls(on_input=on_input, on_initial=lambda p, *_: p.list.appendValue((1, "")))
    append.on_timer = lambda p, *_: p.list.appendValue((3, ""))
    result, _ = job.run(append, ONE, EpochClock(5, epoch=6), ONE)
    places = result.changes["l"].column(2).to_pylist()
    assert places == [(6 << ORDINAL_BITS) + n for n in (1, 2, 3)]
    assert [r["value.n"] for r in job.stored(0)["l"]] == [1, 2, 3]


def test_more_elements_than_an_epoch_can_number_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a place twice, or in another epoch's range."""
    monkeypatch.setattr(list_state, "ORDINAL_BITS", 3)
    run = lambda count: Job(Setup()).run(Calls(on_input=lambda p, *_: p.list.appendList([(1, "")] * count)), ONE, EpochClock(0))  # noqa: E731  # fmt: skip
    run(7)
    with pytest.raises(InvalidData, match="more than 8 elements are appended by one task in one epoch"):
        run(8)


# --- what iterators see ------------------------------------------------------------------------------------------


def test_an_iterator_shows_the_state_as_it_is_when_its_first_element_is_fetched() -> None:
    """As in Spark, observed: before that changes are seen, after that they are not."""

    def on_input(p: Any, *_: Any) -> None:
        late = p.list.get()
        p.list.appendValue((3, "new"))
        assert next(late) == (0, "a")
        p.list.appendValue((4, "new"))
        p.list.clear()
        assert list(late) == [(1, "a"), (2, "a"), (3, "new")]
        assert list(p.list.get()) == []

        items, keys, values = p.map.iterator(), p.map.keys(), p.map.values()
        first = next(items)
        next(keys), next(values)
        p.map.updateValue((9, "new"), (9, "new"))
        p.map.removeKey((0, "a"))
        p.map.updateValue((1, "a"), (77, "x"))
        assert sorted([first, *items]) == [((n, "a"), (n, "x")) for n in range(3)]
        assert len(list(keys)) == len(list(values)) == 2
        p.map.clear()
        assert list(p.map.iterator()) == []

        timers = p.handle.listTimers()
        p.handle.registerTimer(70)
        assert next(timers) == 70
        p.handle.registerTimer(80)
        p.handle.deleteTimer(95)
        assert list(timers) == [90, 95]
        assert list(p.handle.listTimers()) == [70, 80, 90]

    def fill(p: Any, *arguments: Any) -> None:
        fill_all(p, *arguments)
        p.handle.registerTimer(90)
        p.handle.registerTimer(95)

    spied(filled(fill), on_input)


def test_values_are_rows_by_name_where_spark_gives_rows() -> None:
    """MapState.getValue; all else are plain tuples."""

    def on_input(p: Any, *_: Any) -> None:
        p.map.updateValue((7, "a"), (7, "y"))
        assert (p.map.getValue((7, "a")).n, p.map.getValue((1, "a")).s) == (7, "x")
        for found in (
            *next(p.map.iterator()),
            next(p.map.keys()),
            next(p.map.values()),
            next(p.list.get()),
            p.value.get(),
        ):
            assert type(found) is tuple
        assert repr(p.map.getValue((1, "a"))) == "Row(n=1, s='x')"

    spied(filled(fill_all), on_input)


def test_numpy_scalars_are_read_back_as_plain_numbers_at_once() -> None:
    """As they are in the next epoch; they come out of pandas."""

    def on_input(p: Any, *_: Any) -> None:
        p.value.update((np.int64(1), "x"))
        p.list.appendValue((np.int64(1), "x"))
        p.map.updateValue((np.int64(1), "x"), (np.int64(1), "x"))
        found = [p.value.get(), *p.list.get(), p.map.getValue((1, "x")), *p.map.keys(), *p.map.values()]
        assert [(type(row[0]), row[0]) for row in found] == [(int, 1)] * 5

    spied(Job(Setup()), on_input)


def test_of_a_large_map_only_so_many_answers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """User code may ask for every key of a map that does not fit."""
    monkeypatch.setattr(scope, "ENTRIES_PER_KEY_MAX", 0)
    monkeypatch.setattr(map_state, "_REMEMBERED_MAX", 2)

    def on_input(p: Any, *_: Any) -> None:
        for n in range(9):
            assert p.map.containsKey((n, "a")) == (n < 3)
            assert len(p.map._base.remembered) <= 2

    spied(filled(fill_all), on_input)


def test_a_map_of_one_key_is_opened_once_for_a_whole_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of its entries user code asks for. An entry is looked up once, and the others that are stored are not
    read: each was a look-up like that of many keys at once, half a millisecond a call."""
    monkeypatch.setattr(scope, "ENTRIES_PER_KEY_MAX", 10)
    count = 300

    def fill(p: Any, *_: Any) -> None:
        for n in range(count):
            p.map.updateValue((n, "a"), (n, "x"))

    def on_input(p: Any, *_: Any) -> None:
        for _again in range(3):
            for n in range(0, 2 * count, 2):
                assert p.map.getValue((n, "a")) == ((n, "x") if n < count else None)
                p.map.updateValue((n + 1, "a"), (n, "y"))

    looked_up: list[int] = []
    entry_of = MapState.entry_of
    monkeypatch.setattr(MapState, "entry_of", lambda self, key: looked_up.append(key[0]) or entry_of(self, key))
    calls, result = spied(filled(fill), on_input)
    # The second is for what was written: all entries at once.
    assert calls == [("entry_finder", "m"), ("find_entries", "m")]
    assert looked_up == list(range(0, 2 * count, 2))
    assert result.changes["m"].num_rows == count
    assert result.rows_added == count // 2


# --- map keys under grouping equality ----------------------------------------------------------------------------

FLOATS = layout_of(
    StateDeclaration("m", "map", "", "", 0),
    KEYS,
    pa.schema([("n", pa.int64())]),
    pa.schema([("f", pa.float64()), ("l", pa.list_(pa.int64())), ("r", pa.struct([("x", pa.float32())]))]),
)


def test_map_keys_are_equal_as_spark_groups_them() -> None:
    """NaN is NaN, 0.0 is -0.0, null is null; arrays and structs by content; in the epoch and in the next one."""
    nan = float("nan")
    same = [((nan, [1, None], (0.0,)), (float("nan"), [1, None], {"x": -0.0})), ((-0.0, None, None), (0.0, None, None))]
    schemas: dict[str, StateSchema] = {"m": FLOATS}

    class Mapped(Calls):
        def init(self, handle: Any) -> None:
            self.map = handle.getMapState("m", "", "")

    def run(on_input: Any, reader: Any) -> Any:
        more = {"state_schemas": schemas, "state_ddl": {"m": ""}, "state_kinds": {"m": "map"}}
        op = operator_of(Setup("none"), Mapped(Setup("none"), on_input=on_input), **more)
        result = op.process([RowSlice(ONE)], reader, EpochClock(0), 0)
        list(result.outputs)
        return result

    def fill(p: Any, *_: Any) -> None:
        for one, other in same:
            p.map.updateValue(one, (1,))
            assert p.map.containsKey(other)
            p.map.updateValue(other, (2,))
            assert p.map.getValue(one) == (2,)

    def check(p: Any, *_: Any) -> None:
        assert len(list(p.map.keys())) == 2
        for one, other in same:
            assert p.map.getValue(one) == p.map.getValue(other) == (2,)
            p.map.removeKey(other)
            assert not p.map.containsKey(one)
        assert not p.map.exists()

    first = run(fill, MemoryReader(schemas))
    assert (first.changes["m"].num_rows, first.rows_added) == (2, 2)
    reader = MemoryReader(schemas, {"m": [first.changes["m"]]})
    second = run(check, reader)
    assert second.rows_added == -2
    assert reader.overlaid(second.changes).rows("m") == []


def test_a_key_with_more_rows_than_are_made_at_once_gets_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row, or frame by frame; state works as for any other key."""
    sizes: list[int] = []
    whole = flavours.table_to_frame
    monkeypatch.setattr(flavours, "table_to_frame", lambda rows: sizes.append(rows.num_rows) or whole(rows))
    column = flavours.to_python
    monkeypatch.setattr(flavours, "to_python", lambda values: sizes.append(len(values)) or column(values))
    for pandas in (False, True):
        setup = Setup(pandas=pandas, slice_rows_max=3, frame_rows_max=2)
        seen: list[int] = []

        def on_input(p: Any, key: Any, rows: Iterator[Any], _: Any, seen: list[int] = seen) -> None:
            for given in rows:
                numbers = given["n"].tolist() if p.setup.pandas else [given.n]
                assert len(numbers) <= 2
                seen.extend(numbers)
                p.list.appendValue((len(seen), key[0]))

        job = Job(setup)
        job.run(Calls(setup, on_input=on_input), grouped([("a", n) for n in range(8)], spread), EpochClock(0))
        assert seen == list(range(8))
        assert len(job.stored(0)["l"]) == (4 if pandas else 8)
        assert max(sizes) <= 3


def test_what_was_cleared_stays_cleared_when_its_key_comes_again() -> None:
    """Two timers of one key: the second handler sees what the first one did, whatever came between."""
    seen: list[Any] = []

    def on_timer(p: Any, key: Any, values: Any, info: Any) -> None:
        if info.getExpiryTimeInMs() == 1 and key[0] == "a":
            p.map.clear()
            p.list.clear()
            p.map.updateValue((7, "a"), (7, "x"))
        else:
            seen.append((key[0], info.getExpiryTimeInMs(), sorted(p.map.keys()), [n for n, _ in p.list.get()]))

    rows = grouped([("a", 0), ("b", 0)], spread)
    job = filled(fill_all, rows=rows)
    processor = Calls(on_timer=on_timer)
    processor.on_input = lambda p, *_: [p.handle.registerTimer(ts) for ts in (1, 2)].clear()
    result, _ = job.run(processor, rows, EpochClock(5, epoch=9))
    untouched = [(0, "b"), (1, "b"), (2, "b")]
    expected = [("a", 2, [(7, "a")], []), ("b", 1, untouched, [0, 1, 2]), ("b", 2, untouched, [0, 1, 2])]
    assert sorted(seen) == expected
    assert [r["entry.a"] for r in job.stored(0)["m"] if r["key.k"] == "a"] == [7]
    assert result.changes["m"].num_rows == 2


def test_gained_entries_are_counted_when_a_key_comes_again_after_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was loaded for the key is forgotten by then; what it gained before is not."""
    monkeypatch.setattr(scope, "_WINDOW_FIRST", 1)
    monkeypatch.setattr(scope, "_WINDOW_MAX", 1)
    rows = grouped([("a", 0), ("b", 0)], spread)
    job = filled(fill_all, rows=rows)
    due = {"a": (1, 3), "b": (2,)}

    def on_input(p: Any, key: Any, *_: Any) -> None:
        for ts in due[key[0]]:
            p.handle.registerTimer(ts)

    def on_timer(p: Any, key: Any, values: Any, info: Any) -> None:
        at = info.getExpiryTimeInMs()
        if at < 3:
            assert p.map.containsKey((1, key[0]))
        p.map.updateValue((10 + at, "new"), (at, ""))

    result, _ = job.run(Calls(on_input=on_input, on_timer=on_timer), rows, EpochClock(5, epoch=9))
    assert result.rows_added == 3


@pytest.mark.parametrize("slice_keys_max", [1, 2, 9])
def test_keys_of_equal_hashes_in_small_slices_leave_sorted_changes(slice_keys_max: int) -> None:
    """Slices are put one after the other, and entries are sorted by hash and entry whichever key they are of."""
    setup = Setup(slice_keys_max=slice_keys_max)
    job = Job(setup)
    rows = grouped([(name, 0) for name in "abc"], lambda key: 7)

    def on_input(p: Any, key: Any, *_: Any) -> None:
        for n in range(20):
            p.map.updateValue((n, key[0]), (n, ""))
        p.list.put([(1, key[0])])

    job.run(Calls(setup, on_input=on_input), rows, EpochClock(0))
    assert (len(job.stored(0)["m"]), len(job.stored(0)["l"])) == (60, 3)


@pytest.mark.parametrize("pandas", [False, True], ids=["rows", "pandas"])
def test_slices_do_not_cut_the_output_into_small_batches(pandas: bool) -> None:
    """Sinks and later steps get batches of the size that the job asked for."""
    setup = Setup("none", pandas=pandas, slice_keys_max=2)
    rows = grouped([(f"k{n}", 0) for n in range(20)], spread)

    def on_input(p: Any, key: Any, *_: Any) -> list[Any]:
        return [pd.DataFrame({"k": [key[0]], "what": ["x"]})] if pandas else [Row(k=key[0], what="x")]

    op = operator_of(setup, Calls(setup, on_input=on_input), output_rows_per_batch=9)
    result = op.process([RowSlice(rows)], MemoryReader(schemas_of(setup)), EpochClock(0), 0)
    assert [b.num_rows for b in result.outputs] == ([20] if pandas else [9, 9, 2])


def one_key_column(data_type: pa.DataType) -> MapState:
    """A map whose key has one column, with a current key and nothing stored."""
    keys = pa.schema([("k", pa.string())])
    schema = layout_of(
        StateDeclaration("m", "map", ""), keys, pa.schema([("n", pa.int64())]), pa.schema([("name", data_type)])
    )
    reader = MemoryReader({"m": schema})
    state = MapState("m", "here", schema, scope.Scope(reader), None)
    rows = grouped([("a", 0)], spread)
    state._scope.enter(reader, rows.hashes, rows.keys)
    state.attach()
    state._scope.group = 0
    return state


@pytest.mark.parametrize(
    ("data_type", "key"),
    [
        (pa.string(), "a"),
        (pa.string(), "longer"),
        (pa.int64(), 5),
        (pa.float64(), 0.5),
        (pa.binary(), b"ab"),
        (pa.date32(), dt.date(2024, 1, 2)),
        (pa.int64(), np.int64(5)),
    ],
    ids=repr,
)
def test_a_map_with_one_key_column_takes_the_key_without_a_tuple(data_type: pa.DataType, key: Any) -> None:
    """Spark's own composite processors give a text so. Of a longer one Spark keeps the first letter; we keep all."""
    state = one_key_column(data_type)
    assert not state.containsKey(key)
    state.updateValue(key, (1,))
    assert state.containsKey(key)
    assert state.getValue(key) == state.getValue((key,)) == (1,)
    assert list(state.keys()) == [(key,)]
    batch, gained = state.changes()
    assert (batch.num_rows, gained) == (1, 1)
    state.removeKey(key)
    assert not state.exists()


def test_a_bare_value_and_a_bare_key_of_several_columns_are_refused() -> None:
    """Of a value that is a text Spark stores the first letter; nobody means that."""
    state = one_key_column(pa.string())
    for bare in ("v", 5):
        with pytest.raises(InvalidStateValue, match=r"updateValue\(\) got a (str|int); give a tuple"):
            state.updateValue("k", bare)
    for key in (None, {"k": 1}, {"k"}):
        with pytest.raises(InvalidStateValue, match=r"containsKey\(\) got a \w+; give a tuple"):
            state.containsKey(key)


def test_map_keys_that_are_stored_alike_are_one_key_in_the_same_epoch_too() -> None:
    """A number for a text is converted; were it only at the end, one of the two values would be lost without a word."""
    for data_type, first, second in ((pa.string(), 5, "5"), (pa.binary(), "a", b"a"), (pa.int64(), 5.0, 5)):
        state = one_key_column(data_type)
        state.updateValue((first,), (1,))
        state.updateValue((second,), (2,))
        assert list(state.iterator()) == [((second,), (2,))]
        assert type(next(state.keys())[0]) is type(second)
        assert state.changes()[0].num_rows == 1
