"""The state at a snapshot: which of its segments and tables count for a reader, and in which order; pure.

From new to old, the state of an operator is

    segments            from the last to the first, after those that no manifest names yet
        parts           from the last to the first, because one segment may hold several epochs
    layers              from the last to the first
        tables
    files of shards     where the changelog is or was off (read by `restore/uploaded_files.py`)

All readers of state use this module: queries, exports, restores and materialization. They differ in how they fetch the
objects. All of them skip rows older than their operator or their state (`since`), and rows of dropped states. A state
that its operator does not have and that was not dropped is damage; it is never skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from state_runtime.base.errors import CorruptSegment
from state_runtime.changelog.parts import PartEntry
from state_runtime.changelog.segment import SegmentIndex
from state_runtime.changelog.versions import check_dropped
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, SegmentEntry, TableEntry
from state_runtime.state.table import HASH_MAX

__all__ = ["SnapshotState", "StoredPart", "StoredTable"]


@dataclass(frozen=True)
class StoredPart:
    """A part of a segment.

    Attributes:
        segment: path of the segment.
        snapshot_id: the checkpoint that the segment was written for.
    """

    segment: str
    part: PartEntry
    snapshot_id: int

    @property
    def path(self) -> str:
        """The object that holds the part."""
        return self.part.path or self.segment

    @property
    def state(self) -> str:
        return self.part.state

    @property
    def hash_range(self) -> tuple[int, int]:
        """The closed hash range of the part."""
        return self.part.hash_low, self.part.hash_high


@dataclass(frozen=True)
class StoredTable:
    """A table of a layer.

    Attributes:
        snapshot_id: the newest snapshot that the table holds.
        layer: number of its layer; 0 is the base.
    """

    table: TableEntry
    snapshot_id: int
    layer: int = 0

    @property
    def path(self) -> str:
        return self.table.path

    @property
    def state(self) -> str:
        return self.table.state

    @property
    def hash_range(self) -> tuple[int, int]:
        """The closed hash range of the table."""
        return self.table.hash_low, self.table.hash_high


class SnapshotState:
    """The stored states of some operators in a snapshot. Reads nothing: indexes of segments are passed in.

    Args:
        operators: the descriptions to read by; None: those of the manifest.
        pending: segments that are newer than the manifest, oldest first.
    """

    def __init__(
        self,
        manifest: Manifest,
        operators: Sequence[OperatorEntry] | None = None,
        *,
        pending: Sequence[SegmentEntry] = (),
    ) -> None:
        described = manifest.operators if operators is None else operators
        self._manifest = manifest
        self._pending = tuple(pending)
        self._operators = {operator.uid: operator for operator in described}
        self._since = {(o.uid, s.name): max(o.since, s.since) for o in described for s in o.states}

    def segments(self, newer_than: int = -1) -> list[SegmentEntry]:
        """Return the segments that may hold state of the operators, newest first.

        Args:
            newer_than: only those of newer snapshots.
        """
        begun = min((operator.since for operator in self._operators.values()), default=0)
        oldest = max(begun, newer_than + 1)
        stored = (*self._manifest.state_segments, *self._pending)
        return [segment for segment in reversed(stored) if segment.snapshot_id >= oldest]

    def parts(
        self, segment: SegmentEntry, index: SegmentIndex, low: int = 0, high: int = HASH_MAX
    ) -> Iterator[StoredPart]:
        """Yield the parts of a segment that count and overlap a closed range of hashes, newest first.

        Raises:
            CorruptSegment: a part of a state that its operator does not have and did not drop.
        """
        for part in reversed(index.parts):
            stored = StoredPart(segment.path, part, segment.snapshot_id)
            if part.kind == "state" and self._counts(part.operator, stored, low, high):
                yield stored

    def tables(self, low: int = 0, high: int = HASH_MAX) -> Iterator[StoredTable]:
        """Yield the tables that count and overlap a closed range of hashes: the layers from the newest to the base.

        Raises:
            CorruptSegment: a table of a state that its operator does not have and did not drop.
        """
        for number, layer in reversed(list(enumerate(self._manifest.layers))):
            for table in layer.tables:
                stored = StoredTable(table, layer.newest_in(table), number)
                if self._counts(table.operator, stored, low, high):
                    yield stored

    def _counts(self, uid: str, stored: StoredPart | StoredTable, low: int, high: int) -> bool:
        operator = self._operators.get(uid)
        if operator is None:
            return False  # of another operator, or of a removed one
        first, last = stored.hash_range
        if not 0 <= first <= last <= HASH_MAX:
            raise CorruptSegment(f"{stored.path} is named for a hash range that cannot be")
        if last < low or first > high or stored.snapshot_id < operator.since:
            return False
        since = self._since.get((uid, stored.state))
        if since is None:
            check_dropped(operator, stored.state, stored.snapshot_id, stored.path)
            return False
        return stored.snapshot_id >= since
