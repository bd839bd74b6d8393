"""Errors across Spark's boundary: Spark passes on the exception of a task as text; here it becomes typed again."""

from __future__ import annotations

import re
import traceback

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PythonException

from state_runtime.base import errors
from state_runtime.base.errors import (
    InvalidConfiguration,
    ProcessEnded,
    StillstateError,
    TasksDisagree,
    UserCodeError,
    WorkerEnded,
)
from state_runtime.base.usercode import UserTraceback, user_traceback
from state_runtime.spark.java_errors import chain_of, error_of_chain

__all__ = ["ERROR_MARK", "cause_of", "is_of_ended_java", "marked", "typed_error"]

ERROR_MARK = "[stillstate-error:"
"""The driver recognises Stillstate's own errors by this mark in the text."""

_TRACEBACK_MARK, _TRACEBACK_END = "[stillstate-traceback]", "[/stillstate-traceback]"
_MARKED = re.compile(
    re.escape(ERROR_MARK)
    + r"(\w+)\] (.*?) \[/stillstate-error\]"
    + f"(?:{re.escape(_TRACEBACK_MARK)}(.*?){re.escape(_TRACEBACK_END)})?",
    re.DOTALL,
)
_FRAME = re.compile(r'^ *File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)
_OURS = re.compile(r"[/\\]state_runtime[/\\]")
_LIBRARY = re.compile(r"[/\\]site-packages[/\\]|[/\\]pyspark[/\\]")
_DIED = re.compile(r"Python worker (exited unexpectedly|failed to connect back)")
_OTHER_OUTPUT = re.compile(r"shuffle map stage with indeterminate output was failed and retried")
"""Spark compares the output of a task's attempts (SPARK-53575), and fails an action of which a part was done."""
_NO_CLASS = re.compile(r"org\.apache\.spark\.sql\.\S+ does not exist in the JVM")
_OTHER_FOLDER = re.compile(r"Wrong basePath (?P<now>\S+) for the root path: (?P<then>\S+)")


def typed_error(error: BaseException) -> BaseException:
    """Return the error as one of Stillstate's. Errors of tasks come back from Spark as text: Stillstate's own with a
    mark, those of the user's functions without. Java exceptions are typed by their root cause."""
    if isinstance(error, StillstateError):
        return error
    try:
        text = str(error)
    except (Py4JError, OSError):
        return _ended_java()  # the text of a Java exception is fetched from Java
    match = _MARKED.search(text)
    if match is not None:
        cls = getattr(errors, match.group(1), None)
        if isinstance(cls, type) and issubclass(cls, StillstateError):
            typed = cls(match.group(2))
            if match.group(3):
                typed.__cause__ = UserTraceback(match.group(3))
            return typed
    if isinstance(error, PythonException):
        return _of_user(text) or error
    if is_of_ended_java(error):
        return _ended_java()
    if _OTHER_OUTPUT.search(text):
        return TasksDisagree(
            "Spark ran a task twice, because an executor was lost, and it came to another row the second time; other "
            "tasks had used what it made the first time. The epoch is run again"
        )
    other = _OTHER_FOLDER.search(text)
    if other is not None:
        return InvalidConfiguration(
            f"the source reads from {other['now']}, and the snapshot that the job goes on from was made of another "
            f"folder ({other['then']}): Spark reads one folder for good. Give the source the old folder again, or "
            "begin under a new job name. Nothing was changed"
        )
    if _DIED.search(text):
        died = WorkerEnded(
            "a Python process in which Spark runs the job's code ended in the middle of a step: the code left the "
            "process (sys.exit, os._exit), a native library crashed, or the system ended it because memory ran out. "
            "Nothing of the epoch was committed; the log of the executor says more. Mend the code or give the "
            "executors more memory, and start again"
        )
        # Spark's hundreds of lines about it name nothing of that code; they are in the log.
        died.__cause__ = UserTraceback("It left no traceback.")
        return died
    chain = chain_of(error)
    return error_of_chain(chain) if chain else error


def _ended_java() -> ProcessEnded:
    return ProcessEnded(
        "Spark's Java process ended before this driver did: somebody or the system killed it (too little memory?), "
        "or it crashed. Nothing of the epoch under way was committed, and nothing that was is lost. Start the job "
        "again; if the system ends Java again, give it less memory (spark.driver.memory) or the machine more"
    )


def is_of_ended_java(error: BaseException) -> bool:
    """Return whether an error only says that py4j gets no answer: Spark's Java process is gone."""
    if isinstance(error, Py4JNetworkError):
        return True
    if type(error) is Py4JError:
        # An interrupted call: Java's own refusals come with its trace. Or a failed look-up of a class: a Java process
        # that lives has Spark's own.
        is_call = str(error).startswith("An error occurred while calling") and "Trace:" not in str(error)
        return is_call or _NO_CLASS.match(str(error)) is not None
    if not isinstance(error, ConnectionError):
        return False
    # The user's own connections may break too; those do not use py4j.
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").split(".")[0] == "py4j" for frame, _ in frames)


def cause_of(typed: BaseException, error: BaseException) -> BaseException | None:
    """Return the cause to raise a typed error from, so that for an error of user code its own traceback is printed.

    Spark's text about it is hundreds of lines long and holds neither file nor line of that code.
    """
    if typed is error or (isinstance(typed, UserCodeError) and typed.__cause__ is not None):
        return typed.__cause__
    return error


def _of_user(text: str) -> UserCodeError | None:
    """Return the error of a user's function that Spark called in a step; None if Stillstate's own function raised."""
    frames = list(_FRAME.finditer(text))
    if not frames or any(_OURS.search(frame["file"]) for frame in frames):
        return None
    own = [frame for frame in frames if not _LIBRARY.search(frame["file"])]
    last, raised = (own or frames)[-1], text.strip().splitlines()[-1].strip().rstrip(":")
    typed = UserCodeError(
        f"a function that Spark calls in a step of the job raised {raised} ({last['file']}, line {last['line']}, in "
        f"{last['function']}). Nothing of the epoch was committed; mend the function and start again"
    )
    typed.__cause__ = UserTraceback(text[text.find("Traceback (") :].strip() if "Traceback (" in text else text)
    return typed


def marked(error: StillstateError) -> StillstateError:
    """Return an error to raise in a task: its text has a mark by which the driver makes it typed again, and then the
    traceback of the user's code, because Spark leaves causes out."""
    text = f"{ERROR_MARK}{type(error).__name__}] {error} [/stillstate-error]"
    if isinstance(error, UserCodeError) and error.__cause__ is not None:
        text += _TRACEBACK_MARK + user_traceback(error.__cause__).replace(_TRACEBACK_END, "") + _TRACEBACK_END
    return type(error)(text)
