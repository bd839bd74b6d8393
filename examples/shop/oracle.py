"""What the shop's outputs must be, computed anew from the topics themselves, without Spark and without state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from examples.shop.events import PAID_WITHIN

__all__ = ["Expected", "expected_of", "read_topic"]

SESSION_GAP: Final = timedelta(seconds=30)
_WAIT_S: Final = 60.0


@dataclass(frozen=True)
class Expected:
    """The rows that each output must have, in any order.

    Attributes:
        paid: order, and when it was paid.
        totals: by shop, the orders and the sales.
        alerts: customer, begin and orders of each visit with many.
    """

    paid: Sequence[tuple[int, datetime]]
    totals: Mapping[int, tuple[int, int]]
    alerts: Sequence[tuple[int, datetime, int]]


def read_topic(servers: str, topic: str) -> list[dict[str, Any]]:
    """Return the committed records of a topic, up to its present end, as they were written.

    Raises:
        TimeoutError: the broker sends nothing for a minute.
    """
    admin = AdminClient({"bootstrap.servers": servers})
    parts = [TopicPartition(topic, number) for number in admin.list_topics(topic).topics[topic].partitions]
    answers = admin.list_offsets(dict.fromkeys(parts, OffsetSpec.latest()))
    ends = {part.partition: answer.result().offset for part, answer in answers.items()}
    settings = {"group.id": "oracle", "enable.auto.commit": False, "enable.partition.eof": True}
    consumer = Consumer({"bootstrap.servers": servers, "isolation.level": "read_committed", **settings})
    consumer.assign([TopicPartition(topic, part.partition, 0) for part in parts])
    open_parts, found = {number for number, end in ends.items() if end > 0}, []
    while open_parts:
        messages = consumer.consume(10_000, 0) or consumer.consume(1, _WAIT_S)
        if not messages:
            raise TimeoutError(f"the broker sends nothing of {topic} for {_WAIT_S:g} s")
        for message in messages:
            if message.error() is None:
                found.append(json.loads(message.value()))
            if message.offset() + (message.error() is None) >= ends[message.partition()]:
                open_parts.discard(message.partition())
    consumer.close()
    return found


def expected_of(orders: Iterable[Mapping[str, Any]], payments: Iterable[Mapping[str, Any]], many: int) -> Expected:
    """Compute the outputs from all orders and payments.

    Args:
        many: orders of a visit that is told of.
    """
    ordered = {order["order"]: datetime.fromisoformat(order["at"]) for order in orders}
    paid = [
        (payment["paid_order"], at)
        for payment in payments
        if payment["paid_order"] in ordered
        and timedelta()
        <= (at := datetime.fromisoformat(payment["paid_at"])) - ordered[payment["paid_order"]]
        <= PAID_WITHIN
    ]
    totals: dict[int, tuple[int, int]] = {}
    times: dict[int, list[datetime]] = {}
    for order in orders:
        count, sales = totals.get(order["shop"], (0, 0))
        totals[order["shop"]] = (count + 1, sales + order["amount"])
        times.setdefault(order["customer"], []).append(ordered[order["order"]])
    alerts = [
        (customer, visit[0], len(visit))
        for customer, own in times.items()
        for visit in _visits(sorted(own))
        if len(visit) >= many
    ]
    return Expected(paid, totals, alerts)


def _visits(times: Sequence[datetime]) -> list[list[datetime]]:
    """Cut a customer's times where the gap is reached."""
    visits: list[list[datetime]] = []
    for time in times:
        if visits and time - visits[-1][-1] < SESSION_GAP:
            visits[-1].append(time)
        else:
            visits.append([time])
    return visits
