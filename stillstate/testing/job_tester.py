"""A whole job on rows that a test gives it: its own code on a local Spark session, with real snapshots in a folder of
its own."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import types as T

from state_runtime.base.errors import InvalidConfiguration, InvalidPipeline
from state_runtime.base.settings import JobSettings
from state_runtime.driver.run import Allowed, JobRun
from state_runtime.driver.start_position import StartPosition
from state_runtime.importing.bootstrap import bootstrap
from state_runtime.job import JobContext, StreamingJob
from state_runtime.pipeline.graph import Graph, SinkNode, SourceNode
from state_runtime.pipeline.plan import JobPlan
from state_runtime.pipeline.sinks import foreach_epoch
from state_runtime.pipeline.sources import streaming_frame
from state_runtime.reading.snapshot import open_snapshot_for_reading
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import TimeEntry
from state_runtime.spark.arrow import arrow_schema_of
from state_runtime.spark.other_streams import on_other_streams
from state_runtime.spark.session import build_session
from state_runtime.store import open_store
from stillstate.testing.clocks import START, HeldPipeline, HeldTime, millis_of, time_of
from stillstate.testing.rows import Rows, as_batch, as_rows

__all__ = ["JobTester"]

Build: TypeAlias = "Callable[[JobContext], StreamingJob] | StreamingJob"
_NAME: Final = "tested"


@dataclass(frozen=True)
class _Planned:
    of: JobPlan

    def plan(self) -> JobPlan:
        return self.of


class JobTester:
    """Runs a whole job in a test, send by send: the job's own code, on a local Spark session.

    In the place of the streams that the job reads stand rows that the test sends, with what the job does to them
    (filters, `withWatermark`); in the place of its sinks stands the test. All else is as in production: operators on
    shards, changelog, snapshots in a folder that is removed with the tester. Each call of `send` is a run of the job,
    from the newest snapshot to the end of what was sent: so each is a restart, too. Processing time stands still
    between calls of `advance_time`.

    Example:
        with JobTester(build, options={"inbox": str(tmp_path)}) as tester:  # a folder that exists; nothing is read
            assert tester.send(inbox=[("N14228", "UA")]) == [Row(tailnum="N14228", carrier="UA", flights=1)]
            tester.restart(parallelism=3)
            assert tester.send(inbox=[("N14228", "UA")]) == [Row(tailnum="N14228", carrier="UA", flights=2)]
            assert tester.state("legs", "seen") == [Row(tailnum="N14228", flights=2)]

    Args:
        job: the entry point (`def build(context)`), or a job; its store is not touched.
        options: of the job, as in stillstate.yaml.
        parallelism: shards of each operator.
        settings: of the runtime; its folders and its parallelism are the tester's.
        spark: by default the active session, else a small local one, which stays for further testers.
        now: processing time at the beginning.
    """

    def __init__(
        self,
        job: Build,
        *,
        options: Mapping[str, Any] | None = None,
        parallelism: int = 2,
        settings: JobSettings | None = None,
        spark: SparkSession | None = None,
        now: datetime = START,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="stillstate-test-"))
        self._spark = spark or SparkSession.getActiveSession() or build_session("stillstate-test", "local[2]")
        self._options = dict(options or {})
        self._parallelism = parallelism
        self._settings = settings or JobSettings()
        self._held = HeldTime(millis_of(now))
        self._job = job
        self._sent = 0
        self._seen: dict[str, dict[int, list[Row]]] = {}
        self._schemas: dict[str, T.StructType] = {}
        self._begun: dict[tuple[str, str], DataFrame] = {}
        try:
            self._plan = self._planned()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> JobTester:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the tester's folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- rows and time -------------------------------------------------------------------------------------------

    @property
    def sources(self) -> dict[str, T.StructType]:
        """The streams that the job reads, by the names that `send` takes: those of `read(name=…)`, else the last part
        of a path, a topic, or a format."""
        return dict(self._schemas)

    def send(self, rows: Rows = None, /, **streams: Rows) -> Any:
        """Send rows to the job's streams as one batch, and run it until it has nothing to do: the watermark moves, and
        timers and windows that it has reached come.

        Args:
            rows: to the only stream; tuples, dictionaries or Rows, a pandas frame, or an Arrow table.
            streams: to several, by their names (`sources`).

        Returns:
            What was written meanwhile: a list of rows if the job has one sink, else such lists by the names of sinks.
            The order between rows of different keys means nothing.

        Raises:
            StillstateError: as of `StreamingJob.run`.
        """
        if rows is not None and len(self._schemas) != 1:
            raise InvalidPipeline(
                f"send(rows): the job reads {self._listed()}; name the stream, as in send({self._listed(1)}=…)"
            )
        given = {**({next(iter(self._schemas)): rows} if rows is not None else {}), **streams}
        if unknown := [name for name in given if name not in self._schemas]:
            raise InvalidPipeline(f"send({unknown[0]}=…): the job reads {self._listed()}")
        batches = {
            name: as_batch(each, arrow_schema_of(self._schemas[name]), f"send({name})") for name, each in given.items()
        }
        self._sent += 1
        for name, batch in batches.items():
            if batch.num_rows:
                made = self._folder / "rows" / name / f".{self._sent:06d}.parquet"
                pq.write_table(pa.Table.from_batches([batch]), made)
                made.rename(made.with_name(f"{self._sent:06d}.parquet"))
        return self._go()

    def advance_time(self, by: str | timedelta) -> Any:
        """Let processing time pass, and return what that makes due.

        Args:
            by: a duration, such as "90 seconds".
        """
        self._held.pass_by(by)
        return self._go()

    def advance_watermark(self, to: datetime) -> Any:
        """Move the watermark of all streams, as later rows of all of them would, and return what that makes due."""
        self._held.push_watermark(to)
        return self._go()

    @property
    def now(self) -> datetime:
        """Processing time."""
        return time_of(self._held.now_ms)

    # --- the job's life ------------------------------------------------------------------------------------------

    def restart(
        self, job: Build | None = None, *, parallelism: int | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        """Go on with other code, shards or options, on another machine: without local copies, from the store alone.

        Args:
            job: the code from now on; by default as it is.
            parallelism: shards of each operator from now on.
            options: of the job from now on.

        Raises:
            StillstateError: the state does not fit the new code, as a start says it. The tester is as it was.
        """
        before = (self._job, self._parallelism, self._options, self._plan, self._schemas, self._seen)
        self._job = job if job is not None else self._job
        self._parallelism = parallelism if parallelism is not None else self._parallelism
        self._options = dict(options) if options is not None else self._options
        try:
            self._plan = self._planned()
            self._run().check(Allowed(), self._beginning())
        except BaseException:
            self._job, self._parallelism, self._options, self._plan, self._schemas, self._seen = before
            raise
        shutil.rmtree(self._folder / "local", ignore_errors=True)

    # --- state ---------------------------------------------------------------------------------------------------

    def state(self, operator: str, name: str, **key: Any) -> list[Row]:
        """Return the rows of a state in the newest snapshot, with their key columns, as reading a snapshot shows them.

        Args:
            key: only those of a key, by its columns.
        """
        state = open_snapshot_for_reading(f"{self._folder / 'store'}/{_NAME}").state(operator, name)
        return as_rows(state.to_arrow(keys=[key] if key else None).to_batches())

    def set_state(self, operator: str, name: str, rows: Rows) -> None:
        """Begin with a state: before the first rows are sent. Columns are those that `state` shows.

        Args:
            rows: a pandas frame, or Rows or dictionaries.

        Raises:
            InvalidConfiguration: the job has a snapshot already, no such state, or other columns.
        """
        if Catalog(self._plan.store, _NAME, self._plan.clock).latest() is not None:
            raise InvalidConfiguration(
                f"set_state({operator!r}, {name!r}): the job has a snapshot by now; set states before the first rows"
            )
        self._begun[operator, name] = self._spark.createDataFrame(rows)

    # --- runs ----------------------------------------------------------------------------------------------------

    def _listed(self, count: int | None = None) -> str:
        return ", ".join(list(self._schemas)[:count])

    def _planned(self) -> JobPlan:
        """Return the job's plan, on the tester's streams, sinks and folders."""
        store = str(self._folder / "store")
        settings = self._settings.model_copy(
            update={"parallelism": self._parallelism, "local_dir": str(self._folder / "local")}
        )
        context = JobContext(_NAME, store, self._options, settings)
        job = self._job if isinstance(self._job, StreamingJob) else self._job(context)
        plan = replace(job.plan(), name=_NAME, store_url=store, store=open_store(store), settings=settings)
        expanded = plan.expanded(self._spark)
        self._schemas, self._seen = {}, {}
        return replace(expanded, graph=Graph(tuple(map(self._tested, expanded.graph.nodes))))

    def _tested(self, node: Any) -> Any:
        if isinstance(node, SinkNode):
            seen = self._seen.setdefault(node.name, {})
            return replace(node, sink=foreach_epoch(lambda rows, epoch: seen.__setitem__(epoch, rows.collect())))
        if isinstance(node, SourceNode):
            frame = streaming_frame(self._spark, _NAME, node.read, "read()")
            return replace(
                node, read=on_other_streams(frame, lambda place, schema: self._stream(node.name or place, schema))
            )
        return node

    def _stream(self, wanted: str, schema: T.StructType) -> DataFrame:
        """Return a stream of the rows that are sent to it."""
        numbered = (f"{wanted}_{number}" for number in range(2, 1000))
        name = (
            wanted.replace("-", "_")
            if wanted not in self._schemas
            else next(n for n in numbered if n not in self._schemas)
        )
        self._schemas[name] = schema
        folder = self._folder / "rows" / name
        folder.mkdir(parents=True, exist_ok=True)
        return self._spark.readStream.schema(schema).parquet(str(folder))

    def _run(self) -> JobRun:
        return JobRun(self._plan, self._spark, None, threading.Event())

    def _beginning(self) -> StartPosition:
        plan = self._plan
        return StartPosition(
            Catalog(plan.store, plan.name, plan.clock), storage_options={}, clock=plan.clock, ids=plan.ids
        )

    def _go(self) -> Any:
        for seen in self._seen.values():
            seen.clear()
        if self._begun:
            root = f"{self._folder / 'store'}/{_NAME}"
            bootstrap(self._spark, root, _Planned(self._plan), self._begun, time=TimeEntry(self._held.now_ms))
            self._begun = {}
        run = self._run()
        checked = run.check(Allowed(), self._beginning())
        run.go(replace(checked, pipeline=HeldPipeline.of(checked.pipeline, self._held)), {"availableNow": True})
        found = {name: [row for epoch in sorted(seen) for row in seen[epoch]] for name, seen in self._seen.items()}
        return next(iter(found.values())) if len(found) == 1 else found
