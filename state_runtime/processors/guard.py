"""User code runs behind a guard: whatever it raises says which operator and shard it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from state_runtime.errors import StillstateError, UserCodeError

__all__ = ["guarded", "guarded_iterator"]

Item = TypeVar("Item")


def guarded(uid: str, shard: int, call: Callable[[], Any]) -> Any:
    """Run user code; its exceptions say where they come from.

    Raises:
        UserCodeError: the code raised; the cause is chained. Our own errors pass unchanged.
    """
    try:
        return call()
    except StillstateError:
        raise
    except Exception as error:
        raise UserCodeError(
            f"operator {uid!r}, shard {shard}: the processor raised {type(error).__name__}: {error}. "
            "The epoch was not committed; fix the processor and start the job again"
        ) from error


def guarded_iterator(pieces: Iterable[Item], guard: Callable[[Callable[[], Any]], Any]) -> Iterator[Item]:
    """The items of an iterator that user code is behind, each fetched through the guard."""
    iterator = guard(lambda: iter(pieces))
    done = object()
    while True:
        piece = guard(lambda: next(iterator, done))
        if piece is done:
            return
        yield piece
