"""Warnings about the times of a run that are suspicious although each row is valid; Spark does not warn of them.

Such times make rows late, which are dropped and only counted, or they give wrong days and hours. Each warning is
logged once. The rules are pure; `OddTimes` keeps which warnings a run has logged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.pipeline.watermark import WatermarkColumn

__all__ = ["AHEAD_MAX_MS", "OddTimes", "changed_zone", "hour_that_comes_twice", "odd_times"]

_LOG = logging.getLogger(__name__)

AHEAD_MAX_MS = 60_000
"""How far a watermark may be ahead of the clock: senders' clocks differ by seconds."""


def odd_times(
    columns: Sequence[WatermarkColumn], now_ms: int, event_time_ms: Mapping[str, int | None]
) -> Iterator[tuple[str, str]]:
    """Yield warnings about event times of an epoch that make later rows late: a key of kind and column, and the text.

    Args:
        now_ms: the epoch's processing time.
        event_time_ms: the highest event time of the epoch's rows, per column; None if the epoch has no rows.
    """
    for column in columns:
        highest_ms = event_time_ms.get(column.name)
        if highest_ms is None:
            continue
        where = f"event time {column.name!r}"
        if column.delay_ms == 0:
            yield (
                f"delay {column.name}",
                f"{where} has a watermark without a delay: of each batch, rows that are not later than the newest row "
                "of the batches before are late and dropped. Give `withWatermark` a delay as long as rows may be out "
                "of order",
            )
        if highest_ms <= 0:
            yield (
                f"early {column.name}",
                f"{where}: all rows of a batch are from before 1970, and the watermark begins there as in Spark: "
                "operators that go by event time drop them as late. Correct the column (a date that could not be "
                "parsed, seconds for milliseconds?) or move the times",
            )
        ahead_ms = highest_ms - column.delay_ms - now_ms
        if ahead_ms > AHEAD_MAX_MS and column.max_ahead_ms is None:  # else it is no further ahead than is allowed
            yield (
                f"ahead {column.name}",
                f"{where}: a row's time is {(ahead_ms + column.delay_ms) / 1000:,.0f} s ahead of the clock, which is "
                f"more than the delay of {column.delay_ms / 1000:,.0f} s. The watermark follows it and never falls: "
                "until the clock is there, rows with times of today are late and dropped (`late_rows`). If that row is "
                "wrong, bound such times (`max_ahead` of read(), or `max_ahead_s` in the job's settings) and go back "
                "to the snapshot before (`stillstate rollback`)",
            )


def changed_zone(before: str, now: str) -> str:
    """Return a warning if the session time zone differs from that of the run before; "" if it is the same.

    Args:
        before: empty for runs that did not record the zone.
    """
    if not before or before == now:
        return ""
    return (
        f"spark.sql.session.timeZone is {now!r}, and the run before had {before!r}: values derived from times from now "
        "on (dates, `date_trunc`, hours, texts, times without a zone) differs from what the state holds, so a day or "
        "an hour may have two rows. Set the time zone of the run before, or give the operators that use such values a "
        "new uid"
    )


def hour_that_comes_twice(uid: str, columns: Sequence[str], zone: str) -> str:
    """Return a warning about repeated local hours that a processor with pandas frames cannot tell apart, or "".

    Args:
        columns: the columns with times, of its input and output.
        zone: of the session; empty for the machine's.
    """
    if not columns or not _puts_clocks_back(zone):
        return ""
    return (
        f"operator {uid!r}: pandas frames hold times ({', '.join(columns)}) as local times of {zone} without a zone, "
        "as in Spark, and in autumn an hour comes twice there. Both hours look the same to the processor, and a time "
        "that it yields is taken for the second one. Set spark.sql.session.timeZone to UTC to tell them apart"
    )


@lru_cache(maxsize=16)
def _puts_clocks_back(zone: str) -> bool:
    """Return whether a zone's UTC offset changes in the years 2000 to 2037."""
    months = np.arange("2000-01", "2038-01", dtype="datetime64[M]").astype("datetime64[s]")
    try:
        local = pc.local_timestamp(pa.array(months).cast(pa.timestamp("s", zone or "UTC")))
    except pa.ArrowInvalid:
        return False  # Arrow does not know the name, only Java does: a fixed offset
    return len(np.unique(local.to_numpy() - months)) > 1


class OddTimes:
    """Logger of suspicious times in a run's epochs: each kind once for each column.

    Args:
        columns: the source's columns with event time.
    """

    def __init__(self, columns: Sequence[WatermarkColumn]) -> None:
        self._columns = columns
        self._said: set[str] = set()

    def look(self, now_ms: int, event_time_ms: Mapping[str, int | None]) -> None:
        """Log the warnings that are new. For the arguments see `odd_times`."""
        for kind, text in odd_times(self._columns, now_ms, event_time_ms):
            if kind not in self._said:
                self._said.add(kind)
                _LOG.warning("%s", text)
