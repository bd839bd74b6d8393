"""Assignment of shards: executors, seats and shards as plain values.

A *seat* is a partition number whose task Spark runs on one executor, as long as that lives (placement/anchors.py makes
them). Seats are taken first come, first served, so it is not known in advance which executor gets which. But a shard
can take any seat, and this module decides which one: where a copy of its state is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from state_runtime.state.key_groups import overlaps

__all__ = ["CopyFound", "Seating", "is_refill_due", "is_refill_early", "seat_shards"]


@dataclass(frozen=True)
class CopyFound:
    """Local state of one shard on an executor's disk, over all operators. A hint: its user has to check it.

    Attributes:
        parallelism: of the run that wrote it.
        shard: of that parallelism.
        matching: operators whose wanted version is there.
        newest_ms: wall clock of that host when the shard's folders last changed.
    """

    parallelism: int
    shard: int
    matching: int
    newest_ms: int


@dataclass(frozen=True)
class Seating:
    """Seats, the executors that hold them, and the shards on them.

    Attributes:
        executors: per seat the executor that holds it.
        seat_of_shard: a permutation.
        slots, holders: tasks that could run at once, and executors that had seats, when the seats were taken.
        guests: shards that run on another executor because theirs was lost.
    """

    executors: tuple[str, ...]
    seat_of_shard: tuple[int, ...]
    slots: int
    holders: int
    guests: frozenset[int] = frozenset()

    def after(self, ran_on: Mapping[int, str]) -> tuple[Seating, bool]:
        """Return the seating after an epoch, and whether an executor seems to be lost.

        Spark gives the seats of a lost executor to the executors that run their tasks next. An executor that only was
        late (others took some of its tasks) still holds its seats. It is considered lost if none of its shards ran on
        it.

        Args:
            ran_on: per visited shard the executor.
        """
        held: dict[str, bool] = {}
        for shard, executor in ran_on.items():
            holder = self.executors[self.seat_of_shard[shard]]
            held[holder] = held.get(holder, False) or executor == holder
        lost = {holder for holder, ran in held.items() if not ran}
        if not lost:
            return self, False
        executors, guests = list(self.executors), set(self.guests)
        for shard, executor in ran_on.items():
            seat = self.seat_of_shard[shard]
            if executors[seat] in lost:
                executors[seat] = executor
                guests.add(shard)
        return replace(self, executors=tuple(executors), guests=frozenset(guests)), True


def is_refill_due(seating: Seating, slots: int, *, disturbed: bool) -> bool:
    """Return whether to take seats again: more executors came, or one was lost and few executors hold its seats.

    Moving a shard costs a restore, so seats stay as long as no executor has two more than another.

    Args:
        slots: tasks that could run at once now.
        disturbed: an executor was lost since the seats were taken.
    """
    if slots <= seating.slots and not disturbed:
        return False
    return _is_uneven(seating.executors, _expected(seating, slots))


def is_refill_early(taken: Sequence[str], before: Seating, slots: int) -> bool:
    """Return whether seats were taken again before every executor could take its share.

    Spark counts the cores of an executor that has registered, and gives it no task before it has started. An executor
    with more cores than others looks the same, so the caller must accept the seats at some time.

    Args:
        taken: per seat the executor that took it.
        before: the seating that was to be evened out.
    """
    return _is_uneven(taken, _expected(before, slots))


def _expected(seating: Seating, slots: int) -> int:
    """Estimate the number of executors now, with as many tasks at once on each as before."""
    known = len(set(seating.executors))
    return max(known + 1 if slots > seating.slots else known, round(seating.holders * slots / seating.slots))


def _is_uneven(executors: Sequence[str], expected: int) -> bool:
    loads = Counter(executors)
    least = min(loads.values()) if expected <= len(loads) else 0
    return max(loads.values()) - least >= 2


def seat_shards(
    executors: Sequence[str],
    copies: Mapping[str, Iterable[CopyFound]],
    parallelism: int,
    guests: frozenset[int] = frozenset(),
) -> tuple[int, ...]:
    """Give each shard a seat, if possible on an executor that has its state.

    The best copies choose first. Of two shards with equally good copies the one that would lose more elsewhere goes
    first, then the one that is at home. This is greedy, so not always the best seating; each executor's number of seats
    is given, so the seating is always even.

    Args:
        executors: per seat the executor that holds it; as many as shards.
        copies: per executor the copies on its disk.
        parallelism: of the newest snapshot: copies of another one are not usable.
        guests: shards that are not where they were before an executor was lost.

    Returns:
        Per shard its seat.
    """
    count = len(executors)
    free: dict[str, list[int]] = {}
    for seat in range(count - 1, -1, -1):
        free.setdefault(executors[seat], []).append(seat)
    worth = _worth(copies, parallelism, count)
    wishes: list[tuple[float, float, bool, int, str]] = []
    for shard in range(count):
        offers = sorted(((w, e) for e, w in worth.get(shard, {}).items() if e in free), reverse=True)
        for place, (value, executor) in enumerate(offers):
            next_best = offers[place + 1][0] if place + 1 < len(offers) else 0.0
            wishes.append((-value, next_best, shard in guests, shard, executor))
    seats = [-1] * count
    for *_, shard, executor in sorted(wishes):
        if seats[shard] < 0 and free[executor]:
            seats[shard] = free[executor].pop()
    left = sorted(seat for unused in free.values() for seat in unused)
    for shard in range(count):
        if seats[shard] < 0:
            seats[shard] = left.pop(0)
    return tuple(seats)


def _worth(copies: Mapping[str, Iterable[CopyFound]], before: int, now: int) -> dict[int, dict[str, float]]:
    """Rate, per shard and executor: 2 for each matching state, up to 1 for a stale one, newer ones more; all by the
    share of the shard.

    A shard of another parallelism covers a part of this one's hash range (state/key_groups.py).
    """
    found = [(executor, copy) for executor, held in copies.items() for copy in held if copy.parallelism == before]
    times = sorted({copy.newest_ms for _, copy in found})
    rank = {time: (place + 1) / len(times) for place, time in enumerate(times)}
    worth: dict[int, dict[str, float]] = {}
    for executor, copy in found:
        if not 0 <= copy.shard < before:
            continue
        value = 2.0 * copy.matching if copy.matching else rank[copy.newest_ms]
        for shard, share in overlaps(copy.shard, before, now):
            of_shard = worth.setdefault(shard, {})
            of_shard[executor] = of_shard.get(executor, 0.0) + value * share
    return worth
