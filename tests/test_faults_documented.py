"""docs/faults.md names tests; each of them exists, and every row has one or says why not."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"\| ([BCDEFIMS]?\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|\Z")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
ROWS = [found for line in (ROOT / "docs/faults.md").read_text().splitlines() if (found := ROW.match(line))]


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_"))


def test_all_72_rows_and_flinks_26_are_there_in_order() -> None:
    ours = [row[1] for row in ROWS if row[1][0] not in "BCDEIMS"]
    assert ours == [*map(str, range(1, 73)), *(f"F{n}" for n in range(1, 27))]


@pytest.mark.parametrize(
    ("letter", "least"),
    [("S", 7), ("B", 1), ("C", 7), ("I", 7), ("D", 5), ("M", 8), ("E", 17)],
    ids=["sources", "beginnings", "clocks", "rows in flight", "watching", "migrations", "edges"],
)
def test_the_rows_of_a_topic_are_there_in_order(letter: str, least: int) -> None:
    found = [row[1] for row in ROWS if row[1][0] == letter]
    assert len(found) >= least
    assert found == [f"{letter}{n}" for n in range(1, len(found) + 1)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1])
def test_every_test_that_a_row_names_exists(row: re.Match[str]) -> None:
    named = NAMED.findall(row[4])
    assert named or row[4].startswith("not tested: "), f"row {row[1]} names no test and does not say why"
    rest = NAMED.sub("", row[4]).replace(", ", "").strip()
    assert not rest or rest.startswith("not tested"), f"row {row[1]} has something else in its last column: {rest}"
    for path, name in named:
        assert (ROOT / path).is_file(), f"row {row[1]}: there is no {path}"
        assert name in names_in(path), f"row {row[1]}: {path} has no {name}"
