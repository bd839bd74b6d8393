"""The findings of a verification; pure values, and checks that need only manifests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from state_runtime.base.errors import CorruptData, MissingFile, StillstateError, Unavailable, UnsupportedFormat
from state_runtime.base.settings import VerifyLevel
from state_runtime.maintenance.links import Shared
from state_runtime.reading.references import StoredRef
from state_runtime.snapshot.manifest import Manifest

__all__ = ["Finding", "FindingKind", "VerifyProgress", "VerifyReport", "broken_chain", "kind_of_error"]

FindingKind = Literal["missing", "damaged", "unreachable", "unsupported"]

_ALL_HASHES = (0, (1 << 64) - 1)


@dataclass(frozen=True)
class Finding:
    """A defect.

    Attributes:
        kind: "unreachable" is a fault of the store or the network: nothing is known to be wrong with the data.
        path: below the root that was verified.
        snapshot_ids: the snapshots whose restore needs the object.
        operator, state: owner of the data; empty if it is shared by all (a segment's index, a listing, a manifest).
        hash_low, hash_high: closed range of key hashes.
    """

    kind: FindingKind
    path: str
    detail: str
    snapshot_ids: tuple[int, ...]
    operator: str = ""
    state: str = ""
    hash_low: int = 0
    hash_high: int = _ALL_HASHES[1]

    @staticmethod
    def of(kind: FindingKind, ref: StoredRef, detail: str, snapshot_id: int) -> Finding:
        """Make a finding about an object that a snapshot needs."""
        return Finding(
            kind=kind,
            path=ref.path,
            detail=detail,
            snapshot_ids=(snapshot_id,),
            operator=ref.operator,
            state=ref.state,
            hash_low=ref.hash_low,
            hash_high=ref.hash_high,
        )

    @property
    def whose(self) -> str:
        """Name operator, state and hash range, for people."""
        owner = "/".join(part for part in (self.operator, self.state) if part) or "all operators"
        if (self.hash_low, self.hash_high) == _ALL_HASHES:
            return owner
        return f"{owner} [{self.hash_low:016x}, {self.hash_high:016x}]"

    def to_json_dict(self) -> dict[str, Any]:
        """Make the value for `--json`; hashes are hexadecimal text, because JSON's numbers end at 2^53."""
        return {
            "kind": self.kind,
            "path": self.path,
            "detail": self.detail,
            "snapshot_ids": list(self.snapshot_ids),
            "operator": self.operator,
            "state": self.state,
            "hash_low": f"{self.hash_low:016x}",
            "hash_high": f"{self.hash_high:016x}",
        }


@dataclass(frozen=True, kw_only=True)
class VerifyProgress:
    """Progress. Objects and bytes are of the snapshots that were verified so far."""

    snapshots_done: int
    snapshots: int
    objects_done: int
    objects: int
    bytes_done: int
    bytes: int


@dataclass(frozen=True)
class VerifyReport:
    """The result of a verification.

    Attributes:
        objects, bytes: of all objects that the snapshots need, each once.
        objects_read, bytes_read, rows: of objects that were read and compared; rows are the decoded ones.
        complete: False if the verification was abandoned because the store did not answer any more.
        findings_left_out: number of findings above the maximum of a report.
        savepoints: number of savepoint folders that were verified too; their findings have the folder before the path.
        shared: per owner (a savepoint's name, "" is the job itself) the files that share their bytes with others by
            hard link; only owners with such files.
    """

    url: str
    level: VerifyLevel
    snapshots: tuple[int, ...]
    objects: int
    bytes: int
    objects_read: int
    bytes_read: int
    rows: int
    findings: tuple[Finding, ...]
    findings_left_out: int
    complete: bool
    seconds: float
    savepoints: int = 0
    shared: tuple[tuple[str, Shared], ...] = ()

    @property
    def exit_code(self) -> int:
        """0 without findings; else the code of the worst kind: damage, then unsupported formats, then unreachable
        objects."""
        kinds = {finding.kind for finding in self.findings}
        if kinds & {"missing", "damaged"}:
            return CorruptData.exit_code
        if "unsupported" in kinds:
            return UnsupportedFormat.exit_code
        return Unavailable.exit_code if kinds or not self.complete else 0


def kind_of_error(error: StillstateError | FileNotFoundError) -> FindingKind:
    """Return the kind of finding for an error. Only certain damage is called damage."""
    if isinstance(error, FileNotFoundError | MissingFile):
        return "missing"
    if isinstance(error, CorruptData):
        return "damaged"
    return "unsupported" if isinstance(error, UnsupportedFormat) else "unreachable"


def broken_chain(previous: Manifest | None, manifest: Manifest) -> list[str]:
    """Return the impossible facts of a manifest's changelog, as far as this manifest and the one before show them.

    Not every checkpoint has a segment, so numbers alone show no gap. But a segment that one snapshot names is lost if
    the next one neither names it nor has it in its tables. And no segment is added to the past.
    """
    found = []
    ids = [segment.snapshot_id for segment in manifest.segments]
    paths = {segment.path for segment in manifest.segments}
    if ids != sorted(ids) or len(paths) != len(ids):
        found.append("its segments are not in order")
    if ids and ids[-1] > manifest.snapshot_id:
        found.append(f"it names a segment of snapshot {ids[-1]}, which is newer than itself")
    late = [s for s in manifest.stored_segments if s.snapshot_id > manifest.snapshot_id]
    if late and late[0].path not in paths:
        found.append(f"it names rows in flight of snapshot {late[0].snapshot_id}, which is newer than itself")
    if previous is None or previous.job_uid != manifest.job_uid:
        return found
    if any(low <= previous.snapshot_id <= high for low, high in manifest.abandoned):
        return found
    folded = max((layer.last_snapshot_id for layer in manifest.layers), default=0)
    if manifest.shards is not None:
        folded = max(folded, manifest.shards.snapshot_id)
    lost = [s.path for s in previous.state_segments if s.snapshot_id > folded and s.path not in paths]
    if lost:
        found.append(
            f"{lost[0]}{f' and {len(lost) - 1} more' if len(lost) > 1 else ''} of snapshot {previous.snapshot_id} "
            "is neither in its changelog nor in its tables: its changelog has a gap"
        )
    if manifest.shards is None and previous.shards is None:
        known = {segment.path for segment in previous.segments}
        came = [s.path for s in manifest.segments if s.snapshot_id <= previous.snapshot_id and s.path not in known]
        if came:
            found.append(f"{came[0]} is older than snapshot {previous.snapshot_id}, which does not have it")
    return found
