"""The changelog segment: one immutable object with the state changes of one epoch; the format, pure.

    magic "STSEG001"
    part, part, …                 Arrow IPC streams (lz4, zstd or plain buffers) of state batches; lines of a source's
                                  log, compressed by zstd
    index                         JSON, compressed by zstd; see `SegmentIndex`
    footer: index bytes (u64, big endian), SHA-256 of the index as stored, magic

A *part* is what one attempt of one task changed in one state: sorted by key hash, each key once, tombstones included.
Small parts lie in the segment itself; a task with large changes uploads an object of its own, which only the index
names. So the manifest has one entry an epoch, whatever the parallelism. Every part has its own digest and length:
a restore reads exactly the ranges that it needs and checks each.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from state_runtime.base.errors import CorruptSegment
from state_runtime.base.fields import fields_of
from state_runtime.base.limits import (
    KIB,
    PART_BYTES_MAX,
    SEGMENT_INDEX_BYTES_MAX,
    SEGMENT_PARTS_MAX,
    SOURCE_LOG_BYTES_MAX,
)
from state_runtime.base.settings import Compression
from state_runtime.snapshot.strict import ValidationError, parse_json, shown_problem
from state_runtime.state.table import check_names
from state_runtime.store.paths import check_relative_path

__all__ = [
    "FOOTER_BYTES",
    "Compression",
    "PartEntry",
    "SegmentIndex",
    "build_segment",
    "decode_index",
    "decode_lines",
    "decode_part",
    "encode_lines",
    "encode_part",
    "sha256",
]

_MAGIC = b"STSEG001"
FOOTER_BYTES = 8 + 32 + len(_MAGIC)
# Buffers are padded, and a slice may carry some of its neighbours: what a part grows to is checked roughly.
_SLACK_BYTES = 64 * KIB


@dataclass(frozen=True)
class PartEntry:
    """Where one part is and what it holds.

    Attributes:
        kind: "state" (an Arrow IPC stream) or "source" (lines of a source's log of seen files).
        operator: uid; for "source" the index of the source.
        state: name of the state; empty for "source".
        path: object that holds the part, below the job root; empty: the segment itself.
        hash_low, hash_high: closed range of key hashes of the shard that wrote it.
        raw_bytes: size when decoded; a reader checks it against its bound, and the part against it, before it decodes.
    """

    kind: Literal["state", "source"]
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


@dataclass(frozen=True)
class SegmentIndex:
    """What a segment holds; `job_uid` and `snapshot_id` tie it to its place in the log.

    `parts` are in order of age. A segment may hold several epochs: where two parts of one operator, state and
    overlapping range are in it, the later hides the earlier.
    """

    job_uid: str
    snapshot_id: int
    parts: tuple[PartEntry, ...]


def sha256(data: bytes | pa.Buffer | memoryview) -> str:
    """Hexadecimal SHA-256."""
    return hashlib.sha256(data).hexdigest()


def encode_part(batch: pa.RecordBatch, compression: Compression = "lz4") -> pa.Buffer:
    """A state batch as an Arrow IPC stream; readers see from the stream how its buffers are compressed."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def decode_part(data: bytes | pa.Buffer, part: PartEntry, where: str) -> pa.RecordBatch:
    """Check a part's digest and decode it.

    Raises:
        CorruptSegment: altered, or not what the index says.
    """
    _check_digest(data, part, where)
    try:
        decoded = _decoded_bytes(data)
        if decoded > 4 * part.raw_bytes + _SLACK_BYTES:
            raise ValueError(f"it grows to {decoded:,} bytes where {part.raw_bytes:,} were written")
        batches = list(pa.ipc.open_stream(data))
        for batch in batches:
            check_names(batch.schema)
            # Offsets and texts that Arrow believes until somebody follows them out of the buffer.
            batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, struct.error) as error:
        raise CorruptSegment(f"{where}: {_name(part)} cannot be decoded: {error}. {_NEXT}") from error
    if len(batches) != 1 or batches[0].num_rows != part.rows:
        raise CorruptSegment(f"{where}: {_name(part)} holds other rows than its index says. {_NEXT}")
    return batches[0]


def _decoded_bytes(data: bytes | pa.Buffer) -> int:
    """What the buffers of an Arrow IPC stream say that they decompress to: known before memory is taken for it.

    Arrow believes the size in front of each compressed buffer, and pyarrow does not tell it, so the buffers are looked
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
                size = length if size == -1 else size  # -1: did not get smaller, is stored as it was
            if min(offset, length, size) < 0:
                raise ValueError("a buffer of a negative size")
            total += size
    return total


def _field(meta: memoryview, table: int, number: int) -> int:
    """Position of a field of a flatbuffer table; 0 if the table does not have it."""
    (back,) = struct.unpack_from("<i", meta, table)
    (vtable_bytes,) = struct.unpack_from("<H", meta, table - back)
    slot = 4 + 2 * number
    offset = struct.unpack_from("<H", meta, table - back + slot)[0] if slot < vtable_bytes else 0
    return table + offset if offset else 0


def encode_lines(lines: Sequence[str]) -> bytes:
    """Lines of a source's log, compressed."""
    body: bytes = pa.compress("\n".join(lines).encode(), codec="zstd", asbytes=True)
    return body


def decode_lines(data: bytes, part: PartEntry, where: str) -> list[str]:
    """The inverse of `encode_lines`, checked."""
    _check_digest(data, part, where)
    try:
        text = pa.decompress(data, decompressed_size=part.raw_bytes, codec="zstd", asbytes=True).decode()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise CorruptSegment(f"{where}: {_name(part)} cannot be decoded: {error}. {_NEXT}") from error
    lines = text.split("\n") if text else []
    if len(lines) != part.rows:
        raise CorruptSegment(f"{where}: {_name(part)} holds other lines than its index says. {_NEXT}")
    return lines


def build_segment(index: SegmentIndex, inline: Sequence[bytes]) -> tuple[bytes, int]:
    """Pack parts into one object.

    Args:
        index: entries with an empty `path` are inline, in the order of `inline`; their offsets are filled in here. The
            digest that the task took of a part stays, so that a part which was altered on its way here is found by
            whoever reads it; it is not hashed again.
        inline: the bytes of the inline parts.

    Returns:
        The object, and the length of its tail (index and footer), so that a reader needs one range read for it.
    """
    offset = len(_MAGIC)
    bodies = iter(inline)
    parts: list[PartEntry] = []
    for part in index.parts:
        if not part.path:
            body = next(bodies)
            digest = part.digest if part.digest and part.length == len(body) else sha256(body)
            part = dataclasses.replace(part, offset=offset, length=len(body), digest=digest)
            offset += len(body)
        parts.append(part)
    packed = dataclasses.replace(index, parts=tuple(parts))
    plain = json.dumps(packed, default=fields_of, separators=(",", ":")).encode()
    stored: bytes = len(plain).to_bytes(8, "big") + pa.compress(plain, codec="zstd", asbytes=True)
    footer = len(stored).to_bytes(8, "big") + hashlib.sha256(stored).digest() + _MAGIC
    return b"".join([_MAGIC, *inline, stored, footer]), len(stored) + FOOTER_BYTES


def decode_index(tail: bytes, where: str) -> SegmentIndex:
    """Parse a segment's tail (index and footer), checked.

    Raises:
        CorruptSegment: truncated, altered, or out of bounds.
    """
    footer = tail[-FOOTER_BYTES:]
    if len(footer) != FOOTER_BYTES or footer[-len(_MAGIC) :] != _MAGIC:
        raise CorruptSegment(f"{where} does not end like a segment. {_NEXT}")
    stored = tail[:-FOOTER_BYTES]
    if int.from_bytes(footer[:8], "big") != len(stored) or hashlib.sha256(stored).digest() != footer[8:40]:
        raise CorruptSegment(f"{where} has a damaged index. {_NEXT}")
    size = int.from_bytes(stored[:8], "big")
    if size > SEGMENT_INDEX_BYTES_MAX:
        raise CorruptSegment(f"{where} has an index of {size:,} bytes, more than {SEGMENT_INDEX_BYTES_MAX:,}. {_NEXT}")
    try:
        plain = pa.decompress(stored[8:], decompressed_size=size, codec="zstd", asbytes=True)
        index = parse_json(SegmentIndex, plain)
    except ValidationError as error:
        raise CorruptSegment(f"{where} has a damaged index: {shown_problem(error)}. {_NEXT}") from error
    except (pa.ArrowException, OSError) as error:
        raise CorruptSegment(f"{where} has a damaged index: {error}. {_NEXT}") from error
    if len(index.parts) > SEGMENT_PARTS_MAX:
        raise CorruptSegment(f"{where} lists {len(index.parts):,} parts, more than {SEGMENT_PARTS_MAX:,}. {_NEXT}")
    for part in index.parts:
        if part.path:
            check_relative_path(part.path)
        raw_bytes_max = PART_BYTES_MAX if part.kind == "state" else SOURCE_LOG_BYTES_MAX
        if (
            not 0 <= part.length <= PART_BYTES_MAX
            or not 0 <= part.raw_bytes <= raw_bytes_max
            or not 0 <= part.offset < 1 << 62
            or not 0 <= part.hash_low <= part.hash_high
            or part.rows < 0
        ):
            raise CorruptSegment(f"{where}: {_name(part)} is out of bounds. {_NEXT}")
    return index


def _check_digest(data: bytes | pa.Buffer, part: PartEntry, where: str) -> None:
    if len(data) != part.length or sha256(data) != part.digest:
        raise CorruptSegment(f"{where}: {_name(part)} has another digest than its index says. {_NEXT}")


def _name(part: PartEntry) -> str:
    return f"the part of {part.kind} {part.operator}/{part.state}"


_NEXT = "Restore the file from a copy of the job root, or start from an older snapshot"
