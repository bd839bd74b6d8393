"""`stillstate compact-output` and `compact_output_<job>`: what is shown, and that each row stays there once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from dagster_world import World
from job_roots import JobRoot
from typer.testing import CliRunner, Result

from state_runtime import DeltaSink, ParquetSink
from state_runtime.base import faults
from state_runtime.base.faults import COMPACTION_KILL_POINTS
from state_runtime.snapshot.manifest import StagedOutput
from stillstate.orchestration.cli import app
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.definitions import build_definitions

CODE = """
from pathlib import Path
from state_runtime import DeltaSink, ParquetSink, foreach_epoch

HERE = Path(__file__).parent

def read(spark):
    raise AssertionError("no row is read")

def build(context):
    job = context.job()
    rows = job.read(read)
    rows.write(ParquetSink(str(HERE / "legs")), name="legs")
    rows.write(DeltaSink(str(HERE / "table")), name="table")
    rows.write(foreach_epoch(print), name="told")
    return job
"""
SCHEMA = pa.schema([("n", pa.int64())])
EPOCHS = 5
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def house(write_config: Callable[..., Path], flights: JobRoot, tmp_path: Path) -> Path:
    """A job that has published five epochs; the path of its configuration."""
    flights.start("stopped")
    config = write_config("flights", extra="output: {min_age_s: 60}")
    with_code(config)
    publish(flights, tmp_path, EPOCHS)
    return config


def publish(job: JobRoot, folder: Path, epochs: int) -> int:
    """Publish more epochs, each with its number as its only row; return the newest."""
    uid = job.catalog.job_info().uid
    newest = 0
    for sink, name in ((ParquetSink(str(folder / "legs")), "legs"), (DeltaSink(str(folder / "table")), "table")):
        sink.check(SCHEMA, "here")
        spec = sink.spec("flights", uid, name, ("unused", {}))
        newest = sink.newest_published_epoch(spec) + epochs
        for epoch in range(newest - epochs + 1, newest + 1):
            task = spec.open(1, epoch, 0, "0" * 16)
            task.write(pa.RecordBatch.from_pylist([{"n": epoch}], schema=SCHEMA))
            sink.publish(spec, StagedOutput(name, epoch, task.finish().files), None)
    return newest


def with_code(config: Path) -> None:
    config.write_text(config.read_text().replace("nowhere.job:build", "compacted_job:build"))
    (config.parent / "compacted_job.py").write_text(CODE)
    sys.modules.pop("compacted_job", None)


def compact(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["compact-output", "flights", "-c", str(config), *arguments])


def seen(folder: Path) -> list[int]:
    table = ds.dataset(folder, format="parquet", exclude_invalid_files=False).to_table()
    return sorted(table["n"].to_pylist())


def files(folder: Path) -> int:
    return len(list(folder.glob("*.parquet")))


def test_a_plan_is_shown_and_changes_nothing(house: Path, tmp_path: Path) -> None:
    shown = compact(house, "--plan", "--min-age", "0s")
    assert shown.exit_code == 0, shown.output
    legs, table, told = shown.stdout.splitlines()
    assert legs.startswith("legs: 5 files → 2 (")
    assert "4 files of " in legs
    assert legs.endswith(" would be written anew as 1")
    assert "would be written anew as 1" in table
    assert told == "told: nothing to keep in order here"
    assert (files(tmp_path / "legs"), files(tmp_path / "table")) == (EPOCHS, EPOCHS)
    young = json.loads(compact(house, "--plan", "--json", "--sink", "legs").stdout)["sinks"]
    assert set(young) == {"legs"}
    assert (young["legs"]["files_before"], young["legs"]["rewritten_files"]) == (EPOCHS, 0), "an hour is not over"


def test_each_sink_is_kept_in_its_own_way_and_each_row_stays(house: Path, tmp_path: Path) -> None:
    done = compact(house, "--json", "--min-age", "0s")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["job"], said["plan"], said["sinks"]["told"]) == ("flights", False, None)
    assert [said["sinks"][name]["files_after"] for name in ("legs", "table")] == [2, 1]
    assert [said["sinks"][name]["new_bytes"] > 0 for name in ("legs", "table")] == [True, True]
    assert files(tmp_path / "legs") == 2
    assert files(tmp_path / "table") == EPOCHS + 1, "the table's retention is not over"
    assert seen(tmp_path / "legs") == [1, 2, 3, 4, 5]
    again = compact(house, "--min-age", "0s")
    assert [line.rpartition(": ")[2] for line in again.stdout.splitlines()[:2]] == ["nothing to do"] * 2


def test_a_process_that_dies_in_the_middle_is_repaired_by_the_next_call(
    house: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(point: str) -> None:
        if point == "compaction-visible":
            raise KeyboardInterrupt

    monkeypatch.setattr(faults, "reach", die)
    assert compact(house, "--min-age", "0s", "--sink", "legs").exit_code != 0
    assert len(seen(tmp_path / "legs")) > EPOCHS, "some are there twice until it is repaired"
    monkeypatch.undo()
    assert compact(house, "--min-age", "0s", "--sink", "legs").exit_code == 0
    assert seen(tmp_path / "legs") == [1, 2, 3, 4, 5]


@pytest.mark.kill
def test_a_command_that_is_killed_anywhere_is_repaired_by_the_next_one(
    house: Path, flights: JobRoot, tmp_path: Path
) -> None:
    newest = EPOCHS
    for point in COMPACTION_KILL_POINTS:
        command = ["-m", "stillstate.orchestration.cli", "compact-output", "flights", "-c", str(house)]
        killed = subprocess.run(
            [sys.executable, *command, "--sink", "legs", "--min-age", "0s"],
            env={**os.environ, "STILLSTATE_KILL_AT": point},
            cwd=ROOT,
            capture_output=True,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
        assert set(seen(tmp_path / "legs")) == set(range(1, newest + 1)), point
        assert compact(house, "--sink", "legs", "--min-age", "0s").exit_code == 0
        assert seen(tmp_path / "legs") == list(range(1, newest + 1)), point
        newest = publish(flights, tmp_path, 10)  # more than there are in the file: it is written anew, too


def test_the_target_and_the_writers_are_as_they_are_asked_for(house: Path, tmp_path: Path) -> None:
    assert compact(house, "--target-mib", "0").exit_code == 2
    unknown = compact(house, "--sink", "lags")
    assert unknown.exit_code == 2
    assert "has no sink 'lags'; it has legs, table, told" in unknown.stderr
    for path in (tmp_path / "legs" / "_stillstate" / "commits").iterdir():
        old = path.rename(path.with_name("flights-ffffffff-legs"))
        for file in (tmp_path / "legs").glob("*.parquet"):
            file.rename(file.with_name(file.name.replace(path.name, old.name)))
    assert (
        json.loads(compact(house, "--plan", "--json", "--min-age", "0s").stdout)["sinks"]["legs"]["files_before"] == 0
    )
    everybody = compact(house, "--plan", "--json", "--min-age", "0s", "--all-writers")
    assert json.loads(everybody.stdout)["sinks"]["legs"]["files_before"] == EPOCHS


def test_a_job_that_was_never_started_is_told_so(write_config: Callable[..., Path]) -> None:
    config = write_config("flights")
    with_code(config)
    assert compact(config).exit_code == 2
    assert "Example: stillstate compact-output flights --plan" in CliRunner().invoke(
        app, ["compact-output", "--help"]
    ).output.replace("\n", " ")


# --- Dagster ---------------------------------------------------------------------------------------------------------


def run(world: World) -> dg.ExecuteInProcessResult:
    job = world.defs.resolve_job_def("compact_output_flights")
    return job.execute_in_process(instance=world.instance, raise_on_error=False)


def test_the_asset_has_the_numbers_of_what_was_done(
    house: Path, world: Callable[..., World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = world("flights", extra="output: {min_age_s: 60}")
    with_code(house)
    made: list[Any] = []
    for _ in range(2):
        result = run(shown)
        assert result.success
        (found,) = result.get_asset_materialization_events()
        made.append(found.materialization)
    assert [m.asset_key.path for m in made] == [["flights", "compacted_output"]] * 2
    assert [m.metadata["rewritten_files"].value for m in made] == [EPOCHS, 0], "the Delta table's; Parquet's are young"
    assert made[0].metadata["sinks"].value.records[0].data["files"] == "5 → 5"
    assert seen(tmp_path / "legs") == [1, 2, 3, 4, 5]


def test_a_stream_that_was_never_started_has_nothing_to_do(world: Callable[..., World]) -> None:
    result = run(world("flights"))
    assert result.success
    assert result.get_asset_materialization_events() == []


def test_a_schedule_is_there_if_it_is_asked_for(write_config: Callable[..., Path]) -> None:
    for extra, there in (("", False), ("output: {schedule: auto}", True), ("output: {schedule: 5 4 * * *}", True)):
        spec = load_spec(write_config(extra=extra))
        names = {s.name for s in build_definitions(spec).get_repository_def().schedule_defs}
        assert ("compact_output_flights_schedule" in names) is there
