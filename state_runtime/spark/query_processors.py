"""User code with state in a plan: `transformWithState` of both flavours, and `applyInPandasWithState`.

A plan holds the user's processor inside a pickled function, which this process made itself a moment ago.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pyspark.sql import DataFrame
from pyspark.sql import types as T

from state_runtime.base.errors import InvalidPipeline
from state_runtime.spark.catalyst import Catalyst
from state_runtime.spark.group_state import GroupFunction
from state_runtime.spark.internals import private, private_of
from state_runtime.spark.jvm import items, kind_of

__all__ = ["PROCESSORS", "Code", "code_of"]

PROCESSORS: Final = frozenset({"TransformWithStateInPySpark", "FlatMapGroupsInPandasWithState"})
_TIME_MODES: Final[Mapping[str, Literal["none", "processing", "event"]]] = {
    "None": "none",
    "NoTime": "none",
    "NoTimeout": "none",
    "ProcessingTime": "processing",
    "ProcessingTimeTimeout": "processing",
    "EventTime": "event",
    "EventTimeTimeout": "event",
}


@dataclass(frozen=True)
class Code:
    """The user's code of a node.

    Attributes:
        keys: its key columns; they are among `columns`, too.
        columns: of the rows that it gets.
    """

    processor: Any
    keys: Sequence[Any]
    columns: Sequence[Any]
    is_pandas: bool
    time_mode: Literal["none", "processing", "event"]
    initial: DataFrame | None = None


def code_of(catalyst: Catalyst, node: Any) -> Code:
    """Return the code of a node of `PROCESSORS`.

    Raises:
        InvalidPipeline: the function is too large for a plan, or the initial state is a stream.
    """
    function = _function(node)
    if kind_of(node) == "FlatMapGroupsInPandasWithState":
        columns, timeout = items(node.functionExpr().children()), kind_of(node.timeout()).rstrip("$")
        schema = T.StructType.fromJson(json.loads(str(node.stateType().json())))
        made = GroupFunction(function, schema, timeout, [str(column.name()) for column in columns])
        return Code(made, items(node.groupingAttributes()), columns, True, _TIME_MODES[timeout])
    size = int(node.groupingAttributesLen())
    output = items(node.child().output())
    return Code(
        processor=private(private(function, "__self__"), "_stateful_processor"),
        keys=output[:size],
        columns=output[size:],
        is_pandas="pandas" in str(node.userFacingDataType()).lower(),
        time_mode=_TIME_MODES[kind_of(node.timeMode()).rstrip("$")],
        initial=_initial(catalyst, node, size) if node.hasInitialState() else None,
    )


def _function(node: Any) -> Any:
    command = str(node.functionExpr().func().command().mkString(","))
    loaded = private_of("pyspark", "cloudpickle").loads(bytes(int(each) & 255 for each in command.split(",")))
    if not isinstance(loaded, tuple):
        raise InvalidPipeline(
            "the function of a stateful step is so large that Spark sends it as a broadcast (more than 1 MiB); load "
            "what makes it large inside the function"
        )
    return loaded[0]


def _initial(catalyst: Catalyst, node: Any, size: int) -> DataFrame:
    """Return the rows of an initial state: the plan has its keys, then all of its columns."""
    plan = node.initialState()
    if plan.isStreaming():
        raise InvalidPipeline("an initial state cannot be a stream")
    columns = items(plan.output())
    keys, rest = columns[:size], columns[size:]
    whole = rest if {str(key.name()) for key in keys} <= {str(column.name()) for column in rest} else columns
    return catalyst.frame(catalyst.project([catalyst.named(c, str(c.name())) for c in whole], plan))
