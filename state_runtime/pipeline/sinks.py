"""Transactional sinks: tasks stage files (pipeline/staging.py), the manifest names them, then they are published.

Publishing may be repeated: it ends in the same state.

A crash before the manifest leaves staged files that no manifest names. After a crash behind the manifest, the next run
first publishes the output that the newest manifest names, unless it is published already. So output has no loss and no
duplicate. Published files belong to their readers: no start needs them (docs/design/0024-publishing.md).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from state_runtime.base import faults
from state_runtime.base.errors import InvalidConfiguration, MissingFile, UserCodeError
from state_runtime.pipeline.commit_log import is_logged, log_epoch, newest_epoch, newest_files, stager_of
from state_runtime.pipeline.compactions import finish_all
from state_runtime.pipeline.output_layout import OutputLayout, check_columns, refuse_other_files
from state_runtime.pipeline.output_owner import Claimant, own_output
from state_runtime.pipeline.output_upkeep import OutputUpkeep, OutputWork
from state_runtime.pipeline.partitions import check_partition_columns
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.snapshot.manifest import StagedFile, StagedOutput
from state_runtime.store import Store, shared_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "EpochInfo",
    "ForeachEpoch",
    "OnRollback",
    "ParquetSink",
    "Sink",
    "foreach_epoch",
    "move_all",
    "read_staged",
]

EPOCH_COLUMN = "epoch"
OnRollback = Literal["continue", "refuse", "replace"]

# Files that get their final name in parallel: on an object store each takes a few requests, one after the other.
_AT_A_TIME = 16


class Sink(ABC):
    """The argument of `Stream.write`. Made by users; bound to a job and a name when the job is built.

    Attributes:
        may_have_python: whether its handling of an epoch's output may have Spark hand rows to Python.
        replaces: whether it can take the output of an epoch for a whole table, in the place of the one before (complete
            mode).
        can_withdraw: whether it can take output out of its place again.
        on_rollback: what happens, when the job has gone back to an older snapshot, with the output that was published
            since: it stays ("continue"), the job does not start ("refuse"), or it is taken out ("replace").
    """

    may_have_python: ClassVar[bool] = True
    replaces: ClassVar[bool] = False
    can_withdraw: ClassVar[bool] = False
    on_rollback: OnRollback = "continue"

    @classmethod
    def checked(cls, on_rollback: OnRollback) -> OnRollback:
        """Return what is to happen when the job has gone back.

        Raises:
            InvalidConfiguration: this kind of sink cannot do it.
        """
        allowed = ("continue", "refuse", "replace") if cls.can_withdraw else ("continue", "refuse")
        if on_rollback not in allowed:
            raise InvalidConfiguration(
                f"{cls.__name__}: on_rollback must be {' or '.join(allowed)} (got {on_rollback!r})"
            )
        return on_rollback

    @abstractmethod
    def spec(self, job_name: str, job_uid: str, name: str, root: tuple[str, Mapping[str, Any]]) -> SinkSpec:
        """Return how tasks stage for this sink; `root` is the URL and options of the job root."""

    def check(self, schema: pa.Schema, where: str) -> None:  # noqa: B027 - most sinks take any rows
        """Check the rows' schema; called when the job is built.

        Args:
            schema: of the sink's rows.
            where: which sink it is, for a message.

        Raises:
            InvalidPipeline: it cannot take such rows.
        """

    def layout(self, schema: pa.Schema) -> OutputLayout | None:
        """Return how rows of a schema are laid out in a folder that readers take for a table; None without a folder."""
        return None

    def check_place(  # noqa: B027 - most sinks have no folder
        self, layout: OutputLayout, pending: Sequence[StagedFile], where: str
    ) -> None:
        """Check the sink's place; called before a run changes anything anywhere.

        Args:
            layout: the result of `layout`.
            pending: files that the newest snapshot names.
            where: which sink it is, for a message.

        Raises:
            InvalidPipeline: the place holds files that could not be read together with the new rows.
        """

    @abstractmethod
    def publish(self, spec: SinkSpec, output: StagedOutput, spark: SparkSession | None) -> None:
        """Make an epoch's output visible; repeated after a crash it ends in the same state."""

    def publish_again(self, spec: SinkSpec, output: StagedOutput, spark: SparkSession | None) -> None:
        """Publish output that an earlier run may have published; output that is published is left alone."""
        self.publish(spec, output, spark)

    def own(self, spec: SinkSpec, claimant: Claimant) -> int:
        """Own the sink's place; called before a run removes, stages or publishes anything here.

        Returns:
            The first term whose staged files the run's job root may remove.

        Raises:
            SnapshotInUse: another job root stages under the same names; nothing was removed.
        """
        return 0

    def newest_published_epoch(self, spec: SinkSpec) -> int:
        """Return the highest epoch that this job has published here, by the sink's own log; 0 if it keeps none."""
        return 0

    def settle(self, spec: SinkSpec, output: StagedOutput) -> None:  # noqa: B027 - most sinks have nothing to settle
        """Remove files that only a repetition needed; called when a later manifest no longer names `output`."""

    def withdraw(self, spec: SinkSpec, left: Sequence[tuple[int, int]]) -> int:
        """Take the output of epochs that the job went back behind out of the sink's place, before anything newer is
        published; idempotent. Behind it no driver that slept publishes such an epoch.

        Args:
            left: closed ranges of epochs, ascending.

        Returns:
            How many files or commits it took out now; 0 if nothing was there any more.

        Raises:
            InvalidPipeline: it cannot be told from the output of others; nothing was changed.
        """
        raise InvalidConfiguration(f"{self!r} cannot take output back: on_rollback must be continue or refuse")

    def upkeep(self, how: OutputUpkeep, *, now_ms: int, dry_run: bool) -> OutputWork | None:
        """Keep the sink's place in order, beside running jobs: each epoch stays there once, and stays known. None if
        there is nothing to keep in order. (Of `ParquetSink` see maintenance/output/upkeep.py.)

        Args:
            dry_run: only say what would be done.

        Raises:
            StoreUnavailable: other writers let no attempt through; what is done is done.
        """
        return None


class ParquetSink(Sink):
    """Parquet files in one folder, exactly once.

    `spark.read.parquet(path)` (and every other reader that skips names beginning with `_`) sees only committed files:
    staged files are stored below `_stillstate/`, and get their final name after the manifest. Each epoch also leaves an
    entry in the commit log, `_stillstate/commits/<job>-<sink>/<epoch>.json`, for readers that want whole epochs.

    Args:
        path: folder; a path or a URL like the store's.
        epoch_column: name of an added column with the epoch's number, by which consumers of update output pick
            the newest row of a key; None adds none.
        partition_by: columns whose values name folders, as Spark's `partitionBy` has it:
            `day=2024-05-17/part-….parquet`. They are of text, integers, booleans or dates and are in no file;
            readers take them from the folders.
            An epoch has a file for each folder, and more where tasks have many rows: each task writes one for each
            folder and 128 MiB of its rows, for 1,000 folders at most. One output folder has one way of partitioning:
            readers refuse a mixture.
        on_rollback: what happens to rows that were published behind the snapshot that the job goes back to: they stay
            ("continue"), the start is refused ("refuse"), or their files are removed ("replace").
        storage_options: for fsspec; never stored.

    Example:
        ParquetSink("out/trips", partition_by=["day"])
    """

    may_have_python: ClassVar[bool] = False
    can_withdraw: ClassVar[bool] = True

    def __init__(
        self,
        path: str,
        *,
        epoch_column: str | None = EPOCH_COLUMN,
        partition_by: Sequence[str] = (),
        on_rollback: OnRollback = "continue",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not path:
            raise InvalidConfiguration("ParquetSink needs a folder; give it a path or a URL")
        self.on_rollback = self.checked(on_rollback)
        self.path = str(path)
        self.epoch_column = epoch_column
        self.partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        self._storage_options = dict(storage_options or {})

    def __repr__(self) -> str:
        return f"ParquetSink({self._store().url!r})"

    def _store(self) -> Store:
        return shared_store(self.path, self._storage_options)

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
            partition_by=self.partition_by,
        )

    def check(self, schema: pa.Schema, where: str) -> None:
        """See `Sink.check`."""
        check_partition_columns(self.partition_by, schema, where)
        check_columns(schema, self.epoch_column, where)

    def layout(self, schema: pa.Schema) -> OutputLayout:
        """See `Sink.layout`."""
        columns = schema.append(pa.field(self.epoch_column, pa.int64())) if self.epoch_column else schema
        return OutputLayout(self._store().url, columns, self.partition_by)

    def check_place(self, layout: OutputLayout, pending: Sequence[StagedFile], where: str) -> None:
        """See `Sink.check_place`. For each job that has published here, the end of one file is read. For this job it is
        a pending file, if any: its commit log is long, and is listed once no other run is active."""
        store, mine = self._store(), pending[:1]
        files = [*mine, *newest_files(store, known={stager_of(file) for file in mine})]
        refuse_other_files(store, layout, files, where)

    def newest_published_epoch(self, spec: SinkSpec) -> int:
        """See `Sink.newest_published_epoch`. One listing of the commit log."""
        return newest_epoch(spec.store(), spec.staging_prefix.rpartition("/")[2])

    def publish(self, spec: SinkSpec, output: StagedOutput, spark: SparkSession | None) -> None:
        """Give every staged file its final name, several at a time, then record the epoch in the commit log.

        Raises:
            MissingFile: an unpublished file is gone, or the commit log has other files for the epoch.
        """
        if not output.files:
            return
        store = spec.store()
        missing = move_all(store, output.files)
        if missing is not None:
            # A newer run may have published it, and its readers may have removed the files since.
            if is_logged(spec.store(), spec.name, output):
                return
            raise MissingFile(
                f"sink {spec.name!r}: the snapshot names {missing.staged} in {store.url}, but neither it nor "
                f"{missing.final} exists, and the commit log does not say that epoch {output.epoch} was published. If "
                "the job wrote to another output folder until now, start it once with that one. Restore the file if "
                "it was removed. If it is lost, go back to the snapshot before (--from-snapshot): the input since "
                "then is read again, and its output is written again under higher epoch numbers"
            )
        log_epoch(store, spec.name, output)

    def publish_again(self, spec: SinkSpec, output: StagedOutput, spark: SparkSession | None) -> None:
        """Ask the commit log first: files of a recorded epoch may have been moved on, compacted or removed."""
        if output.files and not is_logged(spec.store(), spec.name, output):
            self.publish(spec, output, spark)

    def own(self, spec: SinkSpec, claimant: Claimant) -> int:
        """See `Sink.own`: one job root stages below `staging_prefix`, see pipeline/output_owner.py. Compactions whose
        process has died are ended, too: until then readers may see rows of theirs twice."""
        since_term = own_output(spec.store(), spec.staging_prefix, claimant).since_term
        finish_all(spec.store())
        return since_term


def move_all(store: Store, files: Sequence[StagedFile]) -> StagedFile | None:
    """Give staged files their final names; no file is being moved when it returns or raises.

    Returns:
        A file that exists under neither name; None if all have their final names.
    """
    missing: StagedFile | None = None
    with ThreadPoolExecutor(min(_AT_A_TIME, len(files)), thread_name_prefix="publish") as pool:
        moves = [pool.submit(store.move, file.staged, file.final) for file in files]
        try:
            for file, move in zip(files, moves, strict=True):
                try:
                    move.result()
                except FileNotFoundError:
                    missing = missing or file
                faults.reach("one-file-published")
        finally:
            pool.shutdown(cancel_futures=True)
    return missing


@dataclass(frozen=True)
class EpochInfo:
    """Who gives an epoch's rows: the third argument of a function of `foreach_epoch`, if it takes three.

    Attributes:
        epoch: number of the epoch within its root; never used twice there for other rows.
        root_id: of the job's root. A root that is created again has another one, and so has a fork.
        sink: name of the sink in the job.
        left_epochs: closed ranges of earlier epochs, ascending, that the job went back behind: the rows that it gave
            under them come again, under higher numbers. A target that keeps the epoch can delete them.
    """

    epoch: int
    root_id: str
    sink: str
    job: str
    left_epochs: tuple[tuple[int, int], ...] = ()

    @property
    def writer(self) -> str:
        """One text for root and sink: with `epoch` it is a key under which a target can know that it has the rows
        (Delta's `txnAppId` and `txnVersion`, a row in a database)."""
        return f"stillstate/{self.root_id}/{self.sink}"


class ForeachEpoch(Sink):
    """A user's function, called with each epoch's output after its checkpoint is durable. Made by `foreach_epoch`."""

    replaces: ClassVar[bool] = True

    def __init__(self, function: Callable[..., None], *, empty_epochs: bool = False) -> None:
        if not callable(function):
            raise InvalidConfiguration("foreach_epoch needs a function (df, epoch_id), or (df, epoch_id, info)")
        self._function = function
        self._takes_info = _takes_info(function)
        self._empty_epochs = empty_epochs

    def __repr__(self) -> str:
        return f"foreach_epoch({getattr(self._function, '__name__', 'function')})"

    def spec(self, job_name: str, job_uid: str, name: str, root: tuple[str, Mapping[str, Any]]) -> SinkSpec:
        """Stage below the job root: a repetition must deliver the same rows as the first call."""
        return SinkSpec.below_root(name, job_name, job_uid, root, name, empty_epochs=self._empty_epochs)

    def publish(self, spec: SinkSpec, output: StagedOutput, spark: SparkSession | None) -> None:
        """Call the function.

        Raises:
            UserCodeError: the function raised. The checkpoint stays valid; the next run calls the function again, with
                the same rows and the same epoch id.
        """
        if not output.files or spark is None:
            return
        frame = read_staged(spark, spec, output)
        info = EpochInfo(output.epoch, spec.root_id, spec.name, spec.job, spec.left_epochs)
        try:
            self._function(frame, output.epoch, *([info] if self._takes_info else []))
        except Exception as error:
            raise UserCodeError(
                f"sink {spec.name!r}: the function raised {type(error).__name__}: {error} for epoch {output.epoch}. "
                "The checkpoint is durable; after a restart the function is called again with the same rows and the "
                "same epoch id"
            ) from error

    def publish_again(self, spec: SinkSpec, output: StagedOutput, spark: SparkSession | None) -> None:
        """Call the function, again if an earlier run has done so.

        Raises:
            MissingFile: a staged file is gone, and no later checkpoint has removed it.
            UserCodeError: see `publish`.
        """
        store = spec.store()
        gone = next((file.staged for file in output.files if not store.exists(file.staged)), None)
        if gone is not None:
            raise MissingFile(
                f"sink {spec.name!r}: the newest snapshot names {gone} in {store.url} for epoch {output.epoch}, which "
                "may not have been delivered yet, and the file is not there. Restore it from a copy of the job root, "
                "with its folder. If it is lost, go back to the snapshot before the epoch (--from-snapshot): its input "
                "is read again, and its output is written again under a higher epoch number"
            )
        self.publish(spec, output, spark)

    def settle(self, spec: SinkSpec, output: StagedOutput) -> None:
        """Delete staged files that no restart will deliver again."""
        store = spec.store()
        for file in output.files:
            store.delete(file.staged)


def _takes_info(function: Callable[..., Any]) -> bool:
    """Return whether a function asks for an `EpochInfo`: its third argument has no default, or is named `info`.

    Others may have a third argument of their own, as in `lambda df, epoch, place=place: …`.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False  # written in C: it is called as ever
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(by_place) > 2 and (by_place[2].default is inspect.Parameter.empty or by_place[2].name == "info")


def foreach_epoch(function: Callable[..., None], *, empty_epochs: bool = False) -> Sink:
    """A sink that calls `function(df, epoch_id)`, or `function(df, epoch_id, info)`, for each epoch with output, after
    its checkpoint.

    The call happens at least once per epoch: a crash between the call and the next checkpoint repeats it with the same
    rows and the same id. A function that uses both `info.writer` and the epoch (Delta's `txnAppId` and `txnVersion`, a
    key in a database) is exactly-once as long as the root is the same.

    The epoch alone is not enough. A root that was created again counts from 1 again, and a fork counts on from the
    epoch of its source: a table that knows only the epoch takes their rows for a repetition and drops them. Two cases
    `info.writer` does not tell apart: after `rollback` the input is read again under higher epochs, so its rows come
    once more (`info.left_epochs` says under which they came before); and a root that was put back from an older copy of
    itself has its id and uses epochs again, so set another `txnAppId` yourself then (`DeltaSink` asks the table, and
    goes on above).

    Behind an aggregate in complete mode an epoch's output is the whole table, in the query's order, to be put in the
    place of the one before. The function is called for each epoch that computes the table, also if it has no rows, and
    for no other epoch.

    Args:
        function: gets the epoch's output rows and the epoch's number; and an `EpochInfo`, if it has a third argument
            without a default, or one named `info`.
        empty_epochs: call it for epochs without output rows too, with an empty frame, as Spark's `foreachBatch` does:
            for actions of every epoch (a heartbeat, a watermark in a table). Each such epoch stages a small file.

    Example:
        def append(df, epoch, info):
            options = {"txnAppId": info.writer, "txnVersion": epoch}
            df.write.format("delta").mode("append").options(**options).save("/data/out")

        .write(foreach_epoch(append))
    """
    return ForeachEpoch(function, empty_epochs=empty_epochs)


def read_staged(spark: SparkSession, spec: SinkSpec, output: StagedOutput) -> DataFrame:
    """Read an epoch's staged files as a DataFrame, in their order. Tasks use Stillstate's store: no connector is
    needed."""
    from state_runtime.spark.arrow import spark_schema_of

    store = spec.store()
    first = output.files[0]
    schema = pq.read_schema(pa.BufferReader(store.read(first.staged, first.bytes)))
    files = [(number, f.staged, f.bytes) for number, f in enumerate(output.files)]
    paths = spark.createDataFrame(files, "number int, path string, bytes long")
    return paths.repartitionById(len(files), "number").mapInArrow(_ReadStaged(replace(spec)), spark_schema_of(schema))


@dataclass(frozen=True)
class _ReadStaged:
    """Runs in tasks: paths in, rows out."""

    spec: SinkSpec

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        store = self.spec.store()
        for batch in batches:
            for path, size in zip(batch.column("path").to_pylist(), batch.column("bytes").to_pylist()):
                yield from pq.read_table(pa.BufferReader(store.read(path, size))).to_batches()
