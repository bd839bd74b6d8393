"""A clock for each operator: random graphs of sources, unions, windows and joins, played batch by batch by the product's
clocks.

Whatever sources do, no operator drops as late what another one gives it, and each answer is that of a batch query over
the rows that were in time where they came from a source. Rules that break this are played too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from state_runtime.base.joining import JoinTerms
from state_runtime.pipeline.operators import IntervalJoinStep
from state_runtime.pipeline.watermark import END_OF_TIME_MS, ClockInputs, Clocks, WatermarkColumn
from state_runtime.processors.sides import LEFT_COLUMN, RIGHT_COLUMN
from state_runtime.snapshot.manifest import TimeEntry

Row = tuple[int, float, int]
"""Key, time in ms, weight."""
GRAPHS = 600


@dataclass(frozen=True)
class Port:
    """What an operator reads by one of its inputs: a union of sources and of operators before it."""

    sources: tuple[str, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True)
class Window:
    """Counts rows by key and window, and gives each once."""

    uid: str
    size_ms: int
    ports: tuple[Port]

    def is_late(self, row: Row, late_ms: int) -> bool:
        return self.closes_ms(row) <= late_ms

    def closes_ms(self, row: Row) -> float:
        return (row[1] // self.size_ms + 1) * self.size_ms

    def answer(self, rows: Sequence[Sequence[Row]]) -> list[Row]:
        """A row of a window has a time within its last millisecond, as Spark's `window_time` gives it."""
        weights = Counter[tuple[int, float]]()
        for row in rows[0]:
            weights[row[0], self.closes_ms(row) - 0.5] += row[2]
        return [(key, at, weight) for (key, at), weight in weights.items()]


@dataclass(frozen=True)
class Join:
    """Pairs rows of equal keys whose times lie in a range; of the left side also rows without a partner."""

    uid: str
    lower_ms: int
    upper_ms: int
    is_outer: bool
    event_time: str
    ports: tuple[Port, Port]

    def is_late(self, row: Row, late_ms: int) -> bool:
        return row[1] <= late_ms

    @property
    def step(self) -> IntervalJoinStep:
        how = "left-outer" if self.is_outer else "inner"
        return IntervalJoinStep(
            self.uid, JoinTerms(how=how, lower_us=self.lower_ms * 1000, upper_us=self.upper_ms * 1000), self.event_time
        )

    def pair(self, left: Row, right: Row) -> Row | None:
        if left[0] != right[0] or not left[1] + self.lower_ms <= right[1] <= left[1] + self.upper_ms:
            return None
        return (left[0], (left if self.event_time == "left" else right)[1], 31 * left[2] + right[2])

    def answer(self, rows: Sequence[Sequence[Row]]) -> list[Row]:
        pairs = [(n, pair) for n, left in enumerate(rows[0]) for right in rows[1] if (pair := self.pair(left, right))]
        met = {n for n, _ in pairs}
        alone = [left for n, left in enumerate(rows[0]) if n not in met] if self.is_outer else []
        return [*(pair for _, pair in pairs), *alone]


Operator = Window | Join


@dataclass
class Case:
    """A graph, and what its sources give in each batch."""

    clocks: Clocks
    operators: list[Operator]
    batches: list[dict[str, list[Row]]]


def drawn(seed: int, *, policy: str = "min") -> Case:
    rng = random.Random(seed)
    sources = [f"s{n}" for n in range(rng.randint(1, 4))]
    operators: list[Operator] = []

    def port() -> Port:
        read = tuple(name for name in sources if rng.random() < 0.4)
        before = tuple(o.uid for o in operators if rng.random() < 0.4)
        return Port(read, before) if read or before else Port((rng.choice(sources),), ())

    for number in range(rng.randint(1, 5)):
        if rng.random() < 0.5:
            operators.append(Window(f"o{number}", rng.choice([4, 10, 25]), (port(),)))
        else:
            lower, upper = sorted([rng.randint(-12, 12), rng.randint(-12, 12)])
            is_outer = rng.random() < 0.5
            side = "left" if is_outer else rng.choice(["left", "right"])
            operators.append(Join(f"o{number}", lower, upper, is_outer, side, (port(), port())))
    now = Counter[str]()
    batches = []
    for _ in range(rng.randint(2, 10)):
        batch: dict[str, list[Row]] = {name: [] for name in sources}
        for name in sources:
            if rng.random() < 0.6:
                now[name] += rng.randint(0, 12)
                batch[name] = [
                    (rng.randint(0, 2), max(1, now[name] + rng.randint(-14, 4)), rng.randint(1, 9))
                    for _ in range(rng.randint(0, 5))
                ]
        batches.append(batch)
    columns = tuple(WatermarkColumn(f"{name}.at", "", rng.choice([0, 3, 10]), source=name) for name in sources)
    inputs = {
        o.uid: ClockInputs(
            frozenset(name for each in o.ports for name in each.sources),
            frozenset(uid for each in o.ports for uid in each.operators),
        )
        for o in operators
    }
    idle = {name: rng.randint(2, 4) for name in sources if rng.random() < 0.4}
    held = {o.uid: o.step.held_back_ms for o in operators if isinstance(o, Join)}
    return Case(Clocks(columns, policy, inputs, idle, held), operators, batches)  # type: ignore[arg-type]


@dataclass
class Played:
    """Attributes: given: by operator and port the rows that it took from sources; answers; late: of operators' rows."""

    given: dict[tuple[str, int], list[Row]] = field(default_factory=dict)
    answers: dict[str, list[Row]] = field(default_factory=dict)
    late: int = 0


LateBy = Callable[[TimeEntry, TimeEntry], TimeEntry]


@dataclass
class State:
    """What an operator keeps: rows by port, and which left ones have met a right one."""

    rows: tuple[list[Row], ...]
    met: set[int] = field(default_factory=set)

    def after(self, operator: Operator, new: Sequence[Sequence[Row]], now_ms: int) -> list[Row]:
        """Take rows, and return what comes out."""
        if isinstance(operator, Window):
            rows = [*self.rows[0], *new[0]]
            self.rows = ([row for row in rows if operator.closes_ms(row) > now_ms],)
            return operator.answer([[row for row in rows if operator.closes_ms(row) <= now_ms]])
        left, right = ([*kept, *came] for kept, came in zip(self.rows, new, strict=True))
        out: list[Row] = []
        for n, one in enumerate(left):
            # Of two rows one is new: the others have met.
            seen = right[len(self.rows[1]) :] if n < len(self.rows[0]) else right
            pairs = [pair for other in seen if (pair := operator.pair(one, other)) is not None]
            out += pairs
            if pairs:
                self.met.add(n)
        gone = {n for n, one in enumerate(left) if one[1] <= now_ms - operator.upper_ms}
        out += [left[n] for n in sorted(gone - self.met)] if operator.is_outer else []
        stays = [n for n in range(len(left)) if n not in gone]
        self.met = {place for place, n in enumerate(stays) if n in self.met}
        self.rows = ([left[n] for n in stays], [other for other in right if other[1] > now_ms + operator.lower_ms])
        return out


def play(case: Case, late_by: LateBy = lambda before, now: before) -> Played:
    done = Played({}, {o.uid: [] for o in case.operators})
    states = {o.uid: State(tuple([] for _ in o.ports)) for o in case.operators}
    last: TimeEntry | None = None
    for number, batch in enumerate([*case.batches, {}]):
        time = case.clocks.advanced(last, number)
        if not batch:  # the end of all input
            time = replace(time, watermark_ms=END_OF_TIME_MS, clocks={})
        late = late_by(last or TimeEntry(0), time)
        came: dict[str, list[Row]] = {}
        for operator in case.operators:
            late_ms, new = late.watermark_of(operator.uid), []
            for place, port in enumerate(operator.ports):
                given = [row for name in port.sources for row in batch.get(name, [])]
                given = [row for row in given if not operator.is_late(row, late_ms)]
                done.given.setdefault((operator.uid, place), []).extend(given)
                inner = [row for uid in port.operators for row in came[uid]]
                done.late += sum(operator.is_late(row, late_ms) for row in inner)
                new.append([*given, *(row for row in inner if not operator.is_late(row, late_ms))])
            came[operator.uid] = states[operator.uid].after(operator, new, time.watermark_of(operator.uid))
            done.answers[operator.uid] += came[operator.uid]
        seen = {f"{name}.at": max((row[1] for row in rows), default=None) for name, rows in batch.items()}
        last = case.clocks.observed(time, seen)
    return done


def batch_answers(case: Case, given: Mapping[tuple[str, int], Sequence[Row]]) -> dict[str, list[Row]]:
    answers: dict[str, list[Row]] = {}
    for operator in case.operators:
        rows = [
            [*given[operator.uid, place], *(row for uid in port.operators for row in answers[uid])]
            for place, port in enumerate(operator.ports)
        ]
        answers[operator.uid] = operator.answer(rows)
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


def test_without_holding_back_behind_joins_rows_are_lost() -> None:
    """A row waits for one that comes later, and has the time that it had."""

    def at_once(case: Case) -> Case:
        return replace(case, clocks=replace(case.clocks, held_back_ms={}))

    assert any(broken(at_once(drawn(seed))) for seed in range(GRAPHS))


def test_a_clock_by_sources_alone_loses_rows_behind_an_operator_that_stands() -> None:
    """A source that is idle is left out; the operator that reads it has open windows all the same."""

    def by_sources(case: Case) -> Case:
        reach: dict[str, frozenset[str]] = {}
        for uid, given in case.clocks.inputs.items():
            reach[uid] = given.sources.union(*(reach[before] for before in given.operators))
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


def test_an_operator_that_no_event_time_reaches_has_the_jobs_clock_and_holds_nothing_back() -> None:
    """What has no time cannot be late; a stream without a watermark beside one with it counts for nothing, as in Spark."""
    inputs = {
        "timeless": ClockInputs(frozenset({"logs"})),
        "behind": ClockInputs(operators=frozenset({"timeless"})),
        "both": ClockInputs(frozenset({"a", "logs"}), frozenset({"behind"})),
    }
    clocks = replace(two_sources(), inputs=inputs)
    time = clocks.advanced(clocks.observed(clocks.advanced(None, 5), {"a.at": 1_000, "b.at": 300}), 6)
    assert time.watermark_ms == 300
    assert time.clocks == {"both": 990}


def test_no_clock_falls_when_an_operator_gets_a_slower_source() -> None:
    ahead = TimeEntry(5, 100, {"a.at": 1_000, "b.at": 100}, clocks={"of-both": 900})
    assert two_sources().advanced(ahead, 6).watermark_of("of-both") == 900


def test_a_source_is_idle_once_no_row_of_it_came_for_long_enough_and_holds_back_again_with_its_next_row() -> None:
    clocks = two_sources(idle_after_ms={"b": 60_000})
    time = clocks.observed(clocks.advanced(None, 0), {"a.at": 50_000, "b.at": 20})
    time = clocks.observed(clocks.advanced(time, 59_999), {"a.at": 60_000, "b.at": None})
    assert clocks.advanced(time, 60_000).watermark_of("of-both") == 20
    time = clocks.observed(clocks.advanced(time, 60_000), {"a.at": 70_000, "b.at": None})
    assert time.idle == ("b",)
    time = clocks.observed(clocks.advanced(time, 60_001), {"a.at": 80_000, "b.at": 40})
    assert (time.watermark_of("of-both"), time.idle) == (69_990, ())
    time = clocks.observed(clocks.advanced(time, 60_002), {"a.at": 90_000, "b.at": 50})
    assert time.watermark_of("of-both") == 69_990, "it does not fall"
    time = clocks.observed(clocks.advanced(time, 120_002), {"a.at": 90_000, "b.at": None})
    assert clocks.advanced(time, 120_003).watermark_of("of-both") == 89_990, "and is left out again"


def test_no_source_becomes_idle_while_nothing_is_read() -> None:
    """A driver that slept for an hour, or waited for its store, has not heard a source be silent; the next batch tells."""
    clocks = two_sources(idle_after_ms={"b": 60_000})
    time = clocks.observed(clocks.advanced(None, 0), {"a.at": 50_000, "b.at": 20})
    awake = clocks.observed(clocks.advanced(time, 3_600_000), {}, reads=False)
    assert (awake.watermark_of("of-both"), awake.idle) == (20, ())
    read = clocks.observed(clocks.advanced(awake, 3_600_001), {"a.at": 60_000, "b.at": 30})
    assert (clocks.advanced(read, 3_600_002).watermark_of("of-both"), read.idle) == (30, ())


def test_if_all_sources_are_idle_the_clocks_stand() -> None:
    clocks = two_sources(idle_after_ms={"a": 10, "b": 10})
    time = clocks.observed(clocks.advanced(None, 0), {"a.at": 5_000, "b.at": 20})
    later = clocks.advanced(clocks.observed(clocks.advanced(time, 1), {}), 1_000_000)
    assert later.watermark_of("of-both") == 20
    assert later.watermark_of("of-a") == 4_990


def test_the_sides_of_a_join_keep_what_they_have_seen_when_a_step_comes_between_and_back() -> None:
    """Where only the join reads them, their columns have the names of its input."""
    alone = [WatermarkColumn(f"{side}.at", "", 0).of_side(["", "j.right"]) for side in (LEFT_COLUMN, RIGHT_COLUMN)]
    apart = [WatermarkColumn("at", "", 0).of_source(name, None) for name in ("", "j.right")]
    assert [column.source for column in alone] == [column.source for column in apart] == ["", "j.right"]
    for before, after in ((alone, apart), (apart, alone)):
        last = TimeEntry(5, 0, {column.name: 1_000 + number for number, column in enumerate(before)})
        assert Clocks(tuple(after)).advanced(last, 6).watermark_ms == 1_000


def test_a_source_that_gets_another_name_keeps_what_it_has_seen() -> None:
    before = TimeEntry(5, 0, {"at": 1_000})
    column = WatermarkColumn("at", "", 10).of_source("orders", "")
    assert (column.name, column.was) == ("orders.at", "at")
    assert Clocks((column,)).advanced(before, 6).watermark_ms == 990
    again = replace(column, name="at", was="").of_source("sales", "orders")
    assert (again.name, again.was) == ("sales.at", "orders.at")
