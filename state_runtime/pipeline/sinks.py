"""Transactional sinks: tasks stage, the manifest names what is staged, publishing follows the manifest and is
idempotent.

A crash before the manifest leaves staged files that nobody names; a crash after it is repaired by the next run, which
publishes what the newest manifest names before it does anything else. So output has no loss and no duplicate.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from state_runtime.base import faults
from state_runtime.base.errors import InvalidConfiguration, MissingFile, UserCodeError
from state_runtime.base.limits import MIB
from state_runtime.snapshot.document import encode_document
from state_runtime.snapshot.manifest import StagedFile, StagedOutput
from state_runtime.snapshot.paths import OUTPUTS_DIR
from state_runtime.store import Created, Store, open_store, shared_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["ForeachEpoch", "ParquetSink", "Sink", "SinkSpec", "StagedFiles", "foreach_epoch"]

EPOCH_COLUMN = "epoch"
# A file is closed at this size; it is also what one task holds in memory per sink.
_FILE_BYTES_MAX = 128 * MIB
_ROW_GROUP_ROWS = 1 << 20
# What `_Staging` gives.
_TERM = re.compile(r"[0-9]{20}\Z")
_STAGED = re.compile(r"[A-Za-z0-9._=-]+\.parquet\Z")


@dataclass(frozen=True)
class StagedFiles:
    """What one task staged for one sink."""

    sink: str
    files: tuple[StagedFile, ...]


@dataclass(frozen=True)
class SinkSpec:
    """A sink as tasks see it: where to stage. Pickled to the tasks; `storage_options` stays out of every repr."""

    name: str
    store_url: str
    storage_options: Mapping[str, Any] = field(repr=False)
    staging_prefix: str = ""
    final_prefix: str = ""
    epoch_column: str | None = None

    def store(self) -> Store:
        """The store below which `staged` and `final` paths lie."""
        return shared_store(self.store_url, self.storage_options)

    def remove_abandoned(self, term: int, named: Set[str]) -> None:
        """Remove what runs before `term` staged, except what the newest manifest names.

        Those runs are fenced: whatever they stage can never be named by a manifest. Names that no task of ours gives
        are somebody else's: they stay.
        """
        store = self.store()
        for folder in store.list_names(self.staging_prefix):
            if not _TERM.match(folder) or int(folder) >= term:
                continue
            for name in store.list_names(f"{self.staging_prefix}/{folder}"):
                path = f"{self.staging_prefix}/{folder}/{name}"
                if _STAGED.match(name) and path not in named:
                    store.delete(path)

    def open(self, term: int, epoch: int, shard: int, attempt: str) -> _Staging:
        """Begin staging for one task; names are unique to the attempt.

        Args:
            epoch: its number, which is never published twice with other rows.
        """
        return _Staging(self, term, epoch, f"{epoch:020d}-{shard:05d}-{attempt}")


class _Staging:
    """Writes one task's rows of one sink as Parquet; nothing is stored for a task without rows."""

    def __init__(self, spec: SinkSpec, term: int, epoch: int, name: str) -> None:
        self._spec = spec
        self._term = term
        self._epoch = epoch
        self._name = name
        self._files: list[StagedFile] = []
        self._buffer: pa.BufferOutputStream | None = None
        self._writer: Any = None
        self._rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        if self._spec.epoch_column:
            epoch = pa.array([self._epoch], pa.int64()).take(pa.array([0] * batch.num_rows, pa.int8()))
            batch = batch.append_column(pa.field(self._spec.epoch_column, pa.int64()), epoch)
        if self._writer is None:
            self._buffer = pa.BufferOutputStream()
            self._writer = pq.ParquetWriter(self._buffer, batch.schema, compression="zstd", write_page_checksum=True)
        self._writer.write_batch(batch, row_group_size=_ROW_GROUP_ROWS)
        self._rows += batch.num_rows
        if self._buffer is not None and self._buffer.tell() > _FILE_BYTES_MAX:
            self._close_file()

    def finish(self) -> StagedFiles:
        """Store what is left."""
        if self._writer is not None:
            self._close_file()
        return StagedFiles(self._spec.name, tuple(self._files))

    def _close_file(self) -> None:
        assert self._buffer is not None
        self._writer.close()
        body = self._buffer.getvalue()
        name = f"{self._name}-{len(self._files):03d}.parquet"
        staged = f"{self._spec.staging_prefix}/{self._term:020d}/{name}"
        final = f"{self._spec.final_prefix}{name}" if self._spec.final_prefix else staged
        self._spec.store().put(staged, body.to_pybytes())
        self._files.append(StagedFile(staged, final, body.size, self._rows))
        self._buffer, self._writer, self._rows = None, None, 0


class Sink(ABC):
    """What `Stream.write` takes. Made by users; bound to a job and a name when the job is built."""

    @abstractmethod
    def spec(self, job_name: str, job_uid: str, name: str, root: tuple[str, Mapping[str, Any]]) -> SinkSpec:
        """How tasks stage for this sink; `root` is the URL and options of the job root."""

    @abstractmethod
    def publish(self, spec: SinkSpec, output: StagedOutput, spark: SparkSession | None) -> None:
        """Make an epoch's output visible; repeated after a crash it ends in the same state."""

    def settle(self, spec: SinkSpec, output: StagedOutput) -> None:  # noqa: B027 - most sinks have nothing to settle
        """Called when a later manifest no longer names `output`: what only a repetition needed can go."""


@dataclass(frozen=True)
class _SinkCommit:
    """One entry of a Parquet sink's commit log."""

    job: str
    sink: str
    epoch: int
    files: tuple[StagedFile, ...]


class ParquetSink(Sink):
    """Parquet files in one folder, exactly once.

    `spark.read.parquet(path)` (and every other reader that skips names beginning with `_`) sees only committed files:
    staged ones lie below `_stillstate/`, and get their final name after the manifest. Each epoch also leaves an entry
    in the commit log, `_stillstate/commits/<job>-<sink>/<epoch>.json`, for readers that want whole epochs.

    Args:
        path: folder; a path or a URL like the store's.
        epoch_column: name of an added column with the epoch's number, by which consumers of update output pick
            the newest row of a key; None adds none.
        storage_options: for fsspec; never stored.
    """

    def __init__(
        self, path: str, *, epoch_column: str | None = EPOCH_COLUMN, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        if not path:
            raise InvalidConfiguration("ParquetSink needs a folder; give it a path or a URL")
        self.path = str(path)
        self.epoch_column = epoch_column
        self._storage_options = dict(storage_options or {})

    def __repr__(self) -> str:
        return f"ParquetSink({open_store(self.path, self._storage_options).url!r})"

    def spec(self, job_name: str, job_uid: str, name: str, root: tuple[str, Mapping[str, Any]]) -> SinkSpec:
        """See `Sink.spec`."""
        owner = f"{job_name}-{job_uid[:8]}-{name}"
        return SinkSpec(
            name, self.path, self._storage_options, f"_stillstate/staging/{owner}", f"part-{owner}-", self.epoch_column
        )

    def publish(self, spec: SinkSpec, output: StagedOutput, spark: SparkSession | None) -> None:
        """Give every staged file its final name, then note the epoch in the commit log."""
        if not output.files:
            return
        store = spec.store()
        for file in output.files:
            try:
                store.move(file.staged, file.final)
            except FileNotFoundError as error:
                raise MissingFile(
                    f"sink {spec.name!r}: the snapshot names {file.staged} in {store.url}, but neither it nor "
                    f"{file.final} "
                    "exists; the output folder was changed by someone else. Restore the file, or start from an older "
                    "snapshot"
                ) from error
            faults.reach("one-file-published")
        # By whom it was staged: after a claim or a rename that is another than who publishes it, and may have begun to.
        owner = output.files[0].staged.rsplit("/", 3)[-3]
        entry = encode_document("sink-commit", _SinkCommit(owner, spec.name, output.epoch, output.files))
        path = f"_stillstate/commits/{owner}/{output.epoch:020d}.json"
        if store.create(path, entry) is Created.LOST:
            raise MissingFile(
                f"sink {spec.name!r}: {path} in {store.url} was written with other files for epoch {output.epoch}; "
                "two jobs with one identity write here. Give each job an output folder of its own"
            )


class ForeachEpoch(Sink):
    """A user's function, called with each epoch's output after its checkpoint is durable. Made by `foreach_epoch`."""

    def __init__(self, function: Callable[[DataFrame, int], None]) -> None:
        if not callable(function):
            raise InvalidConfiguration("foreach_epoch needs a function (df, epoch_id)")
        self._function = function

    def __repr__(self) -> str:
        return f"foreach_epoch({getattr(self._function, '__name__', 'function')})"

    def spec(self, job_name: str, job_uid: str, name: str, root: tuple[str, Mapping[str, Any]]) -> SinkSpec:
        """Staged below the job root: what a repetition delivers must be what the first call got."""
        return SinkSpec(name, root[0], root[1], f"{OUTPUTS_DIR}/{name}")

    def publish(self, spec: SinkSpec, output: StagedOutput, spark: SparkSession | None) -> None:
        """Call the function.

        Raises:
            UserCodeError: the function raised. The checkpoint stands; the next run calls it again, with the same rows
                and the same epoch id.
        """
        if not output.files or spark is None:
            return
        frame = read_staged(spark, spec, output)
        try:
            self._function(frame, output.epoch)
        except Exception as error:
            raise UserCodeError(
                f"sink {spec.name!r}: the function raised {type(error).__name__}: {error} for epoch {output.epoch}. "
                "The checkpoint is durable; after a restart the function is called again with the same rows and epoch "
                "id"
            ) from error

    def settle(self, spec: SinkSpec, output: StagedOutput) -> None:
        """Delete staged files that no restart will deliver again."""
        store = spec.store()
        for file in output.files:
            store.delete(file.staged)


def foreach_epoch(function: Callable[[DataFrame, int], None]) -> Sink:
    """A sink that calls `function(df, epoch_id)` after each checkpoint with output.

    The call happens at least once per epoch: a crash between the call and the next checkpoint repeats it with the same
    rows and the same id, so a function that uses the id as a transaction id (Delta's `txnVersion`, a key in a database)
    is exactly-once. It is not called for an epoch without output rows.

    Example:
        .write(foreach_epoch(lambda df, epoch: df.write.jdbc(...)))
    """
    return ForeachEpoch(function)


def staged_outputs(
    acknowledged: Sequence[StagedFiles], sinks: Sequence[SinkSpec], epoch: int
) -> tuple[StagedOutput, ...]:
    """Per sink, what all tasks of an epoch staged; pure."""
    return tuple(
        StagedOutput(
            sink.name, epoch, tuple(f for staged in acknowledged if staged.sink == sink.name for f in staged.files)
        )
        for sink in sinks
    )


def read_staged(spark: SparkSession, spec: SinkSpec, output: StagedOutput) -> DataFrame:
    """An epoch's staged files as a DataFrame. Tasks read them through our store, so Spark needs no connector for it."""
    from pyspark.sql.pandas.types import from_arrow_schema

    store = spec.store()
    first = output.files[0]
    schema = pq.read_schema(pa.BufferReader(store.read(first.staged, first.bytes)))
    paths = spark.createDataFrame([(f.staged, f.bytes) for f in output.files], "path string, bytes long")
    return paths.repartition(len(output.files)).mapInArrow(_ReadStaged(replace(spec)), from_arrow_schema(schema))


@dataclass(frozen=True)
class _ReadStaged:
    """Runs in tasks: paths in, rows out."""

    spec: SinkSpec

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        store = self.spec.store()
        for batch in batches:
            for path, size in zip(batch.column("path").to_pylist(), batch.column("bytes").to_pylist()):
                yield from pq.read_table(pa.BufferReader(store.read(path, size))).to_batches()
