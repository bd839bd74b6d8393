"""In-flight rows: input of an operator that an epoch read and did not process; values, pure.

    pass        the rows that one epoch read for one operator and that are not all done
      parts     the rows, sorted by key hash and place in the input; written once, in segments
      left      the ranges of hashes that are still to be done, with about how many rows and bytes they have

A shard processes a pass in order of the hashes, and passes in the order in which they were read. Progress moves the
lower end of its range. The part stays unchanged in its segment, and is named until it overlaps no range any more. So a
row is written once, however many snapshots carry it, and a rescale cuts ranges and moves no data. See
docs/design/0031-in-flight-rows.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from state_runtime.base.errors import RESTORE_OR_GO_BACK, CorruptSegment
from state_runtime.changelog.parts import PartEntry
from state_runtime.snapshot.manifest import RowsLayout
from state_runtime.state.key_groups import hash_range_of_shard, shard_of_hash

__all__ = ["InflightPass", "RowsLeft", "RowsPart", "check_passes", "cut_by_shards", "left_of_shard"]


@dataclass(frozen=True)
class RowsLeft:
    """Rows of a pass that are still to be done.

    Attributes:
        hash_low, hash_high: closed range of their key hashes.
        rows, bytes: their number, and their size in memory; estimated after a range was cut.
    """

    hash_low: int
    hash_high: int
    rows: int
    bytes: int


@dataclass(frozen=True)
class RowsPart:
    """The place of a part of a pass.

    Attributes:
        segment: path of the segment whose index names the part; empty for the segment that is being written.
        part: `part.path` is the object that holds it, empty for the segment itself.
    """

    segment: str
    part: PartEntry

    @property
    def path(self) -> str:
        """The object that holds the part."""
        return self.part.path or self.segment


@dataclass(frozen=True)
class InflightPass:
    """The rows that one epoch read for one operator and that are not all done.

    Attributes:
        operator: uid.
        epoch: that read the rows; passes are done in this order.
        read_at_ms: its batch time.
        layout: the columns that the operator read then.
        parts: in order of hash. The rows of a hash may be spread over several parts, in order of their places.
        left: ascending, without overlaps.
    """

    operator: str
    epoch: int
    read_at_ms: int
    layout: RowsLayout
    parts: tuple[RowsPart, ...]
    left: tuple[RowsLeft, ...]

    @property
    def rows(self) -> int:
        return sum(left.rows for left in self.left)

    @property
    def bytes(self) -> int:
        return sum(left.bytes for left in self.left)

    def after(self, low: int, high: int, left: Iterable[RowsLeft]) -> InflightPass:
        """Return the pass after a shard continued it.

        Args:
            low, high: the shard's closed range; all ranges of a pass that was `cut_by_shards` are inside or outside.
            left: the ranges that the shard left.
        """
        others = [r for r in self.left if r.hash_high < low or r.hash_low > high]
        ranges = tuple(sorted((*others, *left), key=lambda r: r.hash_low))
        return replace(self, left=ranges, parts=_meeting(self.parts, ranges))


def _meeting(parts: Sequence[RowsPart], left: Sequence[RowsLeft]) -> tuple[RowsPart, ...]:
    """Return the parts that overlap ranges in ascending order."""
    return tuple(
        p for p in parts if any(r.hash_low <= p.part.hash_high and p.part.hash_low <= r.hash_high for r in left)
    )


def cut_by_shards(passed: InflightPass, parallelism: int) -> InflightPass:
    """Return the same pass with ranges that each belong to one shard of a parallelism."""
    cut: list[RowsLeft] = []
    for left in passed.left:
        first, last = (shard_of_hash(h, parallelism) for h in (left.hash_low, left.hash_high))
        if first == last:
            cut.append(left)
            continue
        width = left.hash_high - left.hash_low + 1
        for shard in range(first, last + 1):
            low, high = hash_range_of_shard(shard, parallelism)
            low, high = max(low, left.hash_low), min(high, left.hash_high)
            share = (high - low + 1) / width
            cut.append(RowsLeft(low, high, round(left.rows * share), round(left.bytes * share)))
    return replace(passed, left=tuple(cut), parts=_meeting(passed.parts, cut))


def left_of_shard(passed: InflightPass, low: int, high: int) -> tuple[RowsLeft, ...]:
    """Return the ranges of a pass in a shard's closed range."""
    return tuple(r for r in passed.left if low <= r.hash_low and r.hash_high <= high)


def check_passes(passes: Sequence[InflightPass], where: str) -> None:
    """Check what readers of passes rely on.

    Raises:
        CorruptSegment: ranges or parts are out of order, or of another kind.
    """
    named = [(p.operator, p.epoch) for p in passes]
    if len(set(named)) != len(named):
        raise CorruptSegment(f"{where} names in-flight rows of one operator and epoch twice. {RESTORE_OR_GO_BACK}")
    for passed in passes:
        ends = [-1, *(r.hash_high for r in passed.left)]
        in_order = all(end < r.hash_low <= r.hash_high for end, r in zip(ends, passed.left))
        numbers = [n for r in passed.left for n in (r.rows, r.bytes)]
        places = [p.part.hash_low for p in passed.parts]
        if (
            not in_order
            or not passed.left
            or places != sorted(places)
            or any(p.part.kind != "rows" or p.part.operator != passed.operator for p in passed.parts)
            or any(not 0 <= n < 1 << 63 for n in (*numbers, passed.epoch, passed.read_at_ms))
        ):
            raise CorruptSegment(
                f"{where}: the in-flight rows of operator {passed.operator!r} from epoch {passed.epoch} are out of "
                f"bounds. {RESTORE_OR_GO_BACK}"
            )
