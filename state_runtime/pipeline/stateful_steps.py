"""Spark's own stateful operators, which are refused in the stream that a job reads.

Their state is stored in Spark's checkpoint directory, which is scratch here and created again by each run: the first
run would succeed, and every later one would fail to start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from pyspark.sql import DataFrame

from state_runtime.base.errors import InvalidPipeline
from state_runtime.spark.plans import PlanNode, plan_of

__all__ = ["refuse_stateful"]

_JOIN: Final = ("a join of two streams", ".key_by(…).interval_join(…)")
_PROCESSOR: Final = ".key_by(…).transform_with_state(…)"
# By the class of the node: its name in Spark, and the replacement.
_STATEFUL: Final[Mapping[str, tuple[str, str]]] = {
    "Aggregate": (
        "groupBy(…) with aggregates",
        ".key_by(…).aggregate(…), .key_by(…).window(…) by event time, or .key_by(…).deduplicate(…) for distinct rows",
    ),
    "Distinct": ("distinct", ".key_by(…).deduplicate(…)"),
    "Deduplicate": ("dropDuplicates(…) or distinct()", ".key_by(…).deduplicate(…)"),
    "DeduplicateWithinWatermark": (
        "dropDuplicatesWithinWatermark(…)",
        ".key_by(…).deduplicate(…, within_watermark=True)",
    ),
    "FlatMapGroupsWithState": ("flatMapGroupsWithState(…)", _PROCESSOR),
    "FlatMapGroupsInPandasWithState": ("applyInPandasWithState(…)", ".key_by(…).transform_with_state_in_pandas(…)"),
    "TransformWithState": ("transformWithState(…)", _PROCESSOR),
    "TransformWithStateInPySpark": ("transformWithState(…)", _PROCESSOR),
    "GlobalLimit": ("limit(…)", "a processor that counts its rows"),
    "Intersect": ("intersect(…)", ".key_by(…).interval_join(…) or a processor over the union of both streams"),
    "Except": ("exceptAll(…) or subtract(…)", "a processor over the union of both streams"),
}


def refuse_stateful(frame: DataFrame, job: str) -> None:
    """Refuse a stream for which Spark keeps state. Tables that it is joined with may be made in any way.

    Raises:
        InvalidPipeline: names the operation and the replacement.
    """
    for node in _streaming(plan_of(frame)):
        streams = [child for child in node.children if child.is_streaming]
        found = _STATEFUL.get(node.kind) if streams else None
        if node.kind == "Join" and len(streams) > 1:
            found = _JOIN
        if found is not None:
            what, instead = found
            raise InvalidPipeline(
                f"job {job!r}: the stream that read() returns has an operator of Spark's own that keeps state, {what}. "
                "That state would lie in Spark's checkpoint directory, which is no part of a snapshot: the first run "
                f"would work, and no restart. Keep it in the job's own state: behind read(), {instead}"
            )


def _streaming(plan: PlanNode) -> Iterator[PlanNode]:
    """Yield the streaming nodes of a plan, innermost first: the user has to change the innermost one first."""
    if plan.is_streaming:
        for child in plan.children:
            yield from _streaming(child)
        yield plan
