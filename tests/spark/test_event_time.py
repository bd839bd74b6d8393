"""Deduplication with a watermark and the interval join, batch by batch against Spark's own streaming queries.

Spark runs the query over files, one per side and batch, in two runs, each of which ends with a batch without data. The operator
is driven over the same rows with the watermarks that Spark's rule gives. Compared are the watermarks, the output of each batch,
the rows dropped as late, and the rows kept.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from state_runtime.base.joining import JoinTerms
from state_runtime.processors.builtin.deduplicate import SEEN, plan_deduplicate
from state_runtime.processors.builtin.interval_join import IntervalJoinOperator
from state_runtime.processors.builtin.interval_join_plan import LEFT, RIGHT, plan_interval_join
from state_runtime.processors.grouping import GroupedRows, group_rows
from state_runtime.processors.operator import EpochClock, RowSlice
from state_runtime.processors.sides import LEFT_COLUMN, RIGHT_COLUMN, SIDE_COLUMN
from state_runtime.processors.user.vectorized import VectorizedOperator
from state_runtime.state.keyhash import hash_rows
from state_runtime.state.table import StateSchema

from ..state_runtime.memory_reader import MemoryReader

pytestmark = [pytest.mark.spark, pytest.mark.long]

TIME = pa.timestamp("us", "UTC")
START_US = 1_700_000_000_000_000
Row = tuple[str | None, int | None, int]  # key, event time in microseconds, id
Batches = list[list[Row]]


def rows_of_batches(seed: int, first_id: int) -> Batches:
    """Seven batches of a stream that moves on by about two seconds each, with stragglers, nulls, and times around the
    watermark's milliseconds; one batch is empty."""
    draw = random.Random(seed)
    batches: Batches = []
    for number in range(7):
        rows: list[Row] = []
        for _ in range(0 if number == 3 else 30):
            seconds = number * 2 + draw.choice([0, 0, 0, 1, -3, -6])
            micros = START_US + seconds * 1_000_000 + draw.choice([0, 1, -1, 999, 1000, -500, 250_000, 250_001])
            at = None if draw.random() < 0.06 else micros
            key = None if draw.random() < 0.08 else draw.choice("abcdef")
            rows.append((key, at, first_id + number * 100 + len(rows)))
        # Repeats, for the deduplication by time.
        rows += [(key, at, row_id + 50) for key, at, row_id in rows[:8]]
        batches.append(rows)
    return batches


FIRST_RUN = 3
"""Batches of the first run. It ends with one without data, which moves what is late by one more step."""


def write(folder: Path, batches: Batches, first: int) -> None:
    """One file per batch; Spark takes them by modification time."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(batches, first):
        file = folder / f"{number:03d}.parquet"
        pq.write_table(pa.Table.from_batches([arrow(rows)]), file)
        os.utime(file, ns=((1_700_000_000 + number) * 10**9,) * 2)


def arrow(rows: Sequence[Row]) -> pa.RecordBatch:
    keys, times, ids = ([row[i] for row in rows] for i in range(3))
    columns = [pa.array(keys, pa.string()), pa.array(times, pa.int64()).cast(TIME), pa.array(ids, pa.int64())]
    return pa.RecordBatch.from_arrays(columns, names=["k", "t", "id"])


class SparkRun:
    """What a streaming query did: per batch its input, its watermark, output rows, late rows and rows in state.

    Attributes:
        inputs: of each batch the rows per folder; none in a batch without data.
    """

    def __init__(self, query: DataFrame, root: Path, folders: dict[str, Batches]) -> None:
        self.outputs: dict[int, list[tuple[Any, ...]]] = {}
        self.inputs: list[list[list[Row]]] = []
        self.watermarks: list[int] = []
        self.late: list[int] = []
        self.kept: list[int] = []
        for part in (slice(0, FIRST_RUN), slice(FIRST_RUN, None)):
            for name, data in folders.items():
                write(root / name, data[part], part.start)
            self._run(query, root)
            fed = [
                [data[n] for data in folders.values()] for n in range(*part.indices(len(next(iter(folders.values())))))
            ]
            self.inputs += fed + [[[] for _ in folders]] * (len(self.watermarks) - len(self.inputs) - len(fed))

    def _run(self, query: DataFrame, root: Path) -> None:
        def collect(frame: DataFrame, batch: int) -> None:
            self.outputs[batch] = [tuple(row) for row in frame.collect()]

        writer = query.writeStream.option("checkpointLocation", str(root / "checkpoint")).foreachBatch(collect)
        stream = writer.trigger(availableNow=True).start()
        stream.awaitTermination()
        progress = {p["batchId"]: p for p in stream.recentProgress if p["batchId"] in self.outputs}
        for batch in range(len(self.watermarks), len(self.outputs)):
            (operator,) = progress[batch]["stateOperators"]
            text = progress[batch]["eventTime"]["watermark"].rstrip("Z")
            self.watermarks.append(int(np.datetime64(text, "ms").astype(np.int64)))
            self.late.append(operator["numRowsDroppedByWatermark"])
            self.kept.append(operator["numRowsTotal"])


def watermarks(inputs: list[list[list[Row]]], delays_ms: Sequence[int]) -> list[int]:
    """Spark's rule: of each stream the highest event time of earlier batches minus its delay; the lowest of those; never
    falling."""
    found = [0]
    for number in range(1, len(inputs)):
        per_stream = []
        for stream, delay_ms in enumerate(delays_ms):
            seen = [at // 1000 for batch in inputs[:number] for _, at, _ in batch[stream] if at is not None]
            per_stream.append(max(seen) - delay_ms if seen else 0)
        found.append(max(found[-1], min(per_stream)))
    return found


class Driven:
    """Our operator, over the batches of a Spark run."""

    def __init__(self, operator: Any) -> None:
        self.operator = operator
        self.reader = MemoryReader(operator.state_schemas)
        self.number = self.late = 0
        self.late_before = 0

    def batch(self, rows: GroupedRows, watermark: int) -> tuple[list[dict[str, Any]], int, int]:
        """Output, late rows and rows kept."""
        self.number += 1
        clock = EpochClock(0, watermark, self.late_before, self.number)
        result = self.operator.process([RowSlice(rows)], self.reader, clock, 0)
        produced = [row for batch in result.outputs for row in batch.to_pylist()]
        after = self.reader.overlaid(result.changes)
        batches = {name: [after._batch(name, after.rows(name))] for name in after.schemas}
        self.reader = MemoryReader(after.schemas, batches)
        self.late_before = watermark
        return produced, result.late_rows, sum(len(after.rows(name)) for name in after.schemas)


def grouped(data: pa.RecordBatch, keys: Sequence[str]) -> GroupedRows:
    columns = [data.column(name) for name in keys]
    schema = pa.schema([data.schema.field(name) for name in keys])
    return group_rows(data, hash_rows(columns), np.arange(data.num_rows), keys, schema)


DEDUPLICATIONS: dict[str, tuple[Callable[[DataFrame], DataFrame], list[str], bool]] = {
    "by time": (lambda frame: frame.dropDuplicates(["k", "t"]), ["k", "t"], False),
    "within watermark": (lambda frame: frame.dropDuplicatesWithinWatermark(["k"]), ["k"], True),
    "by key": (lambda frame: frame.dropDuplicates(["k"]), ["k"], False),
}


@pytest.mark.parametrize("form", DEDUPLICATIONS)
def test_deduplication_with_a_watermark_is_sparks(spark: SparkSession, tmp_path: Path, form: str) -> None:
    """All three forms. Which of equal rows passes is ours to say (the first); Spark's is one of them."""
    drop, keys, within = DEDUPLICATIONS[form]
    data, delay_ms = rows_of_batches(11, 0), 2500
    write(tmp_path / "in", [], 0)
    stream = spark.readStream.schema("k string, t timestamp, id long").option("maxFilesPerTrigger", 1)
    frame = drop(stream.parquet(str(tmp_path / "in")).withWatermark("t", f"{delay_ms} milliseconds"))
    theirs = SparkRun(frame.selectExpr("k", "unix_micros(t)", "id"), tmp_path, {"in": data})
    expected = watermarks(theirs.inputs, [delay_ms])
    assert theirs.watermarks == expected
    assert len(theirs.watermarks) == len(data) + 2, "a batch without data came after each run"

    schema = arrow([]).schema
    processor = plan_deduplicate(keys, "t", delay_ms, within, schema, "op")
    key_schema = pa.schema([schema.field(name) for name in keys])
    ours = Driven(
        VectorizedOperator(
            "op",
            tuple(keys),
            "",
            key_schema,
            schema,
            {SEEN: StateSchema(key_schema, pa.schema([]), time=processor.state_time)},
            {SEEN: ""},
            "deduplicate",
            processor,
            1000,
            event_time="t",
            modes=processor.modes,
        )
    )
    passed = 0
    for number, ((rows,), watermark) in enumerate(zip(theirs.inputs, expected, strict=True)):
        produced, late, kept = ours.batch(grouped(arrow(rows), keys), watermark)
        by_id = {row_id: (key, at) for key, at, row_id in rows}
        identity = (lambda key, at: (key, at)) if form == "by time" else (lambda key, at: key)
        assert Counter(identity(*by_id[row["id"]]) for row in produced) == Counter(
            identity(key, at) for key, at, _ in theirs.outputs[number]
        ), f"batch {number}"
        assert (late, kept) == (theirs.late[number], theirs.kept[number]), f"batch {number}"
        passed += len(produced)
    assert passed > 5
    assert sum(theirs.late) > 5


def tagged(left: Sequence[Row], right: Sequence[Row]) -> pa.RecordBatch:
    """Both sides in one batch, as the join takes them."""
    both = [*left, *right]
    side = np.repeat(np.array([0, 1], dtype=np.int32), [len(left), len(right)])

    def struct(rows: Sequence[Row], before: int, after: int, prefix: str) -> pa.Array:
        here = arrow(rows)
        columns = [
            pa.concat_arrays([pa.nulls(before, c.type), c, pa.nulls(after, c.type)]) for c in (here["id"], here["t"])
        ]
        there = pa.array([True] * before + [False] * len(rows) + [True] * after, pa.bool_())
        return pa.StructArray.from_arrays(columns, names=[f"{prefix}_id", f"{prefix}_t"], mask=there)

    return pa.RecordBatch.from_arrays(
        [
            arrow(both)["k"],
            pa.array(side),
            struct(left, 0, len(right), "l"),
            struct(right, len(left), 0, "r"),
        ],
        names=["k", SIDE_COLUMN, LEFT_COLUMN, RIGHT_COLUMN],
    )


@pytest.mark.parametrize(
    ("how", "lower_us", "upper_us"),
    [
        ("inner", -2_000_000, 3_000_000),
        ("left-outer", -2_000_000, 3_000_000),
        ("left-outer", 500_000, 1_000_250),  # an end between two milliseconds
        ("left-outer", -3_000_500, -1_000_000),  # the right side is always the earlier one
    ],
)
def test_the_interval_join_is_sparks(
    spark: SparkSession, tmp_path: Path, how: str, lower_us: int, upper_us: int
) -> None:
    """Pairs and unmatched rows come in the same batch as Spark's, late rows are dropped, and as many rows wait."""
    left, right = rows_of_batches(21, 0), rows_of_batches(22, 10_000)
    delays = (2500, 1000)
    frames = []
    for side, delay_ms in zip("lr", delays, strict=True):
        write(tmp_path / side, [], 0)
        stream = spark.readStream.schema("k string, t timestamp, id long").option("maxFilesPerTrigger", 1)
        frames.append(
            stream.parquet(str(tmp_path / side))
            .withWatermark("t", f"{delay_ms} milliseconds")
            .selectExpr(f"k as {side}_k", f"t as {side}_t", f"id as {side}_id")
        )
    condition = F.expr(
        f"l_k = r_k and r_t >= l_t + interval '{lower_us / 1e6:.6f}' second "
        f"and r_t <= l_t + interval '{upper_us / 1e6:.6f}' second"
    )
    joined = frames[0].join(frames[1], condition, how.replace("-", "_"))
    theirs = SparkRun(joined.select("l_id", "r_id"), tmp_path, {"l": left, "r": right})
    expected = watermarks(theirs.inputs, delays)
    assert theirs.watermarks == expected
    assert len(theirs.watermarks) == len(left) + 2, "a batch without data came after each run"

    names = {"l": ("l_k", "l_t", "l_id"), "r": ("r_k", "r_t", "r_id")}
    types = (pa.string(), TIME, pa.int64())
    sides = [pa.schema(list(zip(names[s], types, strict=True))) for s in "lr"]
    plan = plan_interval_join(
        sides[0].set(0, pa.field("k", pa.string())), sides[1], left_keys=["k"], right_keys=["r_k"],
        left_time="l_t", right_time="r_t", terms=JoinTerms(how=how, lower_us=lower_us, upper_us=upper_us), uid="join",  # type: ignore[arg-type]
    )  # fmt: skip
    ours = Driven(IntervalJoinOperator("join", ("k",), "k string", plan, dict.fromkeys((LEFT, RIGHT), ""), 7))
    null_times = pairs = alone = 0
    for number, (now, watermark) in enumerate(zip(theirs.inputs, expected, strict=True)):
        late_bound = ours.late_before * 1000
        produced, late, kept = ours.batch(grouped(tagged(*now), ["k"]), watermark)
        assert Counter((row["l_id"], row["r_id"]) for row in produced) == Counter(theirs.outputs[number]), number
        # Spark filters rows that cannot match (null keys, of the inner side) before it looks whether they are late.
        filtered = [rows for rows, is_inner in zip(now, (how == "inner", True), strict=True) if is_inner]
        uncounted = sum(k is None and at is not None and at <= late_bound for rows in filtered for k, at, _ in rows)
        assert late - uncounted == theirs.late[number], f"batch {number}"
        # Spark keeps left rows without a time for ever.
        null_times += sum(at is None for _, at, _ in now[0]) if how == "left-outer" else 0
        assert kept + null_times == theirs.kept[number], f"batch {number}"
        pairs += sum(row["r_id"] is not None for row in produced)
        alone += sum(row["r_id"] is None for row in produced)
    assert pairs > 20
    assert alone > 10 or how == "inner"
    assert sum(theirs.late) > 10
