"""How long the caller of a request wants it to be repeated: a bound that goes with the thread's context.

A sink tries again for about a minute while its target does not answer. While epochs wait for it that is too long: there
the output can wait beside them (driver/waiting_outputs.py). A bound in the context reaches each place that repeats,
whatever lies between, as deadlines do in gRPC.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

__all__ = ["patience", "patience_s"]

_BOUND_S: Final[ContextVar[float]] = ContextVar("stillstate_patience_s", default=float("inf"))


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Let what is called in this thread be repeated for at most so many seconds; a shorter bound around it stays."""
    token = _BOUND_S.set(min(seconds, _BOUND_S.get()))
    try:
        yield
    finally:
        _BOUND_S.reset(token)


def patience_s(own: float = float("inf")) -> float:
    """Return for how many seconds a request may be repeated: the shorter one of one's own bound and the caller's."""
    return min(own, _BOUND_S.get())
