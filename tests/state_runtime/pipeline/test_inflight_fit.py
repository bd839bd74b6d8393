"""Whether rows in flight fit the pipeline that goes on with them."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from state_runtime.base.errors import InvalidPipeline
from state_runtime.changelog.rows import encode_columns
from state_runtime.pipeline.inflight_fit import OperatorReads, refuse_misfits
from state_runtime.snapshot.manifest import InflightNumbers, Manifest, OpenBatch, RowsLayout
from tests.state_runtime.model import empty_manifest

STORED = pa.schema([("k", pa.string()), ("n", pa.int32()), ("at", pa.timestamp("us", "UTC"))])
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
    ],
    ids=["as they were", "added", "dropped", "reordered", "widened", "another time zone"],
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
