"""The changelog switched off: what tasks upload, what the driver's listing keeps, and what restores read of it; without Spark."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from model import ALL_HASHES, CountingIds, FakeClock, empty_manifest
from test_stage_task import Gather, operator, rows, stage_task

from state_runtime.base.actor import Actor
from state_runtime.base.errors import CorruptData, CorruptManifest, CorruptSegment, MissingFile
from state_runtime.base.settings import JobSettings
from state_runtime.changelog.versions import StateVersions
from state_runtime.driver.file_index import FileIndex
from state_runtime.materialize.records import apply
from state_runtime.materialize.run import materialize
from state_runtime.processors.operator import EpochClock
from state_runtime.reading.query import open_state
from state_runtime.restore.sources import PrimaryStates
from state_runtime.restore.uploaded_files import Bottom, direct
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.fencing import open_job_root, open_run
from state_runtime.snapshot.manifest import Manifest, ShardFilesEntry
from state_runtime.snapshot.shard_files import ShardFiles, ShardListing, StoredFile
from state_runtime.snapshot.shard_versions import NO_VERSION, ShardVersions
from state_runtime.spark.columns import HASH_COLUMN
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.store import open_store
from state_runtime.task import persist_files
from state_runtime.task.acknowledgement import Acknowledgement, PersistedFiles
from state_runtime.task.listed_files import ListedFiles
from state_runtime.task.shard_access import TaskJob
from tests.stored import read_states

STATE = next(iter(operator().state_schemas))


@dataclass
class Run:
    """Plays the driver of one run with one operator."""

    folder: Path
    parallelism: int = 1
    backend: str = "arrow"
    host: str = "local"
    committer: Committer = field(init=False)
    book: FileIndex = field(init=False)
    versions: list[str] = field(init=False)
    seen: list[Acknowledgement] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.catalog = Catalog(open_store(str(self.folder / "store")), "job")
        info = open_job_root(self.catalog.root, "job", clock=FakeClock(), ids=CountingIds())
        number = len(list((self.folder / "store").rglob("manifest.json"))) + 1
        self.ids = CountingIds(100 + number)
        empty = empty_manifest(info.uid, self.parallelism)
        self.committer = open_run(self.catalog, info, empty, actor=Actor(FakeClock(), self.ids, f"h{number}", number))
        last = self.committer.last
        self.book = FileIndex.begin(self.catalog.root, last, self.parallelism, ["counts"])
        named = last.versions.get("counts", "") if last.parallelism == self.parallelism else ""
        self.versions = list(ShardVersions.decode(named, self.parallelism))

    def epoch(self, *keys: str, wake: Iterable[int] = ()) -> Manifest:
        """One epoch that ends in a checkpoint; every shard is visited if the listing is not complete."""
        last = self.committer.last
        job = TaskJob(
            name="job",
            uid=self.committer.info.uid,
            store_url=str(self.folder / "store"),
            storage_options={},
            local_dir=str(self.folder / self.host),
            term=self.committer.term.term,
            epoch=self.ids.uid(),
            snapshot_id=last.snapshot_id + 1,
            base_snapshot_id=last.snapshot_id,
            parallelism=self.parallelism,
            clock=EpochClock(1_000, epoch=last.snapshot_id + 1),
            settings=JobSettings(changelog="off", backend=self.backend),  # type: ignore[arg-type]
        )
        self.seen = []
        for shard in range(self.parallelism):
            batch = self._of_shard(keys, shard)
            if batch.num_rows == 0:
                if shard not in wake and self.book.complete:
                    continue
                batch = rows("", sequence=-1)
                at = batch.schema.get_field_index(HASH_COLUMN)
                first = np.array([hash_range_of_shard(shard, self.parallelism)[0]], dtype=np.uint64)
                batch = batch.set_column(at, HASH_COLUMN, pa.array(first.view(np.int64)))
            gather = Gather()
            listed = SimpleNamespace(value=self.book.of_tasks())
            task = stage_task(job, operator(), ShardVersions.of(self.versions), gather, listed=listed)
            list(task([batch]))
            self.seen += gather.got
        for acknowledged in self.seen:
            self.versions[acknowledged.shard] = acknowledged.version
        self.book = self.book.after(a.files for a in self.seen).written(
            self.catalog.root, term=job.term, snapshot_id=job.snapshot_id, ids=self.ids
        )
        entry = operator().entry()
        committed = self.committer.commit(
            replace(
                last,
                kind="checkpoint",
                parallelism=self.parallelism,
                operators=(entry,),
                shards=self.book.entry,
                versions={"counts": ShardVersions.of(self.versions).encode()},
            )
        )
        self.book = self.book.checkpointed()
        return committed

    def _of_shard(self, keys: tuple[str, ...], shard: int) -> pa.RecordBatch:
        from state_runtime.state.keyhash import hash_rows

        low, high = hash_range_of_shard(shard, self.parallelism)
        mine = [k for k in keys if low <= int(hash_rows([pa.array([k], pa.string())])[0]) <= high]
        batch = rows(*mine)
        order = pa.compute.sort_indices(batch.column("k")) if mine else None
        return batch.take(order) if order is not None else batch

    @property
    def uploaded(self) -> set[str]:
        return {path for a in self.seen for path in a.files.uploaded}

    def counts(self) -> dict[str, int]:
        """What a tool reads of the newest snapshot."""
        table = open_state(str(self.folder / "store"), "job", STATE).read()
        values = [n for n in table.column_names if n != "k"]
        return {row["k"]: row[values[0]] for row in table.to_pylist()}


NAMES = tuple(f"key-{n:03d}" for n in range(300))


@pytest.fixture(autouse=True)
def small_files_are_objects_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that little state shows what large state does."""
    monkeypatch.setattr(persist_files, "SMALL_FILE_BYTES_MAX", 0)


@pytest.mark.parametrize("backend", ["arrow", "rocksdb"])
def test_an_epoch_uploads_its_new_files_and_no_others(tmp_path: Path, backend: str) -> None:
    run = Run(tmp_path, backend=backend)
    run.epoch(*NAMES)
    first = run.uploaded
    run.epoch(NAMES[0])
    assert run.uploaded
    assert not run.uploaded & first
    listed = {f.path for s in run.book.listing.shards for f in s.files}
    assert run.uploaded < listed, "a file of the first epoch is named on"
    assert run.counts() == {**dict.fromkeys(NAMES, 1), NAMES[0]: 2}


@pytest.mark.parametrize("backend", ["arrow", "rocksdb"])
def test_an_epoch_that_changes_nothing_uploads_nothing(tmp_path: Path, backend: str) -> None:
    run = Run(tmp_path, backend=backend)
    before = run.epoch(*NAMES).shards
    after = run.epoch(wake=[0]).shards
    assert run.uploaded == set()
    assert before is not None
    assert after is not None
    assert (after.path, after.snapshot_id) == (before.path, before.snapshot_id + 1)


@pytest.mark.parametrize("backend", ["arrow", "rocksdb"])
def test_files_of_a_lost_host_come_back_as_they_are(tmp_path: Path, backend: str) -> None:
    """So the first upload after the restore is what changed, not the state."""
    Run(tmp_path, backend=backend).epoch(*NAMES)
    again = Run(tmp_path, backend=backend, host="other")
    again.epoch(NAMES[0])
    assert [a.restored for a in again.seen] == ["primary"]
    listed = {f.path for s in again.book.listing.shards for f in s.files}
    assert listed - again.uploaded, "files of the first run are named on"
    assert again.counts() == {**dict.fromkeys(NAMES, 1), NAMES[0]: 2}


def test_a_shard_that_was_two_takes_over_the_files_of_both(tmp_path: Path) -> None:
    """Of Arrow runs; two databases cannot be combined. What is not taken over is read, written and uploaded anew."""
    before = Run(tmp_path, 2)
    before.epoch(*NAMES)
    before.epoch(*NAMES[:50])
    again = Run(tmp_path, 1, host="other")
    again.epoch(NAMES[0])
    named_on = {f.path for s in again.book.listing.shards for f in s.files} - again.uploaded
    assert named_on == {f.path for s in before.book.listing.shards for f in s.files}
    assert again.counts() == {**dict.fromkeys(NAMES, 1), **dict.fromkeys(NAMES[:50], 2), NAMES[0]: 3}


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("before", ["arrow", "rocksdb"])
@pytest.mark.parametrize("after", ["arrow", "rocksdb"])
def test_any_parallelism_and_backend_goes_on_from_any_other(
    tmp_path: Path, before: str, after: str, lost: bool
) -> None:
    expected = dict.fromkeys(NAMES, 0)
    for step, parallelism in enumerate((2, 3, 1, 1, 7)):
        backend = before if step % 2 == 0 else after
        run = Run(tmp_path, parallelism, backend, host=f"host-{step if lost else 0}")
        keys = NAMES if step == 0 else NAMES[step : 200 : step + 1]
        manifest = run.epoch(*keys)
        for key in keys:
            expected[key] += 1
        assert run.counts() == expected
        assert manifest.shards is not None
        assert manifest.shards.parallelism == parallelism


@pytest.mark.parametrize("backend", ["arrow", "rocksdb"])
def test_a_local_disk_that_fails_does_not_fail_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """The whole state is uploaded from memory; the next run restores it."""
    from state_runtime.task import shard_access

    run = Run(tmp_path, backend=backend)
    run.epoch(*NAMES)
    monkeypatch.setattr(shard_access.ShardAccess, "write", lambda *_: (NO_VERSION, True))
    run.epoch(NAMES[0])
    assert [(a.version, a.local_failed) for a in run.seen] == [(NO_VERSION, True)]
    assert [s.backend for s in run.book.listing.shards] == ["arrow"]
    monkeypatch.undo()
    run.epoch(NAMES[0])
    assert run.counts() == {**dict.fromkeys(NAMES, 1), NAMES[0]: 3}


@pytest.mark.parametrize("backend", ["arrow", "rocksdb"])
def test_a_local_version_that_the_listing_does_not_name_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """The attempt that wrote it was never committed: the next run looks at it first, and counts its rows once."""
    run = Run(tmp_path, backend=backend)
    run.epoch(*NAMES)
    monkeypatch.setattr(run.committer, "commit", lambda manifest: manifest)
    run.epoch(*NAMES)
    again = Run(tmp_path, 2, backend)
    again.epoch(*NAMES)
    assert {a.restored for a in again.seen} == {"stale"}
    assert again.counts() == dict.fromkeys(NAMES, 2)


def test_files_of_a_state_that_was_dropped_or_is_younger_are_not_read() -> None:
    """A shard that was not visited since has no rows of a new state, and those of an earlier one of its name are gone."""
    shards = tuple(
        ShardFiles("counts", n, 3, "arrow", "v", snapshot_id, "{}", (), columns)
        for n, (snapshot_id, columns) in enumerate([(4, {STATE: "d"}), (7, {"other": "d"}), (7, {STATE: "d"})])
    )
    entry = operator().entry()
    young = replace(entry, states=tuple(replace(state, since=5) for state in entry.states))
    for described, expected in ((entry, [0, 2]), (young, [2])):
        state = described.state(STATE)
        assert state is not None
        versions = StateVersions(described, state, operator().state_schemas[STATE])
        bottom = Bottom(direct(open_store("memory://nowhere")), ShardListing("uid", 3, shards), described)
        assert [s.shard for s in bottom.shards(STATE, versions, *ALL_HASHES)] == expected


def test_a_restore_of_all_state_fetches_the_listed_files_together_and_one_of_the_tail_none(tmp_path: Path) -> None:
    """One by one, a host with many shards would wait for each."""
    run = Run(tmp_path, 2)
    manifest, root, entry = run.epoch(*NAMES), run.catalog.root, operator().entry()
    versions = {s.name: StateVersions(entry, s, operator().state_schemas[s.name]) for s in entry.states}
    objects, listing = direct(root), run.book.listing
    states = PrimaryStates(objects, manifest, (), entry, versions, ALL_HASHES, None, Bottom(objects, listing, entry))
    paths = {f.path for s in listing.shards for f in s.files}
    assert len(paths) >= 2
    assert {wanted.path for wanted in states.wanted(-1)} == paths
    assert states.wanted(manifest.snapshot_id) == []


def test_a_listing_only_names_what_was_uploaded_or_named_before(tmp_path: Path) -> None:
    """Otherwise nobody would keep the object: it may be garbage by now."""
    run = Run(tmp_path)
    run.epoch(*NAMES)
    shard = run.book.listing.shards[0]
    foreign = replace(shard, files=(StoredFile("a", "files/foreign", 1, "d"),))
    with pytest.raises(CorruptData, match="files/foreign, which no snapshot names"):
        run.book.after([PersistedFiles(foreign, {})])
    assert run.book.after([PersistedFiles(foreign, {}, ("files/foreign",))]).listing.shards == (foreign,)


@pytest.mark.parametrize("backend", ["arrow", "rocksdb"])
def test_a_damaged_or_missing_file_is_named_and_nothing_is_guessed(tmp_path: Path, backend: str) -> None:
    manifest = Run(tmp_path, backend=backend).epoch(*NAMES)
    root = Catalog(open_store(str(tmp_path / "store")), "job").root
    (first, *_) = sorted((tmp_path / "store" / "job" / "files").rglob("0-*"), key=lambda p: -p.stat().st_size)
    body = bytearray(first.read_bytes())
    body[len(body) // 2] ^= 1
    first.write_bytes(body)
    schemas = operator().state_schemas
    with pytest.raises(CorruptSegment, match=first.name):
        read_states(root, manifest, "counts", schemas, *ALL_HASHES)
    with pytest.raises(CorruptSegment, match=first.name):
        Run(tmp_path, backend=backend, host="other").epoch(NAMES[0])
    first.unlink()
    with pytest.raises(MissingFile, match=first.name):
        read_states(root, manifest, "counts", schemas, *ALL_HASHES)


def test_a_task_is_told_what_the_listing_says_of_its_shard() -> None:
    """Nothing of other shards, and nothing of small files, which are no objects. Whatever a listing has as a digest."""
    files = (StoredFile("a", "files/a b", 1, 'd "1"\n'), StoredFile("b", "", 1, "d2", "eA=="))
    shards = [ShardFiles("counts", n, 3, "arrow", "v", 4, "{}", files if n else ()) for n in range(2)]
    listed = ListedFiles.of(shards)
    assert listed.paths(1) == {'d "1"\n': "files/a b"}
    assert listed.paths(0) == {}, "it has no objects, which is not the same as having no entry"
    assert listed.paths(2) is None


def listing_of(**changes: Any) -> tuple[ShardListing, ShardFilesEntry]:
    file = StoredFile("0123456789abcdef-0.arrow", "files/x", 3, "d")
    shard = ShardFiles("counts", 0, 2, "arrow", "0123456789abcdef", 4, "{}", (file,))
    listing = ShardListing("uid", 2, (replace(shard, **changes),))
    return listing, ShardFilesEntry("files/l.json", 1, "d", "arrow", 2, 5, 3, 4)


def test_of_an_operator_and_a_range_a_listing_names_the_shards_that_have_rows_there() -> None:
    """Of another operator, or beside the range, each would be downloaded for nothing, or taken for state."""
    files = (StoredFile("a", "files/a", 1, "d"),)
    shards = tuple(ShardFiles(uid, n, 4, "arrow", "v", 4, "{}", files) for uid in ("counts", "sums") for n in range(4))
    listing = ShardListing("uid", 4, shards)
    (low, _), (_, high) = hash_range_of_shard(1, 4), hash_range_of_shard(2, 4)
    assert [(s.operator, s.shard) for s in listing.of_operator("counts", low, high)] == [("counts", 1), ("counts", 2)]
    assert [s.shard for s in listing.of_operator("sums", high, high)] == [2]
    assert [s.shard for s in listing.of_operator("sums", low, low)] == [1]


def test_a_listing_that_is_read_back_is_the_same() -> None:
    listing, entry = listing_of()
    assert ShardListing.decode(listing.encode(), entry, {"uid"}) == listing


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": (StoredFile("a", "../../etc/passwd", 1, "d"),)}, "not a plain relative path"),
        ({"shard": 2}, "is not one of the 2 shards"),
        ({"parallelism": 4}, "is not one of the 2 shards"),
        ({"snapshot_id": 6}, "after 5"),
        ({"columns": {"s": "d"}}, "columns of state 's'"),
        ({"operator": "../x"}, "operator uid"),
    ],
)
def test_a_listing_that_lies_is_refused(changes: dict[str, Any], message: str) -> None:
    listing, entry = listing_of(**changes)
    with pytest.raises(CorruptManifest, match=message):
        ShardListing.decode(listing.encode(), entry, {"uid"})


def test_a_listing_of_another_job_or_parallelism_is_refused() -> None:
    listing, entry = listing_of()
    with pytest.raises(CorruptManifest, match="files were swapped"):
        ShardListing.decode(listing.encode(), entry, {"another"})
    with pytest.raises(CorruptManifest, match="files were swapped"):
        ShardListing.decode(listing.encode(), replace(entry, parallelism=3), {"uid"})


@pytest.mark.parametrize("backend", ["arrow", "rocksdb"])
def test_a_fold_takes_the_files_of_shards_into_tables(tmp_path: Path, backend: str) -> None:
    """After the changelog was switched on again: then nothing names the files any more."""
    run = Run(tmp_path, 3, backend)
    run.epoch(*NAMES)
    manifest = run.epoch(*NAMES[:7])
    root, schemas = run.catalog.root, operator().state_schemas
    before = read_states(root, manifest, "counts", schemas, *ALL_HASHES)
    record = materialize(root, manifest, clock=FakeClock(), ids=CountingIds(77))
    folded = apply(manifest, record)
    assert folded.shards is None
    assert sum(table.rows for layer in folded.layers for table in layer.tables) == len(NAMES)
    assert read_states(root, folded, "counts", schemas, *ALL_HASHES) == before
