"""`python -m benchmarks.sources`: what it costs that sources have names, and joins may stand anywhere.

Pairs of jobs over the same files, in turns: two streams that are united inside one `read()`, beside two named sources that
the graph unites; and a join that alone reads its two sources, beside the same join behind a step that changes nothing, for
which the batch goes through one more shuffle. By the processor's time of driver, Java and workers together and by the clock.
Prints one table and writes benchmarks/results/sources.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from benchmarks.epochs import Taken, Turns, figures_of_pairs, kinds_of, report_epochs
from benchmarks.report import Figure, usable_cores

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from state_runtime import StreamingJob

__all__ = ["app", "write_minutes"]

PAIRS = {
    "two named sources / united in read()": ("named", "in-read"),
    "join behind a step / of sources alone": ("join-anywhere", "join-of-sources"),
}
app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def main(
    rows: Annotated[list[int] | None, typer.Option(min=2, help="Rows of an epoch; may be given again.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="That count, of each job in each turn.")] = 25,
    turns: Annotated[int, typer.Option(min=1, help="How often each job runs.")] = 2,
) -> None:
    """Measure named sources and joins anywhere; the median of all epochs of a job counts.

    Example: [b]python -m benchmarks.sources --rows 1000[/b]
    """
    report_epochs("sources", rows, Turns(epochs, turns, kinds_of(PAIRS), _job, _write), _figures)


def _figures(rows: int, taken: Mapping[str, Taken]) -> list[Figure]:
    return figures_of_pairs(PAIRS, rows, taken)


def _write(root: Path, rows: int, files: int) -> None:
    for name in ("left", "right"):
        write_minutes(root / name, rows // 2, files)


def write_minutes(folder: Path, rows: int, files: int) -> None:
    """A file is a minute of events."""
    folder.mkdir()
    for number in range(files):
        numbers = pa.array(range(number * rows, (number + 1) * rows), pa.int64()).to_numpy()
        at = pa.array(1_700_000_000_000_000 + numbers * 60_000_000 // rows, pa.timestamp("us", "UTC"))
        table = pa.table({"id": numbers, "a": numbers % 997, "amount": numbers % 100, "at": at})
        pq.write_table(table, folder / f"{number:05}.parquet")


def _job(root: Path, kind: str) -> StreamingJob:
    from state_runtime import JobSettings, ParquetSink, StreamingJob, aggregates

    settings = JobSettings(parallelism=usable_cores(), local_dir=str(root / "local"))
    job = StreamingJob(kind, store=str(root / "store"), settings=settings)

    def read(name: str, spark: SparkSession) -> DataFrame:
        reader = spark.readStream.schema("id long, a long, amount long, at timestamp")
        return reader.option("maxFilesPerTrigger", 1).parquet(str(root / name)).withWatermark("at", "1 minute")

    if kind.startswith("join"):
        left = job.read(lambda spark: read("left", spark))
        if kind == "join-anywhere":
            left = left.transform(lambda df: df.select("id", "a", "amount", "at"))
        made = left.key_by("id").interval_join(
            lambda spark: read("right", spark).selectExpr("id AS other", "amount AS paid", "at AS paid_at"),
            right_keys=["other"], lower="0 seconds", upper="5 seconds", uid="join",
        )  # fmt: skip
    else:
        if kind == "named":
            rows = job.read(lambda spark: read("left", spark), name="left").union(
                job.read(lambda spark: read("right", spark), name="right")
            )
        else:
            rows = job.read(lambda spark: read("left", spark).union(read("right", spark)))
        made = rows.key_by("a").aggregate(uid="sums", n=aggregates.count(), total=aggregates.sum("amount"))
    made.write(ParquetSink(str(root / "out")))
    return job


if __name__ == "__main__":
    app()
