"""Sends the shop's events to Kafka, each once and in order, also over a broker that dies and comes back:

python -m examples.shop.produce --kafka HOST:PORT --seconds 20000 --rate 500
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from time import monotonic
from typing import Final

from confluent_kafka import KafkaError, Message, Producer

from examples.shop.events import events_of, last_events

_SETTINGS: Final = {
    "enable.idempotence": True,
    "delivery.timeout.ms": 600_000,
    "linger.ms": 5,
    # Small, so that no partition is far ahead of another one.
    "batch.num.messages": 100,
    "log_level": 0,
}
_POLL_S: Final = 0.05


def main(argv: list[str] | None = None) -> int:
    """Send the events of so many seconds of event time, and those that close what is open."""
    parser = argparse.ArgumentParser(prog="python -m examples.shop.produce", description=main.__doc__)
    parser.add_argument("--kafka", required=True, help="host:port of a broker")
    parser.add_argument("--seconds", type=int, required=True, help="of event time: one order each")
    parser.add_argument("--rate", type=float, required=True, help="seconds of event time for each second")
    parser.add_argument("--partitions", type=int, default=2)
    arguments = parser.parse_args(argv)
    failed: list[KafkaError] = []

    def told(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            failed.append(error)

    producer = Producer({**_SETTINGS, "bootstrap.servers": arguments.kafka})
    pause, begun_s = threading.Event(), monotonic()
    for number in range(arguments.seconds + 1):
        if number < arguments.seconds:
            while number > (monotonic() - begun_s) * arguments.rate:
                producer.poll(0)
                pause.wait(_POLL_S)
        for topic, key, content in events_of(number) if number < arguments.seconds else last_events(number):
            value, partition = json.dumps(content), key % arguments.partitions
            while True:
                try:
                    producer.produce(topic, value=value, key=str(key), partition=partition, on_delivery=told)
                    break
                except BufferError:
                    producer.poll(_POLL_S)
    producer.flush()
    if failed:
        print(f"{len(failed)} events were not delivered: {failed[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
