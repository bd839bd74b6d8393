"""The pipeline of the example: flights → aircraft → figures per carrier and airport.

Entry point for ``stillstate.yaml``: ``examples.flights.job:build``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from examples.flights import planes
from examples.flights.data import SCHEMA_DDL
from state_runtime import JobContext, ParquetSink, StreamingJob, aggregates

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILES_PER_EPOCH: Final = 8
"""The most files in one epoch, unless ``max_files_per_epoch`` says otherwise: bounds an epoch after a pause."""


def build(context: JobContext) -> StreamingJob:
    """Build the job from its options.

    Options: ``inbox`` (folder of Parquet files, in event order by modification time), ``legs`` and
    ``by_carrier`` (folders of the two outputs), ``max_files_per_epoch``.
    """
    options = context.options
    inbox = str(options["inbox"])
    files = int(options.get("max_files_per_epoch", FILES_PER_EPOCH))

    def flights(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema(SCHEMA_DDL).option("maxFilesPerTrigger", files).parquet(inbox)

    job = context.job()
    (
        job.read(flights)
        .key_by("tailnum")
        .transform_with_state(planes.PlaneDay(), output_schema=planes.LEG_SCHEMA, uid="plane-day")
        .write(ParquetSink(str(options["legs"])), name="legs")
        .transform(with_flags)
        .key_by("carrier", "origin")
        .aggregate(
            uid="by-carrier",
            flights=aggregates.count(),
            flown=aggregates.sum("flown"),
            diverted=aggregates.sum("diverted"),
            out_of_order=aggregates.sum("out_of_order"),
            cancelled=aggregates.sum("cancelled"),
            no_tail_number=aggregates.sum("no_tail_number"),
            worst_dep_delay=aggregates.max("dep_delay"),
            best_arr_delay=aggregates.min("arr_delay"),
            mean_dep_delay=aggregates.avg("dep_delay"),
            inherited_min=aggregates.sum("inherited_delay"),
            turnarounds=aggregates.sum("turnaround"),
            turnaround_total_min=aggregates.sum("turnaround_min"),
        )
        .write(ParquetSink(str(options["by_carrier"])), name="by-carrier")
    )
    return job


def with_flags(legs: DataFrame) -> DataFrame:
    """The stateless step: one 0/1 column for each status, so that sums count them; only what the next step needs."""
    statuses = (planes.FLOWN, planes.DIVERTED, planes.OUT_OF_ORDER, planes.CANCELLED, planes.NO_TAIL_NUMBER)
    return legs.selectExpr(
        "carrier",
        "origin",
        "dep_delay",
        "arr_delay",
        "inherited_delay",
        "turnaround_min",
        "CAST(turnaround_min IS NOT NULL AS INT) AS turnaround",
        *(f"CAST(status = '{status}' AS INT) AS {status}" for status in statuses),
    )
