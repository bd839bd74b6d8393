"""A streaming frame on other streams than its own; for tests of a whole job, which give it rows by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import types as T

from state_runtime.spark.catalyst import Catalyst
from state_runtime.spark.jvm import analyzed, dataset_of, items, kind_of
from state_runtime.spark.query_names import source_place

__all__ = ["on_other_streams"]


def on_other_streams(frame: DataFrame, other: Callable[[str, T.StructType], DataFrame]) -> DataFrame:
    """Return a frame in whose plan other streams stand in the place of those that it reads.

    Args:
        other: gets what a stream is called (the last part of its path, its topic, else its format) and its columns, and
            returns a streaming frame with the same columns, in their order.
    """
    session = frame.sparkSession
    catalyst = Catalyst(session)

    def remade(node: Any) -> Any:
        if kind_of(node).startswith("StreamingRelation"):
            schema = DataFrame(dataset_of(session, node), session).schema
            plan = analyzed(other(source_place(node), schema))
            columns = zip(items(plan.output()), items(node.output()), strict=True)
            return catalyst.project([catalyst.as_attribute(column, as_known) for column, as_known in columns], plan)
        children = [remade(child) for child in items(node.children())]
        return node.withNewChildren(catalyst.sequence(children)) if children else node

    return DataFrame(dataset_of(session, remade(analyzed(frame))), session)
