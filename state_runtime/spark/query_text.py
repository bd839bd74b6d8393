"""What the expressions of a plan say, down to the columns of its sources.

Spark's numbers of columns are new in each session, and names are the user's to change: what state belongs to is made of
neither. `amount + 1` of source `orders` says `(orders.amount + 1)` however its columns are called on the way.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from state_runtime.spark.catalyst import Catalyst, id_of
from state_runtime.spark.jvm import items, kind_of

__all__ = ["Texts", "digest_of", "plain_name", "window_us_of"]

_TEXT_MAX: Final = 400
_WINDOWS: Final = ("spark.timeWindow", "spark.sessionWindow")
_PLAIN: Final = re.compile(r"[A-Za-z0-9][\w-]*(?:\.(?P<column>[A-Za-z_]\w*))+")
_LENGTHS: Final = re.compile(r"((?:\d+, )*\d+) us, [0-9a-f]{8}\)$")
_NUMBER: Final = re.compile(r"\b\d+L?\b")


def digest_of(text: str) -> str:
    """Return a few characters that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def plain_name(text: str) -> str:
    """Return the column's name if a text is a column of a source, `window` of a window; else ""."""
    if text.startswith("window("):
        return "window"
    found = _PLAIN.fullmatch(text)
    return found["column"] if found is not None else ""


def window_us_of(text: str) -> int:
    """Return how long a tumbling window is by its text, in microseconds; 0 of anything else, whose text has several
    lengths."""
    found = _LENGTHS.search(text) if text.startswith("window(") else None
    lengths = {int(each) for each in found[1].split(", ")} - {0} if found is not None else set()
    return lengths.pop() if len(lengths) == 1 else 0


class Texts:
    """The texts of a plan's expressions.

    Args:
        source: the name of the source that a leaf reads; None of a table.
    """

    def __init__(self, catalyst: Catalyst, plan: Any, source: Callable[[Any], str | None]) -> None:
        self._catalyst = catalyst
        self._source = source
        self._expressions: dict[int, list[Any]] = {}
        self._known: dict[int, str] = {}
        self._grouped: dict[int, list[Any]] = {}  # of columns that a GROUP BY computes, its keys
        self._open: set[int] = set()
        self._collect(plan)

    def of(self, expression: Any) -> str:
        """Return what an expression says; long texts end in a digest of all."""
        if kind_of(expression) == "Alias":
            return self.of(expression.child())
        if _is_column(expression):
            return self._of_column(expression)
        text = str(self._catalyst.with_leaves(expression, self._spelled).sql()).replace("`", "")
        return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}… {digest_of(text)}"

    def of_rows(self, plan: Any) -> str:
        """Return what a plan's rows come from and go through. Its columns are numbered in the plan's order, since some
        say the same."""
        return self._rows(plan, {})

    def _rows(self, plan: Any, numbers: dict[int, int]) -> str:
        below = [self._rows(child, numbers) for child in items(plan.children())]
        for attribute in items(plan.output()):
            numbers.setdefault(id_of(attribute), len(numbers))
        own = [
            f"{self.of(each)} of {[numbers.get(id_of(a)) for a in items(each.collectLeaves()) if _is_column(a)]}"
            for each in items(plan.expressions())
        ]
        return f"{kind_of(plan)}({self._source(plan) or ''}; {', '.join(own)}; {', '.join(below)})"

    def _spelled(self, node: Any) -> Any:
        if not _is_column(node):
            return None
        return node.withName(self._of_column(node)).withQualifier(self._catalyst.sequence([]))

    def _of_column(self, attribute: Any) -> str:
        number = id_of(attribute)
        if number in self._known:
            return self._known[number]
        made = self._expressions.get(number)
        if made is None or number in self._open:
            return str(attribute.name())
        self._open.add(number)
        texts = list(dict.fromkeys(self.of(expression) for expression in made))
        self._open.discard(number)
        text = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
        if number in self._grouped:
            text = f"{text} by ({', '.join(self.of(key) for key in self._grouped[number])})"
        if any(attribute.metadata().contains(mark) for mark in _WINDOWS) and "precisetimestampconversion" in text:
            text = _window(made, text, self)
        self._known[number] = text
        return text

    def _collect(self, node: Any) -> None:
        """Note how each column of a plan is made."""
        children = items(node.children())
        name = self._source(node) if not children else None
        if not children:
            for attribute in items(node.output()):
                self._known.setdefault(id_of(attribute), f"{name or 'table'}.{attribute.name()}")
        kind = kind_of(node)
        keys = items(node.groupingExpressions()) if kind == "Aggregate" else []
        for number, expressions in _MADE.get(kind, _aliases)(node).items():
            self._expressions.setdefault(number, expressions)
            if kind == "Aggregate" and any(map(self._catalyst.is_aggregated, expressions)):
                self._grouped.setdefault(number, keys)
        for child in children:
            self._collect(child)


def _is_column(node: Any) -> bool:
    return kind_of(node) == "AttributeReference"


def _window(made: list[Any], text: str, texts: Texts) -> str:
    """Return a short text for a window: over which time, and its lengths in microseconds."""
    times = dict.fromkeys(texts.of(leaf) for each in made for leaf in items(each.references().toSeq()))
    lengths = sorted({int(found.rstrip("L")) for found in _NUMBER.findall(text)})
    return f"window({', '.join(times)}, {', '.join(map(str, lengths))} us, {digest_of(text)})"


def _aliases(node: Any) -> Mapping[int, list[Any]]:
    return {id_of(each): [each.child()] for each in items(node.expressions()) if kind_of(each) == "Alias"}


def _expanded(node: Any) -> Mapping[int, list[Any]]:
    """Of a row that becomes several: a column has an expression in each of them."""
    rows = [items(row) for row in items(node.projections())]
    return {id_of(column): [row[place] for row in rows] for place, column in enumerate(items(node.output()))}


def _of_python(node: Any) -> Mapping[int, list[Any]]:
    made = zip(items(node.resultAttrs()), items(node.udfs()), strict=True)
    return {id_of(column): [function] for column, function in made}


_MADE: Final[Mapping[str, Callable[[Any], Mapping[int, list[Any]]]]] = {
    "Expand": _expanded,
    "ArrowEvalPython": _of_python,
    "BatchEvalPython": _of_python,
}
