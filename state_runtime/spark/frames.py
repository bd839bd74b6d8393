"""The steps of an epoch's plan, as Spark's frames; by pyspark's public ways. In fewer calls: spark/prepared.py."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from typing import Any, Protocol

from pyspark.sql import DataFrame, Observation
from pyspark.sql import types as T
from pyspark.sql.functions import expr

__all__ = ["Aggregate", "Frames", "Planned", "PublicFrames", "Seen", "StageFunction"]

Seen = Callable[[DataFrame], Sequence[Any]]
"""What was observed, of the frame that was run; nothing if nothing came."""

StageFunction = tuple[Callable[..., Any], T.StructType]
"""What `mapInArrow` runs in a stage, and what comes out of it."""


class Planned(Protocol):
    """A plan that can be run once."""

    def run(self) -> None:
        """See `Frames.run`."""
        ...

    def seen(self) -> Sequence[Any]:
        """After `run`: what its frame observed; nothing if nothing came, or nothing is observed."""
        ...


class Aggregate(Protocol):
    """Aggregates what each task has."""

    def __call__(
        self, frame: DataFrame, beside: str, by: tuple[str, ...], made: tuple[str, ...], kept: tuple[str, ...]
    ) -> DataFrame:
        """By a plan of two: what the frame observed is told for the frame, not for what was made of it.

        Args:
            beside: a column of one value.
            by: SQL of what rows are grouped by.
            made: SQL of the aggregates, with their names.
            kept: SQL of what is kept of both.
        """
        ...


class Frames(Protocol):
    """Makes the frames of one epoch's plan after the other. Not thread-safe."""

    def select(self, frame: DataFrame, sql: tuple[str, ...]) -> DataFrame:
        """`frame.selectExpr(…)`."""
        ...

    def numbered(self, frame: DataFrame, partitions: int, number: str) -> DataFrame:
        """`frame.repartitionById(…)`: the rows in the partition whose number `number` is, an int in SQL."""
        ...

    def observe(self, frame: DataFrame, sql: tuple[str, ...]) -> tuple[DataFrame, Seen]:
        """The frame, observed for some aggregates, and what gives these after `run` of a frame that was made of it."""
        ...

    def map_in_arrow(
        self, frame: DataFrame, function: StageFunction, columns: tuple[str, ...], stage: int
    ) -> DataFrame:
        """`frame.mapInArrow(…)`.

        Args:
            columns: the frame's, all of them in their order.
        """
        ...

    @property
    def aggregate(self) -> Aggregate | None:
        """None: there is no way without a shuffle."""
        ...

    def kept(self, name: str, make: Callable[[], DataFrame]) -> DataFrame:
        """A frame that is no epoch's; it may be made once and used in many plans."""
        ...

    def shared(self, frame: DataFrame) -> tuple[tuple[DataFrame, ...], DataFrame]:
        """The rows of a frame for several readers, in the same partitions and order; made once for all of them.

        Returns:
            The frames that make the rows, for `learn`; and the frame to read, any number of times.
        """
        ...

    def partitions(self, batch: DataFrame) -> int:
        """How many partitions a batch has; the plan of rows that are shared depends on it. 0 where no plan is kept."""
        ...

    def run(self, frames: Sequence[DataFrame]) -> None:
        """Have all rows of the frames made, in one job, for what is done on the way; the rows themselves are dropped
        where they are."""
        ...

    def again(self, shape: Hashable, batch: DataFrame, functions: Sequence[StageFunction]) -> Planned | None:
        """The plan of an epoch before, for another batch and other functions; None: it is to be made.

        Args:
            shape: whatever decides what plan is made.
            functions: of all stages.
        """
        ...

    def learns(self, shape: Hashable) -> bool:
        """Whether to `learn` of an epoch that is to be planned."""
        ...

    def learn(self, shape: Hashable, batch: DataFrame, frames: Sequence[DataFrame]) -> None:
        """Take note of the plan of an epoch that was run.

        Args:
            frames: each reads the rows of the batch, or of frames before it; none, if another batch may have others.
        """
        ...


class PublicFrames:
    """See `Frames`; by pyspark's public ways."""

    def __init__(self) -> None:
        self._persisted: list[DataFrame] = []

    def select(self, frame: DataFrame, sql: tuple[str, ...]) -> DataFrame:
        return frame.selectExpr(*sql)

    def numbered(self, frame: DataFrame, partitions: int, number: str) -> DataFrame:
        return frame.repartitionById(partitions, expr(number))

    def observe(self, frame: DataFrame, sql: tuple[str, ...]) -> tuple[DataFrame, Seen]:
        observation, named = Observation(), [f"c{number}" for number in range(len(sql))]
        watched = frame.observe(observation, *(expr(s).alias(name) for s, name in zip(sql, named, strict=True)))
        return watched, lambda _: [observation.get[name] for name in named]

    def map_in_arrow(
        self, frame: DataFrame, function: StageFunction, columns: tuple[str, ...], stage: int
    ) -> DataFrame:
        return frame.mapInArrow(*function)

    @property
    def aggregate(self) -> None:
        return None

    def kept(self, name: str, make: Callable[[], DataFrame]) -> DataFrame:
        return make()

    def shared(self, frame: DataFrame) -> tuple[tuple[DataFrame, ...], DataFrame]:
        self._persisted.append(frame.persist())
        return (), frame

    def partitions(self, batch: DataFrame) -> int:
        return 0

    def run(self, frames: Sequence[DataFrame]) -> None:
        first, *others = frames
        if others:
            # Rows of one schema; what is read of them is nothing.
            first, *others = (frame.selectExpr("CAST(NULL AS INT) AS n") for frame in frames)
        try:
            reduce(DataFrame.unionAll, others, first).write.format("noop").mode("overwrite").save()
        finally:
            self.release()

    def release(self) -> None:
        """Let the executors forget shared rows."""
        while self._persisted:
            self._persisted.pop().unpersist()

    def again(self, shape: Hashable, batch: DataFrame, functions: Sequence[StageFunction]) -> None:
        return None

    def learns(self, shape: Hashable) -> bool:
        return False

    def learn(self, shape: Hashable, batch: DataFrame, frames: Sequence[DataFrame]) -> None:
        return
