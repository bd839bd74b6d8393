"""How far a job is behind its topics, asked beside the job: records, the age of the oldest, when Kafka removes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from tenacity import wait_none

from state_runtime.base.errors import StillstateError
from state_runtime.base.source_state import SourceState
from state_runtime.sources.age_trend import AgeTrend
from state_runtime.sources.kafka_client import Cluster, library
from state_runtime.sources.kafka_offsets import Partition, Positions
from state_runtime.sources.kafka_seek import Seek, To, seek

__all__ = ["KafkaLag"]

_LOOKED_AT_MAX: Final = 8
"""Partitions whose first unread record is read for its time: those with most records."""
_PEEK_S: Final = 2.0
_RETENTION: Final = "retention.ms"


class KafkaLag:
    """Asks Kafka about one source; used by one thread.

    Args:
        name: of the source, for people.
        settings: of librdkafka, with secrets.
        topics: the names of its topics, or what a name must match.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], topics: Sequence[str] | Callable[[str], object]) -> None:
        self.state = SourceState(name)
        self._topics = topics
        self._settings = dict(settings)
        self._cluster = Cluster(settings, name, away_s=0, wait=wait_none())
        self._retention_ms: dict[str, int] = {}
        self._trend = AgeTrend()
        self._consumer: Any = None

    def reads(self, offset: Any) -> bool:
        """Return whether a position is one of this source."""
        try:
            names = {topic for topic, _ in Positions.from_json(offset).next}
        except StillstateError:
            return False
        return all(map(self._topics, names)) if callable(self._topics) else names == set(self._topics)

    def seek(self, old: Positions, to: To) -> Seek:
        """Return another position in the topics that the source reads now; see `seek`."""
        return seek(self._cluster, self._names(), old, to, f"source {self.state.name!r}")

    def _names(self) -> Sequence[str]:
        return self._cluster.topics_like(self._topics) if callable(self._topics) else self._topics

    def look(self, offset: Any | None, now_ms: int) -> SourceState:
        """Ask once, and return what is known now.

        Args:
            offset: up to where the job has read, one that it `reads`; None: it has not begun.
        """
        position = None if offset is None else Positions.from_json(offset)
        try:
            newest = self._cluster.newest(self._names())
            found = replace(self.state, asked_at_ms=now_ms, away_since_ms=0, said="", behind=-1)
            self.state = found if position is None else self._compared(found, position, newest, now_ms)
        except StillstateError as error:
            since_ms = self.state.away_since_ms or now_ms
            self.state = replace(self.state, away_since_ms=since_ms, said=str(error).splitlines()[0])
        return self.state

    def _compared(self, found: SourceState, position: Positions, newest: Positions, now_ms: int) -> SourceState:
        waiting = {part: offset - position.next.get(part, 0) for part, offset in newest.next.items()}
        waiting = {part: rows for part, rows in waiting.items() if rows > 0}
        most = sorted(waiting, key=waiting.__getitem__, reverse=True)[:_LOOKED_AT_MAX]
        times_ms = self._times_ms({part: position.next.get(part, 0) for part in most})
        left_ms = [
            time_ms + self._kept_ms(topic) - now_ms
            for (topic, _), time_ms in times_ms.items()
            if self._kept_ms(topic) > 0
        ]
        told = replace(
            found,
            behind=sum(waiting.values()),
            oldest_unread_ms=min(times_ms.values(), default=0),
            retention_left_s=max(0.0, min(left_ms) / 1000) if left_ms else -1.0,
            kept_s=self._shortest_kept_s({topic for topic, _ in most} or {topic for topic, _ in newest.next}),
        )
        return replace(told, age_change_s=self._trend.change_s(now_ms, told.age_s(now_ms)))

    def _shortest_kept_s(self, topics: Collection[str]) -> float:
        kept_ms = [kept for topic in sorted(topics)[:_LOOKED_AT_MAX] if (kept := self._kept_ms(topic)) > 0]
        return min(kept_ms) / 1000 if kept_ms else -1.0

    def _times_ms(self, first: Mapping[Partition, int]) -> dict[Partition, int]:
        """Return the time of the record at each offset, or of the first behind it, of those that come soon."""
        if not first:
            return {}
        kafka = library()
        if self._consumer is None:
            quiet = {"group.id": "stillstate", "log_level": 0, "enable.auto.commit": False, "queued.min.messages": 1}
            self._consumer = kafka.Consumer({**quiet, "fetch.message.max.bytes": 65536, **self._settings})
        self._consumer.assign([kafka.TopicPartition(*part, offset) for part, offset in first.items()])
        found: dict[Partition, int] = {}
        while len(found) < len(first) and (messages := self._consumer.consume(1, _PEEK_S)):
            for message in messages:
                if message.error() is None:
                    part = (message.topic(), message.partition())
                    found.setdefault(part, int(message.timestamp()[1]))
                    self._consumer.pause([kafka.TopicPartition(*part)])
        self._consumer.unassign()
        return found

    def _kept_ms(self, topic: str) -> int:
        """Return for how long Kafka keeps a topic's records; -1 for ever. Asked once for each topic."""
        if topic not in self._retention_ms:
            self._retention_ms[topic] = int(self._cluster.setting(topic, _RETENTION, "-1"))
        return self._retention_ms[topic]

    def close(self) -> None:
        """Close the connections."""
        if self._consumer is not None:
            self._consumer.close()
