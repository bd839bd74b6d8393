"""The pipeline on the real runtime: two runs over three weeks of flights, compared with the recomputation."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession

from examples.flights import oracle, replay
from examples.flights.job import build
from state_runtime import JobContext, JobSettings

DAYS = 21


def _deliver(year: pa.Table, inbox: Path, days: int) -> None:
    def never(seconds: float) -> bool:
        raise AssertionError("a replay at once must not wait")

    list(replay.replay(year, inbox, days_per_s=None, days=days, wait=never))


@pytest.mark.spark
@pytest.mark.long
def test_two_runs_of_the_job_give_what_the_recomputation_gives(
    spark: SparkSession, year: pa.Table, tmp_path: Path
) -> None:
    """The second run starts from the first one's snapshot: state, source position and output go on without a seam."""
    context = JobContext(
        name="flights",
        store=str(tmp_path / "store"),
        options={
            "inbox": str(tmp_path / "inbox"),
            "legs": str(tmp_path / "legs"),
            "by_carrier": str(tmp_path / "by-carrier"),
            "max_files_per_epoch": 5,
        },
        settings=JobSettings(parallelism=2, local_dir=str(tmp_path / "local")),
    )
    for days in (8, DAYS):
        _deliver(year, tmp_path / "inbox", days)
        result = build(context).run(spark, trigger={"availableNow": True})
        assert result.state == "finished"

    flights = year.slice(0, replay.delivered_flights(tmp_path / "inbox"))
    assert flights["flight_date"][-1].as_py().isoformat() == "2013-01-21"
    pa.parquet.write_table(flights, tmp_path / "weeks.parquet")
    report = oracle.compare(spark, tmp_path / "legs", tmp_path / "by-carrier", tmp_path / "weeks.parquet")
    assert report.differences == ()
    assert report.equal
    assert report.legs_found == flights.num_rows
