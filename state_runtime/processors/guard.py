"""User code runs behind a guard: whatever it raises says which operator and shard it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from state_runtime.base.errors import StillstateError, UserCodeError

__all__ = ["guarded", "guarded_iterator", "user_error"]

Item = TypeVar("Item")

_KEY_CHARACTERS_MAX = 100  # of a key in a message; enough to find it, too little for a row


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
        raise user_error(uid, shard, error) from error


def user_error(uid: str, shard: int, error: Exception, key: object = None) -> UserCodeError:
    """What to raise from an exception of user code.

    Args:
        key: what the code was called for; None if it was not called for a key.
    """
    where = f"operator {uid!r}, shard {shard}" + (f", key {_cut(repr(key))}" if key is not None else "")
    return UserCodeError(
        f"{where}: the processor raised {type(error).__name__}: {error}. "
        "The epoch was not committed; fix the processor and start the job again"
    )


def _cut(text: str) -> str:
    return text if len(text) <= _KEY_CHARACTERS_MAX else text[: _KEY_CHARACTERS_MAX - 1] + "…"


def guarded_iterator(pieces: Iterable[Item], guard: Callable[[Callable[[], Any]], Any]) -> Iterator[Item]:
    """The items of an iterator that user code is behind, each fetched through the guard."""
    iterator = guard(lambda: iter(pieces))
    done = object()
    while True:
        piece = guard(lambda: next(iterator, done))
        if piece is done:
            return
        yield piece
