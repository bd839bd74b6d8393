"""docs/spark-internals.md lists what the code uses of Spark beside its public API, and says what happens without it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from state_runtime.spark.internals import Internal

from .spark_calls import FOLDER, calls, calls_in, is_private

PAGE = Path(__file__).resolve().parent.parent / "docs" / "spark-internals.md"
ROWS = re.findall(r"(?m)^\| `([A-Z_]+)` \| (.*?) \| (.*?) \| (.*?) \|$", PAGE.read_text())


def test_each_use_has_a_row_that_says_what_the_log_says_without_it() -> None:
    assert {name: without for name, _, _, without in ROWS} == {use.name: use.value for use in Internal}
    assert len(ROWS) == len(Internal)
    assert all(why for _, _, why, _ in ROWS)


def test_the_page_and_the_code_name_the_same_calls() -> None:
    """Whoever moves to another version of Spark goes through this page. A method whose name is one small word (`get`,
    `children`) cannot be told from Python's, and is not compared."""
    in_code = calls()
    named = {
        word for _, text, _, _ in ROWS for code in re.findall("`(.+?)`", text) for word in re.findall(r"\w+", code)
    }
    assert {word for word in named if is_private(word) or word.startswith("_") or word in in_code} == in_code


def test_each_use_is_guarded_in_the_code() -> None:
    """A name that no code asks for would promise a public way that is not there."""
    texts = [file.read_text() for file in FOLDER.glob("*.py") if file.name != "internals.py"]
    assert [use.name for use in Internal if not any(f"Internal.{use.name}" in text for text in texts)] == []


def test_calls_are_found_and_public_ones_are_not() -> None:
    """A rule that cannot fail protects nothing."""
    code = 'import logging\nprivate(frame, "_jdf").queryExecution().get()\nframe.selectExpr("a")\nlogging.getLogger()\n'
    assert set(calls_in(ast.parse(code))) == {"_jdf", "queryExecution"}
