"""A lock that is handed over in the order in which it was asked for."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType

__all__ = ["FairLock"]


class FairLock:
    """Mutual exclusion with turns: whoever gives it back and asks for it again waits until those had it who asked
    meanwhile. (A `threading.Lock` may go to the same thread again and again.) Not reentrant."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._is_held = False

    def __enter__(self) -> FairLock:
        with self._guard:
            if not self._is_held:
                self._is_held = True
                return self
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()  # given back by whoever hands the lock over
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_held = False
