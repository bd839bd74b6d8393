"""The interface between an operator and its task: a picklable description, and one call per shard and epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Protocol

import pyarrow as pa

from state_runtime.processors.grouping import GroupedRows, filter_rows
from state_runtime.snapshot.manifest import OperatorEntry
from state_runtime.state.changed_rows import Changed
from state_runtime.state.reader import StateReader
from state_runtime.state.table import Mask, Positions, StateSchema

__all__ = ["LATE", "LATE_OF_SIDE", "EpochClock", "Operator", "RowSlice", "ShardResult", "TimeDomain", "WokenWhenDue"]

LATE: Final = "late"
"""The side output with the rows of the input that were dropped as late."""
LATE_OF_SIDE: Final = ("late_left", "late_right")
"""The same of a join, for each of its inputs."""

TimeDomain = Literal["", "processing", "event"]


@dataclass(frozen=True)
class EpochClock:
    """The clock of an epoch: fixed at its start, the same on a re-execution.

    Attributes:
        batch_time_ms: processing time: Spark's batch timestamp.
        watermark_ms: event time that decides what is due: the highest event time of earlier epochs minus the allowed
            delay; never falls; 0 before there is any.
        late_watermark_ms: event time that decides which rows are late: the watermark of the epoch before. Rows that an
            operator emits because `watermark_ms` passed them are not late for the next operator.
        epoch: number of the epoch, growing over all runs; orders the elements of lists.
    """

    batch_time_ms: int
    watermark_ms: int = 0
    late_watermark_ms: int = 0
    epoch: int = 1

    @property
    def held(self) -> EpochClock:
        """Return the clock of slices after which more rows come: by event time only rows that were due in the epoch
        before are due."""
        return replace(self, watermark_ms=self.late_watermark_ms)


@dataclass(frozen=True)
class RowSlice:
    """Some keys of a shard with their rows, to be processed together.

    Attributes:
        rows: may be empty if only due rows are processed.
        is_last: no row of the shard is left under the epoch's clock; due rows are processed with this slice, after its
            rows.
        begins_pass: from here on keys of earlier slices may come again. The slices of a pass have different keys, in
            order of their hashes.
        rest: for one key that has more rows than are held at once, the rows after `rows`, in order, to be read once;
            the slice after it begins a pass. None in all other cases.
        goes_on: the key of this slice comes again in the next one: this slice has not all of its rows.
    """

    rows: GroupedRows
    is_last: bool = True
    begins_pass: bool = True
    rest: Iterator[GroupedRows] | None = None
    goes_on: bool = False


@dataclass
class ShardResult:
    """The result of processing a shard; complete once `outputs` is drained.

    Attributes:
        outputs: batches of the operator's output schema.
        changes: per state the changes, sorted, each identity once. Filled when `outputs` is drained.
        hold: set before `outputs` is drained by the caller that bounds the memory: takes a sorted batch of changes of a
            state, and returns the same rows from where they are held; None holds all of them here.
        rows_added: live state rows gained minus lost; removals that were not looked up are not counted.
        late_rows: input rows dropped as late.
        sides: set before `outputs` is drained by a caller that wants rows of side outputs: by their names, those that
            were given since it was looked at last; None: nothing reads any.
        due_taken: per state with an index by time, the bound (ms, inclusive) up to which the operator took due rows.
            Each of these rows was removed or got another time, else it would never be processed again.
    """

    outputs: Iterator[pa.RecordBatch]
    changes: dict[str, Changed] = field(default_factory=dict)
    hold: Callable[[str, pa.RecordBatch], pa.RecordBatch] | None = None
    rows_added: int = 0
    late_rows: int = 0
    sides: dict[str, list[pa.RecordBatch]] | None = None
    due_taken: dict[str, int] = field(default_factory=dict)

    def give(self, output: str, rows: Callable[[], pa.RecordBatch]) -> None:
        """Give rows to a side output, which are made only if something reads it."""
        if self.sides is not None and output in self.sides:
            self.sides[output].append(rows())

    def on_time(self, rows: GroupedRows, late: Mask, behind: Positions | None = None) -> GroupedRows:
        """Return the rows that are not late; the late ones are counted, and given to their side output.

        Args:
            behind: of partial rows the numbers of rows that they stand for; those are no rows to be given.
        """
        if not bool(late.any()):
            return rows
        self.late_rows += int((late if behind is None else behind[late]).sum())
        if behind is None:
            self.give(LATE, lambda: rows.rows.filter(pa.array(late)))
        return filter_rows(rows, ~late)


class WokenWhenDue:
    """An operator whose shard is visited when its earliest `due` has come, as for most operators."""

    def wake_ms(self, due_ms: int, clock: EpochClock) -> int:
        """See `Operator.wake_ms`."""
        return due_ms


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
        """Return the operator's description for manifests."""
        ...

    @property
    def time_domain(self) -> TimeDomain:
        """The clock that decides what is due: the runtime wakes a shard when its earliest `due` has come."""
        ...

    def wake_ms(self, due_ms: int, clock: EpochClock) -> int:
        """Return when a shard must be visited next, with or without rows; on the clock of `time_domain`.

        Args:
            due_ms: a lower bound of the earliest `due` in the shard after the epoch.
            clock: of the epoch.
        """
        ...

    def process(
        self,
        slices: Iterable[RowSlice],
        version: StateReader,
        clock: EpochClock,
        shard: int,
        initial: GroupedRows | None = None,
    ) -> ShardResult:
        """Process a shard's rows of one epoch on top of a version of its state, slice by slice, and its due rows with
        the last slice. Nothing is written here.

        Args:
            slices: at least one. If they end before the last one, rows are left for a later epoch, and no due rows are
                processed.
            initial: rows of the initial state, in the operator's first epoch.
        """
        ...
