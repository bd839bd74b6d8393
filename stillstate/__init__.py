"""Stillstate's public names: state snapshots for Spark streaming, orchestrated by Dagster.

    from stillstate import ParquetSink, StreamingJob, aggregates

Names are loaded when they are first used: those of a job need Spark, those of Dagster's side need Dagster, and neither
needs the other. `stillstate.errors` has the errors, `stillstate.reading` reads snapshots as data, `stillstate.testing`
has the testers.

`assets` and `orchestration` are at the top of the checkout and are imported as `stillstate.assets` and
`stillstate.orchestration`: the folder in which Dagster is started may well have packages of these names. A wheel holds
their files in this folder; a checkout has links to them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from state_runtime import (
        ConnectedBatch,
        DeltaSink,
        EpochInfo,
        IcebergSink,
        JobContext,
        JobSettings,
        KafkaSink,
        KeyedBatch,
        ListOf,
        MapOf,
        ParquetSink,
        Progress,
        RunHandle,
        RunResult,
        SqlSink,
        StartFrom,
        StreamingJob,
        TimedState,
        VectorizedProcessor,
        aggregates,
        bootstrap,
        build_session,
        foreach_epoch,
        query_state,
        sources,
        windows,
    )
    from stillstate import errors, reading, testing
    from stillstate.assets.mount import Translator
    from stillstate.orchestration.component import StillstateComponent
    from stillstate.orchestration.definitions import build_definitions
    from stillstate.orchestration.resources import StillstateResource

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
    "StillstateComponent",
    "StillstateResource",
    "StreamingJob",
    "TimedState",
    "Translator",
    "VectorizedProcessor",
    "aggregates",
    "bootstrap",
    "build_definitions",
    "build_session",
    "errors",
    "foreach_epoch",
    "query_state",
    "reading",
    "sources",
    "testing",
    "windows",
]

_ON_DAGSTERS_SIDE = {
    "StillstateComponent": "stillstate.orchestration.component",
    "StillstateResource": "stillstate.orchestration.resources",
    "Translator": "stillstate.assets.mount",
    "build_definitions": "stillstate.orchestration.definitions",
}
_MODULES = ("errors", "reading", "testing")


_EXTRAS = {"dagster": "dagster", "pyspark": "spark", "pandas": "spark"}
"""The extra that brings a package."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"stillstate.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_ON_DAGSTERS_SIDE.get(name, "state_runtime")), name)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(error.name or "")
        if extra is None:
            raise
        raise ModuleNotFoundError(
            f"stillstate.{name} needs the package {error.name}: pip install 'stillstate[{extra}]'", name=error.name
        ) from error


def __dir__() -> list[str]:
    return [*globals(), *__all__]
