"""The rows of all shards in one task: for epochs of few rows, in which a shuffle and a task per shard would take most
of the time.

The task does one shard after the other, as separate tasks would, in order of the shards. So the next steps of the plan
get the same rows in the same order. The task must stay small. Rows are counted while they are read, before they are
processed, and the time is checked between two shards. Too much work is refused with `TooMuchForOneTask`, and the driver
runs the epoch with a task for each shard. See docs/design/0033-floor.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from state_runtime.base.clock import Clock
from state_runtime.base.errors import TooMuchForOneTask
from state_runtime.base.limits import MIB
from state_runtime.spark.columns import HASH_COLUMN
from state_runtime.state.key_groups import shards_of_hashes
from state_runtime.state.table import concat

__all__ = ["SingleTaskLimits", "by_shard"]


@dataclass(frozen=True)
class SingleTaskLimits:
    """The limits of one task for all shards.

    Attributes:
        rows_max: several times the rows that the driver expects of an epoch with one task, so that a burst need not be
            refused.
        bytes_max: in memory.
        time_max_s: time, from the arrival of its rows, after which no further shard is begun. Several times the
            duration of such an epoch on a slow machine.
    """

    rows_max: int = 65_536
    bytes_max: int = 64 * MIB
    time_max_s: float = 1.0


def by_shard(
    batches: Iterable[pa.RecordBatch], shards: int, limits: SingleTaskLimits, clock: Clock
) -> Iterator[Iterable[pa.RecordBatch]]:
    """Yield the input of each shard, in order; nothing for a shard without rows.

    Raises:
        TooMuchForOneTask: more rows or bytes came than one task should have, or it takes too long.
    """
    rows = concat(_few(batches, limits), pa.schema([]))
    started_s = clock.monotonic_s()
    if rows.num_rows == 0:
        yield from ([] for _ in range(shards))
        return
    hashes = rows.column(HASH_COLUMN).to_numpy(zero_copy_only=False).view(np.uint64)
    shard = shards_of_hashes(hashes, shards)
    rows = rows.take(pa.array(np.argsort(shard, kind="stable")))
    ends = np.cumsum(np.bincount(shard, minlength=shards))
    for number, (start, end) in enumerate(zip((0, *ends[:-1]), ends, strict=True)):
        elapsed_s = clock.monotonic_s() - started_s
        if elapsed_s > limits.time_max_s:
            raise TooMuchForOneTask(f"{number} of {shards} shards took {elapsed_s:.1f} s in one task")
        yield [rows.slice(start, end - start)] if end > start else []


def _few(batches: Iterable[pa.RecordBatch], limits: SingleTaskLimits) -> list[pa.RecordBatch]:
    kept: list[pa.RecordBatch] = []
    count = size = 0
    for batch in batches:
        if batch.num_rows == 0:
            continue
        kept.append(batch)
        count, size = count + batch.num_rows, size + batch.nbytes
        if count > limits.rows_max or size > limits.bytes_max:
            raise TooMuchForOneTask(f"{count} rows and more, {size} bytes, came for one task")
    return kept
