"""Reading any snapshot as data: without the job, in bounded memory, and without Spark but for `register`.

snapshot = reading.open("s3://bucket/state/flights@120")
snapshot.state("legs", "seen").to_pandas()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from state_runtime.reading import open

if TYPE_CHECKING:
    from state_runtime.reading.query import open_state, query_state
    from state_runtime.reading.spark_source import StillstateDataSource, register

__all__ = ["StillstateDataSource", "open", "open_state", "query_state", "register"]

_HOMES = {
    "StillstateDataSource": "state_runtime.reading.spark_source",
    "open_state": "state_runtime.reading.query",
    "query_state": "state_runtime.reading.query",
    "register": "state_runtime.reading.spark_source",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
