"""The built-in aggregates against a loop in plain Python: nulls, NaN, overflow, and every type that they take."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples
from sliced import now_whole_now_sliced

from state_runtime import aggregates
from state_runtime.base.errors import InvalidData, InvalidPipeline
from state_runtime.processors.builtin.aggregate import STATE, AggregateOperator, plan_aggregates
from state_runtime.processors.builtin.functions import FUNCTIONS
from state_runtime.processors.builtin.partial_rows import LOWER_HALF, doubles_of_halves, longs_of_halves
from state_runtime.processors.declared.aggregates import Aggregate
from state_runtime.processors.grouping import group_rows
from state_runtime.processors.operator import EpochClock, RowSlice
from state_runtime.state import version as open_version
from state_runtime.state.keyhash import hash_key
from state_runtime.state.table import StateSchema, fold
from state_runtime.state.version import OpenVersion

KEYS = pa.schema([("k", pa.int64())])
Rows = list[tuple[int, Any]]


class Aggregating:
    """One column, aggregated over epochs with the state carried along."""

    def __init__(
        self, data_type: pa.DataType, wanted: dict[str, Aggregate], mode: Literal["update", "complete"] = "update"
    ) -> None:
        self.data_type = data_type
        plan = plan_aggregates(wanted, pa.schema([("k", pa.int64()), ("v", data_type)]), "op")
        self.operator = AggregateOperator("op", ("k",), "k long", KEYS, plan, "", mode=mode)
        self.batch_rows: list[int] = []
        self.schema: StateSchema = self.operator.state_schemas[STATE]
        self.table = self.schema.empty()
        self.live = 0
        self.epochs = 0

    def epoch(self, rows: Rows) -> dict[int, tuple[Any, ...]]:
        """What is emitted, by key."""
        data = pa.RecordBatch.from_arrays(
            [pa.array([k for k, _ in rows], pa.int64()), pa.array([v for _, v in rows], self.data_type)],
            names=["k", "v"],
        )
        hashes = np.array([k * 7919 for k, _ in rows], dtype=np.uint64)
        grouped = group_rows(data, hashes, np.arange(len(rows), dtype=np.int64), ["k"], KEYS)
        self.epochs += 1
        version = OpenVersion.of_batches("v", {STATE: self.table}, {STATE: self.schema})
        result = self.operator.process(now_whole_now_sliced(grouped), version, EpochClock(0, epoch=self.epochs), 0)
        batches = list(result.outputs)
        self.batch_rows = [batch.num_rows for batch in batches]
        emitted = [row for batch in batches for row in batch.to_pylist()]
        if STATE in result.changes:
            self.table = fold([result.changes[STATE], self.table], self.schema, drop_deleted=True)
        self.live += result.rows_added
        assert self.live == self.table.num_rows
        assert len({row["k"] for row in emitted}) == len(emitted)
        return {row["k"]: tuple(v for name, v in row.items() if name != "k") for row in emitted}


@given(st.lists(st.lists(st.tuples(st.integers(0, 12), st.none() | st.integers(-9, 9))), min_size=1, max_size=6))
@examples(100)
def test_in_complete_mode_every_key_comes_in_each_epoch(epochs: list[Rows]) -> None:
    """Also those without rows, and in an epoch without any; a key never goes."""
    aggregating = Aggregating(pa.int64(), {"n": aggregates.count(), "total": aggregates.sum("v")}, "complete")
    values: dict[int, list[int | None]] = {}
    for rows in [*epochs, []]:
        for key, value in rows:
            values.setdefault(key, []).append(value)
        assert aggregating.epoch(rows) == {
            key: (len(of), sum(v for v in of if v is not None) if any(v is not None for v in of) else None)
            for key, of in values.items()
        }
    assert aggregating.operator.time_domain == "", "nothing is ever due"


def test_a_table_is_given_in_bounded_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a task does not grow with its state."""
    aggregating = Aggregating(pa.int64(), {"n": aggregates.count()}, "complete")
    aggregating.epoch([(key, 1) for key in range(1000)])
    monkeypatch.setattr(open_version, "_FOLDED_BYTES_MAX", 4096)
    found = aggregating.epoch([(7, 1)])
    assert found == {key: (2 if key == 7 else 1,) for key in range(1000)}
    assert max(aggregating.batch_rows) <= 4096 // 17  # hash, mark, key and count of a row


def test_slices_before_the_last_give_nothing_of_a_table() -> None:
    """Else a key would come twice in one epoch; and if rows are left for another epoch, the table comes with the last of them."""
    aggregating = Aggregating(pa.int64(), {"n": aggregates.count()}, "complete")
    rows = pa.RecordBatch.from_pydict({"k": pa.array([1, 2], pa.int64()), "v": pa.array([0, 0], pa.int64())})
    grouped = group_rows(rows, np.array([1, 2], dtype=np.uint64), np.arange(2, dtype=np.int64), ["k"], KEYS)
    reader = OpenVersion.of_batches("v", {STATE: aggregating.table}, {STATE: aggregating.schema})
    left = aggregating.operator.process([RowSlice(grouped, is_last=False)], reader, EpochClock(0), 0)
    assert list(left.outputs) == []
    assert left.changes[STATE].num_rows == 2


def run_all(aggregating: Aggregating, epochs: list[Rows]) -> None:
    for rows in epochs:
        aggregating.epoch(rows)


def order(value: Any) -> Any:
    """Spark's order: NaN above every number; null below all, inside of structs and arrays."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return (-1 if value is None else 1, 0)
    if isinstance(value, dict | list):
        return (0, tuple(map(order, [value[name] for name in sorted(value)] if isinstance(value, dict) else value)))
    return (0, value)


def reference(function: str, values: list[Any], data_type: pa.DataType) -> Any:
    """Spark SQL's aggregate over all values so far."""
    present = [v for v in values if v is not None]
    if function == "rows":
        return len(values)
    if function == "count":
        return len(present)
    if function in ("first", "last"):
        return values[0 if function == "first" else -1]
    if function == "some":
        return present[:3]
    if function in ("different", "set"):
        values = [v for _, v in sorted({order(v): v for v in present}.items(), key=lambda item: item[0])]
        return len(values) if function == "different" else values
    if function == "kinds":
        # So few values are counted by the registers that they fill, of 512.
        filled = {hash_key([pa.array([v], data_type)]) >> 55 for v in present}
        return round(512 * math.log(512 / (512 - len(filled))))
    if not present:
        return None
    if function in ("first_value", "last_value"):
        return present[0 if function == "first_value" else -1]
    if function in ("any", "every"):
        return (any if function == "any" else all)(present)
    if function in SPREAD:
        return spread(function, [float(v) for v in present])
    if function == "sum":
        return math.fsum(present) if isinstance(present[0], float) else sum(present)
    if function == "avg":
        return math.fsum(present) / len(present)
    return (min if function == "min" else max)(present, key=order)


def spread(function: str, values: list[float]) -> float | None:
    """Variance and standard deviation, from the definition."""
    mean = math.fsum(values) / len(values)
    divisor = len(values) - (0 if function.endswith("_pop") else 1)
    if divisor == 0:
        return None
    variance = math.fsum((v - mean) ** 2 for v in values) / divisor
    return math.sqrt(variance) if function.startswith("stddev") else variance


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict) and isinstance(found, dict):
        return found.keys() == expected.keys() and all(same(found[name], expected[name]) for name in expected)
    if isinstance(expected, list) and isinstance(found, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, float) and isinstance(found, float):
        if math.isnan(expected) or math.isnan(found):
            return math.isnan(expected) and math.isnan(found)
        return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9)
    return type(found) is type(expected) and bool(found == expected)


ALL: dict[str, Aggregate] = {
    "rows": aggregates.count(),
    "count": aggregates.count("v"),
    "sum": aggregates.sum("v"),
    "min": aggregates.min("v"),
    "max": aggregates.max("v"),
    "avg": aggregates.avg("v"),
    "variance": aggregates.variance("v"),
    "variance_pop": aggregates.variance_pop("v"),
    "stddev": aggregates.stddev("v"),
    "stddev_pop": aggregates.stddev_pop("v"),
    "any": aggregates.any("v"),
    "every": aggregates.every("v"),
    "first": aggregates.first("v"),
    "first_value": aggregates.first("v", ignore_nulls=True),
    "last": aggregates.last("v"),
    "last_value": aggregates.last("v", ignore_nulls=True),
    "some": aggregates.collect("v", limit=3),
    "kinds": aggregates.count_distinct_approx("v"),
    "different": aggregates.count_distinct("v"),
    "set": aggregates.collect_set("v"),
}
NUMBERS = ["rows", "count", "sum", "min", "max", "avg"]
SPREAD = ["variance", "variance_pop", "stddev", "stddev_pop"]
ANY_TYPE = ["first", "first_value", "last", "last_value", "some"]
COMPARED = ["different", "set"]
NAIVE_1960, NAIVE_2030 = dt.datetime.fromisoformat("1960-01-01"), dt.datetime.fromisoformat("2030-01-01")
floats = st.sampled_from([0.0, -0.5, 1.5, 1e6, -1e6, float("nan")])
PAIR = pa.struct([("a", pa.float64()), ("b", pa.list_(pa.string()))])
pairs = st.fixed_dictionaries(
    {"a": st.none() | floats, "b": st.none() | st.lists(st.sampled_from([None, "a", "ä"]), max_size=2)}
)
TYPES: list[tuple[pa.DataType, st.SearchStrategy[Any], list[str]]] = [
    (pa.int8(), st.integers(-128, 127), NUMBERS),
    (pa.int16(), st.integers(-(1 << 15), (1 << 15) - 1), NUMBERS),
    (pa.int32(), st.integers(-(1 << 31), (1 << 31) - 1), [*NUMBERS, *SPREAD, *ANY_TYPE, "kinds", *COMPARED]),
    (pa.int64(), st.integers(-(1 << 50), 1 << 50), NUMBERS),
    (pa.float64(), floats, [*NUMBERS, *ANY_TYPE, "kinds", *COMPARED]),
    (pa.float64(), st.floats(-1e6, 1e6), SPREAD),
    (pa.float64(), st.sampled_from([1.0, math.inf]), [*NUMBERS, *ANY_TYPE]),
    (pa.float64(), st.sampled_from([1.0, -math.inf, math.nan]), ["rows", "count", "min", "max", *ANY_TYPE, "kinds", *COMPARED]),
    (pa.float32(), floats, NUMBERS),
    (pa.string(), st.sampled_from(["", "a", "B", "b", "ab", "ä", "\U0001f600", "\uffff"]), ["rows", "count", "min", "max", *ANY_TYPE, "kinds", *COMPARED]),
    (pa.binary(), st.binary(max_size=2), ["rows", "count", "min", "max", *ANY_TYPE, "kinds", *COMPARED]),
    (pa.bool_(), st.booleans(), ["any", "every", "min", "max", *ANY_TYPE, "kinds", *COMPARED]),
    (pa.date32(), st.dates(dt.date(1960, 1, 1), dt.date(2030, 1, 1)), ["rows", "count", "min", "max", *ANY_TYPE, "kinds", *COMPARED]),
    (pa.timestamp("us"), st.datetimes(NAIVE_1960, NAIVE_2030), ["rows", "count", "min", "max", *ANY_TYPE, "kinds", *COMPARED]),
    (pa.list_(pa.int64()), st.lists(st.integers(0, 3), max_size=2), [*ANY_TYPE, *COMPARED]),
    (PAIR, pairs, [*ANY_TYPE, *COMPARED]),
    (pa.list_(PAIR), st.lists(st.none() | pairs, max_size=2), COMPARED),
    (pa.decimal128(5, 2), st.decimals(-999, 999, places=2), ["rows", "count", "sum", "min", "max", "kinds", *COMPARED, *ANY_TYPE]),
    (pa.decimal128(38, 2), st.decimals(-999, 999, places=2), ["rows", "count", "sum", "min", "max", "kinds", *COMPARED, *ANY_TYPE]),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(TYPES)), ids=lambda n: f"{n}-{TYPES[n][0]}")
@given(data=st.data())
@examples(40)
def test_aggregates_over_many_epochs_are_those_over_all_rows(number: int, data: st.DataObject) -> None:
    """Reduced per epoch and combined with the state, it must be as if all rows had been there at once."""
    data_type, values, functions = TYPES[number]
    row = st.tuples(st.integers(0, 4), st.none() | values)
    all_epochs: list[Rows] = data.draw(st.lists(st.lists(row, min_size=1, max_size=12), min_size=1, max_size=4))
    aggregating = Aggregating(data_type, {name: ALL[name] for name in functions})
    seen: dict[int, list[Any]] = {}
    for rows in all_epochs:
        for key, value in rows:
            seen.setdefault(key, []).append(value)
        emitted = aggregating.epoch(rows)
        assert set(emitted) == {key for key, _ in rows}, "update mode: the keys of the epoch, and no other"
        for key, found in emitted.items():
            for name, value in zip(functions, found, strict=True):
                expected = reference(name, seen[key], data_type)
                if name == "sum" and pa.types.is_floating(data_type) and expected is not None:
                    expected = float(expected)
                assert same(value, expected), f"{name} of {seen[key]}: {value!r}, expected {expected!r}"


def test_one_epoch_equals_pandas_and_arrow() -> None:
    """An independent implementation each, on more rows."""
    generator = np.random.default_rng(7)
    keys, values = generator.integers(0, 300, 5000), generator.integers(-1000, 1000, 5000)
    missing = generator.random(5000) < 0.1
    rows: Rows = [(int(k), None if m else int(v)) for k, v, m in zip(keys, values, missing, strict=True)]
    emitted = Aggregating(pa.int32(), {name: ALL[name] for name in NUMBERS}).epoch(rows)
    frame = pd.DataFrame({"k": keys, "v": pd.array(np.where(missing, None, values), dtype="Int64")})
    by_key = frame.groupby("k")["v"]
    table = pa.table({"k": keys, "v": pa.array([v for _, v in rows], pa.int64())})
    in_arrow = table.group_by("k").aggregate([("v", f) for f in ("count", "sum", "min", "max", "mean")])
    from_arrow = {row.pop("k"): row for row in in_arrow.to_pylist()}
    for key, (rows_of_key, count, total, least, most, mean) in emitted.items():
        group = by_key.get_group(key)
        assert (rows_of_key, count, total) == (len(group), group.count(), group.sum())
        arrow = from_arrow[key]
        assert (count, total, least, most) == tuple(arrow[f"v_{f}"] for f in ("count", "sum", "min", "max"))
        assert same(mean, arrow["v_mean"])
    assert set(emitted) == set(from_arrow)


@pytest.mark.parametrize(
    "epochs",
    [
        [[(1, (1 << 63) - 1), (1, 1)]],
        [[(1, -(1 << 63)), (1, -1)]],
        [[(1, (1 << 63) - 1)], [(1, 1)]],
        [[(1, -(1 << 63))], [(2, 5), (1, -1)]],
        [[(1, (1 << 63) - 1)] * 2],
        [[(1, (1 << 63) - 1)] * 3],
        [[(1, (1 << 62))] * 4],
        [[(0, 0), (1, (1 << 63) - 1), (1, 1), (2, 0)]],
    ],
    ids=str,
)
def test_a_sum_beyond_long_is_refused(epochs: list[Rows]) -> None:
    """Within an epoch or over several; numpy would wrap around without a word."""
    aggregating = Aggregating(pa.int64(), {"sum": aggregates.sum("v")})
    with pytest.raises(InvalidData, match="leaves the range of long"):
        run_all(aggregating, epochs)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=8))
@examples(150)
def test_a_sum_of_longs_is_exact_or_refused(values: list[int]) -> None:
    """Never something else."""
    aggregating = Aggregating(pa.int64(), {"sum": aggregates.sum("v")})
    try:
        found = aggregating.epoch([(1, v) for v in values])[1][0]
    except InvalidData:
        assert not -(1 << 63) <= sum(values) < 1 << 63
        return
    assert found == sum(values)


@pytest.mark.parametrize("values", [[(1 << 53) + 1], [1_700_000_000_000_000_000, 1], [-(1 << 63), 0]], ids=str)
def test_an_average_of_large_longs_is_a_double(values: list[int]) -> None:
    """Spark casts to double first; timestamps in microseconds or ids are beyond 2^53."""
    found = Aggregating(pa.int64(), {"avg": aggregates.avg("v")}).epoch([(1, v) for v in values])
    assert same(found[1][0], math.fsum(values) / len(values))


@pytest.mark.parametrize("epochs", [1, 2], ids=["one epoch", "two epochs"])
def test_a_decimal_sum_is_exact_or_refused(epochs: int) -> None:
    """Arrow's decimals wrap around at 38 digits as numpy's integers do; a wrong sign must not come out."""
    big = Decimal("9" * 38)
    aggregating = Aggregating(pa.decimal128(38, 0), {"sum": aggregates.sum("v")})
    with pytest.raises(InvalidData):
        run_all(aggregating, [[(1, big), (1, big)]] if epochs == 1 else [[(1, big)], [(1, big)]])


@pytest.mark.parametrize("precision", [1, 18, 27, 28, 29, 38])
def test_a_decimal_sum_of_any_precision_goes_on_over_epochs(precision: int) -> None:
    """The state of a sum has up to 38 digits, and adding two of those must work as long as the result fits."""
    aggregating = Aggregating(pa.decimal128(precision, 0), {"sum": aggregates.sum("v")})
    for count in range(1, 4):
        assert aggregating.epoch([(1, Decimal(3)), (2, None)]) == {1: (Decimal(3 * count),), 2: (None,)}


def test_an_epoch_without_rows_changes_nothing() -> None:
    """No output, no change."""
    aggregating = Aggregating(pa.int64(), {name: ALL[name] for name in [*NUMBERS, *SPREAD, *ANY_TYPE]})
    aggregating.epoch([(1, 5)])
    before = aggregating.table
    assert aggregating.epoch([]) == {}
    assert aggregating.table.equals(before)


def test_structs_and_arrays_have_a_greatest_and_a_smallest_value() -> None:
    """Compared field by field and element by element, null skipped; over epochs, as any other value."""
    pair = pa.struct([("a", pa.int64()), ("b", pa.string())])
    most = Aggregating(pair, {"most": aggregates.max("v"), "least": aggregates.min("v")})
    first, second, third = {"a": 1, "b": "z"}, {"a": 2, "b": None}, {"a": 2, "b": "a"}
    assert most.epoch([(1, second), (1, first), (1, None), (2, None)]) == {1: (second, first), 2: (None, None)}
    assert most.epoch([(1, third), (2, first)]) == {1: (third, first), 2: (first, first)}
    lists = Aggregating(pa.list_(pa.int64()), {"most": aggregates.max("v"), "least": aggregates.min("v")})
    assert lists.epoch([(1, [1, 2]), (1, [1]), (1, [0, 9, 9])]) == {1: ([1, 2], [0, 9, 9])}
    assert lists.epoch([(1, [1, 2, 0]), (1, [])]) == {1: ([1, 2, 0], [])}


A_MAP = pa.map_(pa.string(), pa.int64())


@pytest.mark.parametrize(
    ("aggregate", "data_type", "message"),
    [
        (aggregates.sum("other"), pa.int64(), "there is no column 'other'; the input has k, v"),
        (aggregates.sum("v"), pa.string(), "sum takes numbers, not string"),
        (aggregates.avg("v"), pa.string(), "avg takes integers and floats, not string"),
        (aggregates.avg("v"), pa.decimal128(5, 2), "cast it to double first"),
        (aggregates.first("v"), pa.null(), "nothing but null"),
        (aggregates.any("v"), pa.int64(), "any takes booleans, not int64"),
        (aggregates.stddev("v"), pa.string(), "stddev takes integers and floats, not string"),
        (aggregates.count_distinct_approx("v"), pa.list_(pa.int64()), "takes plain values, not list"),
        (aggregates.count_distinct("v"), A_MAP, "count_distinct cannot compare values of type map"),
        (
            aggregates.collect_set("v"),
            pa.list_(pa.struct([("m", A_MAP)])),
            "collect_set cannot compare values of type list",
        ),
        (aggregates.min("v"), A_MAP, "min cannot order values of type map"),
        (aggregates.max("v"), pa.null(), "max cannot order values of type null"),
    ],
)
def test_what_cannot_be_aggregated_is_refused_when_the_job_is_built(
    aggregate: Aggregate, data_type: pa.DataType, message: str
) -> None:
    """With operator and aggregate in the message."""
    with pytest.raises(InvalidPipeline, match=f"operator 'op', aggregate 'a': .*{message}"):
        plan_aggregates({"a": aggregate}, pa.schema([("k", pa.int64()), ("v", data_type)]), "op")


@pytest.mark.parametrize(
    "make",
    [
        lambda: aggregates.collect("v", limit=0),
        lambda: aggregates.collect("v", limit=10**9),
        lambda: aggregates.collect_set("v", limit=0),
        lambda: aggregates.collect_set("v", limit=10**9),
        lambda: aggregates.count_distinct("v", limit=0),
        lambda: aggregates.count_distinct("v", limit=10**9),
        lambda: aggregates.count_distinct_approx("v", 0.4),
        lambda: aggregates.count_distinct_approx("v", 0.001),
    ],
)
def test_aggregates_without_a_bound_are_refused(make: Any) -> None:
    """A deviation of 0.001 takes Spark 2^21 registers a key."""
    with pytest.raises(InvalidPipeline, match=r"(collect|collect_set|count_distinct|count_distinct_approx)\('v'"):
        make()


def test_two_aggregates_never_share_a_column_of_the_state() -> None:
    """`avg` under the name "a" keeps "a.sum"."""
    with pytest.raises(InvalidPipeline, match=r"two aggregates keep state under \['a.sum'\]"):
        plan_aggregates({"a": aggregates.avg("v"), "a.sum": aggregates.sum("v")}, pa.schema([("v", pa.int64())]), "op")


def test_a_variance_keeps_its_digits_far_from_zero() -> None:
    """The sum of squares minus the square of the sum would be 0, or negative."""
    rows: Rows = [(1, 1e9 + v) for v in (0.0, 1.0, 2.0, 3.0)]
    aggregating = Aggregating(pa.float64(), {"v": aggregates.variance_pop("v")})
    aggregating.epoch(rows[:1])
    assert same(aggregating.epoch(rows[1:])[1][0], 1.25)


@pytest.mark.parametrize("rsd", [0.39, 0.2, 0.05, 0.01])
def test_a_distinct_count_is_as_good_as_it_says(rsd: float) -> None:
    """Within four standard deviations, and the same whether the rows come at once or one after the other."""
    for count in (10, 1_000, 60_000):
        wanted = {"kinds": aggregates.count_distinct_approx("v", rsd)}
        values = [v * 7919 for v in range(count)]
        ((at_once,),) = Aggregating(pa.int64(), wanted).epoch([(1, v) for v in values]).values()
        in_parts = Aggregating(pa.int64(), wanted)
        third = count // 3
        for part in (values[: 2 * third], values[third:], values[:5]):
            emitted = in_parts.epoch([(1, v) for v in part] + [(2, v) for v in part[:3]])
        assert emitted[1] == (at_once,)
        assert emitted[2][0] >= 3
        assert abs(at_once - count) <= max(1, 4 * rsd * count)


@pytest.mark.parametrize("kind", ["plain", "struct", "list"])
def test_a_set_has_one_nan_and_one_zero_wherever_they_stand(kind: str) -> None:
    """Which of two equal values came first would be seen in the output, and after a restart with other shards another one."""
    data_type = {"plain": pa.float64(), "struct": pa.struct([("a", pa.float64())]), "list": pa.list_(pa.float64())}[
        kind
    ]
    wrapped = {"plain": lambda v: v, "struct": lambda v: {"a": v}, "list": lambda v: [v]}[kind]
    sets = []
    for values in ([0.0, -0.0, math.nan, -math.nan], [-math.nan, math.nan, -0.0, 0.0]):
        job = Aggregating(data_type, {"s": aggregates.collect_set("v")})
        ((found,),) = job.epoch([(1, wrapped(v)) for v in values]).values()
        sets.append(str(found))
    plain = [0.0, math.nan]
    assert sets == [str([wrapped(v) for v in plain])] * 2


@pytest.mark.parametrize("data_type", [pa.float64(), pa.float32()], ids=str)
@pytest.mark.parametrize("cut", range(5))
def test_nan_is_one_value_and_so_is_zero(data_type: pa.DataType, cut: int) -> None:
    """As in Spark; the state is the same whichever of the equal ones came first, within an epoch and over two."""
    values = [0.0, -0.0, math.nan, -math.nan, None]
    states = []
    for some in (values, values[::-1]):
        job = Aggregating(data_type, {"n": aggregates.count_distinct("v")})
        parts: list[Rows] = [[(1, v) for v in part] for part in (some[:cut], some[cut:]) if part]
        assert [job.epoch(part) for part in parts][-1] == {1: (2,)}
        states.append(job.table.column("value.n").values.to_numpy().tobytes())
    assert states[0] == states[1]


def test_more_different_values_than_the_limit_end_the_run_and_a_higher_one_goes_on() -> None:
    """What is stored holds no limit: nothing is lost, and no count is cut off."""
    job = Aggregating(pa.string(), {"n": aggregates.count_distinct("v", limit=3)})
    assert job.epoch([(1, v) for v in "abca"] + [(2, None)]) == {1: (3,), 2: (0,)}
    with pytest.raises(
        InvalidData, match=r"aggregate 'n': a key has 4 different values, and the limit is 3\. Raise it"
    ):
        job.epoch([(1, "d")])
    higher = Aggregating(pa.string(), {"n": aggregates.count_distinct("v", limit=4)})
    higher.table, higher.live = job.table, 2
    assert aggregates.count_distinct("v", limit=3).text == aggregates.count_distinct("v").text == "count_distinct(v)"
    assert higher.epoch([(1, "d"), (1, "a"), (2, "x")]) == {1: (4,), 2: (1,)}


def test_a_set_of_more_values_than_the_limit_ends_the_run_and_a_higher_one_goes_on() -> None:
    """No value is left out without a word."""
    job = Aggregating(pa.string(), {"s": aggregates.collect_set("v", limit=3)})
    assert job.epoch([(1, v) for v in "cabca"] + [(2, None)]) == {1: (["a", "b", "c"],), 2: ([],)}
    with pytest.raises(InvalidData, match=r"the limit is 3\. Raise it \(collect_set\(…"):
        job.epoch([(1, "d")])
    higher = Aggregating(pa.string(), {"s": aggregates.collect_set("v", limit=4)})
    higher.table, higher.live = job.table, 2
    assert higher.epoch([(1, "d"), (2, "x")]) == {1: (["a", "b", "c", "d"],), 2: (["x"],)}


def test_a_first_row_stays_first_whatever_comes_later() -> None:
    """Epoch before place in the epoch."""
    aggregating = Aggregating(pa.string(), {"first": aggregates.first("v"), "last": aggregates.last("v")})
    assert aggregating.epoch([(1, "a"), (1, "b")]) == {1: ("a", "b")}
    assert aggregating.epoch([(1, None)]) == {1: ("a", None)}
    assert aggregating.epoch([(2, "z"), (1, "c")]) == {1: ("a", "c"), 2: ("z", "z")}


@pytest.mark.parametrize("kind", ["plain", "nested"])
def test_times_of_another_zone_are_stored_in_utc(kind: str) -> None:
    """Spark hands timestamps over in the session's time zone, and the state must not depend on it."""
    utc, elsewhere = (pa.timestamp("us", zone) for zone in ("UTC", "America/Los_Angeles"))
    stored, given = (utc, elsewhere) if kind == "plain" else (pa.struct([("t", utc)]), pa.struct([("t", elsewhere)]))
    wanted = {name: ALL[name] for name in (["min", "kinds"] if kind == "plain" else []) + ANY_TYPE}
    plan = plan_aggregates(wanted, pa.schema([("k", pa.int64()), ("v", stored)]), "op")
    operator = AggregateOperator("op", ("k",), "k long", KEYS, plan, "")
    moment = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    value = moment if kind == "plain" else {"t": moment}
    data = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([value], given)], names=["k", "v"])
    rows = group_rows(data, np.array([7], dtype=np.uint64), np.array([0]), ["k"], KEYS)
    version = OpenVersion.of_batches("v", {STATE: operator.state_schemas[STATE].empty()}, operator.state_schemas)
    (output,) = operator.process([RowSlice(rows)], version, EpochClock(0), 0).outputs
    assert output.schema.equals(operator.output_schema)
    assert output["first"].to_pylist() == [value]
    assert output["some"].to_pylist() == [[value]]


@given(
    st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5), min_size=1, max_size=4),
)
@examples(200)
def test_sums_of_halves_are_sums(groups: list[list[int]]) -> None:
    """Of longs: what fits is exact, what does not is noticed; as doubles the exact sum, rounded once."""
    upper = np.array([sum(n >> 32 for n in group) for group in groups])
    lower = np.array([sum(n & LOWER_HALF for n in group) for group in groups])
    sums = [sum(group) for group in groups]
    fits = all(-(2**63) <= total < 2**63 for total in sums)
    longs = longs_of_halves(upper, lower)
    assert (longs is None) == (not fits)
    assert longs is None or longs.tolist() == sums
    assert doubles_of_halves(upper, lower).tolist() == [float(total) for total in sums]


def test_the_mean_of_large_integers_is_the_exact_sum_rounded_once() -> None:
    """Whatever the order of the rows: 2^53 and ones, which one by one would be lost."""
    engine = Aggregating(pa.int64(), {"mean": aggregates.avg("v")})
    assert engine.epoch([(1, n) for n in (2**53, 1, 1, 1)]) == {1: (float(2**53 + 3) / 4,)}
    most = 2**63 - 1
    assert engine.epoch([(2, most), (2, most), (2, 4)]) == {2: (float(2 * most + 4) / 3,)}


def test_each_aggregate_that_can_be_declared_has_a_line_in_the_registry_and_no_other_has() -> None:
    assert set(FUNCTIONS) == set(aggregates.__all__) - {"Aggregate"}
