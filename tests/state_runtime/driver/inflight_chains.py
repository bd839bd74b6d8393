"""The chains of operators that `inflight_world.py` plays: event-time timers and windows, aggregates that are emitted once, a join
of two streams, processing time, initial state.

A chain says what its operators are, what input a seed draws for it, and what of its output and state must be the same however
many epochs a batch took.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from state_runtime import aggregates
from state_runtime.base.joining import JoinTerms
from state_runtime.pipeline.watermark import WatermarkColumn
from state_runtime.processors.builtin.aggregate import AggregateOperator, plan_aggregates
from state_runtime.processors.builtin.interval_join import IntervalJoinOperator
from state_runtime.processors.builtin.interval_join_plan import plan_interval_join
from state_runtime.processors.builtin.windows import plan_windows
from state_runtime.processors.declared.windows import tumbling
from state_runtime.processors.operator import Operator
from state_runtime.processors.sides import LEFT_COLUMN, RIGHT_COLUMN, SIDE_COLUMN
from state_runtime.processors.user.handle import StateDeclaration, layout_of
from state_runtime.processors.user.stateful import StatefulProcessorOperator

__all__ = ["ALARMS", "BALANCES", "CHAINS", "JOINS", "ONCE", "STEPS", "Chain", "Input"]

TIME = pa.timestamp("us", "UTC")
DELAY_MS = 2_000
TICK_MS = 10_000
"""From one batch to the next, where processing time counts."""
TTL_MS = 15_000
"""Between one tick and two, whenever in the first part of its tick a batch is processed."""

Input = tuple[Any, ...]
Rows = Mapping[str, Sequence[Mapping[str, Any]]]
"""By sink, in the order of the epochs; by state, sorted."""


@dataclass(frozen=True)
class Chain:
    """A pipeline, its input, and what is compared.

    Attributes:
        sinks: one of each operator, named as it is.
        record: a batch's rows as Spark hands them on.
        event_times: the highest of a batch, by column.
        batches: what a seed draws.
        seen: what readers see, from the rows of each sink, and the states by `uid.state`; the same for every way to the end.
        tick_ms: from one batch's processing time to the next.
        ticks: after the last batch.
        initial: by operator, the rows that its state begins with.
    """

    name: str
    operators: Callable[[], tuple[Operator, ...]]
    record: Callable[[Sequence[Input]], pa.RecordBatch]
    watermarks: tuple[WatermarkColumn, ...]
    event_times: Callable[[Sequence[Input]], dict[str, int | None]]
    batches: Callable[[random.Random], list[list[Input]]]
    seen: Callable[[Rows, Rows], dict[str, Any]]
    tick_ms: int = 1
    ticks: int = 1
    initial: Mapping[str, pa.RecordBatch] = field(default_factory=dict)

    @property
    def sinks(self) -> tuple[str, ...]:
        return tuple(operator.uid for operator in self.operators())


def all_of(rows: Sequence[Mapping[str, Any]], without: Sequence[str] = ("epoch",)) -> list[str]:
    return sorted(str({name: value for name, value in row.items() if name not in without}) for row in rows)


def newest_of(rows: Sequence[Mapping[str, Any]], key: str, *values: str) -> dict[Any, Any]:
    return {row[key]: tuple(row[name] for name in values) for row in rows}


def totals(schema: pa.Schema, group: str, **planned: Any) -> AggregateOperator:
    plan = plan_aggregates(planned, schema, "totals")
    groups = pa.schema([schema.field(group)])
    return AggregateOperator(
        "totals", (group,), f"`{group}` string", groups, plan, ", ".join(f"`{name}` bigint" for name in planned)
    )


def batches_of(
    draw: random.Random, row: Callable[[str | None, str, int, int], Input], nulls: float = 0.0
) -> list[list[Input]]:
    """Event time goes on, with late rows, quiet groups, a hot key."""
    now_ms, batches = 10_000, []
    for _ in range(draw.randrange(2, 7)):
        batch = []
        for _ in range(draw.randrange(0, 25)):
            key: str | None = "hot" if draw.random() < 0.3 else f"k{draw.randrange(9)}"
            if nulls and draw.random() < nulls:
                key = None
            batch.append(
                row(key, f"g{draw.randrange(4)}", draw.randrange(9), max(0, now_ms - draw.randrange(0, 6_000)))
            )
        batches.append(batch)
        now_ms += draw.choice([0, 500, 4_000, 15_000])
    return batches


# --- rows (k, g, n, at) → a processor with event-time timers, by k → windows of 10 s by g, append → totals by g ----

EVENTS = pa.schema([("k", pa.string()), ("g", pa.string()), ("n", pa.int64()), ("at", TIME)])
STEPS_OUT = pa.schema([*EVENTS, ("what", pa.string())])


class Steps(StatefulProcessor):
    """Numbers the rows of each key, and says how many there were a while after the last of them; and once more with the
    next batch, by a timer that is due already when it is set."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.seen = handle.getValueState("seen", "n long, g string, due long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n, _, due = self.seen.get() or (0, "", 0)
        latest, g = 0, ""
        for row in rows:
            n += 1
            latest, g = max(latest, row.n), row.g
            yield Row(k=key[0], g=row.g, n=n, at=row.at, what="row")
        wanted = timerValues.getCurrentWatermarkInMs() // 1000 * 1000 + 5_000 + latest % 3 * 1000
        if wanted != due:
            if due:
                self.handle.deleteTimer(due)
            self.handle.registerTimer(wanted)
        self.seen.update((n, g, wanted))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        n, g, due = self.seen.get()
        at = datetime.fromtimestamp(timerValues.getCurrentWatermarkInMs() / 1000 + 1, UTC)
        yield Row(k=key[0], g=g, n=n, at=at, what=f"silent {due}")
        again = 0
        if due % 1000 == 0:
            again = max(1, timerValues.getCurrentWatermarkInMs() // 1000 * 1000 - 1)
            self.handle.registerTimer(again)
        self.seen.update((n, g, again))

    def close(self) -> None:
        pass


def steps_operators() -> tuple[Operator, ...]:
    keys = pa.schema([("k", pa.string())])
    seen = layout_of(
        StateDeclaration("seen", "value", "", None, 0),
        keys,
        pa.schema([("n", pa.int64()), ("g", pa.string()), ("due", pa.int64())]),
        None,
    )
    steps = StatefulProcessorOperator(
        uid="steps", key_columns=("k",), key_ddl="`k` string", key_schema=keys, output_schema=STEPS_OUT,
        state_schemas={"seen": seen}, state_ddl={"seen": "`n` bigint, `g` string, `due` bigint"}, state_kinds={"seen": "value"},
        processor=Steps(), pandas=False, output_rows_per_batch=4, time_mode="event", event_time_column="at",
        output_event_time="at", slice_keys_max=3, slice_rows_max=5,
    )  # fmt: skip
    windows = plan_windows(
        uid="windows", key_columns=("g",), key_ddl="`g` string", key_schema=pa.schema([("g", pa.string())]),
        schema=STEPS_OUT, time_column="at", window=tumbling("10 seconds"), mode="append",
        ddl=lambda schema: ", ".join(f"`{n}` bigint" for n in schema.names),
        aggregates={"rows": aggregates.count(), "most": aggregates.max("n")},
    )  # fmt: skip
    return (
        steps,
        windows,
        totals(windows.output_schema, "g", windows=aggregates.count(), rows=aggregates.sum("rows")),
    )


def events(rows: Sequence[Input]) -> pa.RecordBatch:
    columns = [[row[n] for row in rows] for n in range(3)]
    return pa.RecordBatch.from_arrays(
        [
            *(pa.array(c, f.type) for c, f in zip(columns, EVENTS)),
            pa.array([row[3] and row[3] * 1000 for row in rows], TIME),
        ],
        schema=EVENTS,
    )


def steps_seen(sinks: Rows, states: Rows) -> dict[str, Any]:
    return {
        "steps": all_of(sinks["steps"]),
        "windows": all_of(sinks["windows"]),
        "totals": newest_of(sinks["totals"], "g", "windows", "rows"),
        **{name: sorted(map(str, rows)) for name, rows in states.items()},
    }


STEPS = Chain(
    name="timers and windows by event time",
    operators=steps_operators,
    record=events,
    watermarks=(WatermarkColumn("at", "", DELAY_MS),),
    event_times=lambda rows: {"at": max((row[3] for row in rows), default=None)},
    batches=lambda draw: batches_of(draw, lambda *row: row),
    seen=steps_seen,
)


# --- rows (k, g, n, at) → aggregates by g and at, each once → windows of 10 s by g, append → totals by g ------------


def once_operators() -> tuple[Operator, ...]:
    keys = pa.schema([EVENTS.field("g"), EVENTS.field("at")])
    plan = plan_aggregates({"rows": aggregates.count(), "most": aggregates.max("n")}, EVENTS, "once")
    ddl = "`rows` bigint, `most` bigint"
    once = AggregateOperator("once", ("g", "at"), "`g` string, `at` timestamp", keys, plan, ddl, "at")
    windows = plan_windows(
        uid="windows", key_columns=("g",), key_ddl="`g` string", key_schema=pa.schema([EVENTS.field("g")]),
        schema=once.output_schema, time_column="at", window=tumbling("10 seconds"), mode="append",
        ddl=lambda schema: ", ".join(f"`{n}` bigint" for n in schema.names),
        aggregates={"times": aggregates.count(), "rows": aggregates.sum("rows")},
    )  # fmt: skip
    return (
        once,
        windows,
        totals(windows.output_schema, "g", times=aggregates.sum("times"), rows=aggregates.sum("rows")),
    )


def once_seen(sinks: Rows, states: Rows) -> dict[str, Any]:
    return {
        "once": all_of(sinks["once"]),
        "windows": all_of(sinks["windows"]),
        "totals": newest_of(sinks["totals"], "g", "times", "rows"),
        **{name: sorted(map(str, rows)) for name, rows in states.items()},
    }


def once_batches(draw: random.Random) -> list[list[Input]]:
    """Many rows at the same second, some without a time."""
    return batches_of(draw, lambda k, g, n, at: (k, g, n, None if draw.random() < 0.03 else at // 1000 * 1000))


ONCE = Chain(
    name="aggregates by event time",
    operators=once_operators,
    record=events,
    watermarks=(WatermarkColumn("at", "", DELAY_MS),),
    event_times=lambda rows: {"at": max((row[3] for row in rows if row[3] is not None), default=None)},
    batches=once_batches,
    seen=once_seen,
)


# --- two streams (k, g, l_n, l_at) and (k, r_n, r_at) → left outer join within -3 s … 4 s → totals by g --------------

LEFT = pa.schema([("k", pa.string()), ("g", pa.string()), ("l_n", pa.int64()), ("l_at", TIME)])
RIGHT = pa.schema([("k", pa.string()), ("r_n", pa.int64()), ("r_at", TIME)])
UNITED = pa.schema(
    [
        ("k", pa.string()),
        (SIDE_COLUMN, pa.int32()),
        (LEFT_COLUMN, pa.struct(list(LEFT)[1:])),
        (RIGHT_COLUMN, pa.struct(list(RIGHT)[1:])),
    ]
)


def joins_operators() -> tuple[Operator, ...]:
    plan = plan_interval_join(
        LEFT, RIGHT, left_keys=["k"], right_keys=["k"], left_time="l_at", right_time="r_at",
        terms=JoinTerms(how="left-outer", lower_us=-3_000_000, upper_us=4_000_000), uid="matches",
    )  # fmt: skip
    ddl = {"left": "`g` string, `l_n` bigint, `l_at` timestamp", "right": "`r_n` bigint, `r_at` timestamp"}
    join = IntervalJoinOperator("matches", ("k",), "`k` string", plan, ddl, 4)
    return join, totals(plan.output_schema, "g", rows=aggregates.count(), matched=aggregates.sum("r_n"))


def united(rows: Sequence[Input]) -> pa.RecordBatch:
    """Rows (side, k, g, n, at) as `pipeline/sources.py` unites the streams."""
    found = [
        {
            "k": k,
            SIDE_COLUMN: side,
            LEFT_COLUMN: None if side else {"g": g, "l_n": n, "l_at": at * 1000},
            RIGHT_COLUMN: {"r_n": n, "r_at": at * 1000} if side else None,
        }
        for side, k, g, n, at in rows
    ]
    return pa.RecordBatch.from_pylist(found, schema=UNITED)


def joins_event_times(rows: Sequence[Input]) -> dict[str, int | None]:
    return {
        f"{column}.{time}": max((row[4] for row in rows if row[0] == side), default=None)
        for side, column, time in ((0, LEFT_COLUMN, "l_at"), (1, RIGHT_COLUMN, "r_at"))
    }


def joins_seen(sinks: Rows, states: Rows) -> dict[str, Any]:
    """A stored row's place has the epoch in which it came."""
    return {
        "matches": all_of(sinks["matches"]),
        "totals": newest_of(sinks["totals"], "g", "rows", "matched"),
        **{name: all_of(rows, ["entry"]) for name, rows in states.items()},
    }


def joins_batches(draw: random.Random) -> list[list[Input]]:
    return batches_of(draw, lambda k, g, n, at: (draw.randrange(2), k, g, n, at), nulls=0.05)


JOINS = Chain(
    name="a join of two streams",
    operators=joins_operators,
    record=united,
    watermarks=(
        WatermarkColumn(f"{LEFT_COLUMN}.l_at", "", DELAY_MS),
        WatermarkColumn(f"{RIGHT_COLUMN}.r_at", "", DELAY_MS),
    ),
    event_times=joins_event_times,
    batches=joins_batches,
    seen=joins_seen,
)


# --- rows (k, g, n) → a processor with processing-time timers and a TTL, by k → another one by g → totals by g ------

ALARMS_OUT = pa.schema(
    [("k", pa.string()), ("g", pa.string()), ("n", pa.int64()), ("what", pa.string()), ("early", pa.bool_())]
)
DIGESTS_OUT = pa.schema([("g", pa.string()), ("rows", pa.int64()), ("early", pa.bool_())])


class Alarms(StatefulProcessor):
    """Numbers the rows of each key, and those of a while (a TTL); a tick or two after the last of them it says how many.

    Times are those of ticks, so that they are the same in each epoch of a batch.
    """

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.seen = handle.getValueState("seen", "n long, g string, due long")
        self.recent = handle.getValueState("recent", "n long", ttlDurationMs=TTL_MS)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n, _, due = self.seen.get() or (0, "", 0)
        (recent,) = self.recent.get() or (0,)
        latest, g = 0, ""
        for row in rows:
            n, recent = n + 1, recent + 1
            latest, g = max(latest, row.n), row.g
            yield Row(k=key[0], g=row.g, n=n, what=f"row {recent}", early=False)
        wanted = timerValues.getCurrentProcessingTimeInMs() // TICK_MS * TICK_MS + (1 + latest % 2) * TICK_MS
        if wanted != due:
            if due:
                self.handle.deleteTimer(due)
            self.handle.registerTimer(wanted)
        self.seen.update((n, g, wanted))
        self.recent.update((recent,))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        n, g, due = self.seen.get()
        early = timerValues.getCurrentProcessingTimeInMs() < due or expiredTimerInfo.getExpiryTimeInMs() != due
        yield Row(k=key[0], g=g, n=n, what=f"silent {due}", early=early)
        self.seen.update((n, g, 0))

    def close(self) -> None:
        pass


class Digests(StatefulProcessor):
    """Counts the rows of each group until the next tick, says how many, and begins anew."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.held = handle.getValueState("held", "n long, due long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n, due = self.held.get() or (0, 0)
        n += sum(1 for _ in rows)
        if not due:
            due = timerValues.getCurrentProcessingTimeInMs() // TICK_MS * TICK_MS + TICK_MS
            self.handle.registerTimer(due)
        self.held.update((n, due))
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        n, due = self.held.get()
        yield Row(g=key[0], rows=n, early=timerValues.getCurrentProcessingTimeInMs() < due)
        self.held.update((0, 0))

    def close(self) -> None:
        pass


def by_processing_time(
    uid: str, key: str, output: pa.Schema, processor: Any, states: Mapping[str, pa.Schema], ttls_ms: Mapping[str, int]
) -> StatefulProcessorOperator:
    keys = pa.schema([(key, pa.string())])
    layouts = {
        name: layout_of(StateDeclaration(name, "value", "", None, ttls_ms.get(name, 0)), keys, values, None)
        for name, values in states.items()
    }
    ddl = {
        name: ", ".join(f"`{f.name}` {'bigint' if f.type == pa.int64() else 'string'}" for f in values)
        for name, values in states.items()
    }
    return StatefulProcessorOperator(
        uid=uid, key_columns=(key,), key_ddl=f"`{key}` string", key_schema=keys, output_schema=output, state_schemas=layouts,
        state_ddl=ddl, state_kinds=dict.fromkeys(states, "value"), ttls_ms=ttls_ms, processor=processor, pandas=False,
        output_rows_per_batch=4, time_mode="processing", slice_keys_max=3, slice_rows_max=5,
    )  # fmt: skip


def alarms_operators() -> tuple[Operator, ...]:
    number = pa.int64()
    seen = pa.schema([("n", number), ("g", pa.string()), ("due", number)])
    alarms = by_processing_time(
        "alarms", "k", ALARMS_OUT, Alarms(), {"seen": seen, "recent": pa.schema([("n", number)])}, {"recent": TTL_MS}
    )
    held = {"held": pa.schema([("n", number), ("due", number)])}
    digests = by_processing_time("digests", "g", DIGESTS_OUT, Digests(), held, {})
    return (
        alarms,
        digests,
        totals(DIGESTS_OUT, "g", rows=aggregates.sum("rows")),
    )


def alarms_seen(sinks: Rows, states: Rows) -> dict[str, Any]:
    """Of the first operator all but the TTL's state, which is looked at through its rows. How many digests there are is a
    matter of when rows come; each row is in one, or waits for the next."""
    assert not any(row["early"] for name in ("alarms", "digests") for row in sinks[name]), (
        "a timer fired before its time"
    )
    digests: Counter[str] = Counter()
    for row in sinks["digests"]:
        digests[row["g"]] += row["rows"]
    assert newest_of(sinks["totals"], "g", "rows") == {g: (rows,) for g, rows in digests.items()}
    for row in states["digests.held"]:
        digests[row["key.g"]] += row["value.n"]
    return {
        "alarms": all_of(sinks["alarms"]),
        "digests": dict(digests),
        "state of alarms": all_of(states["alarms.seen"]),
    }


STILL = pa.schema(list(EVENTS)[:3])

ALARMS = Chain(
    name="timers by processing time",
    operators=alarms_operators,
    record=lambda rows: pa.RecordBatch.from_pylist([dict(zip(STILL.names, row)) for row in rows], schema=STILL),
    watermarks=(),
    event_times=lambda rows: {},
    batches=lambda draw: batches_of(draw, lambda k, g, n, at: (k, g, n)),
    seen=alarms_seen,
    tick_ms=TICK_MS,
    ticks=5,
)


# --- rows (k, g, n, at) → balances by k, then sums by g, which both begin with an initial state → totals by g ----------

OPENED = pa.RecordBatch.from_pydict(
    {"k": ["hot", *(f"k{n}" for n in range(6)), "idle"], "start": [100 * n for n in range(8)]}
)
OPENED_GROUPS = pa.RecordBatch.from_pydict({"g": ["g0", "g1", "g2", "quiet"], "start": [1_000, 2_000, 3_000, 4_000]})
OPENING_MS = 11_000
"""Event time of the timer that each key of an initial state sets: before, in or behind the first batches."""
BALANCES_OUT = pa.schema([*EVENTS, ("what", pa.string()), ("opened", pa.int64())])
SUMS_OUT = pa.schema([("g", pa.string()), ("n", pa.int64()), ("what", pa.string()), ("opened", pa.int64())])


class Balances(StatefulProcessor):
    """Adds to what a key began with, and says with each row how often it began: once, before its first row, or never."""

    out = BALANCES_OUT.names

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.held = handle.getValueState("held", "n long, opened long")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        n, opened = self.held.get() or (0, 0)
        self.held.update((n + initialState.start, opened + 1))
        self.handle.registerTimer(OPENING_MS)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n, opened = self.held.get() or (0, 0)
        for row in rows:
            n += row.n
            yield self.said(key, row, n, opened, "row")
        self.held.update((n, opened))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        n, opened = self.held.get()
        at = datetime.fromtimestamp(timerValues.getCurrentWatermarkInMs() / 1000 + 1, UTC)
        yield self.said(key, Row(g="g0", at=at), n, opened, "opened")

    def said(self, key: Any, row: Any, n: int, opened: int, what: str) -> Row:
        said = {"k": key[0], "g": row.g, "n": n, "at": row.at, "what": what, "opened": opened}
        return Row(**{name: said[name] for name in self.out})

    def close(self) -> None:
        pass


class Sums(Balances):
    out = SUMS_OUT.names

    def said(self, key: Any, row: Any, n: int, opened: int, what: str) -> Row:
        return Row(g=key[0], n=n, what=what, opened=opened)


def opened_by(
    uid: str, key: str, output: pa.Schema, processor: Any, output_event_time: str
) -> StatefulProcessorOperator:
    keys = pa.schema([(key, pa.string())])
    values = pa.schema([("n", pa.int64()), ("opened", pa.int64())])
    held = layout_of(StateDeclaration("held", "value", "", None, 0), keys, values, None)
    return StatefulProcessorOperator(
        uid=uid, key_columns=(key,), key_ddl=f"`{key}` string", key_schema=keys, output_schema=output,
        state_schemas={"held": held}, state_ddl={"held": "`n` bigint, `opened` bigint"}, state_kinds={"held": "value"},
        processor=processor, pandas=False, output_rows_per_batch=4, time_mode="event", event_time_column="at",
        output_event_time=output_event_time, slice_keys_max=3, slice_rows_max=5,
    )  # fmt: skip


def balances_operators() -> tuple[Operator, ...]:
    return (
        opened_by("balances", "k", BALANCES_OUT, Balances(), "at"),
        opened_by("sums", "g", SUMS_OUT, Sums(), ""),
        totals(SUMS_OUT, "g", rows=aggregates.count()),
    )


def balances_seen(sinks: Rows, states: Rows) -> dict[str, Any]:
    """A group sums what balances say, in whatever order they say it: its numbers are looked at when all is over."""
    for sink, key, initial in (("balances", "k", OPENED), ("sums", "g", OPENED_GROUPS)):
        begun = set(initial.column(key).to_pylist())
        for row in sinks[sink]:
            assert row["opened"] == (row[key] in begun), f"its initial state came not once, or not before: {row}"
        for row in states[f"{sink}.held"]:
            assert row["value.opened"] == (row[f"key.{key}"] in begun), f"not once: {row}"
        assert begun <= {row[f"key.{key}"] for row in states[f"{sink}.held"]}, "an initial state was lost"
    return {
        "balances": all_of(sinks["balances"]),
        "sums": Counter((row["g"], row["what"]) for row in sinks["sums"]),
        "totals": newest_of(sinks["totals"], "g", "rows"),
        **{name: all_of(rows) for name, rows in states.items()},
    }


BALANCES = Chain(
    name="initial state",
    operators=balances_operators,
    record=events,
    watermarks=STEPS.watermarks,
    event_times=STEPS.event_times,
    batches=STEPS.batches,
    seen=balances_seen,
    initial={"balances": OPENED, "sums": OPENED_GROUPS},
)

CHAINS = (STEPS, ONCE, JOINS, ALARMS, BALANCES)
