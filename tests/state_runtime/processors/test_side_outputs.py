"""Side outputs: rows of all outputs in one stream, of which each can be taken apart again; nothing is made that nothing reads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from state_runtime.processors.grouping import GroupedRows, group_rows
from state_runtime.processors.operator import LATE, ShardResult
from state_runtime.processors.side_outputs import SideOutputs
from state_runtime.spark.columns import OUTPUT_COLUMN

MAIN = pa.schema([("k", pa.string()), ("n", pa.int64())])
ROWS = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", "UTC"))])
ODD = pa.schema([("n", pa.int64())])
BOTH = SideOutputs(MAIN, {LATE: ROWS, "odd": ODD})


def main_rows(*numbers: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(["x"] * len(numbers)), pa.array(numbers)], schema=MAIN)


def late_rows(*micros: int, zone: str = "UTC") -> pa.RecordBatch:
    times = pa.array(micros, pa.timestamp("us", zone))
    return pa.RecordBatch.from_arrays(
        [pa.array([1] * len(micros)), times, pa.array(["x"] * len(micros))], names=["more", "at", "k"]
    )


def grouped(keys: list[str]) -> GroupedRows:
    rows = pa.RecordBatch.from_arrays([pa.array(keys), pa.array(range(len(keys)))], names=["k", "id"])
    hashes = np.array([ord(key) for key in keys], dtype=np.uint64)
    return group_rows(rows, hashes, np.arange(len(keys)), ["k"], pa.schema([("k", pa.string())]))


def test_each_output_is_taken_apart_as_it_was_given() -> None:
    result = ShardResult(iter(()))

    def outputs() -> Iterator[pa.RecordBatch]:
        result.give("odd", lambda: pa.RecordBatch.from_arrays([pa.array([1, 3])], schema=ODD))
        yield main_rows(2, 4)
        result.give(LATE, lambda: late_rows(7, zone="Asia/Tokyo"))
        yield main_rows(6)
        result.give("odd", lambda: pa.RecordBatch.from_arrays([pa.array([5])], schema=ODD))

    result.outputs = outputs()
    given = list(BOTH.of(result))
    assert all(batch.schema.equals(BOTH.schema) for batch in given)
    rows = pa.Table.from_batches(given)
    odd, late = (rows[OUTPUT_COLUMN + name] for name in ("odd", LATE))
    assert odd.drop_null().to_pylist() == [{"n": 1}, {"n": 3}, {"n": 5}]
    assert [row["at"].microsecond for row in late.drop_null().to_pylist()] == [7]
    is_main = [a is None and b is None for a, b in zip(odd.to_pylist(), late.to_pylist(), strict=True)]
    assert rows.filter(pa.array(is_main)).select(["n"]).to_pydict() == {"n": [2, 4, 6]}
    assert not any(result.sides.values() if result.sides else ())


def test_rows_that_hold_only_nulls_are_rows_of_their_output() -> None:
    result = ShardResult(iter(()))
    result.outputs = iter(())
    nothing = pa.RecordBatch.from_arrays([pa.array([None], pa.int64())], schema=ODD)
    given = []
    for batch in (main_rows(1), main_rows(2)):
        result.outputs = iter([batch])
        stream = BOTH.of(result)
        given.append(next(stream))
        result.give("odd", lambda: nothing)
        given += stream
    odd = pa.Table.from_batches(given)[OUTPUT_COLUMN + "odd"]
    assert odd.is_null().to_pylist() == [True, False, True, False]


def test_late_rows_are_made_only_if_something_reads_them() -> None:
    late = np.array([True, False, True])
    unread, read, other = (
        ShardResult(iter(())),
        ShardResult(iter(()), sides={LATE: []}),
        ShardResult(iter(()), sides={"odd": []}),
    )
    for result in (unread, read, other):
        assert result.on_time(grouped(["a", "b", "c"]), late).rows["id"].to_pylist() == [1]
        assert result.late_rows == 2
    assert unread.sides is None
    assert read.sides is not None
    assert [row for batch in read.sides[LATE] for row in batch["id"].to_pylist()] == [0, 2]
    assert other.sides == {"odd": []}


def test_partial_rows_are_counted_as_late_and_not_given() -> None:
    """Of such a row the rows that it stands for are gone."""
    result = ShardResult(iter(()), sides={LATE: []})
    kept = result.on_time(grouped(["a", "b"]), np.array([True, False]), np.array([5, 3]))
    assert (result.late_rows, kept.groups, result.sides) == (5, 1, {LATE: []})
