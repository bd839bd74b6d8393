"""Many looks in parallel, each in a separate thread with a deadline; the thin edge around `Admission`.

A look that hangs is abandoned. Its thread is a daemon: it holds a place of its store, a socket and the data read so
far, but no lock and no worker of Dagster's, and neither a tick nor the end of the interpreter waits for it. If its
result ever comes, it is dropped.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, TypeVar

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.errors import StillstateError, StoreRefused, Unavailable
from stillstate.orchestration.probes.admission import Admission, Ticket
from stillstate.orchestration.text import time_text

__all__ = ["NAMES_MAX", "NOT_SEEN", "SHARED_POOL", "NoLook", "ProbePool", "Task", "troubles"]

T = TypeVar("T")

NOT_SEEN: Final = "not seen"
"""The health of a job that could not be seen, for people and metrics."""
NAMES_MAX: Final = 10
"""Every tick is stored with its text."""
HANGING_MAX: Final = 2
"""Looks at one thing whose threads still hang; no further one begins. So one job's hanging folder does not take all
places of a store that answers the other jobs."""
SHARE_S: Final = 2.0
"""Sensors that tick together share one look; a later tick looks again."""


@dataclass(frozen=True, kw_only=True)
class Task(Generic[T]):
    """Something to read from a store.

    Attributes:
        key: names it; tasks with the same key at the same time are read once.
        store: whose breaker and places it takes (`store_id`).
        shown: the store for messages.
        read: reads the store and nothing else; called in another thread.
        is_shared: requests that follow soon get the same outcome.
    """

    key: str
    store: str
    shown: str
    read: Callable[[], T]
    is_shared: bool = False


@dataclass(frozen=True)
class NoLook:
    """Why a look has no result.

    Attributes:
        why: `away`: the store does not answer (now, or lately: then it was not asked). `not-reached`: the round's time
            was up first. `failed`: the store answered with an error.
        away_s: for how long this process has had no answer of the store; it may have been unavailable for longer.
        store: which, for people; empty if only the job has a trouble.
    """

    why: Literal["away", "not-reached", "failed"]
    error: StillstateError
    away_s: float = 0.0
    store: str = ""


def troubles(found: Mapping[str, object]) -> list[str]:
    """Return one line for each store that does not answer, with its jobs, and one for each job with a trouble."""
    unseen = [(job, outcome) for job, outcome in found.items() if isinstance(outcome, NoLook)]
    jobs: dict[str, list[str]] = {}
    for job, no_look in unseen:
        jobs.setdefault(no_look.store or job, []).append(job)
    first = {no_look.store or job: no_look for job, no_look in reversed(unseen)}
    return [f"{_names(names)}: {first[place].error}" for place, names in jobs.items()]


def _names(jobs: Sequence[str]) -> str:
    more = len(jobs) - NAMES_MAX
    return ", ".join(jobs[:NAMES_MAX]) + (f" and {more} more" if more > 0 else "")


@dataclass(eq=False)
class _Flight:
    """One look under way, or just ended."""

    task: Task[Any]
    ticket: Ticket
    until_s: float
    ended_s: float | None = None
    outcome: Any = None


@dataclass
class _Round:
    waiting: deque[Task[Any]]
    ends_s: float
    flights: dict[str, _Flight] = field(default_factory=dict)
    outcomes: dict[str, Any] = field(default_factory=dict)


class ProbePool:
    """Makes the looks of all sensors of a process.

    Args:
        clock: for deadlines; waiting uses a condition variable of the machine.
        share_s: a shared outcome younger than this is reused for the next request.
    """

    def __init__(
        self, *, clock: Clock = SYSTEM_CLOCK, traffic: Admission | None = None, share_s: float = SHARE_S
    ) -> None:
        self._clock = clock
        self._traffic = traffic or Admission()
        self._share_s = share_s
        self._changed = threading.Condition()
        self._flights: dict[str, _Flight] = {}
        self._hanging: Counter[str] = Counter()

    def look(self, tasks: Sequence[Task[T]], *, timeout_s: float, budget_s: float) -> dict[str, T | NoLook]:
        """Return the result of each task, by its key; the first tasks begin first.

        Args:
            timeout_s: for each, from its beginning.
            budget_s: for all of them.
        """
        with self._changed:
            now_s = self._clock.monotonic_s()
            self._forget(now_s)
            this = _Round(deque(tasks), now_s + budget_s)
            while True:
                self._give_up_late_ones(now_s)
                self._collect(this)
                self._begin(this, now_s, timeout_s)
                if not this.flights and not this.waiting:
                    return this.outcomes
                if now_s >= this.ends_s:
                    self._cut_off(this, budget_s)
                    return this.outcomes
                self._changed.wait(max(0.0, self._next_change_s(this, now_s) - now_s))
                now_s = self._clock.monotonic_s()

    def away_s(self, store: str) -> float:
        """Return for how many seconds a store has not answered; 0 if it answers."""
        with self._changed:
            return self._traffic.away_s(store, self._clock.monotonic_s())

    def _begin(self, this: _Round, now_s: float, timeout_s: float) -> None:
        for _ in range(len(this.waiting)):
            task = this.waiting.popleft()
            flight = self._flights.get(task.key)
            if flight is not None:  # another sensor's look, under way or young enough
                this.flights[task.key] = flight
                continue
            if self._hanging[task.key] >= HANGING_MAX:
                this.outcomes[task.key] = self._still_hangs(task, now_s)
                continue
            ask = self._traffic.ask(task.store, now_s)
            if ask == "wait":
                this.waiting.append(task)
            elif ask == "away":
                this.outcomes[task.key] = self._not_asked(task, now_s)
            else:
                flight = _Flight(task, self._traffic.begin(task.store, now_s), now_s + timeout_s)
                this.flights[task.key] = self._flights[task.key] = flight
                self._take_off(flight, now_s)
        self._collect(this)

    def _take_off(self, flight: _Flight, now_s: float) -> None:
        try:
            threading.Thread(target=self._fly, args=(flight,), name=f"look {flight.task.key}", daemon=True).start()
        except RuntimeError as error:  # no threads left on this machine
            self._traffic.ended(flight.ticket, now_s, answered=True)
            flight.outcome, flight.ended_s = NoLook("not-reached", Unavailable(f"cannot look: {error}")), now_s

    def _fly(self, flight: _Flight) -> None:
        answered = True
        try:
            outcome = flight.task.read()
        except StoreRefused as error:
            outcome = NoLook("failed", error)
        except Unavailable as error:
            answered, outcome = False, NoLook("away", error)
        except StillstateError as error:
            outcome = NoLook("failed", error)
        except Exception as error:  # one job's unexpected error must not end the tick of the others
            trouble = StillstateError(f"looking at {flight.task.key} broke: {type(error).__name__}; report this")
            trouble.__cause__ = error  # its text may repeat a secret
            outcome = NoLook("failed", trouble)
        with self._changed:
            now_s = self._clock.monotonic_s()
            self._traffic.ended(flight.ticket, now_s, answered=answered)
            if flight.ticket.is_abandoned:
                self._hanging[flight.task.key] -= 1
            else:
                if not answered:
                    away_s = self._traffic.away_s(flight.task.store, now_s)
                    outcome = NoLook("away", outcome.error, away_s, flight.task.shown)
                flight.outcome, flight.ended_s = outcome, now_s
            self._changed.notify_all()

    def _give_up_late_ones(self, now_s: float) -> None:
        for flight in self._flights.values():
            if flight.ended_s is None and now_s >= flight.until_s:
                self._traffic.abandon(flight.ticket, now_s)
                self._hanging[flight.task.key] += 1
                store = flight.task.store
                limit_s = flight.until_s - flight.ticket.began_s
                again = self._asked_again(store, now_s) or "at the next tick"
                error = Unavailable(
                    f"{flight.task.shown} has not answered within {limit_s:g} s; it is asked again {again}"
                )
                flight.outcome = NoLook("away", error, self._traffic.away_s(store, now_s), flight.task.shown)
                flight.ended_s = now_s
                self._changed.notify_all()

    def _collect(self, this: _Round) -> None:
        for key in [key for key, flight in this.flights.items() if flight.ended_s is not None]:
            this.outcomes[key] = this.flights.pop(key).outcome

    def _cut_off(self, this: _Round, budget_s: float) -> None:
        """Leave looks that are still under way running; the next round finds them."""
        error = Unavailable(f"the {budget_s:g} s of this tick were over before its turn came; it is next")
        for key in [*this.flights, *(task.key for task in this.waiting)]:
            this.outcomes[key] = NoLook("not-reached", error, store="not reached")

    def _still_hangs(self, task: Task[Any], now_s: float) -> NoLook:
        error = Unavailable(f"{task.shown} has not answered; {HANGING_MAX} earlier looks at it still hang")
        return NoLook("away", error, self._traffic.away_s(task.store, now_s), task.shown)

    def _not_asked(self, task: Task[Any], now_s: float) -> NoLook:
        away_s = self._traffic.away_s(task.store, now_s)
        again = self._asked_again(task.store, now_s)
        why = f"it is asked again {again}" if again else "earlier looks at it still hang"
        error = Unavailable(f"{task.shown} does not answer; {why}")
        return NoLook("away", error, away_s, task.shown)

    def _asked_again(self, store: str, now_s: float) -> str:
        """Return the time of day of the next request, because the text is shown long after. Empty: at the next look."""
        wait_s = self._traffic.next_look_s(store, now_s)
        return f"at {time_text(self._clock.now_ms() + round(wait_s * 1000))}" if wait_s else ""

    def _next_change_s(self, this: _Round, now_s: float) -> float:
        moments = [this.ends_s, *(flight.until_s for flight in this.flights.values())]
        if this.waiting:
            moments.append(self._traffic.changes_at_s(now_s))
            # Looks of other rounds may hold the places that this round waits for.
            moments += [flight.until_s for flight in self._flights.values() if flight.ended_s is None]
        return min(moments)

    def _forget(self, now_s: float) -> None:
        for key, flight in list(self._flights.items()):
            if flight.ended_s is None:
                continue
            if not flight.task.is_shared or now_s - flight.ended_s >= self._share_s:
                del self._flights[key]


SHARED_POOL: Final = ProbePool()
"""The pool of the process: breakers and hanging threads outlive ticks, and are shared by sensors."""
