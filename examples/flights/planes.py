"""``PlaneDay``: follow every aircraft through its day.

This is pyspark's own ``StatefulProcessor`` in the row flavour; nothing in this file knows Stillstate. The
same class runs under ``DataFrame.groupBy("tailnum").transformWithState(...)``.

What the figures are. The data holds departures *from New York* only: when an aircraft appears twice on one
day, it flew out, came back on a leg that is not in the data, and leaves again.

* ``flights_so_far``  legs of this aircraft that departed, this one included, since the stream began. A
  cancelled flight reports the number without itself.
* ``turnaround_min``  elapsed minutes from the actual arrival of the aircraft's previous leg of the same day
  (at that leg's destination) to this actual departure (from New York). So it covers the stay there, the
  flight back and the stay in New York: the time until the aircraft is on its way again. Null for the first
  leg of a day, if the previous arrival is not known, and if the records contradict each other
  (``out_of_order``).
* ``inherited_delay``  how much of this departure's delay the previous leg of the same day already had at its
  arrival: ``min(max(previous arr_delay, 0), max(this dep_delay, 0))``; 0 where there is no such leg or its
  arrival delay is not known. Null if this flight did not depart.

"Same day" is the scheduled date in New York; "previous" is the order of the schedule among the legs that departed.
A flight gets the last status of this table that applies to it:

==================  ==========================================================================================
status              a flight that
==================  ==========================================================================================
``flown``           departed and arrived
``diverted``        departed, and has no arrival delay: it did not end where it should, or not as one flight
``out_of_order``    departed before the aircraft's previous leg of the day (by schedule) had arrived: a late
                    leg was overtaken, or one of the two records names the wrong aircraft. It is followed
                    all the same
``cancelled``       did not depart. It does not advance the state: the next leg is compared with the last one
                    that flew
``no_tail_number``  has no aircraft to follow (in this data all of these are cancelled, too)
==================  ==========================================================================================
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

LEG_SCHEMA: Final = (
    "flight_id long, tailnum string, carrier string, origin string, dest string, day date, status string, "
    "dep_delay int, arr_delay int, flights_so_far int, turnaround_min int, inherited_delay int"
)
"""What ``PlaneDay`` yields: exactly one row for every flight of its input."""

STATE_SCHEMA: Final = "flights int, day date, arr_min long, arr_delay int"

FLOWN: Final = "flown"
DIVERTED: Final = "diverted"
OUT_OF_ORDER: Final = "out_of_order"
CANCELLED: Final = "cancelled"
NO_TAIL_NUMBER: Final = "no_tail_number"


class LastLeg(NamedTuple):
    """The state of one aircraft; its fields are those of ``STATE_SCHEMA``, in that order."""

    flights: int = 0
    day: datetime.date | None = None
    arr_min: int | None = None
    arr_delay: int | None = None


class PlaneDay(StatefulProcessor):
    """Compare each departure of an aircraft with the one before it. Key ``tailnum``, input rows of the year.

    The rows of a key are sorted by ``flight_id`` within a batch, for a batch may hold several files in any
    order; between batches the stream must be in order. Then the output does not depend on how the input is
    cut into batches.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the one state of an aircraft."""
        self._last_leg = handle.getValueState("last_leg", STATE_SCHEMA)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        """Yield one row per flight of this aircraft; keep its last departed leg."""
        (tailnum,) = key
        flights = sorted(rows, key=lambda flight: flight.flight_id)
        if tailnum is None:
            for flight in flights:
                yield _output(flight, NO_TAIL_NUMBER, flights_so_far=None, turnaround_min=None, inherited_delay=None)
            return
        stored = self._last_leg.get()
        last = before = LastLeg() if stored is None else LastLeg(*stored)
        for flight in flights:
            if flight.dep_min is None:
                yield _output(flight, CANCELLED, last.flights, turnaround_min=None, inherited_delay=None)
                continue
            yield _departed(flight, last)
            last = LastLeg(last.flights + 1, flight.flight_date, flight.arr_min, flight.arr_delay)
        if last != before:
            self._last_leg.update(tuple(last))


def _departed(flight: Row, last: LastLeg) -> Row:
    status = DIVERTED if flight.arr_delay is None else FLOWN
    turnaround_min: int | None = None
    inherited_delay = 0
    if last.day == flight.flight_date:
        if last.arr_min is not None and last.arr_min > flight.dep_min:
            status = OUT_OF_ORDER
        elif last.arr_min is not None:
            turnaround_min = flight.dep_min - last.arr_min
        if status != OUT_OF_ORDER and last.arr_delay is not None:
            inherited_delay = min(max(last.arr_delay, 0), max(flight.dep_delay, 0))
    return _output(flight, status, last.flights + 1, turnaround_min, inherited_delay)


def _output(
    flight: Row,
    status: str,
    flights_so_far: int | None,
    turnaround_min: int | None,
    inherited_delay: int | None,
) -> Row:
    return Row(
        flight_id=flight.flight_id,
        tailnum=flight.tailnum,
        carrier=flight.carrier,
        origin=flight.origin,
        dest=flight.dest,
        day=flight.flight_date,
        status=status,
        dep_delay=flight.dep_delay,
        arr_delay=flight.arr_delay,
        flights_so_far=flights_so_far,
        turnaround_min=turnaround_min,
        inherited_delay=inherited_delay,
    )
