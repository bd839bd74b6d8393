"""Ranged reads of a store's objects: parts that a reader of some columns and hashes does not need are not fetched."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa

from state_runtime.base.errors import CorruptData, CorruptSegment, missing_file
from state_runtime.base.limits import KIB, MIB
from state_runtime.restore.objects import HostObjects, WantedObject, WantedRange
from state_runtime.restore.uploaded_files import Still
from state_runtime.store import Store

__all__ = ["RangedObjects"]

_GAP_BYTES = 64 * KIB  # ranges of one object this near to each other are read by one request
_READERS = 4  # requests at a time
_KEPT_BYTES_MAX = 64 * MIB  # of indexes


@dataclass(frozen=True)
class _Span:
    offset: int
    body: pa.Buffer

    def slice(self, wanted: WantedRange) -> pa.Buffer | None:
        at = wanted.offset - self.offset
        return self.body.slice(at, wanted.length) if at >= 0 and at + wanted.length <= self.body.size else None


class RangedObjects(HostObjects):
    """Access of one reader, in one thread. Nothing is written to this host.

    The manifest has no digest of a range: parts of segments have their own, and tables have checksums in their pages.

    Args:
        whole_bytes_max: tables up to this size are read whole by one request, and their digest is checked.
        gap_bytes: maximum gap between two ranges that are read by one request.
    """

    def __init__(self, root: Store, *, whole_bytes_max: int = MIB, gap_bytes: int = _GAP_BYTES) -> None:
        super().__init__(lambda: root, None, 0, Still())
        self._store = root
        self._whole_bytes_max = whole_bytes_max
        self._gap_bytes = gap_bytes
        self._kept: dict[str, list[_Span]] = {}
        self._kept_bytes = 0
        self._expected: dict[str, list[_Span]] = {}

    def expect(self, ranges: Sequence[WantedRange], *, keep: bool = False) -> None:
        """Fetch ranges that are read next; neighbours are fetched together, and several at a time.

        Args:
            keep: keep them until the end; else until ranges are expected again.
        """
        if not keep:
            self._expected = {}
        missing = [r for r in ranges if self._held(r) is None]
        if len(missing) < (1 if keep else 2):
            return  # `read_range` fetches a single one
        spans = _together(missing, self._gap_bytes)
        with ThreadPoolExecutor(_READERS, "stillstate-read") as pool:
            bodies = list(pool.map(lambda span: self._fetch_range(*span), spans))
        for (path, offset, _), body in zip(spans, bodies, strict=True):
            self._hold(path, _Span(offset, body), keep)

    def _hold(self, path: str, span: _Span, keep: bool) -> None:
        if keep and self._kept_bytes + span.body.size <= _KEPT_BYTES_MAX:
            self._kept_bytes += span.body.size
            self._kept.setdefault(path, []).append(span)
        else:
            self._expected.setdefault(path, []).append(span)

    def _held(self, wanted: WantedRange) -> pa.Buffer | None:
        path = wanted.object.path
        for span in (*self._expected.get(path, ()), *self._kept.get(path, ())):
            found = span.slice(wanted)
            if found is not None:
                return found
        return None

    def read_range(self, wanted: WantedRange) -> pa.Buffer:
        """Return a range of an object; it takes a separate request unless it was expected.

        Raises:
            MissingFile, CorruptSegment, StoreUnavailable: see `HostObjects.read`.
        """
        held = self._held(wanted)
        return held if held is not None else self._fetch_range(wanted.object.path, wanted.offset, wanted.length)

    def open(self, wanted: WantedObject) -> pa.NativeFile:
        """Open the object as a file whose reads are range requests; a small one is read whole.

        Raises:
            MissingFile, CorruptSegment, StoreUnavailable: see `HostObjects.read`; also while it is read.
        """
        if wanted.bytes <= self._whole_bytes_max:
            return super().open(wanted)
        return pa.PythonFile(_RangeFile(self, wanted), mode="r")

    def _fetch_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        try:
            data = self._store.read_range(path, offset, length)
        except FileNotFoundError as error:
            raise missing_file(path, self._store.url) from error
        except CorruptSegment:
            raise
        except CorruptData as error:
            raise CorruptSegment(str(error)) from error
        self._count(len(data))
        return pa.py_buffer(data)


class _RangeFile(io.RawIOBase):
    """The file interface that Parquet's reader needs. Arrow ensures that one thread at a time seeks and reads."""

    def __init__(self, objects: RangedObjects, wanted: WantedObject) -> None:
        super().__init__()
        self._objects = objects
        self._wanted = wanted
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._wanted.bytes

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._wanted.bytes}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._wanted.bytes - self._at)
        length = left if size is None or size < 0 else min(size, left)
        if length == 0:
            return b""
        body: bytes = self._objects.read_range(WantedRange(self._wanted, self._at, length)).to_pybytes()
        self._at += length
        return body


def _together(ranges: Iterable[WantedRange], gap_bytes: int) -> list[tuple[str, int, int]]:
    """Return ranges (path, offset, length) that cover all of these."""
    spans: list[tuple[str, int, int]] = []
    for wanted in sorted(ranges, key=lambda r: (r.object.path, r.offset)):
        path, end = wanted.object.path, wanted.offset + wanted.length
        if spans and spans[-1][0] == path and wanted.offset <= spans[-1][1] + spans[-1][2] + gap_bytes:
            _, start, length = spans[-1]
            spans[-1] = (path, start, max(length, end - start))
        else:
            spans.append((path, wanted.offset, wanted.length))
    return spans
