"""The driver of a job with branches on executors of their own: `python -m tests.cluster.branches ROOT MASTER`.

Prints what each epoch says, a line of JSON each; then compares all output with a batch query.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from state_runtime import Progress
from state_runtime.spark.session import build_session

from ..spark.branches import check_diamond, diamond


def told(progress: Progress) -> None:
    print(
        json.dumps({"epoch": progress.epoch, "rows": progress.input_rows, "moved": progress.moved_shards}), flush=True
    )


def main(root: Path, master: str) -> None:
    spark = build_session("branches", master=master, conf={"spark.cores.max": "2", "spark.ui.enabled": "false"})
    try:
        diamond(root, parallelism=4).run(spark, trigger={"available_now": True}, on_progress=told)
        check_diamond(spark, root, is_ended=False)
    finally:
        spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
