"""Where each hash range of a shard's state is restored from; pure.

The order is: a local copy of the snapshot itself, an older local copy and the later changelog (the *tail*), the primary
store. It is chosen per state and hash range. So parts of several copies and of the primary are combined after a
rescale, or if a base table is younger than a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from state_runtime.base.errors import check
from state_runtime.snapshot.manifest import Manifest, OperatorEntry
from state_runtime.snapshot.shard_versions import ShardVersions
from state_runtime.state.key_groups import hash_range_of_shard

__all__ = ["LocalCopy", "RangePlan", "oldest_usable", "plan_restore", "proves"]


@dataclass(frozen=True)
class LocalCopy:
    """A version on this host's disk that is proven to be the state of its shard as of a snapshot.

    Attributes:
        parallelism, shard: of the run that wrote it: they give the hash range.
        snapshot_id: the snapshot whose state it is.
    """

    parallelism: int
    shard: int
    version: str
    snapshot_id: int

    @property
    def hash_range(self) -> tuple[int, int]:
        """The closed hash range of the copy."""
        return hash_range_of_shard(self.shard, self.parallelism)


@dataclass(frozen=True)
class RangePlan:
    """One closed hash range of a state, and the copy that it begins from; None is the primary store."""

    low: int
    high: int
    copy: LocalCopy | None

    @property
    def since(self) -> int:
        """Id of the snapshot whose newer changes are read from the primary; -1 reads all of them."""
        return self.copy.snapshot_id if self.copy is not None else -1


def proves(manifest: Manifest, operator: str, copy: LocalCopy, restored_from: str) -> bool:
    """Return whether a manifest proves that a version is the state of its shard as of that manifest's snapshot.

    Either the manifest names the version, or the version was restored from that very manifest (by its commit id). All
    other files on the disk were written by an attempt that was never committed.
    """
    if manifest.snapshot_id != copy.snapshot_id:
        return False
    if restored_from:
        return restored_from == manifest.commit_id
    if manifest.parallelism != copy.parallelism or not 0 <= copy.shard < copy.parallelism:
        return False
    named = ShardVersions.decode(manifest.versions.get(operator, ""), manifest.parallelism)
    return named[copy.shard] == copy.version


def oldest_usable(manifest: Manifest, operator: OperatorEntry, state: str, low: int, high: int) -> int:
    """Return the oldest snapshot whose state of a hash range the manifest's log still continues.

    That is the snapshot that its base holds there: the later log is in deltas and segments. A delta may begin earlier
    than the copy. To apply changes that the copy has already changes nothing, because a delta holds the last change of
    each row, and a row whose last change the copy has is as that change left it. If a state (or its operator) began
    later, or had other columns, older copies are not usable.
    """
    entry = operator.state(state)
    begun = operator.since
    if entry is not None:
        begun = max(begun, entry.since, *(version.until for version in entry.history))
    if manifest.shards is not None:
        begun = max(begun, manifest.shards.snapshot_id)
    if not manifest.layers:
        return begun
    base = manifest.layers[0]
    newest = {t.path: base.newest_in(t) for t in base.tables}
    here = [
        newest[t.path]
        for t in base.tables
        if t.operator == operator.uid and t.state == state and t.hash_low <= high and t.hash_high >= low
    ]
    # No table: the range is empty in the base, and no table says since when. All tables together do.
    return max([begun, *(here or [base.last_snapshot_id, *newest.values()])])


def plan_restore(
    manifest: Manifest,
    operator: OperatorEntry,
    states: Sequence[str],
    low: int,
    high: int,
    copies: Sequence[LocalCopy],
    *,
    alike: bool = False,
) -> Mapping[str, tuple[RangePlan, ...]]:
    """Plan where each state of a closed hash range is restored from.

    Args:
        copies: proven ones; any ranges, any order.
        alike: all states must come from the same copies, because one file holds them (RocksDB). Then at most one copy
            is used, because tables of two databases cannot be combined.

    Returns:
        Per state its ranges in order; together they are `low … high`, without gaps or overlaps.
    """
    if alike:
        best: tuple[RangePlan, ...] = (RangePlan(low, high, None),)
        for copy in sorted(copies, key=lambda c: (c.snapshot_id, c.version)):
            common = _ranges(manifest, operator, states, low, high, [copy])
            if _covered(common) >= _covered(best) and _covered(common):
                best = common
        return dict.fromkeys(states, best)
    return {state: _ranges(manifest, operator, [state], low, high, copies) for state in states}


def _covered(ranges: Sequence[RangePlan]) -> int:
    return sum(r.high - r.low + 1 for r in ranges if r.copy is not None)


def _ranges(
    manifest: Manifest,
    operator: OperatorEntry,
    states: Sequence[str],
    low: int,
    high: int,
    copies: Sequence[LocalCopy],
) -> tuple[RangePlan, ...]:
    starts = {low}
    tables = [t for t in manifest.layers[0].tables if t.operator == operator.uid] if manifest.layers else []
    for first, last in [c.hash_range for c in copies] + [(t.hash_low, t.hash_high) for t in tables]:
        starts |= {at for at in (first, last + 1) if low < at <= high}
    ordered = sorted(starts)
    plan: list[RangePlan] = []
    for start, end in zip(ordered, [at - 1 for at in ordered[1:]] + [high]):
        oldest = max((oldest_usable(manifest, operator, s, start, end) for s in states), default=0)
        usable = [
            c
            for c in copies
            if oldest <= c.snapshot_id <= manifest.snapshot_id
            # The snapshots of an abandoned history may still exist and prove the copy, but the log continues another
            # history.
            and not manifest.abandons(c.snapshot_id)
            and c.hash_range[0] <= start
            and end <= c.hash_range[1]
        ]
        newest = max(usable, key=lambda c: (c.snapshot_id, c.version), default=None)
        if plan and plan[-1].copy == newest:
            plan[-1] = RangePlan(plan[-1].low, end, newest)
        else:
            plan.append(RangePlan(start, end, newest))
    check(plan[0].low == low and plan[-1].high == high, "a restore plan covers its range")
    return tuple(plan)
