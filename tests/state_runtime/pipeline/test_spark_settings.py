"""Settings of the session: honoured, or named at the start."""

from __future__ import annotations

import logging

import pytest
from pyspark.sql import types as T

from state_runtime.base.errors import InvalidPipeline
from state_runtime.pipeline.operators import _check_nullable
from state_runtime.pipeline.spark_settings import PieceBounds, SessionSettings, session_settings

DEFAULTS = {
    "spark.sql.session.timeZone": "Asia/Kolkata",
    "spark.sql.streaming.noDataMicroBatches.enabled": "true",
    "spark.sql.execution.arrow.maxBytesPerBatch": "2147483647",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
}


def test_a_session_of_defaults_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Neither does one in which nothing is set, nor one that gives bytes with their unit."""
    with caplog.at_level(logging.WARNING):
        assert session_settings(DEFAULTS) == SessionSettings("Asia/Kolkata", 10_000, False)  # type: ignore[arg-type]
        assert session_settings({}) == SessionSettings()  # type: ignore[arg-type]
        session_settings({"spark.sql.execution.arrow.maxBytesPerBatch": "2147483647b"})  # type: ignore[arg-type]
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("spark.sql.streaming.noDataMicroBatches.enabled", "false", "in an epoch of their own"),
        ("spark.sql.execution.arrow.maxBytesPerBatch", "1048576b", "bounded in rows only"),
    ],
)
def test_a_setting_without_effect_is_named_once_at_the_start(
    caplog: pytest.LogCaptureFixture, name: str, value: str, instead: str
) -> None:
    """Ignored without a word, somebody would rely on it."""
    with caplog.at_level(logging.WARNING):
        session_settings({**DEFAULTS, name: value})  # type: ignore[arg-type]
    (message,) = caplog.messages
    assert f"{name}={value} has no effect" in message
    assert instead in message


def test_frames_have_as_many_rows_as_the_session_says() -> None:
    """Zero and less is no limit, as in Spark."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    sizes = [session_settings({name: rows}).frame_rows_max for rows in ("2", "0", "-1")]  # type: ignore[arg-type]
    assert sizes == [2, 2**31 - 1, 2**31 - 1]


def test_a_column_that_cannot_be_null_is_refused_where_spark_refuses_it() -> None:
    """With Spark's own error class; it does so where state is stored as Avro, and only there."""
    assert session_settings({"spark.sql.streaming.stateStore.encodingFormat": "Avro"}).is_avro  # type: ignore[arg-type]
    schema = T.StructType([T.StructField("n", T.LongType(), nullable=False), T.StructField("s", T.StringType())])
    with pytest.raises(InvalidPipeline, match=r"SCHEMA_MUST_BE_NULLABLE.*state 'v'.*; n cannot be null"):
        _check_nullable("v", schema, "u")
    _check_nullable("v", T.StructType(schema.fields[1:]), "u")


BYTES, ROWS = "spark.sql.execution.arrow.maxBytesPerBatch", "spark.sql.execution.arrow.maxRecordsPerBatch"
MIB = 1 << 20


class Settings(dict[str, str]):
    """A session's settings that counts how often one is set."""

    sets = 0

    def set(self, key: str, value: str) -> None:
        self.sets += 1
        self[key] = value

    def unset(self, key: str) -> None:
        del self[key]


def bounds(given: PieceBounds, *row_bytes: int) -> list[str]:
    """The bound in bytes that each batch begins with, before its rows of so many bytes were seen."""
    settings, found = Settings(), []
    for one in row_bytes:
        given.ask(settings)
        found.append(settings.get(BYTES, "Spark's"))
        given.seen(one)
    return found


def test_pieces_are_bounded_by_rows_alone_only_after_a_batch_in_which_they_could_not_be_large() -> None:
    """The first of a run is not, nor the one after a wide one: nobody knows what comes."""
    narrow, wide = 16 * MIB // 50_000, 16 * MIB // 50_000 + 1
    given = PieceBounds.of({ROWS: "50000"}, hands_only_its_own=True)  # type: ignore[arg-type]
    seen = bounds(given, narrow, wide, narrow, 0, 0)
    unlimited, limited = str(2**31 - 1), str(64 * MIB)
    assert seen == ["Spark's", unlimited, limited, unlimited, unlimited], "a batch without rows says nothing"


@pytest.mark.parametrize(
    "given",
    [{BYTES: "1048576b"}, {BYTES: "2147483647"}, {ROWS: "0"}, {ROWS: "-1"}],
    ids=["a bound", "no bound", "no rows", "no bound of rows"],
)
def test_bounds_of_somebodys_own_stay(given: dict[str, str]) -> None:
    """Who has little memory, or a piece of all rows, asked for that."""
    assert bounds(PieceBounds.of(given, hands_only_its_own=True), 8, 8, 8) == ["Spark's"] * 3  # type: ignore[arg-type]


def test_rows_that_others_hand_to_python_stay_bounded_in_bytes() -> None:
    """A user's own function may get rows a thousand times as wide as those of our operators."""
    assert bounds(PieceBounds.of({}, hands_only_its_own=False), 8, 8, 8) == ["Spark's"] * 3  # type: ignore[arg-type]


def test_a_bound_that_stays_as_it_is_is_not_set_again() -> None:
    """Each setting is a call of the JVM in an epoch."""
    settings, given = Settings(), PieceBounds.of({BYTES: "67108864b"}, hands_only_its_own=True)  # type: ignore[arg-type]
    for _ in range(5):
        given.ask(settings)
        given.seen(100)
    assert settings.sets == 1
