"""The shop's orders and payments, a pure function of their number: every run and every check has the same.

An order comes each second of event time. Most are paid, half a minute to some minutes later, a few too late and some
never. A few customers order much in a short time.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

__all__ = ["BEGIN", "PAID_WITHIN", "events_of", "last_events"]

BEGIN: Final = datetime(2026, 1, 1, tzinfo=UTC)
PAID_WITHIN: Final = timedelta(minutes=10)
_SHOPS: Final = 40
_CUSTOMERS: Final = 5_000
_UNPAID: Final = 13
_TOO_LATE: Final = 17
_TOO_LATE_S: Final = 1_200
_WAITS_S: Final = tuple(range(30, 270, 30))


def events_of(number: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield what happens in a second: topic, key and content, in the order of their event times."""
    at = BEGIN + timedelta(seconds=number)
    mixed = number * 2_654_435_761 % (1 << 32)  # Knuth's multiplicative hash
    eager = number % 100 < 12
    customer = number // 100 % 50 if eager else mixed % _CUSTOMERS
    content = {"order": number, "customer": customer, "shop": mixed % _SHOPS, "amount": 100 + mixed % 9_900}
    yield "orders", number, {**content, "at": at.isoformat()}
    for waited_s in (*_WAITS_S, _TOO_LATE_S):
        paid = number - waited_s
        if paid >= 0 and paid % _UNPAID and _wait_s(paid) == waited_s:
            yield "payments", paid, {"paid_order": paid, "method": "card", "paid_at": at.isoformat()}


def _wait_s(order: int) -> int:
    """Return how long after an order it is paid."""
    return _TOO_LATE_S if order % _TOO_LATE == 0 else _WAITS_S[order % len(_WAITS_S)]


def last_events(number: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield events of the day after, which close what is open; nobody pays them."""
    at = BEGIN + timedelta(seconds=number, days=1)
    for offset in range(2):
        order = {"order": number + offset, "customer": -1, "shop": -1, "amount": 0}
        yield "orders", number + offset, {**order, "at": at.isoformat()}
        yield "payments", number + offset, {"paid_order": -1, "method": "none", "paid_at": at.isoformat()}
