"""Tumbling, sliding and session windows against a model that keeps every row of every window."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import HashOf, examples, hash_functions
from window_model import AGGREGATES, INPUT, KEYS, Driven, Row, WindowModel, reference, same

from state_runtime import aggregates, windows
from state_runtime.base.durations import parse_duration_us
from state_runtime.base.errors import InvalidData, InvalidPipeline
from state_runtime.processors.builtin.windows import plan_windows
from state_runtime.processors.declared.windows import SessionWindow, TimeWindow
from state_runtime.processors.operator import EpochClock
from state_runtime.state.table import entry_of_time, time_of_entry

SECOND = 1_000_000
A, B = ("a", 1.5), ("b", None)

WINDOWS = {
    "tumbling": windows.tumbling("10 seconds"),
    "tumbling from 3": windows.tumbling("10 seconds", "3 seconds"),
    "sliding": windows.sliding("10 seconds", "2 seconds"),
    "sliding unevenly": windows.sliding("10 seconds", "4 seconds", "-1 seconds"),
    "sliding unevenly 2": windows.sliding("7 seconds", "5 seconds"),
    "microseconds": windows.sliding("2700 microseconds", "600 microseconds", "50 microseconds"),
    "cumulative": windows.cumulative("10 seconds", "2 seconds", "3 seconds"),
    "cumulative from 9": windows.cumulative("12 seconds", "4 seconds", "-9 seconds"),
    "session": windows.session("3 seconds"),
    "short session": windows.session("700 microseconds"),
    "session of own ends": windows.session(end_column="ends"),
}

NOT_BEGUN_MS = -(1 << 52)
"""A watermark before all times."""


def unit(name: str) -> int:
    """Of the times drawn for a window."""
    return 150 if name in ("microseconds", "short session") else SECOND // 2


floats = st.sampled_from([0.0, -1.5, 2.25, 1e6, math.nan])
raw_rows = st.tuples(
    st.sampled_from([A, B, ("a", 0.0), (None, "nan")]),
    st.none() | st.integers(-25, 60),
    st.none() | st.integers(-9, 9),
    st.none() | floats,
    st.none() | st.sampled_from(["", "p", "q", "ä"]),
    st.none() | st.booleans(),
    st.none() | st.integers(-3, 12),
)
# Rows, with the length of a session of their own, and by how many half seconds the watermark goes on.
raw_epochs = st.lists(st.tuples(st.lists(raw_rows, max_size=10), st.integers(0, 14)), min_size=1, max_size=7)


def with_places(epochs: Any, step_us: int) -> Iterator[tuple[list[Row], int]]:
    """Drawn epochs as rows with their places in the source, and by how much the watermark goes on."""
    places = itertools.count()
    for drawn, forward in epochs:
        yield (
            [
                Row(
                    k,
                    None if at is None else at * step_us,
                    *values,
                    ends_us=None if gap is None else ((at or 0) + gap) * step_us,
                    place=next(places),
                )
                for k, at, *values, gap in drawn
            ],
            forward,
        )


def compare(found: dict[Any, dict[str, Any]], expected: dict[Any, list[Row]]) -> None:
    assert set(found) == set(expected)
    for window, rows in expected.items():
        wanted = reference(rows)
        for name, value in found[window].items():
            assert same(value, wanted[name]), f"{name} of {window}: {value!r}, expected {wanted[name]!r}"


@pytest.mark.parametrize("mode", ["update", "append"])
@pytest.mark.parametrize("name", list(WINDOWS))
@given(epochs=raw_epochs, hash_of=hash_functions, lateness=st.sampled_from([0, 3]), runs=st.booleans())
@examples(50)
def test_windows_over_epochs_are_those_of_the_model(
    name: str, mode: str, epochs: Any, hash_of: HashOf, lateness: int, runs: bool
) -> None:
    """Late rows, nulls, negative times, equal hashes, epochs without rows: what is emitted, counted and kept."""
    step = unit(name)
    driven = Driven(WINDOWS[name], mode, lateness=f"{lateness * step} microseconds", hash_of=hash_of, runs=runs)
    model = WindowModel(WINDOWS[name], mode, lateness * step)
    watermark = late = 0
    for rows, forward in with_places(epochs, step):
        late, watermark = watermark, watermark + forward * step // 1000
        found = driven.epoch(rows, watermark, late)
        expected, late_rows = model.epoch(rows, watermark, late)
        compare(found, expected)
        assert driven.late == late_rows
    # All that is still open closes in the end, and nothing stays behind.
    found = driven.epoch([], 1 << 40, watermark)
    expected, _ = model.epoch([], 1 << 40, watermark)
    compare(found, expected)
    assert driven.live == 0


@pytest.mark.parametrize("drops_late", [True, False], ids=["watermark", "no watermark"])
@pytest.mark.parametrize("name", ["session", "short session"])
@given(epochs=raw_epochs, hash_of=hash_functions, runs=st.booleans())
@examples(50)
def test_in_complete_mode_sessions_stay_and_all_of_them_come_in_each_epoch(
    name: str, drops_late: bool, epochs: Any, hash_of: HashOf, runs: bool
) -> None:
    """Whatever the watermark; it only decides which rows are late, if there is one."""
    step = unit(name)
    driven = Driven(WINDOWS[name], "complete", hash_of=hash_of, runs=runs, drops_late=drops_late)
    model = WindowModel(WINDOWS[name], "complete", drops_late=drops_late)
    watermark = late = 0
    for rows, forward in with_places([*epochs, ([], 1 << 20), ([], 0)], step):
        late, watermark = watermark, watermark + forward * step // 1000
        found = driven.epoch(rows, watermark, late)
        expected, late_rows = model.epoch(rows, watermark, late)
        compare(found, expected)
        assert driven.late == late_rows
    assert driven.live == len(model.windows)
    assert driven.operator.time_domain == "", "nothing is ever due"


def test_windows_that_are_cut_into_panes_have_no_complete_mode() -> None:
    with pytest.raises(InvalidPipeline, match="is for aggregates and sessions"):
        Driven(WINDOWS["sliding"], "complete")


@pytest.mark.parametrize("name", ["sliding", "sliding unevenly", "sliding unevenly 2", "microseconds", "cumulative"])
@given(epochs=raw_epochs, lateness=st.sampled_from([0, 3]), rewritten_after=st.integers(0, 6), choice=st.randoms())
@examples(50)
def test_panes_that_earlier_versions_stored_are_gone_on_with(
    name: str, epochs: Any, lateness: int, rewritten_after: int, choice: random.Random
) -> None:
    """They were due at the close of some window that the watermark had not passed, not necessarily of the last."""
    step, window = unit(name), WINDOWS[name]
    assert isinstance(window, TimeWindow)
    driven = Driven(window, "append", lateness=f"{lateness * step} microseconds")
    model = WindowModel(window, "append", lateness * step)
    watermark = late = 0
    for number, (rows, forward) in enumerate(with_places(epochs, step)):
        late, watermark = watermark, watermark + forward * step // 1000
        compare(driven.epoch(rows, watermark, late), model.epoch(rows, watermark, late)[0])
        if number == rewritten_after:
            open_ms = partial(closes_ms, window=window, lateness_us=lateness * step, watermark_ms=watermark)
            driven.rewrite(lambda row, of=open_ms: choice.choice(of(row)))  # type: ignore[misc]
    compare(driven.epoch([], 1 << 40, watermark), model.epoch([], 1 << 40, watermark)[0])
    assert driven.live == 0


def closes_ms(row: dict[str, Any], window: TimeWindow, lateness_us: int, watermark_ms: int) -> list[int]:
    """When the windows that hold a stored pane close, in those that are open."""
    (at,) = time_of_entry(np.array([row["entry"]], dtype=np.uint64)).tolist()
    if window.grows:
        begin = at - (at - window.start_us) % window.size_us
        ends = range(begin + window.slide_us, begin + window.size_us + 1, window.slide_us)
        return [
            close for close in (-(-(end + lateness_us) // 1000) for end in ends if end > at) if close > watermark_ms
        ]
    start = at - (at - window.start_us) % window.slide_us
    closes = []
    while start + window.size_us > at:
        closes.append(-(-(start + window.size_us + lateness_us) // 1000))
        start -= window.slide_us
    return [close for close in closes if close > watermark_ms]


@pytest.mark.parametrize("name", [name for name, window in WINDOWS.items() if isinstance(window, TimeWindow)])
@pytest.mark.parametrize("lateness_us", [0, 450])
def test_a_shard_is_woken_before_the_first_window_of_any_pane_closes(name: str, lateness_us: int) -> None:
    """Also where several windows close in one millisecond."""
    window = WINDOWS[name]
    assert isinstance(window, TimeWindow)
    operator = planned(window, mode="append", allowed_lateness=f"{lateness_us} microseconds")
    for at in range(-40 * window.slide_us, 40 * window.slide_us, max(window.slide_us // 7, 1)):
        entry = entry_of_time(np.array([at], dtype=np.int64)).tolist()[0]
        closes = closes_ms({"entry": entry}, window, lateness_us, -(1 << 40))
        for due_ms in closes:
            assert operator.wake_ms(due_ms, EpochClock(0, -(1 << 40))) <= min(closes)


@pytest.mark.parametrize("name", ["tumbling", "sliding", "session", "session of own ends"])
@given(epochs=raw_epochs)
@examples(20)
def test_under_a_watermark_that_has_not_begun_nothing_is_late_or_removed(name: str, epochs: Any) -> None:
    """As in Spark without one: such state only grows."""
    driven = Driven(WINDOWS[name], "update")
    model = WindowModel(WINDOWS[name], "update")
    assert driven.operator.time_domain == "event"
    for rows, _ in with_places(epochs, SECOND):
        compare(driven.epoch(rows, NOT_BEGUN_MS, NOT_BEGUN_MS), model.epoch(rows, NOT_BEGUN_MS, NOT_BEGUN_MS)[0])
        assert driven.late == 0


def test_a_window_closes_at_its_end_and_not_before() -> None:
    """`end <= watermark`, inclusive; and a row is late from the next epoch on."""
    driven = Driven(windows.tumbling("10 seconds"), "append")
    assert driven.epoch([Row(A, 1 * SECOND)]) == {}
    assert driven.epoch([Row(A, 2 * SECOND)], 9_999, 0) == {}
    closed = driven.epoch([Row(A, 3 * SECOND), Row(A, 10 * SECOND)], 10_000, 9_999)
    assert list(closed) == [(A, 0, 10 * SECOND)]
    assert closed[A, 0, 10 * SECOND]["rows"] == 3, "the epoch that closes a window still counts its rows"
    assert driven.epoch([Row(A, 9 * SECOND)], 10_000, 10_000) == {}
    assert driven.late == 1


def test_a_microsecond_after_the_watermark_a_window_is_open() -> None:
    """Watermarks have milliseconds, windows microseconds."""
    driven = Driven(windows.tumbling("10 seconds", "1 microsecond"), "append")
    assert driven.epoch([Row(A, 5 * SECOND)], 10_000, 0) == {}
    assert list(driven.epoch([], 10_001, 10_000)) == [(A, 1, 10 * SECOND + 1)]


@pytest.mark.parametrize("at_s", [-0.000001, -10, -10.000001, -25])
def test_windows_before_1970_are_rounded_down(at_s: float) -> None:
    """Division that rounds to zero would put them one window too late."""
    at = round(at_s * SECOND)
    driven = Driven(windows.tumbling("10 seconds"), "update")
    ((_, start, end),) = driven.epoch([Row(A, at)], NOT_BEGUN_MS, NOT_BEGUN_MS)
    assert start <= at < end
    assert start % (10 * SECOND) == 0


def test_sliding_windows_write_a_touched_pane_once() -> None:
    """Not once per window: that is what panes are for."""
    driven = Driven(windows.sliding("10 seconds", "1 second"), "update")
    emitted = driven.epoch([Row(A, 100 * SECOND), Row(A, 100 * SECOND + 5)])
    assert len(emitted) == 10
    assert driven.changed.num_rows == 1


def test_in_append_mode_a_pane_is_written_for_its_rows_and_removed_and_no_more() -> None:
    """A key with a row in each second and 20 with one in 20 seconds: none is written because a window of it closed."""
    driven = Driven(windows.sliding("10 seconds", "1 second"), "append", wanted={"rows": aggregates.count()})
    changed, emitted = [], []
    for second in range(60):
        watermark = max(0, second - 3)
        rows = [Row(A, at * SECOND, place=3 * second + n) for n, at in enumerate((second, max(second - 1, 0)))]
        rows.append(Row((f"k{second % 20}", None), second * SECOND, place=3 * second + 2))
        emitted.append(len(driven.epoch(rows, watermark * 1000, max(watermark - 1, 0) * 1000)))
        changed.append(driven.changed.num_rows)
    assert emitted[30:] == [11] * 30
    assert changed[30:] == [5] * 30, "three panes with new rows, two removed"


def test_a_partly_late_row_counts_in_the_windows_that_are_open() -> None:
    """One pair per window that was missed."""
    driven = Driven(windows.sliding("10 seconds", "5 seconds"), "update")
    emitted = driven.epoch([Row(A, 12 * SECOND)], 16_000, 15_000)
    assert list(emitted) == [(A, 10 * SECOND, 20 * SECOND)]
    assert driven.late == 1


def test_allowed_lateness_postpones_closing() -> None:
    """In update mode late rows go on updating; in append mode the window waits for them."""
    update = Driven(windows.tumbling("10 seconds"), "update", lateness="5 seconds")
    append = Driven(windows.tumbling("10 seconds"), "append", lateness="5 seconds")
    for driven in (update, append):
        driven.epoch([Row(A, 1 * SECOND)], 12_000, 0)
    assert update.epoch([Row(A, 2 * SECOND)], 14_999, 12_000)[A, 0, 10 * SECOND]["rows"] == 2
    assert append.epoch([Row(A, 2 * SECOND)], 14_999, 12_000) == {}
    assert update.epoch([], 15_000, 14_999) == {}
    assert append.epoch([], 15_000, 14_999)[A, 0, 10 * SECOND]["rows"] == 2
    assert update.live == append.live == 0


def test_a_session_takes_a_row_exactly_one_gap_later() -> None:
    """Observed in Spark: the end of one may be the start of the next."""
    driven = Driven(windows.session("10 seconds"), "update")
    assert list(driven.epoch([Row(A, 0), Row(A, 10 * SECOND), Row(A, 20 * SECOND + 1)])) == [
        (A, 0, 20 * SECOND),
        (A, 20 * SECOND + 1, 30 * SECOND + 1),
    ]


def test_a_session_of_own_ends_lasts_as_long_as_the_row_of_it_that_ends_last() -> None:
    """Not as long as the last of its rows: the first one may outlast it."""
    driven = Driven(windows.session(end_column="ends"), "append")
    driven.epoch([Row(A, at * SECOND, ends_us=end * SECOND) for at, end in ((0, 30), (5, 6), (20, 21), (25, 26))])
    assert driven.live == 1
    driven.epoch([Row(A, 30 * SECOND, ends_us=31 * SECOND), Row(B, 0, ends_us=2 * SECOND)], 1_000, 0)
    assert list(driven.epoch([], 30_999, 1_000)) == [(B, 0, 2 * SECOND)]
    assert list(driven.epoch([], 31_000, 30_999)) == [(A, 0, 31 * SECOND)]


def test_rows_without_an_end_after_their_time_are_in_no_session_and_not_late() -> None:
    """As in Spark, whose plan filters a gap of null, zero or less."""
    driven = Driven(windows.session(end_column="ends"), "update")
    ends = (None, 10 * SECOND, 9 * SECOND, 10 * SECOND + 1)
    rows = [Row(A, 10 * SECOND, ends_us=end, place=place) for place, end in enumerate(ends)]
    found = driven.epoch([*rows, Row(A, None, ends_us=99 * SECOND)], 9_000, 9_000)
    assert {window: row["rows"] for window, row in found.items()} == {(A, 10 * SECOND, 10 * SECOND + 1): 1}
    assert driven.late == 0
    assert driven.epoch(rows, 20_000, 20_000) == {}
    assert driven.late == 1


def test_a_row_between_two_stored_sessions_joins_them() -> None:
    """One is written longer, the other leaves a tombstone."""
    driven = Driven(windows.session("10 seconds"), "update")
    driven.epoch([Row(A, 0), Row(A, 15 * SECOND), Row(B, 0)])
    assert driven.live == 3
    emitted = driven.epoch([Row(A, 7 * SECOND, place=9)])
    assert list(emitted) == [(A, 0, 25 * SECOND)]
    assert emitted[A, 0, 25 * SECOND]["rows"] == 3
    assert driven.live == 2
    assert driven.changed.num_rows == 2


def test_a_late_row_joins_no_open_session() -> None:
    """Spark judges a row by itself, before it is merged."""
    driven = Driven(windows.session("10 seconds"), "append")
    driven.epoch([Row(A, 5 * SECOND), Row(A, 14 * SECOND)])
    driven.epoch([Row(A, 4 * SECOND)], 16_000, 14_000)
    assert driven.late == 1
    ((_, start, _),) = driven.epoch([], 100_000, 16_000)
    assert start == 5 * SECOND


@pytest.mark.parametrize("mode", ["update", "append"])
@pytest.mark.parametrize("name", ["tumbling", "sliding unevenly", "session"])
def test_times_far_apart_do_not_overflow(name: str, mode: str) -> None:
    """From the year 1 to 9999, many keys: more than 62 bits as one number."""
    driven = Driven(WINDOWS[name] if name == "session" else windows.sliding("3 microseconds", "2 microseconds"), mode,
                    wanted={"rows": aggregates.count()})  # fmt: skip
    ends = (-62_135_000_000 * SECOND, 253_402_000_000 * SECOND)
    keys = [(str(n), None) for n in range(40)]
    late = NOT_BEGUN_MS
    driven.epoch([Row(k, at, place=i) for i, (k, at) in enumerate((k, at) for k in keys for at in ends)], late, late)
    found = driven.epoch(
        [Row(k, at, place=i) for i, (k, at) in enumerate((k, at) for k in keys for at in ends)], late, late
    )
    if mode == "append":
        found = driven.epoch([], 1 << 52, late)
    assert {v["rows"] for v in found.values()} == {2}
    assert {k for k, _, _ in found} == set(keys)


def test_a_sum_of_a_window_beyond_long_is_refused() -> None:
    """Each pane fits, the window does not."""
    driven = Driven(windows.sliding("10 seconds", "5 seconds"), "update", wanted={"n": aggregates.sum("n")})
    driven.epoch([Row(A, 0, n=(1 << 63) - 1)])
    with pytest.raises(InvalidData, match="leaves the range of long"):
        driven.epoch([Row(A, 6 * SECOND, n=1)])


@pytest.mark.parametrize(
    ("text", "microseconds"),
    [
        ("10 seconds", 10 * SECOND),
        ("1 minute 30 seconds", 90 * SECOND),
        ("interval 2 HOURS", 7200 * SECOND),
        ("1.5 seconds", 1_500_000),
        ("-4 seconds", -4 * SECOND),
        ("1 week", 7 * 86400 * SECOND),
        (" 100  microseconds ", 100),
        ("3 milliseconds 1 microsecond", 3001),
    ],
)
def test_durations_are_read_as_spark_reads_them(text: str, microseconds: int) -> None:
    """Spark 4.3 accepts all of these."""
    assert parse_duration_us(text) == microseconds


@pytest.mark.parametrize(
    "text",
    ["", "10", "1 month", "2 years", "ten seconds", "10second", "1 nanosecond", "1.5 minutes", "200 years", "1 s;"],
)
def test_other_durations_are_refused(text: str) -> None:
    """With the text in the message."""
    with pytest.raises(InvalidPipeline, match=re.escape(f"the duration {text!r}")):
        parse_duration_us(text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: windows.tumbling("0 seconds"), "longer than nothing"),
        (lambda: windows.sliding("5 seconds", "10 seconds"), "leaves rows out"),
        (lambda: windows.cumulative("10 seconds", "3 seconds"), "the size must be a multiple of the step"),
        (lambda: windows.cumulative("10 days", "1 second"), "more than 10,000 windows; choose a longer step"),
        (lambda: windows.tumbling("5 seconds", "5 seconds"), "shorter than its slide"),
        (lambda: windows.tumbling("5 seconds", "-5 seconds"), "shorter than its slide"),
        (lambda: windows.session("-1 seconds"), "longer than nothing"),
        (lambda: windows.session(), "a session has a gap, .*or a column"),
        (lambda: windows.session("1 second", end_column="ends"), "a session has a gap, .*or a column"),
        (lambda: windows.sliding("1 day", "1 second"), "more than 10,000 windows"),
    ],
)
def test_windows_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    """Where the window is written."""
    with pytest.raises(InvalidPipeline, match=message):
        make()


def planned(window: TimeWindow | SessionWindow, **changed: Any) -> Any:
    arguments: dict[str, Any] = {
        "uid": "op",
        "key_columns": KEYS.names,
        "key_ddl": "",
        "key_schema": KEYS,
        "schema": INPUT,
        "time_column": "at",
        "window": window,
        "aggregates": AGGREGATES,
        "mode": "update",
        "ddl": lambda s: ", ".join(s.names),
    }
    return plan_windows(**{**arguments, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"time_column": "when"}, "no event-time column 'when'; the input has name, score, at"),
        ({"time_column": "n"}, "event-time column 'n' must be a timestamp, not int64"),
        ({"aggregates": {}}, "at least one aggregate"),
        ({"aggregates": {"Window": aggregates.count()}}, "would be in the output twice"),
        ({"aggregates": {"name": aggregates.count()}}, "would be in the output twice"),
        ({"allowed_lateness": "-1 seconds"}, "is negative"),
    ],
)
@pytest.mark.parametrize("window", [windows.tumbling("1 second"), windows.session("1 second")], ids=["time", "session"])
def test_window_steps_that_cannot_run_are_refused_when_the_job_is_built(
    window: Any, changed: Any, message: str
) -> None:
    """With the operator's name."""
    with pytest.raises(InvalidPipeline, match=f"operator 'op'.*{message}"):
        planned(window, **changed)


def test_sessions_whose_ends_are_no_column_of_times_are_refused_when_the_job_is_built() -> None:
    refused = {"when": "there is no end_column", "n": "end_column 'n' must be a timestamp"}
    for column, message in refused.items():
        with pytest.raises(InvalidPipeline, match=f"operator 'op'.*{message}"):
            planned(windows.session(end_column=column))


def test_the_manifest_says_which_windows_the_state_is_of() -> None:
    """Panes of other windows cannot be continued."""
    entry = planned(windows.sliding("10 seconds", "4 seconds"), allowed_lateness="1 minute").entry()
    assert (entry.kind, entry.modes) == (
        "windows",
        "update, size 10000000 us, slide 4000000 us, start 0 us, lateness 60000000 us",
    )
    (state,) = entry.states
    assert (state.name, state.kind, state.time) == ("windows", "rows", "due")
    append = planned(windows.sliding("10 seconds", "4 seconds"), mode="append").entry()
    assert (
        append.modes == "append, size 10000000 us, slide 4000000 us, start 0 us, lateness 0 us, panes due when removed"
    )
    tumbling = planned(windows.tumbling("10 seconds"), mode="append").entry()
    assert tumbling.modes == "append, size 10000000 us, slide 10000000 us, start 0 us, lateness 0 us"
    session = planned(windows.session("10 seconds")).entry()
    assert (session.kind, session.states[0].schema.split(", ")[:2]) == ("sessions", ["window.end", "rows"])
    assert session.modes == "update, session, gap 10000000 us, lateness 0 us"
    of_own_ends = planned(windows.session(end_column="ends")).entry()
    assert of_own_ends.modes == "update, session, end ends, lateness 0 us"
    assert of_own_ends.states == session.states


def test_the_output_has_keys_window_and_aggregates() -> None:
    """As Spark's groupBy(keys, window(…)).agg(…)."""
    schema = planned(windows.tumbling("10 seconds")).output_schema
    assert schema.names == ["name", "score", "window", *AGGREGATES]
    moment = pa.timestamp("us", "UTC")
    assert schema.field("window").type == pa.struct([("start", moment), ("end", moment)])
