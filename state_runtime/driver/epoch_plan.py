"""One epoch as one Spark plan: the batch through all stages, with user code in between.

    batch → (observe event time) → [partial rows] → hash → [initial state] → [wake rows] → repartitionById → [seats]
    → mapInArrow → … → nothing

A plan ends without rows: what tasks did comes back as acknowledgements (docs/design/0002).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pyspark.sql import DataFrame, Observation
from pyspark.sql.functions import col, expr
from pyspark.sql.functions import max as max_of

from state_runtime.pipeline.compile import CompiledPipeline, Stage, TransformStep, shard_columns
from state_runtime.pipeline.watermark import WatermarkColumn
from state_runtime.placement.seats import SeatedPlan
from state_runtime.spark.columns import HASH_COLUMN, INITIAL_COLUMN, SEQUENCE_COLUMN, SHARD_COLUMN, WAKE_SEQUENCE
from state_runtime.spark.jvm import InOwnPlan, in_own_plan
from state_runtime.spark.sql import quoted
from state_runtime.task.stage import StageTask

__all__ = ["EpochPlan", "plan_epoch"]

_EVENT_TIME = "__stillstate_event_time"
_TASK = "__stillstate_task"


@dataclass(frozen=True)
class EpochPlan:
    """What to run, and where its event times will be seen.

    Attributes:
        final: collect it: the epoch happens, and no row comes back.
        seen: after the action, the highest event time of each column.
    """

    final: DataFrame
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
    task: Callable[[Stage, int], StageTask],
    wake: Mapping[str, Sequence[int]],
    beginning: frozenset[str],
    seats: SeatedPlan | None = None,
    aggregated: frozenset[str] = frozenset(),
) -> EpochPlan:
    """Plan an epoch over a batch; nothing runs yet.

    Args:
        frame: the batch; may be empty.
        task: the function of a stage, by its number.
        wake: per operator uid the shards that something is due in: they are visited although no row may come.
        beginning: operators that have no state so far and get their initial one.
        seats: keep each shard on its executor; None leaves it to Spark.
        aggregated: operators whose rows Spark aggregates before the shuffle; each has a `Stage.partial`.
    """
    frame, seen = _observed(frame, pipeline.watermarks, by_name=bool(aggregated))
    number = 0
    for part in pipeline.parts:
        if isinstance(part, TransformStep):
            frame = part.function(frame)
            continue
        if part.operator is not None:
            keys, uid = part.operator.key_columns, part.operator.uid
            if part.partial is not None and uid in aggregated:
                own = in_own_plan(frame.selectExpr(*part.reads, f"true AS {_TASK}"), _TASK)
                seen = seen or partial(_observed_in, own)
                frame = part.partial.of(own.frame, _TASK).selectExpr(
                    "*", *shard_columns(keys, parallelism, place="CAST(0 AS BIGINT)")
                )
            else:
                frame = frame.selectExpr(*(part.reads or ("*",)), *shard_columns(keys, parallelism))
            if part.initial is not None and uid in beginning:
                frame = _with_initial_state(frame, part.initial, keys, parallelism)
            if wake.get(uid):
                frame = _with_wake_rows(frame, wake[uid], parallelism)
            if seats is not None:
                frame = seats.seat(frame, SHARD_COLUMN)
            else:
                frame = frame.repartitionById(parallelism, col(SHARD_COLUMN))
        frame = frame.mapInArrow(task(part, number), part.output)
        number += 1
    return EpochPlan(frame, pipeline.watermarks, seen or _nothing)


def _observed(
    frame: DataFrame, columns: Sequence[WatermarkColumn], *, by_name: bool
) -> tuple[DataFrame, Callable[[], Sequence[int | None]] | None]:
    """The frame, observed for its highest event times, and how these are had after the action.

    Args:
        by_name: the observation will be in a plan of its own (`in_own_plan`), of which Spark tells nobody, so that an
            `Observation` would wait for ever: None is returned for how.
    """
    if not columns:
        return frame, _nothing
    highest = [max_of(expr(c.sql)).alias(f"c{number}") for number, c in enumerate(columns)]
    if by_name:
        return frame.observe(_EVENT_TIME, *highest), None
    observation = Observation()
    return frame.observe(observation, *highest), lambda: [observation.get[f"c{n}"] for n in range(len(highest))]


def _observed_in(own: InOwnPlan) -> Sequence[int | None]:
    return own.observed()[_EVENT_TIME]


def _nothing() -> Sequence[int | None]:
    return ()


def _with_wake_rows(frame: DataFrame, shards: Sequence[int], parallelism: int) -> DataFrame:
    """A row per shard that holds nothing but the shard's number: a task without rows could not tell which one it is."""
    rows = frame.sparkSession.range(0, parallelism, 1, 1)
    if len(shards) < parallelism:
        rows = rows.where(f"id IN ({', '.join(map(str, shards))})")
    return frame.unionByName(
        rows.selectExpr(
            f"CAST(0 AS BIGINT) AS {HASH_COLUMN}",
            f"CAST(id AS INT) AS {SHARD_COLUMN}",
            f"CAST({WAKE_SEQUENCE} AS BIGINT) AS {SEQUENCE_COLUMN}",
        ),
        allowMissingColumns=True,
    )


def _with_initial_state(frame: DataFrame, initial: DataFrame, keys: tuple[str, ...], parallelism: int) -> DataFrame:
    """The rows of the initial state beside those of the input, in a column of their own."""
    whole = f"struct({', '.join(quoted(name) for name in initial.columns)}) AS {INITIAL_COLUMN}"
    rows = initial.selectExpr(whole, *shard_columns(keys, parallelism))
    return frame.unionByName(rows, allowMissingColumns=True)
