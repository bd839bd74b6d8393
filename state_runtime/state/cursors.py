"""Reading the rows of one key a window at a time, from runs and from another reader's stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import pyarrow as pa

from state_runtime.state.table import concat, entries_of

__all__ = ["Cursor", "RunCursor", "StreamCursor"]


class Cursor(Protocol):
    """The rows of one key in one run, in order of `entry`, a window at a time."""

    def last(self) -> int | None:
        """Return the last `entry` up to which all rows are in memory; None at the end."""
        ...

    def take_through(self, cut: int) -> pa.RecordBatch | None:
        """Return the next rows with an `entry` up to `cut`, which is at most `last()`."""
        ...


class RunCursor:
    """A cursor over mapped rows: a window is a slice and costs nothing."""

    def __init__(self, rows: pa.RecordBatch, rows_max: int) -> None:
        self._rows = rows
        self._rows_max = rows_max

    def last(self) -> int | None:
        count = self._rows.num_rows
        return int(entries_of(self._rows)[min(count, self._rows_max) - 1]) if count else None

    def take_through(self, cut: int) -> pa.RecordBatch | None:
        # Different map keys may have the same `entry`; all rows of one come together.
        end = int(np.searchsorted(entries_of(self._rows), np.uint64(cut), side="right"))
        taken = self._rows.slice(0, end)
        self._rows = self._rows.slice(end)
        return taken


class StreamCursor:
    """A cursor over another reader's stream. Its last `entry` may continue in the next batch, so one batch is read
    ahead."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._rows: pa.RecordBatch | None = None
        self._whole: int | None = None  # up to this entry every row was read
        self._ended = False

    def last(self) -> int | None:
        while self._whole is None and not self._ended:
            batch = next(self._batches, None)
            if batch is None:
                self._ended = True
            elif batch.num_rows:
                self._rows = batch if self._rows is None else concat([self._rows, batch], batch.schema)
            if self._rows is None or self._rows.num_rows == 0:
                continue
            entries = entries_of(self._rows)
            whole = len(entries) if self._ended else int(np.searchsorted(entries, entries[-1], side="left"))
            self._whole = int(entries[whole - 1]) if whole else None
        return self._whole

    def take_through(self, cut: int) -> pa.RecordBatch | None:
        if self._rows is None or self._whole is None:
            return None
        end = int(np.searchsorted(entries_of(self._rows), np.uint64(cut), side="right"))
        taken, self._rows = self._rows.slice(0, end), self._rows.slice(end)
        if cut >= self._whole:
            self._whole = None
            if self._ended:
                self._rows = None
        return taken
