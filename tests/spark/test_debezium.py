"""Records of Debezium become columns, and what is no change of a row is never taken for one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from state_runtime.base.errors import InvalidConfiguration, InvalidData
from state_runtime.sources.debezium import UNAVAILABLE, from_debezium
from state_runtime.spark.errors import typed_error
from tests.cdc_events import envelope

pytestmark = pytest.mark.spark
ROW = "id INT, name STRING, amount DECIMAL(10, 2)"
GOOD = {"id": 1, "name": "a", "amount": "1.20", "other": 3}


def records(spark: SparkSession, *values: Any) -> DataFrame:
    texts = [(value if value is None or isinstance(value, str) else json.dumps(value),) for value in values]
    return spark.createDataFrame(texts, "value STRING").selectExpr("CAST(value AS BINARY) AS value", "'t' AS topic")


@pytest.mark.parametrize("wrapped", [False, True])
def test_each_kind_of_change_has_its_rows_and_its_place(spark: SparkSession, wrapped: bool) -> None:
    given = [
        envelope("r", None, GOOD, 5, wrapped=wrapped),
        envelope("u", {**GOOD, "amount": "0.10"}, GOOD, 6, wrapped=wrapped),
        envelope("d", {"id": 1}, None, 7, wrapped=wrapped),
        None,  # a tombstone
    ]
    found = from_debezium(records(spark, *given), ROW, position="lsn BIGINT, txId BIGINT")
    assert found.columns == ["value", "topic", "op", "before", "after", "lsn", "txId", "ts_ms"]
    told = found.selectExpr("op", "CAST(before AS STRING)", "CAST(after AS STRING)", "lsn", "txId", "ts_ms")
    assert [tuple(row) for row in told.collect()] == [
        ("r", None, "{1, a, 1.20}", 5, 555, 1_700_000_000_000),
        ("u", "{1, a, 0.10}", "{1, a, 1.20}", 6, 555, 1_700_000_000_000),
        ("d", "{1, null, null}", None, 7, 555, 1_700_000_000_000),
    ]


def test_places_of_other_databases_are_named(spark: SparkSession) -> None:
    place = {"file": "mysql-bin.000003", "pos": 154, "row": 2}
    given = records(spark, envelope("c", None, GOOD, None, source=place))
    found = from_debezium(given, ROW, position="file STRING, pos BIGINT, row INT")
    assert [tuple(row) for row in found.select("file", "pos", "row").collect()] == [("mysql-bin.000003", 154, 2)]


BAD: dict[str, tuple[Any, str]] = {
    "not JSON": ("SENTINEL", "is not JSON"),
    "half of it": (json.dumps(envelope("c", None, GOOD, 5))[:-20], "is not JSON"),
    "a list": ("[]", "is not JSON"),
    "the flat form": (GOOD, "no change of a row"),
    "no row": (envelope("u", None, None, 5), "no change of a row"),
    "a message": (envelope("m", None, None, 5), "no change of a row"),
    "truncated": (envelope("t", None, None, 5), "was truncated"),
    "another type": (envelope("c", None, {**GOOD, "id": "SENTINEL"}, 5), "another type"),
    "another type, wrapped": (envelope("c", None, {**GOOD, "amount": "SENT"}, 5, wrapped=True), "another type"),
    "no place": (envelope("c", None, GOOD, None), "lacks one of lsn"),
    "not sent": (envelope("u", None, {**GOOD, "name": UNAVAILABLE}, 5), "REPLICA IDENTITY FULL"),
}


@pytest.mark.parametrize(("value", "words"), BAD.values(), ids=BAD)
def test_what_is_no_change_ends_the_epoch_and_is_not_shown(spark: SparkSession, value: Any, words: str) -> None:
    """Also if nobody reads the column that says what it is."""
    for column in ("op", "after.id"):
        with pytest.raises(Exception) as raised:
            from_debezium(records(spark, value), ROW, position="lsn BIGINT").select(column).collect()
        typed = typed_error(raised.value)
        assert isinstance(typed, InvalidData)
        assert words in str(typed)
        assert "SENT" not in str(typed)


def test_what_is_no_change_can_be_set_aside_with_its_value(spark: SparkSession) -> None:
    values = [value for value, _ in BAD.values()]
    given = records(spark, *values, envelope("c", None, GOOD, 5))
    found = from_debezium(given, ROW, position="lsn BIGINT", bad="null")
    good = found.where("op IS NOT NULL").collect()
    assert [(row.op, row.after.id, row.lsn) for row in good] == [("c", 1, 5)]
    aside = found.where("op IS NULL").collect()
    assert len(aside) == len(values)
    assert all(row.value is not None and row.topic == "t" for row in aside)
    assert {(row.before, row.after, row.lsn, row.ts_ms) for row in aside} == {(None, None, None, None)}


@pytest.mark.parametrize(
    ("row", "position", "bad", "words"),
    [
        ("", "lsn BIGINT", "fail", "row names no column"),
        (ROW, "", "fail", "position names no column"),
        (ROW, "op STRING", "fail", "there is a column 'op' already"),
        (ROW, "topic STRING", "fail", "there is a column 'topic' already"),
        (ROW, "lsn BIGINT", "skip", 'bad must be "fail" or "null"'),
    ],
)
def test_what_cannot_be_asked_is_refused(spark: SparkSession, row: str, position: str, bad: Any, words: str) -> None:
    with pytest.raises(InvalidConfiguration, match=words):
        from_debezium(records(spark, None), row, position=position, bad=bad)
