"""Vectorised processors with time: state that falls due or expires, and deduplication that forgets; against plain models."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_reader import MemoryReader
from model import SCHEMA, HashOf, Key, canonical_key, colliding, examples, hash_functions, key_columns, spread
from sliced import now_whole_now_sliced

from state_runtime import TimedState, VectorizedProcessor
from state_runtime.base.errors import InvalidData, InvalidPipeline, UserCodeError
from state_runtime.processors.builtin.deduplicate import SEEN, Deduplicate, plan_deduplicate
from state_runtime.processors.event_time import drop_late, micros_of, millis_up, plus
from state_runtime.processors.grouping import GroupedRows, group_rows
from state_runtime.processors.operator import EpochClock, ShardResult
from state_runtime.processors.user.keyed_batch import KeyedBatch
from state_runtime.processors.user.vectorized import PlannedState, VectorizedOperator, plan_states, time_mode_of
from state_runtime.state.table import StateSchema
from state_runtime.state.version import OpenVersion

KEYS = SCHEMA.keys
ALL: tuple[Key, ...] = (("a", 1.5), ("b", "nan"), ("", 0.0), (None, 1.5), ("a", None))
TIME = pa.timestamp("us", "UTC")
Row = tuple[Key, int | None]


def grouped(rows: list[Row], hash_of: HashOf = spread, first: int = 0, time_is_key: bool = False) -> GroupedRows:
    """Rows in source order (`id` counts from `first`), with a value that is also their event time in microseconds."""
    arrival = sorted(range(len(rows)), key=lambda n: (n * 7) % 11)
    wanted = [rows[n][0] for n in arrival]
    micros = pa.array([rows[n][1] for n in arrival], pa.int64())
    data = pa.RecordBatch.from_arrays(
        [*key_columns(wanted), micros.cast(TIME), micros, pa.array([first + n for n in arrival], pa.int64())],
        names=["name", "score", "at", "amount", "id"],
    )
    columns, schema = ["name", "score"], KEYS
    hashed = [hash_of(key) for key in wanted]
    if time_is_key:
        columns, schema = [*columns, "at"], schema.append(pa.field("at", TIME))
        hashed = [hash_of((*key, at)) for key, at in zip(wanted, micros.to_pylist(), strict=True)]
    hashes = np.array(hashed, dtype=np.uint64)
    return group_rows(data, hashes, np.array(arrival, dtype=np.int64) * 3, columns, schema)


def no_rows(time_is_key: bool = False) -> GroupedRows:
    return grouped([], time_is_key=time_is_key)


class Job:
    """One operator over epochs, with the state carried along as the runtime does."""

    def __init__(
        self,
        processor: Any,
        states: Mapping[str, StateSchema],
        output: list[tuple[str, pa.DataType]],
        *,
        in_runs: bool = False,
        **how: Any,
    ) -> None:
        """With `in_runs` the operator reads the runtime's own runs, one per epoch."""
        settings: dict[str, Any] = {"kind": "vectorized", "key_columns": ("name", "score"), "key_schema": KEYS, **how}
        self.operator = VectorizedOperator(
            uid="op",
            key_ddl="name string, score double",
            output_schema=pa.schema(output),
            state_schemas=states,
            state_ddl=dict.fromkeys(states, ""),
            processor=processor,
            output_rows_per_batch=5,
            **settings,
        )
        self.runs = OpenVersion.of_batches("v", {}, states) if in_runs else None
        self.batches: dict[str, list[pa.RecordBatch]] = {name: [] for name in states}
        self.live = 0
        self.changes: dict[str, pa.RecordBatch] = {}
        self.late = 0
        self.due_taken: dict[str, int] = {}

    def epoch(self, rows: GroupedRows, now: int = 0, watermark: int = 0, late: int = 0) -> list[dict[str, Any]]:
        schemas = self.operator.state_schemas
        reader = MemoryReader(schemas, self.batches, now)
        before = sum(len(reader.rows(name)) for name in schemas)
        result = self.operator.process(
            now_whole_now_sliced(rows), self.runs or reader, EpochClock(now, watermark, late), 5
        )
        assert result.changes == {}, "nothing is logged before the output is drained"
        produced = [row for batch in result.outputs for row in batch.to_pylist()]
        for name, changed in result.changes.items():
            schemas[name].check_batch(changed, name)
            seen = Counter(
                repr(row)
                for row in zip(*(c.to_pylist() for c in (changed[0], *schemas[name].keys_of(changed))), strict=True)
            )
            assert not seen or max(seen.values()) == 1, "each key once"
        if self.runs is not None:
            self.runs = self.runs.overlaid(result.changes, result.due_taken)
        after = reader.overlaid(result.changes)
        assert result.rows_added == sum(len(after.rows(name)) for name in schemas) - before
        self.batches = {name: [after._batch(name, after.rows(name))] for name in schemas}
        self.changes, self.due_taken = result.changes, result.due_taken
        self.late += result.late_rows
        return produced

    def stored(self, name: str) -> list[dict[str, Any]]:
        return MemoryReader(self.operator.state_schemas, self.batches, -1).rows(name)


def key_of(row: dict[str, Any], prefix: str = "key.") -> Key:
    return canonical_key(row[f"{prefix}name"], row[f"{prefix}score"])


# --- deduplicate -------------------------------------------------------------------------------------------------

times = st.none() | st.integers(0, 24).map(lambda n: n * 500 + 1)
epochs = st.lists(
    st.tuples(st.lists(st.tuples(st.sampled_from(ALL), times), max_size=10), st.integers(0, 4)), min_size=1, max_size=6
)


class DedupModel:
    """Spark's three operators, row by row: `eventTime <= watermark` in microseconds decides."""

    def __init__(self, form: str, delay_ms: int) -> None:
        self.form, self.delay_ms = form, delay_ms
        self.expires: dict[Any, int | None] = {}
        self.late = 0

    def epoch(self, rows: list[Row], watermark_ms: int, late_ms: int, first: int) -> list[int]:
        emitted = []
        for number, (key, at) in enumerate(rows):
            if at is not None and at <= late_ms * 1000:
                self.late += 1
                continue
            identity = (key, at) if self.form == "by time" else key
            if identity not in self.expires:
                emitted.append(first + number)
                forever = self.form == "by key"
                self.expires[identity] = None if forever else at
                if self.form == "within":  # a null long in Spark's row is 0
                    self.expires[identity] = (at or 0) + self.delay_ms * 1000
        self.expires = {k: at for k, at in self.expires.items() if at is None or at > watermark_ms * 1000}
        return emitted


@given(epochs, st.sampled_from(["by time", "within", "by key"]), st.integers(0, 5), hash_functions, st.booleans())
@examples(200)
def test_deduplication_forgets_as_spark_does(
    epochs: list[Any], form: str, delay_ms: int, hash_of: HashOf, in_runs: bool
) -> None:
    """Which rows pass in which epoch and order, which are late, and what is still remembered."""
    by_time = form == "by time"
    keys = ["name", "score", "at"] if by_time else ["name", "score"]
    schema = pa.schema([*KEYS, ("at", TIME)])
    processor = plan_deduplicate(keys, "at", delay_ms, form == "within", schema, "op")
    key_schema = schema if by_time else KEYS
    job = Job(
        processor,
        {SEEN: StateSchema(key_schema, pa.schema([]), time=processor.state_time)},
        [("name", pa.string()), ("score", pa.float64()), ("at", TIME), ("id", pa.int64())],
        kind="deduplicate", event_time="at", key_columns=tuple(keys), key_schema=key_schema, modes=processor.modes,
        in_runs=in_runs,
    )  # fmt: skip
    model = DedupModel(form, delay_ms)
    watermark = late = first = 0
    for rows, step in epochs:
        watermark += step
        produced = job.epoch(grouped(rows, hash_of, first, by_time), 77, watermark, late)
        # The order is the source's within a slice.
        assert sorted(row["id"] for row in produced) == sorted(model.epoch(rows, watermark, late, first))
        assert job.late == model.late
        assert job.due_taken == ({} if form == "by key" else {SEEN: watermark})
        stored = Counter(repr((key_of(r), _micros(r["key.at"])) if by_time else key_of(r)) for r in job.stored(SEEN))
        assert stored == Counter(repr(k) for k in model.expires)
        late, first = watermark, first + 10


def _micros(value: Any) -> int | None:
    return None if value is None else round(value.timestamp() * 1_000_000)


def test_a_key_that_the_epochs_own_watermark_removes_leaves_no_trace() -> None:
    """After a long pause the watermark leaps; its rows need neither be logged nor removed again."""
    processor = Deduplicate("at", 1)
    job = Job(processor, {SEEN: StateSchema(KEYS, pa.schema([]), time="due")}, [("id", pa.int64())], kind="deduplicate")
    produced = job.epoch(grouped([(ALL[0], 5000), (ALL[1], 9000), (ALL[0], 9000)]), watermark=8)
    assert [row["id"] for row in produced] == [0, 1]
    assert job.changes[SEEN].num_rows == 1


@pytest.mark.parametrize(
    ("keys", "event_time", "within", "expected"),
    [
        (["name"], "", False, Deduplicate()),
        (["name", "at"], "at", False, Deduplicate("at")),
        (["name"], "at", False, Deduplicate()),
        (["name"], "at", True, Deduplicate("at", 7)),
        (["name", "at"], "at", True, Deduplicate("at", 7)),
    ],
)
def test_the_form_follows_from_keys_and_watermark(keys: Any, event_time: str, within: bool, expected: Any) -> None:
    """As Spark decides between its operators."""
    schema = pa.schema([*KEYS, ("at", TIME), ("n", pa.int64())])
    planned = plan_deduplicate(keys, event_time, 7, within, schema, "op")
    assert planned == expected
    assert (planned.time_mode == "event") == (planned.state_time == "due") == bool(planned.modes)


def test_deduplication_without_a_fitting_time_is_refused() -> None:
    """The message says what is missing."""
    schema = pa.schema([*KEYS, ("n", pa.int64())])
    with pytest.raises(
        InvalidPipeline, match=r"operator 'op', deduplicate: within_watermark needs .* call Spark's withWatermark"
    ):
        plan_deduplicate(["name"], "", 7, True, schema, "op")
    with pytest.raises(InvalidPipeline, match="there is no event-time column 'at'"):
        plan_deduplicate(["name"], "at", 7, True, schema, "op")
    with pytest.raises(InvalidPipeline, match="'n' has type int64; cast it to timestamp"):
        plan_deduplicate(["name"], "n", 7, True, schema, "op")


# --- event time --------------------------------------------------------------------------------------------------


@given(st.lists(st.none() | st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-5000, 5000)), st.integers(-5, 5))
@examples(100)
def test_late_is_what_spark_compares_in_microseconds(micros: list[int | None], watermark_ms: int) -> None:
    """Rounded up to milliseconds, the comparison gives the same answer; a null is not late."""
    times, valid = micros_of(pa.array(micros, pa.int64()).cast(TIME))
    late = millis_up(times) <= watermark_ms
    for at, is_late, there in zip(micros, late.tolist(), [True] * len(micros) if valid is None else valid, strict=True):
        assert there == (at is not None)
        assert at is None or is_late == (at <= watermark_ms * 1000)


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-(1 << 62), 1 << 62))
@examples(100)
def test_a_sum_stops_at_the_ends_of_a_long(at: int, duration: int) -> None:
    """The alternative is a row that is due in the distant past."""
    expected = min(max(at + duration, -(1 << 63)), (1 << 63) - 1)
    assert plus(np.array([at], dtype=np.int64), duration).tolist() == [expected]


def test_times_of_any_unit_and_zone_are_microseconds() -> None:
    """Arrow sources give seconds or nanoseconds; Spark gives its session's zone."""
    for data_type in (
        TIME,
        pa.timestamp("us"),
        pa.timestamp("ms"),
        pa.timestamp("s", "Asia/Tokyo"),
        pa.timestamp("ns"),
    ):
        column = pa.array([7_000_000], pa.int64()).cast(pa.timestamp("us")).cast(pa.timestamp(data_type.unit))
        micros, valid = micros_of(column.cast(pa.timestamp(data_type.unit, data_type.tz)))
        assert (micros.tolist(), valid) == ([7_000_000], None)


def test_keys_without_any_row_in_time_are_gone() -> None:
    """What is left must still be grouped: every key has a row, in the order they had."""
    rows = grouped([(ALL[0], 1000), (ALL[1], 1000), (ALL[0], 2000), (ALL[2], None)], colliding)
    result = ShardResult(iter(()))
    kept = drop_late(rows, "at", 1, result)
    assert (result.late_rows, kept.groups, sorted(kept.rows["id"].to_pylist())) == (2, 2, [2, 3])
    assert drop_late(rows, "", 1, result) is rows
    assert drop_late(rows, "at", 0, result) is rows
    assert result.late_rows == 2


# --- the user's interface ------------------------------------------------------------------------------------------


class Timers(VectorizedProcessor):
    """Sets the value of each key to its last amount, due then too, and tells what fell due; a test adds to it."""

    time_mode = "event"

    def __init__(self, on_due: Callable[[KeyedBatch], Any] | None = None) -> None:
        self.on_due = on_due

    def states(self) -> Mapping[str, Any]:
        return {"last": TimedState("n long", due=True), "count": "n long"}

    def process(self, batch: KeyedBatch) -> None:
        last = batch.last_rows()["amount"]
        batch.update("last", {"n": last}, due=last)
        before = batch.state("count").values["n"].fill_null(0).to_numpy()
        batch.update("count", {"n": before + batch.sizes})

    def process_due(self, name: str, batch: KeyedBatch) -> Any:
        assert name == "last"
        assert (batch.rows.num_rows, batch.sizes.sum()) == (0, 0)
        assert bool(batch.state("last").found.all())
        if self.on_due is not None:
            self.on_due(batch)
        count = batch.state("count").values["n"]
        return pa.table(
            [*batch.keys.columns, batch.state("last").values["n"], count], names=["name", "score", "n", "count"]
        )


DUE_STATES = {
    "last": StateSchema(KEYS, pa.schema([("n", pa.int64())]), time="due"),
    "count": StateSchema(KEYS, pa.schema([("n", pa.int64())])),
}
DUE_OUTPUT = [("name", pa.string()), ("score", pa.float64()), ("n", pa.int64()), ("count", pa.int64())]


due_rows = st.lists(st.tuples(st.sampled_from(ALL), st.none() | st.integers(1, 9)), max_size=8)


@given(st.lists(st.tuples(due_rows, st.integers(0, 3)), min_size=1, max_size=6), hash_functions, st.booleans())
@examples(120)
def test_what_is_due_comes_once_after_the_rows_and_is_then_gone(
    epochs: list[Any], hash_of: HashOf, in_runs: bool
) -> None:
    """Per epoch: rows first, which may set another time; then all keys whose time has come. A null time never comes."""
    job = Job(Timers(), DUE_STATES, DUE_OUTPUT, in_runs=in_runs)
    last: dict[Key, int | None] = {}
    count: Counter[Key] = Counter()
    watermark = 0
    for rows, step in epochs:
        watermark += step
        produced = job.epoch(grouped(rows, hash_of), watermark=watermark)
        last |= dict(rows)
        count.update(key for key, _ in rows)
        due = {key: at for key, at in last.items() if at is not None and at <= watermark}
        assert Counter((key_of(r, ""), r["n"], r["count"]) for r in produced) == Counter(
            (key, at, count[key]) for key, at in due.items()
        )
        last = {key: at for key, at in last.items() if key not in due}
        assert {key_of(r): r["value.n"] for r in job.stored("last")} == last
        assert {key_of(r): r["due"] for r in job.stored("last")} == last
        assert {key_of(r): r["value.n"] for r in job.stored("count")} == dict(count)
        assert job.due_taken == {"last": watermark}


@pytest.mark.parametrize("in_runs", [False, True])
def test_a_due_key_that_is_updated_stays_and_may_be_due_again(in_runs: bool) -> None:
    """A repeating timer; one set into the past fires again in the next epoch, not in a loop."""

    def again(batch: KeyedBatch) -> None:
        n = batch.state("last").values["n"].to_numpy()
        batch.update("last", {"n": n + 10}, where=n < 20, due=n[n < 20] + 1)

    job = Job(Timers(again), DUE_STATES, DUE_OUTPUT, in_runs=in_runs)
    job.epoch(grouped([(ALL[0], 5), (ALL[1], 25)]), watermark=1)
    assert sorted(r["n"] for r in job.epoch(no_rows(), watermark=30)) == [15, 25]
    assert [(key_of(r), r["value.n"], r["due"]) for r in job.stored("last")] == [(ALL[0], 15, 6)]
    assert [r["n"] for r in job.epoch(no_rows(), watermark=30)] == [25], "shown as it is by then"
    assert [r["n"] for r in job.epoch(no_rows(), watermark=30)] == [25]
    assert job.epoch(no_rows(), watermark=30) == []
    assert job.stored("last") == []


def test_a_due_key_can_be_cleared_and_other_states_changed() -> None:
    """All of `update` and `clear` is there, on all states."""

    def change(batch: KeyedBatch) -> None:
        batch.clear("count")

    job = Job(Timers(change), DUE_STATES, DUE_OUTPUT)
    assert job.epoch(grouped([(ALL[0], 5), (ALL[1], 5)]), watermark=4) == []
    assert [r["count"] for r in job.epoch(grouped([(ALL[2], 9)]), watermark=5)] == [None, None]
    assert [key_of(r) for r in job.stored("count")] == [ALL[2]]


class ByBatchTime(Timers):
    time_mode = "processing"

    def process(self, batch: KeyedBatch) -> None:
        batch.update("last", {"n": batch.last_rows()["amount"]}, due=batch.batch_time_ms + 10)


def test_the_time_mode_says_which_clock_counts() -> None:
    """Processing time: the batch time, and no watermark."""
    job = Job(ByBatchTime(), DUE_STATES, DUE_OUTPUT)
    assert job.operator.time_domain == "processing"
    assert job.epoch(grouped([(ALL[0], 5)]), now=100, watermark=1000) == []
    assert job.epoch(no_rows(), now=109, watermark=1000) == []
    assert [r["n"] for r in job.epoch(no_rows(), now=110)] == [5]
    assert job.due_taken == {"last": 110}


class Without(VectorizedProcessor):
    """No `process_due`, and a state with each time."""

    time_mode = "event"

    def states(self) -> Mapping[str, Any]:
        return {"quiet": TimedState("n long", due=True), "fresh": TimedState("n long", ttl_ms=10), "plain": "n long"}

    def process(self, batch: KeyedBatch) -> pa.Table:
        assert (batch.batch_time_ms, batch.watermark_ms, batch.late_watermark_ms)[1:] == (4, 3)
        amounts = batch.last_rows()["amount"]
        before = batch.state("fresh").values["n"]
        batch.update("fresh", {"n": amounts})
        batch.update("quiet", {"n": amounts}, due=pa.array([None] * batch.num_keys, pa.int64()))
        batch.update("plain", {"n": amounts})
        batch.update("quiet", {"n": amounts}, due=amounts.to_numpy(), where=np.ones(batch.num_keys, dtype=bool))
        return pa.table([*batch.keys.columns, before, amounts], names=["name", "score", "n", "count"])


def without(**how: Any) -> Job:
    planned = plan_states(Without().states(), Without(), "op")
    schemas = {n: StateSchema(KEYS, pa.schema([("n", pa.int64())]), time=each.time) for n, each in planned.items()}
    ttl = {name: each.ttl_ms for name, each in planned.items() if each.ttl_ms is not None}
    return Job(Without(), schemas, DUE_OUTPUT, ttl_ms=ttl, **how)


def test_a_value_with_a_ttl_is_gone_when_it_has_run_out_and_renewed_by_an_update() -> None:
    """Counted from the batch time of the write; a look-up at the very millisecond does not find it."""
    job = without()
    assert [r["n"] for r in job.epoch(grouped([(ALL[0], 50)]), 100, 4, 3)] == [None]
    assert [r["n"] for r in job.epoch(grouped([(ALL[0], 51)]), 109, 4, 3)] == [50]
    assert [r["n"] for r in job.epoch(grouped([(ALL[0], 52)]), 118, 4, 3)] == [51]
    assert [r["n"] for r in job.epoch(grouped([(ALL[0], 53)]), 128, 4, 3)] == [None]
    assert [r["expires"] for r in job.stored("fresh")] == [138]


def test_without_process_due_what_is_due_is_forgotten() -> None:
    """The default: an index by time as a TTL in event time."""
    job = without()
    job.epoch(grouped([(ALL[0], 5), (ALL[1], 60)]), 100, 4, 3)
    assert job.epoch(no_rows(), 101, 5, 4) == []
    assert [key_of(r) for r in job.stored("quiet")] == [ALL[1]]
    assert len(job.stored("plain")) == 2


def test_late_rows_are_dropped_before_the_processor_and_counted() -> None:
    """As Spark drops them before an operator in time mode "event"; keys that have no other row do not get a call."""
    job = without(event_time="at")
    produced = job.epoch(grouped([(ALL[0], 3000), (ALL[1], 3001), (ALL[1], 2000)]), 100, 4, 3)
    assert [(key_of(r, ""), r["count"]) for r in produced] == [(ALL[1], 3001)]
    assert job.late == 2
    assert job.epoch(grouped([(ALL[0], 3000)]), 100, 4, 3) == []
    assert len(job.stored("plain")) == 1


def test_what_a_manifest_says_of_times() -> None:
    """The time column of each state, and the mode, which cannot change."""
    entry = without().operator.entry()
    assert entry.modes == "event"
    assert [(s.name, s.time) for s in entry.states] == [("fresh", "expires"), ("plain", ""), ("quiet", "due")]
    built_in = Deduplicate("at", 5)
    states = {SEEN: StateSchema(KEYS, pa.schema([]), time="due")}
    entry = Job(built_in, states, [("id", pa.int64())], kind="deduplicate", modes=built_in.modes).operator.entry()
    assert (entry.kind, entry.modes, entry.states[0].time) == ("deduplicate", "within 5 ms of at", "due")


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (
            lambda b: b.update("count", {"n": b.sizes}, due=3),
            "state 'count': update.* got due=…, and the state has none",
        ),
        (lambda b: b.update("last", {"n": b.sizes}, due=np.zeros(5)), "got 5 values in column 'due' for 2 of 2 keys"),
        (
            lambda b: b.update("last", {"n": b.sizes}, due=np.full(2, 0.5)),
            "column 'due' is declared as int64 but holds",
        ),
        (lambda b: b.update("last", {"n": b.sizes}, due="soon"), "a str for column 'due'"),
    ],
)
def test_a_due_that_cannot_be_is_refused(update: Callable[[KeyedBatch], None], message: str) -> None:
    """With operator, state and what to give instead."""

    class Wrong(Timers):
        def process(self, batch: KeyedBatch) -> None:
            update(batch)

    with pytest.raises(InvalidData, match=message):
        Job(Wrong(), DUE_STATES, DUE_OUTPUT).epoch(grouped([(ALL[0], 5), (ALL[1], 5)]))


def test_what_process_due_raises_is_user_codes() -> None:
    """It runs behind the same guard as `process`."""

    def fails(batch: KeyedBatch) -> None:
        raise ZeroDivisionError("boom")

    with pytest.raises(UserCodeError, match="operator 'op', shard 5: the processor raised ZeroDivisionError: boom"):
        Job(Timers(fails), DUE_STATES, DUE_OUTPUT).epoch(grouped([(ALL[0], 5)]), watermark=9)


def test_the_example_in_the_docstring_works() -> None:
    """A reader starts from it."""
    text = inspect.cleandoc(VectorizedProcessor.__doc__ or "").split("handled at once:\n")[1]
    names: dict[str, Any] = {"pa": pa, "pc": pc, "VectorizedProcessor": VectorizedProcessor, "TimedState": TimedState}
    exec(inspect.cleandoc(text), names)  # our own documentation
    processor = names["Silence"]()
    assert {n: each.time for n, each in plan_states(processor.states(), processor, "op").items()} == {"last": "due"}
    device = pa.schema([("device", pa.string())])
    states = {"last": StateSchema(device, pa.schema([("at", TIME)]), time="due")}
    job = Job(
        processor, states, [("device", pa.string()), ("silent_since", TIME)], key_columns=("device",), key_schema=device
    )
    data = pa.record_batch({"device": ["x", "y", "x"], "at": pa.array([1_000_000, 2_000_000, 3_000_000]).cast(TIME)})
    hashes = np.array([spread((d,)) for d in data["device"].to_pylist()], dtype=np.uint64)
    assert job.epoch(group_rows(data, hashes, np.arange(3), ["device"], device)) == []
    nothing = group_rows(data.slice(0, 0), hashes[:0], np.arange(0), ["device"], device)
    silent = job.epoch(nothing, watermark=62_000)
    assert [(row["device"], _micros(row["silent_since"])) for row in silent] == [("y", 2_000_000)]
    silent = job.epoch(nothing, watermark=63_000)
    assert [(row["device"], _micros(row["silent_since"])) for row in silent] == [("x", 3_000_000)]


class NoMode(Timers):
    time_mode = "none"


class BadMode(Timers):
    time_mode = "EventTime"  # type: ignore[assignment]


def test_states_with_times_are_checked_when_the_job_is_built() -> None:
    """A due that no clock reaches, a mode that is none, a TTL that nothing survives."""
    assert plan_states(Timers().states(), Timers(), "op") == {
        "last": PlannedState("n long", "due"),
        "count": PlannedState("n long"),
    }
    with pytest.raises(
        InvalidPipeline, match="operator 'op': state 'last' of NoMode has due=True, and its time_mode is 'n"
    ):
        plan_states(NoMode().states(), NoMode(), "op")
    with pytest.raises(
        InvalidPipeline, match="time_mode of BadMode is 'EventTime'; there are 'none', 'processing', 'event'"
    ):
        time_mode_of(BadMode(), "op")
    for wrong in ({"ttl_ms": 0}, {"ttl_ms": -5}, {"ttl_ms": 5, "due": True}, {}):
        with pytest.raises(InvalidPipeline, match="TimedState"):
            TimedState("n long", **wrong)
