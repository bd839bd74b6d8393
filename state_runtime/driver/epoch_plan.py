"""One epoch as one Spark plan: the batch through all stages, with user code in between.

    batch → (observe event time) → [partial rows] → hash → [initial state] → [wake rows] → repartitionById → [seats]
    → mapInArrow → … → nothing

A plan ends without rows: what tasks did comes back as acknowledgements (docs/design/0002).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pyspark.sql import DataFrame

from state_runtime.pipeline.compile import CompiledPipeline, Stage, TransformStep, runtime_columns
from state_runtime.pipeline.partial_rows import PartialRows
from state_runtime.pipeline.watermark import WatermarkColumn
from state_runtime.placement.seats import SeatedPlan
from state_runtime.spark.columns import HASH_COLUMN, INITIAL_COLUMN, SEQUENCE_COLUMN, WAKE_SEQUENCE
from state_runtime.spark.frames import Aggregate, Frames, Seen
from state_runtime.spark.sql import quoted
from state_runtime.state.key_groups import first_hash_sql, shard_sql
from state_runtime.task.stage import StageTask

__all__ = ["EpochPlan", "plan_epoch"]

_TASK = "__stillstate_task"
_OF_RUNTIME = (HASH_COLUMN, SEQUENCE_COLUMN)


@dataclass(frozen=True)
class EpochPlan:
    """What to run, and where its event times will be seen.

    Attributes:
        run: the epoch happens, and no row comes back.
        seen: after `run`, the highest event time of each column.
    """

    run: Callable[[], None]
    columns: tuple[WatermarkColumn, ...]
    seen: Callable[[], Sequence[int | None]]

    def event_time_ms(self) -> Mapping[str, int | None]:
        """After the action: per watermarked column the highest event time of the batch; None where it had no rows."""
        seen = self.seen()
        return {column.name: seen[number] for number, column in enumerate(self.columns)}


def plan_epoch(
    frame: DataFrame,
    pipeline: CompiledPipeline,
    parallelism: int,
    *,
    frames: Callable[[], Frames],
    task: Callable[[Stage, int], StageTask],
    wake: Mapping[str, Sequence[int]],
    beginning: frozenset[str],
    seats: SeatedPlan | None = None,
    aggregated: frozenset[str] = frozenset(),
    narrow: bool = False,
) -> EpochPlan:
    """Plan an epoch over a batch; nothing runs yet.

    Args:
        frame: the batch; may be empty.
        frames: makes its steps.
        task: the function of a stage, by its number.
        wake: per operator uid the shards that something is due in: they are visited although no row may come.
        beginning: operators that have no state so far and get their initial one.
        seats: keep each shard on its executor; None leaves it to Spark.
        aggregated: operators whose rows Spark aggregates before the shuffle; each has a `Stage.partial`.
        narrow: one task gets the rows of all shards; nothing is shuffled.
    """
    made = frames()
    seen: Seen = _nothing
    if pipeline.watermarks:
        frame, seen = made.observe(frame, tuple(f"max({c.sql})" for c in pipeline.watermarks))
    observing: DataFrame | None = None
    number = 0
    for part in pipeline.parts:
        if isinstance(part, TransformStep):
            frame = part.function(frame)
            continue
        columns = part.columns
        if part.operator is not None:
            keys, uid = part.operator.key_columns, part.operator.uid
            if part.partial is not None and uid in aggregated and made.aggregate is not None:
                # What a plan of its own observed is not told for the plan that it is in.
                frame = made.select(frame, (*part.selected, f"true AS {_TASK}"))
                observing = frame if observing is None else observing
                frame = _aggregated(made.aggregate, frame, part.partial)
                columns = part.partial.columns
            else:
                frame = made.select(frame, (*part.selected, *runtime_columns(keys)))
            columns = (*columns, *_OF_RUNTIME)
            if part.initial is not None and uid in beginning:
                frame, columns = _with_initial_state(frame, part.initial, keys), (*columns, INITIAL_COLUMN)
            if wake.get(uid):
                frame = _with_wake_rows(made, frame, wake[uid], parallelism)
            if narrow:
                frame = frame.coalesce(1)
            elif seats is not None:
                frame = seats.seat(frame, shard_sql(HASH_COLUMN, parallelism))
            else:
                frame = made.numbered(frame, parallelism, shard_sql(HASH_COLUMN, parallelism))
        frame = made.map_in_arrow(frame, task(part, number), columns, part.output)
        number += 1
    ran = frame if observing is None else observing
    return EpochPlan(partial(made.run, frame), pipeline.watermarks, partial(seen, ran))


def _nothing(_: DataFrame) -> Sequence[int | None]:
    return ()


def _aggregated(aggregate: Aggregate, frame: DataFrame, rows: PartialRows) -> DataFrame:
    """The partial rows of a frame, with the runtime's columns; they have no place in the input."""
    runtime = runtime_columns(rows.keys, place="CAST(0 AS BIGINT)")
    return aggregate(frame, _TASK, rows.by, rows.aggregates, (*map(quoted, rows.columns), *runtime))


def _with_wake_rows(made: Frames, frame: DataFrame, shards: Sequence[int], parallelism: int) -> DataFrame:
    """A row per shard that holds nothing but a hash of it: a task without rows could not tell which one it is."""

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
    """The rows of the initial state beside those of the input, in a column of their own."""
    whole = f"struct({', '.join(quoted(name) for name in initial.columns)}) AS {INITIAL_COLUMN}"
    rows = initial.selectExpr(whole, *runtime_columns(keys))
    return frame.unionByName(rows, allowMissingColumns=True)
