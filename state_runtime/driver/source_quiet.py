"""Whether a run's source is quiet (it was asked, and had nothing), and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from state_runtime.base.clock import Clock

__all__ = ["LONG_QUIET_S", "LongQuiet", "SourceQuiet", "is_idle"]

LONG_QUIET_S: Final = 10.0
"""A source that is quiet for this time is considered to have nothing: rows that come every few seconds should first go
through a run that is on trial."""


class Query(Protocol):
    """The parts of Spark's streaming query that are read here."""

    @property
    def status(self) -> Any: ...

    @property
    def lastProgress(self) -> Any: ...


def is_idle(query: Query) -> bool:
    """Return whether Spark neither works on a batch nor knows of data for one: then an epoch of Stillstate disturbs
    nothing.

    A query that has just started returns the same, before it has looked for data.
    """
    status = query.status
    return not status["isTriggerActive"] and not status["isDataAvailable"]


class SourceQuiet:
    """The verdict on one query, for the heartbeat. It is certain: a source that does not answer is never called quiet.

    Spark asks the source in each of its triggers, and has progress to show once the first has ended. Until then the
    source has not been asked. From then on Spark's `isDataAvailable` is the source's last answer.
    """

    def __init__(self, query: Query) -> None:
        self._query = query
        self._was_asked = False

    def __call__(self) -> bool:
        return self.has_nothing() and is_idle(self._query)

    def has_nothing(self) -> bool:
        """Return whether the source had nothing at its last answer. It may be asked again at this moment: a query
        without a trigger asks a hundred times a second, and is seldom seen between two questions."""
        # Progress is a document that Python decodes: it is read until it exists, and never again.
        self._was_asked = self._was_asked or self._query.lastProgress is not None
        return self._was_asked and not self._query.status["isDataAvailable"]


class LongQuiet:
    """Whether a source has had nothing for `LONG_QUIET_S` without a break."""

    def __init__(self, has_nothing: Callable[[], bool], clock: Clock) -> None:
        self._has_nothing = has_nothing
        self._clock = clock
        self._since_s: float | None = None

    def __call__(self) -> bool:
        now_s = self._clock.monotonic_s()
        if not self._has_nothing():
            self._since_s = None
            return False
        self._since_s = now_s if self._since_s is None else self._since_s
        return now_s - self._since_s >= LONG_QUIET_S
