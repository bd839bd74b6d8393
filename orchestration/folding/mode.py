"""Which tables a fold gives a new base, as the command line and Dagster take it."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["FoldMode"]


class FoldMode(StrEnum):
    """Both want an enum; its values are those of `state_runtime.materialize.plan.Mode`.

    Attributes:
        auto: those parts of a state whose changes have grown large.
        minor: none.
        major: all.
    """

    auto = "auto"
    minor = "minor"
    major = "major"
