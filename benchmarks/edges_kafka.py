"""Kafka on one side or both, ours beside Spark's own connector: how many events a second, and how late they come."""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.processors import OUTPUT_SCHEMA, RunningTotals
from benchmarks.report import Figure, Target, median, percentile, usable_cores
from examples.servers.kafka import KafkaBroker

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

    from confluent_kafka import Producer
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from state_runtime import Progress, StreamingJob
    from state_runtime.pipeline.sinks import Sink

__all__ = ["latency", "throughput"]

PER_BATCH = 100_000
KEYS = 200_000
WARM_BATCHES = 6
"""Batches that do not count: plans are learnt, Java compiles, state fills."""
SPARK_BATCHES = {"value state": (2, 5)}
"""Where Spark takes a minute for each batch: how many do not count, and how many there are."""
LATENCY_KEYS = 50_000
RATE = 1_000
DELTA_RATE = 10_000
WARM_S = 30
PARTITIONS = 2
SCHEMA = "key BIGINT, amount BIGINT"
"""Of a message; the amount is the producer's clock in microseconds."""
AIMS = {"value state": Target(">=", 8.0), "aggregate": Target(">=", 3.0)}
BY_CONNECTOR = "ours by Spark's connector"


def throughput(spark: SparkSession, broker: KafkaBroker, messages: int) -> tuple[list[Figure], Mapping[str, Any]]:
    """Measure events a second of a topic that is full already; two turns of each engine, one of the slowest."""
    _fill(broker, "events", messages)
    rates: dict[str, list[float]] = {}
    for turn in range(2):
        engines = ("ours", BY_CONNECTOR, "spark")
        for kind, who in [(kind, who) for kind in AIMS for who in engines[:: 1 if turn == 0 else -1]]:
            if turn > 0 and who == "spark" and kind in SPARK_BATCHES:
                continue
            with tempfile.TemporaryDirectory(prefix="stillstate-edges-") as folder:
                rates.setdefault(f"{kind}, {who}", []).extend(_rates(spark, broker.bootstrap, kind, who, Path(folder)))
    return [figure for kind in AIMS for figure in _of_throughput(kind, rates)], rates


def _of_throughput(kind: str, rates: Mapping[str, list[float]]) -> list[Figure]:
    ours, sparks = median(rates[f"{kind}, ours"]), median(rates[f"{kind}, spark"])
    by_connector = median(rates[f"{kind}, {BY_CONNECTOR}"])
    return [
        Figure(f"Kafka → {kind} → Delta, beside Spark's into Parquet", "events/s", ours, sparks, AIMS[kind]),
        Figure(f"the same by sources.kafka, beside ours by Spark's connector: {kind}", "events/s", ours, by_connector),
    ]


def latency(spark: SparkSession, broker: KafkaBroker, seconds: int) -> tuple[list[Figure], Mapping[str, Any]]:
    """Measure from the producer's clock to that of whoever reads what is committed."""
    taken = {
        (kind, who): _kafka_ages_ms(spark, broker, kind, who, seconds) for kind in AIMS for who in ("spark", "ours")
    }
    figures = [
        Figure(
            f"Kafka → {kind} → Kafka, {RATE:,} rows/s over {LATENCY_KEYS:,} keys, p{share}",
            "ms",
            percentile(taken[kind, "ours"], share),
            percentile(taken[kind, "spark"], share),
            Target("<=", 0.7),
        )
        for kind in AIMS
        for share in (50, 99)
    ]
    into_delta = _delta_ages_ms(spark, broker, seconds)
    figures += [
        Figure(
            f"Kafka → aggregate → Delta, {DELTA_RATE:,} rows/s over {LATENCY_KEYS:,} keys, p{share}",
            "s",
            percentile(into_delta, share) / 1000,
            None,
            Target("<=", 1.0) if share == 99 else None,
        )
        for share in (50, 99)
    ]
    ages = {f"{kind}, {who}": each for (kind, who), each in taken.items()} | {"aggregate into Delta": into_delta}
    return figures, {
        name: {"count": len(each), "ms": each[:: max(1, len(each) // 1000)]} for name, each in ages.items()
    }


def _kafka_ages_ms(spark: SparkSession, broker: KafkaBroker, kind: str, who: str, seconds: int) -> list[float]:
    name = f"{kind.replace(' ', '-')}-{who}"
    read, written = f"in-{name}", f"out-{name}"
    for topic in (read, written):
        broker.create_topic(topic, PARTITIONS)
    with (
        tempfile.TemporaryDirectory(prefix="stillstate-edges-") as folder,
        _steady(broker, read, RATE),
        _running(spark, broker.bootstrap, kind, who, (read, written), Path(folder)),
    ):
        return _ages_ms(broker, written, seconds)


def _delta_ages_ms(spark: SparkSession, broker: KafkaBroker, seconds: int) -> list[float]:
    """Return how old each row is when a reader sees the version of the table that has it."""
    from state_runtime import DeltaSink

    broker.create_topic("in-delta", PARTITIONS)
    with (
        tempfile.TemporaryDirectory(prefix="stillstate-edges-") as folder,
        _steady(broker, "in-delta", DELTA_RATE),
    ):
        out = f"{folder}/out"
        job = _our_job(broker.bootstrap, "in-delta", "aggregate", Path(folder), DeltaSink(out), per_batch=None)
        handle = job.start(spark)
        try:
            return _ages_in_table_ms(Path(out), seconds)
        finally:
            handle.stop()


# --- the two engines ---------------------------------------------------------------------------------------------------


def _parsed(frame: DataFrame) -> DataFrame:
    return frame.selectExpr(f"from_json(CAST(value AS STRING), '{SCHEMA}') AS m").select("m.*")


def _rates(spark: SparkSession, servers: str, kind: str, who: str, root: Path) -> list[float]:
    if who == "spark":
        return _sparks(spark, servers, kind, root)
    if who == "ours":
        return _ours(spark, servers, kind, root)
    return _ours(spark, servers, kind, root, lambda spark: _connector(spark, servers, "events", PER_BATCH))


def _connector(spark: SparkSession, servers: str, topic: str, per_batch: int | None) -> DataFrame:
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers).option("subscribe", topic)
    reader = reader.option("startingOffsets", "earliest")
    return (reader if per_batch is None else reader.option("maxOffsetsPerTrigger", per_batch)).load()


def _our_job(
    servers: str,
    topic: str,
    kind: str,
    root: Path,
    sink: Sink,
    *,
    per_batch: int | None,
    read: Callable[[SparkSession], DataFrame] | None = None,
) -> StreamingJob:
    from state_runtime import JobSettings, StreamingJob, aggregates, sources

    settings = JobSettings(parallelism=usable_cores(), local_dir=str(root / "local"))
    job = StreamingJob("edges", store=str(root / "store"), settings=settings)
    read = read or sources.kafka(
        topic, bootstrap_servers=servers, starting="earliest", max_offsets_per_trigger=per_batch
    )
    keyed = job.read(read).transform(_parsed).key_by("key")
    if kind == "aggregate":
        made = keyed.aggregate(
            uid="sums", n=aggregates.count(), total=aggregates.sum("amount"), last=aggregates.max("amount")
        )
    else:
        made = keyed.transform_with_state(RunningTotals(), OUTPUT_SCHEMA, uid="totals")
    made.write(sink)
    return job


def _ours(
    spark: SparkSession,
    servers: str,
    kind: str,
    root: Path,
    read: Callable[[SparkSession], DataFrame] | None = None,
) -> list[float]:
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
    job = _our_job(servers, "events", kind, root, sink, per_batch=PER_BATCH, read=read)
    job.run(spark, trigger={"available_now": True}, on_progress=watch)
    return rates[WARM_BATCHES:]


def _sparks_frame(spark: SparkSession, servers: str, topic: str, kind: str, per_batch: int | None) -> DataFrame:
    from pyspark.sql import functions as F

    rows = _parsed(_connector(spark, servers, topic, per_batch))
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
    warm, batches = SPARK_BATCHES.get(kind, (WARM_BATCHES, sys.maxsize))
    while not query.awaitTermination(1) and len(_batches(query)) < batches:
        pass
    query.stop()
    return [p["numInputRows"] / (p["durationMs"]["triggerExecution"] / 1000) for p in _batches(query)][warm:]


def _batches(query: StreamingQuery) -> list[Any]:
    return [p for p in query.recentProgress if p["numInputRows"]]


@contextmanager
def _running(
    spark: SparkSession, servers: str, kind: str, who: str, topics: tuple[str, str], root: Path
) -> Iterator[None]:
    """Run an engine from one topic to another until the block is left."""
    read, written = topics
    if who == "ours":
        from state_runtime import KafkaSink

        sink = KafkaSink(written, bootstrap_servers=servers, key="key")
        handle = _our_job(servers, read, kind, root, sink, per_batch=None).start(spark)
        try:
            yield
        finally:
            handle.stop()
        return
    frame = _sparks_frame(spark, servers, read, kind, None)
    made = frame.selectExpr("CAST(key AS STRING) AS key", "to_json(struct(*)) AS value")
    writer = made.writeStream.format("kafka").option("kafka.bootstrap.servers", servers).option("topic", written)
    query = writer.outputMode("update").option("checkpointLocation", str(root / "cp")).start()
    try:
        yield
    finally:
        query.stop()


# --- topics ------------------------------------------------------------------------------------------------------------


def _producer(servers: str) -> Producer:
    from confluent_kafka import Producer

    return Producer({"bootstrap.servers": servers, "linger.ms": 5, "queue.buffering.max.messages": 1_000_000})


def _message(number: int, keys: int) -> bytes:
    return json.dumps({"key": number * 7919 % keys, "amount": time.time_ns() // 1000}).encode()


def _fill(broker: KafkaBroker, topic: str, messages: int) -> None:
    broker.create_topic(topic, PARTITIONS)
    producer = _producer(broker.bootstrap)
    for number in range(messages):
        producer.produce(topic, _message(number, KEYS), partition=number % PARTITIONS)
        if number % 50_000 == 0:
            producer.flush()
    producer.flush()


@contextmanager
def _steady(broker: KafkaBroker, topic: str, rate: int) -> Iterator[None]:
    """Send messages at a steady rate, from a process of its own, until the block is left."""
    context = multiprocessing.get_context("spawn")
    over = context.Event()
    sender = context.Process(target=_send, args=(broker.bootstrap, topic, rate, over), daemon=True)
    sender.start()
    try:
        yield
    finally:
        over.set()
        sender.join()


def _send(servers: str, topic: str, rate: int, over: Event) -> None:
    producer, begun_s, sent = _producer(servers), time.perf_counter(), 0
    while not over.wait(0.005):
        due = int((time.perf_counter() - begun_s) * rate)
        for number in range(sent, due):
            producer.produce(topic, _message(number, LATENCY_KEYS), partition=number % PARTITIONS)
        sent = max(sent, due)
        producer.poll(0)
    producer.flush()


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
            value = message.value()
            if message.error() is not None or value is None:
                continue
            first_s = time.perf_counter() if first_s is None else first_s
            if time.perf_counter() - first_s >= WARM_S:
                ages.append((now_us - json.loads(value)["last"]) / 1000)
    consumer.close()
    return ages


def _ages_in_table_ms(out: Path, seconds: int) -> list[float]:
    """The same for the rows that each version of a Delta table adds; looked at every 10 ms."""
    import pyarrow.parquet as pq

    log, version, ages = out / "_delta_log", 0, list[float]()
    first_s = None
    while first_s is None or time.perf_counter() - first_s < WARM_S + seconds:
        commit = log / f"{version:020}.json"
        if not commit.exists():
            time.sleep(0.01)
            continue
        now_us = time.time_ns() // 1000
        version += 1
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        for path in [action["add"]["path"] for action in actions if "add" in action]:
            first_s = time.perf_counter() if first_s is None else first_s
            if time.perf_counter() - first_s >= WARM_S:
                last_us = pq.read_table(out / path, columns=["last"])["last"].to_numpy()
                ages.extend(((now_us - last_us) / 1000).tolist())
    return ages
