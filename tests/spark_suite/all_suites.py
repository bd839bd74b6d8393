"""Spark's Scala suites of stateful streaming that are played here."""

from __future__ import annotations

from .cases_aggregation import AGGREGATION
from .cases_deduplication import DEDUPLICATION, WITHIN_WATERMARK
from .cases_event_time import EVENT_TIME
from .cases_join import FULL_OUTER_JOIN, INNER_JOIN, LEFT_SEMI_JOIN, OUTER_JOIN
from .cases_operators import OPERATORS
from .cases_session import SESSIONS
from .stream_test import Suite

__all__ = ["SUITES"]

SUITES: list[Suite] = [
    AGGREGATION,
    DEDUPLICATION,
    WITHIN_WATERMARK,
    INNER_JOIN,
    OUTER_JOIN,
    FULL_OUTER_JOIN,
    LEFT_SEMI_JOIN,
    EVENT_TIME,
    OPERATORS,
    SESSIONS,
]
