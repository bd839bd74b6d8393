"""Jobs that read topics of Kafka: exact over restarts, other shards and a topic that was made anew."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from examples.servers.kafka import KafkaBroker
from state_runtime import JobContext, JobSettings, ParquetSink, StreamingJob, aggregates, sources
from state_runtime.base.errors import InvalidPipeline, MissingSource
from stillstate.orchestration.cli import app

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


def spec_of(root: Path, code: str) -> Path:
    """A configuration with a job of that code, in a folder of its own."""
    module = f"shops_{next(NAMES)}"
    (root / f"{module}.py").write_text(code)
    file = root / "stillstate.yaml"
    file.write_text(f"version: 1\njobs:\n  shops: {{entry_point: '{module}:build', store: '{root / 'store'}'}}\n")
    return file


def code_of(broker: KafkaBroker, topic: str, root: Path) -> str:
    return (
        "from pathlib import Path\nfrom types import SimpleNamespace\nfrom tests.spark.test_kafka_job import job_on\n"
        f"def build(context):\n    broker = SimpleNamespace(bootstrap={broker.bootstrap!r})\n"
        f"    return job_on(broker, {topic!r}, Path({str(root)!r}))\n"
    )


def test_a_source_is_set_to_another_position_and_the_state_is_kept(
    spark: SparkSession, kafka: KafkaBroker, tmp_path: Path
) -> None:
    """Back to the first record, over a stretch, and to a topic that was made anew: without another name for the source."""
    topic = f"job-{next(NAMES)}"
    kafka.create_topic(topic, 2)
    send(kafka, topic, range(10))
    run(spark, job_on(kafka, topic, tmp_path))
    config = str(spec_of(tmp_path, code_of(kafka, topic, tmp_path)))

    def set_to(place: str) -> str:
        done = CliRunner().invoke(app, ["source", "set", "shops", "orders", "--to", place, "--yes", "-c", config])
        assert done.exit_code == 0, done.output
        run(spark, job_on(kafka, topic, tmp_path))
        return done.output

    assert "10 records are read again" in set_to("earliest")
    assert sorted(row["id"] for row in rows_of(tmp_path / "orders")) == list(range(10)), "it knows what it has seen"
    assert max(row["orders"] for row in rows_of(tmp_path / "shops")) == 4, "and counts it again"
    send(kafka, topic, range(10, 20))
    assert "10 records are skipped" in set_to("latest")
    send(kafka, topic, range(20, 22))
    run(spark, job_on(kafka, topic, tmp_path))
    assert sorted(row["id"] for row in rows_of(tmp_path / "orders")) == [*range(10), 20, 21]
    kafka.delete_topic(topic)
    kafka.create_topic(topic, 2)
    send(kafka, topic, range(30, 33))
    with pytest.raises(MissingSource, match="deleted and made again"):
        run(spark, job_on(kafka, topic, tmp_path))
    set_to("earliest")
    assert sorted(row["id"] for row in rows_of(tmp_path / "orders")) == [*range(10), 20, 21, *range(30, 33)]


def test_a_source_that_a_function_opens_is_found_as_a_start_finds_it(
    spark: SparkSession, kafka: KafkaBroker, tmp_path: Path
) -> None:
    """Spark is started for it, in the command's own process, and no row is read."""
    topic = f"job-{next(NAMES)}"
    kafka.create_topic(topic, 1)
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    producer.produce(topic, value="a")
    assert producer.flush(30) == 0
    code = (
        "from stillstate import ParquetSink, StreamingJob, aggregates, sources\n"
        "def build(context):\n"
        f"    job = StreamingJob('shops', store={str(tmp_path / 'store')!r})\n"
        f"    topic = sources.kafka({topic!r}, bootstrap_servers={kafka.bootstrap!r}, starting='earliest')\n"
        "    read = job.read(lambda spark: topic.load(spark).withWatermark('timestamp', '1 second'))\n"
        "    counted = read.key_by('value').aggregate(uid='n', n=aggregates.count())\n"
        f"    counted.write(ParquetSink({str(tmp_path / 'out')!r}))\n"
        "    return job\n"
    )
    names: dict[str, Any] = {"__name__": "shops"}
    exec(compile(code, "shops", "exec"), names)
    run(spark, names["build"](None))
    command = ["source", "set", "shops", topic, "--to", "earliest", "--dry-run", "--json", "-c"]
    done = subprocess.run(
        [sys.executable, "-m", "stillstate.orchestration.cli", *command, str(spec_of(tmp_path, code))],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [(p["was"], p["will_be"], p["again"]) for p in json.loads(done.stdout)["partitions"]] == [(1, 0, 1)]


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
