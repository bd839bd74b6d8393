"""The job of `make soak-edges --jobs`, as a process: Kafka in, every sink out, rows and totals.

python -m tests.soak.edges_job ROOT BROKER DATABASE [--to-end]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from state_runtime import (
    DeltaSink,
    IcebergSink,
    KafkaSink,
    SqlSink,
    StreamingJob,
    aggregates,
    build_session,
    sources,
)
from state_runtime.base.errors import StillstateError
from tests.job_settings import job_settings

__all__ = ["INPUT", "ROWS_PER_EPOCH", "iceberg_options", "job_of"]

INPUT: Final = "soak-in"
ROWS_PER_EPOCH: Final = 40
_COLUMNS: Final = "id LONG, name STRING, amount LONG"


def iceberg_options(root: Path) -> dict[str, str]:
    """A catalog in a file."""
    return {"type": "sql", "uri": f"sqlite:///{root}/catalog.db", "warehouse": f"file://{root}/warehouse"}


def job_of(root: Path, broker: str, database: str) -> StreamingJob:
    """Each row into four targets, and the newest total of each name into four more."""
    settings = job_settings(
        parallelism=2,
        local_dir=str(root / "local"),
        scratch_dir=str(root / "scratch"),
        heartbeat_interval_s=0.2,
        materialize_max_segments=8,
    )
    job = StreamingJob("edges", store=str(root / "store"), settings=settings)
    source = sources.kafka(INPUT, bootstrap_servers=broker, starting="earliest", max_offsets_per_trigger=ROWS_PER_EPOCH)
    rows = job.read(source, name="events").transform(
        lambda df: df.selectExpr(f"from_json(CAST(value AS STRING), '{_COLUMNS}') AS c").select("c.*")
    )
    lake = iceberg_options(root)
    rows.write(DeltaSink(str(root / "rows")), name="delta-rows")
    rows.write(IcebergSink("soak.rows", catalog="lake", catalog_options=lake), name="iceberg-rows")
    rows.write(SqlSink("soak_rows", dsn=database), name="sql-rows")
    rows.write(KafkaSink("soak-rows", bootstrap_servers=broker, key="name"), name="kafka-rows")
    totals = rows.key_by("name").aggregate(uid="totals", n=aggregates.count(), total=aggregates.sum("amount"))
    merges = ["name"]
    totals.write(DeltaSink(str(root / "totals"), merge_on=merges), name="delta-totals")
    totals.write(
        IcebergSink("soak.totals", catalog="lake", catalog_options=lake, merge_on=merges), name="iceberg-totals"
    )
    totals.write(SqlSink("soak_totals", dsn=database, merge_on=merges), name="sql-totals")
    totals.write(KafkaSink("soak-totals", bootstrap_servers=broker, key="name"), name="kafka-totals")
    return job


def main() -> int:
    """Run it until it is killed, or with `--to-end` until all is read."""
    # Before the session: Spark's workers get their environment from the JVM, and the JVM's is this one.
    os.environ["STILLSTATE_DRIVER_PID"] = str(os.getpid())
    root, broker, database = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    spark = build_session("edges", "local[2]", {"spark.ui.enabled": "false", "spark.driver.memory": "1g"})
    try:
        job_of(root, broker, database).run(
            spark,
            trigger={"availableNow": True} if "--to-end" in sys.argv else None,
            on_progress=lambda p: print(f"epoch {p.snapshot_id}", flush=True),
        )
    except StillstateError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
