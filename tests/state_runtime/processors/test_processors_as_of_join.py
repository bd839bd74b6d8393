"""The as-of join, against two plain lists: each left row is answered once, by the newest version as of its time, whatever the order
in which rows came; and state keeps no version that nothing can ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_reader import MemoryReader
from model import HashOf, Key, canonical_key, colliding, examples, hash_functions
from sliced import now_whole_now_sliced
from test_processors_interval_join import KEYS, NO_ROWS, Pair, Row, joined, pairs_of, tagged

from state_runtime.base.joining import UNBOUNDED_US, JoinTerms
from state_runtime.processors.builtin import as_of_join
from state_runtime.processors.builtin.as_of_join import AsOfJoinOperator
from state_runtime.processors.builtin.interval_join_plan import LEFT, RIGHT
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.operator import LATE_OF_SIDE, EpochClock
from state_runtime.state.version import OpenVersion


def operator_of(how: str, tolerance_us: int | None, rows_per_batch: int = 3) -> AsOfJoinOperator:
    lower_us = -UNBOUNDED_US if tolerance_us is None else -tolerance_us
    terms = JoinTerms(how=how, lower_us=lower_us, upper_us=0)  # type: ignore[arg-type]
    return joined(AsOfJoinOperator, terms, rows_per_batch)


@dataclass
class Model:
    """Row by row: what was given so far, and what has been answered."""

    how: str
    tolerance_us: int | None
    waiting: list[tuple[Key, int, int]] = field(default_factory=list)
    versions: dict[tuple[Key, int], int] = field(default_factory=dict)
    late: int = 0

    def epoch(
        self, left: Sequence[Row], right: Sequence[Row], watermark_ms: int, late_ms: int, first: int
    ) -> list[Pair]:
        pairs: list[Pair] = []
        for n, (key, at) in enumerate(left):
            if at is not None and at <= late_ms * 1000:
                self.late += 1
            elif at is None or None in key:
                pairs.append((first + n, None))
            else:
                self.waiting.append((key, at, first + n))
        for n, (key, at) in enumerate(right):
            if at is not None and at <= late_ms * 1000:
                self.late += 1
            elif at is not None and None not in key:
                self.versions[key, at] = first + n
        for key, at, number in [each for each in self.waiting if each[1] <= watermark_ms * 1000]:
            reach = None if self.tolerance_us is None else at - self.tolerance_us
            held = [
                when for (of, when) in self.versions if of == key and when <= at and (reach is None or when >= reach)
            ]
            pairs.append((number, self.versions[key, max(held)] if held else None))
        self.waiting = [each for each in self.waiting if each[1] > watermark_ms * 1000]
        return [pair for pair in pairs if self.how == "left-outer" or pair[1] is not None]

    def can_be_asked_for(self, watermark_ms: int) -> set[tuple[Key, int]]:
        """The versions that a left row later than the watermark may still get."""
        found = set()
        for key, at in self.versions:
            is_newest = not any(of == key and at < when <= watermark_ms * 1000 for of, when in self.versions)
            is_near = self.tolerance_us is None or at + self.tolerance_us > watermark_ms * 1000
            if at > watermark_ms * 1000 or (is_newest and is_near):
                found.add((key, at))
        return found


class Job:
    """The operator over epochs, with the state carried along as the runtime does."""

    def __init__(self, operator: AsOfJoinOperator, *, in_runs: bool) -> None:
        self.operator = operator
        self.runs = OpenVersion.of_batches("v", {}, operator.state_schemas) if in_runs else None
        self.reader = MemoryReader(operator.state_schemas)
        self.late = self.live = self.number = 0
        self.given_late: list[int] = []

    def epoch(self, rows: GroupedRows, watermark_ms: int, late_ms: int) -> list[pa.RecordBatch]:
        self.number += 1
        clock = EpochClock(0, watermark_ms, late_ms, self.number)
        result = self.operator.process(now_whole_now_sliced(rows), self.runs or self.reader, clock, 3)
        result.sides = {name: [] for name in LATE_OF_SIDE}
        produced = list(result.outputs)
        assert all(0 < batch.num_rows <= self.operator.output_rows_per_batch for batch in produced)
        for name, changed in result.changes.items():
            self.operator.state_schemas[name].check_batch(changed, name)
        assert result.due_taken == {LEFT: watermark_ms, RIGHT: watermark_ms}
        if self.runs is not None:
            self.runs = self.runs.overlaid(result.changes, result.due_taken)
        self.reader = self.reader.overlaid(result.changes)
        self.reader.batches = {s: [self.reader._batch(s, self.reader.rows(s))] for s in self.reader.schemas}
        self.live += result.rows_added
        assert self.live == sum(len(self.reader.rows(name)) for name in self.reader.schemas), "rows_added"
        self.late += result.late_rows
        for side, name in zip(LATE_OF_SIDE, ("l_id", "r_id"), strict=True):
            self.given_late += [n for batch in result.sides[side] for n in batch[name].to_pylist()]
        return produced

    def versions(self) -> set[tuple[Key, int]]:
        return {
            (canonical_key(row["key.name"], row["key.score"]), round(row["value.r_at"].timestamp() * 1_000_000))
            for row in self.reader.rows(RIGHT)
        }

    def next_due(self) -> int | None:
        dues = [row["due"] for name in (LEFT, RIGHT) for row in self.reader.rows(name) if row["due"] is not None]
        return min(dues, default=None)


times = st.none() | st.integers(0, 24).map(lambda n: n * 500 + 1)
rows = st.lists(st.tuples(st.sampled_from(KEYS), times), max_size=8)
epochs = st.lists(st.tuples(rows, rows, st.integers(0, 4)), min_size=1, max_size=6)


@pytest.mark.parametrize("piece", [1, 1 << 20])
@given(
    given=epochs,
    how=st.sampled_from(["inner", "left-outer"]),
    tolerance=st.none() | st.integers(0, 8).map(lambda n: n * 500),
    hash_of=hash_functions,
    in_runs=st.booleans(),
)
@examples(150)
def test_the_join_is_two_lists(
    piece: int, given: Any, how: str, tolerance: int | None, hash_of: HashOf, in_runs: bool
) -> None:
    """Answers, late rows, and what is kept: never a version that nothing can ask for, and always those that something can."""
    job, model = Job(operator_of(how, tolerance), in_runs=in_runs), Model(how, tolerance)
    lefts: dict[int, Row] = {}
    rights: dict[int, Row] = {}
    watermark = late = first = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(as_of_join, "STORED_ROWS_PER_READ", piece)
        for left, right, forward in given:
            lefts |= {first + n: row for n, row in enumerate(left)}
            rights |= {first + n: row for n, row in enumerate(right)}
            expected = Counter(model.epoch(left, right, watermark, late, first))
            produced = job.epoch(tagged(left, right, hash_of, first) if left or right else NO_ROWS, watermark, late)
            assert pairs_of(produced, lefts, rights) == expected
            assert job.late == model.late == len(job.given_late)
            assert job.versions() == model.can_be_asked_for(watermark)
            due = job.next_due()
            assert due is None or due > watermark
            first += max(len(left), len(right))
            late, watermark = watermark, watermark + forward


def test_rows_come_with_their_own_columns_when_they_are_late() -> None:
    job = Job(operator_of("inner", None), in_runs=False)
    job.epoch(tagged([(KEYS[0], 1000), (KEYS[0], 9001)], [(KEYS[0], 2000)], colliding, 1), 5, 5)
    assert sorted(job.given_late) == [1, 1]
