"""Breakers, places and turns: the pure part of looking at many stores."""

from __future__ import annotations

import pytest

from stillstate.orchestration.probes.admission import Admission, Ticket
from stillstate.orchestration.probes.circuit_breaker import FAILURES_TO_OPEN, OPEN_FIRST_S, OPEN_MAX_S, CircuitBreaker
from stillstate.orchestration.probes.order import next_start, turns


def open_at(now_s: float) -> CircuitBreaker:
    breaker = CircuitBreaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(now_s, began_s=now_s, probe=False)
    return breaker


def test_one_failure_does_not_close_a_store_to_the_others() -> None:
    breaker = CircuitBreaker()
    breaker.failed(0, began_s=0, probe=False)
    breaker.answered()
    breaker.failed(1, began_s=1, probe=False)
    assert breaker.state(1) == "closed"


def test_looks_that_fail_together_are_one_failure() -> None:
    """A machine that stood still for seconds makes all looks late at once, and says nothing about the store."""
    breaker = CircuitBreaker()
    for _ in range(8):
        breaker.failed(5, began_s=0, probe=False)
    assert breaker.state(5) == "closed"
    breaker.failed(10, began_s=5, probe=False)
    assert breaker.state(10) == "open"


def test_a_store_that_stays_away_is_asked_ever_more_rarely_up_to_a_bound() -> None:
    breaker, now_s, waits = open_at(0), 0.0, []
    for _ in range(6):
        assert breaker.state(breaker.open_until_s - 0.001) == "open"
        waits.append(breaker.open_until_s - now_s)
        now_s = breaker.open_until_s
        assert breaker.state(now_s) == "half-open"
        breaker.failed(now_s, began_s=now_s, probe=True)
    assert waits == [OPEN_FIRST_S, 60, 120, 240, OPEN_MAX_S, OPEN_MAX_S]
    assert breaker.since_s == 0
    breaker.answered()
    assert (breaker.state(now_s), breaker.since_s) == ("closed", None)


def test_looks_that_began_before_a_store_was_given_up_do_not_prolong_it() -> None:
    breaker = open_at(0)
    for _ in range(10):
        breaker.failed(5, began_s=5, probe=False)
    assert breaker.open_until_s == OPEN_FIRST_S


def test_one_look_finds_out_whether_a_store_is_back_and_the_others_wait_for_it() -> None:
    traffic = Admission()
    for _ in range(FAILURES_TO_OPEN):
        traffic.abandon(traffic.begin("a", 0), 0)
    assert traffic.ask("a", 1) == "away"
    assert traffic.ask("b", 1) == "go"
    probe = traffic.begin("a", OPEN_FIRST_S)
    assert traffic.ask("a", OPEN_FIRST_S) == "wait"
    traffic.ended(probe, OPEN_FIRST_S, answered=True)
    assert traffic.ask("a", OPEN_FIRST_S) == "go"
    assert traffic.away_s("a", OPEN_FIRST_S) == 0


def test_hanging_threads_keep_their_places_and_get_no_more() -> None:
    traffic = Admission(per_store_max=2)
    hanging = [traffic.begin("a", 0) for _ in range(2)]
    assert traffic.ask("a", 0) == "wait"
    for ticket in hanging:
        traffic.abandon(ticket, 5)
    assert traffic.ask("a", 5 + OPEN_FIRST_S) == "away", "also when the breaker would let a look through"
    traffic.ended(hanging[0], 100, answered=True)
    assert traffic.ask("a", 100) == "go"
    assert traffic.away_s("a", 100) == 95, "what came too late does not count as an answer"


def test_looks_that_wait_for_their_store_take_no_place_from_others() -> None:
    traffic = Admission(side_by_side_max=2, slow_s=0.5)
    for store in ("a", "b"):
        traffic.begin(store, 0)
    assert traffic.ask("c", 0.4) == "wait"
    assert traffic.changes_at_s(0.4) == 0.5
    assert traffic.ask("c", 0.5) == "go"


def test_a_store_that_answers_is_forgotten() -> None:
    traffic = Admission()
    for at_s in range(1000):
        traffic.ended(traffic.begin(f"store-{at_s}", at_s), at_s, answered=True)
    assert vars(traffic)["_stores"] == {}


@pytest.mark.parametrize(
    ("start", "order"), [("c", ["c", "a", "b"]), ("a", ["a", "b", "c"]), ("gone", ["a", "b", "c"]), (None, [*"abc"])]
)
def test_a_tick_begins_where_the_last_one_ended(start: str | None, order: list[str]) -> None:
    assert turns(["a", "b", "c"], start) == order


def test_every_job_gets_its_turn_however_few_a_tick_reaches() -> None:
    jobs, start, reached = [f"job-{n}" for n in range(10)], "", []
    for _ in range(5):
        order = turns(jobs, start)
        reached += order[:2]
        start = next_start(order, set(order[2:]))
    assert sorted(reached) == sorted(jobs)


def test_tickets_are_told_apart() -> None:
    assert Ticket("a", 0.0, False) != Ticket("a", 0.0, False)
