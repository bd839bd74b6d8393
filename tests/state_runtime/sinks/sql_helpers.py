"""A sink into a table of a real PostgreSQL, and rows that are staged for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from tenacity import wait_fixed

from examples.servers.postgres import PostgresServer
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.sinks.sql import SqlSink
from state_runtime.snapshot.manifest import StagedFile, StagedOutput

__all__ = ["SCHEMA", "UID", "Crash", "Database", "staged"]

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])
UID = "0123456789abcdef" * 2


class Crash(BaseException):
    """The end of a process."""


@dataclass
class Database:
    """A database of its own, and a folder in the place of the job's root."""

    server: PostgresServer
    root: Path
    name: str

    def sink(
        self,
        schema: pa.Schema = SCHEMA,
        table: str = "totals",
        uid: str = UID,
        dsn: str = "",
        wait_s: float = 0.02,
        **how: Any,
    ) -> tuple[SqlSink, SinkSpec]:
        """A sink as a driver has it that has just started; between its attempts it waits a moment."""
        sink = SqlSink(table, dsn=dsn or self.server.url(self.name), **how)
        sink._table._wait = wait_fixed(wait_s)
        sink.check(schema, "sink 'out'")
        sink.check_place(sink.layout(schema), (), "sink 'out'")
        return sink, sink.spec("orders", uid, "out", (str(self.root), {}))

    def execute(self, statement: str, given: Any = None) -> list[tuple[Any, ...]]:
        return self.server.execute(statement, self.name, given)

    def rows(self, query: str = "SELECT * FROM totals") -> list[dict[str, Any]]:
        """What a reader sees, in an order."""
        return sorted(self.server.rows(query, self.name), key=str)

    def publish(self, epoch: int, rows: list[dict[str, Any]], schema: pa.Schema = SCHEMA, **how: Any) -> None:
        """Publish an epoch as a driver does that has just started."""
        sink, spec = self.sink(schema, **how)
        sink.publish(spec, staged(spec, epoch, rows, schema=schema), None)


def staged(spec: SinkSpec, epoch: int, *tasks: list[dict[str, Any]], schema: pa.Schema = SCHEMA) -> StagedOutput:
    """Stage an epoch's rows, as tasks do."""
    files: list[StagedFile] = []
    for shard, rows in enumerate(tasks):
        staging = spec.open(1, epoch, shard, "attempt")
        staging.write(pa.RecordBatch.from_pylist(rows, schema=schema))
        files += staging.finish().files
    return StagedOutput(spec.name, epoch, tuple(files))
