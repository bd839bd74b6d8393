"""The map of docs/architecture.md names files and symbols that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| (?P<behaviour>[^|]+) \| `(?P<file>[\w/]+\.py)` \| `(?P<symbol>[\w.]+)` \|$", re.MULTILINE)
BEHAVIOURS = [match.groups() for match in ROW.finditer((ROOT / "docs" / "architecture.md").read_text())]


def symbols_of(file: Path) -> set[str]:
    """Functions and classes at the top of a module, and methods as `Class.method`."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def test_a_stranger_finds_at_least_fifteen_behaviours() -> None:
    """A table that no longer parses would hold nothing."""
    assert len(BEHAVIOURS) >= 15


@pytest.mark.parametrize(("behaviour", "file", "symbol"), BEHAVIOURS)
def test_each_behaviour_is_where_the_map_says(behaviour: str, file: str, symbol: str) -> None:
    """A reader who follows the map arrives."""
    assert symbol in symbols_of(ROOT / file), behaviour


def test_a_symbol_that_is_not_there_is_found() -> None:
    """A rule that cannot fail protects nothing."""
    assert "Committer.no_such" not in symbols_of(ROOT / "state_runtime/snapshot/commit.py")
