"""The planner of retention against a naive one, and what it refuses."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.settings import RetentionPolicy
from state_runtime.maintenance.retention.policy import Decision, Item, check_share, plan_retention

NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
LATER_MS = 2 * NOW_MS
"""No snapshot of a history is dated later."""
PERIODS = {"hourly": "%Y-%m-%d %H", "daily": "%Y-%m-%d", "weekly": "%G-%V", "monthly": "%Y-%m", "yearly": "%Y"}

counts = st.none() | st.integers(1, 6)
seconds = st.none() | st.floats(60, 400 * 86_400)
policies = st.builds(
    RetentionPolicy,
    keep_last=counts,
    keep_within_s=seconds,
    keep_hourly=counts,
    keep_daily=counts,
    keep_weekly=counts,
    keep_monthly=counts,
    keep_yearly=counts,
    keep_tags=st.sampled_from([(), ("a",), ("a", "b")]),
    max_age_s=seconds,
    max_count=counts,
).filter(lambda p: not p.is_empty)


@st.composite
def histories(draw: Any, kind: str = "checkpoint") -> list[Item]:
    """Snapshots in order of time, minutes to months apart; some of them failed, or are held."""
    gaps = draw(
        st.lists(st.sampled_from([60_000, HOUR_MS // 3, 5 * HOUR_MS, 30 * HOUR_MS, 800 * HOUR_MS]), max_size=25)
    )
    at_ms, items = NOW_MS, []
    for number, gap in enumerate(gaps):
        at_ms += gap
        items.append(
            Item(
                kind,  # type: ignore[arg-type]
                f"{kind}-{number}",
                number,
                at_ms,
                restorable=draw(st.booleans()) if draw(st.integers(0, 4)) == 0 else True,
                tags=draw(st.sampled_from([(), (), ("a",), ("b", "c")])),
                held=draw(st.sampled_from([(), (), (), ("a pin",)])),
            )
        )
    return items


def naive(items: list[Item], policy: RetentionPolicy) -> set[str]:
    """Names of the kept ones, rule by rule, as the documentation says it."""
    kept = {i.name for i in items if i.held or not i.restorable}
    for kind in ("checkpoint", "savepoint"):
        good = sorted((i for i in items if i.kind == kind and i.restorable), key=lambda i: -i.order)
        if not good:
            continue
        age_s = {i.name: (good[0].created_at_ms - i.created_at_ms) / 1000 for i in good}
        kept.add(good[0].name)
        kept |= {i.name for i in good[: policy.keep_last or 0]}
        kept |= {i.name for i in good if policy.keep_within_s is not None and age_s[i.name] <= policy.keep_within_s}
        kept |= {i.name for i in good if set(i.tags) & set(policy.keep_tags)}
        for period, form in PERIODS.items():
            count = getattr(policy, f"keep_{period}") or 0
            newest: dict[str, str] = {}
            for item in good:
                newest.setdefault(datetime.fromtimestamp(item.created_at_ms / 1000, UTC).strftime(form), item.name)
            kept |= set(list(newest.values())[:count])
            if len(newest) < count:
                kept.add(good[-1].name)
        if policy.max_age_s is not None or policy.max_count is not None:
            young = {i.name for i in good if policy.max_age_s is None or age_s[i.name] <= policy.max_age_s}
            few = {i.name for i in good[: policy.max_count]} if policy.max_count is not None else young
            kept |= young & few
    return kept


def kept(decisions: list[Decision]) -> set[str]:
    return {d.item.name for d in decisions if d.kept}


@given(histories(), histories("savepoint"), policies)
@examples(400)
def test_the_plan_is_that_of_the_naive_reference(
    checkpoints: list[Item], savepoints: list[Item], policy: RetentionPolicy
) -> None:
    items = checkpoints + savepoints
    assert kept(plan_retention(items, policy, now_ms=LATER_MS)) == naive(items, policy)


@given(histories(), policies, st.randoms())
@examples(150)
def test_every_item_is_decided_once_and_the_order_of_input_does_not_matter(
    items: list[Item], policy: RetentionPolicy, random: Any
) -> None:
    shuffled = list(items)
    random.shuffle(shuffled)
    plan = plan_retention(items, policy, now_ms=LATER_MS)
    assert sorted(d.item.name for d in plan) == sorted(i.name for i in items)
    assert plan == plan_retention(shuffled, policy, now_ms=LATER_MS)


@given(histories(), policies)
@examples(150)
def test_the_newest_restorable_one_is_kept_and_whoever_is_held(items: list[Item], policy: RetentionPolicy) -> None:
    plan = plan_retention(items, policy, now_ms=LATER_MS)
    good = [i for i in items if i.restorable]
    if good:
        assert good[-1].name in kept(plan)
    assert {i.name for i in items if i.held} <= kept(plan)


@given(histories(), policies)
@examples(150)
def test_what_was_doomed_stays_doomed_when_newer_ones_come(items: list[Item], policy: RetentionPolicy) -> None:
    """So a plan for a running job is not stale a second later, unless somebody needs what it deletes."""
    if not items or policy.keep_tags:
        return
    doomed = {d.item.name for d in plan_retention(items, policy, now_ms=LATER_MS) if not d.kept}
    later = [*items, Item("checkpoint", "later", 1000, items[-1].created_at_ms + HOUR_MS)]
    assert doomed.isdisjoint(kept(plan_retention(later, policy, now_ms=LATER_MS)))


def ages(*hours: float) -> list[Item]:
    """Checkpoints so many hours old, oldest first in the argument list."""
    return [Item("checkpoint", f"{h:g}h", n, int(NOW_MS - h * HOUR_MS)) for n, h in enumerate(hours)]


def test_windows_are_measured_from_the_newest_snapshot_and_not_from_now() -> None:
    """A job that stood still for a year loses nothing."""
    plan = plan_retention(ages(9010, 9001, 9000), RetentionPolicy(keep_within_s=2 * 3600), now_ms=NOW_MS)
    assert kept(plan) == {"9001h", "9000h"}


def test_failed_ones_do_not_count_and_push_nobody_out() -> None:
    """In Flink's operator they do, and the good ones go."""
    failed = [
        Item("savepoint", f"failed-{n}", 100 + n, NOW_MS, restorable=False, failed_at_ms=NOW_MS) for n in range(9)
    ]
    good = [Item("savepoint", f"good-{n}", n, NOW_MS) for n in range(3)]
    plan = plan_retention([*good, *failed], RetentionPolicy(keep_last=2), now_ms=NOW_MS)
    assert kept(plan) == {"good-2", "good-1", *(f.name for f in failed)}


def test_a_failed_one_ends_by_its_own_time_which_is_counted_from_now() -> None:
    item = Item("savepoint", "x", 1, NOW_MS, restorable=False, failed_at_ms=NOW_MS - 10_000)
    assert kept(plan_retention([item], RetentionPolicy(keep_last=1, failed_ttl_s=11), now_ms=NOW_MS)) == {"x"}
    assert kept(plan_retention([item], RetentionPolicy(keep_last=1, failed_ttl_s=10), now_ms=NOW_MS)) == set()


def test_every_kept_one_says_why() -> None:
    plan = plan_retention(ages(50, 25, 1, 0), RetentionPolicy(keep_last=2, keep_daily=3), now_ms=NOW_MS)
    assert {d.item.name: d.reasons for d in plan} == {
        "0h": ("the newest", "last 1 of 2", "daily 1 of 3"),
        "1h": ("last 2 of 2",),
        "25h": ("daily 2 of 3",),
        "50h": ("daily 3 of 3",),
    }


def test_max_age_and_max_count_evict_only_what_no_rule_keeps() -> None:
    plan = plan_retention(ages(50, 25, 1, 0), RetentionPolicy(max_age_s=30 * 3600, keep_yearly=2), now_ms=NOW_MS)
    assert kept(plan) == {"0h", "1h", "25h", "50h"}  # the oldest one is held: the yearly series is not full
    assert kept(plan_retention(ages(50, 25, 1, 0), RetentionPolicy(max_age_s=30 * 3600), now_ms=NOW_MS)) == {
        "0h",
        "1h",
        "25h",
    }
    assert kept(plan_retention(ages(50, 25, 1, 0), RetentionPolicy(max_count=1), now_ms=NOW_MS)) == {"0h"}


def test_a_clock_that_went_back_and_one_that_is_far_ahead_harm_nobody() -> None:
    """Ids order snapshots; the newest is the one with the highest, whatever its time."""
    items = [
        Item("checkpoint", "1", 1, NOW_MS),
        Item("checkpoint", "2", 2, 1 << 60),
        Item("checkpoint", "3", 3, NOW_MS - HOUR_MS),
        Item("checkpoint", "4", 4, -5),
    ]
    plan = plan_retention(items, RetentionPolicy(keep_within_s=60, keep_daily=1), now_ms=NOW_MS)
    assert "4" in kept(plan)
    assert {"1", "2", "3"} <= kept(plan)  # from the future, as the newest sees it: kept


@given(histories(), policies, st.integers(1, 6))
@examples(100)
def test_snapshots_of_the_future_make_no_other_one_old(items: list[Item], policy: RetentionPolicy, count: int) -> None:
    """A clock that was a month ahead for a minute, and is right where the plan is made: what the rules keep of the others they keep as
    if those had been made now, whatever comes after them."""
    now_ms = items[-1].created_at_ms if items else NOW_MS

    def newer(ahead_ms: int) -> list[Item]:
        return [*items, *(Item("checkpoint", f"new-{n}", 1000 + n, now_ms + ahead_ms) for n in range(count))]

    month_ms = 720 * HOUR_MS
    reference = kept(plan_retention(newer(0), policy, now_ms=now_ms - 2 * HOUR_MS))
    assert kept(plan_retention(newer(month_ms), policy, now_ms=now_ms - 2 * HOUR_MS)) == reference
    back = Item("checkpoint", "back", 2000, now_ms)
    reference = kept(plan_retention([*newer(0), back], policy, now_ms=NOW_MS * 2))
    assert kept(plan_retention([*newer(month_ms), back], policy, now_ms=NOW_MS * 2)) == reference


def test_rules_that_hold_nobody_keep_the_newest() -> None:
    plan = plan_retention(ages(3, 2, 1), RetentionPolicy(keep_tags=("none",)), now_ms=NOW_MS)
    assert kept(plan) == {"1h"}


def test_an_empty_policy_is_refused() -> None:
    for policy in (RetentionPolicy(), RetentionPolicy(failed_ttl_s=5)):
        with pytest.raises(InvalidConfiguration, match="empty"):
            plan_retention(ages(0), policy, now_ms=NOW_MS)


@pytest.mark.parametrize("value", [0, -1, 10**9, 1.5, True])
@pytest.mark.parametrize("name", ["keep_last", "keep_hourly", "keep_yearly", "max_count"])
def test_a_count_that_is_none_is_refused(name: str, value: Any) -> None:
    """Scenario 68: zero means `delete everything` only by mistake."""
    with pytest.raises(InvalidConfiguration, match=name):
        RetentionPolicy(**{name: value})


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e12])
@pytest.mark.parametrize("name", ["keep_within_s", "max_age_s", "failed_ttl_s"])
def test_a_duration_that_is_none_is_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidConfiguration, match=name):
        RetentionPolicy(**{name: value})


def test_a_plan_that_deletes_too_large_a_share_is_refused_unless_told() -> None:
    plan = plan_retention(ages(3, 2, 1, 0), RetentionPolicy(keep_last=1), now_ms=NOW_MS)
    with pytest.raises(InvalidConfiguration, match="3 of 4"):
        check_share(plan, 0.5)
    check_share(plan, 0.75)
    for share in (0.0, -1.0, 1.1, math.nan):
        with pytest.raises(InvalidConfiguration, match="share"):
            check_share(plan, share)
