"""Agreement between writers that know nothing of each other: by documents that are created once, and never by a lock.

    create_next     a series with a number in each name (terms, snapshots, boundaries, materializations, owners of a
                    savepoint): the first to create a number has it, everybody else looks again and proposes the next
    create_agreed   one name (job.json, claim.json, moving.json, moved.json, conversion.json): what the first one wrote
                    counts for all
    read_newest     the document with the highest number, while others write newer ones and tidy older ones away

Who wins: of any number of writers of one name exactly one, because `Store.create` is atomic. A document holds an
identity of its writer, so that its own bytes, found there after a lost answer, are recognised as its own.

An unknown outcome (`OutcomeUnknown`) is raised and nothing more is tried: the document may be there and may count, and
a second one under the next number would make one writer two. The caller cleans nothing up; a repeat of the whole call
finds what is there.

Attempts are bounded: that many lost races in a row are a fault somewhere, not bad luck.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, overload

from state_runtime.base.errors import StillstateError, Unavailable
from state_runtime.base.limits import CLAIM_ATTEMPTS_MAX
from state_runtime.store import Created, Store

__all__ = ["Proposal", "create_agreed", "create_next", "read_newest"]

V = TypeVar("V")


@dataclass(frozen=True)
class Proposal(Generic[V]):
    """A document that a writer wants to be the next one.

    Attributes:
        value: what the body says, for the caller; it holds something that no other writer has.
    """

    path: str
    body: bytes
    value: V


@overload
def create_next(
    store: Store,
    propose: Callable[[], Proposal[V]],
    *,
    contended: Callable[[], StillstateError],
    counts: Callable[[V], bool] = ...,
    attempts_max: int = ...,
) -> V: ...


@overload
def create_next(
    store: Store,
    propose: Callable[[], Proposal[V] | None],
    *,
    contended: Callable[[], StillstateError],
    counts: Callable[[V], bool] = ...,
    attempts_max: int = ...,
) -> V | None: ...


def create_next(
    store: Store,
    propose: Callable[[], Proposal[V] | None],
    *,
    contended: Callable[[], StillstateError],
    counts: Callable[[V], bool] = lambda value: True,
    attempts_max: int = CLAIM_ATTEMPTS_MAX,
) -> V | None:
    """Create the next document of a series.

    Args:
        propose: looks at what is there and says what comes next, anew after each race that was lost; None if nothing
            is to be written (any more). What it raises ends the attempts.
        contended: the error after the last attempt.
        counts: asked after a create that succeeded. A store forgets names that were deleted, so a writer that slept can
            create an old number anew; such a document is treated as a lost race.

    Returns:
        The value of the proposal that was created, None if nothing was to be written.

    Raises:
        OutcomeUnknown: the last proposal may be there; no other one was tried after it.
        StoreUnavailable: the last proposal was certainly not written.
    """
    for _ in range(attempts_max):
        proposal = propose()
        if proposal is None:
            return None
        if store.create(proposal.path, proposal.body) is Created.MINE and counts(proposal.value):
            return proposal.value
    raise contended()


def create_agreed(store: Store, proposal: Proposal[V], read: Callable[[], V | None]) -> V | None:
    """Create a document, or find the one of whoever was first.

    Returns:
        What counts: the proposal's value if it was created (now, or by an earlier call with the same bytes), else what
        `read` finds. None if that was removed again meanwhile.

    Raises:
        OutcomeUnknown: it may be there; repeat the call. StoreUnavailable: certainly not written.
        CorruptManifest, UnsupportedFormat: what is there cannot be read.
    """
    if store.create(proposal.path, proposal.body) is Created.MINE:
        return proposal.value
    return read()


def read_newest(newest: Callable[[], int], read: Callable[[int], V], what: str) -> V | None:
    """Read the document with the highest number.

    Args:
        newest: lists; 0 if there is none.
        read: of a number; raises FileNotFoundError if it was tidied away since the listing.
        what: for the message.

    Raises:
        Unavailable: each one that was listed was gone when it was read.
    """
    for _ in range(CLAIM_ATTEMPTS_MAX):
        number = newest()
        if number == 0:
            return None
        try:
            return read(number)
        except FileNotFoundError:
            continue  # a newer one was written meanwhile, or all of them were removed: the next listing tells
    raise Unavailable(f"{what} changed {CLAIM_ATTEMPTS_MAX} times while it was read; try again")
