"""One epoch as one Spark plan: the batch through all stages, with user code in between.

    batch → (observe event time) → [partial rows] → hash → [initial state] → [wake rows] → repartitionById → [seats]
    → mapInArrow → … → nothing

A plan ends without rows: tasks report by acknowledgements (docs/design/0002). If only the batch and the stages'
functions differ from an earlier epoch, its plan is used again (docs/design/0038-rebound.md).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pyspark.sql import DataFrame

from state_runtime.base.progress import RowsAside
from state_runtime.pipeline.compile import CompiledPipeline, Stage, runtime_columns
from state_runtime.pipeline.expectations import ExpectStep
from state_runtime.pipeline.future_rows import FutureStep
from state_runtime.pipeline.graph import OperatorNode, SegmentNode, SinkNode, SourceNode
from state_runtime.pipeline.join_rows import Sides
from state_runtime.pipeline.partial_rows import PartialRows
from state_runtime.pipeline.watermark import WatermarkColumn
from state_runtime.placement.anchors import AnchoredPlan
from state_runtime.spark.columns import HASH_COLUMN, INITIAL_COLUMN, SEQUENCE_COLUMN, WAKE_SEQUENCE
from state_runtime.spark.frames import OBSERVED, Aggregate, Frames, Seen, StageFunction
from state_runtime.spark.plans import job_watch
from state_runtime.spark.sql import quoted
from state_runtime.spark.watermarks import event_times_at
from state_runtime.state.key_groups import first_hash_sql, shard_sql
from state_runtime.task.stage import StageTask

__all__ = ["EpochPlan", "plan_epoch"]

_TASK = "__stillstate_task"
_OF_RUNTIME = (HASH_COLUMN, SEQUENCE_COLUMN)


@dataclass(frozen=True)
class EpochPlan:
    """The plan to run, and where its event times will be seen.

    Attributes:
        run: runs the epoch; no row comes back.
        seen: after `run`, the highest event time of each column that the plan observes, then how many rows each of
            several sources gave; nothing if no row came.
        seen_at_nodes: the same of the other columns, which Spark observes.
        counted: of how many sources `seen` has the rows; 0 if there is one.
        bounded: the sources of which `seen` has, last, the rows that are too far ahead.
        bad: after `run`, how many rows failed at each step that drops rows by conditions, by its place in the graph.
    """

    run: Callable[[], None]
    columns: tuple[WatermarkColumn, ...]
    seen: Callable[[], Sequence[int | None]]
    seen_at_nodes: Callable[[], Sequence[int | None]] = tuple
    counted: int = 0
    bounded: tuple[str, ...] = ()
    bad: Callable[[], Mapping[int, int]] = dict

    def event_time_ms(self) -> Mapping[str, int | None]:
        """Return, after the action, per watermarked column the highest event time of the batch; None without rows."""
        seen, at_nodes = iter(self.seen()), iter(self.seen_at_nodes())
        return {c.name: next(seen if c.node is None else at_nodes, None) for c in self.columns}

    def source_rows(self) -> tuple[int, ...]:
        """Return, after the action, how many rows came from each of several sources; () if there is one, or no row
        came."""
        counts = self.seen()[self._observed : self._observed + self.counted] if self.counted else ()
        return tuple(count or 0 for count in counts)

    def aside(self) -> RowsAside:
        """Return, after the action, the rows that the plan counted because they are too far ahead, or failed a
        condition."""
        counts = self.seen()[self._observed + self.counted :] if self.bounded else ()
        future = {name: int(count) for name, count in zip(self.bounded, counts, strict=False) if count}
        return RowsAside(future, self.bad())

    @property
    def _observed(self) -> int:
        """Of how many columns `seen` has the highest event time."""
        return sum(column.node is None for column in self.columns)


def plan_epoch(
    frame: DataFrame,
    pipeline: CompiledPipeline,
    parallelism: int,
    *,
    frames: Callable[[], Frames],
    task: Callable[[Stage, int], StageTask],
    wake: Mapping[str, Sequence[int]],
    beginning: frozenset[str],
    seats: AnchoredPlan | None = None,
    aggregated: frozenset[str] = frozenset(),
    is_batch: bool = False,
    in_one_task: bool = False,
    now_ms: int = 0,
) -> EpochPlan:
    """Plan an epoch over a batch; nothing runs yet.

    Args:
        frame: the batch, or a frame of its columns without rows.
        frames: makes its steps.
        task: the function of a stage, by its number.
        wake: per operator uid the shards with due work: they are visited even if no row comes.
        beginning: operators that have no state yet and get their initial one.
        seats: keep each shard on its executor; None leaves it to Spark.
        aggregated: operators whose rows Spark aggregates before the shuffle; each has a `Stage.partial`.
        is_batch: Spark handed the frame over, in the thread that calls this.
        in_one_task: one task gets the rows of all shards; nothing is shuffled.
        now_ms: the epoch's processing time.
    """
    made = frames()
    functions = [(task(stage, number), stage.output) for number, stage in enumerate(pipeline.stages)]
    asked = _Asked(
        parallelism=parallelism,
        wake=wake,
        beginning=beginning,
        seats=seats,
        aggregated=aggregated,
        in_one_task=in_one_task,
        now_ms=now_ms,
        observed=pipeline.observed(now_ms),
    )
    shape = asked.shape if is_batch and pipeline.plans_stay else None
    if shape is not None and pipeline.has_shared_rows:
        shape = (shape, made.partitions(frame))
    again = made.again(shape, frame, functions) if shape is not None else None
    watched = [column.node for column in pipeline.watermarks if column.node is not None]
    at_nodes = partial(event_times_at, frame, watched) if is_batch and watched else tuple
    told = partial(
        EpochPlan,
        columns=pipeline.watermarks,
        seen_at_nodes=at_nodes,
        counted=len(pipeline.united.inputs) if pipeline.united is not None else 0,
        bounded=pipeline.bounded_sources,
    )
    if again is not None:
        bad = partial(_counted, {n: partial(again.seen, _counting(n)) for n in pipeline.expectations})
        return told(run=again.run, seen=again.seen if asked.observed else tuple, bad=bad)
    learns = shape is not None and made.learns(shape)
    has_looked = job_watch(frame.sparkSession) if learns else None
    steps = _planned(made, frame, pipeline, functions, asked)
    # Event times that a nested plan observes are not reported to the plan that contains it.
    seen = partial(steps.seen, steps.frames[0])
    bad = partial(_counted, {n: partial(_seen_in, steps.frames, each) for n, each in steps.bad.items()})
    done = told(run=partial(made.run, steps.leaves), seen=seen, bad=bad)
    if has_looked is None:
        return done
    # A transform that looked at rows to make its plan does so in each epoch, so such a plan is not kept. The look may
    # have been another query's job: then a later epoch's plan is kept.
    looked = has_looked()

    def run() -> None:
        done.run()
        made.learn(shape, frame, () if looked else steps.frames)

    return replace(done, run=run)


@dataclass(frozen=True)
class _Asked:
    """The arguments of an epoch's plan; see `plan_epoch`."""

    parallelism: int
    wake: Mapping[str, Sequence[int]]
    beginning: frozenset[str]
    seats: AnchoredPlan | None
    aggregated: frozenset[str]
    in_one_task: bool
    now_ms: int
    observed: tuple[str, ...]

    @property
    def shape(self) -> Hashable | None:
        """The properties that two plans share if they differ only in rows and functions; None: no plan is the same."""
        if self.beginning or self.seats is not None:
            return None
        woken = tuple(sorted((uid, *shards) for uid, shards in self.wake.items() if shards))
        # A bound of event times is a number in what is observed.
        return self.parallelism, self.aggregated, self.in_one_task, woken, self.observed


@dataclass(frozen=True)
class _Planned:
    """An epoch's frames.

    Attributes:
        frames: each reads the rows of the batch, or of those before it; the leaves are the last ones.
        leaves: what no other reads.
        seen: of the first of `frames`.
        bad: of one of `frames`, for each step that drops rows by conditions.
    """

    frames: Sequence[DataFrame]
    leaves: Sequence[DataFrame]
    seen: Seen
    bad: Mapping[int, Seen]


def _planned(
    made: Frames, frame: DataFrame, pipeline: CompiledPipeline, functions: Sequence[StageFunction], asked: _Asked
) -> _Planned:
    """Pass the batch through all nodes of the graph."""
    seen: Seen = _nothing
    if asked.observed:
        frame, seen = made.observe(frame, asked.observed)
    bad: dict[int, Seen] = {}
    stages = {stage.node: (number, stage) for number, stage in enumerate(pipeline.stages)}
    frames: list[DataFrame] = []
    leaves: list[DataFrame] = []
    if pipeline.united is not None:
        # Else Spark would read each source once for each of them.
        making, frame = made.shared(frame)
        frames += making
    rows: dict[int, DataFrame] = {}
    for index, node in enumerate(pipeline.graph.nodes):
        if isinstance(node, SinkNode) or index in pipeline.passed_by:
            continue  # it is in the stage of a node before
        given = [rows[edge.node] for edge in node.inputs] or [frame]
        if is_apart := isinstance(node, SourceNode) and pipeline.united is not None:
            given = [pipeline.united.rows(frame, index)]
        last = given[0]
        if isinstance(node, SegmentNode):
            code = node.code.at(asked.now_ms) if isinstance(node.code, FutureStep) else node.code
            last = code.function(*given)
            if isinstance(code, ExpectStep):
                last, bad[index] = made.observe(last, (code.counts,), _counting(index))
        elif isinstance(node, OperatorNode) and len(given) > 1 and not pipeline.is_joined:
            last = Sides.of(node, *given).united()
        if index in stages:
            number, stage = stages[index]
            *before, last = _staged(made, last, stage, functions[number], number, asked)
            frames += before
        readers = sum(reader not in pipeline.passed_by for reader in pipeline.graph.readers(index))
        if readers == 0:
            leaves.append(last)
        elif readers > 1 and not is_apart:
            # Else each reader would have all that is above it run again.
            making, last = made.shared(last)
            frames += making
        rows[index] = last
    return _Planned((*frames, *leaves), leaves, seen, bad)


def _counting(index: int) -> str:
    """Return the name under which the rows are counted that fail at a step."""
    return f"{OBSERVED}_{index}"


def _seen_in(frames: Sequence[DataFrame], seen: Seen) -> Sequence[int | None]:
    """Return the observed values of the one frame that computes them."""
    return next(filter(None, map(seen, frames)), ())


def _counted(seen: Mapping[int, Callable[[], Sequence[int | None]]]) -> Mapping[int, int]:
    """Return the counts that are not 0."""
    counts = {place: next(iter(values()), None) for place, values in seen.items()}
    return {place: int(count) for place, count in counts.items() if count}


def _staged(
    made: Frames, frame: DataFrame, stage: Stage, function: StageFunction, number: int, asked: _Asked
) -> tuple[DataFrame, ...]:
    """Return the frames of a stage: one, or two where Spark aggregates the rows of the first."""
    columns = stage.columns
    before: tuple[DataFrame, ...] = ()
    if stage.operator is not None:
        keys, uid = stage.operator.key_columns, stage.operator.uid
        if stage.partial is not None and uid in asked.aggregated and made.aggregate is not None:
            before = (made.select(frame, (*stage.selected, f"true AS {_TASK}")),)
            frame = _aggregated(made.aggregate, before[0], stage.partial)
            columns = stage.partial.columns
        else:
            frame = made.select(frame, (*stage.selected, *runtime_columns(keys)))
        columns = (*columns, *_OF_RUNTIME)
        if stage.initial is not None and uid in asked.beginning:
            frame, columns = _with_initial_state(frame, stage.initial, keys), (*columns, INITIAL_COLUMN)
        if asked.wake.get(uid):
            frame = _with_wake_rows(made, frame, asked.wake[uid], asked.parallelism)
        frame = _placed(made, frame, asked)
    return (*before, made.map_in_arrow(frame, function, columns, number))


def _placed(made: Frames, frame: DataFrame, asked: _Asked) -> DataFrame:
    """Place each row in the task of its shard."""
    if asked.in_one_task:
        return frame.coalesce(1)
    shard = shard_sql(HASH_COLUMN, asked.parallelism)
    if asked.seats is not None:
        return asked.seats.seat(frame, shard)
    return made.numbered(frame, asked.parallelism, shard)


def _nothing(_: DataFrame) -> Sequence[int | None]:
    return ()


def _aggregated(aggregate: Aggregate, frame: DataFrame, rows: PartialRows) -> DataFrame:
    """Return the partial rows of a frame, with the runtime's columns; they have no place in the input."""
    runtime = runtime_columns(rows.keys, place="CAST(0 AS BIGINT)")
    return aggregate(frame, _TASK, rows.by, rows.aggregates, (*map(quoted, rows.columns), *runtime))


def _with_wake_rows(made: Frames, frame: DataFrame, shards: Sequence[int], parallelism: int) -> DataFrame:
    """Add a row per shard that holds only a hash of it: a task without rows could not tell which shard it is."""

    def rows_of_all() -> DataFrame:
        return frame.sparkSession.range(0, parallelism, 1, 1).selectExpr(
            f"{first_hash_sql('id', parallelism)} AS {HASH_COLUMN}",
            f"CAST({WAKE_SEQUENCE} AS BIGINT) AS {SEQUENCE_COLUMN}",
        )

    rows = made.kept(f"wake {parallelism}", rows_of_all)
    if len(shards) < parallelism:
        rows = rows.where(f"{shard_sql(HASH_COLUMN, parallelism)} IN ({', '.join(map(str, shards))})")
    return frame.unionByName(rows, allowMissingColumns=True)


def _with_initial_state(frame: DataFrame, initial: DataFrame, keys: tuple[str, ...]) -> DataFrame:
    """Add the rows of the initial state to those of the input, in a separate column."""
    whole = f"struct({', '.join(quoted(name) for name in initial.columns)}) AS {INITIAL_COLUMN}"
    rows = initial.selectExpr(whole, *runtime_columns(keys))
    return frame.unionByName(rows, allowMissingColumns=True)
