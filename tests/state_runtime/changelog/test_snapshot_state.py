"""The walk over a snapshot's state: order, and what is passed over. What is read through it is compared elsewhere with
an oracle that walks by itself (tests/stored.py)."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
from model import empty_manifest

from state_runtime.base.errors import CorruptSegment
from state_runtime.changelog.parts import PartEntry
from state_runtime.changelog.segment import SegmentIndex
from state_runtime.changelog.snapshot_state import SnapshotState
from state_runtime.snapshot.manifest import (
    LayerEntry,
    Manifest,
    OperatorEntry,
    SegmentEntry,
    ShardFilesEntry,
    StateEntry,
    TableEntry,
)


def operator(**changes: object) -> OperatorEntry:
    entry = OperatorEntry("op", "aggregate", "k string", (StateEntry("n", "value", "n bigint"),))
    return dataclasses.replace(entry, **changes)  # type: ignore[arg-type]


def segment(snapshot_id: int) -> SegmentEntry:
    return SegmentEntry(
        path=f"segments/{snapshot_id}", bytes=10, digest="d", index_bytes=5, snapshot_id=snapshot_id, rows=1
    )


def part(number: int, state: str = "n", uid: str = "op", low: int = 0, high: int = 99) -> PartEntry:
    return PartEntry(
        kind="state", operator=uid, state=state, path=f"parts/{number}", offset=0, length=1, digest="d", rows=1,
        raw_bytes=1, hash_low=low, hash_high=high,
    )  # fmt: skip


def table(name: str, state: str = "n", uid: str = "op", newest: int = 0, low: int = 0, high: int = 99) -> TableEntry:
    return TableEntry(
        path=f"tables/{name}", bytes=1, digest="d", rows=1, operator=uid, state=state, hash_low=low, hash_high=high,
        last_snapshot_id=newest,
    )  # fmt: skip


def manifest_of(*segments: SegmentEntry, layers: tuple[LayerEntry, ...] = (), **changes: object) -> Manifest:
    changes = {"operators": (operator(),), **changes}
    return replace(empty_manifest(), segments=segments, layers=layers, **changes)  # type: ignore[arg-type]


def paths(manifest: Manifest, indexes: dict[int, list[PartEntry]], low: int = 0, high: int = 99) -> list[str]:
    """Everything that the walk finds, in its order."""
    stored = SnapshotState(manifest)
    parts = [
        found.path
        for entry in stored.segments()
        for found in stored.parts(
            entry, SegmentIndex("j", entry.snapshot_id, tuple(indexes[entry.snapshot_id])), low, high
        )
    ]
    return [*parts, *(found.path for found in stored.tables(low, high))]


def test_the_newest_comes_first() -> None:
    """A reader stops at the first row of a key: whatever is younger must have been seen by then. Several epochs may lie
    in one segment."""
    layers = (LayerEntry(0, 1, (table("base"),)), LayerEntry(2, 3, (table("delta"),)))
    manifest = manifest_of(segment(4), segment(5), layers=layers)
    assert paths(manifest, {4: [part(1), part(2)], 5: [part(3), part(4)]}) == [
        "parts/4",
        "parts/3",
        "parts/2",
        "parts/1",
        "tables/delta",
        "tables/base",
    ]


def test_pending_segments_are_newer_than_all_of_the_manifest() -> None:
    """Epochs that no checkpoint names yet; a restore in the same run reads them."""
    stored = SnapshotState(manifest_of(segment(4)), pending=[segment(5), segment(6)])
    assert [s.snapshot_id for s in stored.segments()] == [6, 5, 4]
    assert [s.snapshot_id for s in stored.segments(newer_than=4)] == [6, 5]


def test_what_is_older_than_its_operator_or_state_is_passed_over() -> None:
    """The name was somebody else's then. A table is as old as the newest snapshot that it holds, not as its layer."""
    state = StateEntry("n", "value", "n bigint", since=5)
    layers = (LayerEntry(0, 3, (table("old", high=9), table("folded-again", newest=6, low=10))),)
    for described in (operator(since=5), operator(states=(state,))):
        manifest = manifest_of(segment(4), segment(5), layers=layers, operators=(described,))
        assert paths(manifest, {4: [part(1)], 5: [part(2)]}) == ["parts/2", "tables/folded-again"]


def test_segments_below_the_files_of_shards_hold_no_state() -> None:
    """They only say what sources have seen; the files are the state as of their snapshot."""
    files = ShardFilesEntry(path="f", bytes=1, digest="d", backend="arrow", parallelism=1, snapshot_id=4, total_bytes=1)
    manifest = manifest_of(segment(4), segment(5), shards=files)
    assert [s.snapshot_id for s in SnapshotState(manifest).segments()] == [5]


def test_only_what_overlaps_the_hash_range_is_found() -> None:
    """Bounds are closed on both sides."""
    layers = (LayerEntry(0, 1, (table("left", low=0, high=4), table("right", low=5, high=9))),)
    manifest = manifest_of(segment(4), layers=layers)
    indexes = {4: [part(1, low=0, high=4), part(2, low=5, high=9)]}
    assert paths(manifest, indexes, 4, 4) == ["parts/1", "tables/left"]
    assert paths(manifest, indexes, 4, 5) == ["parts/2", "parts/1", "tables/left", "tables/right"]
    assert paths(manifest, indexes, 10, 99) == []


def test_a_state_that_nobody_dropped_is_damage_in_segments_and_tables() -> None:
    """It is somebody's state in the wrong place; to pass over it would lose it without a word."""
    with pytest.raises(CorruptSegment, match="parts/1 holds state 'x'"):
        paths(manifest_of(segment(4)), {4: [part(1, state="x")]})
    with pytest.raises(CorruptSegment, match="tables/t holds state 'x'"):
        paths(manifest_of(layers=(LayerEntry(0, 1, (table("t", state="x"),)),)), {})


def test_what_is_left_of_a_dropped_state_or_operator_is_passed_over() -> None:
    """It stays stored until the next materialization; after the drop the name may not appear any more."""
    dropped = operator(dropped={"x": 5})
    layers = (LayerEntry(0, 3, (table("x", state="x"), table("gone", uid="gone"))),)
    manifest = manifest_of(segment(4), layers=layers, operators=(dropped,))
    assert paths(manifest, {4: [part(1, state="x"), part(2, uid="gone")]}) == []
    with pytest.raises(CorruptSegment):
        paths(manifest_of(segment(5), operators=(dropped,)), {5: [part(1, state="x")]})


@pytest.mark.parametrize(("low", "high"), [(5, 4), (-1, 3), (0, 1 << 64)])
def test_a_range_that_cannot_be_is_damage(low: int, high: int) -> None:
    """Nothing would overlap it, and its rows would be lost without a word."""
    with pytest.raises(CorruptSegment, match="hash range that cannot be"):
        paths(manifest_of(segment(4)), {4: [part(1, low=low, high=high)]})
