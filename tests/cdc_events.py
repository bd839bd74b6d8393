"""A table in a database, and what Debezium writes of it: envelopes, tombstones, snapshot reads, repetitions.

After https://debezium.io/documentation/reference/stable/connectors/postgresql.html#postgresql-events, of which the
fields that a reader may stumble over are here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Producer

__all__ = ["Customers", "Event", "envelope", "send"]

Event = tuple[bytes, bytes | None]
"""Key and value of a record; without a value it is a tombstone."""


def envelope(
    op: str, before: Any, after: Any, lsn: int | None, *, wrapped: bool = False, source: Any = None
) -> dict[str, Any]:
    """The value of a record, as the JSON converter writes it with `schemas.enable` or without."""
    payload = {
        "before": before,
        "after": after,
        "source": {
            "version": "3.0.0.Final",
            "connector": "postgresql",
            "name": "shop",
            "ts_ms": 1_700_000_000_000,
            "snapshot": "true" if op == "r" else "false",
            "db": "shop",
            "sequence": json.dumps([str(lsn), str(lsn)]),
            "schema": "public",
            "table": "customers",
            "txId": 555,
            "lsn": lsn,
            "xmin": None,
            **(source or {}),
        },
        "transaction": None,
        "op": op,
        "ts_ms": 1_700_000_000_123,
    }
    if not wrapped:
        return payload
    fields = [{"type": "string", "optional": True, "field": "op"}]
    return {
        "schema": {"type": "struct", "fields": fields, "name": "shop.public.customers.Envelope"},
        "payload": payload,
    }


@dataclass
class Customers:
    """The table `customers` and its log.

    Attributes:
        rows: what the database has.
        log: all events, in the order of the database.
    """

    seed: int
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    log: list[Event] = field(default_factory=list)
    lsn: int = 24_023_128

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def snapshot(self, count: int) -> None:
        """The first reads of a connector: all of one position."""
        for number in range(count):
            self.rows[number] = self._row(number)
            self._tell("r", None, self.rows[number])

    def change(self, times: int) -> None:
        """Random changes: of values, of the primary key, removals, and rows that come again."""
        for _ in range(times):
            self.lsn += self._draw.randrange(1, 90)
            number = self._draw.randrange(30)
            row, dice = self.rows.get(number), self._draw.random()
            if row is None:
                self._put("c", number)
            elif dice < 0.35:
                self._remove(number)
            elif dice < 0.45 and (free := [n for n in range(30) if n not in self.rows]):
                self._remove(number)
                self._put("c", self._draw.choice(free))
            else:
                self._put("u", number)

    def remove(self, number: int) -> None:
        """Remove one row."""
        self.lsn += 1
        self._remove(number)

    def _put(self, op: str, number: int) -> None:
        self.rows[number] = self._row(number)
        # Without REPLICA IDENTITY FULL an update has no row before it.
        self._tell(op, None, self.rows[number])

    def _remove(self, number: int) -> None:
        del self.rows[number]
        self._tell("d", {"id": number, "name": None, "city": None}, None)
        self.log.append((self._key(number), None))

    def _row(self, number: int) -> dict[str, Any]:
        city = self._draw.choice(["Köln", "Łódź", None])
        return {"id": number, "name": f"n{self._draw.randrange(1000)}", "city": city, "unread": [1, {"x": "y"}]}

    def _tell(self, op: str, before: Any, after: Any) -> None:
        told = envelope(op, before, after, self.lsn, wrapped=self._draw.random() < 0.5)
        self.log.append((self._key((after or before)["id"]), json.dumps(told).encode()))

    def _key(self, number: int) -> bytes:
        return json.dumps({"id": number}).encode()

    def repeated(self, events: list[Event], times: int) -> list[Event]:
        """Events as a connector gives them that is restarted: from a place before on, each time again."""
        given: list[Event] = []
        at = 0
        for _ in range(times):
            until = self._draw.randrange(at, len(events) + 1)
            given += events[at:until]
            at = self._draw.randrange(max(0, until - 25), until + 1)
        return given + events[at:]


def send(bootstrap: str, topic: str, events: Iterable[Event]) -> None:
    """Write records, each key in its own partition, in order."""
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    for key, value in events:
        producer.produce(topic, key=key, value=value)
    assert producer.flush(30) == 0
