"""What a plain query consists of: the parts that a plan is cut into, in topological order; pure.

An edge has the index of an earlier part. `pipeline/query.py` makes nodes of a graph of them; `spark/query_cut.py` makes
them of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from pyspark.sql import DataFrame
from pyspark.sql import types as T

from state_runtime.base.joining import JoinTerms

__all__ = [
    "Called",
    "Deduplicated",
    "Given",
    "Grouped",
    "Joined",
    "Kept",
    "KeptSide",
    "NativeColumn",
    "Part",
    "Processed",
    "Read",
    "Rows",
    "Stateful",
]


@dataclass(frozen=True)
class NativeColumn:
    """A column of the key or value of Spark's own state.

    Attributes:
        type: as Spark's catalog writes it.
    """

    name: str
    type: str


@dataclass(frozen=True)
class Kept:
    """How Spark's own streaming keeps the state of an operator: what an import expects in a checkpoint.

    Attributes:
        number: Spark's number of the operator: from the sink upwards, and from left to right.
        operator: Spark's name of its kind.
        keys: the columns of its key.
        own_keys: SQL for the key columns here, over the native ones `k0`, `k1`, ….
        window: SQL for the window among its keys, as a struct of its times; "" if there is none.
        window_us: how long that is; of a session how long at least; 0 if the plan does not say it: of a sliding one,
            and of a session with gaps of each row's own.
        buffers: of an aggregate the columns of each function's buffer, by the name of the call, in their order.
        sides: of a join.
    """

    number: int
    operator: str
    keys: tuple[NativeColumn, ...]
    own_keys: Mapping[str, str]
    window: str = ""
    window_us: int = 0
    buffers: Mapping[str, tuple[NativeColumn, ...]] = field(default_factory=dict)
    sides: tuple[KeptSide, ...] = ()


@dataclass(frozen=True)
class KeptSide:
    """How Spark keeps the rows of a side of a join.

    Attributes:
        columns: of a row.
        rows: makes of a frame with these columns, and others behind them that stay, one with the side's columns here.
    """

    columns: tuple[NativeColumn, ...]
    rows: Callable[[DataFrame], DataFrame]


@dataclass(frozen=True)
class Read:
    """A stream that the query reads."""

    frame: DataFrame
    name: str


@dataclass(frozen=True)
class Given:
    """A stream of the job that the query reads.

    Attributes:
        input: which of the query's inputs it is.
    """

    input: int


@dataclass(frozen=True)
class Rows:
    """What stands between sources and operators with state, and remains Spark's.

    Attributes:
        function: from the frames of the inputs to the rows; called for each plan.
        name: the nodes of Spark's plan that it is.
        renames: see `pipeline/graph.py::SegmentNode`.
    """

    inputs: tuple[int, ...]
    name: str
    function: Callable[..., DataFrame]
    renames: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Stateful:
    """A node of the plan that keeps state.

    Attributes:
        inputs: one, or the two sides of a join.
        name: as its user calls it (an alias, a common table expression), else what it does and by which keys.
        keys: its key columns.
        says: the expression of each key, down to the columns of sources: another one is another state.
        reads: digest of all that its rows come from and go through.
        is_ambiguous: several of its keys or columns in state say the same, so that only their order tells them apart.
        kept: returns how Spark keeps the same state; asked by imports only.
    """

    inputs: tuple[int, ...]
    name: str
    keys: tuple[str, ...]
    says: Mapping[str, str]
    reads: str
    is_ambiguous: bool
    kept: Callable[[], Kept]


@dataclass(frozen=True)
class Called:
    """A call of an aggregate function.

    Attributes:
        function: its name in `aggregates`.
        text: what it is called with, down to the columns of sources; "" for all rows.
        rsd: of an approximate count the relative standard deviation.
    """

    function: str
    text: str
    column: str | None = None
    by: str | None = None
    ignore_nulls: bool = False
    rsd: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Grouped(Stateful):
    """GROUP BY.

    Attributes:
        calls: by the name of their column.
        event_time: the key column with event time, or of a session window the time of a row; "" if no key is forgotten
            by time.
        gap_us: of a session window, which is then not among the keys; 0 if each row has a gap of its own; None for any
            other grouping.
        end_column: of a session window with such gaps: the column with the end of each row.
    """

    calls: Mapping[str, Called]
    event_time: str = ""
    gap_us: int | None = None
    end_column: str = ""


@dataclass(frozen=True, kw_only=True)
class Deduplicated(Stateful):
    """dropDuplicates, by its keys."""

    within_watermark: bool


@dataclass(frozen=True, kw_only=True)
class Joined(Stateful):
    """A join of two streams on equal keys.

    Attributes:
        right_keys: pairwise equal with `keys`.
        held_back_ms: how far the watermark of its output is behind its own.
    """

    right_keys: tuple[str, ...]
    terms: JoinTerms
    held_back_ms: int


@dataclass(frozen=True, kw_only=True)
class Processed(Stateful):
    """transformWithState: the user's processor."""

    processor: Any
    output_schema: T.StructType
    is_pandas: bool
    time_mode: Literal["none", "processing", "event"]
    event_time: str = ""
    initial: DataFrame | None = field(default=None)


Part: TypeAlias = Read | Given | Rows | Grouped | Deduplicated | Joined | Processed
