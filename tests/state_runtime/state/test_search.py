"""Look-ups against plain dictionaries: keys that share a hash, entries, clear markers, and the marks that spare a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import (
    SCHEMA,
    Changes,
    HashOf,
    Key,
    batch_of,
    canonical_key,
    changes,
    examples,
    hash_functions,
    key_columns,
    keys,
)
from shapes import KEYS, NAMES, SHAPES, Change, batch_of_change, changes_of, entry_hash

from state_runtime.state.pieces import Asked, Marks, Piece, RunData, Wanted, identities_of
from state_runtime.state.search import hash_ranges, matches, matches_of_entries
from state_runtime.state.table import CLEAR_MARKER, entries_of

_HASHES = st.sampled_from([0, 1, 1 << 63, (1 << 64) - 1]) | st.integers(0, (1 << 64) - 1)


@given(changes, st.lists(keys, unique=True), hash_functions, st.booleans(), st.data())
@examples(200)
def test_matches_are_the_keys_of_the_dictionary(
    stored: Changes, wanted: list[Key], hash_of: HashOf, negative_zero: bool, data: Any
) -> None:
    """Each key that is there once, in order, at its row; also where only some rows of the columns are asked for."""
    run = batch_of(stored, hash_of)
    wanted = sorted(wanted, key=hash_of)
    columns = key_columns(wanted, negative_zero=negative_zero)
    rows = np.array(
        [n for n in range(len(wanted)) if data.draw(st.booleans())] if data.draw(st.booleans()) else range(len(wanted)),
        dtype=np.int64,
    )
    asked = [wanted[n] for n in rows]
    found, at = matches(run, SCHEMA, np.array([hash_of(k) for k in asked], dtype=np.uint64), columns, rows)
    assert found.tolist() == [n for n, key in enumerate(asked) if key in stored]
    pairs = list(zip(run.column(2).to_pylist(), run.column(3).to_pylist(), strict=True))
    assert [canonical_key(*pairs[n]) for n in at] == [asked[n] for n in found]


@given(changes_of("map"), hash_functions)
@examples(200)
def test_matches_of_entries_are_the_rows_of_the_dictionary(change: Change, hash_of: HashOf) -> None:
    """Of rows whose hashes and entries collide those with the same columns only; and each key that was cleared."""
    schema = SHAPES["map"]
    run = batch_of_change("map", change, hash_of)
    wanted, given_rows = _entries_wanted(hash_of)
    found, at, cleared = matches_of_entries(
        run, schema, wanted.hashes, wanted.keys, wanted.entries, wanted.entry_columns
    )
    assert found.tolist() == [n for n, identity in enumerate(given_rows) if identity in change.rows]
    names = run.column(schema.arrow.get_field_index("entry.name")).to_pylist()
    assert [names[n] for n in at] == [given_rows[n][1] for n in found]
    assert cleared.tolist() == [n for n, (key, _) in enumerate(given_rows) if key in change.cleared]


def _entries_wanted(hash_of: HashOf) -> tuple[Wanted, Sequence[tuple[Key, Any]]]:
    """Every name of every key."""
    pairs = sorted(((key, name) for key in KEYS for name in NAMES), key=lambda p: (hash_of(p[0]), entry_hash(p[1])))
    return Wanted(
        np.array([hash_of(key) for key, _ in pairs], dtype=np.uint64),
        key_columns([key for key, _ in pairs]),
        np.array([entry_hash(name) for _, name in pairs], dtype=np.uint64),
        [pa.array([name for _, name in pairs], pa.string())],
    ), pairs


@given(st.lists(_HASHES, max_size=30), st.lists(_HASHES, max_size=30))
@examples(200)
def test_the_rows_of_a_hash_are_counted(stored: list[int], wanted: list[int]) -> None:
    """Where they begin, and how many there are; nothing of what is not there."""
    ordered, asked = np.array(sorted(stored), dtype=np.uint64), np.array(sorted(wanted), dtype=np.uint64)
    starts, counts = hash_ranges(ordered, asked)
    for start, count, hashed in zip(starts.tolist(), counts.tolist(), asked.tolist(), strict=True):
        assert ordered[start : start + count].tolist() == [hashed] * stored.count(hashed)


# --- marks -----------------------------------------------------------------------------------------------------------


@given(st.lists(_HASHES, max_size=40), st.lists(_HASHES, max_size=40))
@examples(200)
def test_marks_never_deny_what_is_there(stored: list[int], others: list[int]) -> None:
    """A mark may stand for another row, and costs a search then; one that is missing would lose state."""
    marks = Marks(np.array(stored, dtype=np.uint64))
    said = marks.may_have(np.array(stored + others, dtype=np.uint64))
    assert said[: len(stored)].all()


@pytest.mark.parametrize("layout", ["value", "map"])
def test_nearly_nothing_that_is_not_there_is_searched(layout: str) -> None:
    """It is what marks are for: of 20,000 rows that a newer run does not have fewer than an eighth are searched, also
    where hashes have a pattern, and where only entries tell rows apart."""
    count = 20_000
    hashes = np.arange(count, dtype=np.uint64) << np.uint64(40)
    even, odd = np.arange(0, count, 2), np.arange(1, count, 2)
    if layout == "value":
        wanted = Wanted(hashes, [pa.array(np.arange(count)).cast(pa.string()), pa.nulls(count, pa.float64())])
    else:
        names = pa.array(np.arange(count)).cast(pa.string())
        one_key = [pa.array(["k"] * count), pa.nulls(count, pa.float64())]
        wanted = Wanted(np.zeros(count, dtype=np.uint64), one_key, hashes + np.uint64(1), [names])
    searched: list[int] = []
    real = Piece._search

    def counting(piece: Piece, schema: Any, rows: Wanted, asked: Any) -> Asked:
        searched.append(len(asked))
        return real(piece, schema, rows, asked)

    with patch.object(Piece, "_search", counting):
        said = _piece(layout, wanted.take(even)).ask(SHAPES[layout], wanted, np.arange(count))
        assert said.found.tolist() == said.answered.tolist() == even.tolist()
        assert len(even) <= sum(searched) < len(even) + len(odd) // 8
        searched.clear()
        assert len(_piece(layout, wanted.take(even)).ask(SHAPES[layout], wanted, odd).found) == 0
        assert sum(searched) < len(odd) // 8


def _piece(layout: str, rows: Wanted) -> Piece:
    """A piece that has these rows."""
    count = len(rows.hashes)
    schema = SHAPES[layout]
    values = [pa.nulls(count, field.type) for field in schema.values]
    batch = schema.batch(
        rows.hashes, None, rows.keys, values, entries=rows.entries, entry_columns=list(rows.entry_columns)
    )
    return Piece(0, batch, RunData(batch), 0, None)


def test_a_key_that_was_cleared_is_answered_for_rows_that_are_not_marked() -> None:
    """A clear marker hides all rows of its key in older runs; a mark of each row that is here would not say so."""
    key = KEYS[2]
    batch = batch_of_change("map", Change(cleared=frozenset({key})), lambda key: 7)
    assert entries_of(batch).tolist() == [CLEAR_MARKER]
    wanted, given_rows = _entries_wanted(lambda key: 7)
    with patch.multiple("state_runtime.state.pieces", _MARKED_MIN=1, _MARKED_ROWS_MAX=1_000):
        said = Piece(0, batch, RunData(batch), 0, None).ask(SHAPES["map"], wanted, np.arange(len(given_rows)))
    assert said.answered.tolist() == [n for n, (wanted_key, _) in enumerate(given_rows) if wanted_key == key]


@given(st.lists(st.tuples(_HASHES, _HASHES), max_size=20))
@examples(100)
def test_an_identity_follows_hash_and_entry(pairs: list[tuple[int, int]]) -> None:
    """Equal pairs have equal numbers, wherever they lie."""
    hashes, entries = (np.array([pair[n] for pair in pairs], dtype=np.uint64) for n in (0, 1))
    seen: Mapping[tuple[int, int], int] = dict(zip(pairs, identities_of(hashes, entries).tolist(), strict=True))
    again = identities_of(hashes[::-1].copy(), entries[::-1].copy())
    assert again.tolist() == [seen[pair] for pair in pairs[::-1]]
