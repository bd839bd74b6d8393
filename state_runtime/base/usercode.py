"""The place where the job's own code raised: its last frame, and its traceback without all other frames.

Spark passes on the exception of a task as text and leaves its cause out, so file and line must be in that text.
"""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from state_runtime.base.errors import InvalidPipeline

__all__ = [
    "UserTraceback",
    "called_at",
    "described_class",
    "described_method",
    "place_in_user_code",
    "raised_by_user",
    "step_at",
    "user_traceback",
]

_FRAMES_MAX = 20
_CHARACTERS_MAX = 8_000  # of a traceback; it is sent inside the text of an error

_RUNTIME = (__file__.rpartition("/base/")[0] + "/", "<frozen ")
_LIBRARIES = tuple(
    {
        sysconfig.get_path(name) + "/"
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if sysconfig.get_path(name)
    }
)
_SPARK = "/pyspark/"


class UserTraceback(Exception):
    """The traceback of an exception that was raised in another process; it is the cause of the typed error."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}" if self.args else ""


def raised_by_user(error: BaseException) -> str:
    """Return the exception and its place, as in "KeyError: 'n' (/jobs/shop.py, line 12, in handleInputRows)"."""
    text = str(error)
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__) + place_in_user_code(error)


def place_in_user_code(error: BaseException) -> str:
    """Return the place in brackets, as a suffix of a text; empty if none of the job's own code was running."""
    frame = _last_frame(traceback.extract_tb(error.__traceback__))
    return "" if frame is None else f" ({frame.filename}, line {frame.lineno}, in {frame.name})"


def called_at() -> str:
    """Return the current line of the job's own code, as in "/jobs/shop.py, line 12"; "" if none of it is running."""
    frame = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_RUNTIME, *_LIBRARIES)):
            return f"{file}, line {frame.f_lineno}"
        frame = frame.f_back
    return ""


@contextmanager
def step_at(place: str = "") -> Iterator[None]:
    """Add the line of the job's own code to an `InvalidPipeline` that is raised inside.

    Args:
        place: by `called_at`; "" is the line inside that raised.
    """
    try:
        yield
    except InvalidPipeline as error:
        told = f" ({place})" if place else place_in_user_code(error)
        if told in str(error):
            raise
        raise InvalidPipeline(f"{error}{told}") from error


def described_class(kind: type) -> str:
    """Return a class of the job's own code and its first method's place: "Totals (/jobs/shop.py, line 12)"."""
    codes = [member.__code__ for member in vars(kind).values() if hasattr(member, "__code__")]
    written = [code for code in codes if not code.co_filename.startswith("<")]  # not those that a dataclass generates
    first = min(written, key=lambda code: code.co_firstlineno, default=None)
    return kind.__name__ if first is None else f"{kind.__name__} ({first.co_filename}, line {first.co_firstlineno})"


def described_method(method: Callable[..., object]) -> str:
    """Return a method of the job's own code and its place, as in "handleInputRows (/jobs/shop.py, line 14)"."""
    function = inspect.unwrap(method)
    code = getattr(function, "__code__", None)
    name = getattr(function, "__name__", type(function).__name__)
    return name if code is None else f"{name} ({code.co_filename}, line {code.co_firstlineno})"


def user_traceback(error: BaseException) -> str:
    """Return the traceback of an exception and its causes, only with the job's own frames; if long, its end."""
    if isinstance(error, UserTraceback):
        return str(error).strip()
    told = traceback.TracebackException.from_exception(error)
    each: traceback.TracebackException | None = told
    seen: set[int] = set()
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        each.stack = traceback.StackSummary.from_list(_of_user(each.stack)[-_FRAMES_MAX:])
        each = each.__cause__ or each.__context__
    text = "".join(told.format()).rstrip()
    return text if len(text) <= _CHARACTERS_MAX else "…" + text[-_CHARACTERS_MAX:]


def _of_user(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    return [f for f in frames if not f.filename.startswith(_RUNTIME) and _SPARK not in f.filename]


def _last_frame(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Return the user's last frame; if all code is installed like a library, the frame that was called."""
    outside = _of_user(frames)
    own = [f for f in outside if not f.filename.startswith(_LIBRARIES)]
    return own[-1] if own else next(iter(outside), None)
