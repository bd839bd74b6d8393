"""Errors for user code that uses the handle or a state in a way that Spark refuses too.

Spark raises `PySparkRuntimeError` there, and code that was written for Spark may catch it; the rest of Stillstate uses
its own tree of errors. So inside user code an error is of both classes. If it leaves user code uncaught, `plain` makes
it one of Stillstate's only: drivers and the command line handle it without pyspark.

In Spark most of these errors break the task's connection to its state. Here each one can be caught, and then the call
has had no effect.
"""

from __future__ import annotations

from pyspark.errors import PySparkRuntimeError

from state_runtime.base.errors import InvalidData, InvalidPipeline, StillstateError
from state_runtime.base.usercode import place_in_user_code

__all__ = ["InvalidStateUse", "InvalidStateValue", "plain"]


class _AlsoSparks(PySparkRuntimeError):
    """Mixin for two parents with different `__init__`: pyspark's one would format its message."""

    def __init__(self, message: str) -> None:
        PySparkRuntimeError.__init__(self, message)

    def __str__(self) -> str:
        return str(self._message)


class InvalidStateUse(_AlsoSparks, InvalidPipeline):
    """The handle or a state was used where it cannot be: no key, wrong time mode, a dropped state."""


class InvalidStateValue(_AlsoSparks, InvalidData):
    """A value from user code does not fit the state's schema, or Python cannot represent a stored value."""


def plain(error: StillstateError) -> StillstateError:
    """Return the error for readers outside user code: without pyspark's class, with its place in user code."""
    if isinstance(error, InvalidStateUse):
        return InvalidPipeline(f"{error}{place_in_user_code(error)}")
    if isinstance(error, InvalidStateValue):
        return InvalidData(f"{error}{place_in_user_code(error)}")
    return error
