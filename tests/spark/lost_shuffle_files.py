"""A job with branches that loses its shuffle files in the middle of an epoch: `python -m tests.spark.lost_shuffle_files ROOT`.

In a process of its own: to Spark the executor is lost with the files, and where it is the driver too, as here, its
heartbeats fail from then on and Spark ends the process ten minutes later (exit code 56).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame

from state_runtime.spark.session import build_session

from .branches import check_diamond, diamond


def main(root: Path) -> None:
    lost = root / "lost"
    lost.mkdir()

    def losing(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """In the first task that gets here, once: shuffle files of the epoch are gone."""
        try:
            (lost / "begun").touch(exist_ok=False)  # of two tasks at once the first
        except FileExistsError:
            yield from batches
            return
        folders = os.environ["SPARK_LOCAL_DIRS"].split(",")
        gone = [p for folder in folders for p in Path(folder).rglob("shuffle_*") if p.suffix in (".data", ".index")]
        for path in gone:
            path.unlink(missing_ok=True)
        (lost / str(len(gone))).touch()
        yield from batches

    def between(frame: DataFrame) -> DataFrame:
        return frame.mapInArrow(losing, frame.schema)  # type: ignore[arg-type]

    conf = {"spark.ui.enabled": "false", "spark.local.dir": str(root / "spark"), "spark.sql.shuffle.partitions": "2"}
    spark = build_session("lost", "local[2,3]", conf)
    try:
        diamond(root, between=between).run(spark, trigger={"available_now": True})
        assert [int(path.name) > 0 for path in lost.iterdir() if path.name != "begun"] == [True]
        check_diamond(spark, root, is_ended=False)
    finally:
        spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
