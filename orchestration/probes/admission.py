"""Which look may begin now, and what is known about each store; pure: every call gets the time.

Three bounds, each for a different trouble:

- a store has at most `per_store_max` looks under way, including abandoned ones whose thread still hangs: a store that
never answers holds this many threads, and no more;
- `side_by_side_max` looks work at once, so that hundreds of healthy jobs do not fight for the interpreter. A look that
has taken `slow_s` waits for its store and uses no processor time: it gives its place to another;
- a store whose breaker is open gets no look.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from stillstate.orchestration.probes.circuit_breaker import CircuitBreaker

__all__ = ["Admission", "Ask", "Ticket"]

Ask = Literal["go", "wait", "away"]
"""`wait`: ask again when a look has ended or `Admission.changes_at_s` has come. `away`: not in this round."""

PER_STORE_MAX: Final = 8
SIDE_BY_SIDE_MAX: Final = 16
SLOW_S: Final = 0.5


@dataclass(eq=False)
class Ticket:
    """One look under way."""

    store: str
    began_s: float
    is_probe: bool
    is_abandoned: bool = False


@dataclass
class _Store:
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    tickets: set[Ticket] = field(default_factory=set)


class Admission:
    """The looks of one process. Not safe for threads: `ProbePool` holds a lock around every call."""

    def __init__(
        self,
        *,
        per_store_max: int = PER_STORE_MAX,
        side_by_side_max: int = SIDE_BY_SIDE_MAX,
        slow_s: float = SLOW_S,
    ) -> None:
        self._per_store_max = per_store_max
        self._side_by_side_max = side_by_side_max
        self._slow_s = slow_s
        self._stores: dict[str, _Store] = {}

    def ask(self, store: str, now_s: float) -> Ask:
        """Whether a look at a store may begin."""
        known = self._stores.get(store, _Store())
        state = known.breaker.state(now_s)
        if state == "open":
            return "away"
        if state == "half-open" and known.breaker.is_probing:
            return "wait"
        if len(known.tickets) >= self._per_store_max:
            return "away" if all(ticket.is_abandoned for ticket in known.tickets) else "wait"
        return "wait" if self._working(now_s) >= self._side_by_side_max else "go"

    def begin(self, store: str, now_s: float) -> Ticket:
        """Begin a look; `ask` has just returned `go`."""
        known = self._stores.setdefault(store, _Store())
        ticket = Ticket(store, now_s, known.breaker.state(now_s) == "half-open")
        known.breaker.is_probing = ticket.is_probe
        known.tickets.add(ticket)
        return ticket

    def ended(self, ticket: Ticket, now_s: float, *, answered: bool) -> None:
        """End a look whose thread has ended. If the look was abandoned before, only its place becomes free."""
        known = self._stores[ticket.store]
        known.tickets.discard(ticket)
        if not ticket.is_abandoned:
            if answered:
                known.breaker.answered()
            else:
                known.breaker.failed(now_s, began_s=ticket.began_s, probe=ticket.is_probe)
        if not known.tickets and known.breaker.since_s is None:
            del self._stores[ticket.store]  # nothing to remember

    def abandon(self, ticket: Ticket, now_s: float) -> None:
        """Abandon a look whose time is up; its thread keeps its place until it ends, if ever."""
        ticket.is_abandoned = True
        self._stores[ticket.store].breaker.failed(now_s, began_s=ticket.began_s, probe=ticket.is_probe)

    def away_s(self, store: str, now_s: float) -> float:
        """Return for how many seconds the store has not answered; 0 if it answers."""
        since_s = self._stores.get(store, _Store()).breaker.since_s
        return 0.0 if since_s is None else max(0.0, now_s - since_s)

    def next_look_s(self, store: str, now_s: float) -> float:
        """Return in how many seconds the store is asked again."""
        return max(0.0, self._stores.get(store, _Store()).breaker.open_until_s - now_s)

    def changes_at_s(self, now_s: float) -> float:
        """Return when a look that works now counts as slow; infinite if no look works."""
        moments = (ticket.began_s + self._slow_s for ticket in self._live())
        return min((at_s for at_s in moments if at_s > now_s), default=float("inf"))

    def _working(self, now_s: float) -> int:
        return sum(now_s < ticket.began_s + self._slow_s for ticket in self._live())

    def _live(self) -> Iterable[Ticket]:
        return (ticket for known in self._stores.values() for ticket in known.tickets if not ticket.is_abandoned)
