"""Trials of the internals of pyspark and Spark that a run uses in the middle of its epochs: once before the first
epoch, on frames without rows and without a job.

All other internals are used before a run writes anything, which is their trial (`spark/internals.py`).
"""

from __future__ import annotations

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from state_runtime.spark.internals import INTERNALS, Internal
from state_runtime.spark.java_errors import chain_of
from state_runtime.spark.jvm import is_adaptive
from state_runtime.spark.prepared import PreparedFrames, frames_of, try_again

__all__ = ["probe_internals"]


def probe_internals(spark: SparkSession) -> None:
    """Try the internals that this process has not tried yet. Each missing one is logged in a line, and never raised."""
    frames = frames_of(spark)
    # Plans that Spark changes while they run are not reused, and making one would run a job.
    if isinstance(frames, PreparedFrames) and not is_adaptive(spark) and INTERNALS.begin_probe(Internal.REBOUND_PLANS):
        _try_rebound(spark, frames)
    if INTERNALS.begin_probe(Internal.JAVA_EXCEPTIONS):
        _try_exceptions(spark)


def _try_rebound(spark: SparkSession, frames: PreparedFrames) -> None:
    try:
        try_again(spark, frames)
    except PySparkException as error:
        INTERNALS.refuse(Internal.REBOUND_PLANS, error)


def _try_exceptions(spark: SparkSession) -> None:
    try:
        spark.createDataFrame([], "a int").selectExpr("")
    except PySparkException as error:
        if not chain_of(error):
            INTERNALS.refuse(Internal.JAVA_EXCEPTIONS, AttributeError(f"{type(error).__name__} has no origin"))
