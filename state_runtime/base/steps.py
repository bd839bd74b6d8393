"""The steps of a pipeline in a run's heartbeat: what reads what, and how many rows each has had; values only, pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Step"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One node of a job's graph, as people read it.

    Numbers are those of the run, from its start on; None: not counted.

    Attributes:
        kind: `source`, `transform`, `union`, `expect_or_drop`, `output`, `query`, `sink`, or what an operator does.
        name: uid of an operator; name of a sink, of a transform's function, or of a source, where it has one.
        reads: the places of the steps whose rows it gets; all of them stand before it.
        keys: of an operator per input the key columns.
        rows: that came to an operator, that a source gave, or that a sink was given.
        late_rows: of them, those that an operator dropped as late.
        state_rows: live rows in all states of an operator.
        aside_rows: of a source, the rows that are too far ahead of the clock; of `expect_or_drop`, those that fail.
    """

    kind: str
    name: str
    reads: tuple[int, ...] = ()
    keys: tuple[tuple[str, ...], ...] = ()
    rows: int | None = None
    late_rows: int | None = None
    state_rows: int | None = None
    aside_rows: int | None = None
