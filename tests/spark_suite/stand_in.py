"""What Spark's suites call, driving a `StreamingJob`: `groupBy(…).transformWithState…`, a stream writer and a query.

It translates and decides nothing: operator arguments, steps behind the operator, sink and checkpoint folder become a
job; `processAllAvailable()` runs it until its input ends and then hands each batch to the suite's own checks. The suites set
`noDataMicroBatches.enabled` to false, which our jobs have no setting for (docs/parity.md): so here nothing is due while
there are no rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, GroupedData, SparkSession

from state_runtime import JobSettings, ParquetSink, StreamingJob, aggregates, foreach_epoch
from state_runtime.base.settings import CheckpointSettings
from state_runtime.driver.epochs import EpochDriver
from state_runtime.job import KeyedStream, Stream

__all__ = ["NotExpressible", "Replacement"]

Check = Callable[[DataFrame, int], None]
Step = Callable[[Stream, str], Stream]
"""Puts an operator behind a stream; the query's output mode is known when it is written."""


class NotExpressible(Exception):
    """The suite asks for something that belongs to a Spark query alone."""


class Replacement:
    """Stands in for `GroupedData.transformWithState` and `…InPandas` of one session.

    Args:
        folder: for the checkpoints that the suite names no place for, and for batches as files.
    """

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self.batches_before: dict[str, int] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within: `df.groupBy(…).transformWithState(…)` is ours."""

        def method(pandas: bool) -> Callable[..., _Frame]:
            return lambda grouped, **arguments: _Frame(self, grouped._df, (_operator(grouped, pandas, arguments),))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GroupedData, "transformWithState", method(False))
            patch.setattr(GroupedData, "transformWithStateInPandas", method(True))
            yield

    def place(self) -> str:
        """A new folder."""
        return tempfile.mkdtemp(dir=self.folder)


@contextmanager
def _as_the_session_says(spark: SparkSession) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if spark.conf.get("spark.sql.streaming.noDataMicroBatches.enabled") == "false":
            patch.setattr(EpochDriver, "is_due", lambda driver: False)
        yield


def _operator(grouped: GroupedData, pandas: bool, arguments: dict[str, Any]) -> Step:
    seed = arguments.pop("initialState", None)
    if seed is not None:
        arguments["initialState"] = seed._df
    keys = _names_of(grouped)

    def step(stream: Stream, _: str) -> Stream:
        keyed: KeyedStream = stream.key_by(*keys)
        apply: Any = keyed.transform_with_state_in_pandas if pandas else keyed.transform_with_state
        applied: Stream = apply(**arguments, uid="suite")
        return applied

    return step


def _names_of(grouped: GroupedData) -> list[str]:
    """The columns that a frame was grouped by; Spark's object tells them to its JVM and in its text only."""
    expressions = grouped._jgd.toString().partition("grouping expressions: [")[2].partition("]")[0]
    return [part.split(":")[0].strip() for part in expressions.split(",")]


class _Frame:
    """The frame that `transformWithState` gives: further steps, a writer, or (over a batch) its rows."""

    def __init__(self, replacement: Replacement, source: DataFrame, steps: tuple[Step, ...]) -> None:
        self._replacement = replacement
        self._source = source
        self._steps = steps

    def _then(self, step: Step) -> _Frame:
        return _Frame(self._replacement, self._source, (*self._steps, step))

    def select(self, *columns: Any) -> _Frame:
        return self._then(lambda stream, _: stream.transform(lambda frame: frame.select(*columns)))

    def groupBy(self, *columns: Any) -> _Counted:
        names = [name for given in columns for name in (given if isinstance(given, list) else [given])]
        return _Counted(self, names)

    @property
    def writeStream(self) -> _Writer:
        return _Writer(self._replacement, self._source, self._steps)

    def sort(self, *columns: Any) -> DataFrame:
        return self._rows().sort(*columns)

    def collect(self) -> list[Any]:
        return self._rows().collect()

    def _rows(self) -> DataFrame:
        """A batch query: the frame as one file of a stream that ends."""
        given = self._replacement.place()
        self._source.coalesce(1).write.mode("overwrite").parquet(given)
        stream = self._replacement.spark.readStream.schema(self._source.schema).parquet(given)
        seen: list[DataFrame] = []
        query = (
            _Writer(self._replacement, stream, self._steps).foreachBatch(lambda frame, _: seen.append(frame)).start()
        )
        query.processAllAvailable()
        return seen[0]


class _Counted:
    def __init__(self, frame: _Frame, names: list[str]) -> None:
        self._frame = frame
        self._names = names

    def count(self) -> _Frame:
        return self._frame._then(
            lambda stream, mode: stream.key_by(*self._names).aggregate(
                uid="counted", output_mode=mode, count=aggregates.count()
            )
        )


class _Writer:
    """`DataStreamWriter`, as far as the suites use it. Queries that it starts twice go on from the same folder."""

    def __init__(self, replacement: Replacement, source: DataFrame, steps: tuple[Step, ...]) -> None:
        self._replacement = replacement
        self._source = source
        self._steps = steps
        self._name: str | None = None
        self._options: dict[str, str] = {}
        self._check: Check | None = None
        self._mode = "append"

    def queryName(self, name: str) -> _Writer:
        self._name = name
        return self

    def option(self, name: str, value: str) -> _Writer:
        self._options[name] = value
        return self

    def format(self, name: str) -> _Writer:
        if name != "parquet":
            raise NotExpressible(f"a sink of format {name}")
        return self

    def outputMode(self, mode: str) -> _Writer:
        self._mode = mode
        return self

    def foreachBatch(self, check: Check) -> _Writer:
        self._check = check
        return self

    def start(self) -> _Query:
        checkpoint = self._options.get("checkpointLocation") or self._replacement.place()
        return _Query(
            self._replacement,
            self._source,
            self._steps,
            self._name,
            checkpoint,
            self._check,
            self._options,
            self._mode,
        )


class _Query:
    """`StreamingQuery`: the job runs within `processAllAvailable()`, and what it raises is raised there."""

    def __init__(
        self,
        replacement: Replacement,
        source: DataFrame,
        steps: tuple[Step, ...],
        name: str | None,
        checkpoint: str,
        check: Check | None,
        options: dict[str, str],
        mode: str,
    ) -> None:
        self.name = name
        self.isActive = True
        self._replacement = replacement
        self._source = source
        self._steps = steps
        self._checkpoint = checkpoint
        self._check = check
        self._options = options
        self._mode = mode

    @property
    def lastProgress(self) -> Any:
        raise NotExpressible("lastProgress: the metrics of Spark's state store")

    def processAllAvailable(self) -> None:
        spark = self._replacement.spark
        job = StreamingJob(
            "suite",
            store=self._checkpoint,
            settings=JobSettings(
                parallelism=int(spark.conf.get("spark.sql.shuffle.partitions") or "1"),
                local_dir=self._replacement.place(),
                checkpoint=CheckpointSettings(mode="aligned"),
            ),
        )
        stream = job.read(self._source)
        for step in self._steps:
            stream = step(stream, self._mode)
        outputs: dict[int, DataFrame] = {}
        batches: list[DataFrame] = []

        def take(frame: DataFrame, epoch: int) -> None:
            outputs[epoch] = spark.createDataFrame(frame.collect(), frame.schema)

        def note(progress: Any) -> None:
            if progress.input_rows and self._check is not None:
                batches.append(outputs[progress.epoch])

        if self._check is None:
            stream.write(ParquetSink(self._options["path"]))
        else:
            stream.write(foreach_epoch(take, empty_epochs=True))
        with _as_the_session_says(spark):
            job.run(spark, trigger={"availableNow": True}, on_progress=note)
        before = self._replacement.batches_before.get(self._checkpoint, 0)
        self._replacement.batches_before[self._checkpoint] = before + len(batches)
        if self._check is not None:
            for number, batch in enumerate(batches, start=before):
                self._check(batch, number)

    def stop(self) -> None:
        self.isActive = False

    def awaitTermination(self, timeout: float | None = None) -> bool:
        return not self.isActive

    def exception(self) -> None:
        return None
