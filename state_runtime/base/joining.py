"""What a join of two streams asks, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

__all__ = [
    "CONDITION",
    "UNBOUNDED_US",
    "Column",
    "Combined",
    "Compared",
    "Condition",
    "How",
    "JoinTerms",
    "SideName",
    "columns_of",
]

SideName: TypeAlias = Literal["left", "right"]
How: TypeAlias = Literal["inner", "left-outer", "right-outer", "full-outer", "left-semi"]

UNBOUNDED_US: Final = 1 << 62
"""A range of time that ends there has no end: rows of a side are kept for ever."""

CONDITION: Final = "its condition"
"""In `OperatorEntry.says`: what a join asks beside keys and range, by which stored rows have matched or not."""


@dataclass(frozen=True)
class Column:
    """A column of a side: of any type where it is compared, else a boolean."""

    side: SideName
    name: str


@dataclass(frozen=True)
class Compared:
    """A comparison of two columns of one type.

    Attributes:
        by: "=", "<=>" (equal, or both null), "<", "<=", ">" or ">=".
    """

    by: str
    first: Column
    second: Column


@dataclass(frozen=True)
class Combined:
    """Several conditions.

    Attributes:
        by: "and", "or" or "not".
    """

    by: str
    parts: tuple[Condition, ...]


Condition: TypeAlias = Column | Compared | Combined


@dataclass(frozen=True, kw_only=True)
class JoinTerms:
    """Which rows of two streams with equal keys match, and what is given of them.

    Attributes:
        lower_us, upper_us: the range of `right time - left time`, both ends included, in microseconds; from
            -UNBOUNDED_US, or to UNBOUNDED_US: it has no such end.
        has_equal_times: the range is 0 as the times are keys, and not by a comparison.
        undated: a side whose times carry no event time of their own: its rows are never late.
        condition: on pairs of rows, beside keys and range.
        when: of each side a boolean column; rows for which it is not true match nothing, and do not wait. "": there is
            none.
    """

    how: How
    lower_us: int
    upper_us: int
    has_equal_times: bool = False
    undated: SideName | None = None
    condition: Condition | None = None
    when: tuple[str, str] = ("", "")

    @property
    def has_range(self) -> bool:
        """Times decide which rows match; so a row without a time matches nothing."""
        return self.lower_us != -UNBOUNDED_US or self.upper_us != UNBOUNDED_US

    def is_outer(self, side: SideName) -> bool:
        """Return whether rows of a side without a match are emitted, with nulls for the other side."""
        return self.how in (f"{side}-outer", "full-outer")

    def stays_ms(self, side: SideName) -> int | None:
        """Return how long after its own time a row of a side is removed, in event time; None: never.

        A watermark forgets what is at or below it; by a comparison of times Spark forgets a millisecond later.
        """
        apart_us = self.upper_us if side == "left" else -self.lower_us
        return None if apart_us == UNBOUNDED_US else (0 if self.has_equal_times else 1) - (-apart_us // 1000)


def columns_of(condition: Condition) -> tuple[Column, ...]:
    """Return the columns that a condition reads."""
    if isinstance(condition, Column):
        return (condition,)
    if isinstance(condition, Compared):
        return (condition.first, condition.second)
    return tuple(column for part in condition.parts for column in columns_of(part))
