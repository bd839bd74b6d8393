"""Whole jobs with everything a `StatefulProcessor` has: restarts, rescaling, backends, changed states."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql import types as T
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from state_runtime import aggregates, query_state
from state_runtime.base.errors import InvalidPipeline, UserCodeError

from .timed import Batch, TimedJob

pytestmark = [pytest.mark.spark, pytest.mark.long]

OUT = "k string, what string, n long"


class Everything(StatefulProcessor):
    """A value, a list, a map and event timers, each of which shows in the output."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.total = handle.getValueState("total", "n long")
        self.recent = handle.getListState("recent", "n long")
        self.counts = handle.getMapState("counts", "n long", "times long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            (total,) = self.total.get() or (0,)
            self.total.update((total + row.n,))
            if row.n % 7 == 0:
                self.recent.clear()
            self.recent.appendValue((row.n,))
            (times,) = self.counts.getValue((row.n % 5,)) or (0,)
            self.counts.updateValue((row.n % 5,), (times + 1,))
            if row.n % 11 == 0:
                self.counts.removeKey(((row.n + 1) % 5,))
            self.handle.registerTimer(int(row.at.timestamp() * 1000) + 15_000)
        yield Row(k=key[0], what="total", n=self.total.get()[0])
        yield Row(k=key[0], what="recent", n=sum(n for (n,) in self.recent.get()))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(k=key[0], what="due", n=expiredTimerInfo.getExpiryTimeInMs() // 1000)
        yield Row(k=key[0], what="counts", n=sum(k * 100 + v for (k,), (v,) in self.counts.iterator()))

    def close(self) -> None:
        pass


def everything(stream: Any) -> Any:
    return stream.key_by("k").transform_with_state(Everything(), OUT, uid="all", time_mode="eventTime")


def some_batches(count: int, seed: int = 3) -> list[Batch]:
    draw = random.Random(seed)
    return [
        [(f"k{draw.randrange(12)}", number * 8 + draw.randrange(10), draw.randrange(50)) for _ in range(25)]
        for number in range(count)
    ]


def states_of(folder: Path) -> dict[str, list[Any]]:
    tables = {}
    for state in ("total", "recent", "counts", "$timers"):
        table = query_state(str(folder / "store"), "timed", "all", state)
        # Where an element of a list stands depends on the epoch that appended it; its order does not.
        names = [n for n in table.column_names if n != "position"]
        tables[state] = sorted(map(repr, table.select(names).to_pylist()))
    return tables


def flat(epochs: list[list[Any]]) -> list[Any]:
    return [row for epoch in epochs for row in epoch]


def test_restarts_rescaling_and_both_backends_give_the_state_and_output_of_one_run(
    spark: SparkSession, tmp_path: Path
) -> None:
    batches = some_batches(6)
    # Every part ends with an idle moment, which moves the watermark: the whole run gets the same moments.
    whole = TimedJob(spark, tmp_path / "whole", everything)
    expected = flat([epoch for batch in batches for epoch in whole.run(batch)])
    parts = TimedJob(spark, tmp_path / "parts", everything, materialize_max_segments=2)
    emitted: list[Any] = []
    steps = ((2, "arrow", False), (4, "rocksdb", False), (4, "rocksdb", True), (4, "arrow", False), (1, "arrow", True))
    for batch, (parallelism, backend, lost) in zip(batches, (*steps, (7, "rocksdb", False)), strict=True):
        if lost:
            shutil.rmtree(tmp_path / "parts" / "local")
        parts.settings |= {"parallelism": parallelism, "backend": backend}
        emitted += flat(parts.run(batch))
    assert sorted(emitted) == sorted(expected)
    assert any(what == "due" for _, what, _ in expected)
    assert states_of(tmp_path / "parts") == states_of(tmp_path / "whole")


class LaterOn(StatefulProcessor):
    """Answers a while after the input, by processing time; keeps what it saw for a moment only."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.seen = handle.getValueState("seen", "n long", 200)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        self.seen.update((sum(row.n for row in rows),))
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 400)
        yield Row(k=key[0], what="seen", n=self.seen.get()[0])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        late = timerValues.getCurrentProcessingTimeInMs() - expiredTimerInfo.getExpiryTimeInMs()
        yield Row(k=key[0], what="late" if late < 0 else "fired", n=1 if self.seen.exists() else 0)

    def close(self) -> None:
        pass


def test_a_timer_by_the_clock_fires_although_no_row_comes(spark: SparkSession, tmp_path: Path) -> None:
    job = TimedJob(
        spark,
        tmp_path,
        lambda stream: stream.key_by("k").transform_with_state(LaterOn(), OUT, uid="u", time_mode="processingTime"),
    )
    job.forever = True
    fired: set[Any] = set()

    def all_fired(rows: list[Any]) -> bool:
        fired.update(row for row in rows if row[1] == "fired")
        return len(fired) == 2

    job.until = all_fired
    assert job.run([("a", 0, 1), ("b", 0, 2)])[0] == [("a", "seen", 1), ("b", "seen", 2)]
    # The values had expired by then, and nothing is due any more.
    assert fired == {("a", "fired", 0), ("b", "fired", 0)}
    assert job.manifest().operators[0].next_due_ms is None


class Sum(StatefulProcessor):
    """One state, whose columns and name the tests change."""

    schema: Any = "n int, gone string"
    states: tuple[str, ...] = ("sum",)
    drops: tuple[str, ...] = ()

    def init(self, handle: Any) -> None:
        self.held = [handle.getValueState(name, self.schema) for name in self.states]
        for name in self.drops:
            handle.deleteIfExists(name)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        total = sum(row.n for row in rows)
        for state in self.held:
            old = state.get()
            state.update((total + (old[0] if old else 0), *(old or (None, "new"))[1:]))
            yield Row(k=key[0], what=str(state.get()[1:]), n=state.get()[0])

    def close(self) -> None:
        pass


class WidenedSum(Sum):
    schema = T.StructType(
        [
            T.StructField("n", T.LongType()),
            T.StructField("added", T.StringType()),
            T.StructField("given", T.IntegerType(), True, {"EXISTS_DEFAULT": "5"}),
        ]
    )

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n, added, given = self.held[0].get()
        self.held[0].update((n + 2**40, added, given))
        yield Row(k=key[0], what=f"{added} {given}", n=self.held[0].get()[0])


class TwoSums(Sum):
    states = ("sum", "second")


class NoSum(Sum):
    states = ("second",)


class DropsSum(NoSum):
    drops = ("sum",)


def summing(processor: StatefulProcessor) -> Callable[[Any], Any]:
    return lambda stream: stream.key_by("k").transform_with_state(processor, OUT, uid="u")


def test_columns_of_a_state_are_widened_added_and_dropped_over_a_restart(spark: SparkSession, tmp_path: Path) -> None:
    job = TimedJob(spark, tmp_path, summing(Sum()))
    assert job.run([("a", 0, 1)]) == [[("a", "('new',)", 1)]]
    job.build = summing(WidenedSum())
    assert job.run([("a", 0, 1)]) == [[("a", "None 5", 1 + 2**40)]]
    # And again from a local copy, which has the new columns by now.
    assert job.run([("a", 0, 1)]) == [[("a", "None 5", 1 + 2**41)]]
    assert job.progress[0].primary_restores == 0
    job.build = summing(Sum())
    with pytest.raises(InvalidPipeline, match=r"operator 'u', state 'sum'.*'n' is int now, and bigint"):
        job.run([("a", 0, 1)])


@pytest.mark.parametrize("how", ["flag", "processor"])
def test_a_state_is_given_up_only_if_that_is_said_and_does_not_come_back(
    spark: SparkSession, tmp_path: Path, how: str
) -> None:
    job = TimedJob(spark, tmp_path, summing(TwoSums()), materialize_max_segments=2)
    job.run([("a", 0, 1)], [("b", 0, 1)])
    job.build = summing(NoSum())
    with pytest.raises(InvalidPipeline, match=r"state 'sum'.*no longer has it.*deleteIfExists"):
        job.run([("a", 0, 1)])
    job.allow_dropped_state = how == "flag"
    job.build = summing(NoSum() if how == "flag" else DropsSum())
    assert flat(job.run([("c", 0, 1)])) == [("a", "('new',)", 2), ("c", "('new',)", 1)]
    job.allow_dropped_state = False
    job.build = summing(TwoSums())
    assert flat(job.run([("a", 0, 5)])) == [("a", "('new',)", 5), ("a", "('new',)", 7)]


def test_an_aggregate_keeps_its_meaning_under_its_name(spark: SparkSession, tmp_path: Path) -> None:
    def counting(**more: Any) -> Callable[[Any], Any]:
        return lambda stream: stream.key_by("k").aggregate(uid="u", n=aggregates.count(), **more)

    job = TimedJob(spark, tmp_path, counting())
    assert job.run([("a", 0, 5), ("a", 0, 7)]) == [[("a", 2)]]
    job.build = counting(total=aggregates.sum("n"))
    assert job.run([("a", 0, 9)]) == [[("a", 3, 9)]]
    job.build = lambda stream: stream.key_by("k").aggregate(uid="u", n=aggregates.sum("n"))
    with pytest.raises(InvalidPipeline, match=r"'n' is sum\(n\) now, and count\(\*\)"):
        job.run([("a", 0, 1)])


class FromInitial(Sum):
    schema = "n int, gone string"

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.held[0].update((initialState.start, "initial"))


def test_the_initial_state_comes_before_the_first_input_and_only_once(spark: SparkSession, tmp_path: Path) -> None:
    initial = spark.createDataFrame([("a", 100), ("z", 900)], "k string, start int")
    job = TimedJob(
        spark,
        tmp_path,
        lambda stream: stream.key_by("k").transform_with_state(FromInitial(), OUT, uid="u", initial_state=initial),
    )
    assert job.run([("a", 0, 1), ("b", 0, 1)]) == [[("a", "('initial',)", 101), ("b", "('new',)", 1)]]
    assert job.run([("a", 0, 1), ("z", 0, 1)]) == [[("a", "('initial',)", 102), ("z", "('initial',)", 901)]]


class Fails(Sum):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        if key[0] == "bad":
            raise ValueError("no luck")
        yield from super().handleInputRows(key, rows, timerValues)


def test_an_exception_of_the_user_names_operator_shard_and_key_and_commits_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    job = TimedJob(spark, tmp_path, summing(Fails()))
    job.run([("a", 0, 1)])
    before = job.manifest().source.batch_id
    with pytest.raises(
        UserCodeError,
        match=r"operator 'u', shard \d, key hash [0-9a-f]{16}.*ValueError: no luck \(.*test_engine.py, line \d+, in handleInputRows",
    ):
        job.run([("a", 0, 1), ("bad", 0, 1)])
    assert job.manifest().source.batch_id == before
    job.build = summing(Sum())
    assert flat(job.run()) == [("a", "('new',)", 2), ("bad", "('new',)", 1)]
