"""Folds in a process beside the driver: the same records; a process that dies or is closed costs a fold, never the job."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from model import ALL_HASHES, ALL_KEYS, OPERATOR, SCHEMA, STATE, StateWriter, rows_of

from state_runtime.base.allocator import KEEPS_FREED_MEMORY
from state_runtime.base.errors import MissingSnapshot, Unavailable
from state_runtime.base.settings import JobSettings
from state_runtime.materialize import apply
from state_runtime.materialize.process import FoldProcess
from state_runtime.materialize.records import open_pins, record_ids
from state_runtime.snapshot.document import encode_document
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import JOB_FILE, manifest_path
from state_runtime.store import open_store
from tests.stored import read_states

CHANGED = {ALL_KEYS[n]: (n, "x") for n in range(3)}


class Bench:
    """A job root on disk with one snapshot, and a process that folds it."""

    def __init__(self, folder: Path) -> None:
        self.root = open_store(str(folder))
        self.writer = StateWriter(root=self.root)
        self.root.put(JOB_FILE, encode_document("job", JobInfo(self.writer.manifest.job_uid, "job", 32768, 4, 0)))
        self.process = FoldProcess(self.root, str(folder), {}, JobSettings())

    def commit(self) -> Manifest:
        manifest = self.writer.epoch(CHANGED)
        self.root.put(manifest_path(manifest.snapshot_id), manifest.encode())
        return manifest

    @property
    def child(self) -> psutil.Process:
        (found,) = [p for p in psutil.Process().children() if any("materialize.process" in a for a in p.cmdline())]
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "job")
    yield made
    made.process.close()


def test_the_process_folds_what_a_thread_would(bench: Bench) -> None:
    """Its record fits the manifest, and the state is the same; the process serves the next fold too."""
    for _ in range(2):
        manifest = bench.commit()
        record = bench.process.fold(manifest)
        bench.writer.manifest = apply(manifest, record)
        assert not bench.writer.manifest.segments
        stored = read_states(bench.root, bench.writer.manifest, OPERATOR, {STATE: SCHEMA}, *ALL_HASHES)[STATE]
        assert rows_of(stored) == CHANGED
    assert record_ids(bench.root)[0] == [1, 2]


def test_the_process_keeps_freed_memory_unless_its_user_says_otherwise(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is told by the environment wins over what is good for most."""
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "0")
    bench.process.fold(bench.commit())
    found = {name: bench.child.environ()[name] for name in KEEPS_FREED_MEMORY}
    assert found == {**KEEPS_FREED_MEMORY, "MALLOC_TRIM_THRESHOLD_": "0"}


def test_an_error_of_the_fold_is_the_caller_s_by_its_type(bench: Bench) -> None:
    """And it is no reason to end the process."""
    manifest = bench.commit()
    bench.root.delete(manifest_path(manifest.snapshot_id))
    with pytest.raises(MissingSnapshot, match="no snapshot"):
        bench.process.fold(manifest)
    before = bench.child.pid
    bench.process.fold(bench.commit())
    assert bench.child.pid == before


def test_a_killed_process_costs_one_fold_at_most_and_the_next_has_a_new_one(bench: Bench) -> None:
    """Out of memory, an operator's kill: the driver goes on, and tries again."""
    bench.process.fold(bench.commit())
    killed = bench.child
    os.kill(killed.pid, signal.SIGKILL)
    # Whether its end is known by now, the system decides.
    with contextlib.suppress(Unavailable):
        bench.process.fold(bench.commit())
    assert bench.process.fold(bench.commit()).record_id
    assert bench.child.pid != killed.pid


def test_closing_ends_the_process_in_the_middle_of_a_fold(bench: Bench) -> None:
    """A run that ends leaves no process behind, and nobody gets a record of the fold that was cut."""
    bench.process.fold(bench.commit())
    child = bench.child
    manifest = bench.commit()
    child.suspend()
    failed: list[Exception] = []

    def fold() -> None:
        try:
            bench.process.fold(manifest)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=fold)
    thread.start()
    bench.process.close()
    thread.join(30)
    assert not psutil.pid_exists(child.pid)
    assert failed
    assert record_ids(bench.root)[0] == [1]
    with pytest.raises(Unavailable, match="closed"):
        bench.process.fold(manifest)


def test_options_go_through_the_pipe_and_never_into_the_command_line(bench: Bench) -> None:
    """Everybody on the host can read command lines, and some the environment."""
    secret = "sentinel-secret-5309"
    process = FoldProcess(bench.root, bench.root.url, {"secret": secret}, JobSettings())
    try:
        process.fold(bench.commit())
        (child,) = [p for p in psutil.Process().children() if any("materialize.process" in a for a in p.cmdline())]
        assert secret not in " ".join(child.cmdline())
        assert secret not in " ".join(child.environ().values())
        assert secret not in repr(process)
    finally:
        process.close()


def test_the_process_ends_with_its_driver(tmp_path: Path) -> None:
    """A driver that is killed leaves nothing that goes on folding."""
    bench = Bench(tmp_path / "job")
    bench.commit()
    code = (
        "import sys\n"
        "from state_runtime.materialize.process import FoldProcess\n"
        "from state_runtime.base.settings import JobSettings\n"
        "from state_runtime.snapshot.catalog import Catalog\n"
        "from state_runtime.store import open_store\n"
        "root = open_store(sys.argv[1])\n"
        "folding = FoldProcess(root, sys.argv[1], {}, JobSettings())\n"
        "folding.fold(Catalog.of_root(root).latest())\n"
        "print(folding._child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    import sys

    driver = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "job")], stdout=-1, stdin=-1)
    assert driver.stdout is not None
    child = psutil.Process(int(driver.stdout.readline()))
    driver.kill()
    driver.wait()
    child.wait(30)
    assert open_pins(bench.root) == []
