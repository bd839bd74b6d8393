"""The store port: the few operations that a snapshot store must have, and what each guarantees.

Paths are relative to the store's root, checked by `snapshot.paths.check_relative_path` before any I/O. Every write
publishes whole bytes under the final name or nothing; there are no streams that could be cut in the middle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from pathlib import Path

__all__ = ["Created", "Store"]


class Created(Enum):
    """How a create-if-absent ended, as far as the store can tell after reading back."""

    MINE = "mine"
    """The object holds exactly our bytes: we created it, now or in an attempt whose answer was lost."""
    LOST = "lost"
    """The name holds other bytes: someone else created it first."""


class Store(ABC):
    """A folder on a durable store.

    Errors are `StoreUnavailable` for faults that may pass, its kind `StoreRefused` for those that do not by waiting, `FileNotFoundError` for a missing object (callers know what
    it means for them), and `OutcomeUnknown` when a write could not be confirmed either way.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """Where the store is, without credentials; for messages."""

    @abstractmethod
    def create(self, path: str, body: bytes) -> Created:
        """Create `path` with `body` if it does not exist; atomic between any number of writers.

        The body must hold an identity of its writer (a commit id): after a conflict or a lost answer the object is
        read back, and equal bytes mean that it is ours (shared fault of S3 clients, see docs/design/0003-commit.md).

        Raises:
            OutcomeUnknown: could not be confirmed; never clean up after it.
            StoreUnavailable: certainly not written.
        """

    @abstractmethod
    def put(self, path: str, body: bytes) -> None:
        """Write or replace `path`; readers see the old bytes or the new ones.

        Raises:
            StoreUnavailable: it may have landed nevertheless.
        """

    @abstractmethod
    def put_file(self, local: Path, path: str) -> None:
        """Publish a finished local file under a name that nobody else uses."""

    @abstractmethod
    def read(self, path: str, bytes_max: int) -> bytes:
        """The whole object. `CorruptData` if it is larger than `bytes_max` (not a byte is kept)."""

    def get_file(self, path: str, local: Path) -> None:
        """The whole object into a local file, which is there already and is overwritten; in one read, a block at a time."""
        local.write_bytes(self.read(path, self.size(path)))

    @abstractmethod
    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; `CorruptData` if the object is shorter."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Bytes of the object; `FileNotFoundError` if there is none."""

    @abstractmethod
    def list_names(self, path: str) -> list[str]:
        """Sorted names directly below a folder (files and folders); empty if there is no such folder."""

    @abstractmethod
    def move(self, source: str, target: str) -> None:
        """Give an object its final name. Idempotent: repeated after a crash it ends in the same state.

        Where the store has no rename it is a server-side copy followed by a delete.

        Raises:
            FileNotFoundError: neither source nor target exists.
        """

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove one object; a missing one is fine."""

    @abstractmethod
    def child(self, name: str) -> Store:
        """The store of a folder below this one."""

    @abstractmethod
    def uri(self, path: str) -> str:
        """A URI of `path` that Spark and pyarrow understand, without credentials."""

    def exists(self, path: str) -> bool:
        """Whether the object exists now."""
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    def probe(self) -> None:
        """Check that the store keeps its promises here and now; called once at a run's start.

        Raises:
            StoreNotCapable: a second create of one name was accepted.
            StoreUnavailable: not writable.
        """
        from state_runtime.errors import StoreNotCapable
        from state_runtime.ids import SYSTEM_IDS

        name = f"_probe-{SYSTEM_IDS.uid()}"
        first, second = f"first {SYSTEM_IDS.uid()}".encode(), f"second {SYSTEM_IDS.uid()}".encode()
        try:
            kept = self.create(name, first) is Created.MINE
            refused = self.create(name, second) is Created.LOST
            if not (kept and refused and self.read(name, 1024) == first):
                raise StoreNotCapable(
                    f"{self.url} does not honour create-if-absent, so two runs could overwrite each other. "
                    "Use a store with conditional writes (S3, GCS, Azure, a local file system)"
                )
        finally:
            self.delete(name)
