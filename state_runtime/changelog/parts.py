"""Parts of the changelog: their content, encoding and checks; pure.

A *part* has the changes of one attempt of one task in one state (sorted by key hash, each key once, tombstones
included), or rows that it read and did not process, or lines of a source's log. It is stored in a segment, or in an
object that the task uploaded and a segment's index names (changelog/segment.py).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from state_runtime.base.errors import RESTORE_OR_GO_BACK, CorruptSegment
from state_runtime.base.limits import KIB
from state_runtime.base.settings import Compression
from state_runtime.state.table import check_names

__all__ = ["PartEntry", "decode_lines", "decode_part", "encode_lines", "encode_part", "name_of_part", "sha256"]

# Buffers are padded, and a slice may carry some of its neighbours: the decoded size of a part is checked roughly.
_SLACK_BYTES = 64 * KIB


@dataclass(frozen=True)
class PartEntry:
    """The place and the content of one part.

    Attributes:
        kind: "state" (an Arrow IPC stream), "rows" (another one, of in-flight rows), or "source" (lines of a source's
            log of seen files).
        operator: uid; for "source" the index of the source.
        state: name of the state; empty for the other kinds.
        path: object that holds the part, below the job root; empty: the segment itself.
        hash_low, hash_high: closed range of key hashes of the shard that wrote it; of in-flight rows the least and the
            greatest hash.
        raw_bytes: decoded size. Before it decodes, a reader checks this number against its bound, and the part against
            this number.
    """

    kind: Literal["state", "rows", "source"]
    operator: str
    state: str
    path: str
    offset: int
    length: int
    digest: str
    rows: int
    raw_bytes: int
    hash_low: int
    hash_high: int


def sha256(data: bytes | pa.Buffer | memoryview) -> str:
    """Return the hexadecimal SHA-256."""
    return hashlib.sha256(data).hexdigest()


def encode_part(batch: pa.RecordBatch, compression: Compression = "lz4") -> pa.Buffer:
    """Encode a state batch as an Arrow IPC stream; the stream says how its buffers are compressed."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def decode_part(data: bytes | pa.Buffer, part: PartEntry, where: str) -> pa.RecordBatch:
    """Check a part's digest and decode it.

    Raises:
        CorruptSegment: altered, or different from the index.
    """
    _check_digest(data, part, where)
    try:
        decoded = _decoded_bytes(data)
        if decoded > 4 * part.raw_bytes + _SLACK_BYTES:
            raise ValueError(f"it grows to {decoded:,} bytes where {part.raw_bytes:,} were written")
        batches = list(pa.ipc.open_stream(data))
        for batch in batches:
            check_names(batch.schema)
            # Check offsets and texts: Arrow trusts them until a reader follows them out of the buffer.
            batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, struct.error) as error:
        raise CorruptSegment(
            f"{where}: {name_of_part(part)} cannot be decoded: {error}. {RESTORE_OR_GO_BACK}"
        ) from error
    if len(batches) != 1 or batches[0].num_rows != part.rows:
        raise CorruptSegment(
            f"{where}: {name_of_part(part)} holds other rows than its index says. {RESTORE_OR_GO_BACK}"
        )
    return batches[0]


def _decoded_bytes(data: bytes | pa.Buffer) -> int:
    """Return the declared decompressed size of an Arrow IPC stream's buffers, before memory is allocated for it.

    Arrow trusts the size in front of each compressed buffer, and pyarrow does not expose it, so the buffers are looked
    up in the message's flatbuffer (Arrow's format specification: Message.fbs).

    Raises:
        ValueError, struct.error, pa.ArrowException: not such a stream.
    """
    total = 0
    for message in pa.ipc.MessageReader.open_stream(data):
        if message.type != "record batch":
            continue
        meta, body = memoryview(message.metadata), memoryview(message.body)
        (root,) = struct.unpack_from("<I", meta)
        header = _field(meta, root, 2)
        header += struct.unpack_from("<I", meta, header)[0] if header else 0
        compressed = _field(meta, header, 3) != 0
        vector = _field(meta, header, 2)
        if not header or not vector:
            raise ValueError("a record batch without buffers")
        vector += struct.unpack_from("<I", meta, vector)[0]
        (count,) = struct.unpack_from("<I", meta, vector)
        for number in range(count):
            offset, length = struct.unpack_from("<qq", meta, vector + 4 + 16 * number)
            size = length
            if compressed and length:
                (size,) = struct.unpack_from("<q", body, offset)
                size = length if size == -1 else size  # -1: did not get smaller, is stored uncompressed
            if min(offset, length, size) < 0:
                raise ValueError("a buffer of a negative size")
            total += size
    return total


def _field(meta: memoryview, table: int, number: int) -> int:
    """Return the position of a field of a flatbuffer table; 0 if the table does not have it."""
    (back,) = struct.unpack_from("<i", meta, table)
    (vtable_bytes,) = struct.unpack_from("<H", meta, table - back)
    slot = 4 + 2 * number
    offset = struct.unpack_from("<H", meta, table - back + slot)[0] if slot < vtable_bytes else 0
    return table + offset if offset else 0


def encode_lines(lines: Sequence[str]) -> bytes:
    """Encode lines of a source's log, compressed."""
    body: bytes = pa.compress("\n".join(lines).encode(), codec="zstd", asbytes=True)
    return body


def decode_lines(data: bytes, part: PartEntry, where: str) -> list[str]:
    """Decode and check lines: the inverse of `encode_lines`."""
    _check_digest(data, part, where)
    try:
        text = pa.decompress(data, decompressed_size=part.raw_bytes, codec="zstd", asbytes=True).decode()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise CorruptSegment(
            f"{where}: {name_of_part(part)} cannot be decoded: {error}. {RESTORE_OR_GO_BACK}"
        ) from error
    lines = text.split("\n") if text else []
    if len(lines) != part.rows:
        raise CorruptSegment(
            f"{where}: {name_of_part(part)} holds other lines than its index says. {RESTORE_OR_GO_BACK}"
        )
    return lines


def _check_digest(data: bytes | pa.Buffer, part: PartEntry, where: str) -> None:
    if len(data) != part.length or sha256(data) != part.digest:
        raise CorruptSegment(
            f"{where}: {name_of_part(part)} has another digest than its index says. {RESTORE_OR_GO_BACK}"
        )


def name_of_part(part: PartEntry) -> str:
    """Return the name of a part for messages."""
    if part.kind == "rows":
        hashes = f"hashes {part.hash_low:016x} to {part.hash_high:016x}"
        return f"a part of the in-flight rows of operator {part.operator!r}, {hashes},"
    return f"the part of {part.kind} {part.operator}/{part.state}"
