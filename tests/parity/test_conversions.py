"""Values of another kind than declared, beside Spark: docs/parity.md shows each that is not stored as it was given."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from state_runtime.base.errors import InvalidData
from tests.parity import conversions
from tests.parity.cases import stateful
from tests.parity.conversions import FATAL, LATE, PAIRS, TYPES, VALUES
from tests.parity.harness import Answer, Batch, Both, Case

pytestmark = [pytest.mark.spark, pytest.mark.parity]
DOCS = Path(__file__).parents[2] / "docs" / "parity.md"
ROW = re.compile(r"\(key=(.*), said=(.*), in_call=(.*)\)", re.DOTALL)
JVM_OBJECT = re.compile(r"(\[B@|java\.util\.GregorianCalendar\[).*", re.DOTALL)
"""Text that a JVM makes of an object: from here on it is another one in each run."""


@dataclass(frozen=True)
class Held:
    """What a state held of one value: type and repr, or None for null; `took` is False if the write was refused."""

    took: bool
    in_call: str | None = None
    later: str | None = None

    @property
    def cell(self) -> str:
        """As the page shows it."""
        if not self.took:
            return "refused"
        if self.later is None:
            return "null"
        text = JVM_OBJECT.sub(r"\1…", self.later.partition(" ")[2])
        return f"`{text}`"


def case(pairs: list[str], processor: Any = None) -> Case:
    """The first batch writes and reads, the second reads again."""
    batches = [Batch([{"key": pair, "n": n} for pair in pairs]) for n in (0, 1)]
    leg = stateful(processor or conversions.Conversions(), conversions.SAID, batches)
    return Case("key string, n long", [leg], partitions=1)


def held(answer: Answer) -> dict[str, Held]:
    """Per pair what an engine did with it."""
    written, read = ({k: (s, i) for k, s, i in map(_parts, rows)} for rows in answer.batches)
    return {
        pair: Held(said == "took it", _value(in_call), _value(read[pair][0]))
        for pair, (said, in_call) in written.items()
    }


def _parts(row: str) -> list[str | None]:
    found = ROW.fullmatch(row)
    assert found, row
    return [ast.literal_eval(part) for part in found.groups()]


def _value(text: str | None) -> str | None:
    return None if text is None or text in ("no value", "NoneType None") else text


def given(pair: str) -> str:
    """What a state holds that stores the value as it is."""
    value = VALUES[pair.partition(" into ")[0]]
    return f"{type(value).__name__} {value!r}"


def as_table(cells: Mapping[str, tuple[str, str]]) -> list[str]:
    """The page's rows. Types that fare alike share one, and so do the values that follow each other."""
    per_value: list[tuple[str, tuple[str, str, str]]] = []
    for value in VALUES:
        kinds: dict[tuple[str, str], list[str]] = {}
        for kind, ddl in TYPES.items():
            if f"{value} into {kind}" in cells:
                kinds.setdefault(cells[f"{value} into {kind}"], []).append(ddl)
        per_value.extend((value, (", ".join(ddls), *found)) for found, ddls in kinds.items())
    per_value.sort(key=lambda row: (row[1][1] == "null", row[1][1] == "refused", row[1][2] == "refused"))
    alike = [([f"`{value}`" for value, _ in rows], rest) for rest, rows in groupby(per_value, key=lambda row: row[1])]
    return ["| " + " | ".join([", ".join(values), *rest]) + " |" for values, rest in alike]


@pytest.fixture(scope="module")
def ours(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Held]:
    """Per pair what we hold, but for those that end the epoch here."""
    pairs = [pair for pair in PAIRS if pair not in LATE]
    return held(Both(case(pairs), spark, tmp_path_factory.mktemp("ours")).only("ours"))


@pytest.fixture(scope="module")
def sparks(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Held]:
    """Per pair what Spark holds, but for those that end its query."""
    pairs = [pair for pair in PAIRS if pair not in FATAL]
    return held(Both(case(pairs), spark, tmp_path_factory.mktemp("spark")).only("spark"))


def test_a_value_reads_alike_in_its_call_and_in_the_next_epoch(ours: dict[str, Held]) -> None:
    """With the same type too, whatever was converted; and what was taken is never null."""
    assert set(ours) == set(PAIRS) - LATE
    for pair, one in ours.items():
        assert one.in_call == one.later, pair
        assert one.took == (one.later is not None), pair


def test_the_page_shows_what_is_not_stored_as_it_was_given(sparks: dict[str, Held], ours: dict[str, Held]) -> None:
    """Left out: what both store as it is, and what both refuse."""
    assert set(sparks) == set(PAIRS) - FATAL
    cells = {pair: (one.cell, ours[pair].cell if pair in ours else "refused") for pair, one in sparks.items()}
    cells |= {pair: ("ends the query", ours[pair].cell) for pair in FATAL}
    as_it_is = {pair for pair in set(sparks) & set(ours) if sparks[pair].later == ours[pair].later == given(pair)}
    shown = {pair: cell for pair, cell in cells.items() if pair not in as_it_is and cell != ("refused", "refused")}
    section = DOCS.read_text().partition("### Values of another kind than declared")[2]
    assert as_table(shown) == re.findall(r"^\| `.*$", section, re.MULTILINE)


def test_what_is_beyond_the_range_of_a_whole_number_ends_the_epoch(spark: SparkSession, tmp_path: Path) -> None:
    """The column says so; nothing is cut off. (Each type of `LATE` alone: test_processors_value_codec.py.)"""
    with pytest.raises(InvalidData, match="that does not fit"):
        Both(case(["2**40 into int"]), spark, tmp_path).only("ours")


@pytest.mark.parametrize("pair", sorted(FATAL))
def test_what_the_page_says_ends_a_query_of_spark_does(spark: SparkSession, tmp_path: Path, pair: str) -> None:
    """Decimals with too many digits before the point."""
    with pytest.raises(StreamingQueryException):
        Both(case([pair]), spark, tmp_path).only("spark")


def test_a_state_may_hold_an_interval_here_only(spark: SparkSession, tmp_path: Path) -> None:
    """As it was given."""
    pair = "timedelta(days=1, seconds=2) into interval"
    spans = case([pair], conversions.Spans())
    with pytest.raises(StreamingQueryException, match="DayTimeIntervalType"):
        Both(spans, spark, tmp_path / "spark").only("spark")
    assert held(Both(spans, spark, tmp_path / "ours").only("ours"))[pair].later == given(pair)
