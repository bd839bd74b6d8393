"""States of every shape, random changes to them, and how two readers of them are compared."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st
from memory_reader import MemoryReader, canonical
from model import ALL_KEYS, SCHEMA, HashOf, Key, key_columns

from state_runtime.state.reader import StateReader
from state_runtime.state.table import CLEAR_MARKER, HASH, StateSchema, entry_of_time

KEYS = tuple(ALL_KEYS[at] for at in (0, 2, 6, 7, 11, 12, 22))  # null, NaN, zero; some share a hash under `colliding`
NAMES = (None, "", "a", "b", "abc", "d")
TIMES = range(-3, 12)
_VALUES = pa.schema([("n", pa.int64()), ("s", pa.string())])
_NONE = pa.schema([])
_NAME = pa.schema([("name", pa.string())])

SHAPES: dict[str, StateSchema] = {
    "value": StateSchema(SCHEMA.keys, _VALUES),
    "value-expires": StateSchema(SCHEMA.keys, _VALUES, time="expires"),
    "value-due": StateSchema(SCHEMA.keys, _VALUES, time="due"),
    "map": StateSchema(SCHEMA.keys, _VALUES, entries=_NAME),
    "map-expires": StateSchema(SCHEMA.keys, _VALUES, entries=_NAME, time="expires"),
    "list": StateSchema(SCHEMA.keys, _VALUES, entries=_NONE),
    "list-expires": StateSchema(SCHEMA.keys, _VALUES, entries=_NONE, time="expires"),
    "timers": StateSchema(SCHEMA.keys, _NONE, entries=_NONE, time="due"),
    "rows-due": StateSchema(SCHEMA.keys, _VALUES, entries=_NAME, time="due"),
}

Identity = tuple[Key, Any]
"""A key, and what tells the rows of a key apart: a map key, a place, a time; None in the value layout."""
Row = tuple[Any, Any, Any]
"""n, s and the time."""


@dataclass(frozen=True)
class Change:
    """What an epoch does to one state: keys cleared, and rows put (None removes)."""

    cleared: frozenset[Key] = frozenset()
    rows: Mapping[Identity, Row | None] = field(default_factory=dict)


def entry_hash(name: Any) -> int:
    """A hash that gives map keys the same value, also the largest; never 0."""
    return (1, 2, (1 << 64) - 1)[len(name or "") % 3]


def entry_of(shape: str, part: Any) -> int:
    """The `entry` of a row."""
    if shape == "timers":
        return int(entry_of_time(np.array([part], dtype=np.int64))[0])
    return entry_hash(part) if SHAPES[shape].entries == _NAME else int(part)


def batch_of_change(shape: str, change: Change, hash_of: HashOf) -> pa.RecordBatch:
    """A change as a sorted batch."""
    schema = SHAPES[shape]
    columns = [f.name for f in schema.arrow]
    rows = []
    for key in change.cleared:
        rows.append((hash_of(key), CLEAR_MARKER, key, None, None, True))
    for (key, part), row in change.rows.items():
        entry = 0 if schema.entries is None else entry_of(shape, part)
        rows.append((hash_of(key), entry, key, part, row, row is None))
    rows.sort(key=lambda row: row[:2])
    keys = key_columns([row[2] for row in rows], negative_zero=bool(len(rows) % 2))
    values = {
        "value.n": [None if row[4] is None else row[4][0] for row in rows],
        "value.s": [None if row[4] is None else row[4][1] for row in rows],
    }
    times = [None if row[4] is None else row[3] if shape == "timers" else row[4][2] for row in rows]
    return schema.batch(
        np.array([row[0] for row in rows], dtype=np.uint64),
        np.array([row[5] for row in rows], dtype=np.bool_),
        keys,
        [pa.array(values[n], schema.arrow.field(n).type) for n in columns if n.startswith("value.")],
        entries=None if schema.entries is None else np.array([row[1] for row in rows], dtype=np.uint64),
        entry_columns=[pa.array([row[3] for row in rows], f.type) for f in schema.entries or ()],
        times=pa.array(times, pa.int64()) if schema.time else None,
    )


class Model(MemoryReader):
    """The plain reader, folding each state once."""

    def __init__(self, shape: str, history: Sequence[pa.RecordBatch], now_ms: int) -> None:
        super().__init__(SHAPES, {shape: history}, now_ms)
        self._rows: dict[str, list[dict[str, Any]]] = {}

    def rows(self, state: str) -> list[dict[str, Any]]:
        if state not in self._rows:
            self._rows[state] = super().rows(state)
        return self._rows[state]


def parts_of(shape: str) -> st.SearchStrategy[Any]:
    schema = SHAPES[shape]
    if schema.entries is None:
        return st.none()
    if schema.entries == _NAME:
        return st.sampled_from(NAMES)
    return st.sampled_from(TIMES) if shape == "timers" else st.integers(1, 9)


_rows = st.tuples(
    st.none() | st.integers(0, 99), st.none() | st.text("xyz", max_size=2), st.none() | st.sampled_from(TIMES)
)


def changes_of(shape: str) -> st.SearchStrategy[Change]:
    """Random changes to a state."""
    cleared = st.just(frozenset())
    if SHAPES[shape].entries is not None:
        cleared = st.frozensets(st.sampled_from(KEYS), max_size=3)
    identities = st.tuples(st.sampled_from(KEYS), parts_of(shape))
    return st.builds(Change, cleared, st.dictionaries(identities, st.none() | _rows, max_size=9))


def plain(rows: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Rows for a comparison that knows no order and Spark's equality only."""
    return sorted(repr({name: canonical(value) for name, value in row.items()}) for row in rows)


def key_of(columns: Sequence[pa.Array], number: int) -> list[pa.Array]:
    return [column.slice(number, 1) for column in columns]


def check_same(
    real: StateReader, model: MemoryReader, shape: str, hash_of: HashOf, *, bound_only: bool = False
) -> None:
    """Fail unless two readers agree in every method.

    Args:
        bound_only: `next_due` of the real one is only a bound.
    """
    schema = SHAPES[shape]
    ordered = sorted(KEYS, key=hash_of)
    # All, and every other one, in another form of zero.
    for number, wanted in enumerate((ordered, ordered[1::2])):
        hashes = np.array([hash_of(key) for key in wanted], dtype=np.uint64)
        keys = key_columns(wanted, negative_zero=bool(number))
        if schema.entries is None:
            for columns in (None, ("s",), ("s", "n"), ()):
                found, expected = (reader.find(shape, hashes, keys, columns) for reader in (real, model))
                check_found(found, expected, f"find of {columns} in {shape}")
        else:
            check_entries(real, model, shape, hashes, keys, hash_of, wanted)
    check_rows(real, model, shape)
    if schema.time == "due":
        for through in (-10, 0, 3, 5, 20):
            due, expected = real.due(shape, through), model.due(shape, through)
            assert plain(due.to_pylist()) == plain(expected.to_pylist()), f"due of {shape} through {through}"
            order = [(row[HASH], row.get("entry", 0)) for row in due.to_pylist()]
            assert order == sorted(order)
            assert due.schema.equals(schema.arrow)
        earliest, bound = model.next_due(shape), real.next_due(shape)
        if bound_only:
            assert earliest is None or (bound is not None and bound <= earliest)
        else:
            assert bound == earliest, f"next due of {shape}"


def check_rows(real: StateReader, model: MemoryReader, shape: str) -> None:
    """All rows, in order of hash, those of one hash in one batch."""
    batches = list(real.iter_rows(shape))
    assert all(batch.num_rows and batch.schema.equals(SHAPES[shape].arrow) for batch in batches)
    ends = [(batch[HASH][0].as_py(), batch[HASH][-1].as_py()) for batch in batches]
    assert all(one[1] < next_[0] for one, next_ in itertools.pairwise(ends)), f"parts of {shape}"
    found, expected = (
        [row for batch in given for row in batch.to_pylist()] for given in (batches, model.iter_rows(shape))
    )
    assert [(row[HASH], row.get("entry", 0)) for row in found] == [
        (row[HASH], row.get("entry", 0)) for row in expected
    ], f"order of {shape}"
    assert plain(found) == plain(expected), f"rows of {shape}"


def check_found(real: Any, model: Any, what: str) -> None:
    found, columns = real
    expected, expected_columns = model
    assert found.dtype == np.bool_, what
    assert found.tolist() == expected.tolist(), what
    assert [c.to_pylist() for c in columns] == [c.to_pylist() for c in expected_columns], what
    assert [c.type for c in columns] == [c.type for c in expected_columns], what


def check_entries(
    real: StateReader,
    model: MemoryReader,
    shape: str,
    hashes: Any,
    keys: Sequence[pa.Array],
    hash_of: HashOf,
    wanted: Sequence[Key],
) -> None:
    schema = SHAPES[shape]
    bounds = real.entry_bounds(shape, hashes)
    rows = model.rows(shape)
    assert all(bound >= sum(r[HASH] == h for r in rows) for bound, h in zip(bounds, hashes.tolist(), strict=True))
    batch, offsets = real.read_entries(shape, hashes, keys)
    expected, expected_offsets = model.read_entries(shape, hashes, keys)
    assert offsets.tolist() == expected_offsets.tolist(), f"offsets in {shape}"
    assert batch.schema.equals(schema.arrow)
    assert offsets[-1] == batch.num_rows
    for number in range(len(wanted)):
        of_key = batch.slice(offsets[number], offsets[number + 1] - offsets[number]).to_pylist()
        right = expected.slice(offsets[number], offsets[number + 1] - offsets[number]).to_pylist()
        assert plain(of_key) == plain(right), f"entries in {shape}"
        assert [r["entry"] for r in of_key] == [r["entry"] for r in right]
        for rows_max in (1, 3) if len(wanted) == len(KEYS) else ():
            pieces = list(real.iter_entries(shape, int(hashes[number]), key_of(keys, number), rows_max))
            assert all(0 < piece.num_rows <= rows_max for piece in pieces)
            streamed = [row for piece in pieces for row in piece.to_pylist()]
            assert plain(streamed) == plain(right), f"stream of {shape}, {rows_max} at a time"
            assert [r["entry"] for r in streamed] == [r["entry"] for r in right]
    parts: Sequence[Any] = NAMES if schema.entries == _NAME else TIMES if shape == "timers" else range(1, 10)
    pairs = sorted(
        ((hash_of(key), entry_of(shape, part), key, part) for key in wanted for part in parts), key=lambda p: p[:2]
    )
    given = (
        np.array([p[0] for p in pairs], dtype=np.uint64),
        key_columns([p[2] for p in pairs]),
        np.array([p[1] for p in pairs], dtype=np.uint64),
        [pa.array([p[3] for p in pairs], f.type) for f in schema.entries or ()],
    )
    expected_found = model.find_entries(shape, *given)
    check_found(real.find_entries(shape, *given), expected_found, f"find_entries in {shape}")
    check_finders(real, shape, given, expected_found)


class RowsAsRead:
    """A plain `EntryView`."""

    def __init__(self, schema: StateSchema, batch: pa.RecordBatch) -> None:
        self.entries = [column.to_pylist() for column in schema.entry_columns_of(batch)]
        self.values = [column.to_pylist() for column in schema.values_of(batch)]
        assert not batch.num_rows or int(batch.column(2)[0].as_py()) > 0, "a clear marker is no entry"

    def is_at(self, at: int, wanted: Any) -> bool:
        return canonical([column[at] for column in self.entries]) == canonical(wanted)

    def value_at(self, at: int) -> Any:
        return [column[at] for column in self.values]


def check_finders(real: StateReader, shape: str, given: Any, expected: Any) -> None:
    """Fail unless each entry alone is what all of them together were."""
    schema = SHAPES[shape]
    hashes, keys, entries, entry_columns = given
    found, columns = expected
    finders: dict[str, Any] = {}
    for number, is_there in enumerate(found.tolist()):
        key = key_of(keys, number)
        name = repr([column.to_pylist() for column in key])
        if name not in finders:
            finders[name] = real.entry_finder(shape, int(hashes[number]), key, partial(RowsAsRead, schema))
        wanted = [column[number].as_py() for column in entry_columns]
        value = [column[number].as_py() for column in columns[: len(schema.values)]] if is_there else None
        one = finders[name](int(entries[number]), wanted)
        assert canonical(one) == canonical(value), f"entry {wanted} of {name} in {shape}"


def handled(shape: str, due: pa.RecordBatch, again_ms: int | None) -> Change:
    """What an operator does with what is due: remove it, or give every other row another time."""
    rows: dict[Identity, Row | None] = {}
    for number, row in enumerate(due.to_pylist()):
        key = (row["key.name"], canonical(row["key.score"]))
        part = row.get("entry.name") if "entry.name" in row else row["due"] if shape == "timers" else None
        again = again_ms is not None and number % 2 and shape != "timers"
        rows[key, part] = (row["value.n"], row["value.s"], again_ms) if again else None
    return Change(rows=rows)


def both(first: Change, then: Change) -> Change:
    """Two changes of one epoch as one; the second wins."""
    return Change(first.cleared | then.cleared, {**first.rows, **then.rows})
