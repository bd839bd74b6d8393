"""Reading snapshots as Arrow batches: every format and backend gives what a plain fold of the changes gives, and no more is fetched."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_reader import MemoryReader
from model import (
    ALL_HASHES,
    ALL_KEYS,
    KEY_DDL,
    OPERATOR,
    CountingIds,
    DictStore,
    FakeClock,
    HashOf,
    StateWriter,
    colliding,
    examples,
    folded,
    spread,
)
from shapes import SHAPES, Change, batch_of_change, plain
from test_changelog_off import Run
from test_format_2 import GOLDEN
from test_state_layouts_stored import Log, entry_of_shape, real, steps

from state_runtime import reading
from state_runtime.base.errors import CorruptSegment, InvalidConfiguration, MissingFile, SnapshotExpired
from state_runtime.changelog.versions import StateVersions
from state_runtime.materialize.grid import MaterializationSizes
from state_runtime.reading.building import SnapshotBuilder
from state_runtime.reading.fingerprint import Fingerprint, fingerprint
from state_runtime.reading.reader import SnapshotReader, hash_ranges
from state_runtime.reading.rows import RowLayout
from state_runtime.reading.sorting import sorted_rows
from state_runtime.restore.uploaded_files import direct, read_listing
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.expiry_boundary import advance_boundary
from state_runtime.snapshot.fencing import open_job_root
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, StateEntry
from state_runtime.snapshot.paths import manifest_path
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.table import HASH_MAX, hashes_of
from state_runtime.store import Store, open_store
from tests.stored import read_states


def read_all(reader: SnapshotReader, operator: str, state: str, *where: Any, **how: Any) -> list[dict[str, Any]]:
    batches = list(reader.read(operator, state, *where, **how))
    assert all(batch.num_rows for batch in batches)
    edges = [int(h) for batch in batches for h in hashes_of(batch)[[0, -1]]]
    assert edges == sorted(edges)
    # All rows of a hash are in one batch.
    assert all(before < after for before, after in zip(edges[1::2], edges[2::2], strict=False))
    assert len({str(batch.schema) for batch in batches}) <= 1
    return [row for batch in batches for row in batch.to_pylist()]


# --- rows --------------------------------------------------------------------------------------------------------


@given(
    steps, st.sampled_from([spread, colliding, real]), st.sampled_from([1, 3]), st.lists(st.integers(0, 4), max_size=6)
)
@examples(40)
def test_any_layout_read_through_log_and_tables_is_the_plain_fold(
    written: tuple[str, list[tuple[Change, str]]], hash_of: HashOf, parallelism: int, ticks: list[int]
) -> None:
    """Tombstones, clear markers and expiry, over any sequence of folds; whole, and cut into any ranges."""
    shape, epochs = written
    log = Log([entry_of_shape(shape)], parallelism)
    batches: list[pa.RecordBatch] = []
    now_ms = 0
    for number, (change, how) in enumerate(epochs):
        now_ms += ticks[number] if number < len(ticks) else 0
        batch = batch_of_change(shape, change, hash_of)
        log.epoch({shape: batch}, now_ms)
        batches.insert(0, batch)
        log.fold(how)
    expected = plain(MemoryReader(SHAPES, {shape: batches}, now_ms).rows(shape))
    reader = SnapshotReader(log.root, log.manifest, whole_bytes_max=0)
    assert plain(read_all(reader, OPERATOR, shape)) == expected
    cut = [row for low, high in hash_ranges(5) for row in read_all(reader, OPERATOR, shape, (low, high))]
    assert plain(cut) == expected
    parts = [reader.fingerprint(OPERATOR, shape, part) for part in hash_ranges(3)]
    assert sum(parts, Fingerprint()) == reader.fingerprint(OPERATOR, shape)
    values = [f.name for f in SHAPES[shape].values]
    for wanted in (values[:1], []):
        left_out = {f"value.{name}" for name in values if name not in wanted}
        rows = [{n: v for n, v in row.items() if n not in left_out} for row in read_all(reader, OPERATOR, shape)]
        assert plain(read_all(reader, OPERATOR, shape, columns=wanted)) == plain(rows)


@pytest.mark.parametrize("backend", ["arrow", "rocksdb"])
def test_files_of_shards_are_read_as_any_other_format(tmp_path: Path, backend: str) -> None:
    """With the changelog off there are only the backend's own files; a range reads those of its shards."""
    run = Run(tmp_path, parallelism=4, backend=backend)
    names = [f"k{n}" for n in range(60)]
    run.epoch(*names, wake=range(4))
    manifest = run.epoch(*names[:20])
    assert manifest.snapshot_format == "incremental"
    uid = manifest.operators[0].uid
    state = manifest.operators[0].states[0].name
    root = run.catalog.root
    schema = StateVersions(manifest.operators[0], manifest.operators[0].states[0]).declared
    expected = plain(read_states(root, manifest, uid, {state: schema}, *ALL_HASHES)[state].to_pylist())
    assert len(expected) == len(names)
    reader = SnapshotReader(root, manifest)
    assert plain(read_all(reader, uid, state)) == expected
    counting = Counting(root)
    low, high = hash_range_of_shard(2, 4)
    part = read_all(SnapshotReader(counting, manifest), uid, state, (low, high))
    assert part
    assert all(low <= row["key_hash"] <= high for row in part)
    listing = read_listing(direct(root), manifest)
    assert listing is not None
    of_the_range = {f.path for shard in listing.of_operator(uid, low, high) for f in shard.files}
    assert manifest.shards is not None
    assert counting.paths - {manifest.shards.path} <= of_the_range


@pytest.mark.parametrize(
    "name", sorted(str(p.parent.relative_to(GOLDEN.parent)) for p in GOLDEN.parent.rglob("job.json"))
)
def test_job_roots_of_older_formats_are_read(name: str, tmp_path: Path) -> None:
    """Every snapshot of each golden root, every state: what a restore reads; also one value column alone."""
    shutil.copytree(GOLDEN.parent / name, tmp_path / "golden")
    catalog = Catalog(open_store(str(tmp_path)), "golden")
    seen = 0
    for snapshot_id in catalog.snapshot_ids():
        manifest = catalog.manifest(snapshot_id)
        reader = SnapshotReader(catalog.root, manifest)
        for operator in manifest.operators:
            schemas = {state.name: reader.schema(operator.uid, state.name) for state in operator.states}
            whole = read_states(catalog.root, manifest, operator.uid, schemas, *ALL_HASHES)
            for state in operator.states:
                schema = reader.schema(operator.uid, state.name)
                found = read_all(reader, operator.uid, state.name)
                seen += len(found)
                assert plain(found) == plain(whole[state.name].to_pylist())
                for column in schema.values.names:
                    left = [
                        {n: v for n, v in row.items() if not n.startswith("value.") or n == f"value.{column}"}
                        for row in found
                    ]
                    assert plain(read_all(reader, operator.uid, state.name, columns=[column])) == plain(left)
    assert seen > 0


# --- what is fetched ---------------------------------------------------------------------------------------------


@dataclass
class Counting:
    """A store that notes what is read of it."""

    store: Store
    reads: list[tuple[str, int, int]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def read(self, path: str, bytes_max: int) -> bytes:
        body = self.store.read(path, bytes_max)
        self.reads.append((path, 0, len(body)))
        return body

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        self.reads.append((path, offset, length))
        return self.store.read_range(path, offset, length)

    @property
    def bytes(self) -> int:
        return sum(length for _, _, length in self.reads)

    @property
    def paths(self) -> set[str]:
        return {path for path, _, _ in self.reads}


def counted(root: Store, manifest: Manifest, **options: Any) -> tuple[Counting, SnapshotReader]:
    counting = Counting(root)
    return counting, SnapshotReader(counting, manifest, **{"whole_bytes_max": 0, "gap_bytes": 0, **options})  # type: ignore[arg-type]


def described(manifest: Manifest, state: StateEntry) -> Manifest:
    return replace(manifest, operators=(OperatorEntry(OPERATOR, "test", KEY_DDL, (state,)),))


COUNT = StateEntry("count", "value", "`n` bigint, `s` string")


def test_parts_outside_of_a_range_are_not_fetched() -> None:
    """Of each segment its index, and the parts of the shards that meet the range."""
    writer = StateWriter(parallelism=16)
    for epoch in range(3):
        writer.epoch(dict.fromkeys(ALL_KEYS, (epoch, "x" * 500)))
    manifest = described(writer.manifest, COUNT)
    everything, reader = counted(writer.root, manifest)
    rows = read_all(reader, OPERATOR, "count")
    some, reader = counted(writer.root, manifest)
    low, high = hash_range_of_shard(spread(ALL_KEYS[3]) >> 60, 16)
    found = read_all(reader, OPERATOR, "count", (low, high))
    assert found
    assert plain(found) == plain([row for row in rows if low <= row["key_hash"] <= high])
    indexes = sum(segment.index_bytes for segment in manifest.segments)
    assert some.bytes - indexes < (everything.bytes - indexes) / 4
    # Read again, nothing but the parts: indexes are kept.
    before = some.bytes
    read_all(reader, OPERATOR, "count", (low, high))
    assert some.bytes - before == before - indexes


def test_objects_that_tasks_uploaded_outside_of_a_range_are_not_fetched() -> None:
    writer = StateWriter(parallelism=16, inline_bytes_max=0)
    writer.epoch(dict.fromkeys(ALL_KEYS, (1, "one")))
    manifest = described(writer.manifest, COUNT)
    low, high = hash_range_of_shard(spread(ALL_KEYS[3]) >> 60, 16)
    some, reader = counted(writer.root, manifest)
    assert read_all(reader, OPERATOR, "count", (low, high))
    assert len([path for path in some.paths if "direct-" in path]) == 1


def large_table(root: Store, rows: int, group_rows: int) -> Manifest:
    """A state whose base is one large table of several row groups."""
    operator = OperatorEntry(
        OPERATOR, "test", "`id` bigint", (StateEntry("big", "value", "`n` bigint, `text` string"),)
    )
    builder = SnapshotBuilder.create(root, "big", [operator], mode="BOOTSTRAP", clock=FakeClock(), ids=CountingIds())
    draw = random.Random(7)
    table = pa.table(
        {
            "id": pa.array(range(rows), pa.int64()),
            "n": pa.array(range(rows), pa.int64()),
            "text": [f"{draw.getrandbits(256):064x}" for _ in range(rows)],
        }
    )
    layout = RowLayout(operator, operator.states[0])
    writer = builder.tables(OPERATOR, "big")
    writer._row_group_rows = group_rows
    builder.add(writer.write(sorted_rows([layout.stored(table)], layout.versions.declared)))
    return builder.commit()


def test_row_groups_and_columns_that_are_not_wanted_are_not_fetched(tmp_path: Path) -> None:
    root = open_store(str(tmp_path)).child("big")
    manifest = large_table(root, 40_000, 1_000)
    assert len(manifest.layers[0].tables) == 1
    everything, reader = counted(root, manifest)
    assert len(read_all(reader, OPERATOR, "big")) == 40_000
    narrow, reader = counted(root, manifest)
    low, high = hash_range_of_shard(7, 20)
    found = read_all(reader, OPERATOR, "big", (low, high))
    assert 500 < len(found) < 4_000
    assert narrow.bytes < everything.bytes / 4, "two or three row groups of twenty, and the footer"
    pruned, reader = counted(root, manifest)
    assert len(read_all(reader, OPERATOR, "big", columns=["n"])) == 40_000
    assert pruned.bytes < everything.bytes / 2, "the texts are most of it"
    whole, reader = counted(root, manifest, whole_bytes_max=1 << 30)
    read_all(reader, OPERATOR, "big")
    assert whole.reads == [(manifest.layers[0].tables[0].path, 0, manifest.layers[0].tables[0].bytes)]


def test_of_a_large_state_one_table_at_a_time_is_open() -> None:
    """The first rows come before the second table is looked at, however many tables there are."""
    writer = StateWriter(parallelism=4)
    writer.epoch(dict.fromkeys(ALL_KEYS, (1, "one")))
    manifest = described(writer.manifest, COUNT)
    sizes = MaterializationSizes(table_bytes=200, cells_max=64, small_bytes=0)
    manifest = folded(writer.root, manifest, "major", sizes=sizes)
    tables = [t.path for t in manifest.layers[0].tables]
    assert len(tables) >= 8
    counting, reader = counted(writer.root, manifest)
    batches = reader.read(OPERATOR, "count")
    next(batches)
    assert len(counting.paths & set(tables)) <= 3
    counting, reader = counted(writer.root, manifest)
    table = manifest.layers[0].tables[5]
    read_all(reader, OPERATOR, "count", (table.hash_low, table.hash_high))
    assert counting.paths == {table.path}


# --- fingerprints ------------------------------------------------------------------------------------------------

ODD = pa.schema(
    [
        ("a", pa.int64()),
        ("b", pa.string()),
        ("c", pa.list_(pa.string())),
        ("d", pa.map_(pa.string(), pa.int32())),
        ("e", pa.struct([("x", pa.float64()), ("y", pa.list_(pa.int8()))])),
        ("f", pa.uint64()),
        ("g", pa.binary()),
        ("h", pa.timestamp("ms", "UTC")),
        ("i", pa.decimal128(30, 2)),
        ("j", pa.null()),
    ]
)
_texts = st.none() | st.text("ab\0", max_size=2)
odd_rows = st.fixed_dictionaries(
    {
        "a": st.none() | st.integers(-2, 2),
        "b": _texts,
        "c": st.none() | st.lists(_texts, max_size=3),
        "d": st.none() | st.dictionaries(st.text("ab", max_size=1), st.none() | st.integers(0, 2), max_size=2).map(lambda d: list(d.items())),
        "e": st.none() | st.fixed_dictionaries({"x": st.none() | st.sampled_from([1.5, -2.0]), "y": st.none() | st.lists(st.integers(0, 2), max_size=2)}),
        "f": st.sampled_from([0, 1, HASH_MAX]),
        "g": st.none() | st.binary(max_size=2),
        "h": st.none() | st.integers(0, 3),
        "i": st.none() | st.integers(-3, 3),
        "j": st.none(),
    }
)  # fmt: skip


def odd(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=ODD)


def meaning(row: dict[str, Any]) -> str:
    """A row under the equality of fingerprints: maps without an order."""
    return repr(
        sorted(
            (k, sorted(dict(v).items()) if k == "d" and v else v if k != "e" or v is None else sorted(v.items()))
            for k, v in row.items()
        )
    )


@given(st.lists(odd_rows, max_size=8), st.randoms(), st.integers(1, 4))
@examples(40)
def test_the_fingerprint_knows_no_order_and_no_cuts(rows: list[dict[str, Any]], draw: Any, cuts: int) -> None:
    expected = fingerprint([odd(rows)])
    assert expected.rows == len(rows)
    shuffled = [dict(row, d=None if row["d"] is None else row["d"][::-1]) for row in rows]
    draw.shuffle(shuffled)
    # Slices: offsets that do not begin at 0.
    whole = odd(shuffled)
    step = -(-len(rows) // cuts) or 1
    assert fingerprint([whole.slice(at, step) for at in range(0, len(rows), step)]) == expected


@given(st.lists(odd_rows, min_size=1, max_size=5), odd_rows, st.integers(0, 4))
@examples(40)
def test_the_fingerprint_tells_any_changed_row(rows: list[dict[str, Any]], other: dict[str, Any], at: int) -> None:
    """Nulls are not empty, places in lists count, and so does how often a row is there."""
    changed = list(rows)
    changed[at % len(rows)] = other
    same = sorted(map(meaning, rows)) == sorted(map(meaning, changed))
    assert (fingerprint([odd(rows)]) == fingerprint([odd(changed)])) == same
    assert fingerprint([odd([*rows, rows[0]])]) != fingerprint([odd(rows)])


def test_the_fingerprint_tells_null_from_empty_and_one_column_from_its_neighbour() -> None:
    """What a chain of hashes alone would take for the same."""
    texts = pa.list_(pa.string())
    pairs: list[tuple[pa.DataType, Any, Any]] = [
        (texts, None, []),
        (texts, [], [None]),
        (texts, ["a"], ["a", None]),
        (texts, ["a", "b"], ["b", "a"]),
        (pa.list_(texts), [["a"], ["b"]], [["a", "b"], []]),
        (pa.map_(pa.string(), pa.int32()), None, []),
        (pa.map_(pa.string(), pa.int32()), [("a", None)], [("a", 0)]),
        (pa.struct([("x", pa.int8())]), None, {"x": None}),
        (pa.struct([("x", pa.string()), ("y", pa.string())]), {"x": "a", "y": None}, {"x": None, "y": "a"}),
    ]
    for kind, one, other in pairs:
        schema = pa.schema([("c", kind)])
        prints = [Fingerprint.of(pa.RecordBatch.from_pylist([{"c": value}], schema=schema)) for value in (one, other)]
        assert prints[0] != prints[1], (kind, one, other)
    both = pa.schema([("a", pa.string()), ("b", pa.string())])
    rows = [{"a": "x", "b": None}, {"a": None, "b": "x"}]
    assert Fingerprint.of(pa.RecordBatch.from_pylist(rows[:1], schema=both)) != Fingerprint.of(
        pa.RecordBatch.from_pylist(rows[1:], schema=both)
    )


# --- the plain reader --------------------------------------------------------------------------------------------


def stored(tmp_path: Path) -> str:
    """A job root on disk with one state; keys are hashed as Spark does."""
    writer = StateWriter(root=open_store(str(tmp_path)).child("job"), hash_of=real)
    info = open_job_root(writer.root, "job", clock=FakeClock(), ids=CountingIds(9))
    writer.manifest = replace(writer.manifest, job_uid=info.uid)
    writer.epoch({key: (number, "old") for number, key in enumerate(ALL_KEYS)})
    writer.epoch({ALL_KEYS[0]: None, ALL_KEYS[1]: (100, "new")})
    manifest = described(writer.manifest, COUNT)
    writer.root.put(manifest_path(manifest.snapshot_id), manifest.encode())
    return str(tmp_path / "job")


def test_anybody_reads_a_state_without_spark(tmp_path: Path) -> None:
    snapshot = reading.open(stored(tmp_path))
    assert snapshot.operators == (OPERATOR,)
    (state,) = snapshot.states()
    assert (state.operator, state.name, state.kind) == (OPERATOR, "count", "value")
    assert state.columns == ("name", "score", "n", "s")
    assert state.key_columns == ("name", "score")
    table = snapshot.state(OPERATOR, "count").to_arrow(columns=["s", "name"])
    assert table.column_names == ["s", "name"]
    assert table.num_rows == len(ALL_KEYS) - 1
    frame = state.to_pandas()
    assert sorted(frame[frame.s == "new"]["n"]) == [100]
    name, score = ALL_KEYS[1]
    key = {"name": name, "score": float("nan") if score == "nan" else score}
    assert state.to_arrow(columns=["n"], keys=[key, {"name": "nobody", "score": 0.0}]).to_pylist() == [{"n": 100}]
    assert state.fingerprint().rows == len(ALL_KEYS) - 1
    assert snapshot.place.endswith("@2")


def test_what_is_not_there_is_said_with_what_is(tmp_path: Path) -> None:
    snapshot = reading.open(stored(tmp_path))
    with pytest.raises(InvalidConfiguration, match="no operator 'nobody'; it has: op"):
        snapshot.state("nobody", "count")
    with pytest.raises(InvalidConfiguration, match="no state 'sums'; it has: count"):
        snapshot.state(OPERATOR, "sums")
    state = snapshot.state(OPERATOR, "count")
    with pytest.raises(InvalidConfiguration, match="no column 'x'; it has: name, score, n, s"):
        state.to_arrow(columns=["x"])
    with pytest.raises(InvalidConfiguration, match="not both"):
        state.to_arrow(keys=[{}], hash_range=(0, 1))
    with pytest.raises(InvalidConfiguration, match="the lower one first"):
        state.to_arrow(hash_range=(2, 1))
    empty = state.to_arrow(hash_range=(0, 0))
    assert empty.schema.names == list(state.columns)


def test_a_snapshot_that_is_given_up_while_it_is_read_says_so(tmp_path: Path) -> None:
    """A missing file of a snapshot that exists is damage; of one that was given up it is not."""
    snapshot = reading.open(stored(tmp_path))
    for segment in snapshot.manifest.segments:
        snapshot.root.delete(segment.path)
    with pytest.raises(MissingFile, match="is missing in"):
        snapshot.state(OPERATOR, "count").to_arrow()
    snapshot.root.put(manifest_path(3), b"a newer one")
    advance_boundary(snapshot.root, lambda now: replace(now, snapshot_id=2), clock=FakeClock(), ids=CountingIds(5))
    with pytest.raises(SnapshotExpired, match="expired while it was read"):
        snapshot.state(OPERATOR, "count").to_arrow()


def test_damage_is_an_error_that_names_the_file() -> None:
    """Every byte of the objects that a read touches: either the rows are right, or it says which file is damaged."""
    writer = StateWriter()
    writer.epoch(dict.fromkeys(ALL_KEYS[:4], (1, "one")))
    base = folded(writer.root, described(writer.manifest, COUNT), "major")
    writer.manifest = base
    writer.epoch(dict.fromkeys(ALL_KEYS[2:6], (2, "two")))
    manifest = described(writer.manifest, COUNT)
    assert isinstance(writer.root, DictStore)
    expected = plain(read_all(SnapshotReader(writer.root, manifest, whole_bytes_max=0), OPERATOR, "count"))
    draw = random.Random(3)
    paths = [*(s.path for s in manifest.segments), *(t.path for t in manifest.layers[0].tables)]
    errors: list[str] = []
    for path in paths:
        body = writer.root.read(path, 1 << 30)
        for at in sorted(draw.sample(range(len(body)), min(len(body), 60))):
            writer.root.put(path, body[:at] + bytes([body[at] ^ 0x41]) + body[at + 1 :])
            for whole in (0, 1 << 30):
                try:
                    found = read_all(SnapshotReader(writer.root, manifest, whole_bytes_max=whole), OPERATOR, "count")
                except CorruptSegment as error:
                    errors.append(str(error))
                else:
                    assert whole == 0 or path not in {t.path for t in manifest.layers[0].tables}, "its digest is known"
                    assert plain(found) == expected
        writer.root.put(path, body)
    assert len(errors) > 50
    assert all(any(path in error for path in paths) for error in errors)


def test_hash_ranges_are_all_hashes_once() -> None:
    for count in (0, 1, 3, 256, 100_000):
        ranges = hash_ranges(count)
        assert ranges[0][0] == 0
        assert ranges[-1][1] == HASH_MAX
        assert all(before[1] + 1 == after[0] for before, after in pairwise(ranges))


def test_equal_hashes_of_different_keys_are_kept_apart() -> None:
    """Two keys of one hash, each removed and put again: by the columns, not by the hash."""
    schema = SHAPES["value"]
    log = Log([entry_of_shape("value")], 1)
    one, two = ALL_KEYS[6], ALL_KEYS[11]

    def same(key: Any) -> int:
        return 77

    log.epoch(
        {
            "value": batch_of_change(
                "value", Change(rows={(one, None): (1, "a", None), (two, None): (2, "b", None)}), same
            )
        }
    )
    log.epoch({"value": batch_of_change("value", Change(rows={(one, None): None}), same)})
    found = read_all(SnapshotReader(log.root, log.manifest), OPERATOR, "value")
    assert [row["value.n"] for row in found] == [2]
    assert np.uint64(77) == found[0]["key_hash"]
    assert schema.entries is None
