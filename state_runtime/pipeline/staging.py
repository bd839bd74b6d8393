"""Where and how a task stages the rows of a sink: as Parquet files that no reader looks at; runs inside Spark tasks.

What gives them their final names is in pipeline/sinks.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from state_runtime.base.errors import InvalidData
from state_runtime.base.limits import MIB
from state_runtime.pipeline.partitions import in_folders
from state_runtime.pipeline.staged import StagedFiles
from state_runtime.snapshot.manifest import StagedFile
from state_runtime.store import Store, shared_store

__all__ = ["SinkSpec"]

# Files are closed at this size; it is also what one task holds in memory per sink.
_FILE_BYTES_MAX = 128 * MIB
# Of one task's rows in one epoch: manifests name each file.
_FOLDERS_MAX = 1_000
_ROW_GROUP_ROWS = 1 << 20
# What `_Staging` gives.
_TERM = re.compile(r"[0-9]{20}\Z")
_STAGED = re.compile(r"[A-Za-z0-9._=-]+\.parquet\Z")


@dataclass(frozen=True)
class SinkSpec:
    """A sink as tasks see it: where to stage. Pickled to the tasks; `storage_options` stays out of every repr.

    Attributes:
        empty_epochs: it is told of epochs without rows too: the driver stages a file that has none.
        partition_by: columns whose values name the folder of a row's file.
    """

    name: str
    store_url: str
    storage_options: Mapping[str, Any] = field(repr=False)
    staging_prefix: str = ""
    final_prefix: str = ""
    epoch_column: str | None = None
    empty_epochs: bool = False
    partition_by: tuple[str, ...] = ()

    def store(self) -> Store:
        """The store below which `staged` and `final` paths lie."""
        return shared_store(self.store_url, self.storage_options)

    def remove_abandoned(self, term: int, named: Set[str], since_term: int = 0) -> None:
        """Remove what runs before `term` staged, except what the newest manifest names.

        Args:
            since_term: what runs before that one staged is not to be removed: it may be another root's
                (pipeline/output_owner.py).

        Those runs are fenced: whatever they stage can never be named by a manifest. Names that no task of ours gives
        are somebody else's: they stay.
        """
        store = self.store()
        for folder in store.list_names(self.staging_prefix):
            if not _TERM.match(folder) or not since_term <= int(folder) < term:
                continue
            for name in store.list_names(f"{self.staging_prefix}/{folder}"):
                path = f"{self.staging_prefix}/{folder}/{name}"
                if _STAGED.match(name) and path not in named:
                    store.delete(path)

    def remove_epoch(self, term: int, epoch: int) -> None:
        """Remove what a run's tasks staged of an epoch that has not happened, whether or not they could tell of it.

        Race: what a task of a dying action stages after this stays until the next run (`remove_abandoned`).
        """
        store, folder = self.store(), f"{self.staging_prefix}/{term:020d}"
        for name in store.list_names(folder):
            if _STAGED.match(name) and name.startswith(f"{epoch:020d}-"):
                store.delete(f"{folder}/{name}")

    def open(self, term: int, epoch: int, shard: int, attempt: str) -> _Staging:
        """Begin staging for one task; names are unique to the attempt.

        Args:
            epoch: its number, which is never published twice with other rows.
        """
        return _Staging(self, term, epoch, f"{epoch:020d}-{shard:05d}-{attempt}")

    def stage_nothing(self, term: int, epoch: int, attempt: str, schema: pa.Schema) -> StagedFiles:
        """Stage a file without rows, for an epoch in which no task had any."""
        staging = self.open(term, epoch, 0, attempt)
        staging.begin(schema)
        return staging.finish()


class _Open:
    """A file that a task writes into memory."""

    def __init__(self, schema: pa.Schema) -> None:
        self.buffer = pa.BufferOutputStream()
        self.writer = pq.ParquetWriter(self.buffer, schema, compression="zstd", write_page_checksum=True)
        self.rows = 0


class _Staging:
    """Writes one task's rows of one sink as Parquet; nothing is stored for a task without rows."""

    def __init__(self, spec: SinkSpec, term: int, epoch: int, name: str) -> None:
        self._spec = spec
        self._term = term
        self._epoch = epoch
        self._name = name
        self._files: list[StagedFile] = []
        self._open: dict[str, _Open] = {}
        self._folders: set[str] = set()

    def write(self, batch: pa.RecordBatch) -> None:
        """Raises: InvalidData: rows for too many folders, or for one that cannot be named."""
        if batch.num_rows == 0:
            return
        if self._spec.epoch_column:
            epoch = pa.repeat(pa.scalar(self._epoch, pa.int64()), batch.num_rows)
            batch = batch.append_column(pa.field(self._spec.epoch_column, pa.int64()), epoch)
        for folder, rows in in_folders(batch, self._spec.partition_by, f"sink {self._spec.name!r}"):
            file = self._open.get(folder) or self.begin(rows.schema, folder)
            file.writer.write_batch(rows, row_group_size=_ROW_GROUP_ROWS)
            file.rows += rows.num_rows
        if sum(file.buffer.tell() for file in self._open.values()) > _FILE_BYTES_MAX:
            self._close_files()

    def begin(self, schema: pa.Schema, folder: str = "") -> _Open:
        """Open a file; it is stored even if no row comes."""
        self._folders.add(folder)
        if len(self._folders) > _FOLDERS_MAX:
            raise InvalidData(
                f"sink {self._spec.name!r}: the rows that one task has in one epoch are of more than {_FOLDERS_MAX:,} "
                f"folders by {', '.join(self._spec.partition_by)}; partition by columns with fewer values"
            )
        file = self._open[folder] = _Open(schema)
        return file

    def finish(self) -> StagedFiles:
        """Store what is left."""
        self._close_files()
        return StagedFiles(self._spec.name, tuple(self._files))

    def _close_files(self) -> None:
        for folder, file in self._open.items():
            file.writer.close()
            body = file.buffer.getvalue()
            name = f"{self._name}-{len(self._files):03d}.parquet"
            staged = f"{self._spec.staging_prefix}/{self._term:020d}/{name}"
            inside = f"{folder}/" if folder else ""
            final = f"{inside}{self._spec.final_prefix}{name}" if self._spec.final_prefix else staged
            self._spec.store().put(staged, body)
            self._files.append(StagedFile(staged, final, body.size, file.rows))
        self._open.clear()
