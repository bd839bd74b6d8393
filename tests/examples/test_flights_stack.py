"""Laws of the demo's work folder, its processes, and the moments at which the check kills."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from examples.flights import stack
from examples.flights.demo import DEFAULT_WORK
from examples.flights.moments import MOMENTS, EpochFiles
from examples.servers import dagster
from stillstate.orchestration.config.spec import load_spec

STAND_IN = [sys.executable, "-c", "import sys; sys.stdin.read()"]
"""Lives until it is killed, or until this process is gone."""


def test_a_folder_with_other_content_is_refused_and_not_touched(tmp_path: Path) -> None:
    """`--work ~` must not cost anybody a file, not even with `--fresh`."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "precious").write_text("mine")
    with pytest.raises(dagster.NotADemoFolder, match="no demo made"):
        stack.Stack(tmp_path, fresh=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["store", "precious"]


def test_a_fresh_start_removes_what_the_demo_made_and_keeps_the_year(tmp_path: Path) -> None:
    """The year is the same every time, and takes seconds to make."""
    stack.Stack(tmp_path)
    (tmp_path / "store").mkdir()
    (tmp_path / "inbox" / "flights-0000001-0000002.parquet").touch()
    (tmp_path / "flights-2013.parquet").touch()
    stack.Stack(tmp_path, fresh=True)
    assert not (tmp_path / "store").exists()
    assert list((tmp_path / "inbox").iterdir()) == []
    assert (tmp_path / "flights-2013.parquet").exists()


def test_closing_ends_every_process_of_the_stack_and_no_other(tmp_path: Path) -> None:
    """Drivers live in sessions of their own, started by Dagster: only the inherited token finds them."""
    other = subprocess.Popen(STAND_IN, stdin=subprocess.PIPE)
    with stack.Stack(tmp_path) as opened:
        driver = subprocess.Popen(STAND_IN, stdin=subprocess.PIPE, env=opened.environment, start_new_session=True)
        assert psutil.pid_exists(driver.pid)
    try:
        assert not psutil.pid_exists(driver.pid)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait(10)


def test_the_shipped_configuration_puts_everything_where_the_demo_looks(tmp_path: Path) -> None:
    """Without a variable that is the demo's default folder, so the command line sees the demo's job by itself."""
    opened = stack.Stack(tmp_path)
    _, job = opened.spec()
    assert job.store == str(tmp_path / "store")
    assert (job.options["inbox"], job.options["legs"]) == (str(opened.inbox), str(opened.legs))
    assert job.options["by_carrier"] == str(opened.by_carrier)
    default = load_spec(stack.CONFIG, environ={}).job(stack.JOB)
    assert Path(default.store).resolve() == DEFAULT_WORK / "store"


def test_waiting_too_long_says_what_for() -> None:
    """A check that hangs must say where."""
    with pytest.raises(dagster.WaitedTooLong, match=r"waited 0\.01 s for a miracle"):
        dagster.wait_for("a miracle", lambda: None, 0.01, poll_s=0.001)


# What lies on the disk in the course of epoch 8 (batch 6), after snapshot 7 (batch 5).
COURSE: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("between two epochs", {}, ""),
    ("the batch is planned", {"planned": 6}, MOMENTS[0].name),
    ("output is staged", {"planned": 6, "staged": 8}, MOMENTS[1].name),
    ("the manifest is there", {"planned": 6, "staged": 8, "manifest": 8, "batch": 6}, MOMENTS[2].name),
    ("the output is published", {"planned": 6, "manifest": 8, "batch": 6}, ""),
)


@pytest.mark.parametrize(("files", "expected"), [c[1:] for c in COURSE], ids=[c[0] for c in COURSE])
def test_each_moment_of_an_epoch_is_recognised_and_taken_for_no_other(
    tmp_path: Path, files: dict[str, Any], expected: str
) -> None:
    """A kill that claims to hit a moment must have hit it."""
    for snapshot in range(1, files.get("manifest", 7) + 1):
        folder = tmp_path / "store" / "flights" / "snapshots" / f"{snapshot:020d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    offsets = tmp_path / "local" / "spark" / "flights-1" / "offsets"
    offsets.mkdir(parents=True)
    for batch in range(files.get("planned", 5) + 1):
        (offsets / str(batch)).touch()
    staging = tmp_path / "output" / "legs" / "_stillstate" / "staging" / "flights-legs" / f"{2:020d}"
    staging.mkdir(parents=True)
    if "staged" in files:
        (staging / f"{files['staged']:020d}-00000-a.parquet").touch()
    newest = SimpleNamespace(source=SimpleNamespace(batch_id=files.get("batch", 5)))
    catalog: Any = SimpleNamespace(latest=lambda: newest)
    epoch = EpochFiles(tmp_path, catalog, term=2)
    assert [moment.name for moment in MOMENTS if moment.holds(epoch)] == ([expected] if expected else [])
