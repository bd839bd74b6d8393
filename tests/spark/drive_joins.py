"""The driver of a job with several sources and joins: `python -m tests.spark.drive_joins ROOT ORDER PARALLELISM`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from state_runtime.spark.session import build_session

from .test_joins import paid_back


def main(root: Path, names: list[str], parallelism: int) -> None:
    # Before the session: Spark's workers get their environment from the JVM, and the JVM's is this one.
    os.environ["STILLSTATE_DRIVER_PID"] = str(os.getpid())
    conf = {"spark.ui.enabled": "false", "spark.local.dir": str(root / "spark")}
    spark = build_session("joins", "local[2]", conf)
    paid_back(root, "left-outer", names, parallelism=parallelism).run(spark, trigger={"available_now": True})
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3]))
