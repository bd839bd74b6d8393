"""What user code is told when it uses the handle or a state in a way that Spark refuses too.

Spark raises `PySparkRuntimeError` there, and code that was written for Spark may catch it; the rest of Stillstate knows
our own tree of errors. So inside user code an error is both. Where it leaves user code uncaught, `plain` makes it one
of ours only: drivers and the command line need no pyspark to know it.

Unlike in Spark, where most of these break the task's connection to its state, every one can be caught, and then nothing
has happened.
"""

from __future__ import annotations

from pyspark.errors import PySparkRuntimeError

from state_runtime.base.errors import InvalidData, InvalidPipeline, StillstateError
from state_runtime.base.usercode import place_in_user_code

__all__ = ["InvalidStateUse", "InvalidStateValue", "plain"]


class _AlsoSparks(PySparkRuntimeError):
    """Both parents have an `__init__` of their own, and pyspark's wants to format its message."""

    def __init__(self, message: str) -> None:
        PySparkRuntimeError.__init__(self, message)

    def __str__(self) -> str:
        return str(self._message)


class InvalidStateUse(_AlsoSparks, InvalidPipeline):
    """The handle or a state was used where it cannot be: no key, wrong time mode, a dropped state."""


class InvalidStateValue(_AlsoSparks, InvalidData):
    """What user code wants to store does not fit the state's schema, or what is stored cannot be given to Python."""


def plain(error: StillstateError) -> StillstateError:
    """The error for readers outside user code: without pyspark's class, and with the place that it left."""
    if isinstance(error, InvalidStateUse):
        return InvalidPipeline(f"{error}{place_in_user_code(error)}")
    if isinstance(error, InvalidStateValue):
        return InvalidData(f"{error}{place_in_user_code(error)}")
    return error
