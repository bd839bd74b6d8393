"""Actors that take turns: the real, blocking code of each runs in a thread, and only one of them runs at any moment.

An actor may lose its turn before every call to a store. Who goes on, who falls asleep for how long and who is killed is drawn from
one generator, so a seed is a schedule. The turn is handed over by the actor that ends it: one switch of threads, not two.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

STEPS_MAX = 60_000  # sleepers leave many steps out
# How long actors sleep, in steps: a pause of a garbage collector of the JVM, a suspended host, a lost one that comes back.
SLEEPS = (5, 30, 150, 400)


class Killed(BaseException):
    """The actor's process is gone; no handler of its own sees it."""


@dataclass(eq=False)
class Actor:
    """Somebody who calls stores.

    Attributes:
        essential: the run goes on until all of these have ended; the others are killed then.
        mortal: may be killed by chance.
        weight: how often it goes on, beside the others: who makes many calls for one piece of work needs more.
        process: the main thread of the process that it is a thread of; None if it is one.
    """

    name: str
    body: Callable[[Actor], None]
    essential: bool = True
    mortal: bool = True
    weight: int = 1
    asleep_until: int = 0
    done: bool = False
    killed: bool = False
    slept: bool = False
    failure: BaseException | None = None
    go: Any = field(default_factory=threading.Lock)
    memory: dict[str, Any] = field(default_factory=dict)
    process: Actor | None = None

    def is_of(self, other: Actor) -> bool:
        """Whether both are threads of one process."""
        return (self.process or self) is (other.process or other)

    def __post_init__(self) -> None:
        self.go.acquire()


class Turns:
    """One run of all actors.

    Args:
        switch: chance, per call to a store, that somebody else goes on.
        sleep, kill: chances that whoever is to go on falls asleep, or is gone.
        expected: how an actor may end without that being a failure.
    """

    def __init__(
        self, rng: random.Random, *, switch: float, sleep: float, kill: float, expected: tuple[type[BaseException], ...]
    ) -> None:
        self.rng = rng
        self.switch, self.sleep, self.kill = switch, sleep, kill
        self.expected = expected
        self.actors: list[Actor] = []
        self.step = 0
        self.endless = False
        self.frozen = False
        self._over = threading.Lock()
        self._over.acquire()

    def add(self, actor: Actor) -> Actor:
        self.actors.append(actor)
        return actor

    def add_now(self, actor: Actor) -> None:
        """One more, while the others run already."""
        self.add(actor)
        _POOL.start(lambda: self._live(actor))

    def kill_process_of(self, actor: Actor) -> None:
        """All of its threads go at once."""
        for other in self.actors:
            if other.is_of(actor):
                other.killed = True

    def run(self) -> None:
        """Until all essential actors have ended, and then kill the rest."""
        for actor in self.actors:
            _POOL.start(lambda actor=actor: self._live(actor))  # type: ignore[misc]
        self._pass_on(None)
        self._over.acquire()

    def pause(self, actor: Actor) -> None:
        """Called by an actor before each call to a store.

        Raises:
            Killed: its process is gone.
        """
        if self.frozen:
            return  # somebody looks at the stores: nothing happens
        if getattr(_HERE, "actor", None) is not actor:
            # What an actor left suspended is finalized by the interpreter, in whatever thread: that one has no turn to pass on.
            raise Killed
        self.step += 1
        if (
            not actor.killed
            and not self.endless
            and (self.rng.random() < self.switch or actor.asleep_until > self.step)
        ):
            self._pass_on(actor)
        if actor.killed or (actor.mortal and self.kill and self.rng.random() < self.kill):
            self.kill_process_of(actor)
            raise Killed

    def rest(self, actor: Actor, steps: int) -> None:
        """Let others go on for a while; whatever an actor does between two pieces of work takes time."""
        actor.asleep_until = self.step + steps
        self.pause(actor)

    def _drawn(self, ready: list[Actor]) -> Actor:
        place = int(self.rng.random() * sum(a.weight for a in ready))
        for actor in ready:
            place -= actor.weight
            if place < 0:
                return actor
        return ready[-1]

    def _live(self, actor: Actor) -> None:
        _HERE.actor = actor
        actor.go.acquire()
        try:
            if not actor.killed:
                actor.body(actor)
        except (Killed, *self.expected):
            pass
        except BaseException as error:
            actor.failure = error
        actor.done = True
        if actor.process is None:
            self.kill_process_of(actor)  # its threads are daemons
        self._pass_on(None)

    def _pass_on(self, me: Actor | None) -> None:
        """Choose who goes on; return when it is my turn again (at once if I have ended)."""
        chosen = self._choose()
        if chosen is me and me is not None:
            return
        if chosen is None:
            self._over.release()
        else:
            chosen.go.release()
        if me is not None:
            me.go.acquire()

    def _choose(self) -> Actor | None:
        left = [a for a in self.actors if not a.done]
        if not left:
            return None
        if self.step > STEPS_MAX:
            self.endless = True
        if self.endless or not any(a.essential for a in left):
            left[0].killed = True
            return left[0]
        while True:
            ready = [a for a in left if a.asleep_until <= self.step]
            if not ready:
                self.step = min(a.asleep_until for a in left)
                continue
            actor = self._drawn(ready)
            if self.sleep and self.rng.random() < self.sleep:
                actor.asleep_until = self.step + self.rng.choice(SLEEPS)
                actor.slept = True
                kin = [a for a in left if a is not actor and a.is_of(actor)]
                if kin and self.rng.random() < 0.5:
                    for other in kin:  # the whole process, or its host
                        other.asleep_until, other.slept = actor.asleep_until, True
                continue
            return actor


_HERE = threading.local()
_NOBODY = Actor("nobody", lambda actor: None)


def whoever_runs() -> Actor:
    """The actor of the thread that asks."""
    actor: Actor = getattr(_HERE, "actor", _NOBODY)
    return actor


class _Pool:
    """Threads are kept from run to run: making one costs as much as some hundred steps."""

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Callable[[], None]]] = []

    def start(self, call: Callable[[], None]) -> None:
        if not self._idle:
            queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
            threading.Thread(target=self._work, args=(queue,), daemon=True).start()
        else:
            queue = self._idle.pop()
        queue.put(call)

    def _work(self, queue: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            queue.get()()
            self._idle.append(queue)


_POOL = _Pool()
