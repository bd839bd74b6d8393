"""Conversion between formats: the same state, atomic, repeatable, and the source is only read."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from local_job import LocalJob
from model import CountingIds, FakeClock, seeds
from shapes import KEYS, SHAPES, Change

from state_runtime.base.errors import CorruptData, InvalidConfiguration, SnapshotExpired, SnapshotInUse, StoreRefused
from state_runtime.changelog.writer import source_log_changes
from state_runtime.maintenance.convert import snapshot as convert_module
from state_runtime.maintenance.convert.compare import compare_here, ranges_of_states
from state_runtime.maintenance.convert.snapshot import ConversionResult, convert, is_of_format, rewrite_of
from state_runtime.maintenance.copy.objects import copy_snapshot
from state_runtime.materialize import MaterializationSizes, apply
from state_runtime.reading.reader import SnapshotReader
from state_runtime.reading.references import references
from state_runtime.snapshot import kept_pin
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.document import FORMAT_VERSION, encode_document
from state_runtime.snapshot.expiry_boundary import ExpiryBoundary
from state_runtime.snapshot.fencing import open_job_root
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.snapshot.locate import OpenedSnapshot, open_snapshot
from state_runtime.snapshot.manifest import (
    LayerEntry,
    Manifest,
    SegmentEntry,
    ShardFilesEntry,
    SnapshotFormat,
    SourcePosition,
)
from state_runtime.snapshot.paths import CONVERSION_FILE, JOB_FILE, boundary_path, manifest_path
from state_runtime.snapshot.pins import read_pins
from state_runtime.snapshot.shard_versions import NO_VERSION
from state_runtime.store import Created, LocalStore, Store, open_store
from tests.job_settings import job_settings
from tests.stored import read_source_log, write_segment

FORMATS: tuple[SnapshotFormat, ...] = ("changelog", "incremental", "canonical")
SMALL = MaterializationSizes(table_bytes=5_000, small_bytes=0, unit_bytes=12_000, deltas_max=2)


class Killed(BaseException):
    """The converting process dies."""


def identify(root: Store) -> None:
    """What a driver's first start writes."""
    root.create(JOB_FILE, encode_document("job", JobInfo("job-1", "job", 32768, FORMAT_VERSION, 0)))


def random_changes(rng: random.Random, shapes: tuple[str, ...]) -> dict[str, Change]:
    """Something for every state; keys, entries and rows from small pools, so that they meet."""
    found = {}
    for shape in shapes:
        rows: dict[Any, Any] = {}
        for _ in range(rng.randrange(9)):
            key = rng.choice(KEYS)
            part = _part(rng, shape)
            row = None if rng.random() < 0.25 else (rng.randrange(99), rng.choice("xyz"), rng.randrange(-3, 12))
            rows[key, part] = row
        cleared = (
            frozenset(rng.sample(KEYS, 1)) if SHAPES[shape].entries is not None and rng.random() < 0.3 else frozenset()
        )
        found[shape] = Change(cleared, rows)
    return found


def _part(rng: random.Random, shape: str) -> Any:
    schema = SHAPES[shape]
    if schema.entries is None:
        return None
    if len(schema.entries):
        return rng.choice(("", "a", "b", "abc"))
    return rng.randrange(-3, 12) if shape == "timers" else rng.randrange(1, 9)


@dataclass
class Life:
    """A job without Spark, with what every state must hold."""

    folder: Path
    rng: random.Random
    shapes: tuple[str, ...] = ("value", "value-expires", "list", "map", "timers", "rows-due")

    def __post_init__(self) -> None:
        self.job = LocalJob(self.folder / "source", self.shapes, parallelism=self.rng.randrange(1, 4))
        identify(self.job.root)

    def epochs(self, count: int) -> None:
        for _ in range(count):
            self.job.now_ms += self.rng.randrange(3)
            self.job.epoch(random_changes(self.rng, self.shapes), check=False)

    def fold(self, mode: Any) -> None:
        """The driver adopts a materialization, so that the snapshot has layers and log."""
        from model import recorded

        self.job.adopt(apply(self.job.manifest, recorded(self.job.root, self.job.manifest, mode, sizes=SMALL)))

    @property
    def opened(self) -> OpenedSnapshot:
        return open_snapshot(self.job.root)

    def target(self, name: str) -> Store:
        """A folder that `LocalJob` can go on from: its job's name is the last part."""
        return open_store(str(self.folder / name / "store" / "job"))

    def continued(self, name: str, parallelism: int, **changed: Any) -> LocalJob:
        """The job, restarted from the snapshot in a target, on a host that has nothing yet."""
        job = copy.copy(self.job)
        job.folder = self.folder / name
        job.store_url = str(self.folder / name / "store")
        job.root = open_store(job.store_url).child("job")
        job.manifest = open_snapshot(job.root).manifest
        job.history = {shape: list(batches) for shape, batches in self.job.history.items()}
        job.settings = job_settings(**changed)
        job.versions = [NO_VERSION] * job.parallelism
        job.restart(parallelism)
        job.versions = [NO_VERSION] * parallelism
        return job


def converted(source: OpenedSnapshot, target: Store, to: SnapshotFormat, **changed: Any) -> ConversionResult:
    given: dict[str, Any] = {
        "clock": FakeClock(),
        "ids": CountingIds(prefix=5),
        "compare": compare_here,
        "sizes": SMALL,
    }
    return convert(source, target, to, **{**given, **changed})


def paths(root: Store) -> set[str]:
    return {found.path for found in root.list_objects("")}


def named(root: Store, manifest: Manifest) -> set[str]:
    return {ref.path for ref in references(root, manifest)}


# --- the same state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["arrow", "rocksdb"])
def test_any_chain_of_formats_keeps_the_state_and_the_job_goes_on(tmp_path: Path, backend: str) -> None:
    """The oracle is the plain history of changes, read by a job that restarts from the target with another parallelism."""
    for seed, rng in seeds(1 if backend == "rocksdb" else 2):
        life = Life(tmp_path / f"{seed}", rng)
        life.epochs(rng.randrange(1, 4))
        for _ in range(rng.randrange(3)):
            life.fold(rng.choice(["minor", "major", "auto"]))
            life.epochs(rng.randrange(1, 4))
        source = life.opened
        for step in range(2):
            to = rng.choice(FORMATS)
            before = paths(source.root)
            target = life.target(f"step-{step}")
            result = converted(source, target, to)
            assert is_of_format(result.manifest, to), (seed, step, to)
            assert paths(source.root) == before, "the source is as it was, the pin taken off"
            assert paths(target) == named(target, result.manifest) | {JOB_FILE}, "nothing is left beside the snapshot"
            again = life.continued(f"step-{step}", rng.randrange(1, 5), backend=backend)
            for shard in range(again.parallelism):
                again.check(again.open(shard)[1], shard)
            source = open_snapshot(target, result.manifest.snapshot_id)
        again.epoch(random_changes(rng, life.shapes))
        again.epoch(random_changes(rng, life.shapes))


@pytest.mark.parametrize("backend", ["arrow", "rocksdb"])
@pytest.mark.parametrize("to", FORMATS)
def test_a_snapshot_of_files_converts_to_every_format(tmp_path: Path, backend: str, to: SnapshotFormat) -> None:
    """The changelog was off: the files of shards are shared by `incremental`, and folded by the others."""
    from test_changelog_off import NAMES, STATE, Run

    from state_runtime.reading.query import open_state

    run = Run(tmp_path / "source", 3, backend)
    run.epoch(*NAMES)
    run.epoch(*NAMES[:7])
    source = open_snapshot(run.catalog.root)
    target = open_store(str(tmp_path / "target" / "job"))
    result = converted(source, target, to)
    assert (result.manifest.shards is not None) == (to == "incremental")
    assert is_of_format(result.manifest, to)
    table = open_state(open_store(str(tmp_path / "target")), "job", STATE).read()
    assert dict(zip(*(table.column(name).to_pylist() for name in table.column_names[:2]))) == {
        **dict.fromkeys(NAMES, 1),
        **dict.fromkeys(NAMES[:7], 2),
    }


PLACES = [("local", "local"), ("s3", "s3"), ("local", "s3"), ("s3", "local")]


@pytest.mark.parametrize(("of", "into"), PLACES)
def test_stores_of_any_kind_convert_to_each_other(
    tmp_path: Path, of: str, into: str, s3_location: tuple[str, dict[str, Any]]
) -> None:
    url, options = s3_location
    life = Life(tmp_path, random.Random(3))
    life.epochs(2)
    life.fold("major")
    life.epochs(2)
    root = life.job.root
    if of == "s3":
        root = open_store(f"{url}/source", options)
        identify(root)
        copy_snapshot(life.job.root, life.job.manifest, root, clock=FakeClock(), ids=CountingIds(prefix=9))
    source = open_snapshot(root)
    for to in FORMATS:
        target = open_store(f"{url}/{to}", options) if into == "s3" else life.target(to)
        result = converted(source, target, to)
        mine, theirs = SnapshotReader(target, result.manifest), SnapshotReader(life.job.root, life.job.manifest)
        for piece in ranges_of_states(result.manifest):
            assert mine.fingerprint(piece.operator, piece.state) == theirs.fingerprint(piece.operator, piece.state)
        assert read_pins(root) == []


@pytest.mark.parametrize("version", ["format-1", "format-2"])
@pytest.mark.parametrize("to", FORMATS)
def test_snapshots_of_older_formats_convert_too(tmp_path: Path, version: str, to: SnapshotFormat) -> None:
    """Rows of old columns are brought to the newest where everything is rewritten, and read through the history elsewhere."""
    root = open_store(str(Path(__file__).parents[1] / "golden" / version))
    source = OpenedSnapshot(Catalog.of_root(root), Catalog.of_root(root).job_info(), _latest(root))
    result = converted(source, open_store(str(tmp_path / "target")), to, compare=compare_here)
    assert is_of_format(result.manifest, to)
    assert result.manifest.format_version == FORMAT_VERSION
    histories = [state.history for operator in result.manifest.operators for state in operator.states]
    assert any(histories) == (version == "format-2" and to != "canonical")


def _latest(root: Store) -> Manifest:
    found = Catalog.of_root(root).latest()
    assert found is not None
    return found


def test_what_file_sources_have_seen_is_kept_in_order(tmp_path: Path) -> None:
    """Whoever forgets a file reads it twice."""
    life = Life(tmp_path, random.Random(5), ("value",))
    lines: list[str] = []
    position = SourcePosition(0, "{}", "v1\n{}\n{}", "", "v1\n{}", (0,))
    for number in range(4):
        life.epochs(1)
        new = [f'{{"path":"file:///in/{number}-{n}","batchId":{number}}}' for n in range(3)]
        lines += new
        job = life.job
        segment = write_segment(
            job.root,
            [source_log_changes(0, new)],
            job_uid="job-1",
            term=1,
            snapshot_id=job.manifest.snapshot_id + 1,
            ids=job.ids,
        )
        assert segment is not None
        job.adopt(replace(job.manifest, segments=(*job.manifest.segments, segment), source=position))
        if number == 1:
            life.fold("major")
    for to in FORMATS:
        result = converted(life.opened, life.target(to), to)
        assert read_source_log(life.target(to), result.manifest, 0) == lines
        assert result.manifest.source == position


# --- what the target is --------------------------------------------------------------------------------------------


def test_the_target_is_a_job_of_its_own_that_says_where_it_came_from(tmp_path: Path) -> None:
    life = Life(tmp_path, random.Random(1))
    life.epochs(2)
    source = life.opened
    result = converted(source, life.target("a"), "canonical")
    manifest = result.manifest
    info = Catalog.of_root(life.target("a")).job_info()
    assert manifest.job_uid == info.uid != source.manifest.job_uid
    (origin,) = manifest.origins
    assert (origin.job_uid, origin.snapshot_id, origin.commit_id, origin.mode) == (
        "job-1",
        source.manifest.snapshot_id,
        source.manifest.commit_id,
        "CONVERT",
    )
    assert (manifest.outputs, manifest.versions, manifest.abandoned, manifest.term) == ((), {}, (), 0)
    assert manifest.snapshot_id == source.manifest.snapshot_id
    assert manifest.epoch >= source.manifest.epoch


@pytest.mark.parametrize(
    ("to", "copied"), [("changelog", "everything"), ("incremental", "tables"), ("canonical", "nothing")]
)
def test_only_what_the_format_forbids_is_written_anew(tmp_path: Path, to: SnapshotFormat, copied: str) -> None:
    life = Life(tmp_path, random.Random(2), ("value", "map"))
    life.epochs(3)
    life.fold("major")
    life.epochs(3)
    source = life.opened
    assert source.manifest.segments
    tables = {t.path for layer in source.manifest.layers for t in layer.tables}
    result = converted(source, life.target("a"), to)
    there = paths(life.target("a"))
    if copied == "everything":
        assert (result.tables_written, named(source.root, source.manifest) - there) == (0, set())
    elif copied == "tables":
        kept = {t.path for layer in result.manifest.layers for t in layer.tables} & tables
        assert kept
        assert result.objects_copied == len(kept)
    else:
        assert (result.objects_copied, there & tables) == (0, set())


@pytest.mark.parametrize("to", FORMATS)
def test_a_conversion_that_was_done_is_not_done_again(tmp_path: Path, to: SnapshotFormat) -> None:
    life = Life(tmp_path, random.Random(4), ("value", "list"))
    life.epochs(2)
    first = converted(life.opened, life.target("a"), to)
    before = paths(life.target("a"))
    again = converted(life.opened, life.target("a"), to, ids=CountingIds(prefix=6))
    assert (again.repeated, again.manifest) == (True, first.manifest)
    assert paths(life.target("a")) == before


def test_a_job_that_runs_in_the_target_is_left_alone_by_a_repeated_conversion(tmp_path: Path) -> None:
    """The process died before it took its note away, somebody started the job there, and the command is repeated."""
    life = Life(tmp_path, random.Random(4), ("value",))
    life.epochs(2)
    target = life.target("a")
    result = converted(life.opened, target, "canonical")
    intent = convert_module._Intent(
        uid="u",
        job_uid="job-1",
        snapshot_id=result.manifest.snapshot_id,
        commit_id=life.job.manifest.commit_id,
        to="canonical",
        started_at_ms=0,
    )
    target.create(CONVERSION_FILE, encode_document("conversion", intent))
    target.put("terms/00000000000000000001.json", b"a run")
    target.put("changelog/00000000000000000001/under-way.seg", b"of its next checkpoint")
    target.put("tables/op/value/under-way.parquet", b"of its materialization")
    assert converted(life.opened, target, "canonical").repeated
    assert {"changelog/00000000000000000001/under-way.seg", "tables/op/value/under-way.parquet"} <= paths(target)


# --- refusals ------------------------------------------------------------------------------------------------------


def test_a_target_that_holds_something_else_is_refused_and_not_touched(tmp_path: Path) -> None:
    life, other = Life(tmp_path / "a", random.Random(1), ("value",)), Life(tmp_path / "b", random.Random(2), ("value",))
    life.epochs(1)
    other.epochs(1)
    target = life.target("t")
    target.put("notes.txt", b"mine")
    with pytest.raises(InvalidConfiguration, match=r"is not empty: it holds notes\.txt"):
        converted(life.opened, target, "canonical")
    assert paths(target) == {"notes.txt"}
    there = paths(other.job.root)
    with pytest.raises(InvalidConfiguration, match="did not come from"):
        converted(life.opened, other.job.root, "canonical")
    assert paths(other.job.root) == there


def test_a_target_in_the_source_or_around_it_is_refused(tmp_path: Path) -> None:
    life = Life(tmp_path, random.Random(1), ("value",))
    life.epochs(1)
    root = Path(life.job.root.url)
    for place in (root, root / "savepoints" / "x", root.parent):
        with pytest.raises(InvalidConfiguration, match="choose a folder of its own"):
            converted(life.opened, open_store(str(place)), "canonical")


def test_the_beginning_of_another_conversion_is_not_continued(tmp_path: Path) -> None:
    life = Life(tmp_path, random.Random(1), ("value",))
    life.epochs(1)
    target = life.target("t")
    with pytest.raises(Killed):
        converted(life.opened, target, "canonical", compare=_dies)
    life.epochs(1)
    with pytest.raises(InvalidConfiguration, match="beginning of a conversion"):
        converted(life.opened, target, "canonical")


def test_a_folder_that_is_being_filled_starts_no_job(tmp_path: Path) -> None:
    """It would begin empty, and the conversion would then publish a snapshot into it."""
    life = Life(tmp_path, random.Random(1), ("value",))
    life.epochs(4)
    target = life.target("t")
    with pytest.raises(Killed):
        converted(life.opened, target, "canonical", compare=_dies)
    with pytest.raises(SnapshotInUse, match="the conversion that fills it has not ended"):
        open_job_root(target, "job", clock=FakeClock(), ids=CountingIds(prefix=9))
    assert [path for path in paths(target) if path.startswith("tables/")], "the attempt that died left something"
    result = converted(life.opened, target, "canonical", ids=CountingIds(prefix=6))
    assert paths(target) == named(target, result.manifest) | {JOB_FILE}, "and the next one removed it"
    open_job_root(target, "job", clock=FakeClock(), ids=CountingIds(prefix=9))


def test_a_job_that_began_in_the_target_meanwhile_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(tmp_path, random.Random(1), ("value",))
    life.epochs(1)
    target = life.target("t")
    monkeypatch.setattr(target, "probe", lambda: identify(target))
    with pytest.raises(InvalidConfiguration, match="somebody else began to use"):
        converted(life.opened, target, "canonical")
    assert not target.exists(manifest_path(life.job.manifest.snapshot_id))


def _dies(*_: Any) -> list[str]:
    raise Killed


# --- the comparison ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["a lost table", "a changed row", "a row too many"])
def test_a_difference_in_any_state_publishes_nothing(tmp_path: Path, damage: str) -> None:
    """A fold that goes wrong must be found before anybody can start from it."""
    from state_runtime.materialize.run import fold_here

    life = Life(tmp_path, random.Random(6), ("value", "map"))
    life.epochs(4)
    source, target = life.opened, life.target("t")
    honest = fold_here(source.root, CountingIds(prefix=7), into=target)

    def broken(plan: Any, context: Any, reached: Any) -> Any:
        folded = honest(plan, context, reached)
        first = max(folded.base, key=lambda t: t.rows)
        others = tuple(t for t in folded.base if t != first)
        if damage == "a lost table":
            return replace(folded, base=others)
        return replace(folded, base=(*others, _rewritten(target, first, damage)))

    with pytest.raises(CorruptData, match=r"differ: operator 'op', state '\w+': .* rows, .* Nothing was published"):
        converted(source, target, "canonical", fold=broken)
    assert not target.exists(manifest_path(source.manifest.snapshot_id))
    assert converted(source, target, "canonical").manifest.snapshot_format == "canonical"


def _rewritten(target: Store, table: Any, damage: str) -> Any:
    import pyarrow.parquet as pq

    from state_runtime.changelog.parts import sha256
    from state_runtime.changelog.reader import read_table

    batch = read_table(target, table)
    if damage == "a changed row":
        at = batch.schema.get_field_index("value.n")
        numbers = pa.array([n if row else -17 for row, n in enumerate(batch.column(at).to_pylist())], pa.int64())
        batch = batch.set_column(at, "value.n", numbers)
    else:
        batch = pa.concat_batches([batch, batch.slice(batch.num_rows - 1)])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_batches([batch]), sink)
    body = sink.getvalue().to_pybytes()
    target.put(table.path + "x", body)
    return replace(table, path=table.path + "x", bytes=len(body), digest=sha256(body), rows=batch.num_rows)


# --- pins ----------------------------------------------------------------------------------------------------------


def test_the_source_is_pinned_while_it_is_read_and_not_after(tmp_path: Path) -> None:
    life = Life(tmp_path, random.Random(1), ("value",))
    life.epochs(2)
    source, clock, seen = life.opened, FakeClock(), []

    def watching(*given: Any) -> list[str]:
        seen.extend(read_pins(source.root))
        return compare_here(*given)

    def slow(phase: str, done: int, total: int) -> None:
        clock.advance_s(301)

    assert converted(source, life.target("a"), "canonical", compare=watching, on_progress=slow, clock=clock).pinned
    (pin,) = seen
    assert (pin.snapshot_id, pin.reason) == (source.manifest.snapshot_id, "convert")
    assert not pin.is_void(clock.now_ms() - 301_000), "it was renewed while the work took longer than it lasts"
    assert read_pins(source.root) == []
    with pytest.raises(Killed):
        converted(source, life.target("b"), "canonical", compare=_dies)
    assert read_pins(source.root) == [], "also after an error"


def test_a_read_only_source_is_converted_without_a_pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(tmp_path, random.Random(1), ("value",))
    life.epochs(2)
    source = life.opened

    def refuse(*_: Any) -> Any:
        raise StoreRefused("read-only")

    monkeypatch.setattr(source.root, "create", refuse)
    result = converted(source, life.target("a"), "incremental")
    assert not result.pinned
    assert result.manifest.snapshot_format == "canonical", "there was no table yet, so the log became one layer"


def test_a_source_that_is_given_up_meanwhile_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not be pinned, and its owner deleted it."""
    life = Life(tmp_path, random.Random(1), ("value",))
    life.epochs(2)
    source = life.opened
    root = life.job.root
    segment = source.manifest.segments[0].path

    def lose(*_: Any, **__: Any) -> Any:
        gone = ExpiryBoundary(1, source.manifest.snapshot_id, (), 0, "u")
        root.create(boundary_path(1), encode_document("boundary", gone))
        root.delete(segment)
        raise StoreRefused("read-only")

    monkeypatch.setattr(kept_pin, "pin_snapshot", lose)
    with pytest.raises(SnapshotExpired, match="expired while it was converted"):
        converted(source, life.target("a"), "canonical")
    assert not life.target("a").exists(manifest_path(source.manifest.snapshot_id))


# --- crashes -------------------------------------------------------------------------------------------------------


class MortalStore(LocalStore):
    """Dies at one of its writes, before or after the effect; and stays dead."""

    def __init__(self, root: Path, dies_at: int, after: bool) -> None:
        super().__init__(root)
        self.writes = 0
        self.dies_at = dies_at
        self.after = after

    def _write(self, act: Callable[[], Any]) -> Any:
        self.writes += 1
        if self.writes == self.dies_at and self.after:
            act()
        if self.writes >= self.dies_at:
            raise Killed
        return act()

    def create(self, path: str, body: bytes) -> Created:
        found: Created = self._write(lambda: super(MortalStore, self).create(path, body))
        return found

    def put(self, path: str, body: bytes) -> None:
        self._write(lambda: super(MortalStore, self).put(path, body))

    def put_file(self, local: Path, path: str) -> None:
        self._write(lambda: super(MortalStore, self).put_file(local, path))

    def copy_from(self, source: LocalStore, path: str, to: str) -> None:
        self._write(lambda: super(MortalStore, self).copy_from(source, path, to))

    def delete(self, path: str) -> None:
        self._write(lambda: super(MortalStore, self).delete(path))


@pytest.mark.parametrize("to", FORMATS)
def test_a_kill_at_any_write_leaves_no_snapshot_or_a_whole_one_and_a_repetition_ends_clean(
    tmp_path: Path, to: SnapshotFormat
) -> None:
    """Kill after kill in one folder: each attempt gets one write further than the one before."""
    life = Life(tmp_path, random.Random(8), ("value", "list"))
    life.epochs(3)
    life.fold("minor")
    life.epochs(2)
    source = life.opened
    folder = Path(life.target("t").url)
    for dies_at in range(1, 200):
        for after in (False, True):
            target = MortalStore(folder, dies_at, after)
            try:
                result = converted(source, target, to, ids=CountingIds(prefix=100 + 2 * dies_at + after), threads=1)
            except Killed:
                found = Catalog.of_root(target).latest() if target.exists(JOB_FILE) else None
                if found is not None:
                    assert named(target, found) <= paths(target), "a manifest that is there is complete"
                    assert compare_here(source, target, found, lambda done, total: None) == []
            else:
                assert paths(target) == named(target, result.manifest) | {JOB_FILE}
                assert compare_here(source, target, result.manifest, lambda done, total: None) == []
                assert read_pins(source.root) == []
                return
    pytest.fail("it never ended")


def test_a_sleeper_publishes_nothing_after_another_attempt(tmp_path: Path) -> None:
    """It wakes behind its comparison, when the files that it wrote are swept away."""
    life = Life(tmp_path, random.Random(9), ("value", "map"))
    life.epochs(3)
    source, target = life.opened, life.target("t")
    winners: list[ConversionResult] = []

    def sleeps(*given: Any) -> list[str]:
        winners.append(converted(source, target, "canonical", ids=CountingIds(prefix=6)))
        return compare_here(*given)

    with pytest.raises((InvalidConfiguration, CorruptData)):
        converted(source, target, "canonical", compare=sleeps)
    (winner,) = winners
    assert open_snapshot(target).manifest == winner.manifest
    assert named(target, winner.manifest) <= paths(target)
    assert compare_here(source, target, winner.manifest, lambda done, total: None) == []
    again = life.continued("t", 2)
    for shard in range(2):
        again.check(again.open(shard)[1], shard)


# --- pure ----------------------------------------------------------------------------------------------------------


def test_what_is_rewritten_follows_from_the_source_alone() -> None:
    def described(segments: bool, layers: int, shards: bool, log_below: bool = False) -> Manifest:
        segment = SegmentEntry("s", 1, "d", 1, 1 if log_below else 9, 1)
        layer = LayerEntry(0, 1, ())
        files = ShardFilesEntry("l", 1, "d", "arrow", 1, 5, 1)
        return Manifest(4, "j", 9, 1, "c", "checkpoint", 0, 1, segments=(segment,) * segments, layers=(layer,) * layers,
                        shards=files if shards else None)  # fmt: skip

    expected: dict[tuple[bool, int, bool, bool], tuple[str, str, str]] = {
        # segments, layers, files, segments only hold what sources saw: to changelog, incremental, canonical
        (False, 0, False, False): ("nothing", "nothing", "nothing"),
        (False, 1, False, False): ("nothing", "nothing", "nothing"),
        (False, 2, False, False): ("nothing", "nothing", "everything"),
        (True, 0, False, False): ("nothing", "log", "everything"),
        (True, 2, False, False): ("nothing", "log", "everything"),
        (False, 0, True, False): ("everything", "nothing", "everything"),
        (True, 0, True, False): ("everything", "everything", "everything"),
        (True, 0, True, True): ("everything", "source-logs", "everything"),
    }
    for given, rewrites in expected.items():
        assert tuple(rewrite_of(described(*given), to) for to in FORMATS) == rewrites, given
