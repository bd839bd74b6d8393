"""Reads the log that a materialization folds: all parts of a snapshot's segments, once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from state_runtime.base.errors import missing_file
from state_runtime.base.limits import KIB, MIB
from state_runtime.changelog.parts import decode_part
from state_runtime.changelog.reader import read_index
from state_runtime.changelog.snapshot_state import SnapshotState, StoredPart
from state_runtime.snapshot.manifest import Manifest
from state_runtime.state.table import StateSchema
from state_runtime.store import Store

__all__ = ["read_log", "read_parts"]

_GAP_BYTES = 64 * KIB  # parts of one object this near to each other are read by one request
_CHUNK_BYTES = 32 * MIB  # decoded bytes of the log that are fetched at once
_READERS = 4  # requests at a time


def read_log(root: Store, manifest: Manifest) -> list[StoredPart]:
    """Return the parts of a snapshot's segments that count, newest first; several indexes are read at a time.

    Raises:
        MissingFile, StoreUnavailable: see `read_index`. CorruptSegment: also a part of a state that its operator does
            not have and did not drop.
    """
    stored = SnapshotState(manifest)
    segments = stored.segments()
    with ThreadPoolExecutor(_READERS, "stillstate-fold") as pool:
        indexes = list(pool.map(lambda segment: read_index(root, segment, manifest.job_uids), segments))
    return [part for segment, index in zip(segments, indexes, strict=True) for part in stored.parts(segment, index)]


def read_parts(root: Store, log: Sequence[StoredPart]) -> Iterator[tuple[list[StoredPart], list[pa.RecordBatch]]]:
    """Yield parts and their batches in the columns of their time, in the given order, a bounded number at a time.

    Raises:
        MissingFile, CorruptSegment: a part differs from its index. StoreUnavailable: try again.
    """
    with ThreadPoolExecutor(_READERS, "stillstate-fold") as pool:
        for chunk in _chunks(log):
            yield chunk, _fetch(root, chunk, pool)


def _fetch(root: Store, chunk: Sequence[StoredPart], pool: ThreadPoolExecutor) -> list[pa.RecordBatch]:
    """Return the batches of parts; one request reads parts that are near to each other in one object."""
    spans = _spans(chunk)
    bodies = list(pool.map(lambda span: _read_range(root, *span[:3]), spans))
    where = {
        id(piece): (body, start) for (_, start, _, pieces), body in zip(spans, bodies, strict=True) for piece in pieces
    }
    batches = []
    for piece in chunk:
        body, start = where[id(piece)]
        at = piece.part.offset - start
        batch = decode_part(body[at : at + piece.part.length], piece.part, piece.path)
        batches.append(StateSchema.of(batch.schema).check_batch(batch, piece.path))
    return batches


def _chunks(log: Sequence[StoredPart]) -> Iterator[list[StoredPart]]:
    chunk: list[StoredPart] = []
    size = 0
    for piece in log:
        if chunk and size + piece.part.raw_bytes > _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(piece)
        size += piece.part.raw_bytes
    if chunk:
        yield chunk


_Span = tuple[str, int, int, list[StoredPart]]


def _spans(chunk: Sequence[StoredPart]) -> list[_Span]:
    """Return the range reads (path, offset, length) that read all parts, and the parts of each."""
    spans: list[_Span] = []
    for piece in sorted(chunk, key=lambda p: (p.path, p.part.offset)):
        offset, length = piece.part.offset, piece.part.length
        if spans:
            path, start, size, pieces = spans[-1]
            if path == piece.path and offset <= start + size + _GAP_BYTES:
                pieces.append(piece)
                spans[-1] = (path, start, max(size, offset + length - start), pieces)
                continue
        spans.append((piece.path, offset, length, [piece]))
    return spans


def _read_range(root: Store, path: str, offset: int, length: int) -> bytes:
    try:
        return root.read_range(path, offset, length)
    except FileNotFoundError as error:
        raise missing_file(path, root.url) from error
