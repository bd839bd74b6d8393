"""Session windows in a plan: after Spark's analysis they are a struct column, made of a row's time and the gap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from py4j.java_gateway import get_field

from state_runtime.spark.catalyst import WINDOW_END, id_of
from state_runtime.spark.jvm import items, kind_of

__all__ = ["OWN_GAPS", "is_session", "session_gap_us"]

OWN_GAPS: Final = 0
"""Each row has a gap of its own, or one whose length is not fixed."""

_MARK: Final = "spark.sessionWindow"
_DAY_US: Final = 86_400_000_000


def is_session(key: Any) -> bool:
    """Return whether a key is a session window, of this grouping or of one before."""
    return bool(key.metadata().contains(_MARK))


def session_gap_us(key: Any, plan: Any, is_cut: Callable[[Any], bool]) -> int | None:
    """Return the gap of a session window that is made between a grouping and what is cut below it.

    Args:
        key: of the grouping.
        plan: what the grouping reads.

    Returns:
        `OWN_GAPS` if it is not a duration that is the same for all rows. None of any other column: also of the session
        of a grouping before, which has the mark as well.
    """
    if not is_session(key):
        return None
    made = key.child() if kind_of(key) == "Alias" else _made(plan, id_of(key), is_cut)
    if made is None:
        return None
    below = items(made.children())[2 * WINDOW_END + 1 :]  # of a struct: a name, a value, a name, a value
    while len(below) == 1:
        below = items(below[0].children())  # conversions around the sum of time and gap
    return max(_micros(below[1]), OWN_GAPS) if len(below) == 2 and _is_interval(below[1]) else OWN_GAPS


def _made(plan: Any, number: int, is_cut: Callable[[Any], bool]) -> Any:
    """Return the expression of a column that is made in a plan, above its cuts; None if it is made elsewhere."""
    if is_cut(plan):
        return None
    for each in items(plan.expressions()):
        if kind_of(each) == "Alias" and id_of(each) == number:
            child = each.child()
            is_renamed = kind_of(child) == "AttributeReference"
            return _made(items(plan.children())[0], id_of(child), is_cut) if is_renamed else child
    return next(filter(None, (_made(child, number, is_cut) for child in items(plan.children()))), None)


def _is_interval(leaf: Any) -> bool:
    return kind_of(leaf) == "Literal" and "interval" in str(leaf.dataType().catalogString())


def _micros(leaf: Any) -> int:
    """Return how long an interval is; 0 if that is not fixed."""
    value = leaf.value()
    if isinstance(value, int):
        return value
    if value is None or get_field(value, "months"):
        return 0
    return int(get_field(value, "microseconds")) + int(get_field(value, "days")) * _DAY_US
