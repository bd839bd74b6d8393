"""Spark's own `withWatermark` nodes: where they stand in a stream's plan, and what a batch brought them.

Where a stream has several, each sees the rows of its own input only, and none but Spark's node is where these are told
apart: behind a union the columns of all inputs are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import DataFrame

from state_runtime.spark.jvm import analyzed, batch_execution, classes, items, kind_of, paths_to

__all__ = ["WATERMARK_KIND", "WatermarkNode", "event_times_at", "is_seen_at_the_top", "watermark_nodes"]

WATERMARK_KIND: Final = "EventTimeWatermark"

_ONE_TO_ONE: Final = frozenset({"Project", "SubqueryAlias"})


@dataclass(frozen=True)
class WatermarkNode:
    """A `withWatermark` of a stream's plan.

    Attributes:
        id: what Spark knows it by, in every plan that it makes of the stream.
        column: the column with event time.
        is_redefinition: another one is below it.
    """

    id: str
    column: str
    delay_ms: int
    is_redefinition: bool


def watermark_nodes(frame: DataFrame) -> tuple[WatermarkNode, ...]:
    """Of a streaming frame, in the order of its plan. A stream that is united with itself has one: Spark keeps one
    watermark for it."""
    delay_ms = classes(frame.sparkSession).org.apache.spark.sql.catalyst.plans.logical.EventTimeWatermark.getDelayMs
    found: dict[str, WatermarkNode] = {}
    for node in _nodes(analyzed(frame)):
        below = any(_nodes(child) for child in items(node.children()))
        made = WatermarkNode(str(node.nodeId()), str(node.eventTime().name()), int(delay_ms(node.delay())), below)
        found.setdefault(made.id, made)
    return tuple(found.values())


def is_seen_at_the_top(frame: DataFrame) -> bool:
    """Whether each row that comes by the frame's `withWatermark` is a row of the frame, and no other row is.

    Not behind a union, a join with a table, or a filter that Spark cannot move below the node: it sees rows there that
    the frame does not have, or the other way round. True of a frame without any.
    """
    plan = analyzed(frame)
    nodes = _nodes(plan)
    if len(nodes) != 1:
        return not nodes
    (node,), (above,) = nodes, paths_to(_is_watermark, plan)
    kept = {int(a.exprId().id()) for a in items(node.output())} - {int(node.eventTime().exprId().id())}
    return all(_hands_on(step, kept) for step in above)


def event_times_at(frame: DataFrame, nodes: Sequence[WatermarkNode]) -> list[int | None]:
    """The highest event time that each node saw of the batch that Spark runs in this thread; None where no row came.

    Asked of Spark's own tracker, which finds the nodes in whatever plan it made of the batch.

    Args:
        frame: the batch, all of whose rows have been made.
    """
    jvm, execution = classes(frame.sparkSession), batch_execution(frame)
    runtime, to_uuid = jvm.org.apache.spark.sql.execution.streaming.runtime, jvm.java.util.UUID.fromString
    policy = getattr(runtime, "MinWatermark$").__getattr__("MODULE$")  # it has one; what it chooses is not asked
    tracker = runtime.WatermarkTracker(policy, execution.analyzed())
    tracker.updateWatermark(execution.executedPlan())
    reached = tracker.watermarkMap()
    seen = [reached.apply(to_uuid(node.id)) for node in nodes]
    return [int(s.get()) + n.delay_ms if s.isDefined() else None for s, n in zip(seen, nodes, strict=True)]


def _is_watermark(node: Any) -> bool:
    return kind_of(node) == WATERMARK_KIND


def _nodes(plan: Any) -> list[Any]:
    """Those of a plan, outermost first."""
    own = [plan] if _is_watermark(plan) else []
    return own + [node for child in items(plan.children()) for node in _nodes(child)]


def _hands_on(step: Any, kept: set[int]) -> bool:
    """Whether Spark counts the same rows below a step as above it.

    Args:
        kept: the columns beside the one with event time: a filter on nothing else is moved below `withWatermark`.
    """
    if kind_of(step) == "Filter":
        return bool(step.deterministic()) and {int(a.exprId().id()) for a in items(step.references().toSeq())} <= kept
    return kind_of(step) in _ONE_TO_ONE and bool(step.deterministic())
