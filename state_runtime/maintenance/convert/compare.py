"""Whether two snapshots hold the same state: number and order-independent digest of the live rows, of each state of
each operator.

The reader of a restore (`reading/reader.py`) reads both completely, one range of hashes at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from state_runtime.base.limits import MIB
from state_runtime.materialize.run import Reached
from state_runtime.reading.fingerprint import Fingerprint
from state_runtime.reading.reader import SnapshotReader, hash_ranges
from state_runtime.snapshot.locate import OpenedSnapshot
from state_runtime.snapshot.manifest import Manifest
from state_runtime.store import Store

__all__ = ["Compared", "RangeOfState", "compare_here", "compared", "differences", "ranges_of_states"]

_RANGE_BYTES = 64 * MIB
_RANGES_MAX = 4096


@dataclass(frozen=True)
class RangeOfState:
    """A piece of the comparison."""

    operator: str
    state: str
    low: int
    high: int


@dataclass(frozen=True)
class Compared:
    """A piece that was read on both sides."""

    piece: RangeOfState
    source: Fingerprint
    target: Fingerprint


def ranges_of_states(manifest: Manifest) -> list[RangeOfState]:
    """Divide all states into ranges of hashes, as many as their bytes require."""
    ranges = hash_ranges(min(max(1, manifest.total_bytes // _RANGE_BYTES), _RANGES_MAX))
    return [
        RangeOfState(operator.uid, state.name, low, high)
        for operator in manifest.operators
        for state in operator.states
        for low, high in ranges
    ]


def compared(piece: RangeOfState, source: SnapshotReader, target: SnapshotReader) -> Compared:
    """Read one piece on both sides; raises what `SnapshotReader.read` raises."""
    hash_range = (piece.low, piece.high)
    return Compared(
        piece,
        source.fingerprint(piece.operator, piece.state, hash_range),
        target.fingerprint(piece.operator, piece.state, hash_range),
    )


def differences(found: Iterable[Compared]) -> list[str]:
    """Name the states that differ in any range, for people; pure."""
    sums: dict[tuple[str, str], tuple[Fingerprint, Fingerprint]] = {}
    unequal: set[tuple[str, str]] = set()
    for one in found:
        key = (one.piece.operator, one.piece.state)
        source, target = sums.get(key, (Fingerprint(), Fingerprint()))
        sums[key] = (source + one.source, target + one.target)
        if one.source != one.target:
            unequal.add(key)
    return [
        f"operator {operator!r}, state {state!r}: {sums[operator, state][0]} in the source, {sums[operator, state][1]} "
        "after it"
        for operator, state in sorted(unequal)
    ]


def compare_here(
    source: OpenedSnapshot,
    target: Store,
    draft: Manifest,
    reached: Reached,
    pieces: Sequence[RangeOfState] | None = None,
) -> list[str]:
    """Compare in this process; a `CompareStates`."""
    pieces = ranges_of_states(source.manifest) if pieces is None else pieces
    readers = SnapshotReader(source.root, source.manifest), SnapshotReader(target, draft)
    found = []
    reached(0, len(pieces))
    for done, piece in enumerate(pieces, 1):
        found.append(compared(piece, *readers))
        reached(done, len(pieces))
    return differences(found)
