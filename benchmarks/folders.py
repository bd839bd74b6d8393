"""`python -m benchmarks.folders`: what output in folders by value costs the task that writes it, without Spark.

One task stages a million rows of ten doubles and five texts, whose folders are drawn at random, on a local disk. Each
number of folders has a process of its own, because memory is counted by how much it has grown. Prints one table.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import time
from typing import Annotated

import numpy as np
import pyarrow as pa
import typer
from rich.table import Table

from benchmarks.measure import new_console
from state_runtime import ParquetSink
from state_runtime.base.limits import MIB

__all__ = ["app"]

BATCH_ROWS = 10_000
TEXTS = 1 << 40

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def main(
    folders: Annotated[list[int] | None, typer.Option(min=0, help="0 is output without; may be given again.")] = None,
    rows: Annotated[int, typer.Option(min=BATCH_ROWS)] = 1_000_000,
) -> None:
    """Time one task's staging of partitioned output.

    Example: [b]python -m benchmarks.folders --folders 0 --folders 900[/b]
    """
    table = Table("folders", "s", "memory, MiB", "files", "stored, MiB")
    for count in folders or [0, 50, 900]:
        # Forked, a process would begin with the peak of this one.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            table.add_row(f"{count:,}", *pool.apply(_staged, (count, rows)))
    new_console().print(table)


def _staged(folders: int, rows: int) -> tuple[str, ...]:
    random = np.random.default_rng(0)
    batches = [_batch(random, max(folders, 1)) for _ in range(rows // BATCH_ROWS)]
    with tempfile.TemporaryDirectory(prefix="stillstate-bench-") as out:
        spec = ParquetSink(out, partition_by=["folder"] if folders else ()).spec("job", "0" * 32, "out", ("", {}))
        before, began_s = _peak_bytes(), time.perf_counter()
        task = spec.open(term=1, epoch=1, shard=0, attempt="0" * 16)
        for batch in batches:
            task.write(batch)
        files = task.finish().files
        taken_s = time.perf_counter() - began_s
        grown = _peak_bytes() - before
    stored = sum(file.bytes for file in files)
    return f"{taken_s:.1f}", f"{grown / MIB:,.0f}", f"{len(files):,}", f"{stored / MIB:,.0f}"


def _batch(random: np.random.Generator, folders: int) -> pa.RecordBatch:
    columns = {"folder": pa.array(random.integers(0, folders, BATCH_ROWS))}
    columns |= {f"number{n}": pa.array(random.random(BATCH_ROWS)) for n in range(10)}
    columns |= {f"text{n}": pa.array([f"text {x}" for x in random.integers(0, TEXTS, BATCH_ROWS)]) for n in range(5)}
    return pa.RecordBatch.from_pydict(columns)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    app()
