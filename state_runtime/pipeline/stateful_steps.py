"""Operators of Spark's own that keep state: refused in the stream that a job reads.

Their state lies in Spark's checkpoint directory, which is scratch here and made anew by each run: the first run would
go well, and no later one could begin.
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
# By the class of the node: what it is called in Spark, and what to write instead.
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
    """Nothing, of a stream that Spark keeps no state for. Tables that it is joined with may be made in any way.

    Raises:
        InvalidPipeline: names the operation, and what to write instead.
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
    """The nodes of a plan that stream, from the inside out: the innermost is what a user has to change first."""
    if plan.is_streaming:
        for child in plan.children:
            yield from _streaming(child)
        yield plan
