"""How far a job is behind its topics, and that a broker is away: asked beside the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from examples.servers.kafka import KafkaBroker
from state_runtime.base.source_state import SourceState
from state_runtime.sources.kafka_lag import KafkaLag
from state_runtime.sources.kafka_offsets import Partition, Positions

NOW_MS = 1_700_000_100_000


def send(broker: KafkaBroker, topic: str, times_ms: list[int], partition: int = 0) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for time_ms in times_ms:
        producer.produce(topic, value="x", partition=partition, timestamp=time_ms)
    assert producer.flush(30) == 0


def lag_of(broker: KafkaBroker, topic: str) -> KafkaLag:
    return KafkaLag(topic, {"bootstrap.servers": broker.bootstrap}, [topic])


def at(offsets: dict[Partition, int]) -> Any:
    return Positions(offsets).to_json()


@pytest.mark.servers
def test_what_waits_is_counted_with_the_age_of_the_oldest_and_when_it_goes(kafka: KafkaBroker) -> None:
    kafka.create_topic("lag", 3, retention_ms="3600000")
    send(kafka, "lag", [NOW_MS - 90_000, NOW_MS - 60_000, NOW_MS - 30_000])
    send(kafka, "lag", [NOW_MS - 40_000], partition=1)
    lag = lag_of(kafka, "lag")
    state = lag.look(at({("lag", 0): 1, ("lag", 1): 0, ("lag", 2): 0}), NOW_MS)
    assert state == SourceState("lag", NOW_MS, 0, 3, NOW_MS - 60_000, 3540.0, kept_s=3600.0)
    done = lag.look(at({("lag", 0): 3, ("lag", 1): 1, ("lag", 2): 0}), NOW_MS)
    assert (done.behind, done.oldest_unread_ms, done.retention_left_s, done.kept_s) == (0, 0, -1.0, 3600.0)
    assert lag.look(None, NOW_MS).behind == -1, "where the job is was not said"


@pytest.mark.servers
def test_a_topic_that_keeps_its_records_for_ever_is_never_overtaken(kafka: KafkaBroker) -> None:
    kafka.create_topic("kept", 1, retention_ms="-1")
    send(kafka, "kept", [1_000])
    state = lag_of(kafka, "kept").look(at({("kept", 0): 0}), NOW_MS)
    assert (state.retention_left_s, state.kept_s, state.left_s(NOW_MS)) == (-1.0, -1.0, float("inf"))


@pytest.mark.servers
def test_a_broker_that_is_away_is_told_since_when_and_until_it_answers(tmp_path: Path) -> None:
    with KafkaBroker(tmp_path / "broker") as broker:
        broker.create_topic("orders", 1)
        lag, position = lag_of(broker, "orders"), at({("orders", 0): 0})
        assert lag.look(position, NOW_MS).away_since_ms == 0
        broker.kill()
        assert lag.look(position, NOW_MS + 1000).away_since_ms == NOW_MS + 1000
        away = lag.look(position, NOW_MS + 5000)
        assert (away.away_since_ms, away.away_s(NOW_MS + 5000), away.asked_at_ms) == (NOW_MS + 1000, 4.0, NOW_MS)
        assert "does not answer" in away.said
        broker.start()
        assert lag.look(position, NOW_MS + 9000).away_since_ms == 0


def test_positions_of_other_topics_and_of_other_kinds_of_sources_are_not_read() -> None:
    lag = KafkaLag("a", {"bootstrap.servers": "localhost:1"}, ["a"])
    assert lag.reads(at({("a", 0): 4}))
    assert lag.reads({"a": {"0": 4}}), "Spark's own form"
    table = {"version": 1, "delta": {"table": "a", "next": 1, "files": 0}}
    assert not any(map(lag.reads, [None, 17, "x", {"logOffset": 3}, table, at({("a", 0): 4, ("b", 0): 4})]))
