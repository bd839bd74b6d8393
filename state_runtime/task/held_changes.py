"""A task's changes, if they are too many for memory until it is done: on the host's disk, and already being uploaded.

A shard that gets much more input than a task may hold also changes much. The operator's changes until now are written
to a file that has no name once it is open, and mapped. With the changelog on they are also encoded and their upload
begins, while the operator continues with the next slice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pyarrow as pa

from state_runtime.base.ids import Ids
from state_runtime.changelog.parts_writer import PartsWriter
from state_runtime.task.spill import mapped

__all__ = ["HeldChanges"]

_LOG = logging.getLogger(__name__)


class HeldChanges:
    """Life cycle: `keep` when the operator calls it → `writer` and `sent` go to `persist`, or `abandon`.

    Args:
        begin: makes the writer of the upload; None if nothing is sent while the task is at work.

    Attributes:
        writer: None as long as nothing was kept.
        sent: the `id` of batches that were given to the writer.
    """

    def __init__(
        self,
        folder: Path,
        ids: Ids,
        operator: str,
        hash_range: tuple[int, int],
        begin: Callable[[], PartsWriter] | None,
    ) -> None:
        self._folder = folder
        self._ids = ids
        self._operator = operator
        self._hash_range = hash_range
        self._begin = begin
        self._kept: list[pa.RecordBatch] = []  # so that no `id` is used twice
        self.writer: PartsWriter | None = None
        self.sent: set[int] = set()

    def keep(self, state: str, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the same rows, mapped from disk; the given rows if the disk does not take them.

        Raises:
            StoreUnavailable: no room for an upload within its deadline.
        """
        try:
            kept = mapped(batch, self._folder, self._ids)
        except OSError as error:
            _warn_not_kept(self._folder, error.strerror or str(error))
            kept = batch
        self._kept.append(kept)
        if self._begin is not None:
            if self.writer is None:
                self.writer = self._begin()
            self.writer.add("state", self._operator, state, kept, self._hash_range)
            self.sent.add(id(kept))
        return kept

    def abandon(self) -> None:
        """Delete the changes that were sent: the task begins again, or fails."""
        if self.writer is not None:
            self.writer.abandon()


@lru_cache(maxsize=64)
def _warn_not_kept(folder: Path, why: str) -> None:
    """Warn once in a worker process, not in each epoch."""
    _LOG.warning("%s takes no changes: %s; they are held in memory until the epoch ends", folder, why)
