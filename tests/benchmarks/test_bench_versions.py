"""Two versions in turns: both do the same, and the older one runs its own code."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine_workloads import COMPARISONS
from benchmarks.engines import Sample, WorkerPlan
from benchmarks.report import Target
from benchmarks.versions import compared
from benchmarks.workers import TreeWorker
from benchmarks.workloads import Workload

ROOT = Path(__file__).resolve().parents[2]
OLDER = """
from benchmarks.engines import Sample

def _serve(connection, plan, log):
    connection.send("ready")
    while (turn := connection.recv()) is not None:
        batches, timeout_s = turn
        connection.send([Sample(n, plan.workload.rows, 0.5, 0.0, 0) for n in range(batches)])
"""


@pytest.mark.parametrize("workload", COMPARISONS, ids=lambda w: w.key)
def test_both_versions_run_as_many_batches_of_the_same_work(workload: Workload) -> None:
    """One that is warmer, or runs more, would look faster."""
    versus = compared(workload)
    assert versus.turns["ours"] == versus.turns["peer"]
    assert versus.turns["ours"].warm >= workload.turns["ours"].warm
    assert (versus.operator, versus.rows, versus.keys) == (workload.operator, workload.rows, workload.keys)
    assert versus.target == Target(">=", 0.97)
    assert not versus.peer_from
    assert versus.compare == ("input_rows", "state_rows")


def test_the_other_version_runs_the_code_of_its_own_checkout(tmp_path: Path) -> None:
    """Else a version would be compared with itself, and always hold."""
    tree = tmp_path / "older"
    (tree / "benchmarks").mkdir(parents=True)
    (tree / "state_runtime").symlink_to(ROOT / "state_runtime")
    for part in (ROOT / "benchmarks").iterdir():
        if part.name not in ("workers.py", "__pycache__", "results"):
            (tree / "benchmarks" / part.name).symlink_to(part)
    (tree / "benchmarks" / "workers.py").write_text(OLDER)
    plan = WorkerPlan("ours", COMPARISONS[0], tmp_path / "job", 1, ())
    with TreeWorker(plan, tree) as worker:
        worker.wait_ready()
        done = worker.run(3, 30.0)
    assert done.samples == tuple(Sample(n, COMPARISONS[0].rows, 0.5, 0.0, 0) for n in range(3))
