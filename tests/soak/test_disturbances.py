"""What a soak under Dagster plays, and the bounds that it holds Dagster's record to."""

from __future__ import annotations

from itertools import islice

import pytest

from .disturbances import (
    EventBound,
    Kind,
    events_of_checkpoints_max,
    events_of_checks_max,
    events_of_the_overview_max,
    plan,
    who_brought_back,
)

CHOICES: dict[Kind, list[str]] = {
    "kill driver": ["a", "b"],
    "zombie": ["a", "b"],
    "kill worker": ["a"],
    "kill daemon": [""],
}


def test_the_same_seed_plays_the_same_and_another_seed_another_order() -> None:
    """A failure names its seed, and must come again with it."""
    played = [list(islice(plan(seed, CHOICES), 40)) for seed in (7, 7, 8)]
    assert played[0] == played[1] != played[2]


def test_each_round_plays_every_kind_once_and_the_next_one_on_the_next_job() -> None:
    """A short soak must not have missed a kind by chance, nor a longer one a job."""
    played = plan(7, CHOICES)
    for _ in range(10):
        rounds = [list(islice(played, len(CHOICES))) for _ in range(2)]
        assert all(sorted(d.kind for d in found) == sorted(CHOICES) for found in rounds)
        by_kind = {kind: sorted(d.job for found in rounds for d in found if d.kind == kind) for kind in CHOICES}
        assert by_kind["kill driver"] == by_kind["zombie"] == ["a", "b"]


def test_a_plan_of_nothing_is_refused() -> None:
    """It would go round for ever."""
    with pytest.raises(ValueError, match="at least one"):
        next(plan(7, {}))


@pytest.mark.parametrize(
    ("term", "cause", "who"),
    [
        (3, "", "itself"),
        (4, "restarted by its supervisor after signal 9 (SIGKILL) (restart 1 of 3 in a row)", "its supervisor"),
        (4, "recovery of term 3, which was dead: its process is gone", "Dagster"),
        (4, "", "a takeover"),
    ],
)
def test_who_brought_a_job_back_is_read_from_its_run(term: int, cause: str, who: str) -> None:
    """The words are those of the supervisor and of the recovery job; another word there must be one here."""
    assert who_brought_back(3, term, cause) == who


def test_the_bounds_grow_with_time_and_runs_and_not_with_checkpoints() -> None:
    """Half an hour at an interval of ten seconds, with ten runs: what a documented event costs, and no more."""
    assert events_of_checkpoints_max(1800, 10, 10) == 1 + 180 + 20
    assert events_of_checks_max(1800, 10, 3600) == 1 + 120
    assert events_of_checks_max(7200, 0, 3600) == 1 + 2 + 12, "a job that never ran is shown too"
    assert events_of_the_overview_max(1800, 10) == 181


def test_a_check_that_is_shown_at_each_tick_breaks_its_bound() -> None:
    """Ticks come every five seconds: half an hour of them is more than any bound that a soak has."""
    assert not EventBound(what="", events=1800 // 5, most=events_of_checks_max(1800, 20, 3600)).holds
    assert EventBound(what="", events=20, most=20).holds
