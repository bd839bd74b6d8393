"""Spark's aggregate functions in a plan, as calls of Stillstate's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from state_runtime.base.errors import InvalidPipeline
from state_runtime.spark.catalyst import Catalyst
from state_runtime.spark.jvm import has_method, items, kind_of
from state_runtime.spark.query_parts import Called
from state_runtime.spark.query_text import Texts, digest_of, plain_name

__all__ = ["MadeCall", "made_call"]

_FUNCTIONS: Final[Mapping[str, str]] = {
    "Count": "count",
    "Sum": "sum",
    "Min": "min",
    "Max": "max",
    "Average": "avg",
    "MaxBy": "max_by",
    "MinBy": "min_by",
    "First": "first",
    "Last": "last",
    "CollectList": "collect",
    "CollectSet": "collect_set",
    "StddevSamp": "stddev",
    "StddevPop": "stddev_pop",
    "VarianceSamp": "variance",
    "VariancePop": "variance_pop",
    "BoolOr": "any",
    "BoolAnd": "every",
    "HyperLogLogPlusPlus": "count_distinct_approx",
}
_CHOOSING: Final = frozenset({"max_by", "min_by"})
_ORDERED: Final = frozenset({"first", "last"})
_COLLECTING: Final = frozenset({"collect", "collect_set"})


@dataclass(frozen=True)
class MadeCall:
    """A call, and the columns that are made for it.

    Attributes:
        name: of its result's column; it follows from the text alone.
        arguments: Spark's expressions by the names of their columns.
        result: Spark's column of the result.
    """

    name: str
    call: Called
    arguments: Mapping[str, Any]
    result: Any

    def renamed(self, name: str) -> MadeCall:
        """Return the same call under another name."""
        if name == self.name:
            return self
        names = {old: f"{name}_{place}" for place, old in enumerate(self.arguments)}
        call = replace(
            self.call,
            column=names.get(self.call.column or ""),
            by=names.get(self.call.by or ""),
        )
        return MadeCall(name, call, {names[old]: each for old, each in self.arguments.items()}, self.result)


def made_call(catalyst: Catalyst, texts: Texts, expression: Any) -> MadeCall:
    """Return the call for an `AggregateExpression`.

    Raises:
        InvalidPipeline: there is no such function here.
    """
    function = expression.aggregateFunction()
    kind, told = kind_of(function), str(expression.sql())
    name = _FUNCTIONS.get(kind)
    if name is None or expression.isDistinct():
        known = ", ".join(sorted(_FUNCTIONS.values()))
        raise InvalidPipeline(f"the aggregate function {told} is not supported; there are {known}")
    # Spark 4.1 has no such choice: it ignores them.
    if name in _COLLECTING and has_method(function, "ignoreNulls") and not function.ignoreNulls():
        raise InvalidPipeline(f"{told}: RESPECT NULLS is not supported here; leave it out, or collect a struct of it")
    given = items(function.children())[: 2 if name in _CHOOSING else 1]
    if name == "count" and len(items(function.children())) > 1:
        raise InvalidPipeline(f"{told} counts rows by several columns; count one, or count(*) with FILTER (WHERE …)")
    ignores_nulls = name in _ORDERED and bool(function.ignoreNulls())
    if name == "count" and given[0].foldable() and str(given[0].sql()).upper() != "NULL":
        given = []
    text = " by ".join(texts.of(each) for each in given) or "*"
    over = plain_name(text)
    if expression.filter().isDefined():
        if name in _ORDERED and not ignores_nulls:
            raise InvalidPipeline(f"{told}: FILTER of a first or last that takes nulls is not supported; ignore nulls")
        condition = expression.filter().get()
        text = f"{text} where {texts.of(condition)}"
        given = [catalyst.where(condition, each) for each in given or [catalyst.literal(True)]]
    if not given and name == "count":
        return MadeCall("count", Called(name, ""), {}, expression.resultAttribute())
    rsd = float(function.relativeSD()) if name == "count_distinct_approx" else 0.0
    column = "_".join(filter(None, (name, over, digest_of(f"{text} {ignores_nulls} {rsd or ''}".rstrip()))))
    arguments = {f"{column}_{place}": each for place, each in enumerate(given)}
    value, *by = arguments
    call = Called(name, text, value, by=by[0] if by else None, ignore_nulls=ignores_nulls, rsd=rsd)
    return MadeCall(column, call, arguments, expression.resultAttribute())
