"""README is short, and its query is run, killed and started again as it stands there."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_store
from tests.typed import ROOT, Shell, blocks

README = (ROOT / "README.md").read_text()
README_BYTES_MAX = 7000
FIRST_SCREEN_LINES = 30
ROWS_OF_A_BATCH = 100


def test_the_readme_is_read_in_two_minutes_and_soon_says_what_cannot_be_done() -> None:
    """Measurements go to benchmarks/README.md, and how something is done to the pages of docs/."""
    assert len(README.encode()) <= README_BYTES_MAX
    (line,) = [n for n, text in enumerate(README.split("\n")) if text.startswith("**What it cannot do.**")]
    assert line < FIRST_SCREEN_LINES


FIGURES = {
    "`StatefulProcessor`, rows, value state": [("engine", "value: value state, rows: rows", 1)],
    "aggregate over 2 M keys, against the JVM's": [("engine", "aggregate: aggregate, 2 M keys: rows", 1)],
    "a trigger of 1,000 rows, durable checkpoint included": [
        ("main", "d: 1,000 rows a batch, JVM aggregation: trigger", 1)
    ],
    "a checkpoint at 5 M keys, p50 / p99.9": [
        ("checkpoint", "value: checkpoint p50, on / spark", 1),
        ("checkpoint", "value: checkpoint p99.9, on / spark", 1),
    ],
    "restart of 5 M keys from the store, warm process, to the first durable checkpoint": [
        ("recovery", "to the first checkpoint: from primary, on / spark", 1000)
    ],
}
"""Each row of README's table: results, figure, and how many of the result's units are one of the table's."""


def test_the_readmes_figures_are_those_that_were_measured() -> None:
    """Rounded as the table shows them, and no other row."""
    table = README.split("\n## Five figures\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", table, re.MULTILINE)[1:]
    assert [name for name, _, _ in rows] == list(FIGURES)
    for name, ours, peer in rows:
        shown = [re.findall(r"[\d,]+(?:\.\d+)?", cell) for cell in (ours, peer)]
        for place, (file, figure, units) in enumerate(FIGURES[name]):
            results = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())
            (found,) = [each for each in results["figures"] if each["figure"] == figure]
            for engine, told in zip(("ours", "peer"), shown, strict=True):
                number = told[place].replace(",", "")
                digit = 10 ** -len(number.partition(".")[2])
                assert abs(float(number) - found[engine] / units) <= digit / 2 + 1e-9, f"{name}: {engine}"


@pytest.mark.long
@pytest.mark.spark
def test_the_readmes_query_goes_on_after_a_kill(tmp_path: Path) -> None:
    """The file as printed, by Python alone: no row is counted twice, and none is left out."""
    shell = Shell(tmp_path)
    (file,) = [each for each in blocks(README) if each.file]
    shell.write(file)
    store = tmp_path / "state" / "per-shop"

    def ids() -> list[int]:
        return [int(path.parent.name) for path in store.glob("snapshots/*/manifest.json")]

    shell.run_until(f"python {file.file}", lambda _: len(ids()) > 2, signal.SIGKILL)
    before = max(ids())
    # The first manifest of the new run fences the old one; the second holds an epoch.
    shell.run_until(f"python {file.file}", lambda _: max(ids()) >= before + 3, signal.SIGKILL)

    # Not by the number of the newest folder: the driver may have been killed before it had a manifest.
    newest_snapshot = Catalog(open_store(str(tmp_path / "state"), {}), "per-shop").latest()
    assert newest_snapshot is not None
    assert newest_snapshot.term == 2
    # Killed while it published, too: what counts are the epochs that the sink's commit log has.
    committed = {int(entry.stem) for entry in (tmp_path / "out" / "_stillstate" / "commits").glob("*/*.json")}
    rows = [row for file in (tmp_path / "out").glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    newest: dict[tuple[str, int], tuple[int, int]] = {}
    for row in rows:
        if row["epoch"] in committed:
            place = (str(row["window"]), row["shop"])
            newest[place] = max(newest.get(place, (0, 0)), (row["epoch"], row["count"]))
    epochs = {row["epoch"] for row in rows} & committed
    assert max(epochs) > before
    assert sum(count for _, count in newest.values()) == ROWS_OF_A_BATCH * len(epochs)


def test_the_readme_imports_only_what_is_exported() -> None:
    """One package is all that a reader imports."""
    import stillstate

    named = {
        name for line in re.findall(r"^from stillstate import (.*)$", README, re.MULTILINE) for name in line.split(", ")
    }
    assert named <= set(stillstate.__all__)
    assert "from state_runtime" not in README
