"""The steps of an epoch's plan, as Spark's frames; by pyspark's public API. In fewer calls: spark/prepared.py."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from typing import Any, Final, Protocol

from pyspark.sql import DataFrame, Observation
from pyspark.sql import types as T
from pyspark.sql.functions import expr

__all__ = ["OBSERVED", "Aggregate", "Frames", "Planned", "PublicFrames", "Seen", "StageFunction"]

OBSERVED: Final = "__stillstate_observed"
"""The name of what is observed of a batch."""

Seen = Callable[[DataFrame], Sequence[Any]]
"""Returns the observed values, given the frame that was run; empty if no row came."""

StageFunction = tuple[Callable[..., Any], T.StructType]
"""The function that `mapInArrow` runs in a stage, and its output schema."""


class Planned(Protocol):
    """A plan that can be run once."""

    def run(self) -> None:
        """See `Frames.run`."""
        ...

    def seen(self, name: str = OBSERVED) -> Sequence[Any]:
        """Return, after `run`, the values that its frames observed under a name; empty if no row came, or nothing is
        observed."""
        ...


class Aggregate(Protocol):
    """Aggregates the rows of each task separately."""

    def __call__(
        self, frame: DataFrame, beside: str, by: tuple[str, ...], made: tuple[str, ...], kept: tuple[str, ...]
    ) -> DataFrame:
        """Aggregate in a second plan: observed values are read from the first frame, not from the result.

        Args:
            beside: a column of one value.
            by: SQL expressions by which rows are grouped.
            made: SQL of the aggregates, with their names.
            kept: SQL of the columns that are kept of both.
        """
        ...


class Frames(Protocol):
    """Makes the frames of one epoch's plan after another. Not thread-safe."""

    def select(self, frame: DataFrame, sql: tuple[str, ...]) -> DataFrame:
        """Return `frame.selectExpr(…)`."""
        ...

    def numbered(self, frame: DataFrame, partitions: int, number: str) -> DataFrame:
        """Return `frame.repartitionById(…)`: each row in the partition whose number is `number`, an int in SQL."""
        ...

    def observe(self, frame: DataFrame, sql: tuple[str, ...], name: str = OBSERVED) -> tuple[DataFrame, Seen]:
        """Return the observed frame, and a function for the aggregates' values after `run` of a derived frame.

        Args:
            name: of what is observed, unique in a plan.
        """
        ...

    def map_in_arrow(
        self, frame: DataFrame, function: StageFunction, columns: tuple[str, ...], stage: int
    ) -> DataFrame:
        """Return `frame.mapInArrow(…)`.

        Args:
            columns: the frame's, all of them in their order.
        """
        ...

    @property
    def aggregate(self) -> Aggregate | None:
        """The way to aggregate without a shuffle; None if there is none."""
        ...

    def kept(self, name: str, make: Callable[[], DataFrame]) -> DataFrame:
        """Return a frame that does not depend on the epoch; it may be made once and used in many plans."""
        ...

    def shared(self, frame: DataFrame) -> tuple[tuple[DataFrame, ...], DataFrame]:
        """Share the rows of a frame between several readers. An action computes them once, in the same partitions and
        order.

        Returns:
            The frames that compute the rows, for `learn`; and the frame that the readers read.
        """
        ...

    def partitions(self, batch: DataFrame) -> int:
        """Return the number of partitions of a batch, on which plans with shared rows depend; 0 if no plan is kept."""
        ...

    def run(self, frames: Sequence[DataFrame]) -> None:
        """Compute all rows of the frames in one Spark job, for the side effects; the rows themselves are dropped where
        they are."""
        ...

    def again(self, shape: Hashable, batch: DataFrame, functions: Sequence[StageFunction]) -> Planned | None:
        """Return the plan of an earlier epoch for another batch and other functions; None: the plan must be made.

        Args:
            shape: everything that the plan depends on.
            functions: of all stages.
        """
        ...

    def learns(self, shape: Hashable) -> bool:
        """Return whether to call `learn` for an epoch that is to be planned."""
        ...

    def learn(self, shape: Hashable, batch: DataFrame, frames: Sequence[DataFrame]) -> None:
        """Record the plan of an epoch that was run.

        Args:
            frames: each reads the rows of the batch, or of frames before it; empty if another batch may have other
                frames.
        """
        ...


class PublicFrames:
    """See `Frames`; by pyspark's public API."""

    def __init__(self) -> None:
        self._persisted: list[DataFrame] = []

    def select(self, frame: DataFrame, sql: tuple[str, ...]) -> DataFrame:
        return frame.selectExpr(*sql)

    def numbered(self, frame: DataFrame, partitions: int, number: str) -> DataFrame:
        return frame.repartitionById(partitions, expr(number))

    def observe(self, frame: DataFrame, sql: tuple[str, ...], name: str = OBSERVED) -> tuple[DataFrame, Seen]:
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
            # A union needs one schema; no column is read.
            first, *others = (frame.selectExpr("CAST(NULL AS INT) AS n") for frame in frames)
        try:
            reduce(DataFrame.unionAll, others, first).write.format("noop").mode("overwrite").save()
        finally:
            self.release()

    def release(self) -> None:
        """Remove shared rows from the executors."""
        while self._persisted:
            self._persisted.pop().unpersist()

    def again(self, shape: Hashable, batch: DataFrame, functions: Sequence[StageFunction]) -> None:
        return None

    def learns(self, shape: Hashable) -> bool:
        return False

    def learn(self, shape: Hashable, batch: DataFrame, frames: Sequence[DataFrame]) -> None:
        return
