"""What an operator is, for the task that runs it: a picklable description, and one call per shard and epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from state_runtime.processors.grouping import GroupedRows
from state_runtime.snapshot.manifest import OperatorEntry
from state_runtime.state.local import OpenVersion
from state_runtime.state.table import StateSchema

__all__ = ["EpochClock", "Operator", "ShardResult"]


@dataclass(frozen=True)
class EpochClock:
    """The clock of an epoch: fixed at its start, the same on a re-execution.

    Attributes:
        batch_time_ms: Spark's batch timestamp.
        watermark_ms: event-time watermark; -1 where time modes other than None are not in use.
    """

    batch_time_ms: int
    watermark_ms: int = -1


@dataclass
class ShardResult:
    """What processing a shard left behind; complete once `outputs` is drained.

    Attributes:
        outputs: batches of the operator's output schema.
        changes: per state one sorted batch of what changed, each key once. Filled when `outputs` is drained.
        rows_added: live state rows gained minus lost.
    """

    outputs: Iterator[pa.RecordBatch]
    changes: dict[str, pa.RecordBatch] = field(default_factory=dict)
    rows_added: int = 0


class Operator(Protocol):
    """A stateful operator. Pickled to the tasks with every epoch, so it holds descriptions, never data."""

    @property
    def uid(self) -> str: ...

    @property
    def key_columns(self) -> tuple[str, ...]: ...

    @property
    def key_schema(self) -> pa.Schema: ...

    @property
    def output_schema(self) -> pa.Schema: ...

    @property
    def state_schemas(self) -> Mapping[str, StateSchema]: ...

    def entry(self) -> OperatorEntry:
        """How a manifest describes the operator."""
        ...

    def process(self, rows: GroupedRows, version: OpenVersion, clock: EpochClock, shard: int) -> ShardResult:
        """Process a shard's rows of one epoch on top of a version of its state. Nothing is written here."""
        ...
