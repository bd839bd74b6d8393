"""`python -m benchmarks.branches`: what a branch costs beside an operator of its own.

Three jobs over the same files, in turns: one aggregate; another one; and both as branches of one source. What the second
branch adds to an epoch is held against the epochs of its own job, by the processor's time of driver, Java and workers together
and by the clock. Prints one table and writes benchmarks/results/branches.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from benchmarks.epochs import Taken, Turns, report_epochs
from benchmarks.report import Figure, Target, median, usable_cores

if TYPE_CHECKING:
    from state_runtime import StreamingJob

__all__ = ["app"]

KINDS = ("first", "second", "both")

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def main(
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Rows of an epoch; may be given again.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="That count, of each job in each turn.")] = 25,
    turns: Annotated[int, typer.Option(min=1, help="How often each job runs.")] = 2,
) -> None:
    """Measure a branch; the median of all epochs of a job counts.

    Example: [b]python -m benchmarks.branches --rows 1000[/b]
    """
    report_epochs("branches", rows, Turns(epochs, turns, KINDS, _job, _write), _figures)


def _figures(rows: int, taken: Mapping[str, Taken]) -> list[Figure]:
    found = []
    for what, target in (("cpu_ms", Target("<=", 1.2)), ("ms", None)):
        first, second, both = (median(getattr(taken[kind], what)) for kind in KINDS)
        name = "processor" if what == "cpu_ms" else "clock"
        found.append(
            Figure(f"{rows:,} rows: a branch / its own job, {name}", "ms", max(0.0, both - first), second, target)
        )
        found.append(Figure(f"{rows:,} rows: both in one job / two jobs, {name}", "ms", both, first + second))
    return found


def _write(root: Path, rows: int, files: int) -> None:
    folder = root / "in"
    folder.mkdir()
    for number in range(files):
        ids = pa.array(range(number * rows, (number + 1) * rows), pa.int64())
        numbers = ids.to_numpy()
        table = pa.table({"id": ids, "a": numbers % 997, "b": numbers * 7 % 1_009, "amount": numbers % 100})
        pq.write_table(table, folder / f"{number:05}.parquet")


def _job(root: Path, kind: str) -> StreamingJob:
    from state_runtime import JobSettings, ParquetSink, StreamingJob, aggregates

    schema = "id long, a long, b long, amount long"
    settings = JobSettings(parallelism=usable_cores(), local_dir=str(root / "local"))
    job = StreamingJob(kind, store=str(root / "store"), settings=settings)
    rows = job.read(
        lambda spark: spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(root / "in"))
    )
    for name, key in (("first", "a"), ("second", "b")):
        if kind in (name, "both"):
            rows.key_by(key).aggregate(uid=name, n=aggregates.count(), total=aggregates.sum("amount")).write(
                ParquetSink(str(root / "out" / name)), name=name
            )
    return job


if __name__ == "__main__":
    app()
