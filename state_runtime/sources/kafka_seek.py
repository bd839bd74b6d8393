"""A new position in topics for a job that has one: by a word, a time or offsets, compared with the old one.

`seek` asks Kafka what there is; all else is pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

from state_runtime.base.errors import CorruptData, InvalidConfiguration, MissingSource
from state_runtime.sources.kafka_offsets import Partition, Positions

__all__ = ["PartitionMove", "Seek", "To", "parse_to", "seek"]

To = Literal["earliest", "latest"] | datetime | Positions
"""Where to: a word, each partition's first record from a time on, or the next offsets of some partitions."""


class _Topics(Protocol):
    """What is asked of Kafka; see `Cluster`."""

    def newest(self, topics: Sequence[str]) -> Positions: ...

    def earliest(self, parts: Sequence[Partition]) -> dict[Partition, int]: ...

    def at_time(self, parts: Sequence[Partition], time_ms: int) -> dict[Partition, int]: ...


@dataclass(frozen=True, kw_only=True)
class PartitionMove:
    """The old and the new next offset of one partition.

    Attributes:
        was: None if the old position has none in this topic: the partition is new, or the topic was made anew.
        skipped: offsets that are never read.
        again: offsets that were read and are read once more.
    """

    topic: str
    partition: int
    was: int | None
    will_be: int
    skipped: int
    again: int


@dataclass(frozen=True)
class Seek:
    """A new position, beside the old one and what Kafka has.

    Attributes:
        earliest: the first offset that each partition still has.
    """

    old: Positions
    new: Positions
    earliest: Mapping[Partition, int]

    @property
    def moves(self) -> list[PartitionMove]:
        """Return all partitions, in order. Of what Kafka has removed already nothing is skipped by the move."""
        found = []
        for (topic, number), will_be in sorted(self.new.next.items()):
            was = self.old.next.get((topic, number)) if _is_same(self.old, self.new, topic) else None
            begun = was or 0
            first = max(begun, self.earliest.get((topic, number), 0))
            skipped, again = max(0, will_be - first), max(0, begun - will_be)
            found.append(
                PartitionMove(topic=topic, partition=number, was=was, will_be=will_be, skipped=skipped, again=again)
            )
        return found


def parse_to(text: str) -> To:
    """Read what a person says: `earliest`, `latest`, a time with its zone, or offsets as JSON.

    Raises:
        InvalidConfiguration: it is none of these.
    """
    if text == "earliest":
        return "earliest"
    if text == "latest":
        return "latest"
    try:
        if text.lstrip().startswith("{"):
            return Positions.from_json(json.loads(text))
        moment = datetime.fromisoformat(text)
    except (ValueError, RecursionError, CorruptData) as error:
        raise InvalidConfiguration(
            f"a place to go on is earliest, latest, a time (2026-11-28T12:00:00Z) or offsets by topic and partition "
            f'({{"orders": {{"0": 17}}}}), and not {text!r}'
        ) from error
    if moment.tzinfo is None:
        raise InvalidConfiguration(f"{text} has no time zone: write {text}Z for UTC, or its offset ({text}+02:00)")
    return moment


def seek(cluster: _Topics, topics: Sequence[str], old: Positions, to: To, where: str) -> Seek:
    """Return the position, after Kafka was asked.

    Args:
        topics: that the source reads now.
        old: of the snapshot that the job goes on from.
        where: the source, for messages.

    Raises:
        MissingSource: Kafka has none of the topics. InvalidConfiguration: offsets that it does not have.
        Unavailable, StoreRefused: see `Cluster`.
    """
    newest = cluster.newest(topics)
    missing = sorted(set(topics) - set(newest.ids))
    if missing or not newest.next:
        raise MissingSource(f"{where}: Kafka has no topic {missing[0] if missing else 'that fits'!r}, or hides it")
    parts = list(newest.next)
    earliest = cluster.earliest(parts)
    found: Mapping[Partition, int]
    if isinstance(to, Positions):
        found = _given(old, newest, earliest, to, where)
    elif isinstance(to, datetime):
        at_ms = cluster.at_time(parts, int(to.timestamp() * 1000))
        found = {part: newest.next[part] if offset < 0 else offset for part, offset in at_ms.items()}
    else:
        found = newest.next if to == "latest" else earliest
    return Seek(old, Positions(dict(found), newest.ids), earliest)


def _given(
    old: Positions, newest: Positions, earliest: Mapping[Partition, int], to: Positions, where: str
) -> dict[Partition, int]:
    """Return the given offsets, and of partitions that are not named the old ones."""
    for part, offset in sorted(to.next.items()):
        if part not in newest.next:
            raise InvalidConfiguration(f"{where}: Kafka has no topic {part[0]!r} with a partition {part[1]}")
        if not earliest[part] <= offset <= newest.next[part]:
            raise InvalidConfiguration(
                f"{where}: topic {part[0]!r} partition {part[1]} has offsets from {earliest[part]} to "
                f"{newest.next[part]}, and not {offset}"
            )
    found: dict[Partition, int] = {}
    for part in newest.next:
        if part not in to.next and part in old.next and not _is_same(old, newest, part[0]):
            raise InvalidConfiguration(
                f"{where}: topic {part[0]!r} was made anew since the job read it, so that its old offsets say nothing: "
                f"name each of its partitions (also {part[1]}), or give earliest, latest or a time"
            )
        found[part] = to.next.get(part, old.next.get(part, earliest[part]))
    return found


def _is_same(old: Positions, new: Positions, topic: str) -> bool:
    """Return whether offsets of both are of one topic; an old position without ids is taken for one."""
    return old.ids.get(topic, new.ids.get(topic)) == new.ids.get(topic)
