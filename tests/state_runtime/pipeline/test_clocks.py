"""A clock for each operator: random graphs of sources, unions and windows, played batch by batch by the product's clocks.

Whatever sources do, no operator drops as late what another one gives it, and each answer is that of a batch query over
the rows that were in time where they came from a source. Rules that break this are played too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from state_runtime.pipeline.watermark import END_OF_TIME_MS, ClockInputs, Clocks, WatermarkColumn
from state_runtime.snapshot.manifest import TimeEntry

Row = tuple[int, int, int]
"""Key, time in ms, weight."""
GRAPHS = 400


@dataclass(frozen=True)
class Window:
    """Counts rows by key and window, and gives each once; it reads sources and windows before it."""

    uid: str
    size_ms: int
    sources: tuple[str, ...]
    windows: tuple[str, ...]


@dataclass
class Case:
    """A graph, and what its sources give in each batch."""

    clocks: Clocks
    windows: list[Window]
    batches: list[dict[str, list[Row]]]


def drawn(seed: int, *, policy: str = "min") -> Case:
    rng = random.Random(seed)
    sources = [f"s{n}" for n in range(rng.randint(1, 4))]
    idle = {name: rng.randint(2, 4) for name in sources if rng.random() < 0.4}
    windows: list[Window] = []
    for number in range(rng.randint(1, 5)):
        read = tuple(name for name in sources if rng.random() < 0.5)
        before = tuple(window.uid for window in windows if rng.random() < 0.5)
        if not read and not before:
            read = (rng.choice(sources),)
        windows.append(Window(f"w{number}", rng.choice([4, 10, 25]), read, before))
    now = Counter[str]()
    batches = []
    for _ in range(rng.randint(2, 10)):
        batch: dict[str, list[Row]] = {name: [] for name in sources}
        for name in sources:
            if rng.random() < 0.6:
                now[name] += rng.randint(0, 12)
                batch[name] = [
                    (rng.randint(0, 2), max(1, now[name] + rng.randint(-14, 4)), 1) for _ in range(rng.randint(0, 6))
                ]
        batches.append(batch)
    columns = tuple(WatermarkColumn(f"{name}.at", "", rng.choice([0, 3, 10]), source=name) for name in sources)
    inputs = {w.uid: ClockInputs(frozenset(w.sources), frozenset(w.windows)) for w in windows}
    return Case(Clocks(columns, policy, inputs, idle), windows, batches)  # type: ignore[arg-type]


@dataclass
class Played:
    """Attributes: given: by window the rows that it took from sources; answers; late: what windows lost of others."""

    given: dict[str, list[Row]] = field(default_factory=dict)
    answers: dict[str, list[Row]] = field(default_factory=dict)
    late: int = 0


LateBy = Callable[[TimeEntry, TimeEntry], TimeEntry]


def play(case: Case, late_by: LateBy = lambda before, now: before) -> Played:
    done = Played({w.uid: [] for w in case.windows}, {w.uid: [] for w in case.windows})
    is_open: dict[str, list[Row]] = {w.uid: [] for w in case.windows}
    last: TimeEntry | None = None
    for number, batch in enumerate([*case.batches, {}]):
        time = case.clocks.advanced(last, number)
        if not batch:  # the end of all input
            time = replace(time, watermark_ms=END_OF_TIME_MS, clocks={})
        late = late_by(last or TimeEntry(0), time)
        came: dict[str, list[Row]] = {}
        for window in case.windows:

            def in_time(row: Row, window: Window = window, late: TimeEntry = late) -> bool:
                return closes_ms(row, window) > late.watermark_of(window.uid)

            taken = [row for name in window.sources for row in batch.get(name, []) if in_time(row)]
            inner = [row for uid in window.windows for row in came[uid]]
            done.late += sum(not in_time(row) for row in inner)
            done.given[window.uid] += taken
            rows = is_open[window.uid] + taken + list(filter(in_time, inner))
            closed = [row for row in rows if closes_ms(row, window) <= time.watermark_of(window.uid)]
            is_open[window.uid] = [row for row in rows if closes_ms(row, window) > time.watermark_of(window.uid)]
            came[window.uid] = counted(closed, window)
            done.answers[window.uid] += came[window.uid]
        seen = {f"{name}.at": max((row[1] for row in rows), default=None) for name, rows in batch.items()}
        last = case.clocks.observed(time, seen)
    return done


def closes_ms(row: Row, window: Window) -> int:
    return (row[1] // window.size_ms + 1) * window.size_ms


def counted(rows: Sequence[Row], window: Window) -> list[Row]:
    """A row of a window has its last millisecond as its time."""
    weights = Counter[tuple[int, int]]()
    for row in rows:
        weights[row[0], closes_ms(row, window) - 1] += row[2]
    return [(key, at, weight) for (key, at), weight in weights.items()]


def batch_answers(case: Case, given: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    answers: dict[str, list[Row]] = {}
    for window in case.windows:
        rows = [*given[window.uid], *(row for uid in window.windows for row in answers[uid])]
        answers[window.uid] = counted(rows, window)
    return answers


def broken(case: Case, late_by: LateBy = lambda before, now: before) -> bool:
    done = play(case, late_by)
    wanted = batch_answers(case, done.given)
    return bool(done.late) or any(Counter(done.answers[uid]) != Counter(wanted[uid]) for uid in wanted)


@pytest.mark.parametrize("policy", ["min", "max"])
def test_no_operator_drops_what_another_one_gives_it_and_answers_are_those_of_a_batch_query(policy: str) -> None:
    assert [seed for seed in range(GRAPHS) if broken(drawn(seed, policy=policy))] == []


def test_late_by_the_clock_of_now_loses_rows() -> None:
    assert any(broken(drawn(seed), lambda before, now: now) for seed in range(GRAPHS))


def test_a_clock_by_sources_alone_loses_rows_behind_an_operator_that_stands() -> None:
    """A source that is idle is left out; the operator that reads it has open windows all the same."""

    def by_sources(case: Case) -> Case:
        reach: dict[str, frozenset[str]] = {}
        for window in case.windows:
            reach[window.uid] = frozenset(window.sources).union(*(reach[uid] for uid in window.windows))
        inputs = {uid: ClockInputs(sources) for uid, sources in reach.items()}
        return replace(case, clocks=replace(case.clocks, inputs=inputs))

    assert any(broken(by_sources(drawn(seed))) for seed in range(GRAPHS))


def two_sources(**of: object) -> Clocks:
    columns = (WatermarkColumn("a.at", "", 10, source="a"), WatermarkColumn("b.at", "", 0, source="b"))
    inputs = {
        "of-a": ClockInputs(frozenset("a")),
        "of-both": ClockInputs(frozenset("ab")),
        "behind": ClockInputs(operators=frozenset({"of-a"})),
    }
    return Clocks(columns, "min", inputs, **of)  # type: ignore[arg-type]


def test_an_operator_goes_by_its_own_sources_and_by_the_operators_before_it() -> None:
    clocks = two_sources()
    first = clocks.observed(clocks.advanced(None, 5), {"a.at": 1_000, "b.at": 300})
    second = clocks.advanced(first, 6)
    assert second.watermark_ms == 300
    assert {uid: second.watermark_of(uid) for uid in clocks.inputs} == {"of-a": 990, "of-both": 300, "behind": 990}
    assert second.clocks == {"of-a": 990, "behind": 990}, "what has the job's clock is not named"


def test_no_clock_falls_when_an_operator_gets_a_slower_source() -> None:
    ahead = TimeEntry(5, 100, {"a.at": 1_000, "b.at": 100}, clocks={"of-both": 900})
    assert two_sources().advanced(ahead, 6).watermark_of("of-both") == 900


def test_a_source_is_idle_once_no_row_of_it_came_for_long_enough_and_holds_back_again_with_its_next_row() -> None:
    clocks = two_sources(idle_after_ms={"b": 60_000})
    time = clocks.observed(clocks.advanced(None, 0), {"a.at": 50_000, "b.at": 20})
    time = clocks.observed(clocks.advanced(time, 59_999), {"a.at": 60_000, "b.at": None})
    assert time.watermark_of("of-both") == 20
    time = clocks.observed(clocks.advanced(time, 60_000), {"a.at": 70_000, "b.at": 30})
    assert time.watermark_of("of-both") == 59_990
    time = clocks.observed(clocks.advanced(time, 60_001), {"a.at": 80_000, "b.at": 40})
    assert time.watermark_of("of-both") == 59_990, "it does not fall"
    time = clocks.advanced(time, 130_000)
    assert time.watermark_of("of-both") == 79_990, "and is left out again"


def test_if_all_sources_are_idle_the_clocks_stand() -> None:
    clocks = two_sources(idle_after_ms={"a": 10, "b": 10})
    time = clocks.observed(clocks.advanced(None, 0), {"a.at": 5_000, "b.at": 20})
    later = clocks.advanced(clocks.observed(clocks.advanced(time, 1), {}), 1_000_000)
    assert later.watermark_of("of-both") == 20
    assert later.watermark_of("of-a") == 4_990


def test_a_source_that_gets_another_name_keeps_what_it_has_seen() -> None:
    before = TimeEntry(5, 0, {"at": 1_000})
    column = WatermarkColumn("at", "", 10).of_source("orders", "")
    assert (column.name, column.was) == ("orders.at", "at")
    assert Clocks((column,)).advanced(before, 6).watermark_ms == 990
    again = replace(column, name="at", was="").of_source("sales", "orders")
    assert (again.name, again.was) == ("sales.at", "orders.at")
