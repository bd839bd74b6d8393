"""Positions in topics of Kafka: their form in snapshots, how far a batch may go, what was lost; pure.

An offset is that of the next record to be read. The form in snapshots names each topic's id, which Kafka gives to a
topic when it is made: a topic that was deleted and made again under the same name has another one.

    {"version": 1, "topics": {"orders": {"id": "vJ…", "next": {"0": 17, "1": 4}}}}

Positions of Spark's own Kafka source, `{"orders": {"0": 17, "1": 4}}`, are read as well, so a job can go over from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from state_runtime.base.errors import CorruptData, MissingSource

__all__ = [
    "Partition",
    "Positions",
    "Range",
    "behind_lost",
    "check_not_gone",
    "check_same_topics",
    "go_on",
    "limited",
    "positions_in",
    "ranges",
    "told_lost",
]

Partition = tuple[str, int]
"""A topic's name, and the number of one of its partitions."""

_VERSION: Final = 1
_PARTITIONS_MAX: Final = 200_000
"""As many as a cluster of Kafka is said to hold; a position with more is damaged."""


@dataclass(frozen=True)
class Positions:
    """The next offset of each partition.

    Attributes:
        next: by partition.
        ids: of topics, by name; a topic of which no id is known (Spark's form has none) is not there.
    """

    next: Mapping[Partition, int]
    ids: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the form in snapshots."""
        topics: dict[str, Any] = {}
        for (topic, number), offset in sorted(self.next.items()):
            entry = topics.setdefault(topic, {"id": self.ids.get(topic, ""), "next": {}})
            entry["next"][str(number)] = offset
        return {"version": _VERSION, "topics": topics}

    @staticmethod
    def from_json(document: Any) -> Positions:
        """Read the form in snapshots, or that of Spark's own Kafka source.

        Raises:
            CorruptData: it is neither.
        """
        if not isinstance(document, dict):
            raise _not_a_position(document)
        if not isinstance(document.get("version"), int):
            return Positions(dict(_offsets(document)))
        topics = document.get("topics")
        if document["version"] != _VERSION or not isinstance(topics, dict):
            raise _not_a_position(document)
        if not all(isinstance(entry, dict) and isinstance(entry.get("id"), str) for entry in topics.values()):
            raise _not_a_position(document)
        offsets = dict(_offsets({topic: entry.get("next") for topic, entry in topics.items()}))
        return Positions(offsets, {topic: entry["id"] for topic, entry in topics.items() if entry["id"]})


def _offsets(topics: Mapping[Any, Any]) -> Iterator[tuple[Partition, int]]:
    read = 0
    for topic, entry in topics.items():
        if not isinstance(topic, str) or not isinstance(entry, dict):
            raise _not_a_position(topics)
        for number, offset in entry.items():
            is_number = isinstance(number, str) and number.isascii() and number.isdigit() and len(number) < 10
            if not is_number or type(offset) is not int or offset < 0 or (read := read + 1) > _PARTITIONS_MAX:
                raise _not_a_position(topics)
            yield (topic, int(number)), offset


def _not_a_position(document: Any) -> CorruptData:
    return CorruptData(
        f"what the snapshot holds as the source's position is none of Kafka's: {str(document)[:200]}. If the job read "
        "something else until now, give the source another name, .read(…, name=…): it begins anew then"
    )


def positions_in(lines: Iterable[str]) -> list[Positions]:
    """Return the positions in topics among lines of Spark's file of offsets."""
    found: list[Positions] = []
    for line in lines:
        try:
            found.append(Positions.from_json(json.loads(line)))
        except (CorruptData, ValueError, RecursionError):
            continue
    return found


@dataclass(frozen=True)
class Range:
    """Offsets of one partition: from `start` on, before `end`."""

    topic: str
    partition: int
    start: int
    end: int


def go_on(start: Positions, newest: Positions) -> Positions:
    """Return how far a batch without a limit goes. Partitions that Kafka does not list at the moment stay where they
    are: a topic that is gone is found by `check_same_topics`, and a partition cannot be removed from a topic."""
    ahead = {p: max(offset, start.next.get(p, 0)) for p, offset in newest.next.items()}
    return Positions({**start.next, **ahead}, {**start.ids, **newest.ids})


def limited(start: Positions, end: Positions, rows_max: int) -> Positions:
    """Return an end before which there are `rows_max` offsets or a few more, taken from each partition in proportion to
    what waits there; a partition with few is not passed over for ever: it gives one at least."""
    waiting = {p: offset - start.next.get(p, 0) for p, offset in end.next.items()}
    total = sum(waiting.values())
    if total <= rows_max:
        return end
    shares = {p: min(rows, max(1, rows * rows_max // total)) if rows else 0 for p, rows in waiting.items()}
    return Positions({p: start.next.get(p, 0) + share for p, share in shares.items()}, end.ids)


def ranges(start: Positions, end: Positions) -> list[Range]:
    """Return what lies between two positions; a partition that is new begins at its first record."""
    found = ((p, start.next.get(p, 0), offset) for p, offset in sorted(end.next.items()))
    return [Range(topic, number, low, high) for (topic, number), low, high in found if high > low]


def check_same_topics(start: Positions, ids: Mapping[str, str]) -> None:
    """Compare the topics that were read with those that are there now.

    Args:
        ids: of the topics that Kafka has.

    Raises:
        MissingSource: a topic was deleted, or deleted and made again.
    """
    for topic in sorted({topic for topic, _ in start.next}):
        if topic not in ids:
            raise MissingSource(
                f"Kafka does not have topic {topic!r} any more, which the job has read: it was deleted, or the job may "
                "not see it. The state is kept. Bring the topic back, or see docs/kafka.md for a new start position"
            )
        if start.ids.get(topic, ids[topic]) != ids[topic]:
            raise MissingSource(
                f"topic {topic!r} was deleted and made again since the job read it (its id was {start.ids[topic]} and "
                f"is {ids[topic]}): what the old one had is gone, and the offsets of the new one count from 0. The "
                "state is kept. See docs/kafka.md for a new start position, or begin under another job name"
            )


def told_lost(parts: list[Range], earliest: Mapping[Partition, int]) -> str:
    """Compare what is to be read with the first record that each partition still has, and say what is gone: retention,
    or DeleteRecords, has removed records before they were read. Empty if nothing is."""
    gone = [part for part in parts if earliest.get((part.topic, part.partition), 0) > part.start]
    if not gone:
        return ""
    told = "; ".join(
        f"topic {part.topic!r} partition {part.partition}: wanted from offset {part.start} on, available from "
        f"{earliest[part.topic, part.partition]} on"
        for part in gone[:5]
    )
    rows = sum(min(part.end, earliest[part.topic, part.partition]) - part.start for part in gone)
    return (
        f"Kafka removed {rows:,} records before the job had read them, by retention or DeleteRecords ({told}"
        f"{'; …' if len(gone) > 5 else ''})"
    )


def check_not_gone(parts: list[Range], earliest: Mapping[Partition, int]) -> None:
    """Refuse to go on if records are gone.

    Raises:
        MissingSource: see `told_lost`.
    """
    told = told_lost(parts, earliest)
    if told:
        raise MissingSource(
            f"{told}. The state is kept. To go on without them, give the source "
            'when_lost="skip": what is passed over is told in the log. A longer retention.ms prevents it'
        )


def behind_lost(parts: list[Range], earliest: Mapping[Partition, int]) -> list[Range]:
    """Return ranges without what Kafka does not have any more."""
    cut = (
        Range(part.topic, part.partition, max(part.start, earliest.get((part.topic, part.partition), 0)), part.end)
        for part in parts
    )
    return [part for part in cut if part.end > part.start]
