"""`python -m benchmarks.handover`: what rows cost on their way to Python, without any operator.

The rows of `bench-engine`'s aggregate are read; read and shuffled by key; read, shuffled and handed to a Python function that drops
them. The last is a floor of each epoch whose operator is in Python. Prints one table.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import pyarrow as pa
import typer
from rich.table import Table

from benchmarks.engine_workloads import COMPARISONS
from benchmarks.engines import COMMON_CONF, set_up_python
from benchmarks.measure import new_console
from benchmarks.report import median, usable_cores
from benchmarks.workloads import Turns, write_data

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["app"]

FILES = 5
WARM = 12
"""Java compiles for the first of them."""

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def main(
    rows: Annotated[list[int] | None, typer.Option(min=2, help="Rows of a file; may be given again.")] = None,
    times: Annotated[int, typer.Option(min=1, help="How often each way counts.")] = 18,
) -> None:
    """Time the way of rows to Python; the median of each way counts.

    Example: [b]python -m benchmarks.handover --rows 200000[/b]
    """
    set_up_python()
    from state_runtime.spark.session import build_session

    spark = build_session("handover", master=f"local[{usable_cores()}]", conf=COMMON_CONF)
    table = Table("rows", "scan, ms", "and shuffle, ms", "and Python, ms")
    try:
        for count in rows or [200_000, 1_000_000]:
            table.add_row(f"{count:,}", *(f"{ms:,.0f}" for ms in _ways_ms(spark, count, times)))
    finally:
        spark.stop()
    new_console().print(table)


def _ways_ms(spark: SparkSession, rows: int, times: int) -> Iterator[float]:
    """The median of each way."""
    aggregate = next(workload for workload in COMPARISONS if workload.key == "aggregate")
    few = {"ours": Turns(0, FILES)}
    workload = replace(aggregate, rows=rows, prefill_batches=0, rounds=1, turns=few)
    with tempfile.TemporaryDirectory(prefix="stillstate-bench-") as folder:
        files = write_data(workload, Path(folder))
        for way in range(3):
            taken_ms = []
            for number in range(WARM + times):
                frame: DataFrame = spark.read.schema(workload.schema).parquet(str(files[number % FILES]))
                if way >= 1:
                    frame = frame.repartition(usable_cores(), "key")
                if way == 2:
                    frame = frame.mapInArrow(_dropped, "key long")
                began_s = time.perf_counter()
                # As an epoch runs its plan: nothing is collected.
                frame._jdf.queryExecution().toRdd().count()
                taken_ms.append((time.perf_counter() - began_s) * 1000)
            yield median(taken_ms[WARM:])


def _dropped(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        continue
    yield from ()


if __name__ == "__main__":
    # Under its own name: Spark's Python workers import the function from there.
    from benchmarks import handover

    handover.app()
