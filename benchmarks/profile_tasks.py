"""`python -m benchmarks.profile_tasks row|pandas|vectorized|aggregate|latest|deduplicate`: where the time of our tasks goes, without Spark.

Runs what one shard does in an epoch (map the local runs, group the rows, look the state up and call the operator,
make the changelog, write the local runs) in this process, over generated rows, and prints the time of each step and
a cProfile table. It measures no target; Spark's part (reading, shuffling, Arrow over the socket) is not in it.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import shutil
import tempfile
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.processors import (
    OUTPUT_SCHEMA,
    STATE_SCHEMA,
    RunningTotals,
    RunningTotalsInPandas,
    RunningTotalsVectorized,
)
from benchmarks.report import median
from state_runtime import aggregates
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.base.settings import JobSettings
from state_runtime.changelog.upload import Uploader, UploadPolicy
from state_runtime.changelog.writer import begin_task_changes, task_writer
from state_runtime.processors.builtin.aggregate import AggregateOperator, plan_aggregates
from state_runtime.processors.builtin.deduplicate import SEEN, Deduplicate
from state_runtime.processors.builtin.latest import LATEST, LatestBy
from state_runtime.processors.grouping import group_rows
from state_runtime.processors.operator import EpochClock, Operator, RowSlice
from state_runtime.processors.user.stateful import StatefulProcessorOperator
from state_runtime.processors.user.vectorized import VectorizedOperator
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.local import LocalShard
from state_runtime.state.table import StateSchema
from state_runtime.state.version import OpenVersion
from state_runtime.store import open_store

__all__ = ["app"]

SHARD, SHARDS = 0, 2
STEPS = ("open", "group", "process", "log", "write")

app = typer.Typer(add_completion=False)


class Flavour(StrEnum):
    """Which operator."""

    ROW = "row"
    PANDAS = "pandas"
    VECTORIZED = "vectorized"
    AGGREGATE = "aggregate"
    LATEST = "latest"
    DEDUPLICATE = "deduplicate"


@app.command()
def main(
    flavour: Flavour,
    rows: Annotated[int, typer.Option(help="Rows of a whole batch; this shard has half of them.")] = 100_000,
    keys: Annotated[int, typer.Option(help="Keys of the whole state; this shard has half of them.")] = 200_000,
    epochs: Annotated[int, typer.Option(help="Epochs that are measured, after two that are not.")] = 6,
    top: Annotated[int, typer.Option(help="Lines of the profile.")] = 20,
    runs_max: Annotated[int, typer.Option(help="As the job setting.")] = 8,
) -> None:
    """Profile one shard of an operator.

    Example: python -m benchmarks.profile_tasks row --top 30
    """
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="stillstate-profile-"))
    try:
        shard = _Shard(_operator(flavour), folder, keys // SHARDS, runs_max)
        shard.fill()
        # As the first task of a worker process does.
        gc.collect()
        gc.freeze()
        for _ in range(2):
            shard.epoch(rows // SHARDS)
        plain = [shard.epoch(rows // SHARDS) for _ in range(epochs)]
        profiler = cProfile.Profile()
        for _ in range(epochs):
            profiler.runcall(shard.epoch, rows // SHARDS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    console.print(_steps_table(flavour, rows // SHARDS, keys // SHARDS, plain))
    pstats.Stats(profiler).sort_stats("tottime").print_stats(top)


class _Shard:
    """The state of one shard, and epochs over it."""

    def __init__(self, operator: Operator, folder: Path, keys: int, runs_max: int) -> None:
        self._operator = operator
        self._local = LocalShard(folder / "shard", operator.state_schemas, SYSTEM_CLOCK)
        self._store = open_store(str(folder / "store"))
        self._uploader = Uploader(UploadPolicy.of(JobSettings()), SYSTEM_CLOCK)
        self._keys = keys
        self._runs_max = runs_max
        self._random = np.random.default_rng(1)
        self._versions = 0
        self._version = ""

    def fill(self) -> None:
        """Insert every key once, in one epoch."""
        self._run(np.arange(self._keys, dtype=np.int64))

    def epoch(self, rows: int) -> dict[str, float]:
        """Run one epoch over uniformly drawn keys and return the milliseconds of each step."""
        return self._run(self._random.integers(0, self._keys, rows, dtype=np.int64))

    def _run(self, keys: np.ndarray[Any, Any]) -> dict[str, float]:
        amounts = self._random.integers(0, 1_000, len(keys), dtype=np.int64)
        batch = pa.RecordBatch.from_arrays([pa.array(keys), pa.array(amounts)], names=["key", "amount"])
        hashes = _hash(keys)
        took: dict[str, float] = {}
        base = _timed(took, "open", self._open)
        operator = self._operator
        sequence = np.arange(len(keys))
        grouped = _timed(
            took,
            "group",
            lambda: group_rows(batch, hashes, sequence, operator.key_columns, operator.key_schema),
        )
        result = operator.process([RowSlice(grouped)], base, EpochClock(0), SHARD)
        _timed(took, "process", lambda: sum(output.num_rows for output in result.outputs))
        _timed(took, "log", lambda: self._log(result.changes))
        self._versions += 1
        version = f"{self._versions:016x}"
        _timed(took, "write", lambda: self._write(version, base, result.changes))
        self._version = version
        self._local.prune(version)
        return took

    def _log(self, changes: dict[str, pa.RecordBatch]) -> None:
        uid = self._operator.uid
        writer = task_writer(
            lambda: self._store, self._uploader, term=1, operator=uid, settings=JobSettings(), ids=SYSTEM_IDS
        )
        begin_task_changes(
            writer, operator=uid, hash_range=hash_range_of_shard(SHARD, SHARDS), changes=changes
        ).result()

    def _write(self, version: str, base: OpenVersion, changes: dict[str, pa.RecordBatch]) -> None:
        self._local.write(version, base, changes, now_ms=0, due_taken={}, runs_max=self._runs_max)

    def _open(self) -> OpenVersion:
        if self._version:
            return self._local.open(self._version, 0, verify=False)
        return OpenVersion.of_batches("", {}, self._operator.state_schemas)


def _operator(flavour: Flavour) -> Operator:
    integer = pa.int64()
    key = pa.schema([("key", integer)])
    if flavour is Flavour.AGGREGATE:
        functions = {
            "n": aggregates.count(),
            "total": aggregates.sum("amount"),
            "lowest": aggregates.min("amount"),
            "highest": aggregates.max("amount"),
            "mean": aggregates.avg("amount"),
        }
        source = pa.schema([*key, ("amount", integer)])
        return AggregateOperator("totals", ("key",), "key long", key, plan_aggregates(functions, source, "totals"), "")
    totals = pa.schema([(name, integer) for name in _names(STATE_SCHEMA)])
    output = pa.schema([(name, integer) for name in _names(OUTPUT_SCHEMA)])
    row = pa.schema([*key, ("amount", integer)])
    if flavour is Flavour.VECTORIZED:
        return _vectorized(flavour, RunningTotalsVectorized(), "totals", totals, output)
    if flavour is Flavour.LATEST:
        return _vectorized(flavour, LatestBy(("amount",)), LATEST, pa.schema([("amount", integer)]), row)
    if flavour is Flavour.DEDUPLICATE:
        return _vectorized(flavour, Deduplicate(), SEEN, pa.schema([]), row)
    return StatefulProcessorOperator(
        uid="totals",
        key_columns=("key",),
        key_ddl="key long",
        key_schema=key,
        output_schema=output,
        state_schemas={"totals": StateSchema(key, totals)},
        state_ddl={"totals": STATE_SCHEMA},
        processor=RunningTotalsInPandas() if flavour is Flavour.PANDAS else RunningTotals(),
        pandas=flavour is Flavour.PANDAS,
        output_rows_per_batch=65_536,
    )


def _vectorized(flavour: Flavour, processor: Any, state: str, values: pa.Schema, output: pa.Schema) -> Operator:
    key = pa.schema([("key", pa.int64())])
    kinds: dict[Flavour, Any] = {Flavour.LATEST: "latest-by", Flavour.DEDUPLICATE: "deduplicate"}
    return VectorizedOperator(
        uid="totals",
        key_columns=("key",),
        key_ddl="key long",
        key_schema=key,
        output_schema=output,
        state_schemas={state: StateSchema(key, values)},
        state_ddl={state: ""},
        kind=kinds.get(flavour, "vectorized"),
        processor=processor,
        output_rows_per_batch=65_536,
    )


def _names(ddl: str) -> list[str]:
    return [column.split()[0] for column in ddl.split(",")]


def _hash(keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Spread the keys over the shard's half of all hashes (splitmix64); Spark's xxhash64 has no part in the cost."""
    mixed = keys.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) >> np.uint64(1)


def _timed(took: dict[str, float], step: str, call: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    answer = call()
    took[step] = (time.perf_counter() - start) * 1000
    return answer


def _steps_table(flavour: Flavour, rows: int, keys: int, epochs: list[dict[str, float]]) -> Table:
    table = Table(title=f"{flavour}: one shard, {rows:,} rows an epoch over {keys:,} keys")
    table.add_column("step")
    table.add_column("median ms", justify="right")
    table.add_column("worst ms", justify="right")
    for step in STEPS:
        values = [epoch[step] for epoch in epochs]
        table.add_row(step, f"{median(values):.1f}", f"{max(values):.1f}")
    totals = [sum(epoch.values()) for epoch in epochs]
    table.add_row("all", f"{median(totals):.1f}", f"{max(totals):.1f}")
    return table


if __name__ == "__main__":
    app()
