"""Errors across Spark's border: Spark hands the exception of a task over as text, and here it becomes typed again."""

from __future__ import annotations

import re

from pyspark.errors import PythonException

from state_runtime.base import errors
from state_runtime.base.errors import StillstateError, UserCodeError

__all__ = ["ERROR_MARK", "marked", "typed_error"]

ERROR_MARK = "[stillstate-error:"
"""By this mark in the text the driver finds our own errors."""

_MARKED = re.compile(re.escape(ERROR_MARK) + r"(\w+)\] (.*?) \[/stillstate-error\]", re.DOTALL)
_FRAME = re.compile(r'^ *File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)
_OURS = re.compile(r"[/\\]state_runtime[/\\]")


def typed_error(error: BaseException) -> BaseException:
    """The error as ours: errors of tasks come back from Spark as text, ours with a mark, those of the user's functions
    without."""
    if isinstance(error, StillstateError):
        return error
    text = str(error)
    match = _MARKED.search(text)
    if match is not None:
        cls = getattr(errors, match.group(1), None)
        if isinstance(cls, type) and issubclass(cls, StillstateError):
            return cls(match.group(2))
    if isinstance(error, PythonException):
        return _of_user(text) or error
    return error


def _of_user(text: str) -> UserCodeError | None:
    """What a function raised that Spark called in a step of the job; None if it is ours, which is a fault of ours."""
    frames = list(_FRAME.finditer(text))
    if not frames or any(_OURS.search(frame["file"]) for frame in frames):
        return None
    last, raised = frames[-1], text.strip().splitlines()[-1].strip()
    return UserCodeError(
        f"a function that Spark calls in a step of the job raised {raised} ({last['file']}, line {last['line']}, in "
        f"{last['function']}). Nothing of the epoch was committed; mend the function and start again"
    )


def marked(error: StillstateError) -> StillstateError:
    """An error of a task as it is to be raised there: with a mark in its text that lets the driver make it typed
    again."""
    return type(error)(f"{ERROR_MARK}{type(error).__name__}] {error} [/stillstate-error]")
