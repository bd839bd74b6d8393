"""`stillstate export`: the file that it writes, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from job_roots import SECRET, JobRoot
from test_query_command import SEEN, checkpoint
from typer.testing import CliRunner, Result

from stillstate.orchestration.cli import app


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.fixture
def place(flights: JobRoot) -> str:
    """A job with one state of three keys, one of them removed by now."""
    flights.start()
    checkpoint(flights, "seen", SEEN, {"N1": (1, "one"), "N2": (2, "two"), None: (3, "none")})
    checkpoint(flights, "seen", SEEN, {"N2": None})
    return flights.catalog.root.url


def test_a_state_of_any_snapshot_becomes_a_file(place: str, tmp_path: Path) -> None:
    done = call(place, "legs", "seen", "--to", tmp_path / "seen.parquet")
    assert done.exit_code == 0, done.output
    assert "2 rows" in done.stdout
    table = pq.read_table(tmp_path / "seen.parquet")
    assert sorted(table.column("flights").to_pylist()) == [1, 3]
    some = call(place, "legs", "seen", "--to", tmp_path / "some.csv", "--columns", "flights", "--json")
    body = json.loads(some.stdout)
    assert (body["rows"], body["operator"], body["state"]) == (2, "legs", "seen")
    assert (tmp_path / "some.csv").read_text().splitlines()[0] == '"flights"'


def test_what_is_wrong_is_said_and_no_file_is_left(place: str, tmp_path: Path) -> None:
    target = tmp_path / "seen.parquet"
    for arguments, why in (
        ((place, "legs", "nothing", "--to", target), "has no state 'nothing'"),
        ((place, "legs", "seen", "--to", tmp_path / "seen.xlsx"), "suffix"),
        ((place, "legs", "seen", "--to", target, "--columns", "x"), "no column 'x'"),
        ((place, "legs", "seen", "--to", tmp_path / "no" / "seen.csv"), "there is no folder"),
        ((tmp_path / "nowhere", "legs", "seen", "--to", target), "neither a job root nor a savepoint"),
    ):
        failed = call(*arguments)
        assert failed.exit_code == 2, failed.output
        assert why in failed.stderr
        assert SECRET not in failed.output
    target.write_text("mine")
    assert call(place, "legs", "seen", "--to", target).exit_code == 2
    assert target.read_text() == "mine"
    assert call(place, "legs", "seen", "--to", target, "--overwrite").exit_code == 0
    assert not list(tmp_path.glob("*.part"))
    assert not list(tmp_path.glob(".*.part"))
