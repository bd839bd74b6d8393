"""The interval join, against two plain lists: which pairs come out, what is kept, and when it goes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, get_args

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from memory_reader import MemoryReader
from model import HashOf, Key, canonical_key, colliding, examples, hash_functions, key_columns, spread
from sliced import in_slices, now_whole_now_sliced

from state_runtime.base.errors import InvalidData, InvalidPipeline
from state_runtime.base.joining import UNBOUNDED_US, Column, Compared, How, JoinTerms, SideName
from state_runtime.processors import places
from state_runtime.processors.builtin import interval_join
from state_runtime.processors.builtin.interval_join import IntervalJoinOperator
from state_runtime.processors.builtin.interval_join_plan import (
    LEFT,
    RIGHT,
    plan_interval_join,
)
from state_runtime.processors.builtin.stream_join import StreamJoin
from state_runtime.processors.grouping import GroupedRows, group_rows
from state_runtime.processors.operator import EpochClock, RowSlice
from state_runtime.processors.sides import LEFT_COLUMN, RIGHT_COLUMN, SIDE_COLUMN
from state_runtime.state.table import entries_of, hashes_of
from state_runtime.state.version import OpenVersion

TIME = pa.timestamp("us", "UTC")
LEFT_SCHEMA = pa.schema(
    [
        ("l_id", pa.int64()),
        ("name", pa.string()),
        ("l_at", TIME),
        ("score", pa.float64()),
        ("tags", pa.list_(pa.string())),
        ("l_half", pa.int64()),
        ("l_some", pa.bool_()),
    ]
)
RIGHT_SCHEMA = pa.schema(
    [
        ("r_at", TIME),
        ("r_name", pa.string()),
        ("r_score", pa.float64()),
        ("r_id", pa.int64()),
        ("r_half", pa.int64()),
        ("r_some", pa.bool_()),
    ]
)
# Few keys, so that they meet; with null in either column, NaN, and both zeros.
KEYS: tuple[Key, ...] = (("a", 1.5), ("b", "nan"), ("", 0.0), (None, 1.5), ("a", None))
Row = tuple[Key, int | None]
Pair = tuple[int | None, int | None]


Join = TypeVar("Join", bound=StreamJoin)

TERMS = JoinTerms(how="inner", lower_us=0, upper_us=0)
ASKED = Compared("=", Column("left", "l_half"), Column("right", "r_half"))


def operator_of(
    how: str,
    lower_us: int,
    upper_us: int,
    rows_per_batch: int = 4,
    *,
    is_asked: bool = False,
    equal: tuple[bool, SideName | None] = (False, None),
) -> IntervalJoinOperator:
    when = tuple(
        f"{letter}_some" if is_asked and how in (f"{side}-outer", "full-outer") else ""
        for letter, side in (("l", "left"), ("r", "right"))
    )
    terms = JoinTerms(
        how=how,  # type: ignore[arg-type]
        lower_us=lower_us,
        upper_us=upper_us,
        has_equal_times=equal[0],
        undated=equal[1],
        condition=ASKED if is_asked else None,
        when=(when[0], when[1]),
    )
    return joined(IntervalJoinOperator, terms, rows_per_batch)


def joined(kind: type[Join], terms: JoinTerms, rows_per_batch: int) -> Join:
    plan = plan_interval_join(
        LEFT_SCHEMA,
        RIGHT_SCHEMA,
        left_keys=["name", "score"],
        right_keys=["r_name", "r_score"],
        left_time="l_at",
        right_time="r_at",
        terms=terms,
        uid="join",
    )
    ddl = dict.fromkeys((LEFT, RIGHT), "")
    return kind("join", ("name", "score"), "name string, score double", plan, ddl, rows_per_batch)


def tagged(
    left: Sequence[Row], right: Sequence[Row], hash_of: HashOf, first_id: int = 0, zone: str = "UTC", seed: int = 0
) -> GroupedRows:
    """Both sides' rows in one batch, in another order than the source's, with ids that count from `first_id`."""
    rows = [(0, key, at, first_id + n) for n, (key, at) in enumerate(left)]
    rows += [(1, key, at, first_id + n) for n, (key, at) in enumerate(right)]
    arrival = list(range(len(rows)))
    random.Random(seed).shuffle(arrival)
    rows = [rows[i] for i in arrival]
    wanted = [key for _, key, _, _ in rows]
    sides = np.array([side for side, _, _, _ in rows], dtype=np.int32)
    time = pa.timestamp("us", zone)

    def struct(side: int, id_name: str, at_name: str, extra: bool) -> pa.Array:
        here = [s == side for s in sides]
        columns = [
            pa.array([i if h else None for h, (_, _, _, i) in zip(here, rows, strict=True)], pa.int64()),
            pa.array([at if h else None for h, (_, _, at, _) in zip(here, rows, strict=True)], pa.int64()).cast(time),
        ]
        ids = [i if h else None for h, (_, _, _, i) in zip(here, rows, strict=True)]
        columns.append(pa.array([None if i is None else i % 2 for i in ids], pa.int64()))
        columns.append(pa.array([None if i is None else i % 5 != 0 for i in ids], pa.bool_()))
        names = [id_name, at_name, f"{id_name[0]}_half", f"{id_name[0]}_some"]
        if extra:
            columns.append(pa.array([[f"t{i}"] if h else None for h, (_, _, _, i) in zip(here, rows, strict=True)]))
            names.append("tags")
        if side == 1:  # any order of the fields will do
            columns, names = columns[::-1], names[::-1]
        return pa.StructArray.from_arrays(columns, names=names, mask=pa.array([not h for h in here], pa.bool_()))

    data = pa.RecordBatch.from_arrays(
        [
            *key_columns(wanted, negative_zero=len(rows) % 2 == 0),
            pa.array(sides),
            struct(0, "l_id", "l_at", True),
            struct(1, "r_id", "r_at", False),
        ],
        names=["name", "score", SIDE_COLUMN, LEFT_COLUMN, RIGHT_COLUMN],
    )
    hashes = np.array([hash_of(key) for key in wanted], dtype=np.uint64)
    keys = pa.schema([LEFT_SCHEMA.field("name"), LEFT_SCHEMA.field("score")])
    return group_rows(data, hashes, np.array(arrival, dtype=np.int64) * 2, ["name", "score"], keys)


NO_ROWS = GroupedRows(pa.RecordBatch.from_pylist([], pa.schema([])), *(np.zeros(0, dtype=np.int64),) * 2,
                      np.zeros(0, dtype=np.uint64), [], np.zeros(0, dtype=np.int64))  # fmt: skip


@dataclass
class Waiting:
    """A row that the model keeps."""

    key: Key
    at_us: int
    id: int
    matched: bool = False


@dataclass
class Model:
    """Spark's rules, pair by pair: match everything, then remove by the state watermarks.

    Attributes:
        is_asked: a pair must also have ids whose sum is even, and a left row that is to match, or a right one of an
            outer join, an id that is no multiple of 5.
        equal: whether the times are keys, and which side's are no event time.
    """

    how: str
    lower_us: int
    upper_us: int
    is_asked: bool = False
    equal: tuple[bool, SideName | None] = (False, None)
    left: list[Waiting] = field(default_factory=list)
    right: list[Waiting] = field(default_factory=list)
    late: int = 0

    @property
    def outer(self) -> tuple[bool, bool]:
        return self.how in ("left-outer", "full-outer"), self.how in ("right-outer", "full-outer")

    def epoch(
        self, left: Sequence[Row], right: Sequence[Row], watermark_ms: int, late_ms: int, first: int
    ) -> list[Pair]:
        pairs: list[Pair] = []
        new = []
        has_range = self.lower_us != -UNBOUNDED_US or self.upper_us != UNBOUNDED_US
        for side, (rows, is_outer) in enumerate(zip((left, right), self.outer, strict=True)):
            kept = []
            for n, (key, at) in enumerate(rows):
                if at is not None and at <= late_ms * 1000 and self.equal[1] != ("left", "right")[side]:
                    self.late += 1
                elif is_outer and self.is_asked and (first + n) % 5 == 0:
                    pairs.append((first + n, None) if side == 0 else (None, first + n))
                elif (at is not None or not has_range) and (None not in key or is_outer):
                    kept.append(Waiting(key, at or 0, first + n))
            new.append(kept)
        for one in [*self.left, *new[0]]:
            for other in [*self.right, *new[1]]:
                is_new = any(one is w for w in new[0]) or any(other is w for w in new[1])
                in_range = one.at_us + self.lower_us <= other.at_us <= one.at_us + self.upper_us
                is_asked = not self.is_asked or (one.id + other.id) % 2 == 0
                if is_new and None not in one.key and one.key == other.key and in_range and is_asked:
                    if self.how != "left-semi":
                        pairs.append((one.id, other.id))
                    elif not one.matched:
                        pairs.append((one.id, None))
                    one.matched = other.matched = True
        # StreamingJoinHelper.getStateValueWatermark: ms, minus one because the range includes its ends.
        # Of keys there is no such comparison.
        later_ms = 0 if self.equal[0] else 1
        left_bound = ((watermark_ms * 1000 - self.upper_us) // 1000 - later_ms) * 1000
        right_bound = ((watermark_ms * 1000 + self.lower_us) // 1000 - later_ms) * 1000
        self.left, self.right = self.left + new[0], self.right + new[1]
        if self.outer[0]:
            pairs += [(w.id, None) for w in self.left if w.at_us <= left_bound and not w.matched]
        if self.outer[1]:
            pairs += [(None, w.id) for w in self.right if w.at_us <= right_bound and not w.matched]
        is_done = self.how == "left-semi"
        self.left = [w for w in self.left if w.at_us > left_bound and not (is_done and w.matched)]
        self.right = [w for w in self.right if w.at_us > right_bound]
        return pairs


class Job:
    """The operator over epochs, with the state carried along as the runtime does."""

    def __init__(self, operator: IntervalJoinOperator, *, in_runs: bool = False) -> None:
        """With `in_runs` the operator reads the runtime's own runs, one per epoch; `reader` still tells what is stored."""
        self.operator = operator
        self.runs: OpenVersion | None = None
        if in_runs:
            self.runs = OpenVersion.of_batches("v", {}, operator.state_schemas)
        self.reader = MemoryReader(operator.state_schemas)
        self.late = self.live = self.snapshots = 0
        self.changes: dict[str, pa.RecordBatch] = {}
        self.cut = now_whole_now_sliced

    def epoch(self, rows: GroupedRows, watermark_ms: int, late_ms: int) -> list[pa.RecordBatch]:
        self.snapshots += 1
        clock = EpochClock(0, watermark_ms, late_ms, self.snapshots)
        result = self.operator.process(self.cut(rows), self.runs or self.reader, clock, 3)
        assert result.changes == {}, "nothing is logged before the output is drained"
        produced = list(result.outputs)
        for name, changed in result.changes.items():
            schema = self.operator.state_schemas[name]
            schema.check_batch(changed, name)
            identities = list(zip(hashes_of(changed).tolist(), entries_of(changed).tolist(), strict=True))
            assert len(set(identities)) == len(identities), "each row once"
        assert result.due_taken == {LEFT: watermark_ms, RIGHT: watermark_ms}
        if self.runs is not None:
            self.runs = self.runs.overlaid(result.changes, result.due_taken)
        self.reader = self.reader.overlaid(result.changes)
        # Fold as a compaction would, so that the oracle stays quick.
        self.reader.batches = {s: [self.reader._batch(s, self.reader.rows(s))] for s in self.reader.schemas}
        self.live += result.rows_added
        assert self.live == sum(len(self.reader.rows(name)) for name in self.reader.schemas)
        self.late += result.late_rows
        self.changes = result.changes
        return produced

    def stored(self, name: str) -> Counter[Any]:
        prefix = name[0]
        return Counter(
            (
                canonical_key(r["key.name"], r["key.score"]),
                r[f"value.{prefix}_id"],
                r.get("value.__stillstate_matched"),
            )
            for r in self.reader.rows(name)
        )


def pairs_of(batches: Sequence[pa.RecordBatch], lefts: dict[int, Row], rights: dict[int, Row]) -> Counter[Pair]:
    """Ids of the pairs; all other columns must be those of the rows."""
    pairs: Counter[Pair] = Counter()
    for row in (row for batch in batches for row in batch.to_pylist()):
        left, right = row["l_id"], row.get("r_id")  # a semi join has no right side
        keys = {rows[n][0] for n, rows in ((left, lefts), (right, rights)) if n is not None}
        assert keys == {canonical_key(row["name"], row["score"])}
        assert _micros(row["l_at"]) == (None if left is None else lefts[left][1])
        assert row["tags"] == (None if left is None else [f"t{left}"])
        assert _micros(row.get("r_at")) == (None if right is None else rights[right][1])
        pairs[left, right] += 1
    return pairs


def _micros(value: Any) -> int | None:
    return None if value is None else round(value.timestamp() * 1_000_000)


times = st.none() | st.integers(0, 24).map(lambda n: n * 500 + 1)  # µs, around whole milliseconds
rows = st.lists(st.tuples(st.sampled_from(KEYS), times), max_size=8)
epochs = st.lists(st.tuples(rows, rows, st.integers(0, 4)), min_size=1, max_size=6)
bounds = st.tuples(st.integers(-6, 6), st.integers(-6, 6)).map(lambda b: (min(b) * 500, max(b) * 500))
open_ends = st.tuples(
    bounds, st.sampled_from([(False, False), (False, False), (True, False), (False, True), (True, True)])
)
equal_times = st.sampled_from([(False, None), (False, None), (True, None), (True, "left"), (True, "right")])
ranges = open_ends.map(
    lambda drawn: (
        -UNBOUNDED_US if drawn[1][0] else drawn[0][0],
        UNBOUNDED_US if drawn[1][1] else drawn[0][1],
    )
)


@pytest.fixture(params=[interval_join.SCALE_MAX, 0], ids=["microseconds", "ranks"])
def scale(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are compared on either scale."""
    monkeypatch.setattr(interval_join, "SCALE_MAX", request.param)


@given(
    epochs,
    ranges,
    st.sampled_from(get_args(How)),
    hash_functions,
    st.sampled_from([1, 3, 100]),
    st.booleans(),
    st.booleans(),
    equal_times,
)
@examples(300)
def test_the_join_is_two_lists(
    scale: None,
    epochs: list[Any],
    ends: Any,
    how: str,
    hash_of: HashOf,
    per_batch: int,
    in_runs: bool,
    is_asked: bool,
    equal: tuple[bool, SideName | None],
) -> None:
    """Any rows over epochs with any watermarks: the pairs, the unmatched rows, the state and the late rows of each epoch."""
    ends = (0, 0) if equal[0] else ends
    job = Job(operator_of(how, *ends, rows_per_batch=per_batch, is_asked=is_asked, equal=equal), in_runs=in_runs)
    model = Model(how, *ends, is_asked, equal)
    lefts: dict[int, Row] = {}
    rights: dict[int, Row] = {}
    watermark = late = first = 0
    for left, right, step in epochs:
        watermark += step
        lefts |= {first + n: row for n, row in enumerate(left)}
        rights |= {first + n: row for n, row in enumerate(right)}
        given_rows = tagged(left, right, hash_of, first) if left or right else NO_ROWS
        produced = job.epoch(given_rows, watermark, late)
        assert all(0 < batch.num_rows <= per_batch for batch in produced)
        assert pairs_of(produced, lefts, rights) == Counter(model.epoch(left, right, watermark, late, first))
        for name, rows, is_outer in zip((LEFT, RIGHT), (model.left, model.right), model.outer, strict=True):
            assert job.stored(name) == Counter((w.key, w.id, w.matched if is_outer else None) for w in rows)
        assert job.late == model.late
        late, first = watermark, first + 10


@given(epochs, bounds)
@examples(40)
def test_reading_the_state_in_pieces_changes_nothing(epochs: list[Any], bounds: Any) -> None:
    """Stored rows are read a bounded number at a time; with a bound of one every key is a piece of its own."""
    jobs = [Job(operator_of("left-outer", *bounds)) for _ in range(2)]
    for job in jobs:
        job.cut = in_slices  # the places of rows depend on it
    watermark = late = 0
    whole = interval_join.STORED_ROWS_PER_READ
    for left, right, step in epochs:
        watermark += step
        produced = []
        for job, rows_per_read in zip(jobs, (whole, 1), strict=True):
            interval_join.STORED_ROWS_PER_READ = rows_per_read
            try:
                batches = job.epoch(tagged(left, right, spread), watermark, late)
            finally:
                interval_join.STORED_ROWS_PER_READ = whole
            produced.append(sorted(repr(row) for batch in batches for row in batch.to_pylist()))
        assert produced[0] == produced[1]
        assert repr(jobs[0].reader.rows(LEFT)) == repr(jobs[1].reader.rows(LEFT)), "NaN is not equal to itself"
        late = watermark


wide_times = st.integers(-(1 << 61), 1 << 61) | st.integers(0, 5)
points = st.lists(st.tuples(st.integers(0, 400), wide_times), min_size=1, max_size=12)


@given(points, points, st.integers(-(1 << 61), 1 << 61), st.integers(0, 1 << 61))
@example([(8, 0)], [(0, 0), (0, (1 << 61) - 2)], 0, 1)  # 8 times the distance is 2^64
@examples(200)
def test_key_and_time_as_one_number_never_wrap_around(left: Any, right: Any, lower: int, width: int) -> None:
    """Times so far apart that many keys do not fit beside them, and keys that only the other side has."""

    def rows_of(points: list[tuple[int, int]]) -> interval_join._Rows:
        group, micros = (np.array(c, dtype=np.int64) for c in zip(*points, strict=True))
        return interval_join._Rows(group, np.zeros(len(points), dtype=np.uint64), [], [], micros)

    index = interval_join._TimeIndex(rows_of(right))
    begin, counts = index.ranges(rows_of(left), lower, lower + width)
    for (key, at), first, count in zip(left, begin.tolist(), counts.tolist(), strict=True):
        found = Counter(index.order[first : first + count].tolist())
        in_range = [n for n, (k, t) in enumerate(right) if k == key and at + lower <= t <= at + lower + width]
        assert found == Counter(in_range)


class Counting(MemoryReader):
    """Says what was read."""

    read: list[tuple[str, int]]

    def read_entries(self, state: str, hashes: Any, keys: Any) -> Any:
        self.read.append((state, len(hashes)))
        return super().read_entries(state, hashes, keys)


def test_only_the_other_sides_rows_of_keys_with_new_rows_are_read() -> None:
    """New left rows look at stored right rows of their keys only, and storing needs no look at the own side."""
    operator = operator_of("inner", -1000, 1000)
    job = Job(operator)
    a, b, c = KEYS[0], KEYS[1], KEYS[2]
    job.epoch(tagged([(a, 5000), (b, 5000)], [(a, 5001), (c, 5000)], spread), 0, 0)
    reader = Counting(operator.state_schemas, job.reader.batches)
    for left, right, expected in (
        ([(a, 6001), (b, 6000)], [], [(RIGHT, 1)]),  # nothing is stored of b on the right
        ([], [(b, 6000)], [(LEFT, 1)]),
        ([(("new", 1.0), 6000)], [(("new", 1.0), 6000)], []),
        ([], [], []),
    ):
        reader.read = []
        rows = tagged(left, right, spread) if left or right else NO_ROWS
        list(operator.process([RowSlice(rows)], reader, EpochClock(0, 0, 0, 2), 0).outputs)
        assert reader.read == expected


def test_a_key_with_many_matches_makes_many_small_batches() -> None:
    """300 × 300 rows of one key are 90,000 pairs; no batch holds more than asked for, and every pair comes once: the matches
    of a row in order of time, those of one time as the source had them."""
    job = Job(operator_of("left-outer", -10_000_000, 10_000_000, rows_per_batch=1000))
    rows = [(KEYS[0], 3 - n % 3) for n in range(300)]
    produced = job.epoch(tagged(rows, rows, spread), 0, 0)
    assert {batch.num_rows for batch in produced} == {1000}
    pairs = [pair for p in produced for pair in zip(p["l_id"].to_pylist(), p["r_id"].to_pylist(), strict=True)]
    assert pairs == [(a, b) for a in range(300) for b in sorted(range(300), key=lambda n: (3 - n % 3, n))]


def test_a_row_is_written_again_only_when_it_matches_for_the_first_time() -> None:
    """Every rewrite is a row in the changelog."""
    job = Job(operator_of("left-outer", -1000, 1000))
    job.epoch(tagged([(KEYS[0], 5000), (KEYS[0], 9000)], [], spread), 0, 0)
    job.epoch(tagged([], [(KEYS[0], 5000)], spread), 0, 0)
    assert job.changes[LEFT].num_rows == 1
    assert job.changes[LEFT].column("due").to_pylist() == [7]
    job.epoch(tagged([], [(KEYS[0], 5001)], spread), 0, 0)
    assert job.changes[LEFT].num_rows == 0
    job.epoch(NO_ROWS, 6, 0)
    assert job.changes[LEFT].num_rows == 0
    assert job.epoch(NO_ROWS, 7, 6) == [], "it has matched"
    assert job.changes[LEFT].column(1).to_pylist() == [True]
    assert sum(b.num_rows for b in job.epoch(NO_ROWS, 11, 7)) == 1


def test_times_at_the_ends_of_a_long_do_not_wrap_around(scale: None) -> None:
    """A row at the end of time must not match one at its beginning, nor be due at once."""
    end = (1 << 63) - 1
    operator = operator_of("inner", -5_000_000, 5_000_000)
    rows = tagged([(KEYS[0], end), (KEYS[0], -end)], [(KEYS[0], end - 1), (KEYS[0], -6000)], spread)
    result = operator.process([RowSlice(rows)], MemoryReader(operator.state_schemas), EpochClock(0, 0, -end, 1), 0)
    (produced,) = result.outputs
    assert (produced["l_id"].to_pylist(), produced["r_id"].to_pylist()) == ([0], [0])
    assert result.changes[LEFT].num_rows == 1, "the earliest time is due, the latest is not"
    assert result.changes[RIGHT].num_rows == 2
    operator = operator_of("inner", -end, end)
    result = operator.process([RowSlice(rows)], MemoryReader(operator.state_schemas), EpochClock(0, 0, -end, 1), 0)
    (produced,) = result.outputs
    assert (produced["l_id"].to_pylist(), produced["r_id"].to_pylist()) == ([0, 1], [0, 1])


def test_rows_in_the_sessions_time_zone_are_stored_in_utc() -> None:
    """Spark hands timestamps over in the session's zone; types of the state must not depend on it."""
    job = Job(operator_of("inner", 0, 0))
    produced = job.epoch(tagged([(KEYS[0], 5000)], [(KEYS[0], 5000)], spread, zone="America/Los_Angeles"), 0, 0)
    assert [batch.schema for batch in produced] == [job.operator.output_schema]
    assert job.stored(LEFT) == Counter([(KEYS[0], 0, None)])


def test_the_order_of_the_output_does_not_depend_on_the_order_of_arrival() -> None:
    """A task that runs again gets its shuffle blocks in another order, and later steps number its output's rows."""
    draw = random.Random(5)
    left, right = ([(draw.choice(KEYS), draw.randrange(1, 9) * 500) for _ in range(40)] for _ in range(2))
    rows = tagged(left, right, colliding)
    again = tagged(left, right, colliding, seed=1)
    outputs = [
        [row for b in operator_of("left-outer", -1000, 1000).process(
            [RowSlice(given_rows)], MemoryReader(operator_of("left-outer", 0, 0).state_schemas), EpochClock(0, 3, 0, 1), 0
        ).outputs for row in b.to_pylist()]
        for given_rows in (rows, again)
    ]  # fmt: skip
    assert repr(outputs[0]) == repr(outputs[1])
    assert outputs[0]


def test_more_rows_than_an_epoch_has_places_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places of two epochs must never meet."""
    monkeypatch.setattr(places, "PLACE_BITS", 2)
    with pytest.raises(InvalidData, match="operator 'join': 4 rows to keep in one task and epoch; at most 2"):
        Job(operator_of("inner", 0, 0)).epoch(tagged([(KEYS[0], 5000)] * 4, [], spread), 0, 0)
    assert Job(operator_of("inner", 0, 0)).epoch(tagged([(KEYS[0], 5000)] * 3, [], spread), 0, 0) == []


def test_a_manifest_says_what_cannot_change() -> None:
    """How rows wait is part of the state: another range or kind of join would read it wrongly."""
    entry = operator_of("left-outer", -1000, 500).entry()
    assert (entry.kind, entry.modes) == ("interval-join", "left-outer, r_at from -1000 to 500 µs after l_at")
    assert [(s.name, s.kind, s.time) for s in entry.states] == [("left", "rows", "due"), ("right", "rows", "due")]
    assert operator_of("inner", -1000, 500).plan.state_values[LEFT] == operator_of("inner", -1000, 500).plan.left
    assert operator_of("left-outer", 0, 0).plan.state_values[LEFT].names[-1] == "__stillstate_matched"
    assert operator_of("inner", 0, 0).time_domain == "event"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"terms": replace(TERMS, how="outer")},
            "how='outer'; there are 'inner', 'left-outer', 'right-outer', 'full-outer', 'left-semi'",
        ),
        ({"terms": replace(TERMS, lower_us=2, upper_us=1)}, "the range is empty: its lower end lies 1 µs above"),
        ({"left_keys": ["name"]}, "1 keys on the left, 2 on the right"),
        ({"left_keys": [], "right_keys": []}, "0 keys on the left, 0 on the right"),
        ({"right_keys": ["r_name", "nobody"]}, "the right side has no key column 'nobody'"),
        ({"left_keys": ["score", "name"]}, "key 'score' has type double, its counterpart 'r_name' string"),
        ({"left_time": "never"}, "left side: there is no event-time column 'never'"),
        ({"right_time": "r_id"}, "right side: event-time column 'r_id' has type int64"),
        ({"left_keys": ["name", "l_at"], "right_keys": ["r_name", "r_at"]}, "'l_at' of the left side is a key"),
        ({"right": RIGHT_SCHEMA.append(pa.field("Tags", pa.int64()))}, "both sides have columns named 'Tags', 'tags'"),
    ],
)
def test_a_join_that_cannot_run_is_refused_before_it_starts(changes: dict[str, Any], message: str) -> None:
    """Each message says what to change."""
    good: dict[str, Any] = {
        "left": LEFT_SCHEMA, "right": RIGHT_SCHEMA, "left_keys": ["name", "score"], "right_keys": ["r_name", "r_score"],
        "left_time": "l_at", "right_time": "r_at", "terms": TERMS, "uid": "join",
    }  # fmt: skip
    plan_interval_join(**good)
    with pytest.raises(InvalidPipeline) as refused:
        plan_interval_join(**{**good, **changes})
    assert message in str(refused.value)
    assert "operator 'join', interval join" in str(refused.value)
