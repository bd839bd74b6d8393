"""Whether a run's source is quiet: it was asked, and had nothing."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["SourceQuiet", "is_idle"]


class Query(Protocol):
    """What is read of Spark's streaming query."""

    @property
    def status(self) -> Any: ...

    @property
    def lastProgress(self) -> Any: ...


def is_idle(query: Query) -> bool:
    """Whether Spark neither works on a batch nor knows of data for one: then an epoch of our own is in nobody's way.

    A query that has only just started says so too, before it has looked for data.
    """
    status = query.status
    return not status["isTriggerActive"] and not status["isDataAvailable"]


class SourceQuiet:
    """The verdict on one query, for the heartbeat. It is certain: a source that does not answer is never called quiet.

    Spark asks the source in each of its triggers, and has progress to show once the first has ended. Until then
    nobody has asked. From then on what Spark says of data is what the source has answered last.
    """

    def __init__(self, query: Query) -> None:
        self._query = query
        self._was_asked = False

    def __call__(self) -> bool:
        # Progress is a document that Python decodes: it is read until it is there, and never again.
        self._was_asked = self._was_asked or self._query.lastProgress is not None
        return self._was_asked and is_idle(self._query)
