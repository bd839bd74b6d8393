"""pyspark's handle over looked-up columns, against a dictionary; and the operator around user code."""

from __future__ import annotations

from collections.abc import Iterator
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
    Changes,
    HashOf,
    Key,
    Value,
    after,
    batch_of,
    changes,
    colliding,
    examples,
    hash_functions,
    key_columns,
    keys,
    rows_of,
    values,
)

from state_runtime.errors import InvalidData, InvalidPipeline, NotSupportedYet, UserCodeError
from state_runtime.processors.grouping import GroupedRows, group_rows
from state_runtime.processors.handle import DeclaringHandle, Handle
from state_runtime.state.local import OpenVersion
from state_runtime.state.table import fold

SCHEMAS = {STATE: SCHEMA}


def grouped(wanted: list[Key], hash_of: HashOf) -> GroupedRows:
    """One row per key."""
    data = pa.RecordBatch.from_arrays(key_columns(wanted), names=["name", "score"])
    return group_rows(
        data,
        np.array([hash_of(k) for k in wanted], dtype=np.uint64),
        np.arange(len(wanted), dtype=np.int64),
        ["name", "score"],
        SCHEMA.keys,
    )


def keys_of(rows: GroupedRows) -> list[Key]:
    from model import canonical_key

    return [canonical_key(*pair) for pair in zip(*(k.to_pylist() for k in rows.keys), strict=True)]


actions = st.lists(st.tuples(st.sampled_from(["get", "exists", "clear"]), st.none()) | st.tuples(st.just("update"), values), max_size=4)  # fmt: skip


@given(changes, st.dictionaries(keys, actions, min_size=1, max_size=12), hash_functions)
@examples(200)
def test_value_state_is_a_dictionary(stored: Changes, script: dict[Key, Any], hash_of: HashOf) -> None:
    """get, exists, update and clear in any order, on keys that are stored, cleared or new."""
    version = OpenVersion.of_batches("v", {STATE: batch_of(stored, hash_of)}, SCHEMAS)
    rows = grouped(list(script), hash_of)
    handle = Handle("op", SCHEMAS, rows, version)
    state = handle.getValueState(STATE, "n long, s string")
    handle.initialized()
    before = after([stored])
    live: dict[Key, Value] = dict(before)
    for group, key in enumerate(keys_of(rows)):
        handle.cursor.group = group
        for action, value in script[key]:
            if action == "get":
                assert state.get() == live.get(key)
            elif action == "exists":
                assert state.exists() == (key in live)
            elif action == "update":
                state.update(value)
                live[key] = value
            else:
                state.clear()
                live.pop(key, None)
    changed, gained = state.changes(rows)
    assert gained == len(live) - len(before)
    written = rows_of(changed)
    assert rows_of(fold([changed, batch_of(stored, hash_of)], SCHEMA, drop_deleted=True)) == live
    for key, value in written.items():
        assert value is not None or key in before, "clearing what was never stored leaves no trace"
    untouched = {k for k, acts in script.items() if not [a for a, _ in acts if a in ("update", "clear")]}
    assert not untouched & set(written), "reading writes nothing"


def test_an_update_with_another_number_of_fields_is_refused() -> None:
    """Spark would fail later, or shift columns."""
    rows = grouped([("a", 1.5)], colliding)
    handle = Handle("op", SCHEMAS, rows, OpenVersion.of_batches("v", {STATE: SCHEMA.empty()}, SCHEMAS))
    state = handle.getValueState(STATE, "")
    handle.cursor.group = 0
    for wrong in ((), (1,), (1, "x", 2)):
        with pytest.raises(InvalidData, match=f"update\\(\\) got {len(wrong)} fields, the schema has 2: n, s"):
            state.update(wrong)
    state.update((1, None))
    assert state.get() == (1, None)


def test_a_value_of_another_type_is_refused_when_the_epoch_ends() -> None:
    """With operator and state in the message, and without the value."""
    rows = grouped([("a", 1.5)], colliding)
    handle = Handle("op", SCHEMAS, rows, OpenVersion.of_batches("v", {STATE: SCHEMA.empty()}, SCHEMAS))
    state = handle.getValueState(STATE, "")
    handle.cursor.group = 0
    state.update(("s3cr3t", "x"))
    with pytest.raises(InvalidData, match="operator 'op', state 'count': column 'n'") as caught:
        state.changes(rows)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("make", [lambda: DeclaringHandle("op"), lambda: Handle("op", SCHEMAS, grouped([("a", 1.5)], colliding), OpenVersion.of_batches("v", {STATE: SCHEMA.empty()}, SCHEMAS))], ids=["build", "run"])  # fmt: skip
@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("ListState", lambda h: h.getListState("l", "n int")),
        ("MapState", lambda h: h.getMapState("m", "k int", "v int")),
        ("a timer", lambda h: h.registerTimer(1)),
        ("a timer", lambda h: h.deleteTimer(1)),
        ("a timer", lambda h: h.listTimers()),
        ("a TTL", lambda h: h.getValueState(STATE, "n int", 1000)),
        ("a TTL", lambda h: h.getValueState(STATE, "n int", ttlDurationMs=1000)),
        ("deleteIfExists", lambda h: h.deleteIfExists("x")),
    ],
)
def test_what_is_not_there_yet_is_refused_by_name(make: Any, what: str, call: Any) -> None:
    """When the job is built already: not after hours, and never by a wrong result."""
    with pytest.raises(NotSupportedYet, match=f"operator 'op' uses {what}.*does not support yet"):
        call(make())


def test_states_are_asked_for_in_init_only_and_always_the_same() -> None:
    """A state that appears later would have no place in the manifest."""
    rows = grouped([("a", 1.5)], colliding)
    handle = Handle("op", SCHEMAS, rows, OpenVersion.of_batches("v", {STATE: SCHEMA.empty()}, SCHEMAS))
    with pytest.raises(InvalidPipeline, match="must ask for the same states every time"):
        handle.getValueState("unknown", "")
    assert handle.getValueState(STATE, "") is handle.getValueState(STATE, "")
    handle.initialized()
    with pytest.raises(InvalidPipeline, match=r"belongs into init\(\)"):
        handle.getValueState(STATE, "")


@pytest.mark.parametrize("name", ["", " a", "a ", "default", "$x"])
def test_names_that_spark_refuses_are_refused(name: str) -> None:
    """A pipeline must be able to go back to Spark's own operator."""
    with pytest.raises(InvalidPipeline, match="cannot name a state"):
        DeclaringHandle("op").getValueState(name, "n int")


def test_a_state_is_declared_once_and_not_used_at_build_time() -> None:
    """There is no key yet."""
    handle = DeclaringHandle("op")
    state = handle.getValueState("s", "n int")
    with pytest.raises(InvalidPipeline, match="there is no key yet"):
        state.get()
    with pytest.raises(InvalidPipeline, match="twice"):
        handle.getValueState("s", "n int")
    assert handle.declared == {"s": "n int"}


# --- the operator around a StatefulProcessor -----------------------------------------------------------------------

OUT = pa.schema([("name", pa.string()), ("total", pa.int64())])


class Summing:
    """Counts rows per key; both flavours."""

    def __init__(self, *, pandas: bool, fail_on: str = "", produce: Any = None) -> None:
        self.pandas, self.fail_on, self.produce = pandas, fail_on, produce
        self.closed = 0

    def init(self, handle: Any) -> None:
        if self.fail_on == "init":
            raise KeyError("init")
        self.state = handle.getValueState(STATE, "")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timers: Any) -> Iterator[Any]:
        from pyspark.sql import Row

        if self.fail_on == "call":
            raise KeyError("call")
        seen = sum(len(f) for f in rows) if self.pandas else sum(1 for _ in rows)
        total = (self.state.get() or (0, None))[0] + seen
        if total > 5:
            self.state.clear()
        else:
            self.state.update((total, None))
        if self.produce is not None:
            yield self.produce
        elif self.pandas:
            yield pd.DataFrame({"total": [total], "name": [key[0]]})
        else:
            yield Row(total=total, name=key[0])

    def close(self) -> None:
        self.closed += 1
        if self.fail_on == "close":
            raise KeyError("close")


def operator(processor: Any) -> Any:
    from state_runtime.processors.stateful import StatefulProcessorOperator

    return StatefulProcessorOperator(
        uid="op",
        key_columns=("name", "score"),
        key_ddl="name string, score double",
        key_schema=SCHEMA.keys,
        output_schema=OUT,
        state_schemas=SCHEMAS,
        state_ddl={STATE: "n long, s string"},
        processor=processor,
        pandas=processor.pandas,
        output_rows_per_batch=3,
    )


@pytest.mark.parametrize("pandas", [True, False], ids=["pandas", "rows"])
@given(data=st.data())
@examples(25)
def test_a_processor_over_many_epochs_is_the_dictionary(pandas: bool, data: st.DataObject) -> None:
    """Restore, process, fold, again: outputs and state as a plain loop over keys would give."""
    all_epochs = data.draw(st.lists(st.lists(keys, min_size=1, max_size=15), min_size=1, max_size=4))
    version = OpenVersion.of_batches("v", {STATE: SCHEMA.empty()}, SCHEMAS)
    counts: dict[Key, int] = {}
    table = SCHEMA.empty()
    rows_live = 0
    for wanted in all_epochs:
        rows = grouped(wanted, colliding)
        processor = Summing(pandas=pandas)
        result = operator(processor).process(rows, version, None, 0)
        outputs = [row for batch in result.outputs for row in batch.to_pylist()]
        expected = []
        for key in keys_of(rows):
            total = counts.pop(key, 0) + wanted.count(key)
            expected.append((key[0], total))
            if total <= 5:
                counts[key] = total
        assert sorted(map(repr, [(r["name"], r["total"]) for r in outputs])) == sorted(map(repr, expected))
        assert processor.closed == 1
        table = fold([result.changes[STATE], table], SCHEMA, drop_deleted=True)
        rows_live += result.rows_added
        assert {k: v[0] for k, v in rows_of(table).items() if v} == counts
        assert rows_live == len(counts)
        version = OpenVersion.of_batches("v", {STATE: table}, SCHEMAS)


@pytest.mark.parametrize("pandas", [True, False], ids=["pandas", "rows"])
@pytest.mark.parametrize("fail_on", ["init", "call", "close"])
def test_an_error_of_user_code_says_where_and_still_closes(pandas: bool, fail_on: str) -> None:
    """The epoch is not committed; the cause is chained."""
    processor = Summing(pandas=pandas, fail_on=fail_on)
    version = OpenVersion.of_batches("v", {STATE: SCHEMA.empty()}, SCHEMAS)
    result = operator(processor).process(grouped([("a", 1.5)], colliding), version, None, 3)
    with pytest.raises(UserCodeError, match="operator 'op', shard 3: the processor raised KeyError") as caught:
        list(result.outputs)
    assert isinstance(caught.value.__cause__, KeyError)
    assert processor.closed == (0 if fail_on == "init" else 1)
    assert result.changes == {}


@pytest.mark.parametrize("produce", [7, "row", ("a", 1), {"name": "a"}], ids=repr)
def test_what_is_no_row_is_invalid_data(produce: Any) -> None:
    """With a next step in the message."""
    version = OpenVersion.of_batches("v", {STATE: SCHEMA.empty()}, SCHEMAS)
    result = operator(Summing(pandas=False, produce=produce)).process(
        grouped([("a", 1.5)], colliding), version, None, 0
    )
    with pytest.raises(InvalidData, match=r"yield pyspark\.sql.Row objects"):
        list(result.outputs)


def test_rows_are_matched_by_name_and_missing_columns_are_null() -> None:
    """Spark's rule for the row flavour."""
    from pyspark.sql import Row

    version = OpenVersion.of_batches("v", {STATE: SCHEMA.empty()}, SCHEMAS)
    result = operator(Summing(pandas=False, produce=Row(other=1, total=7))).process(
        grouped([("a", 1.5)], colliding), version, None, 0
    )
    assert [b.to_pylist() for b in result.outputs] == [[{"name": None, "total": 7}]]
