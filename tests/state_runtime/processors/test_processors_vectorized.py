"""Many keys at once, against a plain dictionary: the user's interface, and `latest_by` and `deduplicate` on top of it."""

from __future__ import annotations

import datetime as dt
import math
import random
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import (
    SCHEMA,
    STATE,
    HashOf,
    Key,
    batch_of,
    canonical_key,
    colliding,
    examples,
    hash_functions,
    key_columns,
    keys,
    rows_of,
    spread,
    values,
)

from state_runtime import VectorizedProcessor
from state_runtime.base.errors import InvalidData, InvalidPipeline, UserCodeError
from state_runtime.processors.builtin.deduplicate import SEEN, Deduplicate
from state_runtime.processors.builtin.latest import LATEST, LatestBy, plan_latest
from state_runtime.processors.builtin.ranks import ranks_of_rows
from state_runtime.processors.columns import fit_column
from state_runtime.processors.grouping import GroupedRows, group_rows
from state_runtime.processors.operator import EpochClock, RowSlice
from state_runtime.processors.user.keyed_batch import KeyedBatch
from state_runtime.processors.user.vectorized import VectorizedOperator
from state_runtime.state.table import StateSchema, fold
from state_runtime.state.version import OpenVersion

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guide.md"
KEYS = SCHEMA.keys
Row = tuple[Key, Any]


def grouped(
    rows: list[Row], hash_of: HashOf = spread, data_type: pa.DataType | None = None, first: int = 0
) -> GroupedRows:
    """Rows in source order (`id` counts from `first`), handed over in another order as a shuffle does."""
    arrival = list(range(len(rows)))
    random.Random(len(rows)).shuffle(arrival)
    wanted = [rows[i][0] for i in arrival]
    data = pa.RecordBatch.from_arrays(
        [
            *key_columns(wanted, negative_zero=len(rows) % 2 == 0),
            pa.array([rows[i][1] for i in arrival], data_type or pa.int64()),
            pa.array([first + i for i in arrival], pa.int64()),
        ],
        names=["name", "score", "amount", "id"],
    )
    hashes = np.array([hash_of(k) for k in wanted], dtype=np.uint64)
    return group_rows(data, hashes, np.array(arrival, dtype=np.int64) * 3, ["name", "score"], KEYS)


def keys_of(batch: pa.RecordBatch) -> list[Key]:
    return [canonical_key(*pair) for pair in zip(batch["name"].to_pylist(), batch["score"].to_pylist(), strict=True)]


class Job:
    """One operator over epochs, with the state carried along as the runtime does."""

    def __init__(
        self,
        processor: Any,
        states: Mapping[str, pa.Schema],
        output: list[tuple[str, pa.DataType]],
        *,
        kind: Any = "vectorized",
        hash_of: HashOf = spread,
        data_type: pa.DataType | None = None,
        rows_per_batch: int = 65_536,
    ) -> None:
        self.hash_of, self.data_type = hash_of, data_type
        self.schemas = {name: StateSchema(KEYS, schema) for name, schema in states.items()}
        self.operator = VectorizedOperator(
            uid="op",
            key_columns=("name", "score"),
            key_ddl="name string, score double",
            key_schema=KEYS,
            output_schema=pa.schema(output),
            state_schemas=self.schemas,
            state_ddl=dict.fromkeys(states, ""),
            kind=kind,
            processor=processor,
            output_rows_per_batch=rows_per_batch,
        )
        self.tables = {name: schema.empty() for name, schema in self.schemas.items()}
        self.live = 0
        self.rows = 0
        self.logged: dict[str, pa.RecordBatch] = {}

    def epoch(self, rows: list[Row]) -> list[dict[str, Any]]:
        """What is emitted."""
        return [row for batch in self.batches(rows) for row in batch.to_pylist()]

    def batches(self, rows: list[Row]) -> list[pa.RecordBatch]:
        version = OpenVersion.of_batches("v", self.tables, self.schemas)
        given = grouped(rows, self.hash_of, self.data_type, self.rows)
        self.rows += len(rows)
        result = self.operator.process([RowSlice(given)], version, EpochClock(1234), 5)
        assert result.changes == {}, "nothing is logged before the output is drained"
        produced = list(result.outputs)
        for name, changed in result.changes.items():
            self.tables[name] = fold([changed, self.tables[name]], self.schemas[name], drop_deleted=True)
        self.logged = result.changes
        self.live += result.rows_added
        assert self.live == sum(table.num_rows for table in self.tables.values())
        return produced

    def state(self, name: str) -> dict[Key, tuple[Any, ...]]:
        """Live values by key."""
        table = self.tables[name]
        pairs = zip(table["key.name"].to_pylist(), table["key.score"].to_pylist(), strict=True)
        columns = [table[f"value.{column}"].to_pylist() for column in self.schemas[name].values.names]
        found = zip(*columns, strict=True) if columns else [()] * table.num_rows
        return {canonical_key(*pair): tuple(value) for pair, value in zip(pairs, found, strict=True)}


def split(rows: list[Row], cuts: list[int]) -> list[list[Row]]:
    """The rows in epochs."""
    at = sorted({0, len(rows), *(c % (len(rows) + 1) for c in cuts)})
    return [rows[low:high] for low, high in pairwise(at)]


many_rows = st.lists(st.tuples(keys, st.none() | st.integers(-9, 9)), min_size=1, max_size=40)
cuts = st.lists(st.integers(0, 40), max_size=4)


# --- the user's interface --------------------------------------------------------------------------------------------


def processor_of_the_guide() -> VectorizedProcessor:
    """The class in the guide's section, as a reader would copy it."""
    section = GUIDE.read_text().split("## Many keys at once")[1].split("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, Any] = {}
    exec(blocks[0], names)  # our own documentation
    made = names["Running"]()
    assert isinstance(made, VectorizedProcessor)
    return made


@given(many_rows, cuts, hash_functions)
@examples(60)
def test_the_guides_example_gives_running_totals_however_the_input_is_split(
    rows: list[Row], where: list[int], hash_of: HashOf
) -> None:
    """A reader starts from it: it must be right, also for nulls."""
    processor = processor_of_the_guide()
    assert processor.states() == {"totals": "n long, total long"}
    output = [("id", pa.int64()), ("name", pa.string()), ("n", pa.int64()), ("total", pa.int64())]
    job = Job(processor, {"totals": pa.schema([("n", pa.int64()), ("total", pa.int64())])}, output, hash_of=hash_of)
    outputs = [row for epoch in split(rows, where) for row in job.epoch(epoch)]
    totals: dict[Key, tuple[int, int]] = {}
    expected = []
    for number, (key, value) in enumerate(rows):
        n, total = totals.get(key, (0, 0))
        totals[key] = (n + 1, total + (value or 0))
        expected.append({"id": number, "name": key[0], "n": n + 1, "total": total + (value or 0)})
    assert sorted(outputs, key=lambda row: row["id"]) == expected
    assert job.state("totals") == totals


class Scripted(VectorizedProcessor):
    """Does what a test says, and compares with a dictionary after each step."""

    def __init__(self, live: dict[Key, Any], steps: list[Any]) -> None:
        self.live, self.steps = live, steps

    def states(self) -> Mapping[str, Any]:
        return {STATE: "n long, s string"}

    def process(self, batch: KeyedBatch) -> None:
        there = keys_of(batch.keys)
        self.compare(batch, there)
        for action, chosen, value, how in self.steps:
            mask = np.array([chosen is None or key in chosen for key in there])
            where = None if chosen is None else (pa.array(mask) if how == "arrow" else mask)
            if action == "clear":
                batch.clear(STATE, where)
            else:
                count = len(there) if how == "all" else int(mask.sum())
                columns = {
                    "s": pa.array([value[1]] * count, pa.string()),
                    "n": pa.array([value[0]] * count, pa.int64()),
                }
                batch.update(STATE, columns if how == "all" else pa.table(columns), where)
            for at in np.flatnonzero(mask):
                self.live.pop(there[at], None)
                if action == "update":
                    self.live[there[at]] = value
            self.compare(batch, there)

    def compare(self, batch: KeyedBatch, there: list[Key]) -> None:
        found, stored = batch.state(STATE)
        assert found.tolist() == [key in self.live for key in there]
        assert [tuple(r.values()) for r in stored.to_pylist()] == [self.live.get(k, (None, None)) for k in there]


steps = st.lists(
    st.tuples(
        st.sampled_from(["update", "clear"]),
        st.none() | st.sets(keys, max_size=12),
        values,
        st.sampled_from(["all", "masked", "arrow"]),
    ),
    max_size=4,
)


@given(st.lists(st.tuples(st.lists(keys, min_size=1, max_size=12), steps), min_size=1, max_size=4), hash_functions)
@examples(120)
def test_state_is_a_dictionary(epochs: list[Any], hash_of: HashOf) -> None:
    """Any updates and clears of any keys over epochs; `state` sees them at once, the next epoch too."""
    live: dict[Key, Any] = {}
    for wanted, script in epochs:
        before = dict(live)
        job = Job(Scripted(live, script), {STATE: SCHEMA.values}, [("n", pa.int64())], hash_of=hash_of)
        job.tables[STATE], job.live = batch_of(before, hash_of), len(before)
        assert job.epoch([(key, 1) for key in wanted]) == []
        assert job.state(STATE) == live
        written = rows_of(job.logged[STATE])
        assert all(value is not None or key in before for key, value in written.items()), (
            "no trace of what was not there"
        )
        touched = {key for _, chosen, _, _ in script for key in wanted if chosen is None or key in chosen}
        assert set(written) <= touched, "reading writes nothing"


@pytest.mark.parametrize("cut_down", [False, True], ids=["one value per key", "one per masked key"])
def test_an_update_with_a_mask_gives_each_key_its_own_value(cut_down: bool) -> None:
    """Both ways to give values must reach the same keys."""

    expected: dict[Key, Any] = {}

    def process(batch: KeyedBatch) -> None:
        mask = np.array([False, True, True])
        first = np.array(batch.first_rows()["id"]) * 10
        expected.update({k: (n, None) for k, n in zip(keys_of(batch.keys)[1:], first[1:].tolist(), strict=True)})
        columns = {"n": first[mask] if cut_down else first, "s": pa.nulls(2 if cut_down else 3, pa.string())}
        batch.update(STATE, columns, mask)

    job = calling(process)
    job.epoch(ROWS)
    assert len(expected) == 2
    assert job.state(STATE) == expected


class Calls(VectorizedProcessor):
    """Whatever a test gives it."""

    def __init__(self, function: Callable[[KeyedBatch], Any]) -> None:
        self.process = function  # type: ignore[method-assign]

    def states(self) -> Mapping[str, Any]:
        return {STATE: "n long, s string"}

    def process(self, batch: KeyedBatch) -> Any:
        raise AssertionError("no row is processed here")


OUT = [("name", pa.string()), ("n", pa.int64())]
ROWS: list[Row] = [(("a", 1.5), 1), (("b", 0.0), 2), (("a", 1.5), 3), (("", None), None), (("a", 1.5), 4)]


def calling(function: Callable[[KeyedBatch], Any], **how: Any) -> Job:
    return Job(Calls(function), {STATE: SCHEMA.values}, OUT, **how)


def test_the_batch_shows_rows_and_keys_in_one_order() -> None:
    """Everything that the docstrings say about positions."""
    seen: list[KeyedBatch] = []
    calling(seen.append, hash_of=colliding).epoch(ROWS)
    (batch,) = seen
    there = keys_of(batch.keys)
    by_key = {key: [n for n, (k, _) in enumerate(ROWS) if k == key] for key, _ in ROWS}
    assert (batch.num_keys, batch.rows.num_rows, batch.batch_time_ms) == (3, 5, 1234)
    assert repr(batch) == "KeyedBatch(3 keys, 5 rows)"
    assert sorted(there, key=repr) == sorted(by_key, key=repr)
    numbers = batch.rows["id"].to_pylist()
    assert [numbers[low:high] for low, high in zip(batch.starts, batch.stops, strict=True)] == [
        by_key[k] for k in there
    ]
    assert batch.sizes.tolist() == [len(by_key[k]) for k in there]
    assert [there[k] for k in batch.key_of_row] == keys_of(batch.rows)
    assert [by_key[there[k]][i] for k, i in zip(batch.key_of_row, batch.row_in_key, strict=True)] == numbers
    assert batch.rows["id"].take(pa.array(np.argsort(batch.sequence))).to_pylist() == [0, 1, 2, 3, 4]
    assert batch.first_rows()["id"].to_pylist() == [by_key[k][0] for k in there]
    assert batch.last_rows()["id"].to_pylist() == [by_key[k][-1] for k in there]
    assert batch.per_row(batch.sizes).tolist() == [len(by_key[k]) for k in keys_of(batch.rows)]
    assert batch.per_row(batch.keys).equals(batch.rows.select(["name", "score"]))
    assert batch.per_row(batch.keys["name"]).equals(batch.rows["name"])
    with pytest.raises(InvalidData, match=r"operator 'op': per_row\(\) got 5 values for 3 keys"):
        batch.per_row(np.zeros(5))


@pytest.mark.parametrize("name", ["starts", "stops", "sizes", "key_of_row", "row_in_key", "sequence", "found"])
def test_what_is_handed_out_cannot_be_written_to(name: str) -> None:
    """The runtime works on the same memory; a slip must not become a wrong state."""

    def write(batch: KeyedBatch) -> None:
        array: Any = batch.state(STATE).found if name == "found" else getattr(batch, name)
        array[0] = 1

    with pytest.raises(UserCodeError, match="read-only"):
        calling(write).epoch(ROWS)


@pytest.mark.parametrize(
    ("fail", "said"),
    [(lambda batch: {}["missing"], "KeyError: 'missing'"), (lambda batch: sys.exit(3), "SystemExit: 3")],
)
def test_what_a_vectorised_processor_raises_says_where(fail: Callable[[KeyedBatch], Any], said: str) -> None:
    """`sys.exit` too: it is no Exception, and unguarded it would end the worker without a word."""
    with pytest.raises(
        UserCodeError, match=rf"operator 'op', shard 5: the processor raised {said} \({re.escape(__file__)}"
    ):
        calling(fail).epoch(ROWS)


def all_of(n: Any, s: Any = None) -> dict[str, Any]:
    return {"n": n, "s": pa.nulls(3, pa.string()) if s is None else s}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: b.update(STATE, {"n": np.zeros(3)}), r"update\(\) got the columns n; the state has n, s"),
        (lambda b: b.update(STATE, {}), r"got the columns none; the state has n, s"),
        (lambda b: b.update(STATE, {**all_of(np.arange(3)), "x": [1]}), "got the columns n, s, x"),
        (lambda b: b.update(STATE, pa.table([[1], [1], ["x"]], names=["n", "n", "s"])), "a column twice"),
        (lambda b: b.update(STATE, [1, 2, 3]), "got a list; give"),
        (lambda b: b.update(STATE, pd.DataFrame({"n": [1]})), "got a DataFrame; give"),
        (lambda b: b.update(STATE, all_of(np.arange(2))), "got 2 values in column 'n' for 3 of 3 keys"),
        (lambda b: b.update(STATE, all_of(np.arange(5))), "got 5 values in column 'n' for 3 of 3 keys"),
        (lambda b: b.update(STATE, all_of(7)), "a int for column 'n' that Arrow makes no column of"),
        (lambda b: b.update(STATE, all_of(np.zeros((3, 2)))), "a ndarray for column 'n'"),
        (lambda b: b.update(STATE, all_of([1, "s3cr3t", 2])), "a list for column 'n'"),
        (lambda b: b.update(STATE, all_of(np.arange(3), "abc")), "a str for column 's'"),
        (lambda b: b.update(STATE, all_of(np.array([0.5, 1, 2]))), "'n' is declared as int64 but holds double values"),
        (lambda b: b.update(STATE, all_of(np.array([np.nan, 1, 2]))), "'n' is declared as int64 but holds double"),
        (lambda b: b.update(STATE, all_of(pa.array(["s3cr3t", "1", "2"]))), "int64 but holds string"),
        (lambda b: b.update(STATE, all_of(np.arange(3), np.arange(3))), "'s' is declared as string but holds int64"),
        (lambda b: b.update(STATE, all_of(np.arange(3)), [0, 1, 2]), r"update\(where=…\) needs 3 booleans"),
        (lambda b: b.update(STATE, all_of(np.arange(3)), np.ones(2, bool)), r"not bool of shape \(2,\)"),
        (lambda b: b.update(STATE, all_of(np.arange(2)), [True, False, False]), "got 2 values .* for 1 of 3 keys"),
        (lambda b: b.clear(STATE, pa.array([True, None, False])), r"clear\(where=…\) needs 3 booleans.*not object"),
        (lambda b: b.clear(STATE, True), r"not bool of shape \(\)"),
    ],
)  # fmt: skip
def test_a_wrong_call_says_operator_state_and_what_to_do(call: Any, message: str) -> None:
    """And never a value of the user's data."""
    with pytest.raises(InvalidData, match=f"operator 'op', state '{STATE}'.*{message}") as caught:
        calling(call).epoch(ROWS)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [lambda b: b.state("other"), lambda b: b.clear("other"), lambda b: b.update("other", {})],
    ids=["state", "clear", "update"],
)
def test_an_unknown_state_is_refused_by_name(call: Any) -> None:
    """It would have no place in the manifest."""
    with pytest.raises(InvalidPipeline, match=f"operator 'op' has no state 'other'; states\\(\\) names {STATE}"):
        calling(call).epoch(ROWS)


def table(batch: KeyedBatch, **columns: Any) -> pa.Table:
    return pa.table({"n": batch.sizes.astype(np.int32), "name": batch.keys["name"], **columns})


def generated(batch: KeyedBatch) -> Any:
    whole = table(batch)
    yield whole.slice(0, 1)
    yield None
    yield whole.slice(1).combine_chunks().to_batches()[0]
    yield whole.slice(0, 0)


@pytest.mark.parametrize(
    "function",
    [table, generated, lambda b: table(b).to_batches()[0], lambda b: [table(b)], lambda b: table(b, more=b.starts)],
    ids=["table", "generator", "batch", "list", "another column"],
)
@pytest.mark.parametrize("rows_per_batch", [1, 2, 65_536])
def test_output_is_matched_by_name_and_cut_into_batches(function: Any, rows_per_batch: int) -> None:
    """Whatever form it has; narrow integers become the declared long."""
    batches = calling(function, rows_per_batch=rows_per_batch).batches(ROWS)
    assert all(b.schema == pa.schema(OUT) and 1 <= b.num_rows <= rows_per_batch for b in batches)
    found = sorted((row["name"], row["n"]) for b in batches for row in b.to_pylist())
    assert found == [("", 1), ("a", 3), ("b", 1)]


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda b: pa.table({"n": [1]}), "column 'name' is declared, and the processor gave it not"),
        (lambda b: pa.table([["a"], [1], [1]], names=["name", "n", "n"]), "'n' is declared, .* gave it twice"),
        (lambda b: pa.table({"name": ["a"], "n": ["s3cr3t"]}), "'n' is declared as int64 but holds string"),
        (lambda b: pa.table({"name": ["a"], "n": [1.5]}), "'n' is declared as int64 but holds double"),
        (lambda b: pd.DataFrame({"name": ["a"], "n": [1]}), "gave a DataFrame; return pyarrow tables.*from_pandas"),
        (lambda b: 7, "gave a int; return pyarrow tables"),
        (lambda b: [[1]], "gave a list; return pyarrow tables"),
    ],
)
def test_output_that_does_not_fit_is_refused(give: Any, message: str) -> None:
    """With the operator in the message, and without the value."""
    with pytest.raises(InvalidData, match=f"operator 'op'.*{message}") as caught:
        calling(give).epoch(ROWS)
    assert "s3cr3t" not in str(caught.value)


def fails(batch: KeyedBatch) -> None:
    raise KeyError("no such thing")


def fails_later(batch: KeyedBatch) -> Any:
    batch.clear(STATE)
    yield table(batch)
    raise KeyError("no such thing")


@pytest.mark.parametrize("function", [fails, fails_later])
def test_an_error_of_user_code_says_where_and_logs_nothing(function: Any) -> None:
    """The cause is chained; the state of the epoch is not half written."""
    job = calling(function)
    version = OpenVersion.of_batches("v", job.tables, job.schemas)
    result = job.operator.process([RowSlice(grouped(ROWS))], version, EpochClock(0), 3)
    with pytest.raises(
        UserCodeError, match="operator 'op', shard 3: the processor raised KeyError: 'no such"
    ) as caught:
        list(result.outputs)
    assert isinstance(caught.value.__cause__, KeyError)
    assert (result.changes, result.rows_added) == ({}, 0)


def test_without_rows_the_processor_is_not_called() -> None:
    """`reduceat` has no answer for nothing."""
    assert calling(fails).epoch([]) == []


def test_nested_and_unusual_values_are_state_too() -> None:
    """Lists, structs, decimals and times, merged by mask."""
    schema = pa.schema(
        [
            ("l", pa.list_(pa.field("element", pa.int32()))),
            ("s", pa.struct([("a", pa.int64()), ("b", pa.string())])),
            ("d", pa.decimal128(5, 2)),
            ("t", pa.timestamp("us", tz="UTC")),
        ]
    )
    at = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)

    def process(batch: KeyedBatch) -> None:
        first = batch.rows["amount"].take(pa.array(batch.starts)).fill_null(0).to_numpy()
        new = {
            "l": pa.array([[int(n)] for n in first]),
            "s": pa.array([{"a": int(n), "b": "x"} for n in first]),
            "d": pa.array([int(n) for n in first]),
            "t": np.array([np.datetime64("2026-01-02", "ns")] * len(first)),
        }
        batch.update("odd", new, where=~batch.state("odd").found)

    job = Job(Calls(process), {"odd": schema}, OUT)
    job.epoch([(("a", 1.5), 1), (("b", 0.0), 2)])
    job.epoch([(("a", 1.5), 7), (("b", 1.5), 3)])
    assert job.state("odd") == {
        ("a", 1.5): ([1], {"a": 1, "b": "x"}, Decimal("1.00"), at),
        ("b", 0.0): ([2], {"a": 2, "b": "x"}, Decimal("2.00"), at),
        ("b", 1.5): ([3], {"a": 3, "b": "x"}, Decimal("3.00"), at),
    }


# --- conversion of columns -----------------------------------------------------------------------------------------

FITS: list[tuple[pa.Array, pa.DataType, list[Any]]] = [
    (pa.array([1, None], pa.int8()), pa.int64(), [1, None]),
    (pa.array([1, None]), pa.int8(), [1, None]),
    (pa.array([1, 1 << 53]), pa.float64(), [1.0, float(1 << 53)]),
    (pa.array([2.0]), pa.int32(), [2]),
    (pa.array([0.5, math.inf]), pa.float32(), [0.5, math.inf]),
    (pa.array([], pa.float64()), pa.float32(), []),
    (pa.array([7]), pa.decimal128(3, 1), [Decimal("7.0")]),
    (pa.array([Decimal("7.10")]), pa.decimal128(3, 1), [Decimal("7.1")]),
    (pa.array(["a"]).dictionary_encode(), pa.string(), ["a"]),
    (pa.array(["a"], pa.large_string()), pa.string(), ["a"]),
    (pa.array([b"a"], pa.binary(1)), pa.binary(), [b"a"]),
    (pa.nulls(2), pa.timestamp("us"), [None, None]),
    (pa.array([[1]]), pa.list_(pa.int16()), [[1]]),
    (pa.array([{"a": 1}]), pa.struct([("a", pa.int16())]), [{"a": 1}]),
    (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), pa.map_(pa.string(), pa.int8()), [[("k", 1)]]),
    (pa.array([5], pa.date32()).cast(pa.date64()), pa.date32(), [dt.date(1970, 1, 6)]),
]
DOES_NOT_FIT: list[tuple[pa.Array, pa.DataType]] = [
    (pa.array([300]), pa.int8()),
    (pa.array([(1 << 53) + 1]), pa.float64()),
    (pa.array([1.5]), pa.int64()),
    (pa.array([1e300]), pa.float32()),
    (pa.array([1.5]), pa.decimal128(10, 2)),
    (pa.array([1000]), pa.decimal128(3, 0)),
    (pa.array([Decimal("7.15")]), pa.decimal128(3, 1)),
    (pa.array(["1"]), pa.int64()),
    (pa.array([1]), pa.string()),
    (pa.array([True]), pa.int64()),
    (pa.array([1]), pa.bool_()),
    (pa.array([b"a"]), pa.string()),
    (pa.array([1]), pa.timestamp("us")),
    (pa.array([1], pa.timestamp("ns")), pa.timestamp("us")),
    (pa.array([{"a": 1}]), pa.struct([("b", pa.int64())])),
    (pa.array([["1"]]), pa.list_(pa.int64())),
]


@pytest.mark.parametrize(("column", "data_type", "expected"), FITS, ids=str)
def test_values_that_fit_are_converted(column: pa.Array, data_type: pa.DataType, expected: list[Any]) -> None:
    """numpy and Arrow have their own idea of widths and units; the meaning stays."""
    found = fit_column(column, pa.field("c", data_type), lambda: "here")
    assert found.type == data_type
    assert found.to_pylist() == expected


@pytest.mark.parametrize(("column", "data_type"), DOES_NOT_FIT, ids=str)
def test_values_that_would_change_are_refused(column: pa.Array, data_type: pa.DataType) -> None:
    """Arrow would parse, round, overflow, or make nulls of a struct's fields."""
    with pytest.raises(InvalidData, match="here: column 'c' is declared as"):
        fit_column(column, pa.field("c", data_type), lambda: "here")


# --- latest_by -----------------------------------------------------------------------------------------------------


def latest(
    data_type: pa.DataType | None = None, hash_of: HashOf = spread, ascending: tuple[bool, ...] = (False,)
) -> Job:
    kept = pa.schema([("amount", data_type or pa.int64()), ("id", pa.int64())])
    output = [*zip(KEYS.names, KEYS.types, strict=True), *zip(kept.names, kept.types, strict=True)]
    processor = LatestBy(("amount", "id"), ascending)
    return Job(processor, {LATEST: kept}, output, kind="latest-by", hash_of=hash_of, data_type=data_type)


def spark_order(value: Any) -> Any:
    """Null below everything, NaN above every number."""
    if value is None:
        return (0, 0)
    if isinstance(value, float) and math.isnan(value):
        return (2, 0)
    if isinstance(value, dict | list):
        return (
            1,
            tuple(map(spark_order, [value[name] for name in sorted(value)] if isinstance(value, dict) else value)),
        )
    return (1, value.encode() if isinstance(value, str) else value)


NAIVE = st.datetimes(dt.datetime.fromisoformat("1960-01-01"), dt.datetime.fromisoformat("2030-01-01"))
TYPES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int8(), st.integers(-128, 127)),
    (pa.int64(), st.sampled_from([-(1 << 63), -(1 << 63) + 1, -1, 0, 1, (1 << 63) - 1])),
    (pa.float64(), st.sampled_from([0.0, -0.0, 5e-324, -5e-324, 1.5, -1.5, math.inf, -math.inf, math.nan, -math.nan])),
    (pa.float32(), st.sampled_from([0.0, -0.0, 1.5, -1.5, math.inf, -math.inf, math.nan])),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.sampled_from(["", "a", "B", "ab", "ä", "\U0001f600", "\uffff"])),
    (pa.binary(), st.binary(max_size=2)),
    (pa.date32(), st.dates(dt.date(1960, 1, 1), dt.date(2030, 1, 1))),
    (pa.timestamp("us"), NAIVE),
    (pa.timestamp("us", tz="UTC"), NAIVE.map(lambda t: t.replace(tzinfo=dt.UTC))),
    (pa.decimal128(38, 2), st.decimals(-999, 999, places=2)),
    (
        pa.struct([("a", pa.float64()), ("b", pa.string())]),
        st.fixed_dictionaries({"a": st.sampled_from([None, -1.5, 0.0, -0.0, math.nan]), "b": st.sampled_from([None, "", "a", "ä"])}),
    ),
    (pa.list_(pa.int64()), st.lists(st.sampled_from([None, -(1 << 63), 0, (1 << 63) - 1]), max_size=3)),
    (
        pa.list_(pa.struct([("a", pa.list_(pa.string()))])),
        st.lists(st.none() | st.fixed_dictionaries({"a": st.none() | st.lists(st.sampled_from([None, "", "a"]), max_size=2)}), max_size=2),
    ),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(TYPES)), ids=lambda n: f"{n}-{TYPES[n][0]}")
@given(data=st.data())
@examples(40)
def test_latest_by_keeps_the_greatest_however_the_input_is_split(number: int, data: st.DataObject) -> None:
    """Against a loop: nulls never win, the later of equals does; only keys whose row changed are emitted."""
    data_type, draw = TYPES[number]
    few = st.sampled_from(data.draw(st.lists(keys, min_size=1, max_size=4)))
    rows: list[Row] = data.draw(st.lists(st.tuples(few, st.none() | draw), min_size=1, max_size=30))
    job = latest(data_type, data.draw(hash_functions))
    best: dict[Key, tuple[Any, int]] = {}
    count = 0
    for epoch in split(rows, data.draw(cuts)):
        before = dict(best)
        for key, value in epoch:
            if key not in best or spark_order(value) >= spark_order(best[key][0]):
                best[key] = (value, count)
            count += 1
        emitted = job.epoch(epoch)
        found = {canonical_key(r["name"], r["score"]): r["id"] for r in emitted}
        assert len(found) == len(emitted), "a key once an epoch"
        assert found == {key: n for key, (_, n) in best.items() if before.get(key, (None, -1))[1] != n}
    assert {key: n for key, (_, n) in job.state(LATEST).items()} == {key: n for key, (_, n) in best.items()}
    assert [spark_order(v) for v, _ in job.state(LATEST).values()] == [
        spark_order(best[key][0]) for key in job.state(LATEST)
    ]


@pytest.mark.parametrize("ascending", [(True,), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("number", [1, 2, 5, 9, 10], ids=lambda n: f"{n}-{TYPES[n][0]}")
@given(data=st.data())
@examples(25)
def test_latest_by_several_columns_in_any_direction(
    number: int, ascending: tuple[bool, ...], data: st.DataObject
) -> None:
    """By the value and, with two directions, by the row's number, which tells equals apart."""
    data_type, draw = TYPES[number]
    few = st.sampled_from(data.draw(st.lists(keys, min_size=1, max_size=3)))
    rows: list[Row] = data.draw(st.lists(st.tuples(few, st.none() | draw), min_size=1, max_size=25))
    job = latest(data_type, data.draw(hash_functions), ascending)
    best: dict[Key, tuple[Any, int]] = {}
    count = 0

    def takes_over(new: tuple[Any, int], old: tuple[Any, int]) -> bool:
        for up, after, before in zip(ascending, new, old, strict=False):
            ranks = [spark_order(value) for value in ((before, after) if up else (after, before))]
            if ranks[0] != ranks[1]:
                return bool(ranks[0] > ranks[1])
        return True

    for epoch in split(rows, data.draw(cuts)):
        before = dict(best)
        for key, value in epoch:
            if key not in best or takes_over((value, count), best[key]):
                best[key] = (value, count)
            count += 1
        found = {canonical_key(r["name"], r["score"]): r["id"] for r in job.epoch(epoch)}
        assert found == {key: n for key, (_, n) in best.items() if before.get(key, (None, -1))[1] != n}
    assert {key: n for key, (_, n) in job.state(LATEST).items()} == {key: n for key, (_, n) in best.items()}


@given(st.data())
@examples(100)
def test_ranks_of_rows_are_in_the_order_of_rows(data: st.DataObject) -> None:
    """Of any columns, with nulls below everything: from left to right, each in its direction."""
    chosen = data.draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=3))
    ascending = data.draw(st.tuples(*(st.booleans() for _ in chosen)))
    row = st.tuples(*(st.none() | draw for _, draw in chosen))
    rows = data.draw(st.lists(row, min_size=1, max_size=12))
    columns = [pa.array([row[i] for row in rows], data_type) for i, (data_type, _) in enumerate(chosen)]
    ranks = ranks_of_rows(columns, ascending).tolist()

    def compared(one: tuple[Any, ...], other: tuple[Any, ...]) -> int:
        for up, a, b in zip(ascending, map(spark_order, one), map(spark_order, other), strict=True):
            if a != b:
                return 1 if (a > b) != up else -1
        return 0

    for i, one in enumerate(rows):
        for j, other in enumerate(rows):
            assert compared(one, other) == (ranks[i] > ranks[j]) - (ranks[i] < ranks[j])


def test_the_order_is_written_down_but_for_one_descending_column() -> None:
    """Of which earlier versions wrote nothing down: their manifests are as they were, byte for byte."""
    assert LatestBy(("a", "b")).modes == ""
    assert LatestBy(("a", "b"), (True,)).modes == "by a ascending"
    assert LatestBy(("a", "b", "c"), (False, True)).modes == "by a descending, b ascending"


@pytest.mark.parametrize("data_type", [pa.float64(), pa.float32()], ids=str)
@pytest.mark.parametrize(
    "equal", [[0.0, -0.0], [-0.0, 0.0], [math.nan, -math.nan], [-math.nan, math.nan], [None, None]]
)
def test_of_equal_values_the_later_row_wins(data_type: pa.DataType, equal: list[Any]) -> None:
    """Within an epoch and over two; the bits of zeros and of NaNs differ, the values do not."""
    key = ("a", 1.5)
    for epochs in ([[(key, v) for v in equal]], [[(key, v)] for v in equal]):
        job = latest(data_type)
        assert [[row["id"] for row in job.epoch(rows)] for rows in epochs][-1] == [1]
        assert job.state(LATEST)[key][1] == 1


def test_latest_by_takes_times_in_the_sessions_zone() -> None:
    """Spark hands them over so; the state is in UTC."""
    job = latest(pa.timestamp("us", tz="UTC"))
    job.data_type = pa.timestamp("us", tz="America/Los_Angeles")
    at = dt.datetime(2026, 7, 1, 12, tzinfo=dt.UTC)
    for hours in (0, 2, 1):
        job.epoch([(("a", 1.5), at + dt.timedelta(hours=hours))])
    assert job.state(LATEST) == {("a", 1.5): (at + dt.timedelta(hours=2), 1)}
    assert job.tables[LATEST].schema.field("value.amount").type == pa.timestamp("us", tz="UTC")


INPUT = pa.schema([("k", pa.int64()), ("ts", pa.int64()), ("a", pa.string()), ("l", pa.map_(pa.string(), pa.int64()))])


def test_latest_by_keeps_all_columns_where_none_are_named() -> None:
    """The keys are kept as keys."""
    assert plan_latest(["k"], ["ts"], [], INPUT, "op").kept == ("ts", "a", "l")
    assert plan_latest(["k"], ["ts"], ["l"], INPUT, "op").kept == ("ts", "l")
    assert plan_latest(["k"], ["a", "ts"], [], INPUT, "op", [True, False]).kept == ("a", "ts", "l")


@pytest.mark.parametrize(
    ("order", "columns", "message"),
    [
        ("other", [], "there is no column 'other'; the input has k, ts, a, l"),
        ("ts", ["other"], "there is no column 'other'"),
        ("k", [], "'k' is a key column"),
        ("ts", ["k"], "'k' is a key column"),
        ("ts", ["a", "a"], "name a column twice"),
        ("ts", ["ts"], "name a column twice"),
        ("ts a ts", [], "name a column twice"),
        ("a ts", ["a"], "name a column twice"),
        ("ts k", [], "'k' is a key column"),
        ("a l", [], r"\(column 'l'\) have no order"),
        ("l", [], "have no order"),
    ],
)
def test_what_latest_by_cannot_order_is_refused_when_the_job_is_built(
    order: str, columns: list[str], message: str
) -> None:
    """With the operator in the message."""
    with pytest.raises(InvalidPipeline, match=f"operator 'op', latest_by: .*{message}"):
        plan_latest(["k"], order.split(), columns, INPUT, "op")


# --- deduplicate ---------------------------------------------------------------------------------------------------


@given(many_rows, cuts, hash_functions)
@examples(100)
def test_deduplicate_passes_the_first_row_of_each_key_however_the_input_is_split(
    rows: list[Row], where: list[int], hash_of: HashOf
) -> None:
    """Whole rows, in source order; a key that was seen writes nothing again."""
    output = [*zip(KEYS.names, KEYS.types, strict=True), ("amount", pa.int64()), ("id", pa.int64())]
    job = Job(Deduplicate(), {SEEN: pa.schema([])}, output, kind="deduplicate", hash_of=hash_of)
    seen: set[Key] = set()
    position = 0
    for epoch in split(rows, where):
        new = []
        for number, (key, _) in enumerate(epoch, position):
            if key not in seen:
                seen.add(key)
                new.append(number)
        position += len(epoch)
        produced = job.epoch(epoch)
        assert [row["id"] for row in produced] == new
        assert [(canonical_key(r["name"], r["score"]), r["amount"]) for r in produced] == [rows[n] for n in new]
        assert sum(b.num_rows for b in job.logged.values()) == len(new)
    assert set(job.state(SEEN)) == seen


def test_operators_say_their_kind_and_states_in_the_manifest() -> None:
    """A restart compares them with what is stored."""
    job = latest()
    entry = replace(job.operator, state_ddl={LATEST: "`v` bigint"}).entry()
    assert (entry.uid, entry.kind, entry.key_schema) == ("op", "latest-by", "name string, score double")
    assert [(s.name, s.kind, s.schema) for s in entry.states] == [(LATEST, "value", "`v` bigint")]
