"""Jobs that read topics of Kafka: exact over restarts, other shards and a topic that was made anew."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from examples.servers.kafka import KafkaBroker
from state_runtime import JobContext, JobSettings, ParquetSink, StreamingJob, aggregates, sources
from state_runtime.base.errors import InvalidPipeline, MissingSource

from .jobs import settings

pytestmark = [pytest.mark.spark, pytest.mark.servers]
NAMES = itertools.count(1)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "kafka.md"


def send(broker: KafkaBroker, topic: str, ids: range) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for number in ids:
        producer.produce(topic, value=json.dumps({"id": number, "shop": number % 7}), partition=number % 2)
    assert producer.flush(30) == 0


def job_on(
    broker: KafkaBroker, topic: str, root: Path, parallelism: int = 2, name: str = "orders", **how: Any
) -> StreamingJob:
    job = StreamingJob("shops", store=str(root / "store"), settings=settings(root, parallelism=parallelism))
    asked = {"starting": "earliest", "max_offsets_per_trigger": 100, **how}
    orders = job.read(sources.kafka(topic, bootstrap_servers=broker.bootstrap, **asked), name=name).transform(
        lambda df: df.selectExpr("from_json(cast(value AS string), 'id LONG, shop INT') AS o").select("o.*")
    )
    once = orders.key_by("id").deduplicate(uid="once")
    once.write(ParquetSink(str(root / "orders")))
    orders.key_by("shop").aggregate(uid="count", orders=aggregates.count()).write(ParquetSink(str(root / "shops")))
    return job


def run(spark: SparkSession, job: StreamingJob) -> None:
    job.run(spark, trigger={"availableNow": True})


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


def test_a_topic_is_read_exactly_over_restarts_and_other_shards(
    spark: SparkSession, kafka: KafkaBroker, tmp_path: Path
) -> None:
    topic = f"job-{next(NAMES)}"
    kafka.create_topic(topic, 2)
    for ids, parallelism in ((range(250), 2), (range(250, 400), 3), (range(400, 400), 2)):
        send(kafka, topic, ids)
        run(spark, job_on(kafka, topic, tmp_path, parallelism))
    assert sorted(row["id"] for row in rows_of(tmp_path / "orders")) == list(range(400)), "each once"
    newest: dict[int, int] = {}
    for row in rows_of(tmp_path / "shops"):
        newest[row["shop"]] = max(newest.get(row["shop"], 0), row["orders"])
    assert newest == Counter(number % 7 for number in range(400))


def test_a_topic_that_was_made_anew_ends_the_run_by_name_and_no_restart_is_tried(
    spark: SparkSession, kafka: KafkaBroker, tmp_path: Path
) -> None:
    topic = f"job-{next(NAMES)}"
    kafka.create_topic(topic, 2)
    send(kafka, topic, range(10))
    run(spark, job_on(kafka, topic, tmp_path))
    kafka.delete_topic(topic)
    kafka.create_topic(topic, 2)
    send(kafka, topic, range(100))
    with pytest.raises(MissingSource, match="deleted and made again since the job read it") as raised:
        run(spark, job_on(kafka, topic, tmp_path))
    assert raised.value.is_final
    assert len(rows_of(tmp_path / "orders")) == 10


def test_a_source_under_a_new_name_begins_anew_and_the_state_is_kept(
    spark: SparkSession, kafka: KafkaBroker, tmp_path: Path
) -> None:
    """The way on after a topic was made anew, or to pass over a stretch."""
    topic = f"job-{next(NAMES)}"
    kafka.create_topic(topic, 2)
    send(kafka, topic, range(10))
    run(spark, job_on(kafka, topic, tmp_path))
    kafka.delete_topic(topic)
    kafka.create_topic(topic, 2)
    send(kafka, topic, range(5, 15))
    anew = job_on(kafka, topic, tmp_path, name="orders-2")
    with pytest.raises(InvalidPipeline, match="If it is not, start once with --allow-dropped-state"):
        run(spark, anew)
    anew.run(spark, trigger={"availableNow": True}, allow_dropped_state=True)
    assert sorted(row["id"] for row in rows_of(tmp_path / "orders")) == list(range(15)), "it knows what it had seen"
    send(kafka, topic, range(20, 22))
    run(spark, job_on(kafka, topic, tmp_path, name="orders-2", starting="latest"))
    assert len(rows_of(tmp_path / "orders")) == 17, "it goes on where it was, and not where it would begin"


def test_the_job_of_the_page_runs_as_it_stands_there(spark: SparkSession, kafka: KafkaBroker, tmp_path: Path) -> None:
    topic = f"job-{next(NAMES)}"  # another page's job writes to `orders` of this broker
    kafka.create_topic(topic, 1)
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for amount in (3, 4):
        producer.produce(topic, value=json.dumps({"shop": "a", "amount": amount}))
    assert producer.flush(30) == 0
    names: dict[str, Any] = {"__name__": "__main__"}
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code.replace('kafka("orders"', f'kafka("{topic}"'), str(PAGE), "exec"), names)
    context = JobContext(
        "page", str(tmp_path), {"kafka": kafka.bootstrap}, settings=JobSettings(local_dir=str(tmp_path / "local"))
    )
    run(spark, names["build"](context))
    assert [(r["shop"], r["orders"], r["sales"]) for r in rows_of(tmp_path / "totals")] == [("a", 2, 7)]
