"""Whether rows in flight fit the pipeline that goes on with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from state_runtime.base.errors import InvalidPipeline
from state_runtime.base.joining import JoinTerms
from state_runtime.changelog.rows import encode_columns
from state_runtime.pipeline.compile import CompiledPipeline, Stage
from state_runtime.pipeline.inflight_fit import OperatorReads, refuse_misfits
from state_runtime.processors.builtin.aggregate import AggregateOperator, plan_aggregates
from state_runtime.processors.builtin.deduplicate import Deduplicate
from state_runtime.processors.builtin.interval_join import IntervalJoinOperator
from state_runtime.processors.builtin.interval_join_plan import plan_interval_join
from state_runtime.processors.builtin.latest import LatestBy
from state_runtime.processors.builtin.windows import plan_windows
from state_runtime.processors.declared.aggregates import count
from state_runtime.processors.declared.windows import session, tumbling
from state_runtime.processors.operator import Operator
from state_runtime.processors.sides import SIDE_COLUMN
from state_runtime.processors.user.stateful import StatefulProcessorOperator
from state_runtime.processors.user.vectorized import VectorizedOperator
from state_runtime.snapshot.manifest import InflightNumbers, Manifest, OpenBatch, RowsLayout
from tests.state_runtime.model import empty_manifest

AT = pa.timestamp("us", "UTC")
STORED = pa.schema([("k", pa.string()), ("n", pa.int32()), ("at", AT), ("all", pa.list_(pa.struct([("at", AT)])))])
PARTIAL = pa.schema([("k", pa.string()), ("__stillstate_rows", pa.int64())])
SUM = '[["total", "sum(n)"]]'


def manifest(columns: pa.Schema = STORED, functions: str = "") -> Manifest:
    waiting = InflightNumbers("legs", 1_200, 9_000, 7, 1_000, (RowsLayout(encode_columns(columns), functions),))
    batch = OpenBatch(late_watermark_ms=0, settled=(), begun="", listing="", segments=(), operators=(waiting,))
    return replace(empty_manifest("uid", 2), open_batch=batch)


def check(before: Manifest | None, reads: OperatorReads | None = None, drop: bool = False) -> None:
    refuse_misfits(before, {"legs": reads} if reads is not None else {}, drop=drop, job="flights")


@pytest.mark.parametrize(
    "columns",
    [
        STORED,
        pa.schema([*STORED, ("new", pa.string())]),
        pa.schema([("k", pa.string())]),
        pa.schema([STORED.field("at"), STORED.field("k")]),
        pa.schema([("k", pa.string()), ("n", pa.int64())]),
        pa.schema([("k", pa.string()), ("at", pa.timestamp("us", "Europe/Berlin"))]),
        pa.schema([("all", pa.list_(pa.struct([("at", pa.timestamp("us", "Europe/Berlin"))])))]),
    ],
    ids=["as they were", "added", "dropped", "reordered", "widened", "another time zone", "another one inside"],
)
def test_rows_in_flight_go_on_in_columns_that_state_could_have_too(columns: pa.Schema) -> None:
    """The rules are those of state: nobody has to learn others for the rows that wait."""
    check(manifest(), OperatorReads(columns, ""))


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (pa.schema([("k", pa.string()), ("n", pa.string())]), "'n' is string now, and int32"),
        (pa.schema([("k", pa.string()), ("n", pa.int16())]), "'n' is int16 now, and int32"),
    ],
    ids=["another type", "narrower"],
)
def test_a_column_of_another_type_is_refused_with_the_two_ways_out(columns: pa.Schema, said: str) -> None:
    """Before anything is written: the old code can still process them."""
    with pytest.raises(InvalidPipeline) as refused:
        check(manifest(), OperatorReads(columns, ""))
    text = str(refused.value)
    for part in ("'legs'", "1,200 rows", said, "savepoint flights NAME --stop --drain-inflight", "--drop-inflight"):
        assert part in text


@pytest.mark.parametrize("made", ["__stillstate_all", "__stillstate_where_0", SIDE_COLUMN])
def test_columns_that_the_runtime_made_are_looked_at_as_others_are(made: str) -> None:
    """Of an aggregate without a key or with a condition, and of a join: else the first epoch of each run would find what it
    cannot read, after the fencing snapshot."""
    with pytest.raises(InvalidPipeline, match="is string now, and int32"):
        check(manifest(pa.schema([*STORED, (made, pa.int32())])), OperatorReads(pa.schema([(made, pa.string())]), ""))
    with pytest.raises(InvalidPipeline, match="'n' is string now"):
        check(manifest(pa.schema([*STORED, (made, pa.int32())])), OperatorReads(pa.schema([("n", pa.string())]), ""))


CONDITION = "__stillstate_where_0"
KEYS = pa.schema([("k", pa.string())])
INPUT = pa.schema([*STORED, ("ends", AT), (CONDITION, pa.int32())])


def windows(window: Any) -> Operator:
    return plan_windows(
        uid="legs", key_columns=("k",), key_ddl="`k` string", key_schema=KEYS, schema=INPUT, time_column="at", window=window,
        mode="append", ddl=lambda schema: ", ".join(f"`{name}` bigint" for name in schema.names),
        aggregates={"n": count(), "some": count(CONDITION)},
    )  # fmt: skip


def vectorized(processor: Any, event_time: str = "") -> Operator:
    return VectorizedOperator(
        "legs", ("k",), "`k` string", KEYS, INPUT, {}, {}, "vectorized", processor, 10, {}, event_time
    )


def join() -> Operator:
    right = pa.schema([("k", pa.string()), ("r_at", AT)])
    plan = plan_interval_join(
        STORED, right, left_keys=["k"], right_keys=["k"], left_time="at", right_time="r_at",
        terms=JoinTerms(how="inner", lower_us=0, upper_us=9), uid="legs",
    )  # fmt: skip
    return IntervalJoinOperator("legs", ("k",), "`k` string", plan, {"left": "", "right": ""}, 10)


AGGREGATE = AggregateOperator(
    "legs", ("k",), "`k` string", KEYS, plan_aggregates({"some": count(CONDITION)}, INPUT, "legs"), "`some` bigint"
)
STATEFUL = StatefulProcessorOperator(
    "legs", ("k",), "`k` string", KEYS, INPUT, {}, {}, None, False, 10, time_mode="event", event_time_column="at"
)


@pytest.mark.parametrize(
    ("operator", "deciding"),
    [
        (AGGREGATE, {"k", CONDITION}),
        (windows(tumbling("10 seconds")), {"k", "at", CONDITION}),
        (windows(session("10 seconds")), {"k", "at", CONDITION}),
        (windows(session(end_column="ends")), {"k", "at", "ends", CONDITION}),
        (STATEFUL, {"k", "at"}),
        (vectorized(None, "at"), {"k", "at"}),
        (vectorized(Deduplicate("at", 0)), {"k", "at"}),
        (vectorized(LatestBy(("n", "at"))), {"k", "n"}),
        (join(), {"k", SIDE_COLUMN}),
    ],
    ids=["aggregate", "windows", "sessions", "own ends", "stateful", "vectorized", "deduplicate", "latest by", "join"],
)
def test_rows_without_a_column_that_says_whether_they_count_are_refused(operator: Operator, deciding: set[str]) -> None:
    """An event-time column that was renamed would be null in the rows that wait: they would be in no window, with no word.
    So of every column by its role, be the rows aggregated by Spark or not; any other column may come and go."""
    made = CompiledPipeline((Stage(operator, (), T.StructType(), emit=False),)).operator_reads["legs"]
    for columns in (INPUT, pa.schema([*INPUT, ("__stillstate_rows", pa.int64())])):
        all_of = pa.schema([*columns, (SIDE_COLUMN, pa.int32())])
        is_partial = columns is not INPUT
        for field in all_of:
            stored = manifest(pa.schema([f for f in all_of if f != field]), made.functions)
            if field.name not in deciding or (is_partial and field.name == CONDITION):
                check(stored, made)
                continue
            with pytest.raises(InvalidPipeline, match="they have no column"):
                check(stored, made)


def test_an_operator_that_is_gone_is_refused() -> None:
    """Nobody would process its rows; they would be lost without a word."""
    with pytest.raises(InvalidPipeline, match="no longer has it"):
        check(manifest())


def test_rows_that_spark_aggregated_fit_the_same_functions_only() -> None:
    """The partial sum of one function means nothing to another."""
    check(manifest(PARTIAL, SUM), OperatorReads(STORED, SUM))
    with pytest.raises(InvalidPipeline, match="other aggregates"):
        check(manifest(PARTIAL, SUM), OperatorReads(STORED, '[["total", "max(n)"]]'))


def test_rows_that_are_given_up_need_not_fit() -> None:
    """`--drop-inflight` is the way out when the old code is gone."""
    check(manifest(), drop=True)


def test_a_snapshot_without_rows_in_flight_is_not_asked() -> None:
    """A job may change its input columns freely when nothing waits."""
    check(None)
    check(replace(manifest(), open_batch=None))
