"""Plain queries that are drawn, on Spark's own streaming and on ours: `make soak-queries`.

    python -m tests.soak.queries --plans 100 --seed 7
    python -m tests.soak.queries --again 7-12
    python -m tests.soak.queries --plans 100 --seed 1 --record

The last one writes what Spark gave to `tests/spark/recorded_queries.json`, with which `make test` compares ours
(tests/spark/test_drawn_queries.py): do it when Spark or what is drawn has changed.

Each is run twice over the same input with a restart in between, ours with other shards and without local copies, and compared
batch by batch. Late rows, nulls, files without rows.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from pyspark.sql import SparkSession

from state_runtime.base.errors import InvalidPipeline
from tests.spark.drawn_queries import RECORDED, Play, digests_of, drawn_play
from tests.spark.plain_queries import Batches

CONF = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
}


def difference(spark: SparkSession, root: Path, name: str) -> tuple[Play, Batches, str]:
    """Run one query on both engines.

    Returns:
        The query, Spark's rows by batch, and how ours differ; "" if they are the same.
    """
    play = drawn_play(name, root)
    ours, theirs = play.on_ours(spark, root), play.on_sparks(spark, root)
    if ours == theirs:
        return play, theirs, ""
    mine, wanted = (sorted(row for batch in batches for row in batch) for batches in (ours, theirs))
    policy = f"policy {play.policy}"
    if mine == wanted:
        return play, theirs, f"the same rows in other batches: {[*map(len, ours)]} and {[*map(len, theirs)]} ({policy})"
    missing, more = ([r for r in a if r not in b][:3] for a, b in ((wanted, mine), (mine, wanted)))
    return play, theirs, f"{len(mine)} rows for {len(wanted)}; missing {missing}; not Spark's {more} ({policy})"


def main() -> int:
    from state_runtime.spark.session import build_session

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=100, help="how many (100)")
    parser.add_argument("--seed", type=int, default=None, help="what is drawn; a new one each time by default")
    parser.add_argument("--again", default="", help="one query again, by its name")
    parser.add_argument(
        "--record", action="store_true", help="write what Spark gave to tests/spark/recorded_queries.json"
    )
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    spark = build_session("soak-queries", "local[2]", CONF)
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    names = [given.again] if given.again else [f"{seed}-{number}" for number in range(given.plans)]
    wrong = refused = 0
    recorded: dict[str, list[str]] = {}
    for name in names:
        root, began_s = Path(tempfile.mkdtemp(prefix="soak-queries-")), time.monotonic()
        try:
            play, theirs, found = difference(spark, root, name)
        except InvalidPipeline as error:
            refused += 1
            print(f"{name}: refused: {error}", flush=True)
        else:
            wrong += bool(found)
            recorded[name] = digests_of(theirs)
            print(f"{name}: {found or 'equal'} ({time.monotonic() - began_s:.0f} s): {play.drawn.text}", flush=True)
        shutil.rmtree(root)
    if given.record:
        RECORDED.write_text(json.dumps({"spark": spark.version, "batches": recorded}, indent=1) + "\n")
    print(f"seed {seed}: {len(names)} queries, {wrong} wrong, {refused} refused")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
