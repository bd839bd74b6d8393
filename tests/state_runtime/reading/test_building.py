"""Building snapshots from rows: what is read of them is what was given, and what cannot be a state is refused before there is one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_reader import MemoryReader
from model import ALL_KEYS, KEY_DDL, OPERATOR, CountingIds, DictStore, FakeClock, examples, key_columns
from shapes import SHAPES, Change, batch_of_change, changes_of, plain
from test_state_layouts_stored import Log, entry_of_shape, real, steps

from state_runtime import reading
from state_runtime.base import faults
from state_runtime.base.errors import InvalidConfiguration, InvalidData, MissingSnapshot, SnapshotInUse
from state_runtime.base.limits import KIB
from state_runtime.driver.start_position import StartFrom, StartPosition
from state_runtime.reading.building import SnapshotBuilder, settled
from state_runtime.reading.export import export_state
from state_runtime.reading.reader import SnapshotReader
from state_runtime.reading.rows import RowLayout
from state_runtime.reading.snapshot import ReadableSnapshot
from state_runtime.reading.sorting import sorted_rows
from state_runtime.reading.tables import TableWriter, cell_bits
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.document import FORMAT_VERSION
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, SourcePosition, StateEntry, TimeEntry
from state_runtime.snapshot.paths import BUILDING_FILE, manifest_path
from state_runtime.state.table import StateSchema, entries_of, hashes_of
from state_runtime.store import Store, open_store


def operator_of(*states: StateEntry) -> OperatorEntry:
    return OperatorEntry(OPERATOR, "test", KEY_DDL, states)


def builder_of(root: Store, *states: StateEntry) -> SnapshotBuilder:
    return SnapshotBuilder.create(
        root, "job", [operator_of(*states)], mode="BOOTSTRAP", clock=FakeClock(), ids=CountingIds()
    )


def read_rows(reader: SnapshotReader, state: str) -> list[dict[str, Any]]:
    return [row for batch in reader.read(OPERATOR, state) for row in batch.to_pylist()]


def batch(shape: str, rows: dict[Any, Any]) -> pa.RecordBatch:
    return batch_of_change(shape, Change(rows=rows), real)


# --- round trips -------------------------------------------------------------------------------------------------


@given(steps, st.integers(0, 5), st.integers(0, 5))
@examples(30)
def test_a_snapshot_written_anew_is_the_same_rows_in_canonical_form(
    written: tuple[str, list[tuple[Change, str]]], bits: int, now_ms: int
) -> None:
    """From any log and tables: the live rows, the fingerprint, what is due next; one layer, cells of the grid, no history."""
    shape, epochs = written
    log = Log([entry_of_shape(shape)])
    batches: list[pa.RecordBatch] = []
    for change, how in epochs:
        changed = batch_of_change(shape, change, real)
        log.epoch({shape: changed}, now_ms)
        batches.insert(0, changed)
        log.fold(how)
    source = SnapshotReader(log.root, log.manifest)
    builder = builder_of(DictStore().child("job"), entry_of_shape(shape))
    result = builder.write(OPERATOR, shape, source.read(OPERATOR, shape), bits=bits)
    manifest = builder.commit(parallelism=3, time=log.manifest.time)
    assert manifest.snapshot_format == "canonical"
    assert manifest.origins[0].mode == "BOOTSTRAP"
    reader = SnapshotReader(builder.root, manifest)
    rows = MemoryReader(SHAPES, {shape: batches}, now_ms).rows(shape)
    assert plain(read_rows(reader, shape)) == plain(rows)
    assert reader.fingerprint(OPERATOR, shape) == source.fingerprint(OPERATOR, shape)
    assert dict(result.fingerprints).get((OPERATOR, shape), source.fingerprint(OPERATOR, shape)).rows == len(rows)
    width = 1 << (64 - bits)
    for layer in manifest.layers:
        assert [t.hash_high - t.hash_low + 1 for t in layer.tables] == [width] * len(layer.tables)
        assert all(t.hash_low % width == 0 for t in layer.tables)
    due = [row["due"] for row in rows if row.get("due") is not None]
    assert manifest.operators[0].next_due_ms == min(due, default=None)


@pytest.mark.parametrize("where", ["disk", "s3"])
def test_a_snapshot_is_built_and_read_on_any_store(
    where: str, tmp_path: Path, s3_location: tuple[str, dict[str, Any]]
) -> None:
    """Rows in any order, more than fit into memory at once; then by key, by column and as a file."""
    url, options = (str(tmp_path / "store"), {}) if where == "disk" else s3_location
    entry = entry_of_shape("value")
    root = open_store(url, options).child("seed")
    builder = builder_of(root, entry)
    rows = {(key, None): (number, "text", None) for number, key in enumerate(ALL_KEYS)}
    whole = batch("value", rows)
    shuffled = [whole.slice(at, 1) for at in np.random.default_rng(3).permutation(whole.num_rows)]
    builder.write(OPERATOR, "value", shuffled, in_order=False, bits=2, bytes_max=100)
    manifest = builder.commit()
    snapshot = reading.open(f"{url}/seed", options)
    assert snapshot.manifest == manifest
    state = snapshot.state(OPERATOR, "value")
    assert state.to_arrow(columns=["n"]).num_rows == len(ALL_KEYS)
    name, score = ALL_KEYS[-1]
    found = state.to_arrow(keys=[{"name": name, "score": score}]).to_pylist()
    assert [row["n"] for row in found] == [len(ALL_KEYS) - 1]
    shares: list[float] = []
    for suffix in (".parquet", ".arrow", ".csv"):
        done = export_state(state, tmp_path / f"value{suffix}", on_progress=shares.append)
        assert done.rows == len(ALL_KEYS)
    assert shares[-1] == 1.0
    import pyarrow.parquet as pq

    assert plain(pq.read_table(tmp_path / "value.parquet").to_pylist()) == plain(state.to_arrow().to_pylist())
    with pytest.raises(InvalidConfiguration, match="is there already"):
        export_state(state, tmp_path / "value.csv")
    with pytest.raises(InvalidConfiguration, match="suffix"):
        export_state(state, tmp_path / "value.json")
    assert not list(tmp_path.glob(".value*"))


@given(st.sampled_from([s for s in sorted(SHAPES) if not s.startswith("rows")]), st.data())
@examples(30)
def test_what_was_read_as_a_table_is_written_as_one(shape: str, data: Any) -> None:
    """Values, lists, maps and timers, with and without a TTL: the table that a person sees becomes the same state."""
    log = Log([entry_of_shape(shape)])
    for change in data.draw(st.lists(changes_of(shape), min_size=1, max_size=3)):
        log.epoch({shape: batch_of_change(shape, change, real)})
    log.root.put(manifest_path(log.manifest.snapshot_id), log.manifest.encode())
    info = Catalog(log.store, "job").job_info()
    shown = ReadableSnapshot(log.root, info, log.manifest).state(OPERATOR, shape).to_arrow()
    builder = builder_of(DictStore().child("job"), entry_of_shape(shape))
    layout = RowLayout(builder.operators[0], builder.operators[0].states[0])
    builder.write(OPERATOR, shape, [layout.stored(shown)] if shown.num_rows else [], in_order=False)
    manifest = builder.commit(time=log.manifest.time)
    again = ReadableSnapshot(builder.root, builder.info, manifest).state(OPERATOR, shape).to_arrow()
    assert plain(again.to_pylist()) == plain(shown.to_pylist())


@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=60), st.integers(1, 4), st.sampled_from([1, 300, 1 << 20]))
@examples(30)
def test_rows_that_do_not_fit_are_sorted_all_the_same(hashes: list[int], copies: int, bytes_max: int) -> None:
    """Also where all have one hash, or differ in the last bits only; equal ones stay in order."""
    schema = StateSchema(pa.schema([("k", pa.int64())]), pa.schema([]), pa.schema([]))
    many = [h for h in hashes for _ in range(copies)] + [7] * 5 + [8, (1 << 64) - 1]
    rows = [
        schema.batch(
            np.array([h], dtype=np.uint64), None, [pa.array([n])], [], entries=np.array([1 + n % 3], dtype=np.uint64)
        )
        for n, h in enumerate(many)
    ]
    found = list(sorted_rows(rows, schema, bytes_max=bytes_max))
    expected = sorted(((h, 1 + n % 3, n) for n, h in enumerate(many)), key=lambda row: row[:2])
    seen = [
        (int(h), int(e), k)
        for b in found
        for h, e, k in zip(hashes_of(b), entries_of(b), b.column("key.k").to_pylist(), strict=True)
    ]
    assert seen == expected
    if bytes_max == 1 and len(set(hashes)) > 5:
        assert len(found) > 1, "not all of it was in memory at once"


def test_the_number_of_tables_follows_the_size() -> None:
    assert [cell_bits(size) for size in (0, 1, 32 << 20, (32 << 20) + 1, 100 << 20, 1 << 50)] == [0, 0, 0, 1, 2, 8]


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["value", "list", "map", "timers"])
def test_an_identity_twice_is_refused_and_no_snapshot_is_made(shape: str) -> None:
    root = DictStore().child("job")
    builder = builder_of(root, entry_of_shape(shape))
    part = {"value": None, "list": 3, "map": "a", "timers": 5}[shape]
    one = batch(shape, {(ALL_KEYS[1], part): (1, "x", 5)})
    builder.write(OPERATOR, shape, [one])
    with pytest.raises(InvalidData, match=r"1 rows have a (key|entry of a key) that another row has"):
        builder_of(DictStore().child("job"), entry_of_shape(shape)).write(OPERATOR, shape, [one, one])
    assert Catalog.of_root(root).latest() is None


def test_rows_that_are_no_state_are_refused() -> None:
    entry = entry_of_shape("value")
    rows = {(key, None): (1, "x", None) for key in ALL_KEYS[:6]}
    good = batch("value", rows)

    def refused(why: str, *batches: pa.RecordBatch, states: StateEntry = entry) -> None:
        with pytest.raises(InvalidData, match=why):
            builder_of(DictStore().child("job"), states).write(OPERATOR, states.name, batches)

    refused("not sorted", good.slice(3), good.slice(0, 3))
    refused("live rows only", batch("value", {(ALL_KEYS[0], None): None}))
    wrong = good.set_column(0, good.schema.field(0), pa.array(hashes_of(good) + np.uint64(1), pa.uint64()))
    refused("not the hash of its key", wrong)
    refused("types must match", good, states=replace(entry, schema="`n` int, `s` string"))
    refused("another layout", batch("list", {(ALL_KEYS[0], 1): (1, "x", None)}))


def test_columns_that_are_not_the_states_are_refused_by_name_and_never_by_value() -> None:
    layout = RowLayout(operator_of(entry_of_shape("list")), entry_of_shape("list"))
    keys = dict(zip(("name", "score"), key_columns([ALL_KEYS[1]]), strict=True))
    good = {**keys, "position": pa.array([0]), "n": pa.array([1]), "s": pa.array(["x"])}
    assert layout.stored(pa.table(good)).num_rows == 1
    with pytest.raises(InvalidConfiguration, match="missing: s"):
        layout.stored(pa.table({n: c for n, c in good.items() if n != "s"}))
    with pytest.raises(InvalidConfiguration, match="unknown: extra"):
        layout.stored(pa.table({**good, "extra": pa.array([1])}))
    for position in (-1, 1 << 28, None):
        with pytest.raises(InvalidData, match="place of each element"):
            layout.stored(pa.table({**good, "position": pa.array([position], pa.int64())}))
    with pytest.raises(InvalidData, match="column 'n' is string") as caught:
        layout.stored(pa.table({**good, "n": pa.array(["secret"])}))
    assert "secret" not in str(caught.value)
    rows = RowLayout(operator_of(entry_of_shape("rows-due")), entry_of_shape("rows-due"))
    with pytest.raises(InvalidConfiguration, match="form is the operator's own"):
        rows.stored(pa.table(good))


def test_times_without_a_zone_are_refused() -> None:
    layout = RowLayout(operator_of(entry_of_shape("timers")), entry_of_shape("timers"))
    keys = dict(zip(("name", "score"), key_columns([ALL_KEYS[1]]), strict=True))
    with pytest.raises(InvalidData, match="time zone"):
        layout.stored(pa.table({**keys, "due": pa.array([5], pa.timestamp("ms"))}))
    with pytest.raises(InvalidData, match="a timer has no time"):
        layout.stored(pa.table({**keys, "due": pa.array([None], pa.timestamp("us", "UTC"))}))
    stored = layout.stored(pa.table({**keys, "due": pa.array([5_000], pa.timestamp("us", "UTC"))}))
    assert stored.column("due").to_pylist() == [5]


def test_a_place_with_snapshots_is_left_alone() -> None:
    """Also if the other one was made after this one began."""
    root = DictStore().child("job")
    first, second = builder_of(root, entry_of_shape("value")), builder_of(root, entry_of_shape("value"))
    rows = batch("value", {(ALL_KEYS[0], None): (1, "x", None)})
    for one in (first, second):
        one.writer = one.ids.uid()
        one.write(OPERATOR, "value", [rows])
    manifest = first.commit()
    with pytest.raises(InvalidConfiguration, match="has snapshots already"):
        second.commit()
    with pytest.raises(InvalidConfiguration, match="has snapshots already"):
        builder_of(root, entry_of_shape("value"))
    assert Catalog.of_root(root).latest() == manifest


@pytest.mark.parametrize("where", ["disk", "s3"])
def test_a_job_starts_from_a_built_snapshot_and_needs_nothing_of_it(
    where: str, tmp_path: Path, s3_location: tuple[str, dict[str, Any]]
) -> None:
    """In another place of the store, or again in its own root: state, description and origin are there."""
    url, options = (str(tmp_path / "store"), {}) if where == "disk" else s3_location
    store = open_store(url, options)
    entry = entry_of_shape("timers")
    builder = builder_of(store.child("seed"), entry)
    rows = batch("timers", {(key, 5): (0, "", 5) for key in ALL_KEYS})
    builder.write(OPERATOR, "timers", [rows])
    seed = builder.commit()
    expected = SnapshotReader(builder.root, seed).fingerprint(OPERATOR, "timers")
    ids = CountingIds(77)
    beginning = StartPosition(
        Catalog(store, "child", FakeClock()),
        start_from=StartFrom(f"{url}/seed"),
        storage_options=options,
        clock=FakeClock(),
        ids=ids,
    )
    assert beginning.look() == seed

    def empty(info: JobInfo) -> Manifest:
        return Manifest(FORMAT_VERSION, info.uid, 0, 0, "", "fencing", 0, 1)

    first = beginning.open(empty, host="h", pid=1).last
    own = StartPosition(Catalog(store, "seed", FakeClock()), clock=FakeClock(), ids=ids)
    assert own.look() == seed
    for table in seed.layers[0].tables:
        builder.root.delete(table.path)
    assert first.snapshot_id == seed.snapshot_id + 1
    assert [origin.mode for origin in first.origins] == ["BOOTSTRAP", "NO_CLAIM"]
    assert first.operators[0].next_due_ms == 5
    assert SnapshotReader(store.child("child"), first).fingerprint(OPERATOR, "timers") == expected


def test_without_its_last_step_a_build_left_nothing_that_is_read_and_can_be_repeated() -> None:
    root = DictStore().child("job")
    rows = batch("value", {(ALL_KEYS[0], None): (1, "x", None)})
    builder_of(root, entry_of_shape("value")).write(OPERATOR, "value", [rows])
    assert Catalog.of_root(root).latest() is None
    again = SnapshotBuilder.create(
        root, "job", [operator_of(entry_of_shape("value"))], mode="BOOTSTRAP", clock=FakeClock(), ids=CountingIds(4)
    )
    again.write(OPERATOR, "value", [rows])
    assert len(read_rows(SnapshotReader(root, again.commit()), "value")) == 1


def begin(store: Store) -> Manifest | None:
    """What a start without any words would go on from; its writing part is run too."""
    beginning = StartPosition(Catalog(store, "job", FakeClock()), clock=FakeClock(), ids=CountingIds(9))
    found = beginning.look()
    beginning.open(lambda info: Manifest(FORMAT_VERSION, info.uid, 0, 0, "", "fencing", 0, 1), host="h", pid=1)
    return found


@pytest.mark.parametrize("crash", ["build-begun", "tables", "build-committed"])
def test_a_build_that_was_killed_is_never_begun_empty_and_can_be_repeated(
    crash: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root with a job.json and no snapshot looks like a job that begins empty: the imported state would be lost without
    a word."""
    store = DictStore()
    root = store.child("job")
    rows = batch("value", {(ALL_KEYS[0], None): (1, "x", None)})

    def build() -> Manifest:
        builder = builder_of(root, entry_of_shape("value"))
        builder.write(OPERATOR, "value", [rows])
        faults.reach("tables")
        return builder.commit()

    def killed(name: str) -> None:
        if name == crash:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(faults, "reach", killed)
        with pytest.raises(KeyboardInterrupt):
            build()
    if crash == "build-committed":
        found = begin(store)
        assert found is not None
        assert found.layers
        return
    before = sorted(o.path for o in root.list_objects(""))
    with pytest.raises(SnapshotInUse, match="has not ended, or was cut"):
        begin(store)
    assert sorted(o.path for o in root.list_objects("")) == before
    made = build()
    assert not root.exists(BUILDING_FILE)
    assert begin(store) == made


def test_a_start_that_looked_before_a_build_began_does_not_fence_it() -> None:
    """The look finds nothing, then an import begins: the run is refused when it opens, and the import ends."""
    store = DictStore()
    late = StartPosition(Catalog(store, "job", FakeClock()), clock=FakeClock(), ids=CountingIds(9))
    assert late.look() is None
    builder = builder_of(store.child("job"), entry_of_shape("value"))
    with pytest.raises(SnapshotInUse, match="has not ended, or was cut"):
        late.open(lambda info: Manifest(FORMAT_VERSION, info.uid, 0, 0, "", "fencing", 0, 1), host="h", pid=1)
    made = builder.commit()
    assert begin(store) == made


def test_data_without_a_snapshot_is_never_begun_empty() -> None:
    """A copy that lacks `snapshots/`, or what the import of an earlier version left."""
    store = DictStore()
    root = store.child("job")
    builder = builder_of(root, entry_of_shape("value"))
    builder.write(OPERATOR, "value", [batch("value", {(ALL_KEYS[0], None): (1, "x", None)})])
    root.delete(BUILDING_FILE)
    with pytest.raises(MissingSnapshot, match=r"holds data \(tables/.*copy its snapshots/ too"):
        begin(store)


def test_a_description_is_settled_to_its_newest_columns() -> None:
    old = OperatorEntry(
        OPERATOR,
        "test",
        KEY_DDL,
        (replace(entry_of_shape("value"), since=4),),
        since=3,
        dropped={"x": 5},
        next_due_ms=7,
    )
    new = settled(old)
    assert (new.since, new.dropped, new.next_due_ms, new.states[0].since) == (0, {}, None, 0)


def test_one_table_is_in_memory_a_row_group_at_a_time(tmp_path: Path) -> None:
    """The file grows on disk while rows come; what the writer holds does not."""
    entry = entry_of_shape("value")
    whole = batch("value", {(key, None): (1, "x" * 200, None) for key in ALL_KEYS})
    writer = TableWriter(
        open_store(str(tmp_path / "store")),
        operator_of(entry),
        entry,
        snapshot_id=1,
        writer="w",
        ids=CountingIds(),
        scratch=tmp_path,
        row_group_rows=5,
    )
    sizes: list[int] = []

    def rows() -> Any:
        for at in range(whole.num_rows):
            sizes.append(sum(p.stat().st_size for p in tmp_path.glob(".table-*/*")))
            yield whole.slice(at, 1)

    written = writer.write(rows())
    assert written.rows == whole.num_rows
    assert sizes == sorted(sizes)
    assert 0 < sizes[-1] < 64 * KIB
    assert not list(tmp_path.glob(".table-*"))
    assert TimeEntry(0).watermark_ms == 0


def test_a_snapshot_that_is_built_with_positions_by_name_has_the_format_that_knows_them() -> None:
    """An import of a query whose sources the job names; it failed when all of its rows had been written."""
    position = SourcePosition(3, "meta", "v1\n{}\n1\n2", "", "v1\n{}", names=("orders", "refunds"))
    built = builder_of(DictStore().child("job"), entry_of_shape("value")).commit(source=position)
    assert (built.format_version, built.source) == (6, position)
