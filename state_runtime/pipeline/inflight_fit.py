"""Check whether rows in flight fit the pipeline that processes them after a restart; pure.

The rows have the columns that their operator read at that time. As for state, columns may since have been added (null
in the waiting rows), dropped, reordered or widened. This is refused for a column that decides whether, when or for
which key a row counts (`columns_read.deciding_columns`). Every other change is refused before anything is written: the
rows must first be processed by the code that read them, or be dropped.
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
    """The input that an operator of the pipeline takes.

    Attributes:
        columns: of its input.
        functions: as in `RowsLayout`.
        deciding: columns without which a row would be skipped, or count for another key.
    """

    columns: pa.Schema
    functions: str
    deciding: tuple[str, ...] = ()


def functions_of(operator: OperatorEntry) -> str:
    """Return the functions of a built-in operator's outputs, in order; see `RowsLayout`."""
    return json.dumps(list(operator.functions.items()))


def refuse_misfits(before: Manifest | None, operators: Mapping[str, OperatorReads], *, drop: bool, job: str) -> None:
    """Refuse a start from a snapshot whose rows in flight do not fit the pipeline.

    Args:
        operators: by uid.
        drop: the rows are dropped, so nothing is checked.

    Raises:
        InvalidPipeline: nothing was written; the message names operator, column and remedy.
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
        # The columns of rows that Spark aggregated, and those that conditions made, follow from the functions. Of the
        # input such rows have only the columns of key and time.
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
