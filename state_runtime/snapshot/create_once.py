"""Agreement between writers that do not know of each other: by documents that are created once, and never by a lock.

    create_next     a series with a number in each name (terms, snapshots, boundaries, materializations, owners of a
                    savepoint): the first to create a number wins, all others look again and propose the next
    create_agreed   one name (job.json, claim.json, moving.json, moved.json, conversion.json): the first document counts
                    for all
    read_newest     the document with the highest number, while others write newer ones and remove older ones

The winner: of any number of writers of one name exactly one, because `Store.create` is atomic. A document holds an
identity of its writer, so that a writer recognises its own bytes after a lost answer.

An unknown outcome (`OutcomeUnknown`) is raised and nothing more is tried: the document may be there and may count, and
a second one under the next number would turn one writer into two. The caller cleans nothing up; a repeat of the whole
call finds the actual state.

Attempts are bounded: that many lost races in a row mean a fault, not bad luck.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, overload

from state_runtime.base.errors import StillstateError, Unavailable
from state_runtime.base.limits import CLAIM_ATTEMPTS_MAX
from state_runtime.store import Created, Store

__all__ = ["Documents", "Proposal", "create_agreed", "create_next", "read_newest"]

V = TypeVar("V")


class Documents(Protocol):
    """What agreement needs of a store; a table of a database can be that, too. The errors are those of `Store`."""

    @property
    def url(self) -> str: ...

    def create(self, path: str, body: bytes) -> Created: ...

    def read(self, path: str, bytes_max: int) -> bytes: ...

    def list_names(self, path: str) -> list[str]: ...


@dataclass(frozen=True)
class Proposal(Generic[V]):
    """A document that a writer wants to be the next one.

    Attributes:
        value: the content of the body, for the caller; it holds a part that no other writer has.
    """

    path: str
    body: bytes
    value: V


@overload
def create_next(
    store: Documents,
    propose: Callable[[], Proposal[V]],
    *,
    contended: Callable[[], StillstateError],
    counts: Callable[[V], bool] = ...,
    attempts_max: int = ...,
) -> V: ...


@overload
def create_next(
    store: Documents,
    propose: Callable[[], Proposal[V] | None],
    *,
    contended: Callable[[], StillstateError],
    counts: Callable[[V], bool] = ...,
    attempts_max: int = ...,
) -> V | None: ...


def create_next(
    store: Documents,
    propose: Callable[[], Proposal[V] | None],
    *,
    contended: Callable[[], StillstateError],
    counts: Callable[[V], bool] = lambda value: True,
    attempts_max: int = CLAIM_ATTEMPTS_MAX,
) -> V | None:
    """Create the next document of a series.

    Args:
        propose: reads the current state and returns the next document, again after each lost race; None if nothing is
            to be written (any more). An error that it raises ends the attempts.
        contended: the error after the last attempt.
        counts: asked after a successful create. A store forgets deleted names, so a writer that slept can create an old
            number again; such a document is treated as a lost race.

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
    """Create a document, or read the one of the first writer.

    Returns:
        The value that counts: the proposal's if it was created (now, or by an earlier call with the same bytes), else
        the result of `read`. None if the document was removed again meanwhile.

    Raises:
        OutcomeUnknown: it may be there; repeat the call. StoreUnavailable: certainly not written.
        CorruptManifest, UnsupportedFormat: the existing document cannot be read.
    """
    if store.create(proposal.path, proposal.body) is Created.MINE:
        return proposal.value
    return read()


def read_newest(newest: Callable[[], int], read: Callable[[int], V], what: str) -> V | None:
    """Read the document with the highest number.

    Args:
        newest: lists the documents and returns the highest number; 0 without documents.
        read: reads a number; raises FileNotFoundError if it was removed since the listing.
        what: for the message.

    Raises:
        Unavailable: each listed document was gone when it was read.
    """
    for _ in range(CLAIM_ATTEMPTS_MAX):
        number = newest()
        if number == 0:
            return None
        try:
            return read(number)
        except FileNotFoundError:
            continue  # a newer one was written meanwhile, or all of them were removed: list again
    raise Unavailable(f"{what} changed {CLAIM_ATTEMPTS_MAX} times while it was read; try again")
