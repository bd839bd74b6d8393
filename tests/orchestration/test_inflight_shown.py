"""Rows in flight where people look: descriptions, lists, progress lines and gauges say how many wait, whose, and for how
long; where none wait, nothing is said."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from inflight_root import InflightRoot, rows_in_flight
from model import FakeClock
from rich.console import Console

from state_runtime.base.errors import CorruptManifest
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.base.progress import InflightProgress, Progress
from state_runtime.maintenance.copy.make_savepoint import SavepointWork, savepoint_of_stopped
from state_runtime.maintenance.verify.drill import DrillReport
from state_runtime.snapshot.savepoint_record import create_savepoint
from stillstate.assets.upkeep import savepoints_metadata
from stillstate.orchestration.metrics.families import families
from stillstate.orchestration.probes.vitals import Vitals
from stillstate.orchestration.running.make_savepoint import savepoint_rows
from stillstate.orchestration.show.runs import progress_line
from stillstate.orchestration.show.savepoints import savepoints_table
from stillstate.orchestration.show.views import JobRow, SnapshotRow, jobs_table, manifest_parts, snapshots_table
from stillstate.orchestration.upkeep.drill import drill_json, drill_text


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> InflightRoot:
    """Read only."""
    return rows_in_flight(tmp_path_factory.mktemp("job"), checkpoints=4)


def text_of(*parts: Any) -> str:
    console = Console(file=io.StringIO(), width=400, color_system=None)
    for part in parts:
        console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_description_says_what_waits_operator_by_operator(made: InflightRoot) -> None:
    """Rows, bytes, epoch, age, columns; operators without any say how far they are. The numbers of the epoch too."""
    assert made.manifest.open_batch is not None
    text = text_of(*manifest_parts("job", replace(made.manifest, created_at_ms=1_700_000_060_000)))
    lines = {
        line.split()[1]: line
        for line in text.splitlines()
        if ("in flight" in line and "│" in line) or "rows above" in line
    }
    for found in made.manifest.open_batch.operators:
        assert str(found.rows) in lines[found.uid]
        assert "1 min 0 s" in lines[found.uid]
    assert "k, g, n, at" in lines["steps"]
    assert "waits for rows above" in text
    assert "inflight slices" in text


def test_without_an_open_batch_a_description_does_not_speak_of_rows(made: InflightRoot) -> None:
    """Of jobs that never had any the page is what it was."""
    plain = replace(made.manifest, open_batch=None, progress=Progress(snapshot_id=4))
    assert "in flight" not in text_of(*manifest_parts("job", plain))
    assert "in flight" not in text_of(snapshots_table("job", [SnapshotRow.of(plain)]))


def test_a_list_of_snapshots_has_a_column_when_some_have_rows(made: InflightRoot) -> None:
    """And its JSON has the numbers."""
    waiting = SnapshotRow.of(made.manifest)
    assert made.manifest.open_batch is not None
    assert waiting.inflight_rows == sum(o.rows for o in made.manifest.open_batch.operators)
    assert "in flight" in text_of(snapshots_table("job", [waiting, SnapshotRow.broken(9, CorruptManifest("damaged"))]))
    assert waiting.to_json_dict()["inflight_bytes"] > 0


def test_savepoints_say_what_waits_in_them(tmp_path: Path) -> None:
    """A column, and numbers in JSON and in Dagster: before code with other columns is started from one it must be drained. Of a
    savepoint that is not complete nothing is known, and where none has rows there is no column."""
    made = rows_in_flight(tmp_path, checkpoints=4)
    assert made.manifest.open_batch is not None
    rows = sum(o.rows for o in made.manifest.open_batch.operators)
    whole = savepoint_of_stopped(SavepointWork(made.root, "h:1", FakeClock(), SYSTEM_IDS), "whole")
    create_savepoint(made.root, replace(whole, name="failed", state="FAILED", uid="f"))
    listed = savepoint_rows(made.catalog, FakeClock())
    found = {row.name: row.to_json_dict() for row in listed}
    assert (found["whole"]["inflight_rows"], found["failed"]["inflight_rows"]) == (rows, None)
    assert found["whole"]["inflight_bytes"] > 0
    table = text_of(savepoints_table("job", listed))
    assert "in flight" in table
    assert [line.split("│")[6].strip() for line in table.splitlines() if "COMPLETED" in line] == [f"{rows:,}"]
    none_wait = [replace(row, inflight_rows=0) for row in listed]
    assert "in flight" not in text_of(savepoints_table("job", none_wait))

    def columns(waiting: dict[str, int]) -> list[str]:
        metadata = savepoints_metadata([whole], made.root.url, inflight_rows=waiting)
        return [column.name for column in metadata["savepoints"].schema.columns]

    assert "in flight" in columns({"whole": rows})
    assert "in flight" not in columns({"whole": 0})


def test_a_savepoint_whose_manifest_is_damaged_is_listed_all_the_same(tmp_path: Path) -> None:
    """Whoever verifies it is told what it misses; the list goes on with the others."""
    made = rows_in_flight(tmp_path, checkpoints=4)
    whole = savepoint_of_stopped(SavepointWork(made.root, "h:1", FakeClock(), SYSTEM_IDS), "whole")
    manifest = f"savepoints/whole/snapshots/{whole.snapshot_id:020d}/manifest.json"
    made.root.put(manifest, made.root.read(manifest, 1 << 20)[:-9] + b"xxxxxxxxx")
    (row,) = savepoint_rows(made.catalog, FakeClock())
    assert (row.state, row.inflight_rows) == ("COMPLETED", None)


def test_a_line_of_progress_names_the_slowest_shard() -> None:
    """Whoever watches sees where the time goes; a line without rows in flight is as it was."""
    inflight = InflightProgress(rows=12_000, bytes=1 << 20, oldest_ms=8_000, slowest="orders/3", slowest_ms=2_100.0)
    line = progress_line("flights", Progress(snapshot_id=3, inflight=inflight))
    assert "in flight 12,000 (1.0 MiB, oldest 8.0 s)  slowest orders/3 2.1 s" in line
    assert "in flight" not in progress_line("flights", Progress(snapshot_id=3))


def test_a_line_of_progress_says_that_its_checkpoint_waited_for_rows() -> None:
    """Before the mode is changed that is the number to look at; a line of a job that keeps up is as it was."""
    line = progress_line("flights", Progress(snapshot_id=3, phases_ms={"process": 4_000.0, "alignment": 2_100.0}))
    assert "alignment 2.1 s" in line
    assert "alignment" not in progress_line("flights", Progress(snapshot_id=3, phases_ms={"process": 4_000.0}))


def test_a_job_s_line_says_how_long_the_oldest_row_waits() -> None:
    """Next to its health, which may be good all the same."""
    row = JobRow(job="j", health="healthy", inflight_rows=7, inflight_age_s=90.0, slowest="orders/3")
    text = text_of(jobs_table([row]))
    assert "7 rows in flight" in text
    assert "orders/3" in text
    assert "in flight" not in text_of(jobs_table([JobRow(job="j", health="healthy")]))


def test_a_gauge_says_how_long_the_newest_checkpoint_waited_for_rows(made: InflightRoot) -> None:
    """In seconds, as Prometheus wants them; 0 of one that waited for none."""
    for phases_ms, waited_s in (({"alignment": 2_100.0}, 2.1), ({}, 0.0)):
        newest = replace(made.manifest, progress=Progress(phases_ms=phases_ms))
        seen = Vitals(health="healthy", is_well=True, head=newest, progress=newest.progress)
        found = {s.name: s.value for f in families({"job": seen}, {}, 0, True) for s in f.samples}
        assert found["stillstate_alignment_seconds"] == waited_s


def test_gauges_have_the_numbers(made: InflightRoot) -> None:
    """0 is a fact here: nothing waits."""
    assert made.manifest.open_batch is not None
    now_ms = min(o.read_at_ms for o in made.manifest.open_batch.operators) + 30_000
    plain = replace(made.manifest, open_batch=None)
    for manifest, rows, age_s in (
        (made.manifest, sum(o.rows for o in made.manifest.open_batch.operators), 30.0),
        (plain, 0, 0.0),
    ):
        seen = Vitals(health="healthy", is_well=True, head=manifest)
        found = {s.name: s.value for f in families({"job": seen}, {}, now_ms, True) for s in f.samples}
        assert found["stillstate_inflight_rows"] == rows
        assert found["stillstate_inflight_age_seconds"] == age_s


def test_a_drill_says_how_many_rows_wait_where_some_do() -> None:
    report = DrillReport(
        job="job", snapshot_id=4, created_at_ms=0, shards=2, states=(), problems=(), recorded_rows=-1, bytes_read=100,
        restore_s=0.5, seconds=1.0, inflight_rows=1_234,
    )  # fmt: skip
    assert "0 rows, 1,234 rows in flight, 100 B read" in drill_text(report)
    assert drill_json(report)["inflight_rows"] == 1_234
    assert "in flight" not in drill_text(replace(report, inflight_rows=0))
