"""Which snapshots a policy keeps, and why; pure.

Keep rules are OR-ed, as in restic: a snapshot that one rule holds is kept. Snapshots and savepoints are counted apart,
because a job makes thousands of snapshots for each savepoint. Only completed ones count. Windows are measured from the
newest of them, not from now (a job that is stopped loses nothing). Periods are UTC periods. A snapshot with a time
later than now was made with a wrong clock. It counts as made now; otherwise it would make all others old.

`max_age` and `max_count` only evict snapshots that no keep rule holds. If one of the two is set, a snapshot that no
rule holds stays unless it is evicted. If neither is set, a snapshot that no rule holds is deleted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Literal

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.settings import RetentionPolicy

__all__ = [
    "DELETED_SHARE_MAX",
    "Decision",
    "Item",
    "ItemKind",
    "check_share",
    "plan_retention",
]

ItemKind = Literal["checkpoint", "savepoint"]
DELETED_SHARE_MAX = 0.5
"""A plan that deletes a larger share of all snapshots must be allowed explicitly: such a plan is more often a mistake
in the policy than intended."""

_AHEAD_MS_MAX = 7_200_000
"""How far a snapshot's time may be ahead of the planner's `now_ms`: clocks differ by up to an hour, and callers have
already subtracted an hour from `now_ms` so that nothing expires too early."""
_CALENDAR_MS_MAX = 253_402_300_799_000  # the year 9999: a clock may be wrong, and the calendar ends there


@dataclass(frozen=True)
class Item:
    """A snapshot or savepoint, as the planner sees it.

    Attributes:
        name: the snapshot's id, or the savepoint's name.
        order: larger for newer items; times may repeat and go back.
        restorable: whether a job can be started from it; only restorable items count.
        tags: tags of a savepoint.
        failed_at_ms: when it failed; 0 if it did not.
        held: the reasons why it is kept under any policy (a pin, the newest snapshot, a savepoint that a user asked
            for).
    """

    kind: ItemKind
    name: str
    order: int
    created_at_ms: int
    bytes: int = 0
    restorable: bool = True
    tags: tuple[str, ...] = ()
    failed_at_ms: int = 0
    held: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """The decision on an item. A kept item has at least one reason, a deleted one has no reason.

    Attributes:
        freed_bytes: for a deleted item, the bytes of its objects that no kept snapshot needs. An object that several
            deleted items need is counted once, with the newest.
    """

    item: Item
    reasons: tuple[str, ...]
    freed_bytes: int = 0

    @property
    def kept(self) -> bool:
        return bool(self.reasons)


def plan_retention(items: Sequence[Item], policy: RetentionPolicy, *, now_ms: int) -> list[Decision]:
    """Decide for each item; newest first, checkpoints before savepoints.

    Every policy keeps the newest restorable item of each kind. Items that are not restorable do not count. A failed
    item is deleted after `failed_ttl_s`; any other one is kept, because it may be unfinished or of an unknown form.

    Args:
        now_ms: compared with failure times and with the times of snapshots: at most the time of the caller's clock.

    Raises:
        InvalidConfiguration: the policy is empty.
    """
    if policy.is_empty:
        raise InvalidConfiguration(
            "the retention policy is empty, and would keep nothing: give at least one rule, for example keep_last"
        )
    decisions: list[Decision] = []
    for kind in ("checkpoint", "savepoint"):
        group = sorted((i for i in items if i.kind == kind), key=lambda i: (i.order, i.name), reverse=True)
        reasons = _reasons([i for i in group if i.restorable], policy, now_ms + _AHEAD_MS_MAX)
        for item in group:
            found = reasons.get(item.name, ()) if item.restorable else _why_not_restorable(item, policy, now_ms)
            decisions.append(Decision(item, (*item.held, *found)))
    return decisions


def _why_not_restorable(item: Item, policy: RetentionPolicy, now_ms: int) -> tuple[str, ...]:
    if not item.failed_at_ms:
        return ("not complete: not counted",)
    is_over = now_ms - item.failed_at_ms >= policy.failed_ttl_s * 1000
    return () if is_over else ("failed: kept for a while, not counted",)


def check_share(decisions: Sequence[Decision], share_max: float) -> None:
    """Refuse a plan that deletes too much at once.

    Raises:
        InvalidConfiguration: the plan deletes a larger share, or the share is not between 0 and 1.
    """
    if not (math.isfinite(share_max) and 0 < share_max <= 1):
        raise InvalidConfiguration(f"the share that may be deleted, {share_max!r}, must be more than 0 and at most 1")
    deleted = sum(not d.kept for d in decisions)
    if deleted > share_max * len(decisions):
        raise InvalidConfiguration(
            f"the plan deletes {deleted:,} of {len(decisions):,} snapshots, more than {share_max:.0%} of them. "
            "If that is meant, allow a larger share; nothing was deleted"
        )


def _reasons(newest_first: Sequence[Item], policy: RetentionPolicy, latest_ms: int) -> Mapping[str, tuple[str, ...]]:
    """Return by name the reasons why the rules keep an item."""
    if not newest_first:
        return {}
    newest_ms = min(newest_first[0].created_at_ms, latest_ms)
    newest_first = [replace(i, created_at_ms=min(i.created_at_ms, newest_ms)) for i in newest_first]
    held = _Reasons()
    held.add(newest_first[0], "the newest")
    for place, item in enumerate(newest_first):
        age_s = (newest_ms - item.created_at_ms) / 1000
        if policy.keep_last is not None and place < policy.keep_last:
            held.add(item, f"last {place + 1} of {policy.keep_last}")
        if policy.keep_within_s is not None and age_s <= policy.keep_within_s:
            held.add(item, "within the window")
        for tag in item.tags:
            if tag in policy.keep_tags:
                held.add(item, f"tag {tag}")
    for name, period in _PERIODS.items():
        count = getattr(policy, f"keep_{name}")
        if count is not None:
            _keep_periods(newest_first, name, count, period, held)
    if policy.evicts:
        for place, item in enumerate(newest_first):
            age_s = (newest_ms - item.created_at_ms) / 1000
            too_old = policy.max_age_s is not None and age_s > policy.max_age_s
            too_many = policy.max_count is not None and place >= policy.max_count
            if not (too_old or too_many):
                held.add(item, "neither too old nor too many")
    return held.by_name


@dataclass
class _Reasons:
    by_name: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def add(self, item: Item, reason: str) -> None:
        self.by_name[item.name] = (*self.by_name.get(item.name, ()), reason)


def _keep_periods(
    newest_first: Sequence[Item], name: str, count: int, period: Callable[[datetime], object], held: _Reasons
) -> None:
    """Keep the newest item of each period until `count` are kept; if fewer are found, keep the oldest of all too."""
    before: object = None
    found = 0
    for place, item in enumerate(newest_first):
        now = period(datetime.fromtimestamp(min(max(item.created_at_ms, 0), _CALENDAR_MS_MAX) / 1000, UTC))
        is_oldest = place == len(newest_first) - 1
        if found < count and (now != before or is_oldest):
            found += 1
            held.add(item, f"{name} {found} of {count}" + (" (oldest)" if now == before else ""))
            before = now


_PERIODS: dict[str, Callable[[datetime], object]] = {
    "hourly": lambda at: (at.year, at.month, at.day, at.hour),
    "daily": lambda at: (at.year, at.month, at.day),
    "weekly": lambda at: at.isocalendar()[:2],
    "monthly": lambda at: (at.year, at.month),
    "yearly": lambda at: at.year,
}
