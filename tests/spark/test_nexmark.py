"""The queries of the NEXMark benchmark answer what Spark's batch queries answer, before anything is timed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from benchmarks import nexmark_answers, nexmark_data
from benchmarks.nexmark_queries import QUERIES

pytestmark = [pytest.mark.spark, pytest.mark.long]


@pytest.mark.parametrize("name", ["q3", "q5", "q7", "q8", "q9", "q11", "q12", "q15", "q16", "q17", "q18", "q21", "q23"])
def test_a_query_answers_what_sparks_batch_query_answers(spark: SparkSession, tmp_path: Path, name: str) -> None:
    nexmark_data.write_events(tmp_path / "in", 2, 2_000, then=nexmark_answers.LATE)
    assert nexmark_answers.differences(spark, name, tmp_path, batches=2) == ""


PLAIN = [
    "q0",
    "q1",
    "q2",
    "q3",
    "q5",
    "q7",
    "q8",
    "q9",
    "q11",
    "q12",
    "q14",
    "q15",
    "q16",
    "q17",
    "q18",
    "q19",
    "q20",
    "q21",
    "q22",
    "q23",
]


@pytest.mark.parametrize("name", PLAIN)
def test_sparks_own_streaming_query_runs_unchanged(spark: SparkSession, tmp_path: Path, name: str) -> None:
    nexmark_data.write_events(tmp_path / "in", 2, 2_000, then=nexmark_answers.LATE)
    assert nexmark_answers.differences(spark, name, tmp_path, batches=2, is_plain=True) == ""


def test_a_wrong_answer_is_told_with_a_row(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = QUERIES["q2"]
    wrong = replace(right, batch=lambda events: right.peer(events).where("price % 2 = 0"))
    monkeypatch.setitem(QUERIES, "q2", wrong)  # type: ignore[arg-type]
    nexmark_data.write_events(tmp_path / "in", 2, 2_000)
    assert nexmark_answers.differences(spark, "q2", tmp_path, batches=2).startswith("q2: ")
