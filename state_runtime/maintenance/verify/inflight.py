"""Checks that the rows in flight of a snapshot match its listing: each part is at its place in the segment, is sorted,
and has the columns of its pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from state_runtime.base.errors import CorruptSegment, MissingFile, StillstateError
from state_runtime.changelog.inflight import InflightPass, RowsPart
from state_runtime.changelog.reader import read_index
from state_runtime.changelog.rows import decode_columns, decode_rows, rows_schema
from state_runtime.maintenance.verify.report import Finding, kind_of_error
from state_runtime.reading.references import StoredRef
from state_runtime.snapshot.manifest import Manifest
from state_runtime.store import Store

__all__ = ["check_parts", "with_epochs"]

_NAMED_MAX = 3


def check_parts(
    root: Store, manifest: Manifest, passes: Sequence[InflightPass], *, decode: bool, known: set[str] | None = None
) -> Iterator[Finding]:
    """Yield the defects of parts of rows in flight; one part is in memory at a time.

    Args:
        passes: of the snapshot (`changelog.reader.read_passes`).
        decode: also read each part.
        known: parts that were read for another snapshot and are not read again; grows.
    """
    batch = manifest.open_batch
    if batch is None:
        return
    known = set() if known is None else known
    places: dict[str, frozenset[_Place]] = {}
    for segment in batch.segments:
        try:
            index = read_index(root, segment, manifest.job_uids)
            places[segment.path] = frozenset(
                _Place(p.path, p.offset, p.length, p.digest, p.rows) for p in index.parts if p.kind == "rows"
            )
        except StillstateError as error:
            ref = StoredRef(kind="segment", path=segment.path, bytes=-1, digest="")
            yield Finding.of(kind_of_error(error), ref, str(error), manifest.snapshot_id)
    for passed in passes:
        for part in passed.parts:
            if part.segment not in places:
                continue
            try:
                _check_place(part, places[part.segment])
                if decode and (sought := f"{part.part.digest} {passed.layout.columns}") not in known:
                    _check_part(root, passed, part)
                    known.add(sought)
            except StillstateError as error:
                yield _finding(passed, part, error, manifest.snapshot_id)


def with_epochs(finding: Finding, passes: Sequence[InflightPass]) -> Finding:
    """Add to a finding the rows in flight that it is about: operator, epoch and hash range."""
    about = [
        f"operator {p.operator!r}, epoch {p.epoch}, hashes {part.part.hash_low:016x} to {part.part.hash_high:016x}"
        for p in passes
        for part in p.parts
        if part.path == finding.path and _is_about(finding, part)
    ]
    if not about or "rows in flight" in finding.detail:
        return finding
    more = f"; and {len(about) - _NAMED_MAX} more" if len(about) > _NAMED_MAX else ""
    detail = f"{finding.detail}; rows in flight: {'; '.join(about[:_NAMED_MAX])}{more}"
    return replace(finding, detail=detail)


def _is_about(finding: Finding, part: RowsPart) -> bool:
    if not finding.operator:
        return True  # a whole segment
    named = (finding.operator, finding.state, finding.hash_low, finding.hash_high)
    return named == (part.part.operator, "", part.part.hash_low, part.part.hash_high)


@dataclass(frozen=True)
class _Place:
    path: str
    offset: int
    length: int
    digest: str
    rows: int


def _check_place(part: RowsPart, there: frozenset[_Place]) -> None:
    entry = part.part
    if _Place(entry.path, entry.offset, entry.length, entry.digest, entry.rows) not in there:
        raise CorruptSegment(f"the index of {part.segment} has no such part")


def _check_part(root: Store, passed: InflightPass, part: RowsPart) -> None:
    try:
        data = root.read_range(part.path, part.part.offset, part.part.length)
    except FileNotFoundError as error:
        raise MissingFile(f"{part.path} is missing in {root.url}") from error
    batch = decode_rows(data, part.part, part.path)
    columns = decode_columns(passed.layout.columns, part.path)
    if not rows_schema(batch.schema, part.path).equals(columns):
        raise CorruptSegment(f"its columns are not those that the listing says: {columns.names}")


def _finding(passed: InflightPass, part: RowsPart, error: StillstateError, snapshot_id: int) -> Finding:
    ref = StoredRef(
        kind="segment",
        path=part.path,
        bytes=-1,
        digest="",
        operator=passed.operator,
        hash_low=part.part.hash_low,
        hash_high=part.part.hash_high,
    )
    why = f"rows in flight of operator {passed.operator!r} from epoch {passed.epoch}: {error}"
    return Finding.of(kind_of_error(error), ref, why, snapshot_id)
