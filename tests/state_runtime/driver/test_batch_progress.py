"""How far an open batch is, for the pipeline and the shards that go on with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest

from state_runtime.changelog.inflight import InflightPass, RowsLeft
from state_runtime.driver.batch_progress import BatchProgress, ShardRows
from state_runtime.driver.due import woken
from state_runtime.driver.shard_index import ShardIndex
from state_runtime.snapshot.manifest import OpenBatch, RowsLayout, TimeEntry

HASHES = (0, (1 << 64) - 1)
EPOCH = 8
"""The one that follows; rows in flight are of the epoch before."""
DUE_MS = 1_000


def pipeline(uids: Sequence[str], domain: str = "event") -> list[Any]:
    return [SimpleNamespace(uid=uid, time_domain=domain) for uid in uids]


def left_open(settled: Sequence[str], rows_at: str, begun: str = "") -> tuple[OpenBatch, list[InflightPass]]:
    """What a snapshot and its listing say of a batch with rows in flight at one operator, in both halves of the hashes."""
    passed = InflightPass(rows_at, EPOCH - 1, 0, RowsLayout(""), (), (RowsLeft(*HASHES, 10, 100),))
    return OpenBatch(0, tuple(settled), begun, "listing", (), ()), [passed]


def resumed(
    left: tuple[OpenBatch, list[InflightPass]], operators: Sequence[Any], parallelism: int = 1
) -> BatchProgress:
    """By a run of this parallelism, after one of the parallelism 1."""
    return BatchProgress.resumed(*left, operators, parallelism=parallelism, parallelism_before=1)


def finished(book: BatchProgress | None, operators: Sequence[Any], due: set[str]) -> list[str]:
    """Uids of the operators that did what was due, in their order, until the batch is done. Each epoch is *apart*: what is
    due is done at the first operator that is not settled, and rows are done where they wait."""
    did: list[str] = []
    for _ in range(len(operators) + 1):
        if book is None:
            return did
        level = book.level(operators)
        rows = [ShardRows(p.operator, 0, {p.epoch: ()}) for p in book.passes]
        did += [level] if level in due else []
        due.discard(level)
        book = book.after(
            EPOCH, 0, rows, operators, parallelism=1, did_due=frozenset({level}), is_due=lambda uid: uid in due
        )
    pytest.fail(f"the batch does not end: {book}")


@pytest.mark.parametrize("settled", [(), ("a",), ("a", "gone"), ("gone",)])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_batch_ends_with_the_operators_that_the_pipeline_has_now(settled: tuple[str, ...], count: int) -> None:
    """Uids of operators that are gone count for none of those that are there: else a batch would end before what it made due
    is done, or never. Every pipeline of so many operators, in every order, some of them new, each with something due."""
    for uids in permutations(["a", "b", "c", "new"], count):
        if "b" not in uids:
            continue  # the start is refused: rows wait at it
        operators = pipeline(uids)
        book = resumed(left_open(settled, "b"), operators)
        is_settled = [uid in book.settled for uid in uids]
        assert is_settled == sorted(is_settled, reverse=True), f"one below an operator that is not: {uids}"
        waiting = [uid for uid in uids if uid not in book.settled]
        assert set(uids) - set(waiting) <= set(settled) & {"a"}
        assert finished(book, operators, set(uids)) == waiting, uids


def test_a_batch_whose_last_operator_with_something_due_is_gone_is_done_after_one_epoch() -> None:
    """Nothing waits any more."""
    operators = pipeline(["a"])
    batch, _ = left_open(["a", "b"], "b")
    assert finished(resumed((batch, []), operators), operators, set()) == []


def visited(book: BatchProgress | None, operators: Sequence[Any], parallelism: int = 1) -> dict[str, list[int]]:
    """The shards that the next epoch visits, where every shard of every operator has something due."""
    uids = [o.uid for o in operators]
    shards = ShardIndex.at_start(parallelism, {}, dict.fromkeys(uids, DUE_MS), uids)
    time = TimeEntry(DUE_MS, DUE_MS)
    return woken(operators, shards, time, book, frozenset(uids), parallelism)


def test_after_a_rescale_all_that_is_due_is_looked_at_once_more() -> None:
    """An operator has begun with what is due: its shards without rows are done with it. Of other shards nobody knows which
    were: a key may have moved from one that was not to one without rows in flight."""
    operators = pipeline(["a"])
    batch, _ = left_open([], "a", begun="a")
    half = [InflightPass("a", EPOCH - 1, 0, RowsLayout(""), (), (RowsLeft(0, 1 << 60, 10, 100),))]
    assert visited(resumed((batch, half), operators, parallelism=3), operators, 3) == {"a": [0, 1, 2]}
    assert visited(
        BatchProgress.resumed(batch, half, operators, parallelism=3, parallelism_before=3), operators, 3
    ) == {"a": [0]}


def test_below_a_new_operator_all_that_is_due_is_looked_at_once_more() -> None:
    """What the new one emits may set timers that are due in shards that were done with it."""
    operators = pipeline(["new", "a"])
    batch, _ = left_open([], "a", begun="a")
    assert resumed((batch, []), operators).begun_with == ""
    assert visited(resumed((batch, []), operators), operators) == {"new": [0], "a": [0]}


def test_a_listing_serves_until_some_of_its_rows_are_done() -> None:
    """Rows that are done would be processed again by a run that goes on from it. Ranges that were cut for other shards are the
    same rows."""
    operators = pipeline(["a"])
    book: BatchProgress | None = resumed(left_open([], "a"), operators, parallelism=2)
    for left, listed_in in ((0, (1 << 63) - 1), "listing"), ((1 << 20, (1 << 63) - 1), ""):
        assert book is not None
        rows = [ShardRows("a", 0, {EPOCH - 1: (RowsLeft(*left, 5, 50),)})]
        book = book.after(EPOCH, 0, rows, operators, parallelism=2, did_due=frozenset(), is_due=lambda uid: False)
        assert book is not None
        assert book.listed_in == listed_in


@pytest.mark.parametrize(
    ("book", "by_event_time", "by_processing_time"),
    [
        (None, [0], [0]),
        (BatchProgress(0), [0], [0]),
        (BatchProgress(0, begun_with="a"), [], []),
        (BatchProgress(0, settled=frozenset({"a"})), [], [0]),
    ],
    ids=["no batch", "not begun", "begun", "settled"],
)
def test_a_timer_that_sets_one_that_is_due_already_fires_again_with_the_next_batch(
    book: BatchProgress | None, by_event_time: list[int], by_processing_time: list[int]
) -> None:
    """As in a run whose batches take one epoch each, however many epochs this batch takes, and whatever the plan of the next
    one allows. By processing time each epoch has a clock of its own."""
    assert visited(book, pipeline(["a"])) == {"a": by_event_time}
    assert visited(book, pipeline(["a"], "processing")) == {"a": by_processing_time}
