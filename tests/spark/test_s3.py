"""A whole job whose store and output are on an S3 protocol server (moto's); Spark itself has no S3 connector."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pyarrow.parquet as pq
import pytest
import s3fs
from moto.server import ThreadedMotoServer
from pyspark.sql import SparkSession

from state_runtime import ParquetSink, StreamingJob, aggregates, query_state
from state_runtime.store import open_store

from .jobs import SCHEMA, rows_of, settings, write_input

pytestmark = pytest.mark.spark
SECRET = "a-secret-that-must-not-travel"


@pytest.fixture
def bucket() -> Iterator[dict[str, Any]]:
    """Storage options of a server with an empty bucket `lake`."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    _, port = server.get_host_and_port()
    endpoint = f"http://127.0.0.1:{port}"
    client = boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id="key", aws_secret_access_key=SECRET, region_name="us-east-1"
    )
    client.create_bucket(Bucket="lake")
    yield {
        "key": "key",
        "secret": SECRET,
        "endpoint_url": endpoint,
        "client_kwargs": {"region_name": "us-east-1"},
    }
    server.stop()


def test_a_job_on_s3_restores_from_it_and_tells_it_no_secret(
    spark: SparkSession, tmp_path: Path, bucket: dict[str, Any]
) -> None:
    """Two runs without a common local disk: state comes back from the bucket, output is exact, credentials stay outside."""

    def run(first_file: int) -> None:
        write_input(tmp_path / "in", first_file, 4)
        shutil.rmtree(tmp_path / "local", ignore_errors=True)
        job = StreamingJob("sums", store="s3://lake/state", storage_options=bucket, settings=settings(tmp_path))
        (
            job.read(
                lambda s: s.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
            )
            .key_by("name")
            .aggregate(uid="sums", n=aggregates.count(), total=aggregates.sum("amount"))
            .write(ParquetSink("s3://lake/out", storage_options=bucket))
        )
        job.run(spark, trigger={"availableNow": True})

    run(0)
    run(4)
    spark.read.schema(SCHEMA).parquet(str(tmp_path / "in")).createOrReplaceTempView("input")
    expected = rows_of(spark.sql("SELECT name, count(*), sum(amount) FROM input GROUP BY name"))
    state = query_state(open_store("s3://lake/state", bucket), "sums", "sums", "aggregate")
    assert sorted((tuple(row.values()) for row in state.to_pylist()), key=repr) == expected
    files = s3fs.S3FileSystem(**bucket, use_listings_cache=False, skip_instance_cache=True)
    newest: dict[Any, tuple[Any, ...]] = {}
    for path in sorted(files.glob("lake/out/part-*.parquet")):
        for row in pq.read_table(files.open(path)).to_pylist():
            newest[row["name"]] = (row["name"], row["n"], row["total"])
    assert sorted(newest.values(), key=repr) == expected
    for path in files.find("lake"):
        assert SECRET.encode() not in files.cat_file(path), path
