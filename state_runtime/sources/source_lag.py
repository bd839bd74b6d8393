"""The port of what asks a source beside a job how far the job is behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from state_runtime.base.source_state import SourceState

__all__ = ["SourceLag", "belonging"]


class SourceLag(Protocol):
    """Asks one source; used by one thread, and once `close` is called by none.

    A position is what the source gave to Spark as its offset, parsed from JSON; only the source knows its form.
    """

    def reads(self, offset: Any) -> bool:
        """Return whether a position, of whatever source, is one of this source."""
        ...

    def look(self, offset: Any | None, now_ms: int) -> SourceState:
        """Ask once, and return what is known now. A source that does not answer is no error: it is told as away.

        Args:
            offset: up to where the job has read; None: it has not begun.
        """
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


def belonging(lags: Sequence[SourceLag], offsets: Sequence[Any]) -> list[tuple[SourceLag, Any | None]]:
    """Return which sources a run reads, with the position of each; pure.

    A process may have opened sources that the run does not read. They are told apart by positions: a position belongs
    to one source, of several that could have it to the one that was opened last. Until a position is known, all may be
    the run's.

    Args:
        lags: of all sources that the process has opened, the newest last.
        offsets: of the run's sources, in the order in which they were opened; None: not known yet.
    """
    free = list(reversed(offsets))
    found = []
    for lag in reversed(lags):
        at = next((n for n, offset in enumerate(free) if offset is not None and lag.reads(offset)), None)
        if at is not None:
            found.append((lag, free.pop(at)))
    if not found and (not offsets or None in offsets):
        return [(lag, None) for lag in lags]
    return found[::-1]
