"""In-flight rows on a host: copies of parts, and the store if a copy is missing or damaged.

    <local dir>/state/<root id>-<job uid>/<operator>/rows/<attempt at an epoch>-<SHA-256 of the part's bytes>

A part is stored under its digest, byte for byte as on the store, and compared with the digest at each read. So its
writer, its time and its parallelism do not matter. The attempt in the name marks its owner as long as no snapshot names
the part. A task writes the rows that it leaves beside its upload, so a restart in place reads nothing from the store.
Like all local copies they may be lost at any time, and nothing fails without them, unless only the driver's memory has
the part: then the driver writes it, and the epoch is run again.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from state_runtime.base.clock import Clock
from state_runtime.base.errors import RESTORE_OR_GO_BACK, ChangesPending, MissingFile
from state_runtime.base.ids import Ids
from state_runtime.changelog.inflight import RowsPart
from state_runtime.changelog.parts import PartEntry
from state_runtime.changelog.rows import decode_rows, rows_schema
from state_runtime.state.sealed_files import is_abandoned, make_private_folder, open_new_private, read_without_links
from state_runtime.store import Store
from state_runtime.task.sorted_input import SortedRows

__all__ = ["HostRows"]

_NAME = re.compile(r"([0-9A-Za-z]+)-([0-9a-f]{64})\Z")


class HostRows:
    """One task's access to rows in flight.

    Args:
        folder: of the operator's copies on this host (`rows_folder`).
        epoch: the driver's attempt at the epoch.
        root: opens the job root; only called if no copy is usable.
        keeps: whether copies are used and made at all.

    Attributes:
        bytes_read: from the primary store.
        has_failed: a copy could not be written.
    """

    def __init__(
        self, folder: Path, epoch: str, root: Callable[[], Store], clock: Clock, ids: Ids, *, keeps: bool
    ) -> None:
        self._folder = folder
        self._epoch = epoch
        self._root = root
        self._clock = clock
        self._ids = ids
        self._keeps = keeps
        self.bytes_read = 0
        self.has_failed = False

    def keep(self, part: PartEntry, body: pa.Buffer | bytes) -> None:
        """Write a copy of a part. A failure is silent (invariant 5), and counted."""
        if not self._keeps:
            return
        path = self._folder / f"{self._epoch}-{part.digest}"
        temporary = self._folder / f".tmp-{self._ids.uid()}"
        try:
            make_private_folder(self._folder)
            with open_new_private(temporary) as file:
                file.write(body)
            os.replace(temporary, path)
        except OSError:
            self.has_failed = True
            temporary.unlink(missing_ok=True)
        else:
            self._copies[part.digest] = path

    def read(self, held: RowsPart) -> SortedRows:
        """Read the rows of a part.

        Raises:
            ChangesPending: no copy is usable, and only the driver has the part. MissingFile, CorruptSegment: the
                primary store is damaged. StoreUnavailable: try again.
        """
        body = self._copy(held.part)
        if body is None:
            body = self._from_store(held)
            self.keep(held.part, body)
        batch = decode_rows(body, held.part, held.path or "rows in flight that wait for a checkpoint")
        hashes, places = (batch.column(n).to_numpy(zero_copy_only=False) for n in (0, 1))
        rows = pa.RecordBatch.from_arrays(batch.columns[2:], schema=rows_schema(batch.schema, held.path))
        return SortedRows(rows, hashes, places)

    def _copy(self, part: PartEntry) -> bytes | None:
        path = self._copies.get(part.digest)
        try:
            body = read_without_links(path, part.length) if path is not None else b""
        except (OSError, ValueError):
            return None
        return body if path is not None and hashlib.sha256(body).hexdigest() == part.digest else None

    def _from_store(self, held: RowsPart) -> bytes:
        if not held.path:
            raise ChangesPending(
                f"operator {held.part.operator!r}: rows that an epoch left are not on the primary store yet"
            )
        root = self._root()
        try:
            body = root.read_range(held.path, held.part.offset, held.part.length)
        except FileNotFoundError as error:
            raise MissingFile(
                f"{held.path} is missing in {root.url} although a snapshot names it. {RESTORE_OR_GO_BACK}"
            ) from error
        self.bytes_read += len(body)
        return body

    @cached_property
    def _copies(self) -> dict[str, Path]:
        """Return the copies on this host, by digest."""
        if not self._keeps:
            return {}
        return {digest: path for _, digest, path in self._files()}

    def _files(self) -> Iterator[tuple[str, str, Path]]:
        try:
            names = os.listdir(self._folder)
        except OSError:
            return  # there are no copies
        for name in names:
            named = _NAME.match(name)
            if named is not None:
                yield named[1], named[2], self._folder / name

    def remove_outdated(self, needed: Collection[str]) -> None:
        """Remove copies that no snapshot and no task of this epoch needs any more. Never fails.

        Args:
            needed: digests of the parts that the head or the newest checkpoint names.
        """
        try:
            for epoch, digest, path in self._files():
                if digest not in needed and epoch != self._epoch:
                    path.unlink(missing_ok=True)
                    self._copies.pop(digest, None)
            for left in self._folder.glob(".*"):
                if is_abandoned(left, self._clock):
                    left.unlink(missing_ok=True)
        except OSError:
            return  # another task was quicker, or this process may no longer write there
