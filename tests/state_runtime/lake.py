"""An output folder of a Parquet sink with the job that writes to it, and processes that die at a point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from model import CountingIds, FakeClock

from state_runtime.base import faults
from state_runtime.base.actor import Actor
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.maintenance.output.compact import Compacted, compact
from state_runtime.pipeline.sinks import ParquetSink
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.snapshot.manifest import StagedOutput
from state_runtime.store import Store

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])
UID = "0123456789abcdef"
WRITER = "job-01234567-legs"
SHARDS = 2


class Crash(BaseException):
    """The end of a process."""


@dataclass
class Lake:
    """An output folder, the job that writes to it, and what each reader must see."""

    place: str
    options: dict[str, Any] = field(default_factory=dict)
    partition_by: tuple[str, ...] = ()
    epoch_column: str | None = "epoch"
    shards: int = SHARDS
    epoch: int = 0
    outputs: dict[int, StagedOutput] = field(default_factory=dict)
    clock: FakeClock = field(
        default_factory=lambda: FakeClock(SYSTEM_CLOCK.now_ms() + 60_000)
    )  # behind the files' times
    ids: CountingIds = field(default_factory=CountingIds)

    @property
    def sink(self) -> ParquetSink:
        return ParquetSink(
            self.place,
            partition_by=self.partition_by,
            epoch_column=self.epoch_column,
            on_rollback="replace",
            storage_options=self.options,
        )

    @property
    def spec(self) -> SinkSpec:
        return self.sink.spec("job", UID, "legs", ("unused", {}))

    @property
    def store(self) -> Store:
        return self.spec.store()

    @property
    def actor(self) -> Actor:
        return Actor(self.clock, self.ids)

    def stage(self, epoch: int, schema: pa.Schema = SCHEMA, rows: int = 3) -> StagedOutput:
        files: list[Any] = []
        for shard in range(self.shards):
            task = self.spec.open(1, epoch, shard, f"{shard:016x}")
            numbers = [(epoch * self.shards + shard) * rows + row for row in range(rows)]
            table = pa.table({"k": [f"k{n % 2}" for n in numbers], "n": numbers})
            for name in schema.names[2:]:
                table = table.append_column(name, pa.array([f"{name}-{n}" for n in numbers]))
            task.write(table.combine_chunks().to_batches()[0])
            files += task.finish().files
        return StagedOutput("legs", epoch, tuple(files))

    def publish(self, epochs: int = 1, **how: Any) -> None:
        for _ in range(epochs):
            self.epoch += 1
            self.outputs[self.epoch] = self.stage(self.epoch, **how)
            self.sink.publish(self.spec, self.outputs[self.epoch], None)

    def compact(self, **how: Any) -> Compacted:
        return compact(self.store, self.actor, **{"writers": [WRITER], "min_age_s": 0, **how})

    def files(self) -> list[str]:
        return sorted(o.path for o in self.store.list_objects("") if not o.path.startswith("_"))

    def tables(self) -> list[pa.Table]:
        return [pq.read_table(pa.BufferReader(self.store.read(path, 1 << 20))) for path in self.files()]

    def numbers(self) -> list[int]:
        return sorted(n for table in self.tables() for n in table["n"].to_pylist())

    def expected(self, rows: int = 3) -> list[int]:
        return sorted(
            (epoch * self.shards + shard) * rows + row
            for epoch in self.outputs
            for shard in range(self.shards)
            for row in range(rows)
        )


@contextmanager
def at_point(point: str, do: Callable[[], None], passage: int = 1) -> Iterator[list[int]]:
    """Do something when a process passes a point for the n-th time; not again while it is done."""
    passed: list[int] = []
    reached = faults.reach

    def reach(name: str) -> None:
        if name == point:
            passed.append(1)
            if len(passed) == passage:
                do()

    faults.reach = reach
    try:
        yield passed
    finally:
        faults.reach = reached


def die() -> None:
    raise Crash
