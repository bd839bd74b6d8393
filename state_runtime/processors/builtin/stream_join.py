"""What all joins of two streams are: rows of both wait in state until the watermark has passed what they wait for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import pyarrow as pa

from state_runtime.processors.builtin.interval_join_plan import LEFT, RIGHT, IntervalJoinPlan
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.operator import EpochClock, RowSlice, ShardResult, TimeDomain, WokenWhenDue
from state_runtime.processors.places import Places
from state_runtime.processors.slices import process_slices
from state_runtime.snapshot.manifest import OperatorEntry, StateEntry
from state_runtime.state.reader import StateReader
from state_runtime.state.table import StateSchema

__all__ = ["StreamJoin"]


@dataclass(frozen=True)
class StreamJoin(WokenWhenDue, ABC):
    """A join of two streams.

    Attributes:
        state_ddl: Spark's DDL of the value columns of `left` and `right` (`values_of`).
        output_rows_per_batch: maximum rows of a batch, also for a key with many matches.
    """

    kind: ClassVar[str]

    uid: str
    key_columns: tuple[str, ...]
    key_ddl: str
    plan: IntervalJoinPlan
    state_ddl: Mapping[str, str]
    output_rows_per_batch: int

    @staticmethod
    @abstractmethod
    def values_of(plan: IntervalJoinPlan) -> Mapping[str, pa.Schema]:
        """Return the value columns of both states."""

    @property
    @abstractmethod
    def modes(self) -> str:
        """The settings that cannot change while there is state."""

    @property
    def key_schema(self) -> pa.Schema:
        return self.plan.keys

    @property
    def output_schema(self) -> pa.Schema:
        return self.plan.output_schema

    @cached_property
    def state_schemas(self) -> Mapping[str, StateSchema]:
        """Stored rows of both sides, each at a place of its own, due when there is something to do for them."""
        values = self.values_of(self.plan)
        return {name: StateSchema(self.plan.keys, values[name], pa.schema([]), "due") for name in (LEFT, RIGHT)}

    def entry(self) -> OperatorEntry:
        """Return the operator's description for manifests."""
        states = tuple(StateEntry(name, "rows", self.state_ddl[name], time="due") for name in (LEFT, RIGHT))
        return OperatorEntry(self.uid, self.kind, self.key_ddl, states, self.modes)

    @property
    def time_domain(self) -> TimeDomain:
        """The watermark ends what rows wait for."""
        return "event"

    def process(
        self,
        slices: Iterable[RowSlice],
        version: StateReader,
        clock: EpochClock,
        shard: int,
        initial: GroupedRows | None = None,
    ) -> ShardResult:
        """Take the rows of both sides, then do what is due; the latter also without input rows."""
        return process_slices(slices, version, self.state_schemas, partial(self._run, clock, Places(self.uid, clock)))

    @abstractmethod
    def _run(
        self,
        clock: EpochClock,
        places: Places,
        rows: GroupedRows,
        version: StateReader,
        result: ShardResult,
        *,
        due: bool,
    ) -> Iterator[pa.RecordBatch]:
        """Process a slice: a `SliceBody` with the epoch's clock and places."""
