"""Placement anchors keep shards on their executors: the batch is joined to a cached frame of one row per seat.

    batch.repartitionById(P, seat) ─┐
                                    ├─ shuffled hash join, left ─▶ mapInArrow, where the seat's block is
    seats.repartitionById(P, seat) ─┘
      (cached)

Spark prefers to run a task where the cached part of its input is, also through a shuffle, which has no preference
itself (`DAGScheduler.getPreferredLocs`). A lost executor's blocks are computed again wherever their tasks run next:
only its shards move. See docs/design/0014-placement.md for the cost of this and the settings that it needs.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col

from state_runtime.base.clock import Clock
from state_runtime.placement.assignment import CopyFound, Seating, is_refill_due, is_refill_early, seat_shards
from state_runtime.placement.copies_on_host import find_copies
from state_runtime.snapshot.shard_versions import ShardVersions
from state_runtime.spark.executor import executor_id

__all__ = ["AnchoredPlan", "Placement", "obstacle"]

_LOG = logging.getLogger(__name__)
_SEAT = "__stillstate_seat"
_HELD = "__stillstate_held_seat"
_ANCHOR = itertools.count()
_EARLY_MAX = 5
_EARLY_S = 60.0
"""Uneven seats are given back at least `_EARLY_MAX` times in a row and for this time; then executors simply differ.

A count alone is not enough: five short epochs are over before a slow machine has started one executor."""


def obstacle(spark: SparkSession) -> str:
    """Return why shards cannot be pinned in this session; "" if they can. A session of `build_session` can."""
    conf = spark.sparkContext.getConf()
    if (conf.get("spark.shuffle.reduceLocality.enabled", "true") or "").lower() != "false":
        return (
            "spark.shuffle.reduceLocality.enabled is not false, so Spark prefers to run a task where its rows come from"
        )
    if str(spark.conf.get("spark.sql.adaptive.enabled", "true")).lower() != "false":
        return "spark.sql.adaptive.enabled is not false, so Spark may change the plan of an epoch's tasks"
    return ""


def has_executors(spark: SparkSession) -> bool:
    """Return whether tasks run in separate processes; in local mode the driver runs them, and all data is in its
    process."""
    master = spark.sparkContext.master or "local"
    return master != "local" and not master.startswith("local[")


@dataclass(frozen=True)
class AnchoredPlan:
    """Seats for one epoch's plan."""

    frame: DataFrame
    seat_of_shard: tuple[int, ...]

    def seat(self, batch: DataFrame, shard: str) -> DataFrame:
        """Return the batch with one partition per seat, each on the seat's executor; columns and rows unchanged.

        Args:
            shard: SQL of the shard's number, never null.
        """
        parallelism = len(self.seat_of_shard)
        seats = ",".join(map(str, self.seat_of_shard))
        # A constant array after planning: a look-up per row, also with 32,768 shards. Of an operator without keys the
        # shard is a constant too; Spark would put it into the join's condition, and then join by a broadcast.
        at = f"{shard} + 1 + (spark_partition_id() & 0)"
        seat = f"element_at(CAST(split('{seats}', ',') AS ARRAY<INT>), {at}) AS {_SEAT}"
        placed = batch.selectExpr("*", seat).repartitionById(parallelism, col(_SEAT))
        # A left join: no row of the batch can get lost, even if seats are missing.
        joined = placed.join(self.frame.hint("shuffle_hash"), col(_SEAT) == col(_HELD), "left")
        return joined.drop(_SEAT, _HELD)


class Placement:
    """Keeps the seats of one run and reports on which executor each shard ran. One thread at a time.

    Life cycle: made without work → `for_epoch` before an epoch (takes seats when it must) → `ran` after it → … →
    `close`. In local mode, with placement off, or if the session's settings prevent it, it only observes.

    Args:
        state_folder: the host's folder of the job's local state; called inside tasks.
        wanted: returns the parallelism of the newest snapshot, and per operator uid the local versions of its shards.
        clock: measures how long uneven seats have been given back.

    Attributes:
        has_filled: whether the newest `for_epoch` took seats or tried to, which may wait for executors that start.
    """

    def __init__(
        self,
        spark: SparkSession,
        parallelism: int,
        *,
        enabled: bool,
        state_folder: Callable[[], Path],
        wanted: Callable[[], tuple[int, Mapping[str, ShardVersions]]],
        clock: Clock,
    ) -> None:
        self._spark = spark
        self._parallelism = parallelism
        self._state_folder = state_folder
        self._wanted = wanted
        self._cached: DataFrame | None = None
        self._seating: Seating | None = None
        self._disturbed = False
        self.has_filled = False
        self._clock = clock
        self._early, self._early_since_s = 0, 0.0
        self._homes: dict[tuple[str, int], str] = {}
        self._enabled = enabled and has_executors(spark)
        if self._enabled and (reason := obstacle(spark)):
            _LOG.warning(
                "shards are not kept on their executors: %s. Build the session with state_runtime.build_session, or "
                "set it",
                reason,
            )
            self._enabled = False

    def for_epoch(self) -> AnchoredPlan | None:
        """Return seats for the next epoch; None: Spark chooses where shards run. Takes seats first if there are no
        seats, or they got uneven.

        A failure to take seats costs locality, never the epoch.
        """
        self.has_filled = False
        if not self._enabled:
            return None
        slots = self._slots()
        seating = self._seating
        if seating is None or is_refill_due(seating, slots, disturbed=self._disturbed):
            self.has_filled = True
            try:
                self._fill(slots)
            except Exception:
                # For instance, an executor dies meanwhile. The old seats still hold, if there are any.
                _LOG.warning("seats could not be taken; trying again before the next epoch", exc_info=True)
        else:
            self._early = 0
        if self._cached is None or self._seating is None:
            return None
        return AnchoredPlan(self._cached.select(_HELD), self._seating.seat_of_shard)

    def ran(self, where: Iterable[tuple[str, int, str]]) -> int:
        """Note where an epoch's tasks ran.

        Args:
            where: operator uid, shard, executor.

        Returns:
            The number of shards that ran on another executor than the last time.
        """
        moved = 0
        ran_on: dict[int, str] = {}
        for uid, shard, executor in where:
            moved += self._homes.get((uid, shard), executor) != executor
            self._homes[(uid, shard)] = executor
            ran_on[shard] = executor
        if self._seating is not None:
            self._seating, lost = self._seating.after(ran_on)
            if lost:
                self._disturbed = True
                _LOG.info("an executor was lost; its shards now run elsewhere")
        return moved

    def close(self) -> None:
        """Give the seats back. The session lives on; if it does not, nothing has to be given back."""
        cached, self._cached = self._cached, None
        if cached is None:
            return
        try:
            cached.unpersist()
        except Exception:
            _LOG.info("the seats went with their session", exc_info=True)

    def _slots(self) -> int:
        """Return how many tasks can run at once: Spark's default parallelism is the number of registered cores."""
        context = self._spark.sparkContext
        return max(1, context.defaultParallelism // int(context.getConf().get("spark.task.cpus", "1") or 1))

    def _has_patience(self) -> bool:
        """Return whether uneven seats are given back once more; count that."""
        now_s = self._clock.monotonic_s()
        if self._early == 0:
            self._early_since_s = now_s
        if self._early >= _EARLY_MAX and now_s - self._early_since_s >= _EARLY_S:
            return False
        self._early += 1
        return True

    def _fill(self, slots: int) -> None:
        """Take seats: in waves of as many tasks as can run at once, so that each executor gets its share and no more.

        All seats at once would go mostly to the executor whose first Python worker is up first, and stay there.
        """
        # Spark considers two frames with the same plan to be the same. The number distinguishes this one from the one
        # before, which is still cached.
        label = f"{self._spark.sparkContext.applicationId}-{next(_ANCHOR)}"
        frame = (
            self._spark.range(0, self._parallelism, 1, 1)
            .selectExpr(f"CAST(id AS INT) AS {_HELD}", f"'{label}' AS __stillstate_anchor")
            .repartitionById(self._parallelism, col(_HELD))
            .persist()
        )
        try:
            context, rows = self._spark.sparkContext, frame.rdd
            executors: list[str] = []
            for first in range(0, self._parallelism, slots):
                wave = list(range(first, min(first + slots, self._parallelism)))
                executors += context.runJob(rows, _who, wave)
            if self._seating is not None and is_refill_early(executors, self._seating, slots) and self._has_patience():
                # Nothing has moved yet. With such seats a new executor would permanently have fewer shards than the
                # others.
                _LOG.info(
                    "seats came out uneven; an executor may not have started yet. Taken again before the next epoch"
                )
                frame.unpersist()
                return
            one_of_each = sorted({executor: seat for seat, executor in enumerate(executors)}.values())
            parallelism, versions = self._wanted()
            look = _Look(self._state_folder, parallelism, dict(versions))
            copies = dict(context.runJob(rows, look, one_of_each))
        except BaseException:
            frame.unpersist()
            raise
        self.close()
        self._cached = frame
        guests = self._seating.guests if self._seating is not None else frozenset[int]()
        seats = seat_shards(executors, copies, parallelism, guests)
        self._seating = Seating(tuple(executors), seats, slots, len(one_of_each))
        self._disturbed, self._early = False, 0
        _LOG.info("%d seats on %d executors", self._parallelism, len(set(executors)))


def _who(rows: Iterable[Any]) -> Iterator[str]:
    """Read the seat's row, which caches it on this executor, and yield the executor's id."""
    for _ in rows:
        yield executor_id()


@dataclass(frozen=True)
class _Look:
    """Finds the copies on the disk of a seat's executor. Pickled."""

    folder: Callable[[], Path]
    parallelism: int
    versions: Mapping[str, ShardVersions]

    def __call__(self, rows: Iterable[Any]) -> Iterator[tuple[str, list[CopyFound]]]:
        for _ in rows:
            yield executor_id(), find_copies(self.folder(), self.parallelism, self.versions)
