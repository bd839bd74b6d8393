"""Folding the changelog into tables: the same state, fewer files, and only what changed is rewritten."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import (
    ALL_HASHES,
    ALL_KEYS,
    OPERATOR,
    SCHEMA,
    STATE,
    Changes,
    CountingIds,
    DictStore,
    FakeClock,
    HashOf,
    StateWriter,
    after,
    epochs,
    examples,
    folded,
    hash_functions,
    recorded,
    rows_of,
    seeds,
)

from state_runtime.base.errors import CorruptData, CorruptSegment, InvalidData, MissingSnapshot, Unavailable
from state_runtime.base.limits import GIB, MANIFEST_BYTES_MAX, MIB
from state_runtime.base.settings import JobSettings, MaterializationMode, MaterializationSettings
from state_runtime.changelog import reader, source_log
from state_runtime.changelog import segment as segment_format
from state_runtime.changelog.snapshot_state import StoredTable
from state_runtime.changelog.writer import source_log_changes
from state_runtime.materialize import MaterializationSizes, apply, due, materialize, source_logs
from state_runtime.materialize import write_tables as fold
from state_runtime.materialize.grid import grid, threshold
from state_runtime.materialize.plan import MaterializationPlan
from state_runtime.materialize.records import fits, holds, open_pins, record_ids
from state_runtime.materialize.run import Heart, fold_here
from state_runtime.materialize.write_tables import TablesContext, WrittenTables
from state_runtime.snapshot.manifest import (
    LayerEntry,
    Manifest,
    SegmentEntry,
    ShardFilesEntry,
    SourcePosition,
    TableEntry,
)
from state_runtime.snapshot.paths import manifest_path
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.table import HASH_MAX
from state_runtime.store import Store
from tests.job_settings import job_settings
from tests.stored import read_source_log, read_states, write_segment

SIZES = st.sampled_from(
    [
        MaterializationSizes(),
        MaterializationSizes(table_bytes=1, small_bytes=0, unit_bytes=1, cells_max=8, deltas_max=2, unfolded_bytes=1),
        MaterializationSizes(
            table_bytes=3_000, small_bytes=0, unit_bytes=10_000, cells_max=256, deltas_max=3, sampled_rows=2
        ),
    ]
)
MODES = st.sampled_from(["none", "auto", "auto", "minor", "major"])
RATIOS = st.sampled_from([0.05, 0.5, 100.0])


def state_of(root: Store, manifest: Manifest, low: int = ALL_HASHES[0], high: int = ALL_HASHES[1]) -> Any:
    return rows_of(read_states(root, manifest, OPERATOR, {STATE: SCHEMA}, low, high)[STATE])


def check_grid(manifest: Manifest) -> None:
    """Base tables are disjoint cells; a delta lies within one of them, or where there is none."""
    cells = sorted((t.hash_low, t.hash_high) for t in manifest.layers[0].tables)
    for low, high in cells:
        width = high - low + 1
        assert width & (width - 1) == 0
        assert low % width == 0
    assert all(a[1] < b[0] for a, b in pairwise(cells))
    for layer in manifest.layers[1:]:
        assert layer.tables, "a layer without tables is of no use"
        ranges = sorted((t.hash_low, t.hash_high) for t in layer.tables)
        assert all(a[1] < b[0] for a, b in pairwise(ranges)), "the order within a layer decides nothing"
        for t in layer.tables:
            over = [c for c in cells if c[0] <= t.hash_high and c[1] >= t.hash_low]
            assert len(over) <= 1
            assert all(c[0] <= t.hash_low and t.hash_high <= c[1] for c in over)


@given(st.lists(st.tuples(epochs.map(lambda e: e[0]), MODES), min_size=1, max_size=12), hash_functions, SIZES, RATIOS)
@examples(60)
def test_any_sequence_of_folds_keeps_the_dictionary(
    steps: list[tuple[Changes, str]], hash_of: HashOf, sizes: MaterializationSizes, ratio: float
) -> None:
    """Deltas keep tombstones over the base; the base has none. Whatever cells and units are."""
    writer = StateWriter(hash_of=hash_of, parallelism=3)
    settings = JobSettings(materialization=MaterializationSettings(ratio=ratio))
    done: list[Changes] = []
    for changed, mode in steps:
        writer.epoch(changed)
        done.append(changed)
        if mode == "none":
            continue
        how: MaterializationMode = "auto" if mode == "auto" else "minor" if mode == "minor" else "major"
        writer.manifest = folded(writer.root, writer.manifest, how, settings=settings, sizes=sizes)
        assert writer.manifest.segments == ()
        assert state_of(writer.root, writer.manifest) == after(done)
        check_grid(writer.manifest)
        if mode == "major":
            assert len(writer.manifest.layers) == 1
            rows = sum(t.rows for t in writer.manifest.layers[0].tables)
            assert rows == len(after(done)), "a base holds no tombstones"
    for shard in range(5):
        low, high = hash_range_of_shard(shard, 5)
        expected = {k: v for k, v in after(done).items() if low <= hash_of(k) <= high}
        assert state_of(writer.root, writer.manifest, low, high) == expected


def quarters(writer: StateWriter) -> MaterializationSizes:
    """Sizes that give the writer's state a few cells."""
    writer.epoch({(str(n), 0.0): (n, "x" * 20) for n in range(400)})
    sizes = MaterializationSizes(table_bytes=writer.manifest.log_bytes // 4, small_bytes=0)
    writer.manifest = folded(writer.root, writer.manifest, "major", sizes=sizes)
    assert len(writer.manifest.layers[0].tables) >= 3
    return sizes


def test_a_fold_of_few_changes_shares_the_tables_of_all_other_cells() -> None:
    """Unchanged files are named by both manifests: a snapshot costs what changed."""
    writer = StateWriter(parallelism=2)
    sizes = quarters(writer)
    before = {t.path for t in writer.manifest.layers[0].tables}
    low, high = next((t.hash_low, t.hash_high) for t in writer.manifest.layers[0].tables)
    inside = [(str(n), 0.0) for n in range(400) if low <= writer.hash_of((str(n), 0.0)) <= high]
    writer.epoch(dict.fromkeys(inside, (-1, "changed")))
    record = recorded(writer.root, writer.manifest, "auto", sizes=sizes)
    assert record.mode == "major"
    assert (len(record.base), len(record.deltas), len(record.removed)) == (1, 0, 1)
    assert record.shared_tables == len(before) - 1
    writer.manifest = apply(writer.manifest, record)
    assert len(before & {t.path for t in writer.manifest.layers[0].tables}) == len(before) - 1
    assert all(state_of(writer.root, writer.manifest)[key] == (-1, "changed") for key in inside)


def test_few_changes_of_a_cell_become_a_delta_and_many_a_new_base() -> None:
    """The threshold is a share of the cell's own base."""
    writer = StateWriter(parallelism=2)
    sizes = quarters(writer)
    writer.epoch({("1", 0.0): None})
    record = recorded(writer.root, writer.manifest, sizes=sizes)
    assert (record.mode, len(record.base), len(record.deltas), record.removed) == ("minor", 0, 1, ())
    writer.manifest = apply(writer.manifest, record)
    assert ("1", 0.0) not in state_of(writer.root, writer.manifest)
    writer.epoch({(str(n), 0.0): (n, "y" * 20) for n in range(400)})
    record = recorded(writer.root, writer.manifest, sizes=sizes)
    assert record.mode == "major"
    assert record.deltas == ()
    writer.manifest = apply(writer.manifest, record)
    assert len(writer.manifest.layers) == 1
    assert state_of(writer.root, writer.manifest)["7", 0.0] == (7, "y" * 20)


@pytest.mark.parametrize("sampled_rows", [10_000, 200], ids=["all of it", "some of it"])
def test_a_base_is_due_by_what_folding_leaves_of_a_log(sampled_rows: int) -> None:
    """Rows that changed again and again are one row of a delta, however long the log of them is."""
    sizes = MaterializationSizes(small_bytes=0, sampled_rows=sampled_rows)
    writer = StateWriter(parallelism=2)
    writer.epoch({(str(n), 0.0): (n, "x" * 20) for n in range(2_000)})
    writer.manifest = folded(writer.root, writer.manifest, sizes=sizes)
    for number in range(8):
        writer.epoch({(str(n), 0.0): (number, "x" * 20) for n in range(150)})
    record = recorded(writer.root, writer.manifest, sizes=sizes)
    assert record.mode == "minor"
    assert sum(t.rows for t in record.deltas) == 150


def test_deltas_above_a_cell_stay_few() -> None:
    """A delta takes in those that are not larger: their number grows with the logarithm of the changes."""
    writer = StateWriter(parallelism=1)
    sizes = quarters(writer)
    settings = JobSettings(materialization=MaterializationSettings(ratio=100))
    most = written = log = 0
    for number in range(64):
        writer.epoch({(f"new-{number}-{n}", 0.0): (n, "") for n in range(8)})
        log += writer.manifest.log_bytes
        record = recorded(writer.root, writer.manifest, "minor", settings=settings, sizes=sizes)
        written += record.written_bytes
        writer.manifest = apply(writer.manifest, record)
        cells = [(t.hash_low, t.hash_high) for t in writer.manifest.layers[0].tables]
        above = [t for layer in writer.manifest.layers[1:] for t in layer.tables]
        most = max(most, *(sum(low <= t.hash_low <= high for t in above) for low, high in cells))
    assert most <= 8
    assert len(state_of(writer.root, writer.manifest)) == 400 + 64 * 8


def test_segments_written_meanwhile_stay() -> None:
    """The job goes on while the fold runs; what it wrote lies on top of the new tables."""
    writer = StateWriter()
    writer.epoch({ALL_KEYS[0]: (1, "a"), ALL_KEYS[1]: (1, "b")})
    record = recorded(writer.root, writer.manifest)
    writer.epoch({ALL_KEYS[0]: None})
    writer.epoch({ALL_KEYS[2]: (3, "c")})
    assert fits(writer.manifest, record)
    draft = apply(writer.manifest, record)
    assert [s.snapshot_id for s in draft.segments] == [2, 3]
    assert state_of(writer.root, draft) == {ALL_KEYS[1]: (1, "b"), ALL_KEYS[2]: (3, "c")}


def test_of_two_folds_of_one_snapshot_only_the_first_fits() -> None:
    """The second would bring back what the first removed."""
    writer = StateWriter()
    writer.epoch({ALL_KEYS[0]: (1, "a")})
    first, second = recorded(writer.root, writer.manifest), recorded(writer.root, writer.manifest)
    assert {t.path for t in first.base}.isdisjoint(t.path for t in second.base), "each fold has names of its own"
    writer.manifest = apply(writer.manifest, first)
    assert holds(writer.manifest, first)
    assert not fits(writer.manifest, first)
    assert not fits(writer.manifest, second)
    writer.epoch({ALL_KEYS[0]: (2, "b")})
    assert not fits(writer.manifest, second)


def test_a_record_does_not_fit_another_past_or_another_job() -> None:
    """A run that went on from an older snapshot wrote other segments under the same numbers."""
    writer = StateWriter()
    writer.epoch({ALL_KEYS[0]: (1, "a")})
    older = writer.manifest
    writer.epoch({ALL_KEYS[0]: (2, "b")})
    record = recorded(writer.root, writer.manifest)
    assert not fits(older, record)
    other = StateWriter(root=writer.root, ids=CountingIds(prefix=5), manifest=older)
    other.epoch({ALL_KEYS[0]: (3, "c")})
    assert other.manifest.snapshot_id == record.snapshot_id
    assert not fits(other.manifest, record)
    assert not fits(replace(writer.manifest, job_uid="job-2"), record)
    assert fits(writer.manifest, record)


def test_a_snapshot_that_was_deleted_is_not_folded() -> None:
    """The pin comes first, then the look whether the snapshot is still there."""
    writer = StateWriter()
    writer.epoch({ALL_KEYS[0]: (1, "a")})
    with pytest.raises(MissingSnapshot):
        materialize(writer.root, writer.manifest, clock=FakeClock(), ids=writer.ids)


@pytest.mark.parametrize("hours", [11, 12])
def test_a_fold_that_slept_for_half_a_day_records_nothing(hours: int) -> None:
    """Its host was suspended: what its pin protects is kept for a day, and a collector may have looked at it by now."""
    writer, clock = StateWriter(), FakeClock()
    manifest = writer.epoch({ALL_KEYS[0]: (1, "a")})
    writer.root.put(manifest_path(manifest.snapshot_id), manifest.encode())

    def sleepy(plan: MaterializationPlan, context: TablesContext, heart: Heart) -> WrittenTables:
        folded = fold_here(writer.root, writer.ids)(plan, context, heart)
        clock.advance_s(hours * 3600)
        return folded

    with contextlib.ExitStack() as stack:
        if hours == 12:
            stack.enter_context(pytest.raises(Unavailable, match="not heard of for 12 hours"))
        materialize(writer.root, manifest, clock=clock, ids=writer.ids, fold=sleepy)
    assert len(record_ids(writer.root)[0]) == (hours < 12)
    assert open_pins(writer.root) == ([] if hours < 12 else [1])


def test_tables_on_no_grid_are_written_anew() -> None:
    """Base tables of older versions cover thirds and fifths of the hashes, deltas all of them."""
    writer = StateWriter(parallelism=3)
    writer.epoch({(str(n), 0.0): (n, "x") for n in range(300)})
    writer.manifest = folded(writer.root, writer.manifest, "major")
    (whole,) = writer.manifest.layers[0].tables
    thirds = []
    for shard in range(3):
        low, high = hash_range_of_shard(shard, 3)
        thirds.append(replace(whole, hash_low=low, hash_high=high, path=f"{whole.path[:-8]}-{shard}.parquet"))
    # The same bytes under three names: a reader takes from each only its own range.
    for third in thirds:
        writer.root.put(third.path, writer.root.read(whole.path, whole.bytes))
    writer.manifest = replace(writer.manifest, layers=(LayerEntry(0, 1, tuple(thirds)),))
    writer.epoch({("5", 0.0): (-5, "y")})
    expected = {(str(n), 0.0): (n, "x") for n in range(300)} | {("5", 0.0): (-5, "y")}
    record = recorded(writer.root, writer.manifest, "minor")
    assert record.mode == "major"
    writer.manifest = apply(writer.manifest, record)
    check_grid(writer.manifest)
    assert state_of(writer.root, writer.manifest) == expected


def test_a_flipped_bit_anywhere_in_a_table_is_found() -> None:
    """By its digest, before it is decoded."""
    writer = StateWriter()
    writer.epoch({ALL_KEYS[0]: (1, "a")})
    tables = folded(writer.root, writer.manifest)
    assert isinstance(writer.root, DictStore)
    path = tables.layers[0].tables[0].path
    body = writer.root.objects[path]
    for position in range(0, len(body) * 8, 11):
        damaged = bytearray(body)
        damaged[position // 8] ^= 1 << position % 8
        writer.root.objects[path] = bytes(damaged)
        with pytest.raises(CorruptSegment):
            state_of(writer.root, tables)
    for length in range(0, len(body), 97):
        writer.root.objects[path] = body[:length]
        with pytest.raises(CorruptData):
            state_of(writer.root, tables)


source_lines = st.lists(st.sampled_from(['{"path":"a"}', '{"path":"\u2028b"}', '{"path":"c\u0085\u000bd"}', "x y"]), min_size=1, max_size=4)  # fmt: skip


@given(st.lists(st.tuples(source_lines, MODES), min_size=1, max_size=9))
@examples(50)
def test_source_logs_survive_folding(steps: list[tuple[list[str], str]]) -> None:
    """The list of seen files grows with the input; losing a line would read a file twice. Names hold any character."""
    root, ids = DictStore(), CountingIds()
    manifest = replace(StateWriter().manifest, source=SourcePosition(0, "", "", "", "", (0,)))
    written: list[str] = []
    for number, (new, how) in enumerate(steps, 1):
        segment = write_segment(
            root, [source_log_changes(0, new)], job_uid="job-1", term=1, snapshot_id=number, ids=ids
        )
        assert segment is not None
        written += new
        manifest = replace(manifest, snapshot_id=number, segments=(*manifest.segments, segment))
        if how != "none":
            manifest = folded(root, manifest, "major" if how == "major" else "auto")
        assert read_source_log(root, manifest, 0) == written
        assert len([f for layer in manifest.layers for f in layer.source_logs]) <= 5


def test_a_log_of_any_length_is_written_in_objects_that_a_reader_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job must not end because its own fold wrote more into one object than its own reader takes."""
    for module in (source_log, source_logs):
        monkeypatch.setattr(module, "SOURCE_LOG_PART_BYTES_MAX", 400)
    monkeypatch.setattr(source_log.cut_lines, "__defaults__", (400,))
    monkeypatch.setattr(source_log.joined_texts, "__defaults__", (400,))
    monkeypatch.setattr(reader, "SOURCE_LOG_BYTES_MAX", 500)
    monkeypatch.setattr(segment_format, "SOURCE_LOG_BYTES_MAX", 500)
    root, ids = CountedStore(), CountingIds()
    manifest = replace(StateWriter().manifest, source=SourcePosition(0, "", "", "", "", (0,)))
    written: list[str] = []
    read: list[int] = []
    for number in range(1, 61):
        new = [f"{number:05d}-{line:05d}-é" for line in range(60)]
        segment = write_segment(
            root, [source_log_changes(0, new)], job_uid="job-1", term=1, snapshot_id=number, ids=ids
        )
        assert segment is not None
        written += new
        manifest = replace(manifest, snapshot_id=number, segments=(*manifest.segments, segment))
        if number % 3 == 0:
            root.read_bytes = 0
            manifest = folded(root, manifest, "major" if number % 7 == 0 else "auto")
            read.append(root.read_bytes)
        assert read_source_log(root, manifest, 0) == written
    assert all(f.bytes <= 400 for layer in manifest.layers for f in layer.source_logs)
    assert max(read[10:]) <= 400, "a fold reads what is new, however long the log is"


class CountedStore(DictStore):
    """Counts the bytes of logs of seen files that are read."""

    read_bytes = 0

    def read(self, path: str, bytes_max: int) -> bytes:
        body = super().read(path, bytes_max)
        self.read_bytes += len(body) if "/_sources/" in path else 0
        return body


# --- policy ------------------------------------------------------------------------------------------------------


def chain(*, segments: int, segment_bytes: int, tables: tuple[int, ...] = ()) -> Manifest:
    """A manifest with a log and tables of so many bytes."""
    return replace(
        StateWriter().manifest,
        segments=tuple(SegmentEntry(f"s/{n}", segment_bytes, "d", 1, n + 1, 1) for n in range(segments)),
        layers=tuple(
            LayerEntry(n, n, (TableEntry(f"t/{n}", size, "d", 1, "o", "s", *ALL_HASHES),))
            for n, size in enumerate(tables)
        ),
    )


SETTINGS = JobSettings(
    materialization=MaterializationSettings(min_bytes=1000, ratio=1.0, max_segments=10, interval_s=600, replay_s=10)
)


@pytest.mark.parametrize(
    ("manifest", "since_s", "rate", "expected"),
    [
        (chain(segments=0, segment_bytes=1), 10_000, 1, None),
        (chain(segments=9, segment_bytes=111), 599, 0, None),
        (chain(segments=9, segment_bytes=111), None, 0, None),
        (chain(segments=9, segment_bytes=111), 600, 0, "interval"),
        (chain(segments=9, segment_bytes=112), 0, 0, "bytes"),
        (chain(segments=9, segment_bytes=112, tables=(3000,)), 0, 0, None),
        (chain(segments=9, segment_bytes=168, tables=(3000,)), 0, 0, "bytes"),
        (chain(segments=10, segment_bytes=1), 0, 0, "segments"),
        (chain(segments=2, segment_bytes=100), 0, 20.1, None),
        (chain(segments=2, segment_bytes=100), 0, 20.0, "replay"),
    ],
)
def test_the_log_is_folded_by_size_by_count_by_time_and_by_what_a_restart_would_take(
    manifest: Manifest, since_s: float | None, rate: float, expected: str | None
) -> None:
    assert due(manifest, SETTINGS, since_s=since_s, replay_bytes_per_s=rate) == expected


def test_with_the_changelog_off_there_is_nothing_to_fold() -> None:
    """The segments then only hold what sources have seen; the files of shards are the state."""
    files = ShardFilesEntry("files/x", 1, "d", "arrow", 4, 12, 1)
    assert due(replace(chain(segments=12, segment_bytes=1), shards=files), SETTINGS) is None
    assert due(replace(chain(segments=13, segment_bytes=1), shards=files), SETTINGS) == "segments"


def test_the_log_is_folded_before_the_manifest_outgrows_its_bound() -> None:
    """Whatever the settings say."""
    settings = JobSettings(
        materialization=MaterializationSettings(min_bytes=1 << 40, max_segments=4096, interval_s=10_000)
    )
    due_at = next(n for n in range(2000) if due(chain(segments=n, segment_bytes=1), settings) == "manifest")
    longest = SegmentEntry(
        f"changelog/{'9' * 20}/{'9' * 20}-{'f' * 32}.seg", 1 << 40, "f" * 64, 1 << 20, 1 << 40, 1 << 40
    )
    assert len(replace(chain(segments=0, segment_bytes=1), segments=(longest,) * due_at).encode()) < 256 * 1024


def stored(low: int, high: int, size: int) -> StoredTable:
    return StoredTable(TableEntry(f"t/{low}", size, "d", 1, "o", "s", low, high), 1)


def split(level: int) -> Iterator[tuple[int, int]]:
    width = (HASH_MAX + 1) >> level
    return ((n * width, (n + 1) * width - 1) for n in range(1 << level))


def test_the_grid_grows_and_shrinks_with_the_state() -> None:
    sizes = MaterializationSizes(table_bytes=100)
    assert grid([], [], [], sizes) == ([(0, HASH_MAX)], set())
    cells, forced = grid([stored(0, HASH_MAX, 201)], [], [], sizes)
    assert cells == list(split(2))
    assert forced == set(cells)
    grown = [stored(low, high, 100) for low, high in split(2)]
    assert grid(grown, [], [], sizes) == (list(split(2)), set())
    shrunk = [stored(low, high, 6) for low, high in split(2)]
    assert grid(shrunk, [], [], sizes) == ([(0, HASH_MAX)], {(0, HASH_MAX)})
    # Beyond the most cells the tables get larger instead.
    cells, _ = grid([stored(0, HASH_MAX, 1_000_000)], [], [], MaterializationSizes(table_bytes=100, cells_max=16))
    assert len(cells) <= 32


@pytest.mark.parametrize("settings", [JobSettings(), JobSettings(materialization=MaterializationSettings(cells_max=1)), JobSettings(materialization=MaterializationSettings(cells_max=4096, cell_bytes_max=32 * MIB))], ids=["default", "few", "many"])  # fmt: skip
@pytest.mark.parametrize("state_bytes", [100 * MIB, 8 * GIB, 64 * GIB, 1024 * GIB])
def test_cells_are_small_enough_to_fold_and_few_enough_to_name_up_to_a_tebibyte(
    state_bytes: int, settings: JobSettings
) -> None:
    """Whatever is set: no cell of more than 512 MiB, which a fold can hold, unless the user asks for up to 1 GiB; and
    a manifest can name all tables, with as many deltas above each as folds leave there."""
    sizes = MaterializationSizes.of(settings.materialization)
    cells, _ = grid([stored(0, HASH_MAX, state_bytes)], [], [], sizes)
    assert state_bytes / len(cells) <= max(sizes.table_bytes, settings.materialization.cell_bytes_max, 256 * MIB)
    tables = len(cells) * (1 + sizes.bounded(len(cells)).deltas_max)
    assert tables * 260 < MANIFEST_BYTES_MAX * 3 // 4


def test_the_settings_say_how_many_cells_there_are() -> None:
    """More but smaller tables, or fewer."""
    counts = [
        len(
            grid(
                [stored(0, HASH_MAX, 8 * GIB)],
                [],
                [],
                MaterializationSizes.of(MaterializationSettings(cells_max=n)),
            )[0]
        )
        for n in (8, 64, 256)
    ]
    assert counts == [32, 64, 256]  # 8: the tables would pass `cell_bytes_max`
    sizes = [MaterializationSizes.of(MaterializationSettings(cells_max=8, cell_bytes_max=n * MIB)) for n in (64, 1024)]
    assert [len(grid([stored(0, HASH_MAX, 8 * GIB)], [], [], size)[0]) for size in sizes] == [128, 8]


def test_a_table_that_could_not_be_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to set; the snapshot stays as it is."""
    writer = StateWriter()
    writer.epoch({("a", 0.0): (1, "x")})
    monkeypatch.setattr(fold, "PART_BYTES_MAX", 1)
    with pytest.raises(InvalidData, match=r"lower materialization.cell_bytes_max"):
        folded(writer.root, writer.manifest)
    assert state_of(writer.root, writer.manifest) == {("a", 0.0): (1, "x")}


def test_any_grid_covers_all_hashes_once_and_keeps_the_cells_that_need_no_change() -> None:
    for seed, rng in seeds(200):
        leaves = [(0, HASH_MAX)]
        for _ in range(rng.randrange(12)):
            low, high = leaves.pop(rng.randrange(len(leaves)))
            if high - low > 4:
                middle = (low + high) // 2
                leaves += [(low, middle), (middle + 1, high)]
            else:
                leaves.append((low, high))
        bases = [stored(low, high, rng.randrange(1, 300)) for low, high in leaves if rng.random() < 0.8]
        cells, forced = grid(bases, [], [], MaterializationSizes(table_bytes=rng.choice([10, 100, 1000])))
        note = f"STILLSTATE_TEST_SEED={seed}"
        assert cells[0][0] == 0, note
        assert cells[-1][1] == HASH_MAX, note
        assert all(a[1] + 1 == b[0] for a, b in pairwise(cells)), note
        for base in bases:
            over = [c for c in cells if c[0] <= base.hash_range[1] and c[1] >= base.hash_range[0]]
            assert over == [base.hash_range] or set(over) <= forced, note


def test_thresholds_are_spread_around_the_ratio() -> None:
    """Cells that fill up alike do not all become due at once; the same cell draws anew with each base."""
    draws = sorted(threshold(f"tables/o/s/{n}.parquet", 0.4) for n in range(1000))
    assert 0.3 <= draws[0] < 0.31
    assert 0.49 < draws[-1] <= 0.5
    assert abs(sum(draws) / len(draws) - 0.4) < 0.01
    assert threshold("a", 0.4) == threshold("a", 0.4)


# --- what it costs -----------------------------------------------------------------------------------------------


def steady(rng: random.Random, keys: int, per_epoch: int, epochs_run: int, settings: JobSettings, sizes: MaterializationSizes) -> tuple[float, float]:  # fmt: skip
    """Random updates of a full value state; average space ÷ live bytes, and bytes written ÷ bytes of log.

    The triggers work on this small state as they do on a large one: the floor of bytes is off.
    """
    writer = StateWriter(parallelism=2, ids=CountingIds(prefix=9))
    writer.epoch({(str(n), 0.0): (rng.getrandbits(60), "") for n in range(keys)})
    writer.manifest = folded(writer.root, writer.manifest, "major", sizes=sizes)
    live = writer.manifest.table_bytes
    space, log, written = [], 0, 0
    for _ in range(epochs_run):
        picked = rng.sample(range(keys), per_epoch)
        writer.epoch({(str(n), 0.0): (rng.getrandbits(60), "") for n in picked})
        log += writer.manifest.segments[-1].total_bytes
        space.append(writer.manifest.total_bytes / live)
        if due(writer.manifest, settings) == "bytes":
            record = recorded(writer.root, writer.manifest, settings=settings, sizes=sizes)
            written += record.written_bytes
            writer.manifest = apply(writer.manifest, record)
    settled = space[epochs_run // 3 :]
    return sum(settled) / len(settled), (log + written) / log


def test_space_and_write_amplification_at_the_default_ratio_stay_within_their_bounds() -> None:
    """Space on average at most 1.3 x live bytes, log included; writing at most 2 + (1 + r) / r bytes for a byte of log."""
    settings = job_settings(JobSettings(), materialize_min_bytes=1)
    ratio = settings.materialization.ratio
    space, written = steady(
        random.Random(1), 20_000, 200, 120, settings, MaterializationSizes(table_bytes=60_000, small_bytes=0)
    )
    print(f"space {space:.3f} x live, write amplification {written:.2f}")
    assert 1.0 < space <= 1.3
    assert written <= 2 + (1 + ratio) / ratio
