"""The result of a check with a limit; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["CheckName", "Judged"]

CheckName = Literal[
    "replay_time_bounded",
    "rows_on_time",
    "state_growth",
    "savepoint_recent",
    "backlog",
    "source_lag",
    "retention_margin",
]


@dataclass(frozen=True)
class Judged:
    """The result of a check.

    Attributes:
        is_known: whether there was any data to judge; without data nothing has passed.
        numbers: the measured numbers, and the limit, by names with their unit.
        is_warning: whether it is over its limit, and nothing is lost by it yet.
    """

    check: CheckName
    passed: bool
    text: str
    is_known: bool = True
    numbers: Mapping[str, float] = field(default_factory=dict)
    is_warning: bool = False
