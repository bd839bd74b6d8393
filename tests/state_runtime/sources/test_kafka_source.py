"""The source on a real broker, without Spark: what a batch is planned as, and what its tasks read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.cimpl import NewPartitions
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from tenacity import wait_none

from examples.servers.kafka import KafkaBroker, settled
from state_runtime.base.errors import InvalidConfiguration, MissingSource, StillstateError, Unavailable
from state_runtime.base.secrets import with_secrets
from state_runtime.sources import kafka as kafka_source
from state_runtime.sources.kafka import KafkaDataSource
from state_runtime.sources.kafka_client import Cluster

NAMES = itertools.count(1)
ALL = ReadAllAvailable()


class Reading:
    """What Spark does with the source: plans batches, and has their parts read."""

    def __init__(self, bootstrap: str, topics: str | Sequence[str] = (), **how: Any) -> None:
        source = kafka_source(topics, bootstrap_servers=bootstrap, **{"starting": "earliest", **how})
        options = {"config": json.dumps(source._config)}
        self.reader: Any = KafkaDataSource(options).streamReader(None)

    def batch(self, start: Any, limit: Any = ALL) -> tuple[Any, list[dict[str, Any]]]:
        """The end of the next batch, and its rows."""
        end = json.loads(json.dumps(self.reader.latestOffset(start, limit)))
        return end, self.rows(start, end)

    def rows(self, start: Any, end: Any) -> list[dict[str, Any]]:
        parts = self.reader.partitions(start, end)
        return [row for part in parts for batch in self.reader.read(part) for row in batch.to_pylist()]


@pytest.fixture
def topic(kafka: KafkaBroker) -> str:
    name = f"source-{next(NAMES)}"
    kafka.create_topic(name, 2)
    return name


def send(broker: KafkaBroker, topic: str, values: Sequence[str], partition: int = 0, **how: Any) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for value in values:
        producer.produce(topic, value=value, partition=partition, **how)
    assert producer.flush(30) == 0


def values(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [row["value"].decode() for row in rows]


def offsets(topic: str, position: Any) -> Any:
    return position["topics"][topic]["next"]


@pytest.mark.servers
def test_each_record_is_read_once_over_batches_of_any_size(kafka: KafkaBroker, topic: str) -> None:
    sent = [str(n) for n in range(1000)]
    send(kafka, topic, sent[:700])
    send(kafka, topic, sent[700:], partition=1)
    reading = Reading(kafka.bootstrap, topic)
    position, read, sizes = reading.reader.initialOffset(), list[str](), list[int]()
    while len(read) < 1000:
        position, rows = reading.batch(position, ReadMaxRows(300))
        read += values(rows)
        sizes.append(len(rows))
    assert sorted(read, key=int) == sent
    assert max(sizes) <= 302
    assert reading.batch(position) == (position, [])
    send(kafka, topic, ["later"])
    assert values(reading.batch(position)[1]) == ["later"]
    again = Reading(kafka.bootstrap, topic)
    assert len(again.rows(again.reader.initialOffset(), position)) == 1000, (
        "a batch that is read again has the same rows"
    )


@pytest.mark.servers
def test_rows_have_the_columns_of_sparks_own_source(kafka: KafkaBroker, topic: str) -> None:
    send(kafka, topic, ["a"], key="k", timestamp=1_700_000_000_123, headers=[("h", b"1"), ("h", None)])
    send(kafka, topic, ["b"])
    reading = Reading(kafka.bootstrap, topic, headers=True)
    first, second = reading.batch(reading.reader.initialOffset())[1]
    assert first == {
        "key": b"k",
        "value": b"a",
        "topic": topic,
        "partition": 0,
        "offset": 0,
        "timestamp": datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC),
        "timestampType": 0,
        "headers": [{"key": "h", "value": b"1"}, {"key": "h", "value": None}],
    }
    assert (second["key"], second["headers"]) == (None, None)


@pytest.mark.servers
def test_records_of_a_transaction_come_when_it_is_committed_and_never_if_it_is_not(
    kafka: KafkaBroker, topic: str
) -> None:
    """Marks of transactions are offsets without a record, also at the end of a partition."""
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": topic})
    producer.init_transactions()
    reading = Reading(kafka.bootstrap, topic)
    position = reading.reader.initialOffset()
    for word, ends in (("kept", producer.commit_transaction), ("dropped", producer.abort_transaction)):
        producer.begin_transaction()
        producer.produce(topic, value=word, partition=0)
        producer.flush()
        open_end, rows = reading.batch(position)
        assert (rows, offsets(topic, open_end)) == ([], offsets(topic, position)), "it is not decided yet"
        ends()
        while offsets(topic, position) == offsets(topic, open_end):
            position, rows = reading.batch(position)
        assert values(rows) == (["kept"] if word == "kept" else [])
    assert offsets(topic, position) == {"0": 4, "1": 0}


@pytest.mark.servers
@pytest.mark.parametrize("when_lost", ["fail", "skip"])
def test_records_that_are_gone_end_the_run_or_are_passed_over(
    kafka: KafkaBroker, topic: str, when_lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    send(kafka, topic, [str(n) for n in range(10)])
    reading = Reading(kafka.bootstrap, topic, when_lost=when_lost)
    position = reading.reader.initialOffset()
    settled(kafka.admin.delete_records([TopicPartition(topic, 0, 6)]))
    if when_lost == "skip":
        assert values(reading.batch(position)[1]) == ["6", "7", "8", "9"]
        assert "removed 6 records" in caplog.text, "never without a word"
        assert "passed over" in caplog.text
        return
    with pytest.raises(MissingSource, match=f"removed 6 records .*topic '{topic}' partition 0: wanted from offset 0"):
        reading.batch(position)


@pytest.mark.servers
def test_a_topic_that_is_made_anew_ends_the_run_also_if_it_has_more_records_than_before(
    kafka: KafkaBroker, topic: str
) -> None:
    send(kafka, topic, ["old"])
    reading = Reading(kafka.bootstrap, topic)
    position, _ = reading.batch(reading.reader.initialOffset())
    kafka.delete_topic(topic)
    with pytest.raises(MissingSource, match="any more, which the job has read"):
        reading.batch(position)
    kafka.create_topic(topic, 2)
    send(kafka, topic, ["new"] * 5)
    with pytest.raises(MissingSource, match="deleted and made again"):
        reading.batch(position)


@pytest.mark.servers
def test_partitions_and_topics_that_are_added_are_read_from_their_first_record(kafka: KafkaBroker, topic: str) -> None:
    reading = Reading(kafka.bootstrap, topic_pattern=f"{topic}(-[a-z]+)?", starting="latest")
    send(kafka, topic, ["before"])
    position = reading.reader.initialOffset()
    settled(kafka.admin.create_partitions([NewPartitions(topic, 3)]))
    kafka.create_topic(f"{topic}-more", 1)
    kafka.create_topic(f"{topic}2", 1)
    send(kafka, f"{topic}2", ["another topic"])
    send(kafka, topic, ["a"], partition=2)
    send(kafka, f"{topic}-more", ["b"])
    rows: list[dict[str, Any]] = []
    while len(rows) < 2:  # the client learns of the new partition with its next look
        position, more = reading.batch(position)
        rows += more
    assert sorted(values(rows)) == ["a", "b"]


@pytest.mark.servers
def test_a_job_begins_at_the_end_at_a_time_or_at_offsets(kafka: KafkaBroker, topic: str) -> None:
    send(kafka, topic, ["1"], timestamp=1_700_000_000_000)
    send(kafka, topic, ["2"], timestamp=1_700_000_060_000)

    def begins(starting: Any) -> Any:
        return offsets(topic, Reading(kafka.bootstrap, topic, starting=starting).reader.initialOffset())

    assert begins("latest") == {"0": 2, "1": 0}
    assert begins(datetime(2023, 11, 14, 22, 14, 0, tzinfo=UTC)) == {"0": 1, "1": 0}
    assert begins({topic: {0: 1}}) == {"0": 1, "1": 0}
    with pytest.raises(MissingSource, match="does not have"):
        begins({topic: {7: 1}})
    with pytest.raises(MissingSource, match=r"has no topic 'nowhere'.*kafka-topics\.sh --create"):
        Reading(kafka.bootstrap, "nowhere").reader.initialOffset()


@pytest.mark.servers
def test_available_now_goes_no_further_than_what_there_was(kafka: KafkaBroker, topic: str) -> None:
    send(kafka, topic, ["1"])
    reading = Reading(kafka.bootstrap, topic)
    reading.reader.prepareForTriggerAvailableNow()
    send(kafka, topic, ["2"])
    position, rows = reading.batch(reading.reader.initialOffset())
    assert values(rows) == ["1"]
    assert reading.batch(position) == (position, [])


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[KafkaBroker]:
    with KafkaBroker(tmp_path / "broker") as broker:
        yield broker


@pytest.mark.servers
def test_a_broker_that_is_killed_and_comes_back_costs_no_record(own_broker: KafkaBroker) -> None:
    own_broker.create_topic("orders", 1)
    send(own_broker, "orders", ["1", "2"])
    reading = Reading(own_broker.bootstrap, "orders")
    position, rows = reading.batch(reading.reader.initialOffset())
    own_broker.kill()
    own_broker.start()
    send(own_broker, "orders", ["3"])
    position, more = reading.batch(position)
    assert values(rows + more) == ["1", "2", "3"]


@pytest.mark.servers
def test_a_broker_that_is_away_ends_the_run_as_something_that_passes(own_broker: KafkaBroker) -> None:
    own_broker.create_topic("orders", 1)
    own_broker.kill()
    cluster = Cluster({"bootstrap.servers": own_broker.bootstrap}, "source 'orders'", away_s=0, wait=wait_none())
    with pytest.raises(Unavailable, match=r"source 'orders': .*Kafka does not answer.*goes on where it was"):
        cluster.newest(["orders"])


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({}, "needs topics, or a topic_pattern"),
        ({"topics": "a", "topic_pattern": "b"}, "and not both"),
        ({"topics": "a", "bootstrap_servers": ""}, "needs bootstrap_servers"),
        ({"topics": "a", "max_offsets_per_trigger": 0}, r"at least 1 \(got 0\)"),
        ({"topics": "a", "when_lost": "ignore"}, '"fail" or "skip"'),
        ({"topics": "a", "starting": "now"}, "starting must be"),
        ({"topic_pattern": "("}, "no regular expression"),
        ({"topics": "a", "options": {"kafka.security.protocol": "SSL"}}, "security.protocol, and not kafka.security"),
        ({"topics": "a", "options": {"group.id": "x"}}, "the source sets it itself"),
        ({"topics": "a", "options": {"sasl.password": "x"}}, "name an environment variable"),
        ({"topics": "a", "options": {"ssl.key.pem": "x"}}, "name an environment variable"),
    ],
)
def test_what_cannot_be_is_refused_when_the_source_is_made(how: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfiguration, match=said):
        kafka_source(**{"bootstrap_servers": "broker:9092", **how})


def test_a_secret_is_read_from_the_environment_of_each_process_and_is_in_no_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = kafka_source("a", bootstrap_servers="b:1", options_env={"sasl.password": "KAFKA_PASSWORD"})
    monkeypatch.setenv("KAFKA_PASSWORD", "hunter2")
    assert with_secrets({}, {"sasl.password": "KAFKA_PASSWORD"}, "source 'a'") == {"sasl.password": "hunter2"}
    assert "hunter2" not in json.dumps(source._config) + repr(source)
    monkeypatch.delenv("KAFKA_PASSWORD")
    with pytest.raises(InvalidConfiguration, match="KAFKA_PASSWORD is not set"):
        with_secrets({}, {"sasl.password": "KAFKA_PASSWORD"}, "source 'a'")


def test_errors_of_the_source_are_found_again_in_what_spark_makes_of_them() -> None:
    """The reader works in other processes; Spark passes on text."""
    reader: Any = KafkaDataSource({"config": json.dumps(kafka_source("a", bootstrap_servers="b:1")._config)})
    with pytest.raises(StillstateError, match=r"\[stillstate-error:CorruptData\]"):
        reader.streamReader(None).latestOffset({"version": 9}, ALL)
