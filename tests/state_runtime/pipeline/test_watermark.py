"""The clock of an epoch: Spark's watermark rules, as plain values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from model import examples
from pyspark.sql import types as T

from state_runtime.pipeline.watermark import DELAY_METADATA, Clocks, event_time_column, watermark_columns
from state_runtime.snapshot.manifest import TimeEntry

DELAYED = {DELAY_METADATA: 10_000}
SCHEMA = T.StructType(
    [
        T.StructField("id", T.LongType()),
        T.StructField("at", T.TimestampType(), True, DELAYED),
        T.StructField("plain", T.TimestampType()),
    ]
)


def test_the_column_with_event_time_is_the_one_that_spark_marked() -> None:
    (column,) = watermark_columns(SCHEMA)
    assert (column.name, column.delay_ms) == ("at", 10_000)
    assert event_time_column(SCHEMA) == "at"
    assert event_time_column(T.StructType(SCHEMA.fields[:1])) == ""


def test_the_sides_of_a_join_have_a_watermark_each() -> None:
    sides = T.StructType([T.StructField("left", SCHEMA), T.StructField("right", SCHEMA)])
    assert [c.name for c in watermark_columns(sides)] == ["left.at", "right.at"]
    assert watermark_columns(sides)[0].sql == "unix_millis(`left`.`at`)"


def test_the_first_epoch_has_no_watermark() -> None:
    assert Clocks(watermark_columns(SCHEMA)).advanced(None, 5) == TimeEntry(5, 0, {})


def test_an_epochs_own_rows_move_the_watermark_of_the_next_epoch_only() -> None:
    clocks = Clocks(watermark_columns(SCHEMA))
    first = clocks.observed(clocks.advanced(None, 5), {"at": 60_000})
    assert first.watermark_ms == 0
    second = clocks.advanced(first, 6)
    assert second.watermark_ms == 50_000


def test_a_source_without_rows_holds_the_watermark_back_or_not_as_the_policy_says() -> None:
    sides = T.StructType([T.StructField("left", SCHEMA), T.StructField("right", SCHEMA)])
    clocks = Clocks(watermark_columns(sides))
    first = clocks.observed(clocks.advanced(None, 5), {"left.at": 60_000, "right.at": None})
    assert clocks.advanced(first, 6).watermark_ms == 0
    assert Clocks(clocks.columns, "max").advanced(first, 6).watermark_ms == 50_000


@given(st.lists(st.tuples(st.integers(0, 100), st.none() | st.integers(-50_000, 90_000)), max_size=12))
@examples(200)
def test_no_clock_ever_goes_back(epochs: list[tuple[int, int | None]]) -> None:
    clocks = Clocks(watermark_columns(SCHEMA))
    last: TimeEntry | None = None
    highest: int | None = None
    for batch_time_ms, event_ms in epochs:
        time = clocks.advanced(last, batch_time_ms)
        assert last is None or time.batch_time_ms >= last.batch_time_ms
        assert time.batch_time_ms >= batch_time_ms
        assert last is None or time.watermark_ms >= last.watermark_ms
        assert time.watermark_ms == max(0, highest - 10_000 if highest is not None else 0)
        last = clocks.observed(time, {"at": event_ms})
        if event_ms is not None:
            highest = event_ms if highest is None else max(highest, event_ms)
