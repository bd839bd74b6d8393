"""What a task gets from Spark, brought into the order of its keys, within a bound on its memory.

Up to `bytes_max` the rows are held. What is more is sorted a chunk at a time, written to the host's disk as a run, and
mapped: it is in no task's private memory then. Runs have no name once they are open, so a killed task leaves none. A
disk that cannot take them costs memory and nothing else: the rows are held then, however many they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from state_runtime.base.errors import InvalidData
from state_runtime.base.ids import Ids
from state_runtime.changelog.rows import rows_batch
from state_runtime.processors.builtin.partial_rows import are_partial, rows_behind
from state_runtime.processors.grouping import GroupedRows, order_of_rows
from state_runtime.spark.columns import HASH_COLUMN, INITIAL_COLUMN, SEQUENCE_COLUMN, WAKE_SEQUENCE
from state_runtime.state.key_groups import shard_of_hash
from state_runtime.state.table import Hashes, Positions, concat
from state_runtime.state.text import broken_text
from state_runtime.task.sorted_input import KeyColumns, MemoryPass, RowPass, SortedRows, SpilledPass
from state_runtime.task.spill import mapped

__all__ = ["Gathered", "gather", "readable", "row_bytes_of"]

_LOG = logging.getLogger(__name__)
# Where a task has few rows of its own, those of earlier epochs are processed by parts.
_ROWS_MIN = 1 << 20
_INTERNAL = (HASH_COLUMN, SEQUENCE_COLUMN, INITIAL_COLUMN)
# `monotonically_increasing_id` gives the rows of a partition numbers of so many bits.
_PLACE_BITS = 33


@dataclass(frozen=True)
class Gathered:
    """A task's input.

    Attributes:
        shard: which one; rows say it, Spark's partition number does not, once user code unites two frames.
        begin: the rows of this epoch, from their beginning.
        input_rows: how many they are, each counted although Spark may have aggregated them before the shuffle.
        partial_rows: as how many they came then; 0 if they came as they are.
        row_bytes: of the piece with the widest rows on average.
        slice_rows_max: so many can be processed in one slice.
        initial: rows of the initial state, in the operator's first epoch.
        empty: no row, in the data columns.
        spilled_bytes: of the rows that wait on disk.
    """

    shard: int
    begin: Callable[[], RowPass]
    input_rows: int
    partial_rows: int
    slice_rows_max: int
    initial: GroupedRows | None
    empty: pa.RecordBatch
    spilled_bytes: int = 0
    row_bytes: int = 0


def row_bytes_of(batch: pa.RecordBatch) -> int:
    """What a row of a batch takes in memory, on average and rounded up; 0 without rows."""
    return -(-batch.nbytes // batch.num_rows) if batch.num_rows else 0


def readable(batches: Iterable[pa.RecordBatch], operator: str) -> Iterator[pa.RecordBatch]:
    """What Spark has for a task, each batch once its text was looked at (state/text.py).

    Raises:
        InvalidData: a text is not UTF-8.
    """
    for batch in batches:
        found = broken_text(batch)
        if found is not None:
            raise _not_utf8(operator, batch, *found)
        yield batch


def _not_utf8(operator: str, batch: pa.RecordBatch, column: str, row: int) -> InvalidData:
    place = int(_places(batch)[row])
    of = "the initial state" if column.startswith(INITIAL_COLUMN) else "its input"
    column = column.removeprefix(f"{INITIAL_COLUMN}.")
    at = f"row {place & ((1 << _PLACE_BITS) - 1)} of partition {place >> _PLACE_BITS}, "
    return InvalidData(
        f"operator {operator!r}: column {column!r} of {of} holds text whose bytes are not UTF-8 "
        f"({'' if are_partial(batch) else at}key hash {int(_hashes(batch)[row]):016x}). Spark takes any bytes for "
        "text, Python and the readers of snapshots do not. Nothing of the epoch was committed, and a restart reads "
        "the same rows: repair the text before the operator, "
        f".transform(lambda df: df.withColumn({column!r}, make_valid_utf8({column!r}))) (of pyspark.sql.functions), "
        "keep the column as binary, or read the source in its own encoding"
    )


def gather(
    batches: Iterable[pa.RecordBatch], keys: KeyColumns, parallelism: int, bytes_max: int, folder: Path, ids: Ids
) -> Gathered | None:
    """Take what Spark has for a task; None if that is nothing, not even a row that wakes the shard.

    Args:
        parallelism: rows say by their hashes which of so many shards they belong to.
        bytes_max: what may be held, about.
        folder: for runs; made when it is needed.
    """
    held: list[pa.RecordBatch] = []
    size = row_bytes = 0
    spill = _Spill(folder, ids, parallelism)
    for batch in batches:
        if not batch.num_rows:
            continue
        held.append(batch)
        size += batch.nbytes
        row_bytes = max(row_bytes, row_bytes_of(batch))
        # What an operator begins with comes once in its life, and with rows that are no input: it is held.
        if size > bytes_max and INITIAL_COLUMN not in batch.schema.names and spill.is_possible:
            spill.add(concat(held, held[0].schema))
            held, size = [], 0
    if spill.runs and held:
        spill.add(concat(held, held[0].schema))
    if spill.runs:
        return replace(spill.gathered(keys, bytes_max), row_bytes=row_bytes)
    held += spill.woken
    if not held:
        return None
    return replace(_in_memory(concat(held, held[0].schema), keys, parallelism), row_bytes=row_bytes)


def _in_memory(rows: pa.RecordBatch, keys: KeyColumns, parallelism: int) -> Gathered:
    sequence = _places(rows)
    initial: GroupedRows | None = None
    if rows.schema.get_field_index(INITIAL_COLUMN) >= 0:
        is_initial = rows.column(INITIAL_COLUMN).is_valid().to_numpy(zero_copy_only=False)
        initial = _grouped_initial(rows.filter(pa.array(is_initial)), keys)
        data = rows.filter(pa.array((sequence != WAKE_SEQUENCE) & ~is_initial))
    else:
        data = _without_wake_rows(rows, sequence)
    grouped = keys.group(_data(data), _hashes(data), _places(data))
    return Gathered(
        shard=_shard(rows, parallelism),
        begin=partial(MemoryPass, grouped),
        **_counts([grouped.rows]),
        slice_rows_max=max(grouped.rows.num_rows, _ROWS_MIN),
        initial=initial,
        empty=grouped.rows.slice(0, 0),
    )


def _counts(batches: Sequence[pa.RecordBatch]) -> dict[str, int]:
    behind = [rows_behind(batch) for batch in batches]
    came = sum(batch.num_rows for batch in batches)
    stood_for = sum(int(b.sum()) for b in behind if b is not None)
    is_partial = any(b is not None for b in behind)
    return {"input_rows": stood_for if is_partial else came, "partial_rows": came if is_partial else 0}


def _grouped_initial(rows: pa.RecordBatch, keys: KeyColumns) -> GroupedRows:
    column = rows.column(INITIAL_COLUMN)
    columns = dict(zip((f.name for f in column.type), column.flatten()))
    return keys.group(pa.RecordBatch.from_pydict(columns), _hashes(rows), _places(rows))


def _without_wake_rows(rows: pa.RecordBatch, places: Positions) -> pa.RecordBatch:
    keep = places != WAKE_SEQUENCE
    return rows if bool(keep.all()) else rows.filter(pa.array(keep))


def _data(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.drop_columns([name for name in _INTERNAL if name in rows.schema.names])


def _shard(rows: pa.RecordBatch, parallelism: int) -> int:
    return shard_of_hash(int(_hashes(rows)[0]), parallelism)


def _hashes(rows: pa.RecordBatch) -> Hashes:
    hashes: Hashes = rows.column(HASH_COLUMN).to_numpy(zero_copy_only=False).view(np.uint64)
    return hashes


def _places(rows: pa.RecordBatch) -> Positions:
    places: Positions = rows.column(SEQUENCE_COLUMN).to_numpy(zero_copy_only=False)
    return places


class _Spill:
    """Chunks of rows as sorted runs. Life cycle: `add` while `is_possible` → `gathered`."""

    def __init__(self, folder: Path, ids: Ids, parallelism: int) -> None:
        self._folder = folder
        self._ids = ids
        self._parallelism = parallelism
        self.runs: list[SortedRows] = []
        self.woken: list[pa.RecordBatch] = []  # a chunk that had no row of the input
        self.is_possible = True
        self._shard = 0
        self._bytes = 0

    def add(self, rows: pa.RecordBatch) -> None:
        """Sort a chunk and let it wait on disk; in memory, from now on, if the disk does not take it."""
        self._shard = _shard(rows, self._parallelism)
        waking, rows = rows, _without_wake_rows(rows, _places(rows))
        if not rows.num_rows:
            self.woken = [waking]
            return
        hashes, places = _hashes(rows), _places(rows)
        order = order_of_rows(hashes, places)
        sorted_rows = SortedRows(_data(rows).take(pa.array(order)), hashes[order], places[order])
        try:
            run = self._mapped(sorted_rows)
            self._bytes += run.rows.nbytes
        except OSError as error:
            self.is_possible = False
            _warn_not_spilled(self._folder, error.strerror or str(error))
            run = sorted_rows
        self.runs.append(run)

    def _mapped(self, rows: SortedRows) -> SortedRows:
        kept = mapped(rows_batch(rows.hashes, rows.places, rows.rows), self._folder, self._ids)
        hashes, places = (kept.column(n).to_numpy(zero_copy_only=False) for n in (0, 1))
        data = pa.RecordBatch.from_arrays(kept.columns[2:], schema=rows.rows.schema)
        return SortedRows(data, hashes, places)

    def gathered(self, keys: KeyColumns, bytes_max: int) -> Gathered:
        rows = sum(map(len, self.runs))
        row_bytes = max(1, sum(r.rows.nbytes for r in self.runs) // rows)
        held_max = max(1, bytes_max // row_bytes // 4)
        begin = partial(SpilledPass, self.runs, keys, held_max)
        return Gathered(
            shard=self._shard,
            begin=begin,
            **_counts([run.rows for run in self.runs]),
            slice_rows_max=held_max,
            initial=None,
            empty=self.runs[0].rows.slice(0, 0),
            spilled_bytes=self._bytes,
        )


@lru_cache(maxsize=64)
def _warn_not_spilled(folder: Path, why: str) -> None:
    """Once in a worker process, not in each epoch."""
    _LOG.warning(
        "%s takes no rows that wait: %s; they are held in memory, and task_bytes_max does not bound them", folder, why
    )
