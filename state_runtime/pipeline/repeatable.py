"""Stateless code that gives other rows when it is run again: found in its plan, and said once.

Spark runs a task again when its worker died, when shuffle files are lost, or by speculation. State is taken from one
attempt and output from one, but what stands between two operators may have been computed by another: with `rand()` in
it, or the time of day, the two no longer agree, and nobody would notice.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from pyspark.sql import DataFrame

__all__ = ["unrepeatable_columns", "warn_if_unrepeatable"]

_LOG = logging.getLogger(__name__)
# Spark fixes these for one query, and counts them as deterministic; an epoch that is run again gets other ones.
_CLOCKS = re.compile(r"\b(current_timestamp|now|localtimestamp|current_date|current_time)\(")
_NAME = re.compile(r" AS ([^#]+)#\d+L?\Z")


def warn_if_unrepeatable(frame: DataFrame, where: str) -> None:
    """Log a warning if a step of the pipeline is not repeatable.

    Args:
        frame: what the step made of an empty frame.
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


def unrepeatable_columns(frame: DataFrame) -> list[str]:
    """The columns whose expressions Spark calls non-deterministic, or that read a clock; "a condition" stands for an
    expression without a name. Python functions count as repeatable unless they were declared otherwise
    (`asNondeterministic`)."""
    found: list[str] = []
    nodes = [frame._jdf.queryExecution().analyzed()]
    while nodes:
        node = nodes.pop()
        for expression in _items(node.expressions()):
            text = str(expression.toString())
            if not expression.deterministic() or _CLOCKS.search(text):
                name = _NAME.search(text)
                found.append(f"column {name[1]!r}" if name else "a condition")
        nodes += _items(node.children())
    return sorted(set(found))


def _items(sequence: Any) -> list[Any]:
    """A Scala sequence's."""
    return [sequence.apply(index) for index in range(sequence.size())]
