"""The cases: which processor gets which input, as functions so that nothing is built at import time.

`CASES` has them by name; docs/parity.md lists the same names.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from pyspark.sql import DataFrame

from state_runtime import StreamingJob
from state_runtime.job import Stream
from tests.parity import life, zoo
from tests.parity.harness import Batch, Case, Leg

NOW_MS = 1_000_000
"""Where processing time begins; small, so that the numbers in a difference can be read."""

CASES: dict[str, Callable[[], Case]] = {}


def case(function: Callable[[], Case]) -> Callable[[], Case]:
    """Enter a case under its function's name."""
    CASES[function.__name__] = function
    return function


def stateful(
    processor: Any,
    output: str,
    batches: Sequence[Batch],
    *,
    pandas: bool = False,
    time_mode: str = "none",
    keys: Sequence[str] = ("key",),
    output_mode: str = "update",
    event_time_column: str = "",
    initial: tuple[str, Sequence[Mapping[str, Any]]] | None = None,
    idle: Sequence[int] = (),
    drops: bool = False,
) -> Leg:
    """A leg with one StatefulProcessor: the same object for both engines."""

    def spark(frame: DataFrame) -> DataFrame:
        grouped = frame.groupBy(*keys)
        apply = grouped.transformWithStateInPandas if pandas else grouped.transformWithState
        seed = _initial(frame, initial)
        return apply(
            processor,
            output,
            output_mode,
            time_mode,
            seed.groupBy(*keys) if seed is not None else None,
            event_time_column,
        )

    def ours(job: StreamingJob, frame: DataFrame) -> Stream:
        keyed = job.read(frame).key_by(*keys)
        apply = keyed.transform_with_state_in_pandas if pandas else keyed.transform_with_state
        more: dict[str, Any] = {}
        if initial is not None:
            more["initial_state"] = _initial(frame, initial)
        if event_time_column:
            more["event_time_column"] = event_time_column
        return apply(processor, output, uid="zoo", output_mode=output_mode, time_mode=time_mode, **more)

    return Leg(spark, ours, batches, idle, drops)


def _initial(frame: DataFrame, initial: tuple[str, Sequence[Mapping[str, Any]]] | None) -> DataFrame | None:
    if initial is None:
        return None
    schema, rows = initial
    names = [part.split()[0] for part in schema.split(", ")]
    return frame.sparkSession.createDataFrame([tuple(row[name] for name in names) for row in rows], schema)


def at(second: float) -> datetime:
    """An event time, in seconds after 1970."""
    return datetime.fromtimestamp(second, UTC)


class Script:
    """Draws operations for `zoo.Scripted`; the seed makes the case."""

    def __init__(self, seed: int, kinds: Mapping[str, tuple[Any, ...]], keys: int) -> None:
        self._draw = random.Random(seed)
        self._kinds = kinds
        self._keys = [None, "", *(f"k{number}" for number in range(keys - 2))]
        self._seq = 0

    def row(self, key: str | None, op: str, *args: Any, ts: float = 0) -> dict[str, Any]:
        """One operation."""
        self._seq += 1
        return {"key": key, "seq": self._seq, "op": op, "args": repr(args), "ts": at(ts)}

    def batch(
        self, at_ms: int, operations: int, *, timer_ms: Sequence[int] = (), ts: Callable[[], float] = lambda: 0.0
    ) -> Batch:
        """Random operations on about half of the keys, and a look at the end of each."""
        rows = []
        for key in self._keys:
            if self._draw.random() < 0.5:
                continue
            ops = [self._operation(timer_ms) for _ in range(self._draw.randrange(operations))]
            rows.extend(self.row(key, op, *args, ts=ts()) for op, args in [*ops, ("look", ())])
        return Batch(rows or [self.row("k0", "look", ts=ts())], at_ms)

    def _pair(self) -> tuple[int | None, str | None]:
        return self._draw.choice([None, *range(-3, 9)]), self._draw.choice([None, "", "a", "ü", "long " * 9])

    def _map_key(self) -> tuple[int, str]:
        return self._draw.randrange(3), self._draw.choice(["", "x", "longer"])

    def _operation(self, timer_ms: Sequence[int]) -> tuple[str, tuple[Any, ...]]:
        draw = self._draw
        if timer_ms and draw.random() < 0.4:
            chosen = tuple(draw.choice(timer_ms) + draw.randrange(-900, 1400) for _ in range(draw.choice([1, 1, 2, 6])))
            return ("register" if draw.random() < 0.8 else "unregister"), chosen
        name = draw.choice([n for n in self._kinds if n != "w"])
        pairs = [self._pair() for _ in range(draw.randrange(1, 5))]
        choices: Sequence[tuple[str, tuple[Any, ...]]] = {
            "value": [("get", ()), ("exists", ()), ("update", (self._pair(),)), ("update", (self._pair(),)), ("clear", ())],
            "list": [
                ("get", ()), ("exists", ()), ("twice", ()), ("put", (pairs,)), ("appendList", (pairs,)), ("clear", ()),
                *[("appendValue", (self._pair(),))] * 3, ("rewrite", ()),
            ],
            "map": [
                ("exists", ()), ("getValue", (self._map_key(),)), ("containsKey", (self._map_key(),)), ("iterator", ()),
                ("keys", ()), ("values", ()), ("removeKey", (self._map_key(),)), ("clear", ()), ("drain", ()),
                *[("updateValue", (self._map_key(), self._pair()))] * 5,
            ],
        }[self._kinds[name][0]]  # fmt: skip
        method, args = draw.choice(choices)
        return f"{name}.{method}", args


# -- every method of the three kinds of state -------------------------------------------------------------------------


def _script_without_time(pandas: bool) -> Case:
    script = Script(11 + pandas, zoo.STATES, 24)
    batches = [script.batch(NOW_MS, 14) for _ in range(5)]
    # Each of them raises in Python and does no harm.
    batches.append(Batch([script.row("k1", "v.update", None), script.row("k1", "look")]))
    processor: Any = zoo.Scripted(zoo.STATES)
    leg = stateful(zoo.InPandas(processor) if pandas else processor, zoo.SAID, batches, pandas=pandas)
    return Case(zoo.SCRIPT, [leg])


@case
def state_methods_rows() -> Case:
    """Value, list and map: every method, drawn at random over five batches; null and empty keys."""
    return _script_without_time(pandas=False)


@case
def state_methods_pandas() -> Case:
    """The same in the pandas flavour."""
    return _script_without_time(pandas=True)


# -- processing time ---------------------------------------------------------------------------------------------------

TICKS = (0, 400, 1_000, 1_400, 1_900, 2_600)


def _script_in_processing_time(pandas: bool) -> Case:
    script = Script(21 + pandas, zoo.STATES_WITH_TTL, 16)
    times = [NOW_MS + tick for tick in TICKS]
    batches = [script.batch(now, 12, timer_ms=(now,)) for now in times]
    # The very millisecond: a timer at it fires.
    batches.append(Batch([script.row("k1", "register", times[-1] + 9, times[-1] + 10, times[-1] + 11)], times[-1] + 10))
    processor: Any = zoo.Scripted(zoo.STATES_WITH_TTL, timers=True)
    idle = [NOW_MS + 3_000, NOW_MS + 3_000, NOW_MS + 9_000, NOW_MS + 9_000, NOW_MS + 9_700]
    leg = stateful(
        zoo.InPandas(processor) if pandas else processor,
        zoo.SAID,
        batches,
        pandas=pandas,
        time_mode="processingTime",
        idle=idle,
    )
    return Case(zoo.SCRIPT, [leg])


@case
def time_to_live_and_timers_rows() -> Case:
    """TTL on each kind of state (also 0 and a very long one) and processing-time timers whose handlers do everything."""
    return _script_in_processing_time(pandas=False)


@case
def time_to_live_and_timers_pandas() -> Case:
    """The same in the pandas flavour."""
    return _script_in_processing_time(pandas=True)


# -- event time --------------------------------------------------------------------------------------------------------


def _script_in_event_time(pandas: bool) -> Case:
    script = Script(31 + pandas, zoo.STATES, 16)
    draw = random.Random(5)
    batches = []
    for number in range(6):
        # Event times advance by three seconds a batch and scatter by twelve: some rows are late by a delay of two.
        middle = 10 + 3 * number
        watermark_ms = max(0, (middle - 4) * 1000)
        batches.append(
            script.batch(
                NOW_MS + number,
                9,
                timer_ms=(watermark_ms, watermark_ms + 3_000),
                ts=lambda middle=middle: middle + draw.uniform(-10, 2),
            )
        )
    # A null event time is never late, and says nothing of how far time has come.
    null_time = {**script.row("k2", "look"), "ts": None}
    batches.append(Batch([null_time, script.row("k3", "look", ts=0), script.row("k3", "look", ts=100)], NOW_MS + 9))
    # The watermark is 98 now, and the bound of late rows one batch later: both are inside.
    edge = [script.row("k4", "look", ts=98), script.row("k4", "register", 97_999, 98_000, 98_001, ts=98.001)]
    batches.append(Batch(edge, NOW_MS + 10))
    batches.append(
        Batch([script.row("k4", "look", ts=second) for second in (97.999, 98, 98.000001, 98.001)], NOW_MS + 11)
    )
    processor: Any = zoo.Scripted(zoo.STATES, timers=True)
    leg = stateful(
        zoo.InPandas(processor) if pandas else processor, zoo.SAID, batches, pandas=pandas, time_mode="eventTime"
    )
    return Case(zoo.SCRIPT, [leg], watermark=("ts", "2 seconds"))


@case
def event_time_timers_rows() -> Case:
    """Event-time timers, the watermark that they see, and late rows."""
    return _script_in_event_time(pandas=False)


@case
def event_time_timers_pandas() -> Case:
    """The same in the pandas flavour."""
    return _script_in_event_time(pandas=True)


@case
def watermark_without_event_time_mode() -> Case:
    """In the mode None a watermark drops nothing, and timers and clocks are not to be had."""
    script = Script(41, zoo.STATES, 6)
    batches = [script.batch(NOW_MS, 4, ts=lambda t=t: t) for t in (50.0, 5.0, 60.0)]
    return Case(zoo.SCRIPT, [stateful(zoo.Scripted(zoo.STATES), zoo.SAID, batches)], watermark=("ts", "1 second"))


# -- initial state -----------------------------------------------------------------------------------------------------


def _seeded(pandas: bool, time_mode: str) -> Case:
    script = Script(51 + pandas, zoo.STATES, 8)
    initial = [
        {"key": key, "n": n, "s": f"{key}{n}"}
        for key, numbers in {"k1": [3], "k2": [1, 4, 2], "k5": [2], "only in the state": [2, 1]}.items()
        for n in numbers
    ]
    looks = [script.row(key, "look") for key in ("k0", "k1", "k2", "only in the state")]
    timed = time_mode != "none"
    batches = [
        Batch(looks[:3], NOW_MS),
        Batch([*looks[2:], script.row("k5", "l.get")], NOW_MS + 150),
        script.batch(NOW_MS + 260, 6),
    ]
    processor: Any = zoo.Seeded(zoo.STATES, timers=timed)
    leg = stateful(
        zoo.InPandas(processor) if pandas else processor,
        zoo.SAID,
        batches,
        pandas=pandas,
        time_mode=time_mode,
        initial=(zoo.INITIAL, initial),
        idle=[NOW_MS + 2_000, NOW_MS + 2_001] if timed else (),
    )
    return Case(zoo.SCRIPT, [leg])


@case
def initial_state_rows() -> Case:
    """handleInitialState: one and several rows a key, keys without input, timers from it."""
    return _seeded(pandas=False, time_mode="processingTime")


@case
def initial_state_pandas() -> Case:
    """The same in the pandas flavour, without time."""
    return _seeded(pandas=True, time_mode="none")


# -- keys and values ---------------------------------------------------------------------------------------------------

KEY_TYPES = (
    "b boolean, i8 byte, i16 short, i int, l long, f float, d double, s string, bin binary, dt date, ts timestamp, "
    "tn timestamp_ntz, dec decimal(20,3), big decimal(38,10), st struct<x:int,y:string>"
)


def _values(number: int) -> dict[str, Any]:
    """Values of every type: ordinary ones, extremes, empty ones."""
    # Parsed, not made: timestamps without a zone are what is wanted here.
    naive = [
        datetime.fromisoformat(text)
        for text in ("2024-02-29T12:34:56.789012", "1969-12-31T23:59:59.999999", "2001-01-01T00:00:00")
    ]
    pick = number % 3
    return {
        "b": [True, False, True][pick],
        "i8": [1, -128, 127][pick],
        "i16": [-1, -(2**15), 2**15 - 1][pick],
        "i": [7, -(2**31), 2**31 - 1][pick],
        "l": [9, -(2**63), 2**63 - 1][pick],
        "f": [0.5, -1.25, float("inf")][pick],
        "d": [0.1, -0.0, float("nan")][pick],
        "s": ["text", "", "ünïcode ✓ \x00"][pick],
        "bin": [b"bytes", b"", bytes(range(256))][pick],
        "dt": [date(2024, 2, 29), date(1969, 12, 31), date(1900, 1, 1)][pick],
        "ts": naive[pick].replace(tzinfo=UTC),
        "tn": naive[pick],
        "dec": [Decimal("12.345"), Decimal("-99999999999999999.999"), Decimal("0.000")][pick],
        "big": [Decimal("1.0000000001"), Decimal("-1e27"), Decimal(0)][pick],
        "st": [{"x": 1, "y": "y"}, {"x": None, "y": None}, {"x": -5, "y": ""}][pick],
        "ar": [[1, None, -3], [], [2**31 - 1]][pick],
        "mp": [{"a": 1, "b": None}, {}, {"": -1}][pick],
        "deep": [
            [{"a": 1, "b": {"k": [0.5, None]}}, None, {"a": None, "b": None}],
            [],
            [{"a": 2, "b": {"": []}}],
        ][pick],
    }


@case
def key_types_together() -> Case:
    """One composite key with a part of every type; each part once changed, once null, all null."""
    names = [part.split()[0] for part in KEY_TYPES.split(", ")]
    rows: list[dict[str, Any]] = [{name: _values(number)[name] for name in names} for number in range(3)]
    rows += [{**rows[0], name: None} for name in names]
    rows += [dict.fromkeys(names)]
    # -0.0 and 0.0 are one key.
    rows += [{**rows[0], "d": 0.0}, {**rows[0], "d": -0.0}]
    # NaN is a key as any other, but Spark calls the processor once for each of its rows: its Python groups by ==.
    batches = [Batch(rows, NOW_MS), Batch([*rows[:3], *rows[:2], *rows[3:6], *rows[-3:]], NOW_MS + 1)]
    leg = stateful(
        zoo.Keys(), zoo.KEYS_SAID, batches, keys=names, time_mode="processingTime", idle=[NOW_MS + 5, NOW_MS + 6]
    )
    return Case(f"{KEY_TYPES}, x int", [leg])


def _single_key(kind: str, values: Sequence[Any], pandas: bool = False, null: bool = True) -> Case:
    chosen = [*values, *[None] * null, *values]
    rows = [{"x": number, "key": value} for number, value in enumerate(chosen)]
    batches = [Batch(rows, NOW_MS), Batch(rows[::2], NOW_MS + 1)]
    processor: Any = zoo.InPandas(zoo.Keys()) if pandas else zoo.Keys()
    leg = stateful(
        processor, zoo.KEYS_SAID, batches, pandas=pandas, time_mode="processingTime", idle=[NOW_MS + 9, NOW_MS + 9]
    )
    # The key is not the first column: it may stand anywhere.
    return Case(f"x int, key {kind}", [leg])


@case
def key_string() -> Case:
    """Keys of one string, among them null and the empty one."""
    return _single_key("string", ["a", "", "b", "a longer one than eight bytes", "ü"])


@case
def key_long_pandas() -> Case:
    """Keys of one long in the pandas flavour. (A null is None in ours, and NaN in Spark, but None again for its timers.)"""
    return _single_key("long", [1, 0, -1, 2**40], pandas=True, null=False)


@case
def key_struct() -> Case:
    """A struct as the one key column."""
    return _single_key("struct<x:int,y:struct<z:string>>", [{"x": 1, "y": {"z": "z"}}, {"x": None, "y": None}])


@case
def key_timestamp_pandas() -> Case:
    """Timestamps as keys in the pandas flavour. (No null: it becomes NaT, which Spark cannot make a key of again.)"""
    return _single_key("timestamp", [at(1.5), at(-1), at(1_700_000_000)], pandas=True, null=False)


@case
def values_of_every_type() -> Case:
    """States with a field of every type, nested ones too; map keys of several columns with a struct."""
    columns = zoo.EVERY_TYPE
    rows = [{"key": f"k{number}", **{n: v for n, v in _values(number).items() if n != "big"}} for number in range(3)]
    names = [part.split()[0] for part in columns.split(", ")]
    nulls = {"key": "k3", **dict.fromkeys(names)}
    batches = [
        Batch([*rows, nulls]),
        Batch([{**row, "key": f"k{n}"} for n, row in enumerate([nulls, *rows])]),
        Batch(rows),
    ]
    return Case(f"key string, {columns}", [stateful(zoo.EveryType(), zoo.EVERY_SAID, batches)])


@case
def rows_as_the_processor_sees_them() -> Case:
    """Names, types and order of the input rows; the key column among them."""
    rows = [
        {"key": f"k{n % 2}", "odd name": n, "count": n, **{k: v for k, v in _values(n).items() if k != "big"}}
        for n in range(4)
    ]
    return Case(
        f"i int, key string, `odd name` int, count int, {zoo.EVERY_TYPE.replace(', i int', '')}",
        [stateful(zoo.RowView(), zoo.VIEW_SAID, [Batch(rows)])],
    )


@case
def frames_as_the_processor_sees_them() -> Case:
    """dtypes, names and index of the frames; integers with nulls become floats, key and all columns are there."""
    schema = f"key string, maybe int, {zoo.EVERY_TYPE}"
    rows = [
        {"key": f"k{n % 2}", "maybe": None if n % 4 == 1 else n, **{k: v for k, v in _values(n).items() if k != "big"}}
        for n in range(14)
    ]
    return Case(schema, [stateful(zoo.FrameView(), zoo.VIEW_SAID, [Batch(rows), Batch(rows[:3])], pandas=True)])


@case
def frames_in_pieces() -> Case:
    """A key with more rows than a frame holds gets several frames, each with an index from 0 and types of its own."""
    rows = [{"key": "k", "n": None if n == 3 else n} for n in range(20_001)]
    leg = stateful(zoo.Pieces(), zoo.VIEW_SAID, [Batch([*rows, {"key": "other", "n": 1}])], pandas=True)
    return Case("key string, n long", [leg], conf={"spark.sql.execution.arrow.maxRecordsPerBatch": "10000"})


# -- forms of output ---------------------------------------------------------------------------------------------------


def _forms(forms: Sequence[str]) -> list[Batch]:
    return [Batch([{"key": form, "n": n} for form in forms for n in range(2)])]


@case
def output_forms_rows() -> Case:
    """Generators, lists, iterators, nothing; fields missing, in another order, in other Python types."""
    return Case("key string, n long", [stateful(zoo.RowOutputs(), zoo.OUTPUTS, _forms(zoo.ROW_FORMS))])


@case
def output_forms_pandas() -> Case:
    """The same for data frames: by name, by position, other dtypes, other index, empty."""
    leg = stateful(zoo.FrameOutputs(), zoo.OUTPUTS, _forms(zoo.FRAME_FORMS), pandas=True)
    return Case("key string, n long", [leg])


# -- life --------------------------------------------------------------------------------------------------------------


@case
def attributes_and_order() -> Case:
    """Attributes of the processor: fresh in every batch, shared by all keys of the partition; timers in order of time."""
    batches = [
        Batch([{"key": f"k{n}", "n": (n * 7) % 10} for n in range(10)], NOW_MS),
        Batch([{"key": f"k{n}", "n": n} for n in range(3, 9)], NOW_MS + 100),
    ]
    leg = stateful(life.Attributes(), zoo.SAID, batches, time_mode="processingTime", idle=[NOW_MS + 200])
    return Case("key string, n long", [leg], partitions=1)


@case
def deleted_states() -> Case:
    """deleteIfExists over two restarts: the state is gone for all keys, also when its name comes back; others stay."""
    rows = [[{"key": f"k{n}", "n": number * 10 + n} for n in range(4)] for number in range(4)]
    return Case(
        "key string, n long",
        [
            stateful(life.First(), zoo.SAID, [Batch(rows[0]), Batch(rows[1])], drops=True),
            stateful(life.Second(), zoo.SAID, [Batch(rows[2])], drops=True),
            stateful(life.Third(), zoo.SAID, [Batch(rows[3])]),
        ],
    )


def failing(what: str) -> Case:
    """A processor that does what ends the query in both engines."""
    return Case("key string, n long", [stateful(life.FailsIn(what), zoo.SAID, [Batch([{"key": "k", "n": 1}])])])
