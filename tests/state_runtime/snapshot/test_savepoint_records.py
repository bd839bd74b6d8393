"""Records of savepoints: their states, their owners, and what a name stands for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import DictStore, FakeClock, examples

from state_runtime.base.errors import (
    CorruptManifest,
    InvalidConfiguration,
    MissingSnapshot,
    SavepointExists,
    SnapshotInUse,
    StillstateError,
)
from state_runtime.base.limits import SAVEPOINT_NOTE_CHARS_MAX, SAVEPOINT_TAGS_MAX
from state_runtime.snapshot.document import encode_document
from state_runtime.snapshot.savepoint_record import (
    ALLOWED,
    ATTEMPTS_MAX,
    STALE_MS,
    SavepointRecord,
    SavepointState,
    check_tags,
    create_savepoint,
    list_savepoints,
    owner_number_of,
    read_record,
    read_savepoint,
    record_path,
    retry_wait_ms,
    rewrite_savepoint,
    savepoint_names,
    take_over,
)

STATES: tuple[SavepointState, ...] = get_args(SavepointState)


def record(name: str = "before-upgrade", state: SavepointState = "REQUESTED", **changes: object) -> SavepointRecord:
    first = SavepointRecord(name, "u1", "job", "job-uid", state, "user", 1_000, "h:1", 1_000, tags=("a", "b"), note="n")
    return replace(first, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("before", "after"), list(itertools.product(STATES, STATES)))
def test_a_state_is_only_followed_by_what_may_follow_it(before: SavepointState, after: SavepointState) -> None:
    """COMPLETED is the end of the work: nothing but deletion comes after it."""
    if after in ALLOWED[before]:
        assert record(state=before).to(after, 7).state == after
    else:
        with pytest.raises(StillstateError, match=f"cannot go from {before} to {after}"):
            record(state=before).to(after, 7)


def test_every_way_through_the_states_can_end_in_deletion() -> None:
    """There is no state that a savepoint cannot be got rid of from, and none that nobody reaches."""
    assert all("DELETING" in following for following in ALLOWED.values())
    reached = {"REQUESTED", *itertools.chain.from_iterable(ALLOWED.values())}
    assert reached == set(STATES) == set(ALLOWED)
    assert ALLOWED["COMPLETED"] == ("DELETING",)


@given(attempts=st.integers(0, 3 * ATTEMPTS_MAX), again=st.booleans(), now_ms=st.integers(0, 1 << 50))
@examples(100)
def test_a_failed_attempt_waits_longer_each_time_and_the_last_one_is_final(
    attempts: int, again: bool, now_ms: int
) -> None:
    """What cannot pass is final at once."""
    after = record(state="IN_PROGRESS", attempts=attempts).failed_attempt(now_ms, "why", again=again)
    assert after.message == "why"
    if again and attempts < ATTEMPTS_MAX:
        assert after.state == "IN_PROGRESS"
        assert after.next_attempt_at_ms == now_ms + retry_wait_ms(attempts)
        assert 1_000 <= retry_wait_ms(attempts) <= retry_wait_ms(attempts + 1) <= 60_000
    else:
        assert (after.state, after.next_attempt_at_ms, after.finished_at_ms) == ("FAILED", 0, now_ms)


def test_the_wait_after_a_failed_attempt_doubles_from_a_second_to_a_minute() -> None:
    assert [retry_wait_ms(n) for n in (0, 1, 2, 3, 6, 7, 1000)] == [1000, 1000, 2000, 4000, 32_000, 60_000, 60_000]


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["rewrite", "take", "read", "sleeper"])), max_size=40))
@examples(200)
def test_whatever_owners_do_only_the_newest_ones_record_counts(steps: list[tuple[int, str]]) -> None:
    """Three that work on one savepoint, in any order, each with what it last knew."""
    root, clock = DictStore(), FakeClock()
    first = record(state="IN_PROGRESS")
    create_savepoint(root, first)
    known = [first] * 3
    newest = first
    for actor, step in steps:
        clock.advance_s(1)
        mine = known[actor]
        if step == "read":
            known[actor] = read_savepoint(root, mine.name)
        elif step == "sleeper":
            # It looked before it slept, and writes now: its file is its own.
            root.child(f"savepoints/{mine.name}").put(record_path(mine.number), encode_document("savepoint", mine))
            newest = mine if mine.number == newest.number else newest
        elif step == "rewrite":
            changed = mine.to("IN_PROGRESS", clock.now_ms(), copied_bytes=mine.copied_bytes + 1)
            if mine.number == newest.number:
                known[actor] = newest = rewrite_savepoint(root, changed)
            else:
                with pytest.raises(SnapshotInUse):
                    rewrite_savepoint(root, changed)
        elif mine.number == newest.number:
            known[actor] = newest = take_over(root, mine, "IN_PROGRESS", owner=f"h:{actor}", clock=clock)
            assert newest.number == mine.number + 1
        else:
            with pytest.raises(SnapshotInUse):
                take_over(root, mine, "IN_PROGRESS", owner=f"h:{actor}", clock=clock)
        assert read_savepoint(root, first.name) == newest
    assert list_savepoints(root) == [newest]


def test_a_name_is_taken_once_and_asking_again_with_the_same_record_is_fine() -> None:
    """A lost answer is repeated; another savepoint of the name is refused, also after the first had other owners."""
    root, clock = DictStore(), FakeClock()
    create_savepoint(root, record())
    create_savepoint(root, record())
    with pytest.raises(SavepointExists, match="'before-upgrade' already"):
        create_savepoint(root, record(uid="u2"))
    take_over(root, record(), "IN_PROGRESS", owner="h:2", clock=clock)
    root.delete("savepoints/before-upgrade/savepoint.json")
    with pytest.raises(SavepointExists):
        create_savepoint(root, record(uid="u2"))


def test_whoever_was_deleted_under_its_feet_writes_nothing() -> None:
    root = DictStore()
    create_savepoint(root, record())
    root.delete("savepoints/before-upgrade/savepoint.json")
    with pytest.raises(SnapshotInUse, match="was deleted"):
        rewrite_savepoint(root, record(state="IN_PROGRESS"))
    assert root.objects == {}


@given(st.integers(-(1 << 40), 1 << 40))
@examples(50)
def test_an_owner_is_gone_only_after_a_silence_and_never_by_a_clock_that_is_ahead(ahead_ms: int) -> None:
    now_ms = 1 << 41
    open_ = record(state="IN_PROGRESS", heartbeat_at_ms=now_ms + ahead_ms)
    assert open_.is_stale(now_ms) == (ahead_ms < -STALE_MS)
    assert not replace(open_, state="COMPLETED").is_stale(now_ms)


@pytest.mark.parametrize(
    "name", ["savepoint-1.json", "savepoint-02.json", "savepoint-.json", "savepoint.json.bak", "job.json", "savepoint-2.JSON"]
)  # fmt: skip
def test_other_files_are_no_records(name: str) -> None:
    assert owner_number_of(name) is None
    assert owner_number_of(record_path(1)) == 1
    assert owner_number_of(record_path(17)) == 17


def test_a_savepoint_is_found_by_name_and_wherever_its_folder_lies() -> None:
    """Folders without a record belong to nobody; a damaged record stops whoever wants to delete."""
    root = DictStore()
    create_savepoint(root, record("b", requested_at_ms=5))
    create_savepoint(root, record("a", requested_at_ms=9))
    root.put("savepoints/left-over/changelog/x", b"1")
    assert [r.name for r in list_savepoints(root)] == ["b", "a"]
    assert savepoint_names(root) == ["a", "b", "left-over"]
    assert read_record(root.child("savepoints/left-over")) is None
    with pytest.raises(MissingSnapshot, match="no savepoint 'left-over'"):
        read_savepoint(root, "left-over")
    moved = DictStore()
    moved.put("anywhere/savepoint.json", root.objects["savepoints/a/savepoint.json"])
    assert read_record(moved.child("anywhere")) == record("a", requested_at_ms=9)
    root.put("savepoints/a/savepoint.json", root.objects["savepoints/a/savepoint.json"][:-9])
    with pytest.raises(CorruptManifest):
        list_savepoints(root)


def test_tags_and_notes_have_bounds() -> None:
    assert check_tags(("b", "a", "b"), "") == ("b", "a")
    for tags, note in (
        (("no spaces",), ""),
        (tuple(f"t{n}" for n in range(SAVEPOINT_TAGS_MAX + 1)), ""),
        ((), "x" * (SAVEPOINT_NOTE_CHARS_MAX + 1)),
    ):
        with pytest.raises(InvalidConfiguration):
            check_tags(tags, note)


@pytest.mark.parametrize("name", ["", "UP", "a/b", "..", "a b", "x" * 64])
def test_a_name_is_one_plain_folder(name: str) -> None:
    with pytest.raises(InvalidConfiguration):
        create_savepoint(DictStore(), record(name))
