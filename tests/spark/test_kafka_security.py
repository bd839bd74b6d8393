"""Topics behind TLS and SASL: both ends read and write, what is wrong is said in one sentence, and secrets are nowhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from examples.servers.kafka import KafkaBroker, certificate
from state_runtime import KafkaSink, StreamingJob, sources
from state_runtime.base.errors import StoreRefused
from state_runtime.sinks.kafka_access import KafkaAccess
from state_runtime.sinks.kafka_log import EpochMark, KafkaLog
from state_runtime.sources.kafka_client import Cluster, Records
from state_runtime.sources.kafka_offsets import Range

from .jobs import settings

pytestmark = [pytest.mark.spark, pytest.mark.servers]
SECRET = "sentinel-7f1eb9"
WRONG = "sentinel-of-nobody"
PASSWORD_ENV = "STILLSTATE_TEST_KAFKA_PASSWORD"
NAMES = itertools.count(1)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A broker with a certificate of its own CA, that asks for a password."""
    with KafkaBroker(tmp_path_factory.mktemp("secured") / "broker", users={"shop": SECRET}) as broker:
        yield broker


@pytest.fixture
def topics(secured: KafkaBroker) -> tuple[str, str]:
    names = f"in-{next(NAMES)}", f"out-{next(NAMES)}"
    for name in names:
        secured.create_topic(name)
    producer = Producer(dict(secured.client))
    for number in range(20):
        producer.produce(names[0], value=str(number))
    assert producer.flush(30) == 0
    return names


def job_on(broker: KafkaBroker, topics: tuple[str, str], root: Path) -> StreamingJob:
    """As docs/kafka.md writes it: the password's variable is named, and all else is in the code."""
    options = {
        name: broker.client[name]
        for name in ("security.protocol", "ssl.ca.location", "sasl.mechanism", "sasl.username")
    }
    how: dict[str, Any] = {
        "bootstrap_servers": broker.bootstrap, "options": options, "options_env": {"sasl.password": PASSWORD_ENV},
    }  # fmt: skip
    job = StreamingJob("secured", store=str(root / "store"), settings=settings(root))
    read = job.read(sources.kafka(topics[0], starting="earliest", **how))
    numbers = read.transform(lambda df: df.selectExpr("CAST(CAST(value AS STRING) AS INT) AS n"))
    numbers.key_by("n").deduplicate(uid="once").write(KafkaSink(topics[1], key="n", **how))
    return job


def values_of(broker: KafkaBroker, topic: str) -> list[bytes]:
    end = Cluster(broker.client, "test").newest([topic]).next[topic, 0]
    reader = Records(broker.client, topic, 0, "test")
    found = [message.value() for batch in reader.read(Range(topic, 0, 0, end)) for message in batch]
    reader.close()
    return found


def files_with(root: Path, secret: str) -> list[Path]:
    files = [file for file in root.rglob("*") if file.is_file()]
    assert len(files) > 5
    return [file for file in files if secret.encode() in file.read_bytes()]


def test_both_ends_speak_tls_and_the_password_is_in_no_file_log_or_error(
    spark: SparkSession,
    secured: KafkaBroker,
    topics: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(PASSWORD_ENV, SECRET)
    # Spark's workers were started without it: a cluster's executors get it by spark.executorEnv.
    job = job_on(secured, topics, tmp_path)
    with_secret = spark.sparkContext.environment
    with_secret[PASSWORD_ENV] = SECRET
    try:
        job.run(spark, trigger={"availableNow": True})
    finally:
        del with_secret[PASSWORD_ENV]
    assert sorted(values_of(secured, topics[1])) == sorted(b'{"n":%d}' % n for n in range(20))
    monkeypatch.setenv(PASSWORD_ENV, WRONG)
    with pytest.raises(StoreRefused, match="does not take the user's name and password") as raised:
        job_on(secured, topics, tmp_path).run(spark, trigger={"availableNow": True})
    said = "".join((repr(job), repr(raised.value), str(raised.value), caplog.text, *capfd.readouterr()))
    for secret in (SECRET, WRONG):
        assert secret not in said
        assert files_with(tmp_path, secret) == []


def read_one(broker: KafkaBroker, client: Mapping[str, str], topic: str) -> None:
    list(Records(client, topic, 0, "source").read(Range(topic, 0, 0, 1)))


def log_of(broker: KafkaBroker, client: Mapping[str, str], topic: str) -> KafkaLog:
    options = {name: value for name, value in client.items() if name != "bootstrap.servers"}
    return KafkaLog(topic, KafkaAccess(broker.bootstrap, options), "writer", "label", timeout_s=8)


Asks = Callable[[KafkaBroker, Mapping[str, str], str], object]
ASKS: dict[str, Asks] = {
    "the source's questions": lambda broker, client, topic: Cluster(client, "source").newest([topic]),
    "the source's records": read_one,
    "the sink's questions": lambda broker, client, topic: log_of(broker, client, topic).partitions(),
    "the sink's producer": lambda broker, client, topic: log_of(broker, client, topic).begin(is_new=True),
    "the sink's records": lambda broker, client, topic: log_of(broker, client, topic).write(
        EpochMark(1), lambda: iter([(b"k", b"v", -1, 0, None)])
    ),
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
@pytest.mark.parametrize("wrong", ["password", "CA"])
def test_what_is_wrong_is_said_and_not_tried_until_the_time_is_over(
    secured: KafkaBroker, topics: tuple[str, str], tmp_path: Path, ask: Asks, wrong: str
) -> None:
    """The client library itself says only that the time is over: a source would wait for its minute, and be restarted."""
    if wrong == "password":
        client, words = {**secured.client, "sasl.password": WRONG}, "the user's name and password"
    else:
        other = str(certificate("other", tmp_path))
        client, words = {**secured.client, "ssl.ca.location": other}, "not signed by the CA of `ssl.ca.location`"
    with pytest.raises(StoreRefused, match=words) as raised:
        ask(secured, client, topics[0])
    assert "sentinel" not in str(raised.value)
