"""What `threading` is to the classes that run beside a driver's epochs: their threads are actors, and take turns as all others do.

So the real classes play, with their own loops and their own order of reads and writes. Nothing here blocks: who waits
gives his turn away, and only a call to a store, a wait and a join are places where that happens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .turns import Actor, Turns, whoever_runs

WAITS_STEPS = 15  # between two looks of somebody who waits
JOINS_MAX = 8


class TurnThreads:
    """In place of the module `threading`, for the actors of one run."""

    def __init__(self, turns: Turns) -> None:
        turns_of_run = turns

        class Thread:
            """An actor of the process of whoever makes it; goes with that process."""

            def __init__(self, target: Callable[..., None], args: tuple[Any, ...] = (), name: str = "", **_: Any):
                owner = whoever_runs()
                main = owner.process or owner
                self._actor = Actor(f"{main.name}: {name}", lambda actor: target(*args), essential=False, process=main)
                self._is_started = False

            def start(self) -> None:
                self._is_started = True
                turns_of_run.add_now(self._actor)

            def is_alive(self) -> bool:
                return self._is_started and not self._actor.done

            def join(self, timeout: float | None = None) -> None:
                for _ in range(JOINS_MAX):
                    if self._actor.done:
                        return
                    turns_of_run.rest(whoever_runs(), WAITS_STEPS)

        class Event:
            def __init__(self) -> None:
                self._is_set = False

            def set(self) -> None:
                self._is_set = True

            def is_set(self) -> bool:
                return self._is_set

            def wait(self, timeout: float | None = None) -> bool:
                if not self._is_set:
                    turns_of_run.rest(whoever_runs(), WAITS_STEPS)
                return self._is_set

        class Lock:
            """Nobody holds one while he calls a store, and nobody else runs between two calls."""

            def __enter__(self) -> Lock:
                return self

            def __exit__(self, *_: object) -> None:
                return

        class Condition(Lock):
            def wait(self, timeout: float | None = None) -> bool:
                turns_of_run.rest(whoever_runs(), WAITS_STEPS)
                return True

            def notify_all(self) -> None:
                return

        self.Thread, self.Event, self.Lock, self.Condition = Thread, Event, Lock, Condition
