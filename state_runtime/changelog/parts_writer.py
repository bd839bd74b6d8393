"""Writing a task's parts to the primary store: encoded one after the other, large ones uploaded at once.

If all parts together are small, the task's acknowledgement carries them. Otherwise they are uploaded in objects of the
task, several parts to an object, and each upload begins as soon as its object is full. So little is left to send when
the task is done (FLIP-158's pre-emptive upload).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import pyarrow as pa

from state_runtime.base.ids import Ids
from state_runtime.base.limits import MIB
from state_runtime.base.settings import JobSettings
from state_runtime.changelog.changes import TaskChanges, UploadTotals
from state_runtime.changelog.parts import PartEntry, encode_part, sha256
from state_runtime.changelog.upload import Upload, Uploader
from state_runtime.snapshot.paths import segment_path
from state_runtime.store import Store

__all__ = ["PartsWriter", "WrittenParts"]

_OBJECT_BYTES = 16 * MIB


@dataclass(frozen=True)
class WrittenParts:
    """Parts, of which the large ones may still be uploading. Life cycle: made by `PartsWriter.finish` → `result` once,
    or `abandon`.

    Attributes:
        objects: for each part the number of the upload of its object; empty if the acknowledgement carries all parts.
        inline: the bodies of the parts in that case.
    """

    parts: tuple[PartEntry, ...]
    objects: tuple[int, ...]
    uploads: tuple[Upload, ...]
    inline: tuple[bytes, ...] = field(repr=False)

    def result(self) -> TaskChanges:
        """Wait for the uploads.

        Raises:
            StoreUnavailable: an upload failed; the epoch fails and is run again.
        """
        if not self.uploads:
            return TaskChanges(self.parts, self.inline)
        paths = [upload.result() for upload in self.uploads]
        placed = tuple(replace(part, path=paths[number]) for part, number in zip(self.parts, self.objects))
        return TaskChanges(placed, (b"",) * len(placed), sum((u.totals for u in self.uploads), UploadTotals()))

    def abandon(self) -> None:
        """Delete the uploaded objects: the task fails for another reason."""
        for upload in self.uploads:
            upload.abandon()


class PartsWriter:
    """Encodes and uploads parts.

    Life cycle: `add` in order of age, or of hash → `finish`, or `abandon` on the way.

    Args:
        root: opens the job root; only called for an upload.
        name: prefix of the names of its objects.
        on_part: is called with each part and its bytes, which are held here no longer than their upload takes.
    """

    def __init__(
        self,
        root: Callable[[], Store],
        uploader: Uploader,
        *,
        term: int,
        name: str,
        settings: JobSettings,
        ids: Ids,
        on_part: Callable[[PartEntry, pa.Buffer], None] = lambda part, body: None,
    ) -> None:
        self._root = root
        self._uploader = uploader
        self._path = partial(segment_path, term)
        self._name = name
        self._settings = settings
        self._ids = ids
        self._on_part = on_part
        self._parts: list[PartEntry] = []
        self._objects: list[int] = []
        self._uploads: list[Upload] = []
        self._waiting: list[pa.Buffer] = []  # bodies of the last parts, which are in no object yet
        self._waiting_bytes = 0

    def add(
        self,
        kind: Literal["state", "rows"],
        operator: str,
        state: str,
        batch: pa.RecordBatch,
        hash_range: tuple[int, int],
    ) -> None:
        """Add one more part.

        Args:
            batch: sorted, with at least one row.

        Raises:
            StoreUnavailable: no room for an upload within its deadline.
        """
        body = encode_part(batch, self._settings.compression)
        part = PartEntry(
            kind=kind,
            operator=operator,
            state=state,
            path="",
            offset=self._waiting_bytes,
            length=len(body),
            digest=sha256(body),
            rows=batch.num_rows,
            raw_bytes=batch.nbytes,
            hash_low=hash_range[0],
            hash_high=hash_range[1],
        )
        self._on_part(part, body)
        self._waiting.append(body)
        self._waiting_bytes += len(body)
        self._parts.append(part)
        self._objects.append(len(self._uploads))
        if self._waiting_bytes >= _OBJECT_BYTES:
            self._upload()

    def finish(self) -> WrittenParts:
        """Begin the last upload, unless all parts together are small enough for the acknowledgement.

        Raises:
            StoreUnavailable: see `add`.
        """
        if self._uploads or self._waiting_bytes > self._settings.checkpoint.inline_bytes_max:
            self._upload()
        inline = tuple(body.to_pybytes() for body in self._waiting)
        return WrittenParts(tuple(self._parts), tuple(self._objects), tuple(self._uploads), inline)

    def abandon(self) -> None:
        """See `WrittenParts.abandon`."""
        for upload in self._uploads:
            upload.abandon()

    def _upload(self) -> None:
        if not self._waiting:
            return
        whole = self._waiting[0] if len(self._waiting) == 1 else b"".join(self._waiting)
        self._uploads.append(
            self._uploader.begin(self._root(), lambda: self._path(f"{self._name}-{self._ids.uid()}.seg"), whole)
        )
        self._waiting, self._waiting_bytes = [], 0
