"""Lists and maps in a vectorised processor, against plain dicts: what is read, what is stored, and how much."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_reader import MemoryReader
from model import SCHEMA, HashOf, Key, canonical_key, examples, hash_functions, key_columns
from sliced import now_whole_now_sliced

from state_runtime import ListOf, MapOf, VectorizedProcessor
from state_runtime.base.errors import InvalidData, InvalidPipeline, UserCodeError
from state_runtime.processors.grouping import GroupedRows, group_rows
from state_runtime.processors.operator import EpochClock
from state_runtime.processors.user.keyed_batch import KeyedBatch
from state_runtime.processors.user.vectorized import VectorizedOperator
from state_runtime.state.table import StateSchema
from state_runtime.state.version import OpenVersion

KEYS = SCHEMA.keys
ALL: tuple[Key, ...] = (("a", 1.5), ("b", "nan"), ("", 0.0), (None, 1.5), ("a", None))
ITEM = pa.schema([("sku", pa.string()), ("size", pa.int64())])
SCHEMAS = {
    "list": StateSchema(KEYS, pa.schema([("n", pa.int64())]), pa.schema([])),
    "map": StateSchema(KEYS, pa.schema([("price", pa.int64()), ("note", pa.string())]), ITEM),
}
# What a row asks for: to append to the list, to set or remove an entry of the map, or to clear the key's list or map.
Row = tuple[Key, str, int, int]
rows = st.lists(
    st.tuples(st.sampled_from(ALL), st.sampled_from(["append", "put", "remove", "clear list", "clear map"]), st.integers(0, 3), st.integers(0, 9)),
    max_size=12,
)  # fmt: skip
epochs = st.lists(rows, min_size=1, max_size=5)


def sku_of(number: int) -> tuple[str | None, int | None]:
    return ("x" if number % 2 else None), (number if number < 3 else None)


def grouped(given_rows: list[Row], hash_of: HashOf) -> GroupedRows:
    data = pa.RecordBatch.from_arrays(
        [
            *key_columns([row[0] for row in given_rows]),
            pa.array([row[1] for row in given_rows], pa.string()),
            *(pa.array([sku_of(row[2])[n] for row in given_rows], field.type) for n, field in enumerate(ITEM)),
            pa.array([row[3] for row in given_rows], pa.int64()),
        ],
        names=["name", "score", "what", "sku", "size", "n"],
    )
    hashes = np.array([hash_of(row[0]) for row in given_rows], dtype=np.uint64)
    return group_rows(data, hashes, np.arange(len(given_rows), dtype=np.int64), ["name", "score"], KEYS)


class Asked(VectorizedProcessor):
    """First appends, then puts, removes and clears; tells each time what it sees."""

    def states(self) -> dict[str, Any]:
        return {"list": ListOf("n long"), "map": MapOf("sku string, size long", "price long, note string")}

    def process(self, batch: KeyedBatch) -> Iterator[pa.Table]:
        items, prices = batch.list_state("list"), batch.map_state("map")
        what = np.array(batch.rows["what"].to_pylist())

        def some(kind: str) -> tuple[pa.RecordBatch, Any]:
            at = np.flatnonzero(what == kind)
            return batch.rows.take(pa.array(at)), batch.key_of_row[at]

        yield self._told(batch, "before")
        given, of = some("append")
        items.append({"n": given["n"]}, of)
        given, of = some("put")
        notes = pa.array([f"n{n}" for n in given["n"].to_pylist()], pa.string())
        prices.put(given.select(["sku", "size"]), {"price": given["n"], "note": notes}, of)
        found, values = prices.get(given.select(["sku", "size"]), of)
        assert bool(found.all())
        assert values["price"].null_count == 0
        given, of = some("remove")
        prices.remove({"size": given["size"], "sku": given["sku"]}, of)
        found, values = prices.get(given.select(["sku", "size"]), of)
        assert not bool(found.any())
        assert values["price"].null_count == len(values)
        for kind, state in (("clear list", items), ("clear map", prices)):
            _, of = some(kind)
            state.clear(np.isin(np.arange(batch.num_keys), of))
        yield self._told(batch, "after")

    def _told(self, batch: KeyedBatch, when: str) -> pa.Table:
        told = []
        lists, maps = batch.list_state("list").read(), batch.map_state("map").read()
        for number in range(batch.num_keys):
            elements = lists.rows["n"].to_pylist()[lists.starts[number] : lists.stops[number]]
            entries = maps.rows.to_pylist()[maps.starts[number] : maps.stops[number]]
            told.append(repr((elements, sorted((repr((e["sku"], e["size"])), e["price"], e["note"]) for e in entries))))
        keys = batch.keys
        return pa.table({"name": keys["name"], "score": keys["score"], "when": [when] * batch.num_keys, "told": told})


class Model:
    def __init__(self) -> None:
        self.lists: dict[Key, list[int]] = {}
        self.maps: dict[Key, dict[str, tuple[int, str]]] = {}

    def epoch(self, given_rows: list[Row]) -> dict[tuple[Key, str], str]:
        keys = {row[0] for row in given_rows}
        told = {(key, "before"): self._told(key) for key in keys}
        for key, what, _, n in given_rows:
            if what == "append":
                self.lists.setdefault(key, []).append(n)
        for key, what, sku, n in given_rows:
            if what == "put":
                self.maps.setdefault(key, {})[repr(sku_of(sku))] = (n, f"n{n}")
        for key, what, sku, _ in given_rows:
            if what == "remove":
                self.maps.get(key, {}).pop(repr(sku_of(sku)), None)
        for key, what, _, _ in given_rows:
            if what.startswith("clear"):
                (self.lists if what == "clear list" else self.maps).pop(key, None)
        return {**told, **{(key, "after"): self._told(key) for key in keys}}

    def _told(self, key: Key) -> str:
        entries = sorted((sku, *value) for sku, value in self.maps.get(key, {}).items())
        return repr((self.lists.get(key, []), entries))

    @property
    def live(self) -> int:
        return sum(map(len, self.lists.values())) + sum(map(len, self.maps.values()))


def operator_of(processor: Any) -> VectorizedOperator:
    return VectorizedOperator(
        uid="op",
        key_columns=("name", "score"),
        key_ddl="name string, score double",
        key_schema=KEYS,
        output_schema=pa.schema([("name", pa.string()), ("score", pa.float64()), ("when", pa.string()), ("told", pa.string())]),
        state_schemas=SCHEMAS,
        state_ddl={"list": "n bigint", "map": "price bigint, note string"},
        entry_ddl={"map": "sku string, size bigint"},
        kind="vectorized",
        processor=processor,
        output_rows_per_batch=5,
    )  # fmt: skip


@given(given_epochs=epochs, hash_of=hash_functions, in_runs=st.booleans())
@examples(150)
def test_lists_and_maps_are_those_of_plain_dicts(given_epochs: list[list[Row]], hash_of: HashOf, in_runs: bool) -> None:
    """Over epochs, with equal hashes, null and NaN in keys, nulls in a map's key, several entries of one map key in a call."""
    operator, model = operator_of(Asked()), Model()
    runs = OpenVersion.of_batches("v", {}, SCHEMAS) if in_runs else None
    reader, live = MemoryReader(SCHEMAS), 0
    for number, given_rows in enumerate(given_epochs, 1):
        if not given_rows:
            continue
        slices = now_whole_now_sliced(grouped(given_rows, hash_of))
        result = operator.process(slices, runs or reader, EpochClock(0, 0, 0, number), 0)
        told = {
            (canonical_key(row["name"], row["score"]), row["when"]): row["told"]
            for batch in result.outputs
            for row in batch.to_pylist()
        }
        expected = model.epoch(given_rows)
        assert {k: v for k, v in told.items() if k[1] == "before"} == {
            k: v for k, v in expected.items() if k[1] == "before"
        }
        assert told == expected
        for name, changed in result.changes.items():
            SCHEMAS[name].check_batch(changed, name)
        if runs is not None:
            runs = runs.overlaid(result.changes, result.due_taken)
        reader = reader.overlaid(result.changes)
        live += result.rows_added
        assert live == model.live == sum(len(reader.rows(name)) for name in SCHEMAS), "rows_added"


def test_the_manifest_says_what_kind_of_state_it_is() -> None:
    states = {each.name: (each.kind, each.schema, each.entry_schema) for each in operator_of(Asked()).entry().states}
    assert states == {
        "list": ("list", "n bigint", ""),
        "map": ("map", "price bigint, note string", "sku string, size bigint"),
    }


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda b: b.state("list"), InvalidPipeline, r"has many values of a key; use batch.list_state\('list'\)"),
        (lambda b: b.update("map", {}), InvalidPipeline, r"use batch.map_state\('map'\)"),
        (lambda b: b.list_state("map"), InvalidPipeline, r"is a map; read it with batch.map_state\(\)"),
        (lambda b: b.list_state("other"), InvalidPipeline, "has no list or map 'other'; states.. names list, map"),
        (lambda b: b.list_state("list").append({"m": [1]}, [0]), InvalidData, "got the columns m, and it has n"),
        (lambda b: b.list_state("list").append({"n": [1, 2]}, [0]), InvalidData, "got 2 values in column 'n' for 1 rows"),
        (lambda b: b.list_state("list").append({"n": [1]}, [7]), InvalidData, "key_of_row needs a number of a key"),
        (lambda b: b.list_state("list").clear([True]), InvalidData, "where= needs 2 booleans, one per key"),
    ],
)  # fmt: skip
def test_what_a_list_or_map_cannot_be_asked_is_said(ask: Any, error: type[Exception], message: str) -> None:
    class Asks(Asked):
        def process(self, batch: KeyedBatch) -> Any:
            ask(batch)

    given_rows = grouped([(ALL[0], "append", 0, 1), (ALL[1], "append", 0, 1)], lambda key: hash(key) % 1000)
    result = operator_of(Asks()).process(now_whole_now_sliced(given_rows), MemoryReader(SCHEMAS), EpochClock(0), 0)
    with pytest.raises((error, UserCodeError), match=message):
        list(result.outputs)
