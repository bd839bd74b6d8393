"""What readers of a Kafka topic see."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any, Final

from confluent_kafka import Consumer, Message, TopicPartition
from confluent_kafka.admin import AdminClient
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

__all__ = ["messages", "values"]

_WAIT_S: Final = 30.0


def values(bootstrap: str, topic: str) -> list[Any]:
    """The values of a topic's committed records, which are JSON, partition by partition."""
    return [json.loads(message.value()) for message in messages(bootstrap, topic) if message.value() is not None]


def messages(bootstrap: str, topic: str, *, committed: bool = True) -> list[Message]:
    """A topic's records. Readers of committed ones wait until no transaction is open: a commit is answered before all
    of its partitions know of it."""
    client = AdminClient({"bootstrap.servers": bootstrap})
    count = len(client.list_topics(topic, timeout=_WAIT_S).topics[topic].partitions)
    reader, uncommitted = _reader(bootstrap, "read_committed"), _reader(bootstrap, "read_uncommitted")
    found = []
    for number in range(count):
        place = TopicPartition(topic, number, 0)
        waiting = Retrying(
            retry=retry_if_result(lambda x: not x), stop=stop_after_delay(_WAIT_S), wait=wait_fixed(0.01)
        )
        if committed:
            waiting(lambda place=place: _end(reader, place) == _end(uncommitted, place))
        found += _read(reader if committed else uncommitted, place)
    reader.close()
    uncommitted.close()
    return found


def _reader(bootstrap: str, isolation: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"reader-{uuid.uuid4().hex}",
            "isolation.level": isolation,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
        }
    )


def _end(reader: Consumer, place: TopicPartition) -> int:
    return int(reader.get_watermark_offsets(place, timeout=_WAIT_S)[1])


def _read(reader: Consumer, place: TopicPartition) -> Iterator[Message]:
    if not _end(reader, place):
        return
    reader.assign([place])
    while True:
        message = reader.poll(_WAIT_S)
        assert message is not None, "the broker gave nothing"
        if message.error():  # the end of the partition
            return
        yield message
