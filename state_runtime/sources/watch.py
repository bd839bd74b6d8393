"""Asks a run's sources beside the run, so that its heartbeat says how far it is behind, and that one is away.

A source that does not answer holds up Spark's query, and the query then says nothing at all.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from state_runtime.base.clock import Clock
from state_runtime.base.errors import StillstateError
from state_runtime.base.source_state import SourceState
from state_runtime.sources.source_lag import SourceLag, belonging

__all__ = ["SourceWatch", "offsets_in", "opened_lags", "remember_opened"]

_LOG = logging.getLogger(__name__)
_EVERY_S: Final = 5.0
_JOIN_S: Final = 2.0
"""A run that ends does not wait for a source that is away."""
_HEADER_LINES: Final = 2

_OPENED: dict[str, Callable[[], SourceLag]] = {}
"""Of the sources that this process has opened, by what they read and from where: how each is asked. The newest is the
last."""


def remember_opened(source: str, ask: Callable[[], SourceLag]) -> None:
    """Remember how a source is asked that was opened just now.

    Args:
        source: what it reads, and from where.
    """
    _OPENED.pop(source, None)
    _OPENED[source] = ask


def opened_lags() -> list[SourceLag]:
    """Return what asks the sources that this process has opened, the newest last.

    One that cannot be asked any more, because a variable with its secret is gone, may be that of another job: no run
    ends for it.
    """
    found = []
    for source, make in _OPENED.items():
        try:
            found.append(make())
        except StillstateError as error:
            _LOG.info("%s is not asked how far a job is behind: %s", source, error)
    return found


def offsets_in(offsets: Iterable[Any]) -> list[Any]:
    """Return the positions of sources, each given as JSON or as what it says. What is none is None."""
    return [_parsed(offset) if isinstance(offset, str) else offset for offset in offsets]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class SourceWatch:
    """A thread that asks each source every few seconds, from `follow` on until `close`.

    Args:
        opened: returns what asks the sources; called by `follow`.
    """

    def __init__(self, opened: Callable[[], Sequence[SourceLag]], clock: Clock) -> None:
        self._opened = opened
        self._lags: Sequence[SourceLag] = ()
        self._clock = clock
        self._over = threading.Event()
        self._folders: Sequence[SourceLag | None] = ()
        self._thread: threading.Thread | None = None
        self._states: tuple[SourceState, ...] = ()

    @property
    def states(self) -> tuple[SourceState, ...]:
        """What is known of the sources that the run reads."""
        return self._states

    def follow(self, progress: Callable[[], Any], begun: str, folders: Sequence[SourceLag | None] = ()) -> None:
        """Begin.

        Args:
            progress: returns Spark's newest document about the query's progress; None if there is none yet.
            begun: the text of Spark's file of offsets, of the snapshot that the run goes on from, as Spark reads it.
            folders: of all of the run's sources, in Spark's order, what asks those whose positions do not say what they
                are of; None: any other source.
        """
        self._lags, self._folders = self._opened(), folders
        if self._lags or any(folders):
            self._thread = threading.Thread(
                target=self._loop,
                args=(progress, offsets_in(begun.split("\n")[_HEADER_LINES:])),
                name="stillstate-sources",
                daemon=True,
            )
            self._thread.start()

    def _loop(self, progress: Callable[[], Any], begun: Sequence[Any]) -> None:
        while True:
            try:
                read = progress()
                self.look(begun if read is None else offsets_in(source.endOffset for source in read.sources))
            except Exception:
                # Its numbers are for people: whatever goes wrong with them must not end the run.
                _LOG.warning("the sources could not be asked how far the job is behind", exc_info=True)
            if self._over.wait(_EVERY_S):
                return

    def look(self, offsets: Sequence[Any]) -> None:
        """Ask each source once that the run reads; see `belonging`.

        Args:
            offsets: of the run's sources, in Spark's order; None: not known yet.
        """
        mine = self._of_folders(offsets) + self._of_others(offsets)
        self._states = tuple(lag.look(offset, self._clock.now_ms()) for lag, offset in mine)

    def _of_folders(self, offsets: Sequence[Any]) -> list[tuple[SourceLag, Any | None]]:
        if len(offsets) not in (0, len(self._folders)):
            return []  # which position is whose is not known
        placed = zip(self._folders, offsets or [None] * len(self._folders), strict=True)
        return [(lag, at) for lag, at in placed if lag is not None and (at is None or lag.reads(at))]

    def _of_others(self, offsets: Sequence[Any]) -> list[tuple[SourceLag, Any | None]]:
        if self._folders and all(self._folders):
            return []
        if len(offsets) == len(self._folders):
            offsets = [at for lag, at in zip(self._folders, offsets, strict=True) if lag is None]
        return belonging(self._lags, offsets)

    def close(self) -> None:
        """End. A question that is under way ends with the process: it writes nothing."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            if not self._thread.is_alive():
                for lag in (*self._lags, *filter(None, self._folders)):
                    lag.close()
