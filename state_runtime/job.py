"""StreamingJob: the pipeline that a user writes."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import types as T

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.durations import parse_duration_us
from state_runtime.base.errors import InvalidPipeline
from state_runtime.base.ids import SYSTEM_IDS, Ids
from state_runtime.base.joining import UNBOUNDED_US, JoinTerms
from state_runtime.base.progress import Progress
from state_runtime.base.settings import JobSettings
from state_runtime.base.usercode import called_at
from state_runtime.driver.run import BY_HAND, Allowed, RunResult, StartedBy
from state_runtime.driver.run_handle import RunHandle
from state_runtime.driver.start_position import StartFrom, StartPosition
from state_runtime.driver.trigger import sparks_trigger
from state_runtime.maintenance.copy.objects import CopyProgress
from state_runtime.pipeline.compile import TransformStep, UnionStep
from state_runtime.pipeline.expectations import ExpectStep
from state_runtime.pipeline.graph import (
    FUTURE,
    Edge,
    Graph,
    Node,
    OperatorNode,
    Port,
    QueryNode,
    SegmentNode,
    SinkNode,
    SourceNode,
    side_outputs_of,
)
from state_runtime.pipeline.operators import (
    TIME_MODES,
    AggregateStep,
    AsOfJoinStep,
    DeduplicateStep,
    IntervalJoinStep,
    LatestByStep,
    OperatorStep,
    ProcessorStep,
    VectorizedStep,
    WindowStep,
)
from state_runtime.pipeline.plan import JobPlan
from state_runtime.pipeline.query import SqlQuery
from state_runtime.pipeline.sinks import Sink
from state_runtime.pipeline.sources import Source
from state_runtime.processors.builtin.window_state import OutputMode
from state_runtime.processors.declared.aggregates import Aggregate
from state_runtime.processors.declared.windows import SessionWindow, TimeWindow
from state_runtime.processors.operator import LATE, LATE_OF_SIDE
from state_runtime.processors.user.vectorized import VectorizedProcessor
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.paths import check_job_name, check_uid
from state_runtime.spark.session import build_session
from state_runtime.spark.versions import refuse_connect
from state_runtime.store import open_store

__all__ = [
    "ConnectedStreams",
    "JobContext",
    "KeyedStream",
    "RunHandle",
    "RunResult",
    "StartFrom",
    "Stream",
    "StreamingJob",
]

_JOINS = {
    **dict.fromkeys(("left", "leftouter", "left_outer"), "left-outer"),
    **dict.fromkeys(("right", "rightouter", "right_outer"), "right-outer"),
    **dict.fromkeys(("outer", "full", "fullouter", "full_outer"), "full-outer"),
    **dict.fromkeys(("semi", "leftsemi", "left_semi"), "left-semi"),
}
"""Kinds of joins as Spark spells them."""
_EVENT_TIMES = {"inner": ("left", "right"), "left-outer": ("left",), "right-outer": ("right",), "left-semi": ("left",)}
"""Of a join's output, the sides whose event time no row lacks."""


@dataclass(frozen=True)
class JobContext:
    """The argument of an entry point: `def build(context: JobContext) -> StreamingJob`.

    Attributes:
        options: the job's own options, of any form.
        storage_options: for fsspec; may hold secrets, so they are in no repr.
    """

    name: str
    store: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: JobSettings = field(default_factory=JobSettings)
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def root_id(self) -> str:
        """Return the id of the job's root; see `StreamingJob.root_id`."""
        return self.job().root_id()

    def job(self) -> StreamingJob:
        """Return an empty job with this name, store and these settings."""
        return StreamingJob(self.name, store=self.store, settings=self.settings, storage_options=self.storage_options)


class StreamingJob:
    """A streaming job with state snapshots.

    Example:
        job = StreamingJob("plane-delays", store="/data/state")
        (job.read(lambda spark: spark.readStream.schema(SCHEMA).parquet("/data/in"))
            .key_by("tailnum")
            .transform_with_state(PlaneDelays(), output_schema="tailnum string, delay int", uid="delays")
            .transform(lambda df: df.filter("delay > 15"))
            .key_by("tailnum").aggregate(uid="late", n=aggregates.count())
            .write(ParquetSink("/data/out")))
        job.run(build_session("plane-delays"))

    Args:
        name: folder of the job on the store: a-z, 0-9, `_`, `-`.
        store: path or URL of the store.
        settings: see `JobSettings`.
        storage_options: for fsspec; never stored, never shown.
    """

    def __init__(
        self,
        name: str,
        *,
        store: str,
        settings: JobSettings | None = None,
        storage_options: Mapping[str, Any] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        ids: Ids = SYSTEM_IDS,
    ) -> None:
        self.name = check_job_name(name)
        self.settings = settings or JobSettings()
        self._store_url = store
        self._storage_options = dict(storage_options or {})
        self._store = open_store(store, self._storage_options)
        self._clock = clock
        self._ids = ids
        self._pipeline = _Pipeline()

    def __repr__(self) -> str:
        return f"StreamingJob({self.name!r}, store={self._store.url!r})"

    def root_id(self) -> str:
        """Return the id of the job's root: made when the job begins, kept over restarts, rollbacks and moves.

        A root that is created again has another one, and so has a fork. Costs a request: ask once in a run, not in each
        epoch.

        Raises:
            JobNotFound: the job has no root yet; its first start makes it, before its first epoch.
        """
        return Catalog(self._store, self.name, self._clock).job_info().uid

    def read(
        self,
        source: Source,
        *,
        name: str = "",
        idle_after: str | None = None,
        was: str | None = None,
        max_ahead: str | None = None,
    ) -> Stream:
        """Begin a pipeline with a Spark stream that keeps no state: a streaming DataFrame, or a function of a session.

        A job may read several sources, each by a read() with a name; `Stream.union` brings them together. An operator's
        watermark is the lowest of the sources that its rows come from.

        Args:
            name: of the source. Its position in snapshots belongs to it, so sources may be added, removed and written
                in another order between two starts. The only source of a job needs none.
            idle_after: a duration, such as "10 minutes". If no row of the source came for so long, it holds no
                watermark back until one comes, which may be late then. By default a source without rows holds it back
                for ever.
            was: the name of the source in snapshots until now, if it gets another one; "" if it had none.
            max_ahead: a duration: how far an event time may be ahead of the epoch's processing time. Rows beyond it do
                not move the watermark, so one wrong clock makes no other row late; they are counted (`future_rows`) and
                stay in the stream, or come from `output("future")` instead, if that is read. By default as the settings
                say (`max_ahead_s`): no bound, as in Spark.

        Example:
            orders = job.read(read_orders, name="orders")
            refunds = job.read(read_refunds, name="refunds", idle_after="10 minutes")
            orders.union(refunds).key_by("customer").aggregate(uid="balance", total=aggregates.sum("amount"))
        """
        refuse_connect(source, "read(): the DataFrame")
        if name:
            check_uid(name, "source name")
        node = SourceNode(
            name,
            source,
            was=was,
            idle_after_ms=_milliseconds("idle_after", idle_after, at_least="1 millisecond"),
            max_ahead_ms=_milliseconds("max_ahead", max_ahead, at_least="1 second"),
        )
        return Stream(self._pipeline, self._pipeline.add(node))

    def query(
        self,
        query: Source,
        *,
        output_mode: str = "append",
        names: Mapping[str, str] | None = None,
        allow_unbounded: bool = False,
        **streams: Stream | KeyedStream,
    ) -> Stream:
        """Run a plain streaming query of PySpark or SQL, unchanged, on this job's snapshots.

        It is what stands before `.writeStream`: a streaming DataFrame, or a function that makes one of a SparkSession.
        What keeps state in it (aggregates, windows, dropDuplicates, joins of streams) becomes operators of this job;
        all else remains Spark's. Rows, late rows and watermarks are Spark's. What is not supported is refused when the
        job starts, by name.

        State belongs to the names of operators: the alias of the frame (`.alias("per_shop")`) or of the subquery, the
        name of the common table expression, else what it does and its keys (`window-shop`); `stillstate explain` shows
        them.

        Args:
            output_mode: "append", "update" or "complete", as of `DataStreamWriter.outputMode`. In complete mode each
                epoch that has rows gives the whole table of the query's one aggregate, sorted and cut as the query
                says; it is written with `foreach_epoch`.
            names: other names for operators and sources, by those that they would have: {"window-shop": "per_shop"}.
            allow_unbounded: joins of streams without a bound in time are meant so: their rows are kept for ever.
            streams: streams of this job; the function gets them as frames, by these names.

        Example:
            def per_shop(spark):
                orders = spark.readStream.schema(SCHEMA).parquet("/data/in").withWatermark("at", "5 seconds")
                return orders.groupBy(F.window("at", "10 minutes"), "shop").count()
            job.query(per_shop).write(ParquetSink("/data/out"))
        """
        refuse_connect(query, "query(): the DataFrame")
        mode = str(output_mode).lower()
        if mode not in ("append", "update", "complete"):
            raise InvalidPipeline(f"query(): output_mode {output_mode!r} must be append, update or complete")
        if streams and not callable(query):
            raise InvalidPipeline("query(): streams of the job go to a function that makes the frame; this is a frame")
        inputs = tuple(self._rows_of(name, stream) for name, stream in streams.items())
        node = QueryNode(
            query,
            mode,  # type: ignore[arg-type]  # checked above
            dict(names or {}),
            allow_unbounded=allow_unbounded,
            streams=tuple(streams),
            inputs=inputs,
        )
        return Stream(self._pipeline, self._pipeline.add(node))

    def _rows_of(self, name: str, stream: Stream | KeyedStream) -> Edge:
        if not isinstance(stream, Stream | KeyedStream):
            raise InvalidPipeline(f"query(): {name}={type(stream).__name__} must be a stream of this job")
        if stream._pipeline is not self._pipeline:  # noqa: SLF001 - of this module
            raise InvalidPipeline(f"query(): {name} is a stream of another job")
        return stream._rows  # noqa: SLF001 - of this module

    def sql(
        self,
        text: str,
        *,
        output_mode: str = "append",
        names: Mapping[str, str] | None = None,
        allow_unbounded: bool = False,
        **streams: Source | Stream | KeyedStream,
    ) -> Stream:
        """Run a SELECT of Spark SQL over streams, on this job's snapshots; see `query`.

        Args:
            streams: by the names that the text has for them: streams of this job, streaming DataFrames, or functions
                that make one. They are views while the text is analyzed. Tables and other views of the session can be
                named, too.

        Example:
            per_shop = "SELECT window(at, '10 minutes') AS w, shop, count(*) AS n FROM orders GROUP BY 1, 2"
            job.sql(per_shop, orders=read_orders).write(ParquetSink("/data/out"))
        """
        for name, each in streams.items():
            refuse_connect(each, f"sql(): {check_uid(name, 'view')}")
        own = {name: each for name, each in streams.items() if isinstance(each, Stream | KeyedStream)}
        others = {name: each for name, each in streams.items() if not isinstance(each, Stream | KeyedStream)}
        query = SqlQuery(text, others)
        return self.query(query, output_mode=output_mode, names=names, allow_unbounded=allow_unbounded, **own)

    def connect(self, **streams: KeyedStream) -> ConnectedStreams:
        """Bring two keyed streams of this job together for one processor: rows of both with equal keys meet, and share
        the key's state.

        Args:
            streams: by the names that the processor has for them (`batch.input(name)`).

        Example:
            job.connect(orders=orders.key_by("currency"), rates=rates.key_by("code")).process(
                Enrich(), "id long, euros double", uid="enrich", outputs={"unknown": "id long"}
            )
        """
        if len(streams) != 2:
            raise InvalidPipeline(f"connect() takes two streams by name, and got {len(streams)}")
        for name, stream in streams.items():
            if not isinstance(stream, KeyedStream):
                raise InvalidPipeline(f"connect(): {check_uid(name, 'input name')} must be a stream with key_by(…)")
            if stream._pipeline is not self._pipeline:  # noqa: SLF001 - of this module
                raise InvalidPipeline(f"connect(): {name} is a stream of another job")
        return ConnectedStreams(streams)

    def plan(self) -> JobPlan:
        """Return the job as written so far, as a value of which a run, a bootstrap and an import are made.

        Raises:
            InvalidPipeline: no run can run this pipeline; the message names the line.
        """
        return JobPlan(
            name=self.name,
            graph=self._pipeline.graph,
            settings=self.settings,
            store_url=self._store_url,
            storage_options=self._storage_options,
            store=self._store,
            clock=self._clock,
            ids=self._ids,
        )

    def start(
        self,
        spark: SparkSession | None = None,
        *,
        trigger: Mapping[str, Any] | None = None,
        takeover: bool = False,
        allow_dropped_state: bool = False,
        allow_drained: bool = False,
        take_output: bool = False,
        drop_inflight: bool = False,
        accept_session_settings: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
        stop: threading.Event | None = None,
        start_from: StartFrom | None = None,
        from_snapshot: int | str | None = None,
        on_copy: Callable[[CopyProgress], None] | None = None,
        started_by: StartedBy = BY_HAND,
    ) -> RunHandle:
        """Start in a thread, and return a handle with the names of Spark's `StreamingQuery`.

        What is wrong with the pipeline or its settings, and that another run owns the job, is raised here, before
        anything is written. Later errors are those of the handle (`awaitTermination`, `exception`). A run that is still
        there when Python ends is asked to stop, and ends with a checkpoint.

        Args and Raises: as of `run`.

        Example:
            query = job.start()
            query.processAllAvailable()
            print(query.lastProgress)
            query.stop()
        """
        return self._handle(
            spark,
            Allowed(
                takeover=takeover,
                dropped_state=allow_dropped_state,
                drained=allow_drained,
                take_output=take_output,
                drop_inflight=drop_inflight,
                session_settings=accept_session_settings,
            ),
            trigger,
            on_progress,
            stop,
            self._beginning(start_from, from_snapshot, on_copy),
            started_by,
        ).begin()

    def run(
        self,
        spark: SparkSession | None = None,
        *,
        trigger: Mapping[str, Any] | None = None,
        takeover: bool = False,
        allow_dropped_state: bool = False,
        allow_drained: bool = False,
        take_output: bool = False,
        drop_inflight: bool = False,
        accept_session_settings: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
        stop: threading.Event | None = None,
        start_from: StartFrom | None = None,
        from_snapshot: int | str | None = None,
        on_copy: Callable[[CopyProgress], None] | None = None,
        started_by: StartedBy = BY_HAND,
    ) -> RunResult:
        """Run until the source ends, a stop is requested, or an error occurs: `start` and `awaitTermination`, in the
        thread of the caller.

        Starts from the newest snapshot of the job root, if there is one.

        Args:
            spark: by default the active session of this process, else one that `build_session` makes.
            trigger: as in stillstate.yaml (`{"processing_time_s": 1}`, `{"available_now": True}`), or the argument of
                `DataStreamWriter.trigger` (`{"availableNow": True}`); None is as fast as possible.
            takeover: fence a run that seems alive, instead of being refused because of it.
            allow_dropped_state: start although operators or states of the newest snapshot are no longer in the
                pipeline; their stored rows are not read again, even if they come back.
            allow_drained: continue from a snapshot of a job that was drained; see docs/operations.md.
            take_output: the output folders belong to this job root from now on, although another root with the same job
                uid, or one that cannot be looked at, has written there. Only if no run of that root ever starts again.
            drop_inflight: drop the rows that are in flight in the snapshot from which the run continues, because the
                pipeline cannot process them any more. They are lost; their number is logged and counted.
            accept_session_settings: go on although settings of the session that change results (time zone, ANSI mode,
                …) are others than in the snapshot from which the run continues. From then on the new are recorded.
            on_progress: called after every epoch, and after a checkpoint that is made between two. Numbers are of that
                epoch alone.
            stop: set it to stop after the current epoch and a checkpoint.
            start_from: where a job without a snapshot begins: a snapshot of another job, a savepoint, or a copy of
                either, in any store. Parallelism, backend, changelog and states may differ from those there. A job with
                snapshots continues from its own, and refuses any place but the one that it began with.
            from_snapshot: an older snapshot of this job to go back to: its id, or the name of a savepoint. Output that
                was published since then stays, and repeated output has higher epoch numbers.
            on_copy: called while the snapshot of `start_from` is copied.
            started_by: why the run is started, if not by a person, and with which settings; its heartbeat says so.

        Raises:
            SnapshotInUse: the job's root, or the place it should start from, now belongs to another job.
            InvalidPipeline, InvalidConfiguration: before anything is written.
            JobAlreadyRunning, Fenced: another run owns the job.
            CorruptManifest, CorruptSegment, MissingFile, UnsupportedFormat: nothing is overwritten.
            UserCodeError, InvalidData: the epoch was not committed; the previous snapshot stays the newest.
            StoreUnavailable, OutcomeUnknown: start again.
        """
        return self._handle(
            spark,
            Allowed(
                takeover=takeover,
                dropped_state=allow_dropped_state,
                drained=allow_drained,
                take_output=take_output,
                drop_inflight=drop_inflight,
                session_settings=accept_session_settings,
            ),
            trigger,
            on_progress,
            stop,
            self._beginning(start_from, from_snapshot, on_copy),
            started_by,
        ).run_here()

    def _handle(
        self,
        spark: SparkSession | None,
        allowed: Allowed,
        trigger: Mapping[str, Any] | None,
        on_progress: Callable[[Progress], None] | None,
        stop: threading.Event | None,
        beginning: StartPosition,
        started_by: StartedBy,
    ) -> RunHandle:
        session = spark or SparkSession.getActiveSession() or build_session(self.name)
        return RunHandle(
            self.plan(),
            session,
            allowed,
            beginning,
            trigger=sparks_trigger(trigger),
            on_progress=on_progress,
            stop=stop or threading.Event(),
            started_by=started_by,
        )

    def _beginning(
        self,
        start_from: StartFrom | None,
        from_snapshot: int | str | None,
        on_copy: Callable[[CopyProgress], None] | None,
    ) -> StartPosition:
        return StartPosition(
            Catalog(self._store, self.name, self._clock),
            start_from=start_from,
            from_snapshot=from_snapshot,
            storage_options=self._storage_options,
            clock=self._clock,
            ids=self._ids,
            on_copy=on_copy,
        )


def _milliseconds(name: str, duration: str | None, *, at_least: str) -> int | None:
    """Return a duration of an argument in milliseconds."""
    if duration is None:
        return None
    if (duration_us := parse_duration_us(duration)) < parse_duration_us(at_least):
        raise InvalidPipeline(f"{name}={duration!r} must be at least {at_least}")
    return duration_us // 1000


class _Pipeline:
    """The graph that a job's streams make, node by node."""

    def __init__(self) -> None:
        self.graph = Graph()

    def add(self, node: Node) -> Edge:
        """Add a node, with the line of the job's own code that it comes from.

        Returns:
            Its rows.
        """
        self.graph = Graph((*self.graph.nodes, replace(node, at=called_at())))
        return Edge(len(self.graph.nodes) - 1)


class _NoSuchStep(InvalidPipeline, AttributeError):
    """A stream has no method of that name. It is an AttributeError as well, so that `hasattr` works."""


class Stream:
    """A stream of rows inside a job's pipeline.

    Any number of steps may go on from it, each a branch of its own: the rows are made once for all of them. `union`
    brings branches together.
    """

    def __init__(self, pipeline: _Pipeline, rows: Edge) -> None:
        self._pipeline = pipeline
        self._rows = rows

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise _no_such_step(self, name)

    def key_by(self, *columns: str | Column | list[str] | list[Column]) -> KeyedStream:
        """Partition by key columns for the stateful operator that follows.

        Args:
            columns: names, as they are written in the schema; also a list of them, or plain references (`col("a")`).
        """
        listed = [c for given in columns for c in (given if isinstance(given, list | tuple) else [given])]
        names = tuple(map(_key_name, listed))
        if not names:
            raise InvalidPipeline(
                "key_by() needs at least one column; for one group of all rows call aggregate() or window() on the "
                "stream itself"
            )
        if len(set(names)) != len(names):
            raise InvalidPipeline(f"key_by({', '.join(map(repr, names))}) names a column twice")
        return KeyedStream(self._pipeline, self._rows, names)

    def aggregate(self, *, uid: str, output_mode: str = "update", **aggregates: Aggregate) -> Stream:
        """Aggregate all rows: SQL's aggregate without GROUP BY, `df.agg(…)`. See `KeyedStream.aggregate`.

        Emits one row, without key columns, in each epoch that has rows. One shard gets all rows; if Spark can aggregate
        the functions before the shuffle (docs/guide.md), it gets one row of each of Spark's tasks instead.

        Example:
            job.read(orders).aggregate(uid="all", orders=aggregates.count(), revenue=aggregates.sum("price"))
        """
        return KeyedStream(self._pipeline, self._rows, ()).aggregate(uid=uid, output_mode=output_mode, **aggregates)

    def window(
        self,
        window: TimeWindow | SessionWindow,
        *,
        uid: str,
        output_mode: str = "update",
        allowed_lateness: str = "0 seconds",
        **aggregates: Aggregate,
    ) -> Stream:
        """Aggregate all rows of a window: GROUP BY of the window alone. See `KeyedStream.window`; one shard does the
        work, as in `aggregate`."""
        return KeyedStream(self._pipeline, self._rows, ()).window(
            window, uid=uid, output_mode=output_mode, allowed_lateness=allowed_lateness, **aggregates
        )

    def transform(self, function: Callable[[DataFrame], DataFrame], *, every_epoch: bool = False) -> Stream:
        """Apply any stateless Spark code: select, filter, join with a static table, …

        The function is called when a plan is made, and the plan is used again in later epochs, as Spark does with a
        streaming frame: values that its Python code takes from outside (a variable, a file, the time) may stay as they
        were. A table that it reads with Spark is read again in each epoch, and an expression for the time or for random
        numbers gives new ones.

        It sees one epoch at a time. `groupBy` sums up an epoch's rows, which is fine before an operator that continues
        the sum; the result of `orderBy`, `distinct` and window functions covers one epoch only, and the job warns of
        them. It must read its whole input: a `limit` that stops reading is refused when the epoch ends. And it must
        give the same rows when it is run again: Spark repeats tasks, so with random numbers or the time of day state
        and output could disagree. When the job starts, a warning names columns that Spark knows to be of this kind;
        Python functions are not checked.

        Args:
            every_epoch: call it in each epoch, for values from outside; making the plan takes tens of milliseconds of
                each epoch.
        """
        if not callable(function):
            raise InvalidPipeline("transform() needs a function from DataFrame to DataFrame")
        node = SegmentNode((self._rows,), TransformStep(function, every_epoch))
        return Stream(self._pipeline, self._pipeline.add(node))

    def expect_or_drop(self, **conditions: str | Column) -> Stream:
        """Keep the rows that meet all conditions; those that fail one are counted (`bad_rows`), and are the output
        "bad".

        The name is that of expectations in pipelines of Spark and Databricks. Each condition is evaluated once for each
        row, in SQL or as a column; one that is null has failed. `output("bad")` gives the rows that fail as they came,
        with a column `reason` behind: the names of the conditions that failed, in their order, with commas. If nothing
        reads it, they are dropped, and a warning in the log says so once in a run. A condition that raises an error
        ends the epoch: `try_cast` instead of `CAST`, `try_divide` instead of `/`.

        Args:
            conditions: by the names that `reason` has.

        Example:
            orders = job.read(read_orders).expect_or_drop(parsed="id IS NOT NULL", positive="amount > 0")
            orders.output("bad").write(ParquetSink("/data/bad"), name="bad")
        """
        if not conditions:
            raise InvalidPipeline('expect_or_drop() needs a condition by name, such as positive="amount > 0"')
        for name, condition in conditions.items():
            refuse_connect(condition, f"expect_or_drop(): the condition {name!r}")
            if not name or not isinstance(condition, str | Column):
                raise InvalidPipeline(
                    f"expect_or_drop(): the condition {name!r} must be SQL or a column with a name, not a "
                    f"{type(condition).__name__}"
                )
        return Stream(self._pipeline, self._pipeline.add(SegmentNode((self._rows,), ExpectStep(dict(conditions)))))

    def union(self, *others: Stream) -> Stream:
        """The rows of this stream and of others of the same job, column by column: `DataFrame.union`.

        Columns are taken in their order and have this stream's names; types are widened as Spark does it. Nothing is
        said of the order between rows of different streams.
        """
        return self._united(others, UnionStep())

    def union_by_name(self, other: Stream, *, allow_missing_columns: bool = False) -> Stream:
        """The rows of this stream and of another one of the same job, by the names of columns: `DataFrame.unionByName`.

        Args:
            allow_missing_columns: a column that one of them lacks is null there.
        """
        return self._united((other,), UnionStep(by_name=True, allow_missing_columns=allow_missing_columns))

    def _united(self, others: Sequence[Stream], step: UnionStep) -> Stream:
        if not others:
            raise InvalidPipeline("union() needs another stream of the job")
        for other in others:
            if not isinstance(other, Stream):
                hint = "; keyed streams are united before key_by()" if isinstance(other, KeyedStream) else ""
                raise InvalidPipeline(f"union() takes streams of the job, not a {type(other).__name__}{hint}")
            if other._pipeline is not self._pipeline:  # noqa: SLF001 - of this class
                raise InvalidPipeline("union() takes streams of one job; this one is of another job")
        rows = (self._rows, *(other._rows for other in others))  # noqa: SLF001 - of this class
        return Stream(self._pipeline, self._pipeline.add(SegmentNode(rows, step)))

    def output(self, name: str) -> Stream:
        """The rows of a side output of the step that this stream comes from.

        Every operator that goes by event time has "late": the rows that it dropped as late, in the columns of its
        input. A window's late rows are those that come too late for all of their windows. A join has "late_left" and
        "late_right". Further ones are those that `process(…, outputs=…)` declares. What comes from these side outputs
        has no event time: its rows are late for whatever follows.

        `expect_or_drop` has "bad": the rows that failed a condition. A `read` with a bound has "future": the rows whose
        event time is further ahead than that. Where it is read, they are taken out of the stream; they have no event
        time.

        Example:
            hourly = flights.key_by("origin").window(windows.tumbling("1 hour"), uid="hourly", n=aggregates.count())
            hourly.write(ParquetSink("/data/hourly"))
            hourly.output("late").write(ParquetSink("/data/late"))
        """
        node = self._pipeline.graph.nodes[self._rows.node]
        check_uid(name, "output name")
        known = {FUTURE} if isinstance(node, SourceNode) else set[str]()
        known |= side_outputs_of(node) if isinstance(node, SegmentNode) else set()
        if self._rows.output or not (isinstance(node, OperatorNode) or name in known):
            raise InvalidPipeline(
                f"output({name!r}) is read of the stream of the step that has it, before any other step: an operator, "
                f'such as window() or process(); expect_or_drop() has "bad", and read() "{FUTURE}"'
            )
        return Stream(self._pipeline, replace(self._rows, output=name))

    def write(self, sink: Sink, *, name: str = "") -> Stream:
        """Add a sink to the stream, and return the stream.

        Args:
            name: of the sink in snapshots and metrics; by default `out`, `out-2`, …
        """
        if not isinstance(sink, Sink):
            raise InvalidPipeline(f"write() needs a sink (ParquetSink, foreach_epoch), not a {type(sink).__name__}")
        written = sum(isinstance(node, SinkNode) for node in self._pipeline.graph.nodes)
        chosen = check_uid(name or ("out" if written == 0 else f"out-{written + 1}"), "sink name")
        self._pipeline.add(SinkNode(chosen, sink, self._rows))
        return self


_REFERENCE = re.compile(r"Column<'(\w+)'>")


def _key_name(column: Any) -> str:
    if isinstance(column, Column):
        reference = _REFERENCE.fullmatch(str(column))
        if reference is None:
            raise InvalidPipeline(
                f"key_by() takes columns of the stream, not the expression {column}; make it a column first: "
                '.transform(lambda df: df.withColumn("key", …)).key_by("key")'
            )
        return reference.group(1)
    if not isinstance(column, str):
        raise InvalidPipeline(f"key_by() takes names of columns, not a {type(column).__name__}")
    return column


Method = TypeVar("Method", bound=Callable[..., Any])

_SPARKS_WORDS = {
    "statefulProcessor": "processor",
    "outputStructType": "output_schema",
    "outputMode": "output_mode",
    "timeMode": "time_mode",
    "initialState": "initial_state",
    "eventTimeColumnName": "event_time_column",
}
"""The arguments of `GroupedData.transformWithState`, in their order, by Stillstate's names."""


def _in_sparks_words(method: Method) -> Method:
    """Let a method also be called with Spark's names and order of arguments."""

    @functools.wraps(method)
    def call(self: Any, *given: Any, **named: Any) -> Any:
        where = f"{method.__name__}()"
        arguments: dict[str, Any] = {}
        pairs = [
            *zip(_SPARKS_WORDS.values(), given),
            *((_SPARKS_WORDS.get(name, name), v) for name, v in named.items()),
        ]
        for name, value in pairs:
            if name in arguments:
                raise InvalidPipeline(f"{where} got {name} twice; in Spark it is named {_sparks_word(name)}")
            arguments[name] = value
        unknown = sorted(set(arguments) - {*_SPARKS_WORDS.values(), "uid"})
        if unknown or len(given) > len(_SPARKS_WORDS):
            known = ", ".join(f"{ours} ({sparks})" for sparks, ours in _SPARKS_WORDS.items())
            said = f"{', '.join(unknown)} is not one of its arguments" if unknown else f"got {len(given)} arguments"
            raise InvalidPipeline(f"{where}: {said}; they are uid, {known}")
        if "uid" not in arguments:
            raise InvalidPipeline(
                f'{where} needs uid="…", a name for the operator that stays the same: its state belongs to it. Spark '
                "has no such argument"
            )
        for name in ("processor", "output_schema"):
            if name not in arguments:
                raise InvalidPipeline(f"{where} needs {name}; in Spark it is named {_sparks_word(name)}")
        return method(self, **arguments)

    return call  # type: ignore[return-value]


def _sparks_word(name: str) -> str:
    return next((sparks for sparks, ours in _SPARKS_WORDS.items() if ours == name), name)


class KeyedStream:
    """A stream partitioned by key: a stateful operator must follow."""

    def __init__(self, pipeline: _Pipeline, rows: Edge, keys: tuple[str, ...]) -> None:
        self._pipeline = pipeline
        self._rows = rows
        self._keys = keys

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise _no_such_step(self, name)

    @_in_sparks_words
    def transform_with_state(
        self,
        processor: Any,
        output_schema: T.StructType | str,
        *,
        uid: str,
        output_mode: str = "update",
        time_mode: str = "none",
        event_time_column: str = "",
        initial_state: DataFrame | None = None,
    ) -> Stream:
        """Run pyspark's `StatefulProcessor`, row flavour: as `GroupedData.transformWithState`.

        Spark's own names of the arguments (`outputStructType`, `timeMode`, …) and their order are accepted too.

        Args:
            processor: the same object that Spark takes.
            output_schema: StructType or DDL.
            uid: stable name of the operator: its state belongs to it.
            output_mode: append, update or complete; changes nothing in calls or rows, as in Spark.
            time_mode: none, processingTime (timers and TTL by the clock) or eventTime (timers by the watermark; the
                stream that is read needs Spark's `withWatermark`).
            event_time_column: column of the output that carries event time, for an operator that follows.
            initial_state: static rows with the same key columns; `handleInitialState` gets them before the operator's
                first input, once in the operator's life.

        Example:
            .key_by("id").transform_with_state(Sessions(), "id string, clicks long", uid="sessions",
            time_mode="eventTime")
        """
        modes = (output_mode, time_mode, event_time_column)
        return self._processor(processor, output_schema, uid, modes, initial_state, pandas=False)

    @_in_sparks_words
    def transform_with_state_in_pandas(
        self,
        processor: Any,
        output_schema: T.StructType | str,
        *,
        uid: str,
        output_mode: str = "update",
        time_mode: str = "none",
        event_time_column: str = "",
        initial_state: DataFrame | None = None,
    ) -> Stream:
        """Run pyspark's `StatefulProcessor`, pandas flavour: as `GroupedData.transformWithStateInPandas`.

        The arguments are those of `transform_with_state`.
        """
        modes = (output_mode, time_mode, event_time_column)
        return self._processor(processor, output_schema, uid, modes, initial_state, pandas=True)

    def aggregate(self, *, uid: str, output_mode: str = "update", **aggregates: Aggregate) -> Stream:
        """Compute keyed aggregates, vectorised; emits the key columns and the aggregates.

        Args:
            output_mode: "update" emits the new values of the keys that an epoch touched; "append" emits each key once,
                when the watermark has passed its event time, and removes it. For "append" the column with event time
                must be among the keys. It stays the event time of the output. "complete" emits all keys in each epoch
                that has rows, for a `foreach_epoch` that puts them in the place of those before.

        Example:
            .key_by("carrier").aggregate(uid="by-carrier", flights=aggregates.count(), worst=aggregates.max("delay"))
            .key_by("carrier", "at").aggregate(uid="at-once", output_mode="append", flights=aggregates.count())
        """
        check_uid(uid, "operator uid")
        mode = _output_mode(uid, output_mode)
        _check_aggregates(uid, aggregates)
        return self._then(AggregateStep(uid, dict(aggregates), mode))

    def process(
        self,
        processor: VectorizedProcessor,
        output_schema: T.StructType | str,
        *,
        uid: str,
        outputs: Mapping[str, T.StructType | str] | None = None,
    ) -> Stream:
        """Run a `VectorizedProcessor`: the rows and the state of all keys at once, in Arrow and numpy.

        Args:
            processor: an instance; every task gets a fresh copy.
            output_schema: StructType or DDL.
            uid: stable name of the operator: its state belongs to it.
            outputs: schemas of side outputs, by name: `process` then returns a mapping, in which "" is the main output,
                and `.output(name)` reads them.

        Example:
            checked = orders.key_by("shop").process(Check(), "id long", uid="check", outputs={"unknown": "id long"})
            checked.output("unknown").write(ParquetSink("/data/unknown"))
        """
        return self._then(_vectorized_step(processor, output_schema, uid, outputs))

    def latest_by(
        self, order: str | Sequence[str], *columns: str, uid: str, ascending: bool | Sequence[bool] = False
    ) -> Stream:
        """Keep for each key the row with the greatest value of a column, or of several; vectorised.

        Emits the row of every key whose row was replaced (update mode): the key columns, the order columns and
        `columns`. Among equal values the later row in source order wins; null is below everything. It is SQL's
        ROW_NUMBER() OVER (PARTITION BY … ORDER BY …) = 1.

        Args:
            order: columns of numbers, text, binary, booleans, dates or timestamps, compared from left to right.
            columns: the other columns to keep; none means all columns.
            ascending: keep the row with the smallest values instead; for several columns also one by one. A null is the
                smallest value: to prevent that it wins, drop such rows in a `transform` before.

        Example:
            .key_by("order_id").latest_by("changed_at", "status", "amount", uid="current")
            .key_by("auction").latest_by(["price", "at"], "bidder", uid="highest", ascending=[False, True])
        """
        check_uid(uid, "operator uid")
        names = (order,) if isinstance(order, str) else tuple(order)
        directions = (ascending,) * len(names) if isinstance(ascending, bool) else tuple(ascending)
        if not names or not all(isinstance(name, str) for name in names):
            raise InvalidPipeline(f"operator {uid!r}: latest_by() needs the names of order columns, not {order!r}")
        if len(directions) != len(names):
            raise InvalidPipeline(
                f"operator {uid!r}: latest_by() got {len(names)} order columns and {len(directions)} directions in "
                "ascending; give one for each, or one for all"
            )
        return self._then(LatestByStep(uid, names, columns, directions))

    def deduplicate(self, *, uid: str, within_watermark: bool = False) -> Stream:
        """Pass the first row of each key and drop all later ones (append mode); vectorised. Rows keep all their
        columns.

        Without event time the state holds every key that was ever seen, and never shrinks. With the event-time column
        among the keys (Spark's `dropDuplicates`) the watermark removes the keys that it has passed. With
        `within_watermark` (Spark's `dropDuplicatesWithinWatermark`) a key is kept for the allowed delay after the event
        time of its first row.

        Example:
            .key_by("event_id").deduplicate(uid="once")
        """
        check_uid(uid, "operator uid")
        return self._then(DeduplicateStep(uid, within_watermark))

    def window(
        self,
        window: TimeWindow | SessionWindow,
        *,
        uid: str,
        output_mode: str = "update",
        allowed_lateness: str = "0 seconds",
        **aggregates: Aggregate,
    ) -> Stream:
        """Aggregate by key and window of event time, vectorised; the source stream needs Spark's `withWatermark`.

        Emits the key columns, `window` (a struct of start and end, as Spark's) and the aggregates.

        Args:
            window: `windows.tumbling("10 seconds")`, `windows.sliding("10 seconds", "1 second")`,
                `windows.cumulative("1 day", "1 hour")`, `windows.session("5 minutes")`, or
                `windows.session(end_column="ends_at")` with an end of each row's own.
            output_mode: "update" emits every window that an epoch changed; "append" each window once, when the
                watermark has passed its end. "complete", for sessions, emits all of them in each epoch that has rows,
                and keeps them for ever.
            allowed_lateness: how long after that a window stays open for late rows.

        Example:
            .key_by("station").window(windows.tumbling("1 hour"), uid="hourly", n=aggregates.count())
        """
        check_uid(uid, "operator uid")
        if not isinstance(window, TimeWindow | SessionWindow):
            raise InvalidPipeline(
                f'operator {uid!r}: window() needs one of state_runtime.windows, e.g. windows.tumbling("10 seconds")'
            )
        mode = _output_mode(uid, output_mode)
        _check_aggregates(uid, aggregates)
        step = WindowStep(
            uid=uid,
            window=window,
            aggregates=dict(aggregates),
            output_mode=mode,
            allowed_lateness=allowed_lateness,
        )
        return self._then(step)

    def interval_join(
        self,
        right: Source | Stream | KeyedStream,
        *,
        uid: str,
        lower: str,
        upper: str,
        right_keys: tuple[str, ...] | list[str] = (),
        how: str = "inner",
        event_time: str = "",
    ) -> Stream:
        """Join with a second stream: equal keys, and right event time in [left event time + lower, left event time +
        upper].

        Vectorised. Both streams need event time (Spark's `withWatermark`, or the output of an operator that has it);
        rows wait in state until no later row can match them. Emits the left stream's columns, then the right one's
        without its keys.

        Args:
            right: the second stream: one of the job, with its keys (`key_by`) or without, or a source as for `read`.
            lower, upper: durations, may be negative: "-5 minutes".
            right_keys: its key columns, if they have other names and it has no keys yet.
            how: "inner", "left-outer", "right-outer", "full-outer" or "left-semi", also as Spark spells it ("left",
                "leftouter", "left_outer"). A row of an outer side without a match is emitted with nulls when no match
                can come any more; left-semi emits left rows alone, each with its first match.
            event_time: "left" or "right": the output keeps that side's event time, which no row of it may lack (that of
                the right side in an inner or right outer join). Operators behind go by a watermark that is held back by
                as long as rows may wait for a match. By default the output has no event time.

        Example:
            clicked = views.key_by("ad").interval_join(
                clicks.key_by("ad_id"), lower="0 seconds", upper="10 minutes", uid="clicked", event_time="left"
            )
        """
        check_uid(uid, "operator uid")
        range_us = parse_duration_us(lower), parse_duration_us(upper)
        kind = _JOINS.get(how.lower(), how.lower())
        if event_time and event_time not in (sides := _EVENT_TIMES.get(kind, ())):
            raise InvalidPipeline(
                f"operator {uid!r}: event_time={event_time!r} of a {kind} join must be "
                f"{' or '.join(sides) or 'left out'} (a row without a match has no time of the other side)"
            )
        terms = JoinTerms(how=kind, lower_us=range_us[0], upper_us=range_us[1])  # type: ignore[arg-type]
        return self._then(IntervalJoinStep(uid, terms, event_time), self._right_side(right, uid, right_keys))

    def as_of_join(
        self,
        right: Source | Stream | KeyedStream,
        *,
        uid: str,
        how: str = "left",
        tolerance: str | None = None,
        right_keys: tuple[str, ...] | list[str] = (),
    ) -> Stream:
        """Give each row of this stream the newest row of a second one with the same key, as of its own event time:
        `pandas.merge_asof` over streams, a temporal join.

        Vectorised. The second stream is a history: a row of it holds for its key from its event time until the next
        one. Both streams need event time. A row is emitted once, when the watermark has reached its time, since an
        earlier version may come until then; so the result does not depend on the order in which rows come. State keeps
        the rows that wait, and of each key the newest version. Emits this stream's columns, then the right one's
        without its keys; this stream's event time stays the event time.

        A right stream that seldom has rows holds the watermark back: read it with `idle_after`.

        Args:
            right: the second stream, as of `interval_join`.
            how: "left" (without a version: nulls) or "inner".
            tolerance: how old a version may be at most, such as "1 day"; by default it holds for ever.
            right_keys: its key columns, if they have other names and it has no keys yet.

        Example:
            rated = orders.key_by("currency").as_of_join(rates.key_by("currency"), uid="rated", tolerance="7 days")
        """
        check_uid(uid, "operator uid")
        kind = _JOINS.get(how.lower(), how.lower())
        if kind not in ("inner", "left-outer"):
            raise InvalidPipeline(f"operator {uid!r}: as_of_join(how={how!r}) must be left or inner")
        tolerance_us = UNBOUNDED_US if tolerance is None else parse_duration_us(tolerance)
        if tolerance_us < 0:
            raise InvalidPipeline(f"operator {uid!r}: tolerance={tolerance!r} must not be negative")
        terms = JoinTerms(how=kind, lower_us=-tolerance_us, upper_us=0)  # type: ignore[arg-type]
        return self._then(AsOfJoinStep(uid, terms), self._right_side(right, uid, right_keys))

    def _right_side(self, right: Source | Stream | KeyedStream, uid: str, keys: Sequence[str]) -> Port:
        if not isinstance(right, Stream | KeyedStream):
            rows = self._pipeline.add(SourceNode(f"{uid}.right", right))
            return Port(rows, tuple(keys) or self._keys)
        if right._pipeline is not self._pipeline:  # noqa: SLF001 - of this module
            raise InvalidPipeline(f"operator {uid!r}: the right stream is one of another job")
        if isinstance(right, Stream):
            return Port(right._rows, tuple(keys) or self._keys)  # noqa: SLF001 - of this module
        if keys:
            raise InvalidPipeline(f"operator {uid!r}: the right stream has keys by key_by(); leave out right_keys")
        return Port(right._rows, right._keys)  # noqa: SLF001 - of this module

    def _then(self, step: OperatorStep, *others: Port) -> Stream:
        node = OperatorNode(step, (Port(self._rows, self._keys), *others))
        return Stream(self._pipeline, self._pipeline.add(node))

    def _processor(
        self,
        processor: Any,
        output_schema: T.StructType | str,
        uid: str,
        modes: tuple[str, str, str],
        initial_state: DataFrame | None,
        *,
        pandas: bool,
    ) -> Stream:
        check_uid(uid, "operator uid")
        if isinstance(processor, type):
            raise InvalidPipeline(
                f"operator {uid!r}: got the class {processor.__name__}; give an instance of it: {processor.__name__}()"
            )
        output_mode, time_mode, event_time_column = modes
        if output_mode.lower() not in ("append", "update", "complete"):
            raise InvalidPipeline(f"operator {uid!r}: output_mode {output_mode!r} must be append, update or complete")
        mode = TIME_MODES.get(time_mode.lower())
        if mode is None:
            raise InvalidPipeline(
                f"operator {uid!r}: time_mode {time_mode!r} must be none, processingTime or eventTime"
            )
        if not callable(getattr(processor, "handleInputRows", None)) or not callable(getattr(processor, "init", None)):
            raise InvalidPipeline(
                f"operator {uid!r}: {type(processor).__name__} is not a StatefulProcessor (init, handleInputRows); "
                "pass an instance, not the class"
            )
        step = ProcessorStep(
            uid=uid,
            processor=processor,
            output_schema=output_schema,
            pandas=pandas,
            output_mode=output_mode.lower(),
            time_mode=mode,
            event_time_column=event_time_column,
            initial_state=initial_state,
        )
        return self._then(step)


class ConnectedStreams:
    """Two keyed streams whose rows with equal keys go to one processor."""

    def __init__(self, streams: Mapping[str, KeyedStream]) -> None:
        self._streams = dict(streams)

    def process(
        self,
        processor: VectorizedProcessor,
        output_schema: T.StructType | str,
        *,
        uid: str,
        outputs: Mapping[str, T.StructType | str] | None = None,
    ) -> Stream:
        """Run a `VectorizedProcessor` on the rows of both streams; see `KeyedStream.process`.

        Its batches are `ConnectedBatch`es: `batch.keys` has the keys of both inputs, `batch.input(name)` the rows of
        one. In time mode "event" late rows of either are dropped; they are the outputs "late_left" and "late_right" of
        the first and the second stream.
        """
        first, second = self._streams.values()
        step = _vectorized_step(processor, output_schema, uid, outputs)
        port = Port(second._rows, second._keys)  # noqa: SLF001 - of this module
        return first._then(replace(step, inputs=tuple(self._streams)), port)  # noqa: SLF001 - of this module


def _vectorized_step(
    processor: Any, output_schema: T.StructType | str, uid: str, outputs: Mapping[str, T.StructType | str] | None
) -> VectorizedStep:
    check_uid(uid, "operator uid")
    if not isinstance(processor, VectorizedProcessor):
        raise InvalidPipeline(
            f"operator {uid!r}: process() needs an instance of a VectorizedProcessor, not "
            f"{getattr(processor, '__name__', type(processor).__name__)}; a StatefulProcessor goes to "
            "transform_with_state()"
        )
    for name in outputs or {}:
        if check_uid(name, "output name") in (LATE, *LATE_OF_SIDE):
            raise InvalidPipeline(f"operator {uid!r}: the output {name!r} has the late rows; choose another name")
    return VectorizedStep(uid, processor, output_schema, dict(outputs or {}))


def _no_such_step(stream: Stream | KeyedStream, name: str) -> AttributeError:
    """Return the error for a method that a stream does not have: the method that was probably meant, and its place."""
    kind = type(stream).__name__
    if name.startswith("_"):
        return AttributeError(f"{kind!r} object has no attribute {name!r}")
    ours = next((sparks for sparks in (_snake_case(name), name) if hasattr(KeyedStream, sparks)), "")
    way = f"its methods are {', '.join(n for n in dir(type(stream)) if not n.startswith('_'))}"
    if isinstance(stream, Stream) and ours:
        way = f"say by which key: .key_by(…).{ours}(…)"
    elif ours:
        way = f"here it is {ours}(…)"
    elif isinstance(stream, KeyedStream) and hasattr(Stream, name):
        way = f"an operator with state must follow key_by(…), and .{name}(…) comes behind that"
    elif name == "withWatermark":
        way = "call Spark's withWatermark(…) on the stream that read() returns"
    elif name == "groupBy":
        way = "key_by(…) says what belongs together"
    elif hasattr(DataFrame, name):
        way = f"stateless Spark code goes into .transform(lambda df: df.{name}(…))"
    return _NoSuchStep(f"a {kind} has no {name}(…): {way}")


def _snake_case(name: str) -> str:
    return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name)


def _output_mode(uid: str, given: object) -> OutputMode:
    mode = str(given).lower()
    if mode not in ("update", "append", "complete"):
        raise InvalidPipeline(f"operator {uid!r}: output_mode {given!r} must be update, append or complete")
    return mode  # type: ignore[return-value]


def _check_aggregates(uid: str, aggregates: Mapping[str, Aggregate]) -> None:
    if not aggregates:
        raise InvalidPipeline(f"operator {uid!r}: name at least one aggregate, e.g. n=aggregates.count()")
    for name, aggregate in aggregates.items():
        if not isinstance(aggregate, Aggregate):
            raise InvalidPipeline(
                f"operator {uid!r}: {name} must be one of state_runtime.aggregates, e.g. aggregates.count()"
            )
