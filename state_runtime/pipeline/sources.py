"""The input of a job: one streaming frame, or several that are united into one.

Spark gives `foreachBatch` one frame, and its offset log is one for all that the frame reads. So several sources become
one stream with a column for each, a struct of its rows that is null in the rows of the others; an epoch takes them
apart again. Two sources that only a join reads are united in its layout (pipeline/join_rows.py). Each batch holds the
rows of all sources of its moment, and one position covers them all.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Final

from pyspark import __version__ as spark_version
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T
from pyspark.sql.functions import col, lit, struct

from state_runtime.base.errors import InvalidPipeline, StillstateError, UserCodeError, is_typed
from state_runtime.base.usercode import step_at
from state_runtime.pipeline.graph import Graph, SourceNode
from state_runtime.pipeline.join_rows import Sides, lone_join
from state_runtime.pipeline.source_names import SourceName
from state_runtime.pipeline.stateful_steps import refuse_stateful
from state_runtime.pipeline.watermark import WatermarkColumn, watermark_columns, watermarks_of_inputs
from state_runtime.spark.errors import typed_error
from state_runtime.spark.java_errors import chain_of, root_first, shown
from state_runtime.spark.plans import fits_pattern, stream_sources
from state_runtime.spark.sql import quoted
from state_runtime.spark.versions import refuse_connect
from state_runtime.spark.watermarks import (
    is_seen_at_the_top,
    redefined_watermarks,
    watermark_nodes,
    without_watermarks,
)

__all__ = [
    "OpenedSource",
    "OpenedSources",
    "Source",
    "cleans_up",
    "open_sources",
    "streaming_frame",
    "unrepeatable_source",
    "unwatched",
    "warn_of_files_passed_over",
    "warn_of_patterns",
]

_LOG = logging.getLogger(__name__)
_REDEFINITION_REFUSED_CONF = "spark.sql.streaming.statefulOperator.allowMultiple"
_NO_KAFKA = "Failed to find data source: kafka"
_KAFKA_CONNECTOR = (
    "Spark has no connector for Kafka; name it in stillstate.yaml, under the job or under defaults: spark: {conf: "
    "{spark.jars.packages: org.apache.spark:spark-sql-kafka-0-10_2.13:" + spark_version + "}} "
    "(the version of Spark, or the newest one before it that is published), or read with stillstate.sources.kafka, "
    "which needs none"
)
_PATTERN = re.compile(r"[\[\]{}*?\\]")
_FILE_AGE: Final = "7d"
"""Spark's default of `maxFileAge`."""
_UNREPEATABLE = frozenset({"socket", "textsocket"})

Source = DataFrame | Callable[[SparkSession], DataFrame]


@dataclass(frozen=True)
class OpenedSource:
    """A streaming frame and its known properties.

    Attributes:
        watermarks: its columns with event time, observed on the job's streaming frame.
        name: of the source, and of its positions in snapshots.
        left, right: the columns of both sides, if it is two streams in one.
    """

    frame: DataFrame
    watermarks: tuple[WatermarkColumn, ...]
    name: str = ""
    left: T.StructType | None = None
    right: T.StructType | None = None


@dataclass(frozen=True)
class OpenedSources:
    """The sources of a job.

    Attributes:
        inputs: in the order in which Spark has them.
        nodes: for each source of the graph the index of its input: both sides of a join are one input.
        names: as snapshots match them.
    """

    inputs: tuple[OpenedSource, ...]
    nodes: Mapping[int, int]
    names: tuple[SourceName, ...] = ()

    @staticmethod
    def of_one(source: OpenedSource) -> OpenedSources:
        """Return the sources of a job that has one."""
        return OpenedSources((source,), {0: 0})

    def of(self, node: int) -> OpenedSource:
        """Return the input that a source of the graph belongs to."""
        return self.inputs[self.nodes[node]]

    @property
    def joined(self) -> tuple[T.StructType, T.StructType] | None:
        """Return the columns of both sides if the one input is two streams that a join reads."""
        first = self.inputs[0]
        return (first.left, first.right) if first.left is not None and first.right is not None else None

    @property
    def are_united(self) -> bool:
        """Return whether a batch of the streaming frame has the rows of several sources, to be taken apart."""
        return len(self.inputs) > 1

    @property
    def watermarks(self) -> tuple[WatermarkColumn, ...]:
        """The columns with event time of all inputs."""
        return tuple(column for source in self.inputs for column in source.watermarks)

    @property
    def counts(self) -> tuple[str, ...]:
        """Return SQL of aggregates that count the rows of each input in a batch of several."""
        return tuple(f"count({_tag(number)})" for number in range(len(self.inputs)))

    def rows(self, batch: DataFrame, node: int) -> DataFrame:
        """Return the rows of a source of the graph, with its columns as it has them, of a batch of several."""
        tag = _tag(self.nodes[node])
        fields = self.of(node).frame.schema.fields
        columns = [col(f"{tag}.{quoted(f.name)}").alias(f.name, metadata=f.metadata or None) for f in fields]
        return batch.where(f"{tag} IS NOT NULL").select(*columns)

    def stream(self, frames: Sequence[DataFrame]) -> DataFrame:
        """Return the streaming frame of the job.

        Args:
            frames: of the inputs, in order.
        """
        if len(frames) == 1:
            return frames[0]
        united = []
        for number, frame in enumerate(frames):
            row = struct(*(col(quoted(name)) for name in frame.columns))
            columns = [row if place == number else lit(None).cast(other.schema) for place, other in enumerate(frames)]
            united.append(frame.select(*(column.alias(_tag(place)) for place, column in enumerate(columns))))
        return _without_metadata(reduce(DataFrame.union, united))


def _without_metadata(frame: DataFrame) -> DataFrame:
    """Return a frame whose structs have no metadata in their types. There they would have to be the same before and
    after Spark's optimizer, which takes some away; Spark warns of each batch in which they are not."""
    plain = [
        T.StructType([T.StructField(f.name, f.dataType, f.nullable) for f in field.dataType.fields])
        if isinstance(field.dataType, T.StructType)
        else None
        for field in frame.schema.fields
    ]
    columns = zip(frame.columns, plain, strict=True)
    return frame.select(
        *(col(quoted(n)) if kind is None else col(quoted(n)).cast(kind).alias(n) for n, kind in columns)
    )


def _tag(number: int) -> str:
    return f"__stillstate_source_{number}"


def open_sources(spark: SparkSession, job: str, graph: Graph, *, max_ahead_ms: int | None = None) -> OpenedSources:
    """Make the streaming frames of a job.

    Args:
        max_ahead_ms: of the sources that say nothing else, see `SourceNode`.

    Raises:
        InvalidPipeline: the result is not a streaming frame, or a key column is missing.
        UserCodeError: the user's function raised.
    """
    nodes = {index: node for index, node in enumerate(graph.nodes) if isinstance(node, SourceNode)}
    if not nodes:
        raise InvalidPipeline(f"job {job!r} reads nothing; begin with job.read(…)")
    frames: dict[int, DataFrame] = {}
    for index, node in nodes.items():
        with step_at(node.at):
            frame = _frame(spark, job, node.read)
            if any(frame is known for known in frames.values()):
                raise InvalidPipeline(
                    f"source {node.name!r} has the DataFrame of another source, and Spark would read it for both at "
                    "different times. Read it once; any number of steps may go on from one read()"
                )
            frames[index] = frame
    names = tuple(SourceName(node.name, len(stream_sources(frames[n])), node.was) for n, node in nodes.items())
    bounds = _Bounds(job, tuple(nodes.values()), max_ahead_ms)
    join = lone_join(graph)
    if join is not None:
        left, right = (frames[edge.node] for edge in join.inputs)
        with step_at(next(iter(nodes.values())).at):
            opened = _joined(spark, job, Sides.of(join, left, right), [node.name for node in nodes.values()])
            opened = replace(opened, watermarks=bounds.of(opened.watermarks))
            return OpenedSources((opened,), dict.fromkeys(frames, 0), names)
    inside = [f"{_tag(number)}." if len(nodes) > 1 else "" for number in range(len(nodes))]
    inputs = tuple(_opened(spark, job, nodes[n], frames[n], tag) for n, tag in zip(nodes, inside, strict=True))
    columns = bounds.of([column for source in inputs for column in source.watermarks])
    inputs = tuple(replace(each, watermarks=tuple(c for c in columns if c.source == each.name)) for each in inputs)
    return OpenedSources(inputs, {index: number for number, index in enumerate(nodes)}, names)


@dataclass(frozen=True)
class _Bounds:
    """How far event times may be ahead of processing time.

    Attributes:
        max_ahead_ms: of the sources that say nothing else.
    """

    job: str
    nodes: tuple[SourceNode, ...]
    max_ahead_ms: int | None

    def of(self, columns: Sequence[WatermarkColumn]) -> tuple[WatermarkColumn, ...]:
        """Return the columns of all sources with their bounds.

        Raises:
            InvalidPipeline: a source has a bound that cannot be kept.
        """
        bounds = {n.name: self.max_ahead_ms if n.max_ahead_ms is None else n.max_ahead_ms for n in self.nodes}
        for node in self.nodes:
            own = [column for column in columns if column.source == node.name]
            with step_at(node.at):
                self._check(node, own, bounds[node.name])
        return tuple(replace(column, max_ahead_ms=bounds.get(column.source)) for column in columns)

    def _check(self, node: SourceNode, own: Sequence[WatermarkColumn], bound_ms: int | None) -> None:
        which = f"source {node.name!r}" if node.name else "the source"
        if node.max_ahead_ms is not None and not own:
            raise InvalidPipeline(
                f"job {self.job!r}: {which} has max_ahead and no event time to bound; call Spark's withWatermark on "
                "the stream that it reads, or leave max_ahead out"
            )
        if bound_ms is not None and any(column.node is not None for column in own):
            raise InvalidPipeline(
                f"job {self.job!r}: max_ahead cannot bound the event times of {which}: it has withWatermark on inputs "
                "of a union or a join, or below a step that drops or adds rows, where Spark alone sees them. Read each "
                "input by a read() with a name and unite the streams (Stream.union), or call withWatermark once, as "
                "the last step of read()"
            )


def _opened(spark: SparkSession, job: str, node: SourceNode, frame: DataFrame, inside: str) -> OpenedSource:
    with step_at(node.at):
        found = _watermarks(spark, job, frame, [frame], watermark_columns(frame.schema, inside=inside))
    return OpenedSource(frame, tuple(column.of_source(node.name, node.was) for column in found), node.name)


def _joined(spark: SparkSession, job: str, sides: Sides, names: Sequence[str]) -> OpenedSource:
    """Return the source that is the two sides of a join.

    Args:
        names: of the left source and of the right one.
    """
    sides.check(f"job {job!r}")
    united = _without_metadata(sides.united())
    found = _watermarks(spark, job, united, [sides.left, sides.right], sides.watermarks)
    of_left = len(watermark_nodes(sides.left)) if any(column.node is not None for column in found) else 0
    watermarks = tuple(
        column.of_side(names) if column.node is None else replace(column, source=names[number >= of_left])
        for number, column in enumerate(found)
    )
    return OpenedSource(united, watermarks, left=sides.left.schema, right=sides.right.schema)


def cleans_up(frame: DataFrame) -> bool:
    """Return whether a file source removes or moves files that Spark has read (option `cleanSource`)."""
    return any(source.options.get("cleansource", "off").lower() != "off" for source in stream_sources(frame))


def warn_of_files_passed_over(frame: DataFrame, job: str) -> None:
    """Warn of each file source whose options let Spark skip input files.

    Spark neither counts nor names the files that `maxFileAge` skips; to find them, Stillstate would have to list the
    folder itself.
    """
    conf = frame.sparkSession.conf
    for options in (source.options for source in stream_sources(frame)):
        path = shown(options.get("path", "without a path"))
        latest_first = _is_true(options.get("latestfirst", "false"))
        is_bounded = bool({"maxfilespertrigger", "maxbytespertrigger"} & options.keys())
        # Spark ignores the age if it takes the latest files first and not all at once.
        if ("maxfileage" in options or latest_first) and not (latest_first and is_bounded):
            _LOG.warning(
                "job %r: of the source %s Spark passes over each new file that was last modified more than maxFileAge "
                "(%s) before the newest file that it has read, and neither logs nor counts it. If files may arrive "
                "later than that, set a longer maxFileAge, or touch them after they are written",
                job,
                path,
                options.get("maxfileage", _FILE_AGE),
            )
        for name in ("ignoreMissingFiles", "ignoreCorruptFiles"):
            if _is_true(options.get(name.lower(), str(conf.get(f"spark.sql.files.{name}", "false")))):
                _LOG.warning(
                    "job %r: %s is on for the source %s: rows of files that are %s when they are read are passed over. "
                    "Spark's warnings of it are in this log, and in those of executors on other hosts",
                    job,
                    name,
                    path,
                    "gone" if name == "ignoreMissingFiles" else "damaged",
                )


def _is_true(text: str) -> bool:
    return text.strip().lower() == "true"


def warn_of_patterns(frame: DataFrame, job: str) -> None:
    """Warn of each source path that Spark takes for a pattern and that matches nothing: Spark refuses a missing folder,
    but silently reads nothing of such a pattern."""
    for source in stream_sources(frame):
        path = source.options.get("path", "")
        if not _PATTERN.search(path):
            continue
        # The result only decides a warning. If the file system does not answer, the first batch will fail.
        found = fits_pattern(frame.sparkSession, path)
        if found is None:
            continue
        fits, is_there = found
        if not fits:
            _LOG.warning(
                "job %r: Spark takes the source path %s for a pattern, because of [ ] { } * ? or \\ in it, and "
                "nothing fits that pattern now: the source reads nothing. %s",
                job,
                path,
                "There is a file or folder of exactly this name: rename it, and correct the path"
                if is_there
                else "Correct the path, unless what fits it comes later",
            )


def unrepeatable_source(frame: DataFrame) -> str:
    """Return the name of a source that cannot give the same rows again, so that no run could continue from a snapshot;
    "" if all can. Of Spark's own sources this is `socket`."""
    return next((s.name for s in stream_sources(frame) if s.name.lower() in _UNREPEATABLE), "")


def unwatched(frame: DataFrame, watermarks: Sequence[WatermarkColumn]) -> DataFrame:
    """Return a streaming frame without the plan steps that observe event times for Spark's own watermark.

    An epoch observes event times itself. Spark's steps still cost time for each row and plan, and Spark cannot generate
    one piece of code across them. A frame stays as it is if an epoch reads these steps, or if its plan has another
    shape than in the Spark versions that were tested.

    Args:
        watermarks: of the frame (`OpenedSources`).
    """
    return frame if any(column.node is not None for column in watermarks) else without_watermarks(frame)


def _frame(spark: SparkSession, job: str, source: Source) -> DataFrame:
    frame = streaming_frame(spark, job, source, "read()")
    refuse_stateful(frame, job)
    return frame


def streaming_frame(spark: SparkSession, job: str, source: Source, method: str) -> DataFrame:
    """Return the frame that the user's function makes, or the user's frame itself.

    Args:
        method: of the job that it was given to, for messages.

    Raises:
        InvalidConfiguration: it is of Spark Connect.
        InvalidPipeline: it is not a streaming frame, or Spark does not have its format.
        UserCodeError: the function raised.
    """
    if isinstance(source, DataFrame):
        frame = source
    else:
        try:
            frame = source(spark)
        except StillstateError:
            raise
        except Exception as error:
            raise _of_function(job, method, error) from error
    refuse_connect(frame, f"job {job!r}: the DataFrame of {method}")
    if not isinstance(frame, DataFrame) or not frame.isStreaming:
        raise InvalidPipeline(f"job {job!r}: {method} needs a streaming DataFrame (spark.readStream…)")
    return frame


def _of_function(job: str, method: str, error: Exception) -> StillstateError:
    """Return the typed error for an exception of the user's function: a missing source, or a fault of the function; for
    a Java exception the root cause comes first."""
    if _NO_KAFKA in str(error):
        return InvalidPipeline(f"job {job!r}: {_KAFKA_CONNECTOR}")
    typed = typed_error(error)
    if is_typed(typed):
        return typed
    chain = chain_of(error)
    told = root_first(chain) if chain else error
    return UserCodeError(f"job {job!r}: {method} raised {type(error).__name__}: {told}")


def _watermarks(
    spark: SparkSession, job: str, frame: DataFrame, inputs: Sequence[DataFrame], columns: tuple[WatermarkColumn, ...]
) -> tuple[WatermarkColumn, ...]:
    """Return how far the source has come: by its own columns if they cover each input, else by the inputs.

    Args:
        frame: the source.
        inputs: the source itself, or the two sides that it is made of.
        columns: of the source, with event time.

    Raises:
        InvalidPipeline: a stream has a watermark upon another one, or this Spark cannot report input times.
    """
    redefined = redefined_watermarks(frame)
    if redefined and str(spark.conf.get(_REDEFINITION_REFUSED_CONF, "true")).lower() == "true":
        raise InvalidPipeline(
            f"job {job!r}: withWatermark({redefined[0]!r}, …) is called on a stream that has a watermark already, "
            'which Spark refuses as well ("Redefining watermark is disallowed"). Call it once in each path: on each '
            "input of a union with a delay of its own, or once on the union"
        )
    return columns if all(map(is_seen_at_the_top, inputs)) else watermarks_of_inputs(watermark_nodes(frame))
