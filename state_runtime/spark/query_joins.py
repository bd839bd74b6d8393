"""Joins of two streams in a plan: what must be equal, and how far apart in time rows may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from state_runtime.base.errors import InvalidPipeline
from state_runtime.spark.catalyst import WINDOW_END, Catalyst, is_marked, is_window
from state_runtime.spark.jvm import items, kind_of

__all__ = ["Bounds", "bounds_of"]

# A watermark for which Spark is asked; its answer is this one, moved.
_WATERMARK_MS: Final = 10**13
_KINDS: Final = {"Inner": "inner", "LeftOuter": "left-outer"}
_STRICT: Final = frozenset({"LessThan", "GreaterThan"})
_INCLUSIVE: Final = frozenset({"LessThanOrEqual", "GreaterThanOrEqual"})
_UNBOUNDED: Final = (
    "rows of both sides would have to be kept for ever. Say how far apart the event times of two rows may be, as in "
    "paid_at BETWEEN at AND at + INTERVAL 1 HOUR, or join on windows that are equal"
)


@dataclass(frozen=True)
class Bounds:
    """What a join asks for.

    Attributes:
        keys: pairwise equal expressions of the left side and of the right one.
        times: the event times of both sides.
        held_back_ms: how far Spark's watermark behind the join is behind that of its inputs.
        condition: to be looked at once more for each pair of rows; None if keys and range say all.
    """

    how: Literal["inner", "left-outer"]
    keys: tuple[Sequence[Any], Sequence[Any]]
    times: tuple[Any, Any]
    lower_us: int
    upper_us: int
    held_back_ms: int
    condition: Any


def bounds_of(catalyst: Catalyst, join: Any) -> Bounds:
    """Return what a join of two streams asks for.

    Raises:
        InvalidPipeline: it is of a kind that is not supported, has no equal keys, or no bound in time.
    """
    asked = str(join.joinType())
    how = _KINDS.get(asked)
    if how is None:
        raise InvalidPipeline(f"a {asked} join of two streams is not supported; there are inner and left outer ones")
    keys = catalyst.equal_keys(join)
    if keys is None:
        raise InvalidPipeline(f"a join of two streams needs columns that must be equal, and {_told(join)} has none")
    left_keys, right_keys, rest = keys
    whole = join.condition().get() if join.condition().isDefined() else None
    sides = items(join.children())
    found = [_bound(catalyst, sides, part) for part in rest]
    lowest = [at for side, at in filter(None, found) if side == "lower"]
    highest = [at for side, at in filter(None, found) if side == "upper"]
    residual = [str(part.sql()) for part, bound in zip(rest, found, strict=True) if bound is None]
    if residual and how != "inner":
        raise InvalidPipeline(
            f"a left outer join of two streams by {' and '.join(residual)} beside equal columns and a range of time is "
            "not supported; filter a side before the join, or join inner"
        )
    same = [(left, right) for left, right in zip(left_keys, right_keys, strict=True) if _are_times(left, right)]
    if lowest and highest:
        lower_us, upper_us = max(lowest), min(highest)
        times = tuple(_time_of(side) for side in sides)
    elif same:
        lower_us = upper_us = 0
        times = same[0]
    else:
        raise InvalidPipeline(f"a join of two streams by {_told(join)} has no bound in time: {_UNBOUNDED}")
    left, right = (catalyst.field_of(t, WINDOW_END) if is_window(t) else t for t in times)
    made: Any = how
    return Bounds(
        how=made,
        keys=(left_keys, right_keys),
        times=(left, right),
        lower_us=lower_us,
        upper_us=upper_us,
        held_back_ms=_held_back_ms(catalyst, sides, whole),
        condition=whole if how == "inner" and residual else None,
    )


def _told(join: Any) -> str:
    return str(join.condition().get().sql()) if join.condition().isDefined() else "its conditions"


def _are_times(left: Any, right: Any) -> bool:
    return all(kind_of(key) == "AttributeReference" and is_marked(key) for key in (left, right))


def _time_of(side: Any) -> Any:
    """Return a side's column with event time."""
    found = [column for column in items(side.output()) if is_marked(column)]
    if len(found) != 1:
        names = ", ".join(str(column.name()) for column in found) or "none"
        raise InvalidPipeline(
            f"each side of a join of two streams needs one column with event time, and one has {names}; select the one "
            "that the condition is about"
        )
    return found[0]


def _bound(catalyst: Catalyst, sides: Sequence[Any], condition: Any) -> tuple[str, int] | None:
    """Return the bound that a condition sets to the right time minus the left one, in microseconds, both ends
    included: ("lower" or "upper", bound); None if it sets none."""
    kind = kind_of(condition)
    if kind not in _STRICT | _INCLUSIVE:
        return None
    marked = [[column for column in items(side.output()) if is_marked(column)] for side in sides]
    # Spark forgets one millisecond later if rows of exactly that time may still match.
    exact_ms = 1 if kind in _INCLUSIVE else 0
    for side, own, others in (("upper", sides[0], marked[1]), ("lower", sides[1], marked[0])):
        reached = catalyst.watermark_of_state(own.output(), others, condition, _WATERMARK_MS)
        if reached is None:
            continue
        _check_whole_millis(condition)
        apart_us = (reached + exact_ms - _WATERMARK_MS) * 1000
        inside_us = 0 if kind in _INCLUSIVE else 1
        return (side, -apart_us - inside_us) if side == "upper" else (side, apart_us + inside_us)
    return None


def _check_whole_millis(condition: Any) -> None:
    """Refuse a range that Spark's answer in milliseconds does not tell exactly."""
    for leaf in items(condition.collectLeaves()):
        if kind_of(leaf) == "Literal" and kind_of(leaf.dataType()) == "DayTimeIntervalType" and leaf.value() % 1000:
            raise InvalidPipeline(f"the range of time in {condition.sql()} is not in whole milliseconds")


def _held_back_ms(catalyst: Catalyst, sides: Sequence[Any], condition: Any) -> int:
    """Return how far Spark's watermark behind a join is behind that before it: as long as rows of a side are kept."""
    if condition is None:
        return 0
    marked = [[column for column in items(side.output()) if is_marked(column)] for side in sides]
    kept = [
        catalyst.watermark_of_state(own.output(), others, condition, _WATERMARK_MS)
        for own, others in ((sides[0], marked[1]), (sides[1], marked[0]))
    ]
    return max([0, *(_WATERMARK_MS - each for each in kept if each is not None)])
