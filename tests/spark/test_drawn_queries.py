"""A hundred drawn queries give what Spark's own streaming gave for them, batch by batch, over a restart with other shards and without
local copies. What Spark gave is recorded: `python -m tests.soak.queries --plans 100 --seed 1 --record`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from .drawn_queries import RECORDED, digests_of, drawn_play

pytestmark = pytest.mark.spark

GROUPS = 20
GIVEN = json.loads(RECORDED.read_text())
NAMES = sorted(GIVEN["batches"])


@pytest.mark.skipif(not pyspark.__version__.startswith(GIVEN["spark"]), reason="another Spark may give other batches")
@pytest.mark.parametrize("group", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, GROUPS))])
def test_a_drawn_query_gives_what_spark_gave(spark: SparkSession, tmp_path: Path, group: int) -> None:
    different: dict[str, str] = {}
    for name in NAMES[group::GROUPS]:
        root = tmp_path / name
        root.mkdir()
        play = drawn_play(name, root)
        found = digests_of(play.on_ours(spark, root))
        if found != GIVEN["batches"][name]:
            different[f"python -m tests.soak.queries --again {name}"] = play.drawn.text
        shutil.rmtree(root)
    assert not different


def test_a_hundred_queries_are_recorded_and_most_of_them_give_rows() -> None:
    assert len(NAMES) >= 100
    assert sum(len(batches) > 1 for batches in GIVEN["batches"].values()) > 80
