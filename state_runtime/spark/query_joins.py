"""Joins of two streams in a plan: what must be equal, how far apart in time rows may be, and what else must hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from state_runtime.base.errors import InvalidPipeline
from state_runtime.base.joining import UNBOUNDED_US, Column, Combined, Compared, Condition, How, JoinTerms, SideName
from state_runtime.spark.catalyst import WINDOW_END, Catalyst, id_of, is_marked, is_window
from state_runtime.spark.jvm import items, kind_of
from state_runtime.spark.query_text import Texts, digest_of

__all__ = ["Bounds", "PairConditions", "bounds_of", "check_is_bounded"]

# A watermark for which Spark is asked; its answer is this one, moved.
_WATERMARK_MS: Final = 10**13
_KINDS: Final[Mapping[str, How]] = {
    "Inner": "inner",
    "LeftOuter": "left-outer",
    "RightOuter": "right-outer",
    "FullOuter": "full-outer",
    "LeftSemi": "left-semi",
}
_STRICT: Final = frozenset({"LessThan", "GreaterThan"})
_INCLUSIVE: Final = frozenset({"LessThanOrEqual", "GreaterThanOrEqual"})


@dataclass(frozen=True)
class Bounds:
    """What a join asks for.

    Attributes:
        keys: pairwise equal expressions of the left side and of the right one.
        times: the event times of both sides; None: the side has none.
        terms: without the conditions beside keys and range.
        held_back_ms: how far Spark's watermark behind the join is behind that of its inputs.
        condition: of an inner join, to be looked at once more for each pair of rows; None if keys and range say all.
        others: of other joins, the conditions beside keys and range.
    """

    terms: JoinTerms
    keys: tuple[Sequence[Any], Sequence[Any]]
    times: tuple[Any, Any]
    held_back_ms: int
    condition: Any
    others: tuple[Any, ...]


def bounds_of(catalyst: Catalyst, join: Any) -> Bounds:
    """Return what a join of two streams asks for.

    Raises:
        InvalidPipeline: it is of a kind that is not supported, or has no equal keys.
    """
    asked = str(join.joinType())
    how = _KINDS.get(asked)
    if how is None:
        raise InvalidPipeline(f"a {asked} join of two streams is not supported; there are {', '.join(_KINDS.values())}")
    keys = catalyst.equal_keys(join)
    if keys is None:
        raise InvalidPipeline(f"a join of two streams needs columns that must be equal, and {_told(join)} has none")
    left_keys, right_keys, rest = keys
    sides = items(join.children())
    times: tuple[Any, Any] = (_time_of(sides[0]), _time_of(sides[1]))
    # Equal times bound both sides; a range beside them is one more condition.
    same = [pair for pair in zip(left_keys, right_keys, strict=True) if any(map(_is_time, pair))]
    found = [None if same else _bound(catalyst, sides, part) for part in rest]
    others = tuple(part for part, bound in zip(rest, found, strict=True) if bound is None)
    ranges = [part for part, bound in zip(rest, found, strict=True) if bound is not None]
    lowest = [at for side, at in filter(None, found) if side == "lower"]
    highest = [at for side, at in filter(None, found) if side == "upper"]
    lower_us, upper_us = max(lowest, default=-UNBOUNDED_US), min(highest, default=UNBOUNDED_US)
    if same:
        lower_us, upper_us, times = 0, 0, same[0]
    condition = join.condition().get() if how == "inner" and others else None
    left, right = (catalyst.field_of(t, WINDOW_END) if t is not None and is_window(t) else t for t in times)
    terms = JoinTerms(
        how=how,
        lower_us=lower_us,
        upper_us=upper_us,
        has_equal_times=bool(same),
        undated=_undated(same[0]) if same else None,
    )
    return Bounds(
        terms=terms,
        keys=(left_keys, right_keys),
        times=(left, right),
        held_back_ms=_held_back_ms(catalyst, sides, catalyst.all_of(ranges)) if ranges else 0,
        condition=condition,
        others=() if how == "inner" else others,
    )


def check_is_bounded(bounds: Bounds, join: Any) -> None:
    """Refuse a join that keeps rows for ever.

    Raises:
        InvalidPipeline: it does; the message says how to bound it.
    """
    endless = [side for side in _SIDES if bounds.terms.stays_ms(side) is None]
    if endless:
        raise InvalidPipeline(
            f"a join of two streams by {_told(join)} has no bound in time: rows of its {' and '.join(endless)} side "
            "would be kept for ever. Say how far apart the event times (withWatermark) of two rows may be, as in "
            "paid_at BETWEEN at AND at + INTERVAL 1 HOUR, or join on windows that are equal; or, if it is meant so, "
            "allow_unbounded=True"
        )


class PairConditions:
    """Conditions of an outer or semi join beside its keys and range, taken apart: what says something of one side alone
    becomes a column of that side, and the rest compares such columns.

    Attributes:
        columns: expressions that each side's rows need, by the names of their columns.
        terms: those of the join, with its conditions.
    """

    def __init__(self, catalyst: Catalyst, texts: Texts, join: Any, bounds: Bounds) -> None:
        self._catalyst = catalyst
        self._texts = texts
        self._ids = [frozenset(map(id_of, items(side.output()))) for side in items(join.children())]
        self.columns: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        alone: tuple[list[Any], list[Any]] = ([], [])
        pairs = []
        for part in bounds.others:
            side = self._side_of(part)
            if side is not None and bounds.terms.is_outer(_SIDES[side]):
                alone[side].append(part)
            else:
                pairs.append(self._condition(part))
        condition = None if not pairs else pairs[0] if len(pairs) == 1 else Combined("and", tuple(pairs))
        left, right = (
            self._column(side, catalyst.all_of(parts)) if parts else None for side, parts in enumerate(alone)
        )
        when = (left.name if left else "", right.name if right else "")
        self.terms = replace(bounds.terms, condition=condition, when=when)

    def _side_of(self, expression: Any) -> int | None:
        """Return the side whose columns are all that an expression reads; None if it reads both or draws numbers."""
        read = {id_of(each) for each in items(expression.references().toSeq())}
        if not expression.deterministic():
            return None
        return next((side for side, ids in enumerate(self._ids) if read <= ids), None)

    def _column(self, side: int, expression: Any) -> Column:
        name = f"{'lr'[side]}_if_{digest_of(self._texts.of(expression))}_{len(self.columns[side])}"
        self.columns[side][name] = expression
        return Column(_SIDES[side], name)

    def _condition(self, expression: Any) -> Condition:
        side = self._side_of(expression)
        if side is not None:
            return self._column(side, expression)
        kind = kind_of(expression)
        parts = items(expression.children())
        if kind in _COMBINED:
            return Combined(_COMBINED[kind], tuple(map(self._condition, parts)))
        sides = [self._side_of(part) for part in parts]
        if kind in _COMPARED and None not in sides and _type_name(parts[0]) in _COMPARABLE:
            first, second = (self._column(at or 0, part) for at, part in zip(sides, parts, strict=True))
            return Compared(_COMPARED[kind], first, second)
        raise InvalidPipeline(
            f"the condition {expression.sql()} of an outer or semi join of two streams is not supported beside equal "
            "columns and a range of time: there it may compare (=, <, <=, >, >=, <=>, with AND, OR, NOT) what comes of "
            "one side with what comes of the other. Filter a side before the join, or join inner"
        )


_SIDES: Final[tuple[SideName, SideName]] = ("left", "right")
_COMBINED: Final = {"And": "and", "Or": "or", "Not": "not"}
_COMPARED: Final = {
    "EqualTo": "=",
    "EqualNullSafe": "<=>",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
}
_COMPARABLE: Final = frozenset(
    {"byte", "short", "integer", "long", "float", "double", "decimal", "string", "binary", "boolean", "date"}
    | {"timestamp", "timestamp_ntz"}
)


def _type_name(expression: Any) -> str:
    return str(expression.dataType().typeName()).partition("(")[0]


def _told(join: Any) -> str:
    return str(join.condition().get().sql()) if join.condition().isDefined() else "its conditions"


def _undated(pair: tuple[Any, Any]) -> SideName | None:
    """Return the side whose key carries no event time. It is removed by that of the other side, as in Spark."""
    left, right = map(_is_time, pair)
    return None if left and right else "right" if left else "left"


def _is_time(key: Any) -> bool:
    return kind_of(key) == "AttributeReference" and is_marked(key)


def _time_of(side: Any) -> Any:
    """Return a side's column with event time; None if it has none."""
    found = [column for column in items(side.output()) if is_marked(column)]
    if len(found) > 1:
        names = ", ".join(str(column.name()) for column in found)
        raise InvalidPipeline(
            f"each side of a join of two streams may have one column with event time, and one has {names}; select the "
            "one that the condition is about"
        )
    return found[0] if found else None


def _bound(catalyst: Catalyst, sides: Sequence[Any], condition: Any) -> tuple[str, int] | None:
    """Return the bound that a condition sets to the right time minus the left one, in microseconds, both ends
    included: ("lower" or "upper", bound); None if it sets none."""
    kind = kind_of(condition)
    if kind not in _STRICT | _INCLUSIVE:
        return None
    marked = [[column for column in items(side.output()) if is_marked(column)] for side in sides]
    times = {id_of(column) for columns in marked for column in columns}
    if not all(marked) or {id_of(each) for each in items(condition.references().toSeq())} != times:
        # Of both times only. Spark's helper takes `amount > 20` for a time, too: its rows then wait for ever.
        return None
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
    """Return how far Spark's watermark behind a join is behind that before it: as long as rows of a side are kept.

    Args:
        condition: its range of time.
    """
    marked = [[column for column in items(side.output()) if is_marked(column)] for side in sides]
    kept = [
        catalyst.watermark_of_state(own.output(), others, condition, _WATERMARK_MS)
        for own, others in ((sides[0], marked[1]), (sides[1], marked[0]))
    ]
    return max([0, *(_WATERMARK_MS - each for each in kept if each is not None)])
