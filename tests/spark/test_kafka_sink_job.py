"""Jobs that write Kafka topics: the page's example, restarts, other shards, new roots and topics that are not there."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from examples.servers.kafka import KafkaBroker
from state_runtime import JobContext, JobSettings
from state_runtime.base.errors import InvalidPipeline
from state_runtime.sinks.kafka import KafkaSink

from ..conftest import ROOT
from ..kafka_topics import messages, values
from .jobs import ROWS_PER_FILE, assert_kafka_equals_batch, kafka_sinks, two_step_job, write_input

pytestmark = [pytest.mark.spark, pytest.mark.servers]
AVAILABLE = {"availableNow": True}


@pytest.fixture
def topics(kafka: KafkaBroker) -> str:
    """The end of the names of two topics."""
    name = uuid.uuid4().hex[:8]
    for topic in ("steps", "buckets"):
        kafka.create_topic(f"{topic}-{name}", 2)
    return name


def run(spark: SparkSession, root: Path, kafka: KafkaBroker, topics: str, **changes: Any) -> None:
    sinks = kafka_sinks(kafka.bootstrap, f"-{topics}")
    two_step_job(root, sinks=sinks, **changes).run(spark, trigger=AVAILABLE)


def test_topics_are_exact_over_restarts_and_other_shards(
    spark: SparkSession, tmp_path: Path, kafka: KafkaBroker, topics: str
) -> None:
    """One topic has all rows, of the other the newest record of each key counts."""
    for first, files, parallelism in ((0, 3, 2), (3, 2, 3)):
        write_input(tmp_path / "in", first, files)
        run(spark, tmp_path, kafka, topics, parallelism=parallelism)
        assert_kafka_equals_batch(spark, tmp_path, kafka.bootstrap, f"-{topics}")
    staged = list((tmp_path / "store" / "steps" / "outputs").rglob("*.parquet"))
    assert len(staged) <= 2 * 3, "rows that were written are kept for one more checkpoint at most"


def test_a_root_that_is_made_anew_is_not_taken_for_the_old_one(
    spark: SparkSession, tmp_path: Path, kafka: KafkaBroker, topics: str
) -> None:
    """Its epochs count from 1 again: by the epoch alone the sink would skip them."""
    write_input(tmp_path / "in", 0, 2)
    run(spark, tmp_path, kafka, topics)
    shutil.rmtree(tmp_path / "store")
    shutil.rmtree(tmp_path / "local")
    run(spark, tmp_path, kafka, topics)
    assert len(values(kafka.bootstrap, f"steps-{topics}")) == 2 * 2 * ROWS_PER_FILE


def test_a_root_that_was_put_back_from_an_older_copy_goes_on_above_what_the_group_says(
    spark: SparkSession, tmp_path: Path, kafka: KafkaBroker, topics: str
) -> None:
    """What it reads again comes again, and what is new is not skipped."""
    write_input(tmp_path / "in", 0, 1)
    run(spark, tmp_path, kafka, topics)
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    write_input(tmp_path / "in", 1, 2)
    run(spark, tmp_path, kafka, topics)
    for name in ("store", "local"):
        shutil.rmtree(tmp_path / name)
    (tmp_path / "copy").rename(tmp_path / "store")
    write_input(tmp_path / "in", 3, 1)
    run(spark, tmp_path, kafka, topics)
    rows = [row["id"] for row in values(kafka.bootstrap, f"steps-{topics}")]
    assert (set(rows), len(rows)) == (set(range(4 * ROWS_PER_FILE)), 6 * ROWS_PER_FILE)


def test_a_topic_that_is_not_there_is_refused_before_anything_is_written(
    spark: SparkSession, tmp_path: Path, kafka: KafkaBroker, topics: str
) -> None:
    write_input(tmp_path / "in", 0, 1)
    sinks = kafka_sinks(kafka.bootstrap, f"-{topics}")[0], KafkaSink("nowhere", bootstrap_servers=kafka.bootstrap)
    with pytest.raises(InvalidPipeline, match="sink 'buckets': there is no topic 'nowhere'"):
        two_step_job(tmp_path, sinks=sinks).run(spark, trigger=AVAILABLE)
    assert not (tmp_path / "store" / "steps").exists()


def test_the_job_of_the_page_runs_as_it_stands_there(spark: SparkSession, tmp_path: Path, kafka: KafkaBroker) -> None:
    code = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "kafka-out.md").read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code[0], "kafka-out.md", "exec"), names)
    kafka.create_topic("orders", 2)
    settings = JobSettings(parallelism=2, local_dir=str(tmp_path / "local"))
    options = {"servers": kafka.bootstrap}
    context = JobContext("orders", str(tmp_path / "store"), options=options, settings=settings)
    names["build"](context).run(spark, trigger=AVAILABLE)
    orders = values(kafka.bootstrap, "orders")
    assert sorted(row["id"] for row in orders) == list(range(len(orders)))
    assert len(orders) >= 100
    totals = {m.key(): json.loads(m.value()) for m in messages(kafka.bootstrap, "totals")}
    assert sum(row["spent"] for row in totals.values()) == sum(row["amount"] for row in orders)
    assert set(totals) == {b"%d" % customer for customer in range(7)}
