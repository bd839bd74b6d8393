"""Which columns of a frame some columns of what was made of it depend on, as Spark's optimizer says."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame

from state_runtime.spark.internals import Internal, given
from state_runtime.spark.jvm import analyzed, columns_of, execution_of, items, kind_of, paths_to
from state_runtime.spark.plans import contains

__all__ = ["columns_needed"]

# Through a filter every column of its input goes on; a projection or an aggregate hands on what it names.
_HANDS_ON: Final = frozenset({"Filter"})
_NAMES: Final = frozenset({"Project", "Aggregate"})


def columns_needed(given_frame: DataFrame, made: DataFrame, wanted: Collection[str]) -> frozenset[str] | None:
    """Which columns of a frame some columns of what was made of it depend on.

    Spark's optimizer puts a projection of what is needed right above what it reads. Where the plan has another shape
    (the frame is read twice, in a subquery, or by something that takes whole rows), the answer is None: all of them.

    Args:
        given_frame: without rows, and made of nothing else (`createDataFrame`).
        made: what the user's transforms made of it.
        wanted: what is read of `made`, as SQL.
    """
    chosen = made.selectExpr(*wanted)
    try:
        return given(Internal.OPTIMIZED_PLANS, lambda: _needed(given_frame, chosen), lambda: None)
    except Py4JJavaError:
        return None  # the optimizer computed a constant, and that failed: the first epoch says so, with the step


def _needed(given_frame: DataFrame, chosen: DataFrame) -> frozenset[str] | None:
    own, plan = columns_of(given_frame), execution_of(chosen).optimizedPlan()
    if contains(chosen, "PLAN_EXPRESSION"):
        return None
    paths = paths_to(lambda node: _is_leaf_with(own, node), plan)
    if len(paths) != 1 or _reads_again(chosen, given_frame):
        return None
    return _along(paths[0], own)


def _is_leaf_with(columns: dict[int, str], node: Any) -> bool:
    if items(node.children()):
        return False
    return any(int(attribute.exprId().id()) in columns for attribute in items(node.output()))


def _reads_again(made: DataFrame, given_frame: DataFrame) -> bool:
    """Whether more than one leaf is of the frame's kind: read twice, a frame gets other ids the second time."""
    leaves = items(analyzed(made).collectLeaves())
    return [kind_of(leaf) for leaf in leaves].count(kind_of(analyzed(given_frame))) != 1


def _along(path: tuple[Any, ...], own: dict[int, str]) -> frozenset[str] | None:
    """What the nodes above the frame read of it, innermost first, up to the one that names all that it hands on."""
    read: set[int] = set()
    for node in reversed(path):
        kind = kind_of(node)
        if kind not in _HANDS_ON | _NAMES:
            return None
        read |= {int(attribute.exprId().id()) for attribute in items(node.references().toSeq())}
        if kind in _NAMES:
            return frozenset(own[number] for number in read & own.keys())
    return None
