"""Stillstate: state snapshots for Spark streaming.

The user's part of the package. `StreamingJob`, `ParquetSink`, … need Spark and are loaded on first use, so that tools
that only look at snapshots (the Dagster code location, the command line) start without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from state_runtime import sources
    from state_runtime.base.progress import Progress
    from state_runtime.base.settings import JobSettings
    from state_runtime.driver.run import RunResult
    from state_runtime.driver.run_handle import RunHandle
    from state_runtime.driver.start_position import StartFrom
    from state_runtime.importing.bootstrap import bootstrap
    from state_runtime.job import JobContext, StreamingJob
    from state_runtime.pipeline.sinks import EpochInfo, ParquetSink, foreach_epoch
    from state_runtime.processors.declared import aggregates, windows
    from state_runtime.processors.user.connected import ConnectedBatch
    from state_runtime.processors.user.keyed_batch import KeyedBatch
    from state_runtime.processors.user.keyed_collections import ListOf, MapOf
    from state_runtime.processors.user.vectorized import TimedState, VectorizedProcessor
    from state_runtime.reading.query import query_state
    from state_runtime.sinks.delta import DeltaSink
    from state_runtime.sinks.iceberg import IcebergSink
    from state_runtime.sinks.kafka import KafkaSink
    from state_runtime.sinks.sql import SqlSink
    from state_runtime.spark.session import build_session

__all__ = [
    "ConnectedBatch",
    "DeltaSink",
    "EpochInfo",
    "IcebergSink",
    "JobContext",
    "JobSettings",
    "KafkaSink",
    "KeyedBatch",
    "ListOf",
    "MapOf",
    "ParquetSink",
    "Progress",
    "RunHandle",
    "RunResult",
    "SqlSink",
    "StartFrom",
    "StreamingJob",
    "TimedState",
    "VectorizedProcessor",
    "aggregates",
    "bootstrap",
    "build_session",
    "foreach_epoch",
    "query_state",
    "sources",
    "windows",
]

_HOMES = {
    "ConnectedBatch": "state_runtime.processors.user.connected",
    "DeltaSink": "state_runtime.sinks.delta",
    "EpochInfo": "state_runtime.pipeline.sinks",
    "IcebergSink": "state_runtime.sinks.iceberg",
    "JobContext": "state_runtime.job",
    "JobSettings": "state_runtime.base.settings",
    "KafkaSink": "state_runtime.sinks.kafka",
    "KeyedBatch": "state_runtime.processors.user.keyed_batch",
    "ListOf": "state_runtime.processors.user.keyed_collections",
    "MapOf": "state_runtime.processors.user.keyed_collections",
    "ParquetSink": "state_runtime.pipeline.sinks",
    "Progress": "state_runtime.base.progress",
    "RunHandle": "state_runtime.driver.run_handle",
    "RunResult": "state_runtime.driver.run",
    "SqlSink": "state_runtime.sinks.sql",
    "StartFrom": "state_runtime.driver.start_position",
    "StreamingJob": "state_runtime.job",
    "TimedState": "state_runtime.processors.user.vectorized",
    "VectorizedProcessor": "state_runtime.processors.user.vectorized",
    "bootstrap": "state_runtime.importing.bootstrap",
    "build_session": "state_runtime.spark.session",
    "foreach_epoch": "state_runtime.pipeline.sinks",
    "query_state": "state_runtime.reading.query",
}


def __getattr__(name: str) -> Any:
    if name in ("aggregates", "windows"):
        return import_module(f"state_runtime.processors.declared.{name}")
    if name == "sources":
        return import_module("state_runtime.sources")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
