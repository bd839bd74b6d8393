"""The driver of a job with branches, or with joins, on executors of their own: `python -m tests.cluster.branches ROOT MASTER KIND`.

Prints what each epoch says, a line of JSON each; then compares all output with a batch query.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from state_runtime import Progress
from state_runtime.spark.session import build_session

from ..spark.branches import check_diamond, diamond
from ..spark.test_joins import check, paid_back


def told(progress: Progress) -> None:
    print(
        json.dumps({"epoch": progress.epoch, "rows": progress.input_rows, "moved": progress.moved_shards}), flush=True
    )


def main(root: Path, master: str, kind: str) -> None:
    spark = build_session("branches", master=master, conf={"spark.cores.max": "2", "spark.ui.enabled": "false"})
    try:
        job = diamond(root, parallelism=4) if kind == "branches" else paid_back(root, "left-outer", parallelism=4)
        job.run(spark, trigger={"available_now": True}, on_progress=told)
        if kind == "branches":
            check_diamond(spark, root, is_ended=False)
        else:
            check(spark, root, "left-outer")
    finally:
        spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
