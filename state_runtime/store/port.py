"""The store port: the few operations that a snapshot store must have, and their guarantees.

Paths are relative to the store's root, checked by `store.paths.check_relative_path` before any I/O. Every write
publishes whole bytes under the final name or nothing; there are no streams that could be cut in the middle.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from state_runtime.base.errors import StoreNotCapable
from state_runtime.base.ids import SYSTEM_IDS

if TYPE_CHECKING:
    import pyarrow as pa  # not imported at run time: callers that only read the configuration start without it

__all__ = ["Body", "Created", "SharedObject", "Store", "StoredObject", "probe_name", "warn_single_writer"]

_LOG = logging.getLogger(__name__)

Body: TypeAlias = "bytes | memoryview | pa.Buffer"
"""Bytes to write, as they are in memory, so that a large object need not be copied."""


class Created(Enum):
    """The result of a create-if-absent, known by reading back."""

    MINE = "mine"
    """The object holds exactly the given bytes: this writer created it, now or in an attempt whose answer was lost."""
    LOST = "lost"
    """The name holds other bytes: another writer created it first."""


@dataclass(frozen=True)
class StoredObject:
    """A listing's entry of an object.

    Attributes:
        path: below the store's root.
        modified_ms: when it was written, by the store's own clock.
    """

    path: str
    bytes: int
    modified_ms: int


@dataclass(frozen=True)
class SharedObject:
    """An object whose bytes have other names too: overwriting a byte of one damages all of them.

    Attributes:
        path: below the store's root.
        names: number of all names of the bytes, also outside of the store.
        same: equal for names of the same bytes, within one listing.
    """

    path: str
    bytes: int
    names: int
    same: str


class Store(ABC):
    """A folder on a durable store.

    Errors are `StoreUnavailable` for transient faults, its kind `StoreRefused` for faults that waiting does not end,
    `FileNotFoundError` for a missing object (callers know what it means for them), and `OutcomeUnknown` when a write
    could not be confirmed either way.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """The place of the store, without credentials; for messages."""

    @abstractmethod
    def create(self, path: str, body: Body) -> Created:
        """Create `path` with `body` if it does not exist; atomic between any number of writers.

        The body must hold an identity of its writer (a commit id). After a conflict or a lost answer the object is read
        back, and equal bytes mean that this writer created it (docs/design/0021-s3-and-fencing.md).

        Raises:
            OutcomeUnknown: could not be confirmed; never clean up after it.
            StoreUnavailable: certainly not written. StoreNotCapable: the same, and it never will be.
        """

    @abstractmethod
    def put(self, path: str, body: Body) -> None:
        """Write or replace `path`; readers see the old bytes or the new ones.

        Raises:
            StoreUnavailable: it may have been written nevertheless.
        """

    @abstractmethod
    def put_file(self, local: Path, path: str) -> None:
        """Publish a finished local file under a name that no other writer uses."""

    @abstractmethod
    def read(self, path: str, bytes_max: int) -> bytes:
        """Read the whole object. `CorruptData` if it is larger than `bytes_max` (not a byte is kept)."""

    def get_file(self, path: str, local: Path) -> None:
        """Read the whole object into a local file, which exists already and is overwritten; in one read, a block at a
        time."""
        local.write_bytes(self.read(path, self.size(path)))

    @abstractmethod
    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes from `offset`; `CorruptData` if the object is shorter."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the bytes of the object; `FileNotFoundError` if it does not exist."""

    @abstractmethod
    def list_names(self, path: str) -> list[str]:
        """Return sorted names directly below a folder (files and folders); empty if the folder does not exist."""

    @abstractmethod
    def list_objects(self, path: str) -> Iterator[StoredObject]:
        """Yield all objects below a folder ("" is the root), in any order; nothing if the folder does not exist. Page
        by page: their number is not bounded.

        Raises:
            StoreUnavailable: the listing is not complete, also in its middle: nothing may be concluded from the
                objects that it gave.
        """

    def list_debris(self) -> Iterator[StoredObject]:
        """Yield files of killed writers below the root that no other listing shows; `delete` removes them. A writer at
        work has such files too: only old ones are debris, unless no writer is left.

        Raises:
            StoreUnavailable: the listing is not complete.
        """
        return iter(())

    @property
    def shares_bytes(self) -> bool:
        """Whether a copy inside the store may be another name of the same bytes. (Object stores copy the bytes.)"""
        return False

    def list_shared(self, path: str) -> Iterator[SharedObject]:
        """Yield objects below a folder ("" is the root) whose bytes have several names.

        Raises:
            StoreUnavailable: the listing is not complete.
        """
        return iter(())

    @abstractmethod
    def copy(self, source: str, target: str) -> None:
        """Copy an object inside the store, without the bytes passing through here; readers of `target` see all of it or
        nothing.

        Idempotent. Only for immutable objects: if the file system can, both names share their bytes.

        Raises:
            FileNotFoundError: no source.
        """

    @abstractmethod
    def move(self, source: str, target: str) -> None:
        """Give an object its final name. Idempotent: repeated after a crash it ends in the same state.

        Where the store has no rename it is a server-side copy followed by a delete.

        Raises:
            FileNotFoundError: neither source nor target exists.
        """

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove one object; a missing one is no error."""

    def remove_empty_folders(self, path: str) -> None:  # noqa: B027 - most stores have no folders
        """Remove the empty folders below `path`, and `path` itself if it is empty, if the store has folders at all.

        Only when no writer is left: a writer makes its folder and then the file.
        """

    @abstractmethod
    def child(self, name: str) -> Store:
        """Return the store of a folder below this one."""

    def exists(self, path: str) -> bool:
        """Return whether the object exists now."""
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    def now_ms(self) -> int | None:
        """Return the time by the store's own clock; a few small requests. None if the only clock is this machine's,
        which cannot verify itself.

        Raises:
            StoreUnavailable: the store does not answer.
        """
        return None

    def probe(self) -> None:
        """Check that the store keeps its guarantees here and now; called once at a run's start. Leaves nothing.

        A name is created twice: the second create must be refused, and the first content stay. A listing must show it
        at once, and say when it was written.

        Raises:
            StoreNotCapable: one of these checks failed.
            StoreUnavailable: not writable.
        """
        name = probe_name()
        first, second = f"first {SYSTEM_IDS.uid()}".encode(), f"second {SYSTEM_IDS.uid()}".encode()
        try:
            kept = self.create(name, first) is Created.MINE
            refused = self.create(name, second) is Created.LOST
            if not (kept and refused and self.read(name, 1024) == first):
                raise StoreNotCapable(
                    f"{self.url} does not honour create-if-absent, so two runs could overwrite each other. Use a store "
                    "with conditional writes (S3, GCS, Azure, a local file system), or declare `single_writer: true` "
                    "if nothing else ever writes to this job"
                )
            self._check_listed(name)
        finally:
            self.delete(name)

    def _check_listed(self, name: str) -> None:
        listed = self._listed(name)
        if listed is None:
            raise StoreNotCapable(
                f"a listing of {self.url} does not show an object that was just written there: the newest snapshot "
                "would be overlooked. Use a store whose listings are consistent, and no cache in front of it"
            )
        if listed.modified_ms <= 0:
            raise StoreNotCapable(
                f"listings of {self.url} do not say when an object was written: garbage collection could not tell new "
                "from old. Use another store"
            )

    def _listed(self, name: str) -> StoredObject | None:
        """Return a listing's entry of an object directly below the root."""
        return next((o for o in self.list_objects("") if o.path == name), None)


def probe_name() -> str:
    """Return a unique name directly below a root."""
    return f"_probe-{SYSTEM_IDS.uid()}"


def warn_single_writer(url: str) -> None:
    """Warn which protection is missing with a declared single writer, on a store that cannot refuse a second one."""
    _LOG.warning(
        "%s does not honour create-if-absent, and single_writer is declared: names are looked up before they are "
        "written, so a run that was replaced is found out, but two writers within the same moment are not. See that "
        "nothing else starts this job",
        url,
    )
