"""Staging of a sink's rows by a task, as Parquet files that no reader looks at; runs inside Spark tasks.

pipeline/sinks.py gives the files their final names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from state_runtime.base.errors import InvalidData
from state_runtime.base.limits import MIB
from state_runtime.pipeline.partitions import in_folders
from state_runtime.pipeline.staged import StagedFiles
from state_runtime.snapshot.manifest import StagedFile
from state_runtime.snapshot.paths import OUTPUTS_DIR
from state_runtime.state.text import broken_text, text_with_nul
from state_runtime.store import Store, shared_store

__all__ = ["FOLDERS_MAX", "SinkSpec", "Staging", "rows_read", "rows_sent"]

FOLDERS_MAX = 1_000
"""Folders of one task's rows in one epoch: manifests name each file."""
# Files are closed at this size, and rows for folders are cut at this many bytes. It is also the memory of one task per
# sink; while rows are cut, three times that.
_FILE_BYTES_MAX = 128 * MIB
# Files that are stored at a time: a folder's files may be small, and each is a request to an object store.
_PUTS = 8
_ROW_GROUP_ROWS = 1 << 20
# The names that `_Staging` gives.
_TERM = re.compile(r"[0-9]{20}\Z")
_STAGED = re.compile(r"[A-Za-z0-9._=-]+\.parquet\Z")


@dataclass(frozen=True)
class SinkSpec:
    """A sink as tasks see it: where to stage. Pickled to the tasks; `storage_options` is in no repr.

    Attributes:
        empty_epochs: the sink is called for epochs without rows too: the driver stages a file without rows.
        partition_by: columns whose values name the folder of a row's file.
        is_for_sql: text that no database holds is refused when it is staged. Behind the checkpoint it would be too
            late: the staged rows stay as they are.
        job, root_id: whose output it is, for sinks that say so to their target.
        left_epochs: closed ranges of epochs that the job went back behind, ascending.
    """

    name: str
    store_url: str
    storage_options: Mapping[str, Any] = field(repr=False)
    staging_prefix: str = ""
    final_prefix: str = ""
    epoch_column: str | None = None
    empty_epochs: bool = False
    partition_by: tuple[str, ...] = ()
    job: str = ""
    root_id: str = ""
    is_for_sql: bool = False
    left_epochs: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def below_root(
        name: str, job_name: str, job_uid: str, root: tuple[str, Mapping[str, Any]], folder: str, **more: Any
    ) -> SinkSpec:
        """Return how tasks stage below the job root, for a target that has no place for files of ours.

        Args:
            root: URL and options of the job root.
            folder: below its folder for outputs.
            more: other fields.
        """
        return SinkSpec(
            name=name,
            store_url=root[0],
            storage_options=root[1],
            staging_prefix=f"{OUTPUTS_DIR}/{folder}",
            job=job_name,
            root_id=job_uid,
            **more,
        )

    def store(self) -> Store:
        """Return the store that contains the `staged` and `final` paths."""
        return shared_store(self.store_url, self.storage_options)

    def remove_abandoned(self, term: int, named: Set[str], since_term: int = 0) -> None:
        """Remove files that runs before `term` staged, except those that the newest manifest names.

        Args:
            since_term: files staged by runs before this term are kept: they may belong to another root
                (pipeline/output_owner.py).

        Those runs are fenced: no manifest can ever name what they stage. Files with names that no Stillstate task gives
        are kept.
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
        """Remove the files that a run's tasks staged for an epoch that has not happened, reported or not.

        Race: files that a task of a dying action stages after this call stay until the next run (`remove_abandoned`).
        """
        store, folder = self.store(), f"{self.staging_prefix}/{term:020d}"
        for name in store.list_names(folder):
            if _STAGED.match(name) and name.startswith(f"{epoch:020d}-"):
                store.delete(f"{folder}/{name}")

    def open(
        self,
        term: int,
        epoch: int,
        shard: int,
        attempt: str,
        *,
        sent_bytes_max: int = 0,
        tasks: int = 1,
    ) -> Staging:
        """Begin staging for one task; file names are unique to the attempt.

        Args:
            epoch: number of the epoch; the same number is never published with other rows.
            sent_bytes_max: rows of so many bytes in memory are not stored, but go to the driver; 0: all are stored.
            tasks: of how many tasks the rows are.
        """
        return Staging(self, term, epoch, f"{epoch:020d}-{shard:05d}-{attempt}", sent_bytes_max, FOLDERS_MAX * tasks)

    def stage_nothing(self, term: int, epoch: int, attempt: str, schema: pa.Schema) -> StagedFiles:
        """Stage a file without rows, for an epoch in which no task had any."""
        staging = self.open(term, epoch, 0, attempt)
        staging.begin(schema)
        return staging.finish()


class _File:
    """A Parquet file in memory."""

    def __init__(self, schema: pa.Schema) -> None:
        self._buffer = pa.BufferOutputStream()
        self._writer = pq.ParquetWriter(self._buffer, schema, compression="zstd", write_page_checksum=True)
        self.rows = 0

    @property
    def is_full(self) -> bool:
        return bool(self._buffer.tell() > _FILE_BYTES_MAX)

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch, row_group_size=_ROW_GROUP_ROWS)
        self.rows += batch.num_rows

    def close(self) -> pa.Buffer:
        """Close the file and return its bytes."""
        self._writer.close()
        return self._buffer.getvalue()


def rows_sent(batches: Sequence[pa.RecordBatch]) -> bytes:
    """Return rows as a stream of Arrow; b"" without any."""
    if not batches:
        return b""
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(stream.getvalue())


def rows_read(rows: bytes) -> list[pa.RecordBatch]:
    """Return what `rows_sent` was given."""
    return list(pa.ipc.open_stream(rows)) if rows else []


class Staging:
    """Writes one task's rows of one sink as Parquet; nothing is stored for a task without rows, or with few of them.

    Made by `SinkSpec.open`. Life cycle: `write` → `finish`.
    """

    def __init__(self, spec: SinkSpec, term: int, epoch: int, name: str, sent_bytes_max: int, folders_max: int) -> None:
        self._spec = spec
        self._term = term
        self._epoch = epoch
        self._name = name
        self._sent_bytes_max = sent_bytes_max
        self._folders_max = folders_max
        self._files: list[StagedFile] = []
        self._open: _File | None = None
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._folders: set[str] = set()

    def write(self, batch: pa.RecordBatch) -> None:
        """Stage rows.

        Raises:
            InvalidData: the rows have too many folders, or a folder that cannot be named. `finish` raises it too. Or
                they have text that a database does not hold.
        """
        if batch.num_rows == 0:
            return
        if self._spec.is_for_sql:
            self._refuse_text(batch)
        if self._spec.epoch_column:
            epoch = pa.repeat(pa.scalar(self._epoch, pa.int64()), batch.num_rows)
            batch = batch.append_column(pa.field(self._spec.epoch_column, pa.int64()), epoch)
        if self._spec.partition_by:
            self._refuse_folders(batch)
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes > self._sent_bytes_max:
            self._sent_bytes_max = 0
            if not self._spec.partition_by:
                self._write_waiting()
            elif self._waiting_bytes > _FILE_BYTES_MAX:
                self._store_folders()

    def begin(self, schema: pa.Schema) -> None:
        """Open a file; it is stored even if no rows follow."""
        self._open = _File(schema)
        self._sent_bytes_max = 0

    def finish(self) -> StagedFiles:
        """Store the remaining rows, or return them."""
        if self._sent_bytes_max:
            return StagedFiles(self._spec.name, (), rows_sent(self._waiting))
        if self._spec.partition_by:
            self._store_folders()
        else:
            self._write_waiting()
        self._store_open()
        return StagedFiles(self._spec.name, tuple(self._files))

    def _write_waiting(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for batch in waiting:
            if self._open is None:
                self._open = _File(batch.schema)
            self._open.write(batch)
            if self._open.is_full:
                self._store_open()

    def _store_open(self) -> None:
        if self._open is not None:
            file, self._open = self._open, None
            self._spec.store().put(*self._closed(file))

    def _refuse_text(self, batch: pa.RecordBatch) -> None:
        broken, way = broken_text(batch), "make_valid_utf8({0})"
        if broken is None:
            broken, way = text_with_nul(batch), "regexp_replace({0}, '\\x00', '')"
        if broken is not None:
            name, row = broken
            raise InvalidData(
                f"sink {self._spec.name!r}: row {row} of a batch has text in {name!r} that PostgreSQL does not hold (a "
                "NUL character, or bytes that are not UTF-8). Repair it before the sink, "
                f".transform(lambda df: df.withColumn({name!r}, {way.format(repr(name))}))"
            )

    def _refuse_folders(self, batch: pa.RecordBatch) -> None:
        broken = broken_text(batch.select(self._spec.partition_by))
        if broken is not None:
            raise InvalidData(
                f"sink {self._spec.name!r}: row {broken[1]} of a batch has text in {broken[0]!r} whose bytes are not "
                "UTF-8: it names no folder. Repair it before the sink, .transform(lambda df: "
                f"df.withColumn({broken[0]!r}, make_valid_utf8({broken[0]!r}))), or partition by another column"
            )

    def _store_folders(self) -> None:
        """Store a file for each folder, several at a time; no put is running when it returns or raises.

        Many rows are cut at once. One open file for each folder, with a few rows of each batch, would take sixteen
        times as long and store three times the bytes (docs/design/0039-folders.md).
        """
        if not self._waiting:
            return
        rows = pa.concat_batches(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        store = self._spec.store()
        with ThreadPoolExecutor(_PUTS, thread_name_prefix="stage") as pool:
            try:
                puts = [pool.submit(store.put, *self._closed(file, folder)) for folder, file in self._in_files(rows)]
                for put in puts:
                    put.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _in_files(self, rows: pa.RecordBatch) -> Iterator[tuple[str, _File]]:
        for folder, part in in_folders(rows, self._spec.partition_by, f"sink {self._spec.name!r}"):
            self._folders.add(folder)
            if len(self._folders) > self._folders_max:
                raise InvalidData(
                    f"sink {self._spec.name!r}: the rows that one task has in one epoch are of more than "
                    f"{self._folders_max:,} folders by {', '.join(self._spec.partition_by)}; partition by columns with "
                    "fewer values"
                )
            file = _File(part.schema)
            file.write(part)
            yield folder, file

    def _closed(self, file: _File, folder: str = "") -> tuple[str, pa.Buffer]:
        """Record a finished file and return its staged path and its bytes."""
        body = file.close()
        name = f"{self._name}-{len(self._files):03d}.parquet"
        staged = f"{self._spec.staging_prefix}/{self._term:020d}/{name}"
        inside = f"{folder}/" if folder else ""
        final = f"{inside}{self._spec.final_prefix}{name}" if self._spec.final_prefix else staged
        self._files.append(StagedFile(staged, final, body.size, file.rows))
        return staged, body
