"""Guard around user code: its exceptions say where they were raised, and for which operator and shard."""

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
        UserCodeError: the code raised; the cause is chained. Stillstate's own errors pass unchanged.
    """
    try:
        return call()
    except StillstateError:
        raise
    except (Exception, SystemExit) as error:
        raise user_error(uid, shard, error) from error


def user_error(uid: str, shard: int, error: BaseException, key_hash: int | None = None) -> UserCodeError:
    """Return the error to raise for an exception of user code.

    Args:
        key_hash: of the key that the code was called for; None if it was not called for a key. Messages never hold the
            key itself, because they end up in logs.
    """
    where = f"operator {uid!r}, shard {shard}" + (f", key hash {key_hash:016x}" if key_hash is not None else "")
    return UserCodeError(
        f"{where}: the processor raised {raised_by_user(error)}. "
        "The epoch was not committed; fix the processor and start the job again"
    )


def guarded_iterator(pieces: Iterable[Item], guard: Callable[[Callable[[], Any]], Any]) -> Iterator[Item]:
    """Yield the items of an iterator of user code, each fetched through the guard."""
    iterator = guard(lambda: iter(pieces))
    done = object()
    while True:
        piece = guard(lambda: next(iterator, done))
        if piece is done:
            return
        yield piece
