"""Spark and Stillstate side by side: the same processors, batches and times must give the same rows, batch by batch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from state_runtime.base.errors import StillstateError
from tests.parity import life, zoo
from tests.parity.builtins import EVENTS  # its cases are entered when it is imported
from tests.parity.cases import CASES, Batch, Case, failing, stateful
from tests.parity.harness import Both, differences

pytestmark = [pytest.mark.spark, pytest.mark.parity]
DOCS = Path(__file__).parents[2] / "docs" / "parity.md"


@pytest.mark.parametrize("name", CASES)
def test_every_output_row_is_spark_s(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """The law of this package; docs/parity.md says what each case holds."""
    theirs, ours = Both(CASES[name](), spark, tmp_path).run()
    assert any(theirs.batches) or any(theirs.idle), "a case without output proves nothing"
    found = differences(theirs, ours)
    assert not found, "\n".join([f"{name} differs:", *found])


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("timer", "INVALID_TIME_MODE"),
        ("late state", "INVALID_HANDLE_STATE"),
        ("duplicate", "STATEFUL_PROCESSOR_DUPLICATE_STATE_VARIABLE_DEFINED"),
        ("empty list", "ILLEGAL_STATE_STORE_VALUE.EMPTY_LIST_VALUE"),
        ("ttl", "STATEFUL_PROCESSOR_INCORRECT_TIME_MODE_TO_ASSIGN_TTL"),
        ("reserved name", "cannot name a state"),
        ("fields", "fields"),
        ("raises", "KeyError"),
        ("returns none", "None"),
    ],
)
def test_what_ends_a_query_of_spark_ends_ours_and_says_why(
    spark: SparkSession, tmp_path: Path, what: str, said: str
) -> None:
    """Spark mostly says that a socket broke; ours names Spark's error class, the operator and the key."""
    both = Both(failing(what), spark, tmp_path)
    theirs, ours = both.failures()
    assert isinstance(theirs, StreamingQueryException)
    assert isinstance(ours, StillstateError)
    assert said in str(ours)
    assert "'zoo'" in str(ours)


def test_every_processor_of_a_task_is_made_and_closed_once(spark: SparkSession, tmp_path: Path) -> None:
    """init, then the calls, each drained before the next, then close: in both engines, per task."""
    notes = {whose: tmp_path / whose for whose in ("spark", "ours")}
    for whose, folder in notes.items():
        folder.mkdir()
        batches = [Batch([{"key": f"k{n}", "n": n} for n in range(6)]) for _ in range(2)]
        both = Both(
            Case("key string, n long", [stateful(life.Closing(folder), zoo.SAID, batches)]),
            spark,
            tmp_path / f"run-{whose}",
        )
        both.only(whose)
        lives = [path.read_text().split() for path in folder.iterdir()]
        assert sum(life.count("rows") for life in lives) == 12
        for one in lives:
            assert re.fullmatch(r"init (rows drained )*close", " ".join(one)), f"{whose}: {one}"


def test_the_documentation_lists_every_case_and_no_other() -> None:
    """docs/parity.md and the suite say the same."""
    page = DOCS.read_text().partition("## Cases")[2].partition("## ")[0]
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert listed == set(CASES)
    assert EVENTS
