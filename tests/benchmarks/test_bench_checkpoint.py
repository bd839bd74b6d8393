"""The checkpoint benchmark: what is promised is what is measured, figures follow from pieces, and no piece is lost."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import checkpoint
from benchmarks.checkpoint import app, with_input_for
from benchmarks.checkpoint_workloads import (
    KEYS,
    LOADS,
    MANIFEST,
    MODES,
    PIECES,
    REQUESTS,
    TURNS,
    WrongModeError,
    check_mode,
    figures_of,
    scaled,
)
from benchmarks.manifest_size import manifest_size
from benchmarks.operators import OPERATORS
from benchmarks.pieces import Pieces, run_pieces
from benchmarks.report import Figure
from benchmarks.s3_counter import counting_s3
from benchmarks.workloads import write_data


def _piece(checkpoint_ms: list[float], *, trigger_ms: float = 100, snapshot_bytes: int = 1000) -> dict[str, Any]:
    samples = [{"checkpoint_ms": ms, "trigger_ms": trigger_ms, "input_rows": 10} for ms in checkpoint_ms]
    return {"title": "some keys", "samples": samples, "snapshot_bytes": [snapshot_bytes]}


def _named(figures: list[Figure], start: str) -> Figure:
    return next(figure for figure in figures if figure.figure.startswith(start))


def test_the_promised_sizes_are_what_is_measured() -> None:
    for load in ("value", "sliding"):
        for mode in ("on", "off-arrow", "off-rocksdb"):
            assert LOADS[f"{load}-{mode}"].epochs == 500
            assert LOADS[f"{load}-{mode}"].workload == LOADS[f"{load}-on"].workload
            assert LOADS[f"{load}-{mode}"].workload.operator in OPERATORS
        workload = LOADS[f"{load}-on"].workload
        assert (workload.keys, workload.rows) == (5_000_000, 50_000)
        turns = TURNS[f"{load}-turns"]
        assert {name: of.mode for name, of in turns.items()} == {name: MODES[name] for name in ("on", "off-arrow")}
        assert all((of.workload.keys, of.workload.rows) == (5_000_000, 50_000) for of in turns.values())
    few, many = (KEYS[name].workload for name in ("few", "many"))
    assert (few.keys, many.keys) == (100_000, 10_000_000)
    assert few.rows == many.rows
    assert REQUESTS.shards == (2, 200)
    assert (MANIFEST.shards, MANIFEST.operators, MANIFEST.epochs) == (200, 5, 600)
    assert [dict(MODES[mode].settings) for mode in ("on", "off-arrow", "off-rocksdb")] == [
        {},
        {"changelog": "off"},
        {"changelog": "off", "backend": "rocksdb"},
    ]


def test_the_promised_bounds_are_what_is_judged() -> None:
    pieces = {name: _piece([10.0] * 10) for name in LOADS}
    for load in ("value", "sliding"):
        pieces[f"{load}-turns"] = {"on": _piece([1.0]), "off-arrow": _piece([1.0])}
    pieces["keys"] = {"few": _piece([1.0]), "many": _piece([1.0])}
    pieces["manifest"] = {"bytes": 1, "shards": 200, "operators": 5, "epochs": 600}
    pieces["requests"] = {"counts": [{"shards": n, "per_checkpoint": {"PUT": 2.0}} for n in (2, 200)]}
    judged = {figure.figure: str(figure.target) for figure in figures_of(pieces) if figure.target is not None}
    assert judged == {
        "value: checkpoint p99.9, on / off-rocksdb": "<= 0.1",
        "value: checkpoint p99.9, on / off-arrow": "<= 1",
        "value: checkpoint p99.9 / p50 of 10, on": "<= 3",
        "value: full snapshot, mean, on / off-arrow": "<= 1.3",
        "value: throughput, on / off-arrow, in turns": ">= 0.95",
        "sliding: checkpoint p99.9, on / off-rocksdb": "<= 0.2",
        "sliding: checkpoint p99.9, on / off-arrow": "<= 1",
        "sliding: checkpoint p99.9 / p50 of 10, on": "<= 3",
        "sliding: full snapshot, mean, on / off-arrow": "<= 2",
        "sliding: throughput, on / off-arrow, in turns": ">= 0.95",
        "keys: checkpoint p50, some keys / some keys": "<= 1.2",
        "manifest: bytes at 200 shards, 5 operators, 600 epochs": "<= 262144",
        "requests a checkpoint, small changes, 200 / 2 shards": "<= 1",
    }
    assert all(figure.target is None for figure in figures_of(pieces, judged=False))


def test_figures_follow_from_the_samples_and_say_on_first() -> None:
    pieces = {
        "value-on": _piece([10.0] * 999 + [40.0], trigger_ms=200, snapshot_bytes=1500),
        "value-off-arrow": _piece([50.0] * 1000, trigger_ms=100, snapshot_bytes=1000),
    }
    figures = figures_of(pieces)
    tail = _named(figures, "value: checkpoint p99.9, on / off-arrow")
    assert tail.ours == pytest.approx(10.03)
    assert tail.peer == 50
    assert _named(figures, "value: checkpoint p99.9 / p50").ratio == pytest.approx(1.003)
    assert _named(figures, "value: full snapshot").holds is False
    throughput = _named(figures, "value: throughput")
    assert (throughput.ours, throughput.ratio, throughput.holds) == (50.0, 0.5, None)


def test_throughput_is_judged_where_both_modes_saw_the_machine_in_the_same_hour() -> None:
    apart = {"value-on": _piece([1.0], trigger_ms=200), "value-off-arrow": _piece([1.0], trigger_ms=100)}
    turns = {"on": _piece([1.0], trigger_ms=100), "off-arrow": _piece([1.0], trigger_ms=98)}
    figure = _named(figures_of({**apart, "value-turns": turns}), "value: throughput, on / off-arrow, in turns")
    assert (figure.ours, figure.peer, figure.holds) == (100.0, pytest.approx(100 / 0.98), True)


def test_listings_come_by_the_clock_and_are_no_requests_of_a_checkpoint() -> None:
    counts = [
        {"shards": shards, "per_checkpoint": {"PUT": 2.0, "GET": 1.0, "LIST": lists}}
        for shards, lists in ((2, 0.5), (200, 4.0))
    ]
    (figure,) = figures_of({"requests": {"counts": counts}})
    assert (figure.ours, figure.peer, figure.holds) == (3.0, 3.0, True)
    counts[1]["per_checkpoint"]["PUT"] = 3.0
    assert figures_of({"requests": {"counts": counts}})[0].holds is False


def test_a_mode_that_was_not_measured_has_no_figure() -> None:
    assert figures_of({"value-off-arrow": _piece([1.0])}) == []
    titles = [figure.figure for figure in figures_of({"value-on": _piece([1.0]), "value-spark": _piece([2.0])})]
    assert titles == [
        "value: checkpoint p99.9, on / spark",
        "value: checkpoint p50, on / spark",
        "value: checkpoint p99.9 / p50 of 1, on",
        "value: throughput, on / spark",
    ]


def test_a_snapshot_of_another_mode_is_refused() -> None:
    check_mode(MODES["on"], None)
    check_mode(MODES["off-arrow"], "arrow")
    check_mode(MODES["off-rocksdb"], "rocksdb")
    for mode, files_of in (("on", "arrow"), ("off-arrow", None), ("off-rocksdb", "arrow")):
        with pytest.raises(WrongModeError, match=MODES[mode].title):
            check_mode(MODES[mode], files_of)


def test_there_is_input_for_the_epochs_that_are_not_counted_too() -> None:
    workload = with_input_for(LOADS["value-on"].workload, 500)
    assert workload.batches == 10 + 20 + 500 + 500 // checkpoint.CHUNK


@pytest.mark.parametrize("name", list(LOADS))
def test_a_scaled_run_is_small_and_has_input(name: str, tmp_path: Path) -> None:
    workload = scaled(LOADS[name].workload, 0.001)
    assert workload.keys <= 5_000
    assert workload.batches <= 20
    assert len(write_data(workload, tmp_path)) == workload.batches
    assert scaled(LOADS[name].workload, 1.0) == LOADS[name].workload


def test_a_piece_that_fails_loses_no_other_and_is_not_taken_for_new(tmp_path: Path) -> None:
    pieces = Pieces(tmp_path / "pieces")
    pieces.write("b", {"from": "before"})
    console = Console(file=(tmp_path / "output").open("w"), width=200)

    def run(name: str, folder: Path) -> dict[str, Any]:
        folder.mkdir(parents=True)
        if name == "b":
            raise RuntimeError("the engine ended")
        return {"name": name}

    assert run_pieces(["a", "b", "c"], run, pieces, tmp_path / "work", console, keep=False) == ["b"]
    console.file.close()
    found = pieces.read(["c", "b", "a"])
    assert list(found) == ["c", "a"]
    assert found["a"]["name"] == "a"
    assert {"date", "minutes", "load"} <= found["a"].keys()
    assert "b failed: RuntimeError: the engine ended" in (tmp_path / "output").read_text()
    assert not any((tmp_path / "work").iterdir())


def test_the_table_of_earlier_pieces_is_made_without_measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checkpoint, "RESULTS", tmp_path)
    Pieces(tmp_path / "pieces" / "checkpoint").write("value-on", _piece([1.0, 9.0]))
    result = CliRunner().invoke(app, ["--table"])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "checkpoint.json").read_text())
    assert [figure["figure"] for figure in report["figures"]] == ["value: checkpoint p99.9 / p50 of 2, on"]
    assert report["samples"]["value-on"]["samples"]
    assert CliRunner().invoke(app, ["--table", "--strict"]).exit_code == 0
    Pieces(tmp_path / "pieces" / "checkpoint").write("value-on", _piece([1.0] * 9 + [9.0]))
    assert CliRunner().invoke(app, ["--table", "--strict"]).exit_code == 1


def test_an_unknown_piece_is_refused_with_the_known_ones() -> None:
    result = CliRunner().invoke(app, ["--only", "keys,z"], env={"TERMINAL_WIDTH": "300"})
    assert result.exit_code == 2
    assert "unknown piece z" in result.output
    assert all(name in result.output.replace("\n", "") for name in PIECES[:2])


def test_a_manifest_lists_segments_and_not_their_parts(tmp_path: Path) -> None:
    few = manifest_size(replace(MANIFEST, shards=2, epochs=4), tmp_path / "few", lambda *_: None)
    many = manifest_size(replace(MANIFEST, shards=20, epochs=4), tmp_path / "many", lambda *_: None)
    segments = [size["bytes"] - size["bytes_without_segments"] for size in (few, many)]
    assert segments[0] > 0
    # The sizes of the segments have more digits, nothing else.
    assert segments[1] - segments[0] <= 4 * 8


def test_the_server_counts_what_it_is_asked() -> None:
    with counting_s3() as server:
        options = server.storage_options
        client = boto3.client(
            "s3",
            endpoint_url=options["endpoint_url"],
            aws_access_key_id=options["key"],
            aws_secret_access_key=options["secret"],
            region_name="us-east-1",
        )
        before = server.counts()
        client.put_object(Bucket=server.bucket, Key="a/b", Body=b"1")
        client.get_object(Bucket=server.bucket, Key="a/b")
        client.head_object(Bucket=server.bucket, Key="a/b")
        client.list_objects_v2(Bucket=server.bucket)
        after = server.counts()
        difference = {kind: count - before.get(kind, 0) for kind, count in after.items()}
        assert difference == {"PUT": 1, "GET": 1, "HEAD": 1, "LIST": 1}
        endpoint = options["endpoint_url"]
    with counting_s3() as another:
        assert another.bucket != server.bucket  # what the first one holds must not be found
    with pytest.raises(OSError):
        urllib.request.urlopen(endpoint, timeout=1)
