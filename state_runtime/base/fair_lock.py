"""A lock that threads get in the order in which they asked for it."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType

__all__ = ["FairLock"]


class FairLock:
    """Mutual exclusion with turns: a thread that releases the lock and asks for it again waits for all threads that
    asked meanwhile. (A `threading.Lock` may go to the same thread again and again.) Not reentrant."""

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
        turn.acquire()  # released by the thread that passes the lock on
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_held = False
