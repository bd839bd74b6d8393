"""Laws of the processor that follows each aircraft; without Spark."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row

from examples.flights import planes

Flights = list[Row]
RunProcessor = Callable[[Iterable[Flights]], list[Row]]

SAMPLE_PLANES = 12
DAY = datetime.date(2013, 7, 1)


def flight(flight_id: int, **values: Any) -> Row:
    """One flight of the aircraft N1, on time and flown, unless told otherwise. Departs at minute 100 * id."""
    dep_min = 100 * flight_id
    usual: dict[str, Any] = {
        "flight_id": flight_id,
        "flight_date": DAY,
        "carrier": "B6",
        "tailnum": "N1",
        "origin": "JFK",
        "dest": "BOS",
        "dep_delay": 0,
        "arr_delay": 0,
        "dep_min": dep_min,
        "arr_min": dep_min + 60,
    }
    return Row(**(usual | values))


def cancelled(flight_id: int, **values: Any) -> Row:
    """A flight that did not depart."""
    return flight(flight_id, dep_delay=None, arr_delay=None, dep_min=None, arr_min=None, **values)


@pytest.fixture(scope="module")
def sample(year: pa.Table, as_flights: Callable[[pa.Table], Flights]) -> Flights:
    """A month of a few busy aircraft, with everything odd that the data has, and flights without an aircraft."""
    july = year.filter(pc.equal(year["month"], 7))
    odd = july.filter(pc.and_(pc.is_valid(july["tailnum"]), pc.is_null(july["arr_delay"])))
    tails = pc.value_counts(odd["tailnum"]).to_pylist()
    tails = [count["values"] for count in sorted(tails, key=lambda c: -c["counts"])[:SAMPLE_PLANES]]
    wanted = pc.or_(pc.is_in(july["tailnum"], pa.array(tails)), pc.is_null(july["tailnum"]))
    flights = as_flights(july.filter(wanted))
    assert len(flights) > 500
    return flights


def test_every_flight_gives_exactly_one_row(sample: Flights, run_plane_day: RunProcessor) -> None:
    """No loss and no duplicate already inside the processor; bad rows are reported, not dropped."""
    output = run_plane_day([sample])
    assert sorted(row.flight_id for row in output) == [row.flight_id for row in sample]
    assert {row.status for row in output} >= {"flown", "cancelled", "diverted", "no_tail_number"}


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_the_cut_into_batches_and_the_order_inside_them_change_nothing(
    sample: Flights, run_plane_day: RunProcessor, data: st.DataObject
) -> None:
    """What makes a replay after a crash give the same rows, whatever the batches were before."""
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sample) - 1), max_size=60)))
    random = Random(data.draw(st.integers(0, 2**32)))
    batches = [sample[start:end] for start, end in zip([0, *cuts], [*cuts, len(sample)], strict=True)]
    for batch in batches:
        random.shuffle(batch)
    assert sorted(run_plane_day(batches)) == sorted(run_plane_day([sample]))


def test_a_second_leg_of_the_day_has_turnaround_and_inherited_delay(run_plane_day: RunProcessor) -> None:
    """Late by 30 on arrival, late by 20 on the next departure: 20 of it were inherited."""
    first, second = run_plane_day([[flight(1, arr_delay=30, arr_min=150), flight(2, dep_delay=20, dep_min=400)]])
    assert (first.flights_so_far, first.turnaround_min, first.inherited_delay) == (1, None, 0)
    assert (second.flights_so_far, second.turnaround_min, second.inherited_delay) == (2, 250, 20)


@pytest.mark.parametrize(
    ("arrived", "departs", "inherited"), [(30, 50, 30), (30, 10, 10), (-5, 10, 0), (30, -5, 0), (None, 10, 0)]
)
def test_inherited_delay_is_the_smaller_of_the_two_and_never_negative(
    run_plane_day: RunProcessor, arrived: int | None, departs: int, inherited: int
) -> None:
    """The definition, at its edges."""
    _, second = run_plane_day([[flight(1, arr_delay=arrived), flight(2, dep_delay=departs)]])
    assert second.inherited_delay == inherited


def test_a_new_day_starts_without_a_previous_leg_but_keeps_the_count(run_plane_day: RunProcessor) -> None:
    """An aircraft is followed through its day, and counted over the year."""
    tomorrow = DAY + datetime.timedelta(days=1)
    _, second = run_plane_day([[flight(1, arr_delay=90)], [flight(2, flight_date=tomorrow, dep_delay=90)]])
    assert (second.flights_so_far, second.turnaround_min, second.inherited_delay) == (2, None, 0)


def test_a_cancelled_flight_does_not_advance_the_state(run_plane_day: RunProcessor) -> None:
    """The next departure is compared with the last leg that flew."""
    _, middle, third = run_plane_day([[flight(1, arr_delay=15)], [cancelled(2)], [flight(3, dep_delay=40)]])
    assert (middle.status, middle.flights_so_far, middle.inherited_delay) == ("cancelled", 1, None)
    assert (third.flights_so_far, third.turnaround_min, third.inherited_delay) == (2, 140, 15)


def test_flights_without_an_aircraft_are_reported_and_not_followed(run_plane_day: RunProcessor) -> None:
    """Two of them have nothing in common; a count over them would be a lie."""
    rows = run_plane_day([[cancelled(1, tailnum=None), flight(2, tailnum=None)]])
    assert [(row.status, row.flights_so_far, row.turnaround_min) for row in rows] == [
        ("no_tail_number", None, None)
    ] * 2


def test_after_a_diversion_nothing_is_claimed_about_the_next_leg(run_plane_day: RunProcessor) -> None:
    """An arrival that is not recorded is unknown, not zero."""
    first, second = run_plane_day([[flight(1, arr_delay=None, arr_min=None)], [flight(2, dep_delay=40)]])
    assert first.status == "diverted"
    assert (second.status, second.flights_so_far, second.turnaround_min, second.inherited_delay) == (
        "flown",
        2,
        None,
        0,
    )


def test_a_departure_before_the_previous_arrival_is_marked(run_plane_day: RunProcessor) -> None:
    """An aircraft is not in two places: no negative turnaround, no inherited delay."""
    _, second = run_plane_day([[flight(1, arr_min=500, arr_delay=300), flight(2, dep_min=200, dep_delay=50)]])
    assert (second.status, second.turnaround_min, second.inherited_delay) == ("out_of_order", None, 0)
    assert second.flights_so_far == 2


def test_the_schemas_and_the_tuples_have_the_same_fields() -> None:
    """Spark matches a state tuple by position and an output row by name; neither checks."""
    assert tuple(planes.STATE_SCHEMA.replace(",", "").split()[::2]) == planes.LastLeg._fields
    names = planes.LEG_SCHEMA.replace(",", "").split()[::2]
    assert names == planes._output(flight(1), "flown", 1, None, 0).__fields__
