"""Stillstate: state snapshots for Spark streaming, orchestrated by Dagster. What users import is here.

What needs Spark or Dagster is loaded when it is first used, so that tools that only look at snapshots start without.

`assets` and `orchestration` are at the top of the checkout and are imported as `stillstate.assets` and
`stillstate.orchestration`: the folder in which Dagster is started may well have packages of these names. A wheel holds
their files in this folder; a checkout has links to them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from state_runtime import reading
    from state_runtime.base import errors
    from state_runtime.base.progress import Progress
    from state_runtime.base.settings import JobSettings
    from state_runtime.driver.run import RunResult
    from state_runtime.driver.start_position import StartFrom
    from state_runtime.job import JobContext, StreamingJob
    from state_runtime.pipeline.sinks import ParquetSink, foreach_epoch
    from state_runtime.processors.declared import aggregates, windows
    from state_runtime.processors.user.connected import ConnectedBatch
    from state_runtime.processors.user.keyed_batch import KeyedBatch
    from state_runtime.processors.user.keyed_collections import ListOf, MapOf
    from state_runtime.processors.user.vectorized import TimedState, VectorizedProcessor
    from state_runtime.reading.query import query_state
    from state_runtime.spark.session import build_session
    from stillstate.assets.mount import Translator
    from stillstate.orchestration.component import StillstateComponent
    from stillstate.orchestration.definitions import build_definitions
    from stillstate.orchestration.resources import StillstateResource

__all__ = [
    "ConnectedBatch",
    "JobContext",
    "JobSettings",
    "KeyedBatch",
    "ListOf",
    "MapOf",
    "ParquetSink",
    "Progress",
    "RunResult",
    "StartFrom",
    "StillstateComponent",
    "StillstateResource",
    "StreamingJob",
    "TimedState",
    "Translator",
    "VectorizedProcessor",
    "aggregates",
    "build_definitions",
    "build_session",
    "errors",
    "foreach_epoch",
    "query_state",
    "reading",
    "windows",
]

_MODULES = {
    "aggregates": "state_runtime.processors.declared.aggregates",
    "errors": "state_runtime.base.errors",
    "reading": "state_runtime.reading",
    "windows": "state_runtime.processors.declared.windows",
}
_HOMES = {
    "StillstateComponent": "stillstate.orchestration.component",
    "StillstateResource": "stillstate.orchestration.resources",
    "Translator": "stillstate.assets.mount",
    "build_definitions": "stillstate.orchestration.definitions",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in __all__:
        return getattr(import_module("state_runtime"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
