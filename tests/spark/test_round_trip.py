"""The golden round trip: a job's state leaves its home, changes everything that can be changed, and goes on without a seam.

Three weeks of real flights, in three jobs. The first runs a week (RocksDB, two shards) and gets a savepoint; the savepoint's folder is
renamed by plain tools, and the job is deleted. The second starts from the renamed folder (three shards, the other backend) and runs
another week; its snapshot is converted, the folder and the second job are deleted. The third starts from the converted snapshot and
ends the weeks. What all three wrote is what one recomputation of all flights gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from examples.flights import oracle, replay
from examples.flights.data import year_parquet
from examples.flights.job import build
from state_runtime import JobContext
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import JobNotFound
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.base.settings import MaterializationSettings
from state_runtime.driver.start_position import StartFrom
from state_runtime.maintenance.convert.snapshot import convert
from state_runtime.maintenance.copy.make_savepoint import SavepointWork, savepoint_of_stopped
from state_runtime.maintenance.delete.roots import delete_root
from state_runtime.reading.references import references
from state_runtime.snapshot.locate import open_place
from state_runtime.store import open_store
from tests.job_settings import job_settings
from tests.s3_server import SECRET

from .homes import Home

pytestmark = [pytest.mark.spark, pytest.mark.long]
WEEKS = (7, 14, 21)


@pytest.fixture(scope="module")
def year(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """The year in event order."""
    return pq.read_table(year_parquet(tmp_path_factory.mktemp("flights")))


@dataclass
class Trip:
    """One inbox, one place for what all jobs write, and a job for each week."""

    spark: SparkSession
    year: pa.Table
    home: Home
    folder: Path

    def run(self, name: str, days: int, *, start_from: StartFrom | None = None, **settings: Any) -> None:
        """Deliver flights up to a day, and let a job take them all in."""

        def never(seconds: float) -> bool:
            raise AssertionError("a replay at once must not wait")

        list(replay.replay(self.year, self.folder / "inbox", days_per_s=None, days=days, wait=never))
        context = JobContext(
            name=name,
            store=f"{self.home.url}/{name}-store",
            storage_options=self.home.options,
            options={
                "inbox": str(self.folder / "inbox"),
                "legs": str(self.folder / "legs"),
                "by_carrier": str(self.folder / "by-carrier"),
                "max_files_per_epoch": 4,
            },
            settings=job_settings(
                local_dir=str(self.folder / f"local-{name}"),
                materialization=MaterializationSettings(max_segments=2),
                **settings,
            ),
        )
        result = build(context).run(self.spark, trigger={"availableNow": True}, start_from=start_from)
        assert result.state == "finished"

    def delete(self, name: str, *, with_savepoints: bool = False) -> None:
        """A job with all that it has, through the system."""
        root = open_store(f"{self.home.url}/{name}-store/{name}", self.home.options)
        delete_root(root, clock=SYSTEM_CLOCK, ids=SYSTEM_IDS, owner="test", with_savepoints=with_savepoints)
        with pytest.raises(JobNotFound):
            open_place(root.url, self.home.options)
        assert not [path for path in self.home.names() if path.startswith(f"{name}-store/")]


def is_self_contained(place: str, options: dict[str, Any]) -> int:
    """Every object that the snapshot needs lies below its root, whole; how many there are."""
    opened = open_place(place, options)
    refs = list(references(opened.root, opened.manifest))
    for ref in refs:
        if ref.kind not in ("manifest", "direct"):
            assert opened.root.size(ref.path) == ref.bytes
    return len(refs)


def test_a_state_goes_round_the_world_and_no_row_is_lost(
    spark: SparkSession, year: pa.Table, home: Home, tmp_path: Path
) -> None:
    trip = Trip(spark, year, home, tmp_path)

    trip.run("first", WEEKS[0], parallelism=2, backend="rocksdb")
    source = open_place(trip.home.place("first-store/first"), home.options)
    work = SavepointWork(source.root, "test", SYSTEM_CLOCK, SYSTEM_IDS)
    record = savepoint_of_stopped(work, "before-the-trip", tags=("trip",), note="a week of flights")
    assert (record.state, record.snapshot_id) == ("COMPLETED", source.manifest.snapshot_id)

    # Plain tools move the folder; then the job that it came from ends to exist.
    home.rename("first-store/first/savepoints/before-the-trip", "moved/by/hand")
    trip.delete("first")
    assert is_self_contained(trip.home.place("moved/by/hand"), home.options) > 1

    start = StartFrom(trip.home.place("moved/by/hand"))
    trip.run("second", WEEKS[1], start_from=start, parallelism=3, backend="arrow")
    second = open_place(trip.home.place("second-store/second"), home.options)
    assert second.manifest.parallelism == 3
    assert [o.job_uid for o in second.manifest.origins] == [source.info.uid]

    converted = convert(
        second,
        open_store(trip.home.place("archive/canonical"), home.options),
        "canonical",
        clock=SYSTEM_CLOCK,
        ids=SYSTEM_IDS,
    )
    assert (converted.manifest.snapshot_format, converted.states) == ("canonical", 2)
    trip.delete("second")
    folder = open_store(trip.home.place("moved/by/hand"), home.options)
    for found in list(folder.list_objects("")):
        folder.delete(found.path)
    assert is_self_contained(trip.home.place("archive/canonical"), home.options) > 1

    trip.run(
        "third", WEEKS[2], start_from=StartFrom(trip.home.place("archive/canonical")), parallelism=1, backend="rocksdb"
    )

    flights = year.slice(0, replay.delivered_flights(tmp_path / "inbox"))
    pq.write_table(flights, tmp_path / "weeks.parquet")
    report = oracle.compare(spark, tmp_path / "legs", tmp_path / "by-carrier", tmp_path / "weeks.parquet")
    assert report.differences == ()
    assert report.equal
    assert report.legs_found == flights.num_rows
    if home.options:
        assert home.holding(SECRET.encode()) == []
