"""Whether rows in flight fit the pipeline that goes on with them; pure.

They have the columns that their operator read when it read them. By the rules of state, columns may have been added
(null in the rows that wait), dropped, reordered or widened since. Everything else is refused before anything is
written: then the rows are processed first, by the code that read them, or given up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from state_runtime.base.errors import InvalidPipeline
from state_runtime.changelog.rows import decode_columns, misfit
from state_runtime.snapshot.manifest import InflightNumbers, Manifest, OperatorEntry

__all__ = ["OperatorReads", "functions_of", "refuse_misfits"]

_MADE_BY_THE_RUNTIME = "__stillstate_"


@dataclass(frozen=True)
class OperatorReads:
    """What an operator of the pipeline takes.

    Attributes:
        columns: of its input.
        functions: as in `RowsLayout`.
    """

    columns: pa.Schema
    functions: str


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
        made = any(name.startswith(_MADE_BY_THE_RUNTIME) for name in stored.names)
        if made and layout.functions != reads.functions:
            return "they were prepared for other aggregates than it has now"
        # Rows that were aggregated before have columns of their own, which follow from the functions.
        if not made and (why := misfit(stored, reads.columns)):
            return why
    return ""
