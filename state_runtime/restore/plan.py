"""Where each hash range of a shard's state is restored from; pure.

The order is: a local copy of the snapshot itself, an older local copy and the changelog since (the *tail*), the primary
store. It is chosen per state and hash range, so that after a rescale, or where a base table is younger than a copy,
parts of several copies and of the primary are put together.
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
    """A version on this host's disk that is known to be the state of its shard as of a snapshot.

    Attributes:
        parallelism, shard: of the run that wrote it: which hash range it holds.
        snapshot_id: it is the state of.
    """

    parallelism: int
    shard: int
    version: str
    snapshot_id: int

    @property
    def hash_range(self) -> tuple[int, int]:
        """Closed."""
        return hash_range_of_shard(self.shard, self.parallelism)


@dataclass(frozen=True)
class RangePlan:
    """One closed hash range of a state, and the copy that it begins from; None is the primary store."""

    low: int
    high: int
    copy: LocalCopy | None

    @property
    def since(self) -> int:
        """Only what is newer than this snapshot is read from the primary."""
        return self.copy.snapshot_id if self.copy is not None else -1


def proves(manifest: Manifest, operator: str, copy: LocalCopy, restored_from: str) -> bool:
    """Whether a manifest shows that a version is the state of its shard as of that manifest's snapshot.

    Either the manifest names the version, or the version was restored from that very manifest (by its commit id).
    Whatever else lies on the disk was written by an attempt that nobody committed.
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
    """The oldest snapshot whose state of a hash range the manifest's log still leads on from.

    That is what its base holds there: the log since then is in deltas and segments. A delta may begin earlier than the
    copy. To apply what the copy has already changes nothing, because a delta holds the last change of each row, and a
    row whose last change the copy has is as that change left it. Where a state (or its operator) began later, or had
    other columns, older copies do not serve.
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
    # No table: the range is empty in the base, and nothing says since when. All tables together do.
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
    """Where each state of a closed hash range comes from.

    Args:
        copies: proven ones; any ranges, any order.
        alike: all states must come from the same copies, because they lie in one file (RocksDB). Then one copy at most
            is used, because tables of two databases cannot be put into one.

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
            # A history that was given up: its snapshots may still be there and prove the copy, but the log leads on
            # from another.
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
