"""User code runs behind a guard: whatever it raises says where it was raised, and for which operator and shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from state_runtime.base.errors import StillstateError, UserCodeError
from state_runtime.base.usercode import raised_by_user

__all__ = ["guarded", "guarded_iterator", "user_error"]

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
    except (Exception, SystemExit) as error:
        raise user_error(uid, shard, error) from error


def user_error(uid: str, shard: int, error: BaseException, key_hash: int | None = None) -> UserCodeError:
    """What to raise from an exception of user code.

    Args:
        key_hash: of the key that the code was called for; None if it was not called for a key. The key itself stays out
            of messages: they end up in logs.
    """
    where = f"operator {uid!r}, shard {shard}" + (f", key hash {key_hash:016x}" if key_hash is not None else "")
    return UserCodeError(
        f"{where}: the processor raised {raised_by_user(error)}. "
        "The epoch was not committed; fix the processor and start the job again"
    )


def guarded_iterator(pieces: Iterable[Item], guard: Callable[[Callable[[], Any]], Any]) -> Iterator[Item]:
    """The items of an iterator that user code is behind, each fetched through the guard."""
    iterator = guard(lambda: iter(pieces))
    done = object()
    while True:
        piece = guard(lambda: next(iterator, done))
        if piece is done:
            return
        yield piece
