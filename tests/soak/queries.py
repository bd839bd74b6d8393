"""Plain queries that are drawn, on Spark's own streaming and on ours: `make soak-queries`.

    python -m tests.soak.queries --plans 100 --seed 7
    python -m tests.soak.queries --again 7-12

Each is run twice over the same input with a restart in between, ours with other shards and without local copies, and compared
batch by batch. Late rows, nulls, files without rows.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from pyspark.sql import SparkSession

from state_runtime.base.errors import InvalidPipeline
from tests.spark.drawn_queries import Drawn, drawn_query
from tests.spark.plain_queries import ONCE, Batches, plain_job, sparks, write_rows

CONF = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
}


def difference(spark: SparkSession, root: Path, name: str) -> tuple[Drawn, str]:
    """Run one query on both engines.

    Returns:
        The query, and how its rows differ; "" if they are the same.
    """
    draw = random.Random(name)
    drawn = drawn_query(draw, root)
    files = [(first, draw.choice([2, 3]), draw.choice([0.05, 0.4])) for first in (0, 3)]
    rows = draw.choice([20, 60])
    shards = draw.sample([1, 2, 3, 4], 2)
    policy = draw.choice(["min", "min", "min", "max"])
    spark.conf.set("spark.sql.streaming.multipleWatermarkPolicy", policy)
    ours: Batches = []
    theirs: Batches = []
    for (first, count, late), parallelism in zip(files, shards, strict=True):
        write_rows(root, range(first, first + count), rows, late)
        shutil.rmtree(root / "local", ignore_errors=True)
        plain_job(root, drawn.query, drawn.mode, ours, parallelism=parallelism).run(spark, trigger=ONCE)
    for folder in ("orders", "payments"):
        shutil.rmtree(root / folder)
    for first, count, late in files:
        write_rows(root, range(first, first + count), rows, late)
        sparks(spark, root, drawn.query, drawn.mode, theirs)
    if ours == theirs:
        return drawn, ""
    mine, wanted = (sorted(row for batch in batches for row in batch) for batches in (ours, theirs))
    if mine == wanted:
        return drawn, f"the same rows in other batches: {[*map(len, ours)]} and {[*map(len, theirs)]} (policy {policy})"
    missing, more = ([r for r in a if r not in b][:3] for a, b in ((wanted, mine), (mine, wanted)))
    return drawn, f"{len(mine)} rows for {len(wanted)}; missing {missing}; not Spark's {more} (policy {policy})"


def main() -> int:
    from state_runtime.spark.session import build_session

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=100, help="how many (100)")
    parser.add_argument("--seed", type=int, default=None, help="what is drawn; a new one each time by default")
    parser.add_argument("--again", default="", help="one query again, by its name")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    spark = build_session("soak-queries", "local[2]", CONF)
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    names = [given.again] if given.again else [f"{seed}-{number}" for number in range(given.plans)]
    wrong = refused = 0
    for name in names:
        root, began_s = Path(tempfile.mkdtemp(prefix="soak-queries-")), time.monotonic()
        try:
            drawn, found = difference(spark, root, name)
        except InvalidPipeline as error:
            refused += 1
            print(f"{name}: refused: {error}", flush=True)
        else:
            wrong += bool(found)
            print(f"{name}: {found or 'equal'} ({time.monotonic() - began_s:.0f} s): {drawn.text}", flush=True)
        shutil.rmtree(root)
    print(f"seed {seed}: {len(names)} queries, {wrong} wrong, {refused} refused")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
