"""Testers: processors without Spark's Java in milliseconds, whole jobs on a local session.

tester = ProcessorTester(Legs(), "tailnum string", "tailnum string, flights long", key="tailnum")
assert tester.send([("N14228",), ("N14228",)]) == [Row(tailnum="N14228", flights=2)]
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stillstate.testing.job_tester import JobTester
    from stillstate.testing.processor_tester import ProcessorTester
    from stillstate.testing.sink_contract import check_sink

__all__ = ["JobTester", "ProcessorTester", "check_sink"]

_HOMES = {
    "JobTester": "stillstate.testing.job_tester",
    "ProcessorTester": "stillstate.testing.processor_tester",
    "check_sink": "stillstate.testing.sink_contract",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
