"""`python -m benchmarks.profile_tasks aggregate` (or another of `--help`): where the time of our tasks goes, without Spark.

Runs what one shard does in an epoch (map the local runs and merge a part, group the rows, look the state up and call the
operator, make the changelog, write the local run, look for what is due next) in this process, over generated rows
(`benchmarks.profile_workloads`), and prints the time of each step and a cProfile table. It measures no target; Spark's part
(reading, shuffling, Arrow over the socket) is not in it.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.profile_workloads import Given, HandlerInput, TaskWorkload, task_workload
from benchmarks.report import median
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.base.settings import JobSettings, UploadSettings
from state_runtime.changelog.upload import Uploader
from state_runtime.changelog.writer import begin_task_changes, task_writer
from state_runtime.processors.grouping import group_rows
from state_runtime.processors.operator import EpochClock, RowSlice
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.local import LocalShard
from state_runtime.state.version import OpenVersion
from state_runtime.store import open_store

__all__ = ["STEPS", "ProfiledShard", "app"]

SHARD, SHARDS = 0, 2
STEPS = ("open", "tidy", "group", "process", "log", "write", "next due")

app = typer.Typer(add_completion=False)


@app.command()
def main(
    flavour: HandlerInput,
    rows: Annotated[int, typer.Option(help="Rows of a whole batch, 0 as measured; this shard has half of them.")] = 0,
    keys: Annotated[int, typer.Option(help="Keys of the whole state, 0 as measured; this shard has half of them.")] = 0,
    epochs: Annotated[int, typer.Option(help="Epochs that are measured, after some that are not.")] = 12,
    top: Annotated[int, typer.Option(help="Lines of the profile.")] = 20,
    runs_max: Annotated[int, typer.Option(help="As the job setting.")] = 8,
) -> None:
    """Profile one shard of an operator.

    Example: python -m benchmarks.profile_tasks row --top 30
    """
    console = Console()
    workload = task_workload(flavour)
    rows, keys = (rows or workload.rows) // SHARDS, (keys or workload.keys) // SHARDS
    folder = Path(tempfile.mkdtemp(prefix="stillstate-profile-"))
    try:
        shard = ProfiledShard(workload, folder, rows, keys, runs_max)
        shard.settle()
        plain = [shard.epoch() for _ in range(epochs)]
        profiler = cProfile.Profile()
        for _ in range(epochs):
            profiler.runcall(shard.epoch)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    console.print(_steps_table(f"{flavour}: one shard, {rows:,} rows an epoch over {keys:,} keys", plain))
    pstats.Stats(profiler).sort_stats("tottime").print_stats(top)


class ProfiledShard:
    """The state of one shard, and epochs over it."""

    def __init__(self, workload: TaskWorkload, folder: Path, rows: int, keys: int, runs_max: int) -> None:
        self._workload = workload
        self._operator = workload.operator
        self._local = LocalShard(folder / "shard", workload.operator.state_schemas, SYSTEM_CLOCK)
        self._store = open_store(str(folder / "store"))
        self._uploader = Uploader(UploadSettings(), SYSTEM_CLOCK)
        self._rows, self._keys = rows, keys
        self._runs_max = runs_max
        self._random = np.random.default_rng(1)
        self._epochs = 0
        self._version = ""

    def settle(self) -> None:
        """Insert every key once if the workload says so, and run until no epoch differs from the next."""
        if self._workload.filled:
            keys = np.arange(self._keys, dtype=np.int64)
            given = self._workload.given(self._random, 0, self._keys, self._keys)
            self._run(Given(keys, {**given.columns, "key": pa.array(keys)}))
        # As the first task of a worker process does.
        gc.collect()
        gc.freeze()
        for _ in range(self._workload.settled):
            self.epoch()

    def epoch(self) -> dict[str, float]:
        """Run one epoch and return the milliseconds of each step."""
        return self._run(self._workload.given(self._random, self._epochs, self._rows, self._keys))

    def _run(self, given: Given) -> dict[str, float]:
        batch = pa.RecordBatch.from_arrays(list(given.columns.values()), names=list(given.columns))
        hashes = _hash(given.keys)
        clock = self._workload.clock(self._epochs)
        self._epochs += 1
        version = f"{self._epochs:016x}"
        took: dict[str, float] = {}
        base = _timed(took, "open", self._open)
        base = _timed(took, "tidy", lambda: self._tidied(version, base, clock))
        operator = self._operator
        sequence = np.arange(len(given.keys))
        grouped = _timed(
            took,
            "group",
            lambda: group_rows(batch, hashes, sequence, operator.key_columns, operator.key_schema),
        )
        result = operator.process([RowSlice(grouped)], base, clock, SHARD)
        _timed(took, "process", lambda: sum(output.num_rows for output in result.outputs))
        changes = {state: changed for state, changed in result.changes.items() if changed.num_rows}
        _timed(took, "log", lambda: self._log(changes))
        _timed(took, "write", lambda: self._write(version, base, changes, result.due_taken, clock))
        _timed(took, "next due", lambda: self._next_due(base.overlaid(changes, result.due_taken)))
        self._version = version
        self._local.prune(version)
        return took

    def _open(self) -> OpenVersion:
        if self._version:
            return self._local.open(self._version, 0, verify=False)
        return OpenVersion.of_batches("", {}, self._operator.state_schemas)

    def _tidied(self, version: str, base: OpenVersion, clock: EpochClock) -> OpenVersion:
        return self._local.tidied(version, base, now_ms=clock.batch_time_ms, runs_max=self._runs_max)

    def _log(self, changes: Mapping[str, pa.RecordBatch]) -> None:
        uid = self._operator.uid
        writer = task_writer(
            lambda: self._store,
            self._uploader,
            term=1,
            snapshot_id=1,
            operator=uid,
            settings=JobSettings(),
            ids=SYSTEM_IDS,
        )
        begin_task_changes(
            writer, operator=uid, hash_range=hash_range_of_shard(SHARD, SHARDS), changes=changes
        ).result()

    def _write(
        self,
        version: str,
        base: OpenVersion,
        changes: Mapping[str, pa.RecordBatch],
        due_taken: Mapping[str, int],
        clock: EpochClock,
    ) -> None:
        self._local.write(
            version, base, changes, now_ms=clock.batch_time_ms, due_taken=due_taken, runs_max=self._runs_max
        )

    def _next_due(self, after: OpenVersion) -> None:
        for name, schema in self._operator.state_schemas.items():
            if schema.time == "due":
                after.next_due(name)


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


def _steps_table(title: str, epochs: list[dict[str, float]]) -> Table:
    table = Table(title=title)
    table.add_column("step")
    table.add_column("median ms", justify="right")
    table.add_column("mean ms", justify="right")
    table.add_column("worst ms", justify="right")
    for step in STEPS:
        _row(table, step, [epoch[step] for epoch in epochs])
    _row(table, "all", [sum(epoch.values()) for epoch in epochs])
    return table


def _row(table: Table, name: str, values: list[float]) -> None:
    table.add_row(name, *(f"{value:.1f}" for value in (median(values), sum(values) / len(values), max(values))))


if __name__ == "__main__":
    app()
