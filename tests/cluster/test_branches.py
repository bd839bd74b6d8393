"""Branches and joins where each shard has its executor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..spark.branches import ROWS, write_input

FILES = 8

pytestmark = pytest.mark.cluster
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", ["branches", "joins"])
def test_rows_that_executors_share_are_made_once_and_shards_stay_where_they_are(
    own_spark_home: Path, tmp_path: Path, kind: str
) -> None:
    """The output is a batch query's, on two executors; shared rows cross between them, state does not: of operators without keys neither,
    whose one shard is a constant that Spark would plan another way."""
    names = ("in",) if kind == "branches" else ("orders", "refunds")
    for name in names:
        write_input(tmp_path / name, files=FILES)
    environment = {
        **os.environ,
        "SPARK_HOME": str(own_spark_home),
        "SPARK_SCALA_VERSION": "2.13",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *map(str, sys.path)]),
    }
    command = [sys.executable, "-m", "tests.cluster.branches", str(tmp_path), "local-cluster[2,1,1024]", kind]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [epoch["rows"] for epoch in told if epoch["rows"]] == [ROWS * len(names)] * FILES
    assert sum(epoch["moved"] for epoch in told) == 0
    assert "shuffle_hash) is not supported" not in done.stdout + done.stderr
