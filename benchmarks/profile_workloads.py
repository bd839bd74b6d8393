"""What `benchmarks.profile_tasks` runs: operators, and the rows that one shard of each gets in an epoch; no Spark job.

The shapes are those of `benchmarks.engine` and `benchmarks.nexmark`, with half of a batch's rows and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
import pyarrow as pa

from benchmarks import profile_users
from benchmarks.processors import OUTPUT_SCHEMA, STATE_SCHEMA, RunningTotalsVectorized
from benchmarks.profile_users import longs
from state_runtime import aggregates, windows
from state_runtime.base.joining import JoinTerms
from state_runtime.processors.builtin.aggregate import AggregateOperator, plan_aggregates
from state_runtime.processors.builtin.deduplicate import SEEN, Deduplicate
from state_runtime.processors.builtin.interval_join import IntervalJoinOperator
from state_runtime.processors.builtin.interval_join_plan import plan_interval_join
from state_runtime.processors.builtin.latest import LATEST, LatestBy
from state_runtime.processors.builtin.windows import plan_windows
from state_runtime.processors.operator import EpochClock, Operator
from state_runtime.processors.sides import LEFT_COLUMN, RIGHT_COLUMN, SIDE_COLUMN
from state_runtime.processors.user.vectorized import VectorizedOperator
from state_runtime.state.table import StateSchema, Time

__all__ = ["Given", "HandlerInput", "TaskWorkload", "task_workload"]

Numbers = np.ndarray[Any, Any]
Random = np.random.Generator

_INTEGER, _TIME = pa.int64(), pa.timestamp("us", "UTC")
_KEY: Final = pa.schema([("key", _INTEGER)])
_FIRST_S: Final = 1_700_000_000
_URLS: Final = pa.array([f"https://www.nexmark.com/{n}/{n * 7 % 91}/item.htm?query=1" for n in range(9_999)])


class HandlerInput(StrEnum):
    """Which operator."""

    ROW = "row"
    LIST = "list"
    MAP = "map"
    TIMERS = "timers"
    LARGE_MAP = "large-map"
    PANDAS = "pandas"
    VECTORIZED = "vectorized"
    AGGREGATE = "aggregate"
    LATEST = "latest"
    DEDUPLICATE = "deduplicate"
    WINDOWS = "windows"
    SESSIONS = "sessions"
    JOIN = "join"
    DISTINCT = "distinct"


@dataclass(frozen=True)
class Given:
    """The rows of an epoch.

    Attributes:
        keys: of each row a number for its key, which stands for the key's hash.
        columns: of the input, the key columns too.
    """

    keys: Numbers
    columns: Mapping[str, pa.Array]


@dataclass(frozen=True)
class TaskWorkload:
    """An operator and its input.

    Attributes:
        given: the rows of an epoch: of a random generator, the epoch's number from 0, rows and keys.
        clock: of an epoch.
        filled: every key is inserted once before anything is measured.
        settled: epochs until as much is removed as comes.
        rows, keys: of a whole batch and the whole state, where nobody asks for others.
    """

    operator: Operator
    given: Callable[[Random, int, int, int], Given]
    clock: Callable[[int], EpochClock] = lambda epoch: EpochClock(0, epoch=epoch + 1)
    filled: bool = False
    settled: int = 2
    rows: int = 100_000
    keys: int = 200_000


def task_workload(flavour: HandlerInput) -> TaskWorkload:
    """The workload of a name."""
    return _WORKLOADS[flavour]()


# --- keys and amounts ------------------------------------------------------------------------------------------------


def _amounts(random: Random, epoch: int, rows: int, keys: int) -> Given:
    drawn = random.integers(0, keys, rows, dtype=np.int64)
    return Given(drawn, {"key": pa.array(drawn), "amount": pa.array(random.integers(0, 1_000, rows))})


def _aggregate() -> TaskWorkload:
    functions = {
        "n": aggregates.count(),
        "total": aggregates.sum("amount"),
        "lowest": aggregates.min("amount"),
        "highest": aggregates.max("amount"),
        "mean": aggregates.avg("amount"),
    }
    plan = plan_aggregates(functions, pa.schema([*_KEY, ("amount", _INTEGER)]), "totals")
    operator = AggregateOperator("totals", ("key",), "key long", _KEY, plan, "")
    return TaskWorkload(operator, _amounts, filled=True, rows=200_000, keys=2_000_000)


def _large_map() -> TaskWorkload:
    """As NEXMark's q15: one key with all rows, and two maps that grow by what is new in each epoch."""

    def given(random: Random, epoch: int, rows: int, ids: int) -> Given:
        count = ids if epoch == 0 else rows
        keys = np.zeros(count, dtype=np.int64)
        return Given(keys, {"key": pa.array(keys), **profile_users.day_columns(random, epoch, count, ids)})

    return TaskWorkload(profile_users.day_statistics(), given, settled=6, rows=184_000, keys=200_000)


def _timers() -> TaskWorkload:
    """Batches of a second; a key's timer is due three seconds after its last row."""
    return TaskWorkload(profile_users.timeouts(), _events, _clock(1, 1), settled=10)


def _vectorized() -> TaskWorkload:
    operator = _of_many_keys(RunningTotalsVectorized(), "totals", longs(STATE_SCHEMA), longs(OUTPUT_SCHEMA))
    return TaskWorkload(operator, _amounts, filled=True)


def _of_many_keys(
    processor: Any, state: str, values: pa.Schema, output: pa.Schema, *, kind: Any = "vectorized", time: Time = ""
) -> VectorizedOperator:
    return VectorizedOperator(
        uid="totals",
        key_columns=("key",),
        key_ddl="key long",
        key_schema=_KEY,
        output_schema=output,
        state_schemas={state: StateSchema(_KEY, values, time=time)},
        state_ddl={state: ""},
        kind=kind,
        processor=processor,
        output_rows_per_batch=65_536,
        event_time="ts" if time else "",
    )


# --- events ----------------------------------------------------------------------------------------------------------


def _clock(batch_s: int, delay_s: int) -> Callable[[int], EpochClock]:
    """Of batches of so many seconds: the watermark is that of the rows before."""

    def clock(epoch: int) -> EpochClock:
        watermark_ms = (_FIRST_S + epoch * batch_s - delay_s) * 1_000
        return EpochClock(
            watermark_ms, watermark_ms if epoch else 0, watermark_ms - batch_s * 1_000 if epoch > 1 else 0, epoch + 1
        )

    return clock


def _times(random: Random, epoch: int, rows: int, batch_s: int) -> pa.Array:
    micros = np.sort(random.integers(0, batch_s * 1_000_000, rows)) + (_FIRST_S + epoch * batch_s) * 1_000_000
    return pa.array(micros, _TIME)


def _events(random: Random, epoch: int, rows: int, keys: int) -> Given:
    given = _amounts(random, epoch, rows, keys)
    return Given(given.keys, {**given.columns, "ts": _times(random, epoch, rows, 1)})


def _windows(
    window: Any, batch_s: int, delay_s: int, given: Any, *, settled: int, rows: int, keys: int
) -> TaskWorkload:
    functions = {"n": aggregates.count(), "total": aggregates.sum("amount")}
    operator = plan_windows(
        uid="windows",
        key_columns=("key",),
        key_ddl="key long",
        key_schema=_KEY,
        schema=pa.schema([*_KEY, ("amount", _INTEGER), ("ts", _TIME)]),
        time_column="ts",
        window=window,
        aggregates=functions,
        mode="append",
        ddl=lambda schema: "",
    )
    return TaskWorkload(operator, given, _clock(batch_s, delay_s), settled=settled, rows=rows, keys=keys)


def _sliding() -> TaskWorkload:
    window = windows.sliding("10 seconds", "1 second")
    return _windows(window, 1, 2, _events, settled=14, rows=200_000, keys=20_000)


def _sessions() -> TaskWorkload:
    """As NEXMark's q11: half of the bids come from few people."""

    def given(random: Random, epoch: int, rows: int, keys: int) -> Given:
        hot = random.random(rows) < 0.5
        drawn = np.where(hot, random.integers(0, keys // 10, rows), random.integers(0, keys, rows)) + epoch * keys // 25
        columns = {"key": pa.array(drawn), "amount": pa.array(random.integers(0, 1_000, rows))}
        return Given(drawn, {**columns, "ts": _times(random, epoch, rows, 10)})

    return _windows(windows.session("10 seconds"), 10, 4, given, settled=6, rows=92_000, keys=50_000)


def _deduplicate() -> TaskWorkload:
    """Within five seconds; a tenth of the rows comes again a second later."""

    def given(random: Random, epoch: int, rows: int, keys: int) -> Given:
        new = rows * 9 // 10
        again = (epoch - 1) * new + random.choice(new, rows - new, replace=False)
        drawn = random.permutation(np.concatenate([np.arange(epoch * new, (epoch + 1) * new), again]))
        return Given(drawn, {"key": pa.array(drawn), "ts": _times(random, epoch, rows, 1)})

    output = pa.schema([*_KEY, ("ts", _TIME)])
    processor = Deduplicate("ts", 5_000)
    operator = _of_many_keys(processor, SEEN, pa.schema([]), output, kind="deduplicate", time="due")
    return TaskWorkload(operator, given, _clock(1, 5), settled=14, rows=200_000)


def _latest() -> TaskWorkload:
    """As NEXMark's q18: bids by bidder and auction, most pairs new, with a wide payload."""

    def given(random: Random, epoch: int, rows: int, keys: int) -> Given:
        drawn = random.integers(0, keys, rows)
        urls = _URLS.take(pa.array(random.integers(0, len(_URLS), rows)))
        price = pa.array(random.integers(0, 1_000_000, rows))
        return Given(
            drawn, {"key": pa.array(drawn), "ts": _times(random, epoch, rows, 10), "price": price, "url": urls}
        )

    values = pa.schema([("ts", _TIME), ("price", _INTEGER), ("url", pa.string())])
    output = pa.schema([*_KEY, *values])
    operator = _of_many_keys(LatestBy(("ts", "price", "url")), LATEST, values, output, kind="latest-by")
    return TaskWorkload(operator, given, settled=10, rows=92_000, keys=2_000_000)


def _join() -> TaskWorkload:
    """Right rows within two seconds after left ones."""
    sides = {side: pa.schema([(f"{side}_ts", _TIME), (f"{side}_amount", _INTEGER)]) for side in ("left", "right")}
    plan = plan_interval_join(
        pa.schema([*_KEY, *sides["left"]]),
        pa.schema([("other", _INTEGER), *sides["right"]]),
        left_keys=("key",),
        right_keys=("other",),
        left_time="left_ts",
        right_time="right_ts",
        terms=JoinTerms(how="inner", lower_us=0, upper_us=2_000_000),
        uid="join",
    )

    def given(random: Random, epoch: int, rows: int, keys: int) -> Given:
        drawn = random.integers(0, keys, rows, dtype=np.int64)
        is_right = random.integers(0, 2, rows).astype(np.bool_)
        values = [_times(random, epoch, rows, 1), pa.array(random.integers(0, 1_000, rows))]
        structs = [
            pa.StructArray.from_arrays(values, fields=list(schema), mask=pa.array(mask))
            for schema, mask in zip(sides.values(), (is_right, ~is_right))
        ]
        columns = {SIDE_COLUMN: pa.array(is_right.astype(np.int32)), LEFT_COLUMN: structs[0], RIGHT_COLUMN: structs[1]}
        return Given(drawn, {"key": pa.array(drawn), **columns})

    operator = IntervalJoinOperator("join", ("key",), "key long", plan, {"left": "", "right": ""}, 65_536)
    return TaskWorkload(operator, given, _clock(1, 2), settled=10, rows=200_000, keys=500_000)


def _distinct() -> TaskWorkload:
    """As NEXMark's q16: half of the bids come through four of ten thousand channels."""
    functions = {
        "n": aggregates.count(),
        "bidders": aggregates.count_distinct_approx("bidder"),
        "auctions": aggregates.count_distinct_approx("auction"),
    }
    key = pa.schema([("channel", pa.string())])
    columns = pa.schema([*key, ("bidder", _INTEGER), ("auction", _INTEGER)])
    plan = plan_aggregates(functions, columns, "channels")

    def given(random: Random, epoch: int, rows: int, keys: int) -> Given:
        drawn = np.where(random.random(rows) < 0.5, random.integers(0, 2, rows), random.integers(2, keys, rows))
        names = pa.array([f"channel-{n}" for n in range(keys)])
        bidder, auction = (pa.array(random.integers(0, of, rows) + epoch * 2_000) for of in (50_000, 20_000))
        return Given(drawn, {"channel": names.take(pa.array(drawn)), "bidder": bidder, "auction": auction})

    operator = AggregateOperator("channels", ("channel",), "channel string", key, plan, "")
    return TaskWorkload(operator, given, settled=10, rows=92_000, keys=10_000)


_WORKLOADS: Final[Mapping[HandlerInput, Callable[[], TaskWorkload]]] = {
    HandlerInput.ROW: lambda: TaskWorkload(profile_users.row_totals(), _amounts, filled=True),
    HandlerInput.LIST: lambda: TaskWorkload(profile_users.appends(), _amounts, filled=True),
    HandlerInput.MAP: lambda: TaskWorkload(profile_users.totals_by_kind(), _amounts, filled=True),
    HandlerInput.TIMERS: _timers,
    HandlerInput.LARGE_MAP: _large_map,
    HandlerInput.PANDAS: lambda: TaskWorkload(profile_users.in_pandas(), _amounts, filled=True),
    HandlerInput.VECTORIZED: _vectorized,
    HandlerInput.AGGREGATE: _aggregate,
    HandlerInput.LATEST: _latest,
    HandlerInput.DEDUPLICATE: _deduplicate,
    HandlerInput.WINDOWS: _sliding,
    HandlerInput.SESSIONS: _sessions,
    HandlerInput.JOIN: _join,
    HandlerInput.DISTINCT: _distinct,
}
