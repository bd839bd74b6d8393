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
from state_runtime.sources.kafka_lag import KafkaLag
from state_runtime.sources.kafka_offsets import Positions

__all__ = ["SourceWatch", "opened_lags", "positions_in", "remember_opened"]

_LOG = logging.getLogger(__name__)
_EVERY_S: Final = 5.0
_JOIN_S: Final = 2.0
"""A run that ends does not wait for a broker that is away."""

_OPENED: dict[str, Callable[[], KafkaLag]] = {}
"""Of the sources that this process has opened, by topics and brokers: how each is asked."""


def remember_opened(source: str, ask: Callable[[], KafkaLag]) -> None:
    """Remember how a source is asked that was opened just now.

    Args:
        source: what it reads, and from where.
    """
    _OPENED[source] = ask


def opened_lags() -> list[KafkaLag]:
    """Return what asks the sources that this process has opened.

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


def positions_in(offsets: Iterable[Any]) -> list[Positions]:
    """Return the positions of topics among those of all sources, each as JSON or as what it says."""
    found: list[Positions] = []
    for offset in offsets:
        try:
            found.append(Positions.from_json(json.loads(offset) if isinstance(offset, str) else offset))
        except (StillstateError, ValueError, RecursionError):
            continue
    return found


class SourceWatch:
    """A thread that asks each source every few seconds, from `follow` on until `close`.

    Args:
        opened: returns what asks the sources; called by `follow`.
    """

    def __init__(self, opened: Callable[[], Sequence[KafkaLag]], clock: Clock) -> None:
        self._opened = opened
        self._lags: Sequence[KafkaLag] = ()
        self._clock = clock
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._states: tuple[SourceState, ...] = ()

    @property
    def states(self) -> tuple[SourceState, ...]:
        """What is known of the sources that the run reads."""
        return self._states

    def follow(self, progress: Callable[[], Any], begun: str) -> None:
        """Begin.

        Args:
            progress: returns Spark's newest document about the query's progress; None if there is none yet.
            begun: the text of Spark's file of offsets, of the snapshot that the run goes on from.
        """
        self._lags = self._opened()
        if self._lags:
            self._thread = threading.Thread(
                target=self._loop,
                args=(progress, positions_in(begun.split("\n"))),
                name="stillstate-sources",
                daemon=True,
            )
            self._thread.start()

    def _loop(self, progress: Callable[[], Any], begun: Sequence[Positions]) -> None:
        while True:
            try:
                read = progress()
                self.look(begun if read is None else positions_in(source.endOffset for source in read.sources))
            except Exception:
                # Its numbers are for people: whatever goes wrong with them must not end the run.
                _LOG.warning("the sources could not be asked how far the job is behind", exc_info=True)
            if self._over.wait(_EVERY_S):
                return

    def look(self, positions: Sequence[Positions]) -> None:
        """Ask each source once.

        A process may have opened sources that this run does not read: once positions are known, only those that one
        belongs to are told of.
        """
        states = []
        for lag in self._lags:
            mine = next((position for position in positions if lag.reads(position)), None)
            if mine is not None or not positions:
                states.append(lag.look(mine, self._clock.now_ms()))
        self._states = tuple(states)

    def close(self) -> None:
        """End. A question that is under way ends with the process: it writes nothing."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            if not self._thread.is_alive():
                for lag in self._lags:
                    lag.close()
