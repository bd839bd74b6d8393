"""The built-in `deduplicate`: the first row of each key, once; without a Python loop over rows or keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from state_runtime.processors.vectorized import KeyedBatch

__all__ = ["SEEN", "Deduplicate"]

SEEN = "seen"


@dataclass(frozen=True)
class Deduplicate:
    """Emits whole rows, in source order. The state is the keys themselves; it holds every key that was ever seen."""

    def process(self, batch: KeyedBatch) -> pa.RecordBatch | None:
        """The first row of each key that the state does not have."""
        new = ~batch.state(SEEN).found
        if not bool(new.any()):
            return None
        batch.update(SEEN, {}, where=new)
        first = batch.starts[new]
        return batch.rows.take(pa.array(first[np.argsort(batch.sequence[first])]))
