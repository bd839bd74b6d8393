"""Spark's own `withWatermark` nodes: their place in a stream's plan, and the event times that they saw in a batch.

If a stream has several, each sees only the rows of its own input, and only Spark's nodes can tell these apart: after a
union the columns of all inputs are one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame

from state_runtime.base.errors import InvalidPipeline
from state_runtime.spark.internals import Internal, given
from state_runtime.spark.jvm import (
    analyzed,
    classes,
    dataset_of,
    execution_of,
    items,
    java_frame,
    kind_of,
    kinds_in,
    object_of,
    paths_to,
)
from state_runtime.spark.plans import PlanNode, plan_printed

__all__ = [
    "WatermarkNode",
    "event_times_at",
    "is_seen_at_the_top",
    "redefined_watermarks",
    "watermark_nodes",
    "without_watermarks",
]

_LOG = logging.getLogger(__name__)
_WATERMARK: Final = "EventTimeWatermark"
_ONE_TO_ONE: Final = frozenset({"Project", "SubqueryAlias"})
# Around these nodes only the runtime uses a watermark, and it has read it from the columns by then.
_STATELESS: Final = frozenset(
    {_WATERMARK, "Project", "Filter", "SubqueryAlias", "Union", "StreamingRelation", "StreamingRelationV2"}
)
_QUERY_ID: Final = "sql.streaming.queryId"
_PRINTED = re.compile(_WATERMARK + r" \S+, (?P<column>.*?)#\d+")


@dataclass(frozen=True)
class WatermarkNode:
    """A `withWatermark` of a stream's plan.

    Attributes:
        id: Spark's id of it, in every plan that Spark makes of the stream.
        column: the column with event time.
    """

    id: str
    column: str
    delay_ms: int


def redefined_watermarks(frame: DataFrame) -> list[str]:
    """Return the event-time columns of a streaming frame's watermarks that have another watermark below them."""

    def inner() -> list[str]:
        return [
            str(node.eventTime().name()) for node in _nodes(analyzed(frame)) if any(map(_nodes, items(node.children())))
        ]

    def public() -> list[str]:
        found = [node for node in plan_printed(frame).nodes() if node.kind == _WATERMARK]
        return [_column_printed(node) for node in found if sum(n.kind == _WATERMARK for n in node.nodes()) > 1]

    return given(Internal.PLANS, inner, public)


def _column_printed(node: PlanNode) -> str:
    match = _PRINTED.match(node.text)
    return match["column"] if match is not None else node.text


def watermark_nodes(frame: DataFrame) -> tuple[WatermarkNode, ...]:
    """Return the nodes of a streaming frame, in the order of its plan. A stream that is united with itself has one:
    Spark keeps one watermark for it.

    Raises:
        InvalidPipeline: this version of Spark cannot be asked for the event times that they see.
    """

    def inner() -> tuple[WatermarkNode, ...]:
        _try_tracker(frame.sparkSession.range(0))
        delay_ms = classes(frame.sparkSession).org.apache.spark.sql.catalyst.plans.logical.EventTimeWatermark.getDelayMs
        found: dict[str, WatermarkNode] = {}
        for node in _nodes(analyzed(frame)):
            made = WatermarkNode(str(node.nodeId()), str(node.eventTime().name()), int(delay_ms(node.delay())))
            found.setdefault(made.id, made)
        return tuple(found.values())

    def refuse() -> tuple[WatermarkNode, ...]:
        raise InvalidPipeline(
            "the stream that read() returns has withWatermark on inputs of a union or a join, or below a step that "
            "drops or adds rows, and this version of Spark does not say what is seen there. Call withWatermark once, "
            "as the last step of read()"
        )

    return given(Internal.WATERMARK_TRACKER, inner, refuse)


def is_seen_at_the_top(frame: DataFrame) -> bool:
    """Return whether the rows that pass the frame's `withWatermark` are exactly the rows of the frame.

    They are not after a union, a join with a table, or a filter that Spark cannot move below the node: the node then
    sees rows that the frame does not have, or misses some. True for a frame without watermarks. If the plan is only
    known from the output of `explain`, every filter is taken for one that Spark does not move.
    """

    def inner() -> bool:
        plan = analyzed(frame)
        nodes = _nodes(plan)
        if len(nodes) != 1:
            return not nodes
        (node,), (above,) = nodes, paths_to(_is_watermark, plan)
        kept = {int(a.exprId().id()) for a in items(node.output())} - {int(node.eventTime().exprId().id())}
        return all(_hands_on(step, kept) for step in above)

    def public() -> bool:
        plan = plan_printed(frame)
        while plan.kind in _ONE_TO_ONE:
            (plan,) = plan.children
        marked = [node for node in plan.nodes() if node.kind == _WATERMARK]
        return not marked or (len(marked) == 1 and plan is marked[0])

    return given(Internal.PLANS, inner, public)


def without_watermarks(frame: DataFrame) -> DataFrame:
    """Return a streaming frame without its `withWatermark` nodes; unchanged if other nodes may need them."""

    def inner() -> DataFrame:
        kinds = kinds_in(analyzed(frame))
        if _WATERMARK not in kinds or not kinds <= _STATELESS:
            return frame
        session, to_sequence = frame.sparkSession, classes(frame.sparkSession).PythonUtils.toSeq

        def remade(node: Any) -> Any:
            children = [remade(child) for child in items(node.children())]
            if _is_watermark(node):
                return children[0]
            return node.withNewChildren(to_sequence(children)) if children else node

        return DataFrame(dataset_of(session, remade(analyzed(frame))), session)

    try:
        return given(Internal.REBUILT_PLANS, inner, lambda: frame)
    except Py4JJavaError as error:
        _LOG.info("Spark's own watermark stays in the plan of the stream: %s", str(error).partition("\n")[0])
        return frame


def event_times_at(frame: DataFrame, nodes: Sequence[WatermarkNode]) -> list[int | None]:
    """Return the highest event time that each node saw in the batch that Spark runs in this thread; None without rows.

    Spark's own tracker is asked, which finds the nodes in any plan that it made of the batch. There is no public way:
    `watermark_nodes` has tried the tracker.

    Args:
        frame: the batch, all of whose rows have been computed.
    """
    session, jvm = frame.sparkSession, classes(frame.sparkSession)
    to_uuid = jvm.java.util.UUID.fromString
    queries = java_frame(frame).sparkSession().sharedState().activeStreamingQueries()
    execution = queries.get(to_uuid(session.sparkContext.getLocalProperty(_QUERY_ID))).lastExecution()
    tracker = _tracker(jvm, execution.analyzed())
    tracker.updateWatermark(execution.executedPlan())
    reached = tracker.watermarkMap()
    seen = [reached.apply(to_uuid(node.id)) for node in nodes]
    return [int(s.get()) + n.delay_ms if s.isDefined() else None for s, n in zip(seen, nodes, strict=True)]


def _try_tracker(frame: DataFrame) -> None:
    """Try the internals that `event_times_at` uses, as far as possible without a stream.

    Args:
        frame: any.
    """
    jvm, session = classes(frame.sparkSession), java_frame(frame).sparkSession()
    session.sharedState().activeStreamingQueries().get(jvm.java.util.UUID.randomUUID())
    tracker = _tracker(jvm, analyzed(frame))
    tracker.updateWatermark(execution_of(frame).executedPlan())
    tracker.watermarkMap().size()


def _tracker(jvm: Any, plan: Any) -> Any:
    runtime = jvm.org.apache.spark.sql.execution.streaming.runtime
    # The tracker needs a policy; its choice is not used.
    return runtime.WatermarkTracker(object_of(runtime, "MinWatermark"), plan)


def _is_watermark(node: Any) -> bool:
    return kind_of(node) == _WATERMARK


def _nodes(plan: Any) -> list[Any]:
    """Return the watermark nodes of a plan, outermost first."""
    own = [plan] if _is_watermark(plan) else []
    return own + [node for child in items(plan.children()) for node in _nodes(child)]


def _hands_on(step: Any, kept: set[int]) -> bool:
    """Return whether Spark counts the same rows below a step as above it.

    Args:
        kept: the columns except the one with event time: a filter on these only is moved below `withWatermark`.
    """
    if kind_of(step) == "Filter":
        return bool(step.deterministic()) and {int(a.exprId().id()) for a in items(step.references().toSeq())} <= kept
    return kind_of(step) in _ONE_TO_ONE and bool(step.deterministic())
