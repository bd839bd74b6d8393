"""How far a job is behind its topics, and that a broker is away: asked beside the run."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from model import FakeClock

from examples.servers.kafka import KafkaBroker
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.source_state import SourceState
from state_runtime.sources import watch as watch_module
from state_runtime.sources.kafka_lag import KafkaLag
from state_runtime.sources.kafka_offsets import Positions
from state_runtime.sources.watch import SourceWatch, opened_lags, positions_in

NOW_MS = 1_700_000_100_000


def send(broker: KafkaBroker, topic: str, times_ms: list[int], partition: int = 0) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for time_ms in times_ms:
        producer.produce(topic, value="x", partition=partition, timestamp=time_ms)
    assert producer.flush(30) == 0


def lag_of(broker: KafkaBroker, topic: str) -> KafkaLag:
    return KafkaLag(topic, {"bootstrap.servers": broker.bootstrap}, [topic])


@pytest.mark.servers
def test_what_waits_is_counted_with_the_age_of_the_oldest_and_when_it_goes(kafka: KafkaBroker) -> None:
    kafka.create_topic("lag", 3, retention_ms="3600000")
    send(kafka, "lag", [NOW_MS - 90_000, NOW_MS - 60_000, NOW_MS - 30_000])
    send(kafka, "lag", [NOW_MS - 40_000], partition=1)
    lag = lag_of(kafka, "lag")
    state = lag.look(Positions({("lag", 0): 1, ("lag", 1): 0, ("lag", 2): 0}), NOW_MS)
    assert state == SourceState("lag", NOW_MS, 0, 3, NOW_MS - 60_000, 3540.0, kept_s=3600.0)
    done = lag.look(Positions({("lag", 0): 3, ("lag", 1): 1, ("lag", 2): 0}), NOW_MS)
    assert (done.behind, done.oldest_unread_ms, done.retention_left_s, done.kept_s) == (0, 0, -1.0, 3600.0)
    assert lag.look(None, NOW_MS).behind == -1, "where the job is was not said"


@pytest.mark.servers
def test_a_topic_that_keeps_its_records_for_ever_is_never_overtaken(kafka: KafkaBroker) -> None:
    kafka.create_topic("kept", 1, retention_ms="-1")
    send(kafka, "kept", [1_000])
    state = lag_of(kafka, "kept").look(Positions({("kept", 0): 0}), NOW_MS)
    assert (state.retention_left_s, state.kept_s, state.left_s(NOW_MS)) == (-1.0, -1.0, float("inf"))


@pytest.mark.servers
def test_a_broker_that_is_away_is_told_since_when_and_until_it_answers(tmp_path: Path) -> None:
    with KafkaBroker(tmp_path / "broker") as broker:
        broker.create_topic("orders", 1)
        lag, position = lag_of(broker, "orders"), Positions({("orders", 0): 0})
        assert lag.look(position, NOW_MS).away_since_ms == 0
        broker.kill()
        assert lag.look(position, NOW_MS + 1000).away_since_ms == NOW_MS + 1000
        away = lag.look(position, NOW_MS + 5000)
        assert (away.away_since_ms, away.away_s(NOW_MS + 5000), away.asked_at_ms) == (NOW_MS + 1000, 4.0, NOW_MS)
        assert "does not answer" in away.said
        broker.start()
        assert lag.look(position, NOW_MS + 9000).away_since_ms == 0


class Told:
    """A source that answers at once."""

    def __init__(self, topic: str) -> None:
        self.topic, self.asked, self.closed = topic, [], False  # type: ignore[var-annotated]
        self.was_asked = threading.Event()

    def reads(self, position: Positions) -> bool:
        return {topic for topic, _ in position.next} == {self.topic}

    def look(self, position: Positions | None, now_ms: int) -> SourceState:
        self.asked.append(position)
        self.was_asked.set()
        return SourceState(self.topic, now_ms, behind=-1 if position is None else 0)

    def close(self) -> None:
        self.closed = True


def test_positions_are_found_among_those_of_other_sources() -> None:
    position = Positions({("a", 0): 4}, {"a": "id"})
    as_text = json.dumps(position.to_json())
    assert positions_in(['{"logOffset": 3}', None, "17", "nonsense", "v1", "", as_text]) == [position]


def test_a_source_that_the_run_does_not_read_is_not_told_of() -> None:
    mine, other = Told("a"), Told("b")
    watch = SourceWatch(lambda: [mine, other], FakeClock())  # type: ignore[list-item]
    watch._lags = [mine, other]  # type: ignore[list-item]
    watch.look([])
    assert [state.name for state in watch.states] == ["a", "b"], "which are the run's is not known yet"
    watch.look([Positions({("a", 0): 4})])
    assert [(state.name, state.behind) for state in watch.states] == [("a", 0)]


def test_the_thread_ends_with_the_run_and_closes_what_it_opened() -> None:
    lag = Told("a")
    watch = SourceWatch(lambda: [lag], FakeClock())  # type: ignore[list-item]
    begun = Positions({("a", 0): 4})
    watch.follow(lambda: None, "v1\n{}\n" + json.dumps(begun.to_json()))
    assert lag.was_asked.wait(30)
    watch.close()
    assert lag.closed
    assert lag.asked == [begun], "until the run has read something, it is where its snapshot is"
    assert [state.behind for state in watch.states] == [0]


def test_another_jobs_source_that_cannot_be_asked_any_more_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may run several jobs, and the variable with a secret of one be gone when the next one begins."""

    def gone() -> Any:
        raise InvalidConfiguration("the environment variable is not set")

    mine = Told("a")
    monkeypatch.setattr(watch_module, "_OPENED", {"other": gone, "mine": lambda: mine})
    assert opened_lags() == [mine]


def test_an_error_in_the_numbers_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Any:
        raise RuntimeError("a bug")

    lag = Told("a")
    watch = SourceWatch(lambda: [lag], FakeClock())  # type: ignore[list-item]
    watch.follow(broken, "")
    watch.close()
    assert "could not be asked" in caplog.text
