"""Laws of the seating: every shard one seat, best copies first, and seats are taken anew only when that evens them out."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from state_runtime.placement.assignment import CopyFound, Seating, is_refill_due, is_refill_early, seat_shards

EXECUTORS = st.lists(st.sampled_from("abcde"), min_size=1, max_size=24)


@st.composite
def offices(draw: st.DrawFn) -> tuple[list[str], dict[str, list[CopyFound]], int]:
    """Seats, copies on disks, and the parallelism that they are of."""
    executors = draw(EXECUTORS)
    before = draw(st.integers(1, 30))
    copy = st.builds(
        CopyFound,
        st.sampled_from([before, before + 1]),
        st.integers(0, before + 3),
        st.integers(0, 3),
        st.integers(0, 10**13),
    )
    copies = draw(st.dictionaries(st.sampled_from("abcdef"), st.lists(copy, max_size=12)))
    return executors, copies, before


@given(offices())
def test_every_shard_has_a_seat_and_every_seat_a_shard(
    office: tuple[list[str], dict[str, list[CopyFound]], int],
) -> None:
    """Whatever the disks say, also nonsense: two shards in one partition would be processed as one."""
    executors, copies, before = office
    assert sorted(seat_shards(executors, copies, before)) == list(range(len(executors)))


@given(EXECUTORS, st.randoms(use_true_random=False))
def test_shards_return_to_the_executors_that_have_their_copies(executors: list[str], random: object) -> None:
    """Allocation-preserving: seats in another order, the same shards on each executor."""
    first = seat_shards(executors, {}, len(executors))
    homes = [executors[seat] for seat in first]
    copies: dict[str, list[CopyFound]] = {}
    for shard, executor in enumerate(homes):
        copies.setdefault(executor, []).append(CopyFound(len(executors), shard, 1, 5))
    shuffled = list(executors)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    seats = seat_shards(shuffled, copies, len(executors))
    assert [shuffled[seat] for seat in seats] == homes


def test_a_newer_executor_gets_the_shards_that_it_has_copies_of() -> None:
    """All six are at home on a and b; c comes back with old copies of 1 and 4: those two go there, no other moves."""
    copies = {
        "a": [CopyFound(6, shard, 1, 900) for shard in (0, 1, 2)],
        "b": [CopyFound(6, shard, 1, 900) for shard in (3, 4, 5)],
        "c": [CopyFound(6, shard, 0, 800) for shard in (1, 4)],
    }
    executors = ["a", "b", "c", "a", "b", "c"]
    seats = seat_shards(executors, copies, 6)
    assert [executors[seat] for seat in seats] == ["a", "c", "a", "b", "c", "b"]


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_who_is_at_home_stays_when_a_lost_executors_shards_are_evened_out(lost: str) -> None:
    """Both of its shards went to one of the others, which has a seat too many then: it gives one of the two away. A shard of
    its own would have no old copy to come home to."""
    homes = {shard: "abc"[shard // 2] for shard in range(6)}
    host, other = (e for e in "abc" if e != lost)
    at = {shard: host if home == lost else home for shard, home in homes.items()}
    heap, is_lost = Seating(tuple(homes.values()), tuple(range(6)), 3, 3).after(at)
    assert is_lost
    copies = {e: [CopyFound(6, shard, 1, 900) for shard, where in at.items() if where == e] for e in (host, other)}
    executors = [host, other] * 3
    seats = seat_shards(executors, copies, 6, heap.guests)
    assert {shard: executors[seats[shard]] for shard, home in homes.items() if home != lost} == {
        shard: home for shard, home in homes.items() if home != lost
    }


def test_a_matching_copy_comes_before_a_stale_one_and_a_newer_stale_one_before_an_older() -> None:
    executors = ["a", "b"]
    matching_is_older = {"a": [CopyFound(2, 1, 1, 1)], "b": [CopyFound(2, 1, 0, 9)]}
    assert seat_shards(executors, matching_is_older, 2) == (1, 0)
    both_stale = {"a": [CopyFound(2, 0, 0, 1)], "b": [CopyFound(2, 0, 0, 9)]}
    assert seat_shards(executors, both_stale, 2) == (1, 0)


def test_copies_of_a_parallelism_that_no_snapshot_has_count_for_nothing() -> None:
    """Leavings of a run before the one before: their ranges are other ones."""
    assert seat_shards(["a", "b"], {"b": [CopyFound(4, 0, 2, 9)]}, 2) == (0, 1)


@pytest.mark.parametrize(("before", "now"), [(2, 4), (4, 2), (3, 7), (7, 3)])
def test_after_a_rescale_a_shard_goes_where_most_of_its_range_is(before: int, now: int) -> None:
    """Old shards lie on alternating hosts; each new one is on a host that has a part of it, as far as seats go."""
    copies: dict[str, list[CopyFound]] = {"a": [], "b": []}
    for shard in range(before):
        copies["ab"[shard % 2]].append(CopyFound(before, shard, 1, 5))
    executors = ["ab"[seat % 2] for seat in range(now)]

    def overlap(shard: int, host: str) -> float:
        return sum(
            max(0.0, min((c.shard + 1) / before, (shard + 1) / now) - max(c.shard / before, shard / now))
            for c in copies[host]
        )

    seats = seat_shards(executors, copies, before)
    got = sum(overlap(shard, executors[seat]) for shard, seat in enumerate(seats))
    best = max(
        sum(overlap(shard, executors[seat]) for shard, seat in enumerate(order))
        for order in set(permutations(range(now)))
    )
    assert got >= 0.9 * best


def seated(executors: str, slots: int = 3) -> Seating:
    return Seating(tuple(executors), tuple(range(len(executors))), slots, len(set(executors)))


def test_an_executor_that_ran_none_of_its_shards_is_lost_and_one_that_was_late_is_not() -> None:
    seating = seated("aabbcc")
    late, lost = seating.after({0: "a", 1: "b", 2: "b", 3: "b", 4: "c", 5: "c"})
    assert (late, lost) == (seating, False)
    gone, lost = seating.after({0: "b", 1: "c", 2: "b", 3: "b", 4: "c", 5: "c"})
    assert lost
    assert gone.executors == ("b", "c", "b", "b", "c", "c")
    assert gone.holders == 3, "how many there were is still known: the lost one may be replaced"


def test_shards_without_rows_say_nothing() -> None:
    seating = seated("aabbcc")
    assert seating.after({2: "b"}) == (seating, False)
    assert seating.after({}) == (seating, False)


def test_seats_are_taken_anew_when_that_evens_them_out() -> None:
    """After a loss only once there is a replacement; when more executors come; never without a reason."""
    assert not is_refill_due(seated("aabbcc"), 3, disturbed=False)
    heap = Seating(tuple("bcbbcc"), tuple(range(6)), 3, 3)
    assert not is_refill_due(heap, 2, disturbed=True), "three on each of two is as even as it gets"
    assert is_refill_due(heap, 3, disturbed=True), "the third is back and has no seat"
    assert is_refill_due(Seating(tuple("bbbbbc"), tuple(range(6)), 3, 3), 2, disturbed=True)
    assert is_refill_due(seated("aabb", 2), 4, disturbed=False), "twice as many cores"
    assert not is_refill_due(seated("ab", 2), 4, disturbed=False), "no shard to give away"


@pytest.mark.parametrize(
    ("taken", "before", "slots", "early"),
    [
        ("abcabc", Seating(tuple("bcbbcc"), tuple(range(6)), 3, 3), 3, False),
        ("bcbcab", Seating(tuple("bcbbcc"), tuple(range(6)), 3, 3), 3, True),
        ("bcbcbc", Seating(tuple("bcbbcc"), tuple(range(6)), 3, 3), 3, True),
        ("aabbccd", seated("aabbccc"), 4, False),
        ("aabbccc", seated("aabbccc"), 4, True),
        ("abc", seated("aab", 2), 3, False),
    ],
)
def test_seats_are_not_taken_before_every_executor_can(taken: str, before: Seating, slots: int, early: bool) -> None:
    """The cores of one that has registered count, but until it has started it is given nothing."""
    assert is_refill_due(before, slots, disturbed=True)
    assert is_refill_early(tuple(taken), before, slots) == early


@given(EXECUTORS, st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_seats_that_were_just_taken_evenly_are_never_taken_again(
    executors: list[str], hosts: int, cores: int, disturbed: bool
) -> None:
    """Else every epoch would move shards."""
    seats = tuple(f"e{seat % hosts}" for seat in range(len(executors)))
    even = Seating(seats, tuple(range(len(seats))), hosts * cores, len(set(seats)))
    assert max(Counter(seats).values()) - min(Counter(seats).values()) <= 1
    assert not is_refill_due(even, hosts * cores, disturbed=disturbed)
