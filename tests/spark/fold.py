"""A materialization as a process of its own, for tests that kill it: `python -m tests.spark.fold ROOT MODE`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import cast

from state_runtime import JobSettings, build_session
from state_runtime.base.errors import StillstateError
from state_runtime.base.settings import MaterializationMode, MaterializationSettings
from state_runtime.materialize.grid import MaterializationSizes
from state_runtime.materialize.spark_job import materialize_job


def main() -> int:
    root, mode = Path(sys.argv[1]), cast(MaterializationMode, sys.argv[2])
    os.environ["STILLSTATE_DRIVER_PID"] = str(os.getpid())
    spark = build_session("fold", "local[2]", {"spark.ui.enabled": "false", "spark.driver.memory": "1g"})
    try:
        result = materialize_job(
            spark,
            str(root / "store"),
            None,
            "steps",
            mode=mode,
            settings=JobSettings(materialization=MaterializationSettings(ratio=0.3)),
            sizes=MaterializationSizes(table_bytes=2_000, small_bytes=0),
        )
    except StillstateError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return error.exit_code
    print(f"{result.mode} {result.record_id} {result.reason}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
