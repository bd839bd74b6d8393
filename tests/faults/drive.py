"""A driver with its tasks as a process of its own, without Spark, for tests that kill it: `python -m tests.faults.drive JSON`."""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "state_runtime"))

from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.ids import SYSTEM_IDS
from tests.faults.engine import InProcess, Run, without_spark
from tests.job_settings import job_settings


def main() -> int:
    given = json.loads(sys.argv[1])
    spark = InProcess()
    with without_spark(spark):
        run = Run(
            "s3://lake/state",
            given["options"],
            "s3://lake/out",
            job_settings(**given["settings"]),
            operators=given["operators"],
            clock=SYSTEM_CLOCK,
            ids=SYSTEM_IDS,
            spark=spark,
        )
        run.run(given["batches"])
    print(f"done {uuid.UUID(run.committer.info.uid)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
