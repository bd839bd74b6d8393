"""Kafka on one side or both, ours beside Spark's own connector: how many events a second, and how late they come."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.processors import OUTPUT_SCHEMA, RunningTotals
from benchmarks.report import Figure, Target, median, percentile, usable_cores
from examples.servers.kafka import KafkaBroker

if TYPE_CHECKING:
    from confluent_kafka import Producer
    from pyspark.sql import DataFrame, SparkSession

    from state_runtime import Progress, StreamingJob
    from state_runtime.pipeline.sinks import Sink

__all__ = ["latency", "throughput"]

PER_BATCH = 100_000
KEYS = 200_000
WARM_BATCHES = 6
"""Batches that do not count: plans are learnt, Java compiles, state fills."""
LATENCY_KEYS = 50_000
RATE = 1_000
WARM_S = 30
PARTITIONS = 2
SCHEMA = "key BIGINT, amount BIGINT"
"""Of a message; the amount is the producer's clock in microseconds."""
AIMS = {"value state": Target(">=", 8.0), "aggregate": Target(">=", 3.0)}


def throughput(spark: SparkSession, broker: KafkaBroker, messages: int) -> tuple[list[Figure], Mapping[str, Any]]:
    """Measure events a second of a topic that is full already; two turns of each engine."""
    _fill(broker, "events", messages)
    rates: dict[str, list[float]] = {}
    for turn in range(2):
        runs = [(kind, who) for kind in AIMS for who in (("ours", "spark") if turn == 0 else ("spark", "ours"))]
        for kind, who in runs:
            with tempfile.TemporaryDirectory(prefix="stillstate-edges-") as folder:
                run = _ours if who == "ours" else _sparks
                rates.setdefault(f"{kind}, {who}", []).extend(run(spark, broker.bootstrap, kind, Path(folder)))
    figures = [
        Figure(
            f"Kafka → {kind} → Delta, beside Spark's into Parquet",
            "events/s",
            median(rates[f"{kind}, ours"]),
            median(rates[f"{kind}, spark"]),
            aim,
        )
        for kind, aim in AIMS.items()
    ]
    return figures, rates


def latency(spark: SparkSession, broker: KafkaBroker, seconds: int) -> tuple[list[Figure], Mapping[str, Any]]:
    """Measure from the producer's clock to that of a consumer that reads committed records."""
    taken: dict[str, list[float]] = {}
    for who in ("spark", "ours"):
        broker.create_topic(f"in-{who}", PARTITIONS)
        broker.create_topic(f"out-{who}", PARTITIONS)
        with tempfile.TemporaryDirectory(prefix="stillstate-edges-") as folder, _steady(broker, f"in-{who}"):
            with _running(spark, broker.bootstrap, who, Path(folder)):
                taken[who] = _ages_ms(broker, f"out-{who}", seconds)
    ours, sparks = taken["ours"], taken["spark"]
    figures = [
        Figure(
            f"Kafka → value state → Kafka, {RATE:,} rows/s over {LATENCY_KEYS:,} keys, {name}",
            "ms",
            percentile(ours, share),
            percentile(sparks, share),
            Target("<=", 0.7),
        )
        for name, share in (("p50", 50), ("p99", 99))
    ]
    return figures, {who: {"count": len(ages), "ms": ages[:: max(1, len(ages) // 1000)]} for who, ages in taken.items()}


# --- the two engines ---------------------------------------------------------------------------------------------------


def _parsed(frame: DataFrame) -> DataFrame:
    return frame.selectExpr(f"from_json(CAST(value AS STRING), '{SCHEMA}') AS m").select("m.*")


def _our_job(servers: str, topic: str, kind: str, root: Path, sink: Sink, *, per_batch: int | None) -> StreamingJob:
    from state_runtime import JobSettings, StreamingJob, aggregates, sources

    settings = JobSettings(parallelism=usable_cores(), local_dir=str(root / "local"))
    job = StreamingJob("edges", store=str(root / "store"), settings=settings)
    read = sources.kafka(topic, bootstrap_servers=servers, starting="earliest", max_offsets_per_trigger=per_batch)
    keyed = job.read(read).transform(_parsed).key_by("key")
    if kind == "aggregate":
        made = keyed.aggregate(
            uid="sums", n=aggregates.count(), total=aggregates.sum("amount"), last=aggregates.max("amount")
        )
    else:
        made = keyed.transform_with_state(RunningTotals(), OUTPUT_SCHEMA, uid="totals")
    made.write(sink)
    return job


def _ours(spark: SparkSession, servers: str, kind: str, root: Path) -> list[float]:
    from state_runtime import DeltaSink

    rates: list[float] = []
    before = time.perf_counter()

    def watch(progress: Progress) -> None:
        nonlocal before
        now = time.perf_counter()
        if progress.input_rows:
            rates.append(progress.input_rows / (now - before))
        before = now

    sink = DeltaSink(str(root / "out"))
    job = _our_job(servers, "events", kind, root, sink, per_batch=PER_BATCH)
    job.run(spark, trigger={"available_now": True}, on_progress=watch)
    return rates[WARM_BATCHES:]


def _sparks_frame(spark: SparkSession, servers: str, topic: str, kind: str, per_batch: int | None) -> DataFrame:
    from pyspark.sql import functions as F

    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers).option("subscribe", topic)
    reader = reader.option("startingOffsets", "earliest")
    if per_batch is not None:
        reader = reader.option("maxOffsetsPerTrigger", per_batch)
    rows = _parsed(reader.load())
    if kind == "aggregate":
        return rows.groupBy("key").agg(
            F.count("*").alias("n"), F.sum("amount").alias("total"), F.max("amount").alias("last")
        )
    return rows.groupBy("key").transformWithState(RunningTotals(), OUTPUT_SCHEMA, "Update", "None")


def _sparks(spark: SparkSession, servers: str, kind: str, root: Path) -> list[float]:
    out = str(root / "out")
    frame = _sparks_frame(spark, servers, "events", kind, PER_BATCH)

    def write(rows: DataFrame, batch_id: int) -> None:
        rows.write.mode("append").parquet(out)

    writer = frame.writeStream.outputMode("update").foreachBatch(write).option("checkpointLocation", str(root / "cp"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    done = [p for p in query.recentProgress if p["numInputRows"]]
    return [p["numInputRows"] / (p["durationMs"]["triggerExecution"] / 1000) for p in done][WARM_BATCHES:]


@contextmanager
def _running(spark: SparkSession, servers: str, who: str, root: Path) -> Iterator[None]:
    """Run an engine from one topic to another until the block is left."""
    if who == "ours":
        from state_runtime import KafkaSink

        sink = KafkaSink("out-ours", bootstrap_servers=servers, key="key")
        handle = _our_job(servers, "in-ours", "value state", root, sink, per_batch=None).start(spark)
        try:
            yield
        finally:
            handle.stop()
        return
    frame = _sparks_frame(spark, servers, "in-spark", "value state", None)
    made = frame.selectExpr("CAST(key AS STRING) AS key", "to_json(struct(*)) AS value")
    writer = made.writeStream.format("kafka").option("kafka.bootstrap.servers", servers).option("topic", "out-spark")
    query = writer.outputMode("update").option("checkpointLocation", str(root / "cp")).start()
    try:
        yield
    finally:
        query.stop()


# --- topics ------------------------------------------------------------------------------------------------------------


def _producer(broker: KafkaBroker) -> Producer:
    from confluent_kafka import Producer

    return Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 5, "queue.buffering.max.messages": 1_000_000})


def _message(number: int, keys: int) -> bytes:
    return json.dumps({"key": number * 7919 % keys, "amount": time.time_ns() // 1000}).encode()


def _fill(broker: KafkaBroker, topic: str, messages: int) -> None:
    broker.create_topic(topic, PARTITIONS)
    producer = _producer(broker)
    for number in range(messages):
        producer.produce(topic, _message(number, KEYS), partition=number % PARTITIONS)
        if number % 50_000 == 0:
            producer.flush()
    producer.flush()


@contextmanager
def _steady(broker: KafkaBroker, topic: str) -> Iterator[None]:
    """Send messages at a steady rate until the block is left."""
    over = threading.Event()

    def send() -> None:
        producer, begun_s, sent = _producer(broker), time.perf_counter(), 0
        while not over.wait(0.005):
            due = int((time.perf_counter() - begun_s) * RATE)
            for number in range(sent, due):
                producer.produce(topic, _message(number, LATENCY_KEYS), partition=number % PARTITIONS)
            sent = max(sent, due)
            producer.poll(0)
        producer.flush()

    thread = threading.Thread(target=send, name="steady", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _ages_ms(broker: KafkaBroker, topic: str, seconds: int) -> list[float]:
    """Return how old each committed record is when a consumer sees it, behind a time that does not count."""
    from confluent_kafka import Consumer

    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": f"bench-{topic}",
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 5,
        }
    )
    consumer.subscribe([topic])
    ages: list[float] = []
    first_s = None
    while first_s is None or time.perf_counter() - first_s < WARM_S + seconds:
        messages = consumer.consume(0, 0.0) or consumer.consume(1, 0.02)
        messages += consumer.consume(10_000, 0.0)
        now_us = time.time_ns() // 1000
        for message in messages:
            if message.error() is not None:
                continue
            first_s = time.perf_counter() if first_s is None else first_s
            if time.perf_counter() - first_s >= WARM_S:
                ages.append((now_us - json.loads(message.value())["last"]) / 1000)
    consumer.close()
    return ages
