"""`python -m benchmarks.edges`: what the edges cost, with a real broker and a real database.

    sinks        an epoch of 100,000 rows into each kind of table, beside the same epoch into Parquet files
    throughput   JSON from a Kafka topic through an operator into a table, beside Spark's own connector and operators
                 into Parquet files (no jar of Delta is used); both with durable checkpoints
    latency      Kafka to Kafka at a steady rate: the producer's clock to the consumer's, of committed records, beside
                 Spark's micro-batches into its Kafka sink, which has no transactions

Prints a table for each and writes benchmarks/results/edges_<part>.json. `make kafka` and PostgreSQL 15 are needed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from benchmarks.edges_kafka import latency, throughput
from benchmarks.engines import COMMON_CONF, PEER_CONF, set_up_python
from benchmarks.epochs import Taken, Turns
from benchmarks.measure import new_console
from benchmarks.report import Figure, Report, Target, describe_machine, median, render_table, usable_cores, write_json
from examples.servers.kafka import KafkaBroker
from examples.servers.postgres import PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from state_runtime import StreamingJob
    from state_runtime.pipeline.sinks import Sink

__all__ = ["app"]

RESULTS = Path(__file__).parent / "results"
JARS = Path(__file__).parent.parent / ".kafka" / "spark"
ROWS = 100_000
DATABASE_ENV = "STILLSTATE_BENCH_DATABASE"
SINKS = ("parquet", "delta", "delta-merge", "iceberg", "iceberg-merge", "postgres", "postgres-merge", "kafka")
SINK_BOUND = 1.5
PARTS = ("sinks", "throughput", "latency")

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def main(
    parts: Annotated[str, typer.Option(help=f"Of {', '.join(PARTS)}, with commas.")] = ",".join(PARTS),
    epochs: Annotated[int, typer.Option(min=1, help="Of each sink in each turn, that count.")] = 5,
    messages: Annotated[int, typer.Option(min=1000, help="In the topic of `throughput`.")] = 2_000_000,
    seconds: Annotated[int, typer.Option(min=10, help="Of each engine in `latency`, that count.")] = 60,
) -> None:
    """Measure the edges.

    Example: [b]python -m benchmarks.edges --parts sinks[/b]
    """
    wanted = parts.split(",")
    if unknown := set(wanted) - set(PARTS):
        raise typer.BadParameter(f"{min(unknown)!r} is none of {', '.join(PARTS)}")
    set_up_python()
    from state_runtime.spark.session import build_session

    jars = sorted(map(str, JARS.glob("*.jar")))
    if not jars and wanted != ["sinks"]:
        raise typer.BadParameter(f"Spark's connector is not in {JARS}: make bench-edges gets it")
    conf = {**COMMON_CONF, **PEER_CONF, "spark.sql.shuffle.partitions": str(usable_cores())}
    spark = build_session("edges", master=f"local[{usable_cores()}]", conf={**conf, "spark.jars": ",".join(jars)})
    measures: dict[str, Callable[[KafkaBroker], tuple[list[Figure], Mapping[str, Any]]]] = {
        "sinks": lambda broker: _sinks(spark, broker, epochs),
        "throughput": lambda broker: throughput(spark, broker, messages),
        "latency": lambda broker: latency(spark, broker, seconds),
    }
    try:
        with _servers() as broker:
            for part in wanted:
                figures, samples = measures[part](broker)
                made_at = datetime.now(UTC).isoformat(timespec="seconds")
                settings = {"epochs": epochs, "messages": messages, "seconds": seconds, "all": conf}
                report = Report(f"edges_{part}", made_at, tuple(figures), describe_machine(), settings, samples)
                new_console().print(render_table(report))
                write_json(report, RESULTS / f"edges_{part}.json")
    finally:
        spark.stop()


@contextmanager
def _servers() -> Iterator[KafkaBroker]:
    with tempfile.TemporaryDirectory(prefix="stillstate-edges-") as folder:
        database = PostgresServer()
        try:
            os.environ[DATABASE_ENV] = database.url(database.database())
            with KafkaBroker(Path(folder) / "broker") as broker:
                yield broker
        finally:
            database.close()


def _sinks(spark: SparkSession, broker: KafkaBroker, epochs: int) -> tuple[list[Figure], Mapping[str, Any]]:
    def job(root: Path, kind: str) -> StreamingJob:
        return _job(root, kind, broker.bootstrap)

    taken: Mapping[str, Taken] = Turns(epochs, 2, SINKS, job, _write, warm=4).taken(spark, ROWS)
    parquet_ms = median(taken["parquet"].ms)
    found = [
        Figure(
            f"an epoch of {ROWS:,} rows: {kind} / parquet",
            "ms",
            median(taken[kind].ms),
            parquet_ms,
            Target("<=", SINK_BOUND),
        )
        for kind in SINKS[1:]
    ]
    return found, {kind: {"ms": each.ms, "cpu_ms": each.cpu_ms} for kind, each in taken.items()}


def _write(root: Path, rows: int, files: int) -> None:
    (root / "in").mkdir()
    for number in range(files):
        keys = pa.array(range(rows), pa.int64())
        table = pa.table({"k": keys, "v": pa.array([number] * rows, pa.int64())})
        pq.write_table(table, root / "in" / f"{number:05}.parquet")


def _job(root: Path, kind: str, servers: str) -> StreamingJob:
    """Newest value of each of as many keys as an epoch has rows: each epoch gives all of them."""
    from state_runtime import JobSettings, StreamingJob, aggregates

    settings = JobSettings(parallelism=usable_cores(), local_dir=str(root / "local"))
    job = StreamingJob(kind, store=str(root / "store"), settings=settings)

    def read(session: SparkSession) -> DataFrame:
        reader = session.readStream.schema("k long, v long").option("maxFilesPerTrigger", 1)
        return reader.parquet(str(root / "in"))

    made = job.read(read).key_by("k").aggregate(uid="sums", n=aggregates.count(), total=aggregates.sum("v"))
    made.write(_sink(root, kind, servers))
    return job


def _sink(root: Path, kind: str, servers: str) -> Sink:
    from state_runtime import DeltaSink, IcebergSink, KafkaSink, ParquetSink, SqlSink

    merge_on = ["k"] if kind.endswith("-merge") else []
    # Each turn is a root of its own, and so is each table.
    own = f"{kind.replace('-', '_')}_{root.name[-6:]}_{len(list(root.parent.glob('*')))}_{os.urandom(3).hex()}"
    if kind.startswith("delta"):
        return DeltaSink(str(root / "out" / own), merge_on=merge_on)
    if kind.startswith("iceberg"):
        (root / "out").mkdir(exist_ok=True)
        options = {"type": "sql", "uri": f"sqlite:///{root}/out/{own}.db", "warehouse": f"file://{root}/out/{own}"}
        return IcebergSink("bench.sums", catalog="lake", catalog_options=options, merge_on=merge_on)
    if kind.startswith("postgres"):
        return SqlSink(own.lower(), dsn_env=DATABASE_ENV, merge_on=merge_on)
    if kind == "kafka":
        return KafkaSink(own, bootstrap_servers=servers, key="k", create={"partitions": 2, "replication": 1})
    return ParquetSink(str(root / "out" / own))


if __name__ == "__main__":
    app()
