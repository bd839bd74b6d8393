"""The changes of an epoch in one state, if they are too large for one batch; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

from state_runtime.state.reader import StateReader

__all__ = ["Changed", "ChangedRows", "batches_of", "on_top"]


@dataclass(frozen=True)
class ChangedRows:
    """Sorted batches in sequence: no hash is in two of them, and each identity comes once."""

    batches: tuple[pa.RecordBatch, ...]

    @property
    def num_rows(self) -> int:
        return sum(batch.num_rows for batch in self.batches)


Changed: TypeAlias = "pa.RecordBatch | ChangedRows"
"""One sorted batch in most epochs."""


def batches_of(changed: Changed) -> Sequence[pa.RecordBatch]:
    """Return the batches, in order of hash."""
    return changed.batches if isinstance(changed, ChangedRows) else (changed,)


def on_top(
    reader: StateReader, changes: Mapping[str, Changed], due_taken: Mapping[str, int] | None = None
) -> StateReader:
    """Return a state with changes on top; see `StateReader.overlaid`."""
    parts = {state: batches_of(changed) for state, changed in changes.items()}
    first = {state: batches[0] for state, batches in parts.items() if batches}
    reader = reader.overlaid(first, due_taken)
    for number in range(1, max(map(len, parts.values()), default=0)):
        reader = reader.overlaid({state: b[number] for state, b in parts.items() if number < len(b)})
    return reader
