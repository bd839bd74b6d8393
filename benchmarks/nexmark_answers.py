"""Whether a query's job gives what Spark's batch query gives, row by row.

After the events come two late batches, which move the watermark far beyond them: windows close, sessions end, and rows
that wait for a partner are let go. Answers with a time are compared up to the end of the events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import nexmark_data
from benchmarks.nexmark_queries import QUERIES, Query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["answer_all", "differences"]

BATCHES = 4
ROWS = 5_000
# Where the late batches lie, in batches.
LATE = (100, 200)


def answer_all(names: Sequence[str], folder: Path, wrong: Any) -> None:
    """Put what is wrong, by query, into a queue."""
    from benchmarks.engines import COMMON_CONF, set_up_python
    from state_runtime.spark.session import build_session

    set_up_python()
    spark = build_session("nexmark-answers", master="local[2]", conf=dict(COMMON_CONF))
    spark.sparkContext.setLogLevel("ERROR")
    nexmark_data.write_events(folder / "in", BATCHES, ROWS, then=LATE)
    found = [told for name in names if (told := differences(spark, name, folder))]
    spark.stop()
    wrong.put(found)


def differences(spark: SparkSession, name: str, folder: Path, batches: int = BATCHES, *, is_plain: bool = False) -> str:
    """What a query gets wrong over the events in `folder/in`, so many batches and the late ones; empty if nothing.

    Args:
        is_plain: Spark's own streaming query, unchanged by `job.query`, instead of our pipeline in steps.
    """
    query = QUERIES[name]
    ours = Counter(_rows(_ours(spark, name, query, folder, is_plain=is_plain), query, batches))
    events = spark.read.schema(nexmark_data.SCHEMA).parquet(str(folder / "in"))
    right = Counter(_rows(query.answer(events), query, batches))
    if ours == right and right:
        return ""
    some = [*(ours - right)][:1], [*(right - ours)][:1]
    return f"{name}: {ours.total()} rows, should be {right.total()}; too many {some[0]}, missing {some[1]}"


def _ours(spark: SparkSession, name: str, query: Query, folder: Path, *, is_plain: bool) -> DataFrame:
    from pyspark.sql import functions as F

    from state_runtime import JobSettings, ParquetSink, StreamingJob

    job = StreamingJob(
        name, store=str(folder / "store"), settings=JobSettings(parallelism=2, local_dir=str(folder / "local"))
    )
    stream = spark.readStream.schema(nexmark_data.SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(folder / "in"))
    rows = job.query(query.peer(stream), output_mode=query.mode) if is_plain else query.ours(job, stream)
    rows.write(ParquetSink(str(folder / name), epoch_column="epoch"))
    job.run(spark, trigger={"availableNow": True})
    written = spark.read.parquet(str(folder / name))
    if not query.keys:
        return written.drop("epoch")
    columns = [column for column in written.columns if column not in (*query.keys, "epoch")]
    last = F.max_by(F.struct(*columns), "epoch").alias("last")
    newest = written.groupBy(*query.keys).agg(last).select(*query.keys, "last.*")
    return query.compared(newest) if query.compared else newest


def _rows(frame: DataFrame, query: Query, batches: int) -> list[tuple[str, ...]]:
    # Chosen here: Spark 4.3 pushes a condition on a session's end below the sessions, where it cuts them.
    until = datetime.fromtimestamp(nexmark_data.FIRST_S + batches * nexmark_data.BATCH_S, UTC)
    rows = frame.collect()
    return [tuple(map(str, row)) for row in rows if not query.time or row[query.time].astimezone(UTC) <= until]
