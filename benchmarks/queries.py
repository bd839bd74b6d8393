"""`python -m benchmarks.queries`: a plain query beside the same pipeline written in steps.

Jobs over the same files, in turns: windows in append mode and running sums, by `job.query`, by steps, and by steps with a
projection before the sink. A query ends with one, for the names of its columns; where it gives no more than names, the operator
writes its rows under them itself, and Spark runs no step for it. By the processor's time of driver, Java and workers together and by the clock.
Prints one table and writes benchmarks/results/queries.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.epochs import Taken, Turns, figures_of_pairs, kinds_of, report_epochs
from benchmarks.report import Figure, Target, usable_cores
from benchmarks.sources import write_minutes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from state_runtime import StreamingJob

__all__ = ["app"]

PAIRS = {
    "windows, query / steps": ("windows-query", "windows-steps"),
    "windows, query / steps with a projection": ("windows-query", "windows-projected"),
    "running sums, query / steps": ("sums-query", "sums-steps"),
    "running sums, query / steps with a projection": ("sums-query", "sums-projected"),
}

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def main(
    rows: Annotated[list[int] | None, typer.Option(min=2, help="Rows of an epoch; may be given again.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="That count, of each job in each turn.")] = 25,
    turns: Annotated[int, typer.Option(min=1, help="How often each job runs.")] = 2,
) -> None:
    """Measure plain queries; the median of all epochs of a job counts.

    Example: [b]python -m benchmarks.queries --rows 1000[/b]
    """
    report_epochs("queries", rows, Turns(epochs, turns, kinds_of(PAIRS), _job, _write), _figures)


def _figures(rows: int, taken: Mapping[str, Taken]) -> list[Figure]:
    return figures_of_pairs(PAIRS, rows, taken, Target("<=", 1.05))


def _write(root: Path, rows: int, files: int) -> None:
    write_minutes(root / "in", rows, files)


def _job(root: Path, kind: str) -> StreamingJob:
    from pyspark.sql import functions as F

    from state_runtime import JobSettings, ParquetSink, StreamingJob, aggregates, windows

    settings = JobSettings(parallelism=usable_cores(), local_dir=str(root / "local"))
    job = StreamingJob(kind, store=str(root / "store"), settings=settings)

    def read(spark: SparkSession) -> DataFrame:
        reader = spark.readStream.schema("id long, a long, amount long, at timestamp")
        return reader.option("maxFilesPerTrigger", 1).parquet(str(root / "in")).withWatermark("at", "1 minute")

    called = [F.count("*").alias("n"), F.sum("amount").alias("total")]
    given = {"n": aggregates.count(), "total": aggregates.sum("amount")}
    if kind == "windows-query":
        made = job.query(lambda spark: read(spark).groupBy(F.window("at", "10 seconds"), "a").agg(*called))
    elif kind == "sums-query":
        made = job.query(lambda spark: read(spark).groupBy("a").agg(*called), output_mode="update")
    elif kind.startswith("windows"):
        keyed = job.read(read).key_by("a")
        made = keyed.window(windows.tumbling("10 seconds"), uid="windows", output_mode="append", **given)
    else:
        made = job.read(read).key_by("a").aggregate(uid="sums", **given)
    if kind.endswith("projected"):
        made = made.transform(lambda df: df.withColumnRenamed("a", "key"))
    made.write(ParquetSink(str(root / "out")))
    return job


if __name__ == "__main__":
    app()
