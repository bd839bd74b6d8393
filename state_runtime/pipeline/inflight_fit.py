"""Whether rows in flight fit the pipeline that goes on with them; pure.

They have the columns that their operator read when it read them. By the rules of state, columns may have been added
(null in the rows that wait), dropped, reordered or widened since; but not one that says whether, when or for whom a row
counts (`columns_read.deciding_columns`). Everything else is refused before anything is written: then the rows are
processed first, by the code that read them, or given up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from state_runtime.base.errors import InvalidPipeline
from state_runtime.changelog.rows import decode_columns, misfit
from state_runtime.processors.builtin.partial_rows import ROWS_COLUMN
from state_runtime.snapshot.manifest import InflightNumbers, Manifest, OperatorEntry
from state_runtime.spark.columns import CONDITION_COLUMN

__all__ = ["OperatorReads", "functions_of", "refuse_misfits"]


@dataclass(frozen=True)
class OperatorReads:
    """What an operator of the pipeline takes.

    Attributes:
        columns: of its input.
        functions: as in `RowsLayout`.
        deciding: columns without which a row would be passed over, or count for another key.
    """

    columns: pa.Schema
    functions: str
    deciding: tuple[str, ...] = ()


def functions_of(operator: OperatorEntry) -> str:
    """What the outputs of a built-in operator are, in order; see `RowsLayout`."""
    return json.dumps(list(operator.functions.items()))


def refuse_misfits(before: Manifest | None, operators: Mapping[str, OperatorReads], *, drop: bool, job: str) -> None:
    """Turn a start away from a snapshot whose rows in flight the pipeline cannot go on with.

    Args:
        operators: by uid.
        drop: the rows are given up.

    Raises:
        InvalidPipeline: nothing was written; the message names operator and column, and what to do.
    """
    if before is None or before.open_batch is None or drop:
        return
    for waiting in before.open_batch.operators:
        reads = operators.get(waiting.uid)
        why = "the pipeline no longer has it" if reads is None else _misfit(waiting, reads)
        if why:
            raise InvalidPipeline(
                f"operator {waiting.uid!r}: about {waiting.rows:,} rows that it read are in flight in snapshot "
                f"{before.snapshot_id}, and {why}. Start the job once more as it was and let it process them "
                f"(`stillstate savepoint {job} NAME --stop --drain-inflight`), then start this; or give the rows up: "
                "--drop-inflight (drop_inflight=True) goes on without them, and they are lost"
            )


def _misfit(waiting: InflightNumbers, reads: OperatorReads) -> str:
    for layout in waiting.layouts:
        stored = decode_columns(layout.columns, f"operator {waiting.uid!r}")
        # Rows that Spark aggregated have columns of their own, which follow from the functions, as those with what
        # conditions chose do. Of the rest they have what says whose they are and when.
        is_partial = ROWS_COLUMN in stored.names
        if (is_partial or any(map(_is_condition, stored.names))) and layout.functions != reads.functions:
            return "they were prepared for other aggregates than it has now"
        for name in reads.deciding:
            if name not in stored.names and not (is_partial and _is_condition(name)):
                return f"they have no {_called(name)}, without which they would not count as they should"
        if not is_partial and (why := misfit(stored, reads.columns)):
            return why
    return ""


def _is_condition(name: str) -> bool:
    return name.startswith(CONDITION_COLUMN)


def _called(name: str) -> str:
    return "column for the condition of an aggregate" if _is_condition(name) else f"column {name!r}"
