"""A driver as a process of its own, for tests that kill it: `python -m tests.spark.drive ROOT [--forever] [--takeover] [--delta | --iceberg | --sql | --kafka=SERVERS] [NAME=NUMBER …]`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from state_runtime import build_session
from state_runtime.base.errors import StillstateError
from state_runtime.pipeline.sinks import Sink

from .jobs import delta_sinks, iceberg_sinks, kafka_sinks, sql_sinks, two_step_job


def main() -> int:
    root = Path(sys.argv[1])
    # Before the session: Spark's workers get their environment from the JVM, and the JVM's is this one.
    os.environ["STILLSTATE_DRIVER_PID"] = str(os.getpid())
    spark = build_session("drive", "local[2]", {"spark.ui.enabled": "false", "spark.driver.memory": "1g"})
    trigger = None if "--forever" in sys.argv else {"availableNow": True}
    local = root / ("local-2" if "--takeover" in sys.argv else "local")
    given = [a.partition("=") for a in sys.argv[2:] if "=" in a]
    changes = {name: int(value) for name, _, value in given if not name.startswith("--")}
    servers = next((value for name, _, value in given if name == "--kafka"), "")
    job = two_step_job(root, local_dir=str(local), sinks=sinks_of(root, servers), **changes)
    try:
        result = job.run(
            spark,
            trigger=trigger,
            takeover="--takeover" in sys.argv,
            on_progress=lambda p: print(f"epoch {p.snapshot_id}", flush=True),
        )
    except StillstateError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return error.exit_code
    print(f"{result.state} {result.last_snapshot_id}", flush=True)
    return 0


def sinks_of(root: Path, servers: str) -> tuple[Sink, Sink] | None:
    """The sinks that the command line names; None: Parquet."""
    if "--delta" in sys.argv:
        return delta_sinks(root)
    if "--iceberg" in sys.argv:
        return iceberg_sinks(root)
    if servers:
        return kafka_sinks(servers)
    return sql_sinks() if "--sql" in sys.argv else None


if __name__ == "__main__":
    sys.exit(main())
