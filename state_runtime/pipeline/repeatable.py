"""Warnings about stateless code that gives other rows when it is run again, or when the stream is cut into other
epochs. It is found in the code's Spark plan, and each warning is logged once.

Spark runs a task again when its worker died, when shuffle files are lost, or by speculation. State is taken from one
attempt and output from one, but another attempt may have computed the rows between two operators. With `rand()` or the
time of day in that code, state and output then silently disagree.
"""

from __future__ import annotations

import logging
import re

from pyspark.sql import DataFrame

from state_runtime.spark.plans import expressions_in, kinds_above

__all__ = ["cut_by_epochs", "unrepeatable_columns", "warn_if_cut_by_epochs", "warn_if_unrepeatable"]

_LOG = logging.getLogger(__name__)
# Spark fixes these for one query and counts them as deterministic; an epoch that runs again gets other values.
_CLOCKS = re.compile(r"\b(current_timestamp|now|localtimestamp|current_date|current_time)\(")
# Operations that see the rows of one epoch only, although users expect more.
_CUT = {
    "Aggregate": "groupBy",
    "FlatMapGroupsInPandas": "groupBy",
    "FlatMapGroupsInArrow": "groupBy",
    "GlobalLimit": "limit",
    "Sort": "orderBy",
    "Window": "window functions",
    "Deduplicate": "distinct",
    "Distinct": "distinct",
}
_NAME = re.compile(r" AS ([^#]+)#\d+L?\Z")


def warn_if_unrepeatable(frame: DataFrame, where: str) -> None:
    """Log a warning if a step of the pipeline is not repeatable.

    Args:
        frame: the frame that the step made of an empty frame.
        where: the step, for the message.
    """
    columns = unrepeatable_columns(frame)
    if columns:
        _LOG.warning(
            "%s gives other rows when Spark repeats a task or an epoch: %s. State and output may then disagree. Take "
            "random numbers from a hash of the row (`xxhash64`), and the time from the source or from the operator's "
            "own clock",
            where,
            ", ".join(columns),
        )


def warn_if_cut_by_epochs(given: DataFrame, made: DataFrame, where: str) -> None:
    """Log a warning if a step's result depends on where one epoch ends and the next begins."""
    if found := cut_by_epochs(given, made):
        _LOG.warning(
            "%s uses %s, which sees the rows of one epoch at a time: the result depends on how the stream is cut into "
            "epochs, unless an operator behind it puts the parts together. What must hold over the whole stream is "
            "state: aggregate, deduplicate, latest_by, a window, a processor",
            where,
            ", ".join(found),
        )


def cut_by_epochs(given: DataFrame, made: DataFrame) -> list[str]:
    """Return operations on the stream's rows (not on static tables) that are only correct over all rows.

    Args:
        given: the step's input, without rows.
        made: the frame that the step made of it.
    """
    return sorted({_CUT[kind] for kind in kinds_above(given, made) if kind in _CUT})


def unrepeatable_columns(frame: DataFrame) -> list[str]:
    """Return the columns whose expressions Spark calls non-deterministic, or that read a clock; "a condition" stands
    for an expression without a name. Python functions count as repeatable unless they were declared otherwise
    (`asNondeterministic`)."""
    found: set[str] = set()
    for text, is_deterministic in expressions_in(frame):
        if not is_deterministic or _CLOCKS.search(text):
            name = _NAME.search(text)
            found.add(f"column {name[1]!r}" if name else "a condition")
    return sorted(found)
