"""Transactional sinks: tasks stage (pipeline/staging.py), the manifest names what is staged, then it is published.

Publishing may be repeated: it ends in the same state.

A crash before the manifest leaves staged files that nobody names; a crash after it is repaired by the next run, which
publishes what the newest manifest names before it does anything else. So output has no loss and no duplicate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from state_runtime.base import faults
from state_runtime.base.errors import InvalidConfiguration, MissingFile, UserCodeError
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.snapshot.document import encode_document
from state_runtime.snapshot.manifest import StagedFile, StagedOutput
from state_runtime.snapshot.paths import OUTPUTS_DIR
from state_runtime.store import Created, open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["ForeachEpoch", "ParquetSink", "Sink", "foreach_epoch", "read_staged"]

EPOCH_COLUMN = "epoch"


class Sink(ABC):
    """What `Stream.write` takes. Made by users; bound to a job and a name when the job is built."""

    @abstractmethod
    def spec(self, job_name: str, job_uid: str, name: str, root: tuple[str, Mapping[str, Any]]) -> SinkSpec:
        """How tasks stage for this sink; `root` is the URL and options of the job root."""

    @abstractmethod
    def publish(self, spec: SinkSpec, output: StagedOutput, spark: SparkSession | None) -> None:
        """Make an epoch's output visible; repeated after a crash it ends in the same state."""

    def newest_published_epoch(self, spec: SinkSpec) -> int:
        """The highest epoch that this job has published here, by the sink's own log; 0 if it keeps none."""
        return 0

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
            name=name,
            store_url=self.path,
            storage_options=self._storage_options,
            staging_prefix=f"_stillstate/staging/{owner}",
            final_prefix=f"part-{owner}-",
            epoch_column=self.epoch_column,
        )

    def newest_published_epoch(self, spec: SinkSpec) -> int:
        """See `Sink.newest_published_epoch`. One listing of the commit log."""
        owner = spec.staging_prefix.rpartition("/")[2]
        stems = (name.removesuffix(".json") for name in spec.store().list_names(f"_stillstate/commits/{owner}"))
        return max((int(stem) for stem in stems if len(stem) == 20 and stem.isascii() and stem.isdigit()), default=0)

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
                    f"{file.final} exists; the output folder was changed by someone else. Restore the file, or start "
                    "from an older snapshot"
                ) from error
            faults.reach("one-file-published")
        # The entry belongs to the job that staged the output: after a claim or a rename another job publishes it, and
        # the first one may have begun to.
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
        return SinkSpec(name=name, store_url=root[0], storage_options=root[1], staging_prefix=f"{OUTPUTS_DIR}/{name}")

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
                "The checkpoint is durable; after a restart the function is called again with the same rows and the "
                "same epoch id"
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
