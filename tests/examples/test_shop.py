"""The shop's events, and the recomputation that its outputs are held against."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

from examples.shop.events import BEGIN, PAID_WITHIN, events_of, last_events
from examples.shop.oracle import expected_of

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def order(number: int, customer: int, shop: int, after_s: float, amount: int = 1) -> dict[str, Any]:
    at = (NOON + timedelta(seconds=after_s)).isoformat()
    return {"order": number, "customer": customer, "shop": shop, "amount": amount, "at": at}


def payment(number: int, after_s: float) -> dict[str, Any]:
    return {"paid_order": number, "paid_at": (NOON + timedelta(seconds=after_s)).isoformat()}


def test_events_are_the_same_each_time_and_in_the_order_of_their_times() -> None:
    events = [event for number in range(3_000) for event in events_of(number)]
    assert events == [event for number in range(3_000) for event in events_of(number)]
    times = [content.get("at") or content["paid_at"] for _, _, content in events]
    assert times == sorted(times)


def test_each_order_comes_once_is_paid_once_at_most_and_some_too_late_or_never() -> None:
    contents = [(topic, content) for number in range(3_000) for topic, _, content in events_of(number)]
    orders = {c["order"]: c["at"] for topic, c in contents if topic == "orders"}
    paid = Counter(c["paid_order"] for topic, c in contents if topic == "payments")
    assert list(orders) == list(range(3_000))
    assert set(paid.values()) == {1}
    late = [
        c
        for topic, c in contents
        if topic == "payments"
        and datetime.fromisoformat(c["paid_at"]) - datetime.fromisoformat(orders[c["paid_order"]]) > PAID_WITHIN
    ]
    assert late
    assert set(orders) - set(paid)


def test_the_last_events_are_later_than_all_and_pay_nothing() -> None:
    last = list(last_events(100))
    assert {topic for topic, _, _ in last} == {"orders", "payments"}
    assert all(c.get("at", c.get("paid_at")) > (BEGIN + timedelta(hours=23)).isoformat() for _, _, c in last)


def test_what_is_expected_is_what_a_person_would_count() -> None:
    orders = [
        *(order(n, customer=1, shop=n % 2, after_s=10 * n, amount=n) for n in range(4)),
        order(4, customer=1, shop=0, after_s=60, amount=4),  # thirty seconds later: another visit
        order(5, customer=2, shop=0, after_s=0, amount=5),
    ]
    payments = [payment(0, 600), payment(1, 610.001), payment(2, 19), payment(3, 30), payment(99, 1)]
    found = expected_of(orders, payments, many=4)
    assert [number for number, _ in found.paid] == [0, 3], "in ten minutes, and not before the order"
    assert found.totals == {0: (4, 0 + 2 + 4 + 5), 1: (2, 1 + 3)}
    assert found.alerts == [(1, NOON, 4)]
