"""What a join of two streams asks, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

__all__ = ["CONDITION", "UNBOUNDED_US", "Column", "Combined", "Compared", "Condition", "How", "SideName", "columns_of"]

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


def columns_of(condition: Condition) -> tuple[Column, ...]:
    """Return the columns that a condition reads."""
    if isinstance(condition, Column):
        return (condition,)
    if isinstance(condition, Compared):
        return (condition.first, condition.second)
    return tuple(column for part in condition.parts for column in columns_of(part))
