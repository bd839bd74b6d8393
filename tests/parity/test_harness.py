"""The comparison itself: it must see every difference, or the suite proves nothing. No Spark here."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import Row

from tests.parity.harness import Answer, canonical, differences


def _answer(batches: list[list[str]], idle: list[list[list[str]]], late_rows: int = 0) -> Answer:
    return Answer(batches, idle, late_rows)


def test_equal_answers_do_not_differ() -> None:
    one, other = (_answer([["a", "b"], []], [[["c"]]], 3) for _ in range(2))
    assert differences(one, other) == []


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (_answer([["a"]], [[["c"]]], 3), "batch 0: 2 rows in Spark, 1 in ours"),
        (_answer([["a", "b", "b"]], [[["c"]]], 3), "batch 0: 2 rows in Spark, 3 in ours"),
        (_answer([["a", "B"]], [[["c"]]], 3), "only ours : B"),
        (_answer([["a", "b"], ["x"]], [[["c"]]], 3), "Spark ran 1 batches with data, we 2"),
        (_answer([["a", "b"]], [[["c"], ["d"]]], 3), "Spark has output in 1 epochs without data, we in 2"),
        (_answer([["a", "b"]], [[["d"]]], 3), "epoch without data 0"),
        (_answer([["a", "b"]], [[["c"]]], 4), "Spark dropped 3 late rows, we 4"),
    ],
)
def test_every_difference_is_said(ours: Answer, said: str) -> None:
    assert said in "\n".join(differences(_answer([["a", "b"]], [[["c"]]], 3), ours))


def test_rows_are_shown_where_they_part() -> None:
    """Rows are long; what differs must be on the screen."""
    long = "x" * 2000
    lines = "\n".join(differences(_answer([[f"{long}left"]], []), _answer([[f"{long}right"]], [])))
    assert "left" in lines
    assert "right" in lines
    assert len(lines) < 1500


def test_values_of_another_type_are_not_equal() -> None:
    different = [
        1,
        1.0,
        True,
        "1",
        None,
        float("nan"),
        pd.NaT,
        b"1",
        [1],
        {"a": 1},
        Row(a=1),
        datetime(1970, 1, 1, tzinfo=UTC),
    ]
    assert len({canonical(value) for value in different}) == len(different)


def test_equal_values_are_equal_however_they_are_held() -> None:
    assert canonical({"a": 1, "b": 2}) == canonical({"b": 2, "a": 1})
    assert canonical(np.array([1, 2])) == canonical([1, 2])
    assert canonical(bytearray(b"x")) == canonical(b"x")
    assert canonical(datetime(1970, 1, 1, tzinfo=UTC)) == canonical(datetime(1970, 1, 1, tzinfo=ZoneInfo("UTC")))
    assert canonical(Row(a=1)) != canonical(Row(b=1))
