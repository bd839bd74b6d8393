"""Movers that are killed for real, in the middle of what their threads do; then the same move again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from moved_job import all_states, furnish, into, made_job

from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.handover import read_moving
from state_runtime.snapshot.paths import JOB_FILE
from state_runtime.snapshot.pins import read_pins
from state_runtime.store import open_store

HERE = Path(__file__).parents[1]
# Before the first write, among the data, near the end of it, and while the source is given up.
WRITES = [0, 12, 31, 55, 75]


def move(source: str, target: str, options: dict[str, Any], writes: int) -> int:
    path = os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / "move_process.py"), source, target, json.dumps(options), str(writes)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, timeout=120, check=False).returncode


@pytest.mark.kill
@pytest.mark.parametrize("kind", ["disk to disk", "disk to s3"])
def test_a_mover_that_was_killed_is_repeated(
    tmp_path: Path, kind: str, s3_location: tuple[str, dict[str, Any]]
) -> None:
    """Killed again and again, each time a little later, it ends; at no time the job is at neither end."""
    job = made_job(tmp_path / "made")
    url, options = s3_location
    source_url = str(tmp_path / "source")
    target_url = str(tmp_path / "target") if kind == "disk to disk" else f"{url}/target"
    source = into(open_store(source_url), job.root)
    target = open_store(target_url, options if "://" in target_url else None)
    furnish(source)
    expected = all_states(job, source)
    killed = 0
    for writes in WRITES:
        code = move(source_url, target_url, options, writes)
        assert code in (0, -signal.SIGKILL)
        killed += code != 0
        whole = target if target.exists(JOB_FILE) else source
        found = all_states(job, whole)
        assert expected.items() <= found.items()
    # What is right already is not written again, so a later attempt may end before it is killed.
    assert killed >= 3
    assert move(source_url, target_url, options, 1 << 30) == 0
    assert expected.items() <= all_states(job, target).items()
    assert all_states(job, target.child("savepoints/before"))
    assert [pin.note for pin in read_pins(target)] == ["audit"]
    assert list(source.list_objects("")) == []
    assert read_moving(target) is None
    assert Catalog.of_root(target).latest() is not None
