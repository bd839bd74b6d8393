"""`copy`, `move` and `verify` as people call them: text, JSON, exit codes, what is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from job_roots import JobRoot
from typer.testing import CliRunner, Result

from state_runtime.base.actor import Actor
from state_runtime.maintenance.verify.report import Finding, VerifyReport
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import FileEntry, LayerEntry, Manifest
from state_runtime.store import open_store
from stillstate.orchestration.cli import app
from stillstate.orchestration.show.moves import report_json, result_text


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def place(tmp_path: Path) -> str:
    """A root with two snapshots of one file."""
    root = open_store(str(tmp_path / "lake" / "flights"))
    from state_runtime.base.clock import SYSTEM_CLOCK
    from state_runtime.base.ids import SYSTEM_IDS
    from state_runtime.snapshot.fencing import open_job_root, open_run

    info = open_job_root(root, "flights", clock=SYSTEM_CLOCK, ids=SYSTEM_IDS)
    body = b"one\ntwo"
    import hashlib

    log = FileEntry("tables/_sources/1/source-0.log", len(body), hashlib.sha256(body).hexdigest())
    root.put(log.path, body)
    empty = Manifest(4, info.uid, 0, 0, "", "checkpoint", 0, 1, layers=(LayerEntry(0, 0, (), (log,)),))
    for _ in range(2):
        open_run(Catalog.of_root(root), info, empty, actor=Actor(SYSTEM_CLOCK, SYSTEM_IDS, "gone", 1))
    return root.url


@pytest.fixture(autouse=True)
def nobody_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("state_runtime.snapshot.fencing.STARTING_GRACE_S", -1.0)


def snapshots(url: str) -> list[int]:
    return Catalog.of_root(open_store(url)).snapshot_ids()


@pytest.mark.parametrize("command", ["copy", "move", "verify"])
def test_help_has_an_example(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"Example: stillstate {command}" in result.output
    assert "--json" in result.output
    assert "--config" in result.output


def test_a_copy_says_what_it_did(place: str, tmp_path: Path) -> None:
    target = str(tmp_path / "backup")
    shown = call("copy", place, target, "--dry-run")
    assert shown.exit_code == 0
    assert "would copy job flights with 2 snapshots" in shown.stdout
    assert not Path(target).exists()
    result = call("copy", place, target)
    assert result.exit_code == 0, result.output
    assert "copied to" in result.stdout
    assert snapshots(target) == snapshots(place) == [1, 2]
    again = json.loads(call("copy", place, target, "--json").stdout)
    assert again["complete_before"] is True
    one = json.loads(call("copy", f"{place}@1", f"{target}-1", "--json").stdout)
    assert (one["what"], one["snapshots"], one["done"]["objects"], one["done"]["bytes"]) == ("snapshot", [1], 1, 7)


def test_a_move_asks_first(place: str, tmp_path: Path) -> None:
    """Where nobody is there to answer, nothing is done without --yes."""
    target = str(tmp_path / "moved")
    asked = call("move", place, target)
    assert asked.exit_code == 2
    assert "--yes" in asked.output
    assert not Path(target).exists()
    result = call("move", place, target, "--yes", "--verify", "full")
    assert result.exit_code == 0, result.output
    assert snapshots(target) == [1, 2, 3]
    assert not Path(place).exists()
    assert call("verify", target, "--level", "full").exit_code == 0
    gone = call("verify", place, "--json")
    assert gone.exit_code == 2
    assert json.loads(gone.stderr)["error"]["type"] == "JobNotFound"


def test_a_move_that_nobody_began_is_not_taken_back(place: str, tmp_path: Path) -> None:
    assert call("move", place, str(tmp_path / "moved"), "--abort").exit_code == 2


def test_refusals_name_the_reason(place: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_bytes(b"x")
    refused = call("copy", place, str(tmp_path / "full"), "--json")
    assert refused.exit_code == 2
    assert "not empty" in json.loads(refused.stderr)["error"]["message"]
    assert call("copy", place, f"{tmp_path / 'other'}@3").exit_code == 2
    assert call("move", f"{place}@2", str(tmp_path / "newest"), "--yes").exit_code == 2


def test_verify_names_what_is_wrong_and_says_so_by_its_exit_code(place: str, tmp_path: Path) -> None:
    good = json.loads(call("verify", place, "--level", "full", "--json").stdout)
    assert (good["ok"], good["snapshots"], good["objects_read"], good["rows"]) == (True, [1, 2], 1, 2)
    assert "nothing wrong" in call("verify", place).stdout
    log = Path(place) / "tables/_sources/1/source-0.log"
    log.write_bytes(b"one\nTwo")
    assert call("verify", place).exit_code == 0
    assert call("verify", place, "--level", "sample", "--share", "100").exit_code == 5
    shown = call("verify", place, "--level", "full")
    assert shown.exit_code == 5
    assert "damaged: tables/_sources/1/source-0.log" in shown.stdout
    log.unlink()
    result = call("verify", f"{place}@1", "--json")
    assert result.exit_code == 5
    (finding,) = json.loads(result.stdout)["findings"]
    assert (finding["kind"], finding["path"], finding["snapshot_ids"]) == (
        "missing", "tables/_sources/1/source-0.log", [1]
    )  # fmt: skip


def test_a_verification_notes_what_was_good(place: str, tmp_path: Path) -> None:
    report = tmp_path / "report"
    command = ("verify", place, "--level", "full", "--report", str(report), "--json")
    assert json.loads(call(*command).stdout)["objects_read"] == 1
    assert json.loads(call(*command).stdout)["objects_read"] == 0
    assert call("verify", f"{place}@1", "--level", "full", "--report", str(report)).exit_code == 2


def test_what_could_not_be_reached_is_told_apart() -> None:
    """4: try again; it says nothing about the data."""
    finding = Finding("unreachable", "x", "reset", (1,))
    report = VerifyReport("here", "full", (1,), 1, 1, 0, 0, 0, (finding,), 0, True, 0.0)
    assert report.exit_code == 4
    assert report_json("flights", report)["ok"] is False


def test_a_job_of_the_configuration_is_a_place(
    flights: JobRoot, write_config: object, tmp_path: Path
) -> None:  # fmt: skip
    config = write_config("flights")  # type: ignore[operator]
    flights.start()
    flights.checkpoint()
    result = call("copy", "flights", str(tmp_path / "copied"), "-c", str(config), "--json")
    # The file entries of that root are made up: what matters is that the place was found.
    assert "JobNotFound" not in result.output
    assert result_text.__doc__
