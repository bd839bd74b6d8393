"""The report of a benchmark: when a target holds, what the JSON has, what the table shows."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.report import (
    Figure,
    Report,
    Target,
    describe_machine,
    median,
    percentile,
    render_table,
    write_json,
)

FIGURE_KEYS = ["figure", "unit", "ours", "peer", "ratio", "target", "holds"]
MACHINE = {"cores": 2, "versions": {"python": "3.11.0", "java": "17.0.1"}}


def _report(*figures: Figure) -> Report:
    return Report("main", "2026-01-02T03:04:05+00:00", figures, MACHINE)


def test_the_bound_itself_meets_a_target() -> None:
    assert Figure("rows", "rows/s", ours=800, peer=100, target=Target(">=", 8)).holds is True
    assert Figure("trigger", "ms", ours=70, peer=100, target=Target("<=", 0.7)).holds is True


def test_a_throughput_below_and_a_time_above_the_bound_miss_it() -> None:
    assert Figure("rows", "rows/s", ours=799, peer=100, target=Target(">=", 8)).holds is False
    assert Figure("trigger", "ms", ours=71, peer=100, target=Target("<=", 0.7)).holds is False


def test_the_verdict_uses_the_measured_ratio_not_the_rounded_one() -> None:
    """A ratio of 7.99996 is printed as 8.0 and still misses a target of 8."""
    figure = Figure("rows", "rows/s", ours=7.99996, peer=1, target=Target(">=", 8))
    assert figure.to_json_dict()["ratio"] == pytest.approx(8.0)
    assert figure.holds is False


def test_a_figure_without_target_has_no_verdict() -> None:
    figure = Figure("checkpoint", "ms", ours=10, peer=40)
    assert (figure.holds, figure.to_json_dict()["target"]) == (None, None)


def test_a_peer_that_measured_zero_gives_no_ratio_and_never_a_success() -> None:
    figure = Figure("rows", "rows/s", ours=5, peer=0, target=Target(">=", 4))
    assert (figure.ratio, figure.holds) == (None, False)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_value_that_is_no_measurement_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="peer is"):
        Figure("rows", "rows/s", ours=1, peer=value)


def test_a_report_holds_unless_a_target_is_missed() -> None:
    met = Figure("rows", "rows/s", 8, 1, Target(">=", 8))
    missed = Figure("rows", "rows/s", 7, 1, Target(">=", 8))
    information = Figure("checkpoint", "ms", 9, 1)
    assert _report(met, information).holds
    assert not _report(met, missed).holds


def test_the_json_has_the_agreed_keys_and_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "results" / "main.json"
    write_json(_report(Figure("rows", "rows/s", 1234.56, 100, Target(">=", 8))), path)
    content = json.loads(path.read_text(encoding="utf-8"))
    assert list(content["figures"][0]) == FIGURE_KEYS
    assert content["figures"][0]["target"] == ">= 8"
    assert content["figures"][0]["holds"] is True
    assert content["machine"] == MACHINE
    assert content["date"] == "2026-01-02T03:04:05+00:00"
    assert [p.name for p in path.parent.iterdir()] == ["main.json"]


def test_a_result_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "main.json"
    write_json(_report(Figure("rows", "rows/s", 1, 1)), path)
    before = path.read_bytes()
    unserialisable = Report("main", "now", (), {"cores": object()})
    with pytest.raises(TypeError):
        write_json(unserialisable, path)
    assert path.read_bytes() == before


def test_the_table_shows_every_figure_and_the_missed_target() -> None:
    report = _report(
        Figure("a: rows", "rows/s", 90_000, 10_000, Target(">=", 8)),
        Figure("d: trigger", "ms", 180, 200, Target("<=", 0.7)),
        Figure("d: checkpoint p50", "ms", 12, 48),
    )
    out = io.StringIO()
    Console(file=out, width=140).print(render_table(report))
    lines = {line.split("│")[1].strip(): line for line in out.getvalue().splitlines() if line.count("│") > 2}
    assert "90,000" in lines["a: rows"]
    assert "9.00" in lines["a: rows"]
    assert "yes" in lines["a: rows"]
    assert "<= 0.7" in lines["d: trigger"]
    assert " no " in lines["d: trigger"]
    assert "0.25" in lines["d: checkpoint p50"]
    assert "2 cores" in out.getvalue()


def test_percentiles_interpolate_between_neighbours() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert median(values) == 2.5
    assert percentile(values, 0) == 1
    assert percentile(values, 100) == 4
    assert percentile(values, 99) == pytest.approx(3.97)
    assert median([7.0]) == 7


def test_no_measurement_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="at least one measurement"):
        median([])
    with pytest.raises(ValueError, match="outside"):
        percentile([1.0], 101)


def test_the_machine_is_described_with_all_versions() -> None:
    machine = describe_machine()
    assert machine["cores"] >= 1
    assert {"python", "pyspark", "pyarrow", "java", "stillstate"} <= machine["versions"].keys()
