"""The wheel, installed where nothing else of ours is, beside a project that has packages with our folders' names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

DEFINITIONS = """
import dagster as dg
from assets.mine import report
from orchestration.mine import nightly
from stillstate import build_definitions

defs = dg.Definitions.merge(
    dg.Definitions(assets=[report], jobs=[nightly]), build_definitions("stillstate.yaml", key_prefix="streams")
)
"""
WITHOUT_JAVA = """
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from stillstate.testing import ProcessorTester

class Counts(StatefulProcessor):
    def init(self, handle):
        self.n = handle.getValueState("n", "n long")

    def handleInputRows(self, key, rows, timerValues):
        self.n.update(((self.n.get() or (0,))[0] + len(list(rows)),))
        yield Row(user=key[0], n=self.n.get()[0])

    def close(self):
        pass

print(ProcessorTester(Counts(), "user string", "user string, n long", key="user").send([("ann",), ("ann",)]))
"""
WITHOUT_DAGSTER = """
import sys
sys.modules.update({"dagster": None, "dagster_pyspark": None})  # as if they were not installed
import stillstate
from stillstate.orchestration.cli import main

try:
    stillstate.build_definitions
except ModuleNotFoundError as error:
    print(error)
main()
"""
MINE = {
    "assets/__init__.py": "",
    "assets/mine.py": "import dagster as dg\n\n@dg.asset\ndef report(): ...\n",
    "orchestration/__init__.py": "",
    "orchestration/mine.py": "import dagster as dg\n\n@dg.job\ndef nightly(): ...\n",
    "definitions.py": DEFINITIONS,
}


def run(*command: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**{n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "STILLSTATE_CONFIG")}, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.long
def test_the_wheel_works_in_a_folder_with_packages_of_the_same_names(tmp_path: Path) -> None:
    """It brings `state_runtime` and `stillstate`, and the user's own `assets` and `orchestration` stay theirs."""
    # A copy: a build leaves files in the folder that it builds.
    source, dist = tmp_path / "source", str(tmp_path / "dist")
    hidden = shutil.ignore_patterns(".*", "build", "tests", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, source, symlinks=True, ignore=hidden)
    run("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", dist, str(source), folder=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    target = tmp_path / "installed"
    run("-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(wheel), folder=tmp_path)
    brought = {p.name for p in target.iterdir() if p.suffix != ".dist-info" and p.name != "bin"}
    assert {"state_runtime", "stillstate"} <= brought
    assert not brought & {"assets", "orchestration", "tests", "examples", "benchmarks"}
    project, path = tmp_path / "project", str(target)
    run("-m", "stillstate.orchestration.cli", "init", str(project), folder=tmp_path, PYTHONPATH=path)
    for name, text in MINE.items():
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(text)
    where = "import stillstate.orchestration as s; print(s.__file__)"
    assert run("-c", where, folder=project, PYTHONPATH=path).startswith(path)
    assert "legs" in run("-m", "stillstate.orchestration.cli", "jobs", folder=project, PYTHONPATH=path)
    estimate = (
        "import pyarrow as pa; from state_runtime.processors.builtin.distinct import Distinct; d = Distinct('n', 'x', 4);"
        "print(d.finish([pa.array([[r << 6 | 2 for r in range(16)]], d.slots[0].type)]).to_pylist())"
    )
    assert run("-c", estimate, folder=project, PYTHONPATH=path) == "[43]\n", "the measured biases are in the wheel"
    listed = run(
        *("-m", "dagster", "job", "list", "-f", "definitions.py"),
        folder=project,
        PYTHONPATH=path,
        DAGSTER_HOME=str(project / "dagster"),
    )
    assert "Job: nightly" in listed
    assert "Job: streams_start_legs" in listed
    tested = run("-c", WITHOUT_JAVA, folder=project, PYTHONPATH=path, PATH="", JAVA_HOME="")
    assert tested == "[Row(user='ann', n=2)]\n"
    without = run("-c", WITHOUT_DAGSTER, "jobs", folder=project, PYTHONPATH=path)
    assert "legs" in without
    assert "stillstate.build_definitions needs the package dagster: pip install 'stillstate[dagster]'" in without
