"""The changelog segment: one immutable object with the state changes of one epoch; the format, pure.

    magic "STSEG001"
    part, part, …                 Arrow IPC streams (lz4, zstd or plain buffers) of state batches; lines of a source's
                                  log, compressed by zstd
    index                         JSON, compressed by zstd; see `SegmentIndex`
    footer: index bytes (u64, big endian), SHA-256 of the index as stored, magic

A *part* has the changes of one attempt of one task in one state: sorted by key hash, each key once, tombstones
included. Small parts are stored in the segment itself. A task with large changes uploads a separate object, which only
the index names. So the manifest has one entry an epoch, for any parallelism. Every part has its own digest and length:
a restore reads exactly the ranges that it needs and checks each.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from state_runtime.base.errors import RESTORE_OR_GO_BACK, CorruptSegment
from state_runtime.base.fields import fields_of
from state_runtime.base.limits import (
    PART_BYTES_MAX,
    SEGMENT_INDEX_BYTES_MAX,
    SEGMENT_PARTS_MAX,
    SOURCE_LOG_BYTES_MAX,
)
from state_runtime.changelog.inflight import InflightPass, RowsPart, check_passes
from state_runtime.changelog.parts import PartEntry, name_of_part, sha256
from state_runtime.snapshot.strict import ValidationError, parse_json, shown_problem
from state_runtime.store.paths import check_relative_path

__all__ = ["FOOTER_BYTES", "SegmentIndex", "build_segment", "decode_index", "placed_parts"]

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_MAGIC = b"STSEG001"
FOOTER_BYTES = 8 + 32 + len(_MAGIC)


@dataclass(frozen=True)
class SegmentIndex:
    """The content of a segment; `job_uid` and `snapshot_id` bind it to its place in the log.

    `parts` are in order of age. A segment may hold several epochs: if it has two parts of one operator, state and
    overlapping range, the later hides the earlier.

    Attributes:
        passes: all rows that were in flight when the segment was written, in the order in which operators do them, with
            those stored in earlier segments. Segments without such rows have the same format as before they existed.
    """

    job_uid: str
    snapshot_id: int
    parts: tuple[PartEntry, ...]
    passes: tuple[InflightPass, ...] = ()


def build_segment(index: SegmentIndex, inline: Sequence[bytes]) -> tuple[bytes, int]:
    """Pack parts into one object.

    Args:
        index: entries with an empty `path` are inline, in the order of `inline`; their offsets are filled in here. The
            digest that the task computed of a part stays and is not computed again, so that a reader finds a part that
            was altered on its way here.
            Parts of passes in the segment itself are found among them by their digest.
        inline: the bytes of the inline parts.

    Returns:
        The object, and the length of its tail (index and footer), so that a reader needs one range read for it.
    """
    bodies = iter(inline)
    parts = placed_parts(part if part.path else _measured(part, next(bodies)) for part in index.parts)
    placed = {part.digest: part for part in parts if part.kind == "rows"}
    packed = dataclasses.replace(index, parts=parts, passes=tuple(_placed(p, placed) for p in index.passes))
    fields = fields_of(packed)
    if not packed.passes:
        del fields["passes"]
    plain = json.dumps(fields, default=fields_of, separators=(",", ":")).encode()
    stored: bytes = len(plain).to_bytes(8, "big") + pa.compress(plain, codec="zstd", asbytes=True)
    footer = len(stored).to_bytes(8, "big") + hashlib.sha256(stored).digest() + _MAGIC
    return b"".join([_MAGIC, *inline, stored, footer]), len(stored) + FOOTER_BYTES


def placed_parts(parts: Iterable[PartEntry]) -> tuple[PartEntry, ...]:
    """Return parts of known length in the order in which a segment names them, with the offsets of the inline ones."""
    offset = len(_MAGIC)
    placed: list[PartEntry] = []
    for part in parts:
        placed.append(part if part.path else dataclasses.replace(part, offset=offset))
        offset += 0 if part.path else part.length
    return tuple(placed)


def _measured(part: PartEntry, body: bytes) -> PartEntry:
    digest = part.digest if part.digest and part.length == len(body) else sha256(body)
    return dataclasses.replace(part, length=len(body), digest=digest)


def _placed(passed: InflightPass, placed: Mapping[str, PartEntry]) -> InflightPass:
    """Return the pass with the places of those parts that are in the segment that is being built."""
    parts = (p if p.segment else RowsPart("", placed[p.part.digest]) for p in passed.parts)
    return dataclasses.replace(passed, parts=tuple(parts))


def decode_index(tail: bytes, where: str) -> SegmentIndex:
    """Parse and check a segment's tail (index and footer).

    Raises:
        CorruptSegment: truncated, altered, or out of bounds.
    """
    footer = tail[-FOOTER_BYTES:]
    if len(footer) != FOOTER_BYTES or footer[-len(_MAGIC) :] != _MAGIC:
        raise CorruptSegment(f"{where} does not end like a segment. {RESTORE_OR_GO_BACK}")
    stored = tail[:-FOOTER_BYTES]
    if int.from_bytes(footer[:8], "big") != len(stored) or hashlib.sha256(stored).digest() != footer[8:40]:
        raise CorruptSegment(f"{where} has a damaged index. {RESTORE_OR_GO_BACK}")
    size = int.from_bytes(stored[:8], "big")
    if size > SEGMENT_INDEX_BYTES_MAX:
        raise CorruptSegment(
            f"{where} has an index of {size:,} bytes, more than {SEGMENT_INDEX_BYTES_MAX:,}. {RESTORE_OR_GO_BACK}"
        )
    try:
        plain = pa.decompress(stored[8:], decompressed_size=size, codec="zstd", asbytes=True)
        index = parse_json(SegmentIndex, plain)
    except ValidationError as error:
        raise CorruptSegment(f"{where} has a damaged index: {shown_problem(error)}. {RESTORE_OR_GO_BACK}") from error
    except (pa.ArrowException, OSError) as error:
        raise CorruptSegment(f"{where} has a damaged index: {error}. {RESTORE_OR_GO_BACK}") from error
    rows_parts = [p.part for passed in index.passes for p in passed.parts]
    count = len(index.parts) + len(rows_parts)
    if count > SEGMENT_PARTS_MAX:
        raise CorruptSegment(f"{where} lists {count:,} parts, more than {SEGMENT_PARTS_MAX:,}. {RESTORE_OR_GO_BACK}")
    for part in (*index.parts, *rows_parts):
        _check_part(part, where)
    for passed in index.passes:
        for held in passed.parts:
            if held.segment:
                check_relative_path(held.segment)
    check_passes(index.passes, where)
    return index


def _check_part(part: PartEntry, where: str) -> None:
    if part.path:
        check_relative_path(part.path)
    raw_bytes_max = SOURCE_LOG_BYTES_MAX if part.kind == "source" else PART_BYTES_MAX
    if (
        not 0 <= part.length <= PART_BYTES_MAX
        or not 0 <= part.raw_bytes <= raw_bytes_max
        or not 0 <= part.offset < 1 << 62
        or not 0 <= part.hash_low <= part.hash_high
        or part.rows < 0
        or (part.kind == "rows" and not _DIGEST.match(part.digest))  # the digest names a file on hosts
    ):
        raise CorruptSegment(f"{where}: {name_of_part(part)} is out of bounds. {RESTORE_OR_GO_BACK}")
