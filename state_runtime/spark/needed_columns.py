"""The columns of a frame on which some columns of a derived frame depend, as Spark's optimizer says."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame

from state_runtime.spark.internals import Internal, given
from state_runtime.spark.jvm import analyzed, columns_of, execution_of, items, kind_of, paths_to
from state_runtime.spark.plans import contains

__all__ = ["columns_needed"]

# A filter passes on every column of its input; a projection or an aggregate passes on the columns that it names.
_HANDS_ON: Final = frozenset({"Filter"})
_NAMES: Final = frozenset({"Project", "Aggregate"})


def columns_needed(given_frame: DataFrame, made: DataFrame, wanted: Collection[str]) -> frozenset[str] | None:
    """Return the columns of a frame on which some columns of a derived frame depend; None for all.

    Spark's optimizer puts a projection of the needed columns right above the node that reads them. If the plan has
    another shape (the frame is read twice, in a subquery, or by an operation on whole rows), the answer is None.

    Args:
        given_frame: without rows, made directly (`createDataFrame`).
        made: the frame that the user's transforms made of it.
        wanted: the columns of `made` that are read, as SQL.
    """
    chosen = made.selectExpr(*wanted)
    try:
        return given(Internal.OPTIMIZED_PLANS, lambda: _needed(given_frame, chosen), lambda: None)
    except Py4JJavaError:
        return None  # the optimizer failed to compute a constant: the first epoch reports it, with the step


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
    """Return whether more than one leaf is of the frame's kind: a frame that is read twice gets other ids then."""
    leaves = items(analyzed(made).collectLeaves())
    return [kind_of(leaf) for leaf in leaves].count(kind_of(analyzed(given_frame))) != 1


def _along(path: tuple[Any, ...], own: dict[int, str]) -> frozenset[str] | None:
    """Return the columns that the nodes above the frame read, innermost first, up to one that names all its output."""
    read: set[int] = set()
    for node in reversed(path):
        kind = kind_of(node)
        if kind not in _HANDS_ON | _NAMES:
            return None
        read |= {int(attribute.exprId().id()) for attribute in items(node.references().toSeq())}
        if kind in _NAMES:
            return frozenset(own[number] for number in read & own.keys())
    return None
