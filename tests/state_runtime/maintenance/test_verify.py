"""Verification: every missing or damaged file is named with whose state it is; what cannot be reached is not called damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_job import LocalJob
from model import OPERATOR, CountingIds, DictStore, FakeClock, examples
from moved_job import SHAPES, WatchedStore, furnish, into, made_job
from test_changelog_off import Run

from state_runtime.base.errors import CorruptManifest, InvalidConfiguration, MissingSnapshot, StoreUnavailable
from state_runtime.maintenance.delete.snapshots import delete_snapshots
from state_runtime.maintenance.verify.places import FoundGood, verify_place
from state_runtime.maintenance.verify.report import Finding, VerifyProgress, VerifyReport, broken_chain
from state_runtime.maintenance.verify.roots import is_in_sample, verify_root
from state_runtime.reading.references import references
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest, SegmentEntry
from state_runtime.snapshot.paths import manifest_path
from state_runtime.store import Store, open_store

DATA = ("changelog/", "tables/", "files/")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> LocalJob:
    """Read only."""
    return made_job(tmp_path_factory.mktemp("job"))


@pytest.fixture
def plain(job: LocalJob) -> DictStore:
    """In memory: quick."""
    store = DictStore()
    into(store, job.root)
    return store


BOTH = pytest.mark.parametrize("root", ["disk", "s3"], indirect=True)


@pytest.fixture(params=["disk"])
def root(request: pytest.FixtureRequest, tmp_path: Path, job: LocalJob) -> Store:
    if request.param == "disk":
        return into(open_store(str(tmp_path / "root")), job.root)
    url, options = request.getfixturevalue("s3_location")
    return into(open_store(f"{url}/root", options), job.root)


def verified(root: Store, level: str = "full", **changed: Any) -> VerifyReport:
    given: dict[str, Any] = {
        "level": level,
        "clock": FakeClock(),
        "ids": CountingIds(prefix=2),
        "threads": 4,
        **changed,
    }
    return verify_root(root, **given)


def data_of(root: Store) -> list[str]:
    return sorted(found.path for found in root.list_objects("") if found.path.startswith(DATA))


def replaced(root: Store, path: str, body: bytes) -> None:
    root.delete(path)  # local copies may share their bytes
    root.put(path, body)


def flipped(body: bytes, at: int) -> bytes:
    changed = bytearray(body)
    changed[at] ^= 1
    return bytes(changed)


# --- whole -----------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("level", ["structure", "sample", "full"])
def test_what_is_whole_has_no_findings(root: Store, job: LocalJob, level: str) -> None:
    furnish(root)
    seen: list[VerifyProgress] = []
    report = verified(root, level, share=0.5, progress=seen.append)
    assert (report.exit_code, report.findings, report.complete) == (0, (), True)
    assert report.snapshots == (1, 3, 4, 5, 6, 7)
    needed = {r.path for i in report.snapshots for r in references(root, Catalog.of_root(root).manifest(i))}
    data = {path for path in needed if path.startswith(DATA)}
    assert report.objects == len(data)
    assert report.objects_read == {"structure": 0, "full": len(data)}.get(level, report.objects_read)
    if level == "sample":
        assert 0 < report.objects_read < len(data)
    if level == "full":
        rows = sum(s.rows for s in all_segments(root)) + sum(t.rows for t in all_tables(root))
        assert report.rows == rows > 0
        assert report.bytes_read == sum(root.size(path) for path in data)
    assert seen[-1].snapshots_done == seen[-1].snapshots == 6
    assert seen[-1].objects_done == seen[-1].objects == len(data)


def all_segments(root: Store) -> list[SegmentEntry]:
    catalog = Catalog.of_root(root)
    return list({s.path: s for i in catalog.snapshot_ids() for s in catalog.manifest(i).segments}.values())


def all_tables(root: Store) -> list[Any]:
    catalog = Catalog.of_root(root)
    layers = [layer for i in catalog.snapshot_ids() for layer in catalog.manifest(i).layers]
    return list({t.path: t for layer in layers for t in layer.tables}.values())


def test_nothing_is_written_by_a_verification(job: LocalJob) -> None:
    """Credentials that may only read suffice; not even a pin is placed."""

    def refuse(operation: str, path: str) -> None:
        assert operation not in ("create", "put", "delete")

    objects: dict[str, bytes] = {}
    into(WatchedStore(objects, lambda *_: None), job.root)
    assert verified(WatchedStore(objects, refuse)).exit_code == 0


def test_one_snapshot_is_verified_without_the_others(root: Store) -> None:
    newest = Catalog.of_root(root).manifest(7)
    mine = {ref.path for ref in references(root, newest)}
    for path in set(data_of(root)) - mine:
        root.delete(path)
    assert verified(root, snapshot_ids=[7]).exit_code == 0
    assert verified(root, snapshot_ids=[3]).exit_code == 5
    with pytest.raises(MissingSnapshot):
        verified(root, snapshot_ids=[99])


# --- damaged ---------------------------------------------------------------------------------------------------------


def test_every_missing_file_is_named_with_whose_it_is(root: Store) -> None:
    """One after the other, then all of them at once."""
    refs = {}
    for snapshot_id in Catalog.of_root(root).snapshot_ids():
        for ref in references(root, Catalog.of_root(root).manifest(snapshot_id)):
            if ref.kind != "manifest":
                refs.setdefault(ref.path, []).append((snapshot_id, ref))
    assert {ref.kind for users in refs.values() for _, ref in users} == {"segment", "direct", "table"}
    for path, users in refs.items():
        body = root.read(path, 1 << 30)
        root.delete(path)
        for level in ("structure", "full"):
            report = verified(root, level)
            assert report.exit_code == 5
            assert {f.path for f in report.findings} == {path}
            assert {f.kind for f in report.findings} == {"missing"}
            expected = {(r.operator, r.state, r.hash_low, r.hash_high) for _, r in users}
            assert {(f.operator, f.state, f.hash_low, f.hash_high) for f in report.findings} == expected
            assert all(set(f.snapshot_ids) == {i for i, _ in users} for f in report.findings)
        root.put(path, body)
    assert verified(root, "structure").exit_code == 0
    for path in refs:
        root.delete(path)
    # What only an index names cannot be known without it; everything that a manifest names is.
    missing = {f.path for f in verified(root, "structure").findings}
    assert missing == {path for path, users in refs.items() if users[0][1].kind != "direct"}


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_a_flipped_bit_is_found_wherever_it_is(root: Store, where: str) -> None:
    """By digest; the size is right, so only a level that reads can see it."""
    for path in data_of(root):
        body = root.read(path, 1 << 30)
        replaced(root, path, flipped(body, {"first": 0, "middle": len(body) // 2, "last": -1}[where]))
        report = verified(root, "full")
        assert report.exit_code == 5, path
        assert {(f.path, f.kind) for f in report.findings} == {(path, "damaged")}
        sampled = verified(root, "sample", share=1.0)
        assert {f.path for f in sampled.findings} == {path}
        replaced(root, path, body)


def test_a_damaged_part_is_named_with_its_operator_state_and_range(plain: DictStore, job: LocalJob) -> None:
    """A segment holds the changes of all shards: only one of them is damaged."""
    from state_runtime.changelog.reader import read_index

    segment = next(
        s for s in job.manifest.segments if any(not p.path for p in read_index(job.root, s, {"job-1"}).parts)
    )
    part = next(p for p in read_index(job.root, segment, {"job-1"}).parts if not p.path)
    plain.objects[segment.path] = flipped(plain.objects[segment.path], part.offset + part.length // 2)
    (finding,) = verified(plain).findings
    assert (finding.operator, finding.state) == (part.operator, part.state)
    assert (finding.hash_low, finding.hash_high) == (part.hash_low, part.hash_high)
    assert f"{OPERATOR}/{part.state}" in finding.whose
    assert part.state in SHAPES


@BOTH
def test_a_missing_and_a_damaged_file_are_told_apart(root: Store) -> None:
    gone, altered = data_of(root)[:2]
    root.delete(gone)
    body = root.read(altered, 1 << 30)
    replaced(root, altered, flipped(body, -1))
    found = {(f.path, f.kind) for f in verified(root, "full").findings}
    assert found == {(gone, "missing"), (altered, "damaged")}


def test_a_truncated_file_is_found_without_reading_it(root: Store) -> None:
    for path in data_of(root):
        body = root.read(path, 1 << 30)
        for cut in (body[:-1], body[:8], b""):
            replaced(root, path, cut)
            report = verified(root, "structure")
            assert report.exit_code == 5
            assert {(f.path, f.kind) for f in report.findings} == {(path, "damaged")}
        replaced(root, path, body)


def test_a_damaged_manifest_hides_no_other_damage(root: Store) -> None:
    """Each is looked at by itself."""
    body = root.read(manifest_path(4), 1 << 20)
    replaced(root, manifest_path(4), flipped(body, len(body) // 2))
    table = next(t.path for t in all_tables_of(root, 7))
    root.delete(table)
    report = verified(root, "structure")
    assert {(f.path, f.kind) for f in report.findings} == {(manifest_path(4), "damaged"), (table, "missing")}
    assert 4 not in report.snapshots
    assert verified(root, snapshot_ids=[4]).exit_code == 5


def all_tables_of(root: Store, snapshot_id: int) -> list[Any]:
    return [t for layer in Catalog.of_root(root).manifest(snapshot_id).layers for t in layer.tables]


def test_a_snapshot_that_nobody_gave_up_is_missed(root: Store) -> None:
    """Ids count up by one, and only a boundary takes one away."""
    root.delete(manifest_path(4))
    root.remove_empty_folders("snapshots/00000000000000000004")
    report = verified(root, "structure")
    assert {(f.path, f.kind) for f in report.findings} == {(manifest_path(4), "missing")}
    with pytest.raises(MissingSnapshot):
        verified(root, "structure", snapshot_ids=[4])


def test_a_manifest_of_a_newer_version_is_not_damage(plain: DictStore) -> None:
    path = manifest_path(7)
    plain.objects[path] = plain.objects[path].replace(b'"format": 4', b'"format": 9', 1)
    report = verified(plain, "structure")
    assert report.exit_code == 6
    assert [f.kind for f in report.findings] == ["unsupported"]


def test_rows_that_are_not_what_was_written_are_found_though_digests_fit(plain: DictStore, job: LocalJob) -> None:
    """Whoever wrote the manifest was wrong: rows are counted, ranges compared."""
    layer = job.manifest.layers[0]
    table = layer.tables[0]
    for wrong in (
        replace(table, rows=table.rows + 1),
        replace(table, hash_low=table.hash_high - 1),
        replace(table, state="other"),
    ):
        tables = (wrong, *layer.tables[1:])
        manifest = replace(job.manifest, layers=(replace(layer, tables=tables), *job.manifest.layers[1:]))
        plain.objects[manifest_path(manifest.snapshot_id)] = manifest.encode()
        report = verified(plain, snapshot_ids=[manifest.snapshot_id])
        found = [f for f in report.findings if f.path == table.path]
        assert found or wrong.state == "other"
        assert all(f.kind == "damaged" for f in found)


# --- the changelog's chain -------------------------------------------------------------------------------------------


def test_a_gap_in_the_changelog_is_found(plain: DictStore, job: LocalJob) -> None:
    """A segment that the snapshot before has, and that is neither in this one nor in its tables."""
    newest = job.manifest
    for number in range(len(newest.segments) - 1):
        left = newest.segments[:number] + newest.segments[number + 1 :]
        plain.objects[manifest_path(newest.snapshot_id)] = replace(newest, segments=left).encode()
        report = verified(plain, "structure")
        (finding,) = report.findings
        assert newest.segments[number].path in finding.detail
        assert finding.snapshot_ids == (newest.snapshot_id,)
    backwards = replace(newest, segments=tuple(reversed(newest.segments)))
    plain.objects[manifest_path(newest.snapshot_id)] = backwards.encode()
    assert "not in order" in verified(plain, "structure").findings[0].detail


def test_a_fold_an_older_snapshot_and_another_job_are_no_gap(job: LocalJob) -> None:
    catalog = Catalog.of_root(job.root)
    manifests = [catalog.manifest(i) for i in catalog.snapshot_ids()]
    for previous, manifest in pairwise(manifests):
        assert broken_chain(previous, manifest) == []
    newest, gone_back = manifests[-1], replace(manifests[-1], segments=(), snapshot_id=9)
    assert broken_chain(newest, gone_back)
    assert broken_chain(newest, replace(gone_back, abandoned=((5, newest.snapshot_id),))) == []
    assert broken_chain(newest, replace(gone_back, job_uid="other")) == []


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(1, 9))
@examples(200)
def test_a_manifest_alone_is_only_refused_for_its_order(ids: list[int], snapshot_id: int) -> None:
    """Without the one before, nothing is known of gaps."""
    segments = tuple(SegmentEntry(f"changelog/1/{n}.seg", 1, "", 1, i, 0) for n, i in enumerate(ids))
    manifest = Manifest(4, "j", snapshot_id, 1, "", "checkpoint", 0, 1, segments=segments)
    is_good = ids == sorted(ids) and all(i <= snapshot_id for i in ids)
    assert (broken_chain(None, manifest) == []) == is_good or max(ids) <= snapshot_id


# --- not reached -----------------------------------------------------------------------------------------------------


def away(paths: Callable[[str], bool]) -> Callable[[str, str], None]:
    def watch(operation: str, path: str) -> None:
        if operation in ("read", "size") and paths(path):
            raise StoreUnavailable(f"{path}: connection reset")

    return watch


def test_what_cannot_be_reached_is_not_damaged(job: LocalJob) -> None:
    """The worst mistake of a checker: to call data bad that it did not see."""
    objects: dict[str, bytes] = {}
    into(WatchedStore(objects, lambda *_: None), job.root)
    for path in sorted(p for p in objects if p.startswith(DATA) or p.endswith("manifest.json")):
        report = verified(WatchedStore(objects, away(lambda asked, path=path: asked == path)), "full")
        assert report.exit_code == 4, path
        assert {f.kind for f in report.findings} == {"unreachable"}
        assert path in {f.path for f in report.findings}


def test_damage_is_told_although_something_else_cannot_be_reached(job: LocalJob) -> None:
    objects: dict[str, bytes] = {}
    into(WatchedStore(objects, lambda *_: None), job.root)
    one, other = sorted(p for p in objects if p.startswith("tables/"))[:2]
    objects[one] = flipped(objects[one], 9)
    report = verified(WatchedStore(objects, away(lambda asked: asked == other)), "full")
    assert {(f.path, f.kind) for f in report.findings} == {(one, "damaged"), (other, "unreachable")}
    assert report.exit_code == 5


def test_an_answer_that_is_always_cut_is_a_fault_of_the_way(job: LocalJob) -> None:
    """The store says the right size and gives fewer bytes."""

    class Cutting(DictStore):
        def get_file(self, path: str, local: Path) -> None:
            local.write_bytes(self.objects[self._at(path)][:-1])

    store = Cutting()
    into(store, job.root)
    report = verified(store, "full")
    assert {f.kind for f in report.findings} == {"unreachable"}
    assert report.exit_code == 4


def test_an_answer_that_is_wrong_once_is_asked_for_again(job: LocalJob) -> None:
    class FirstWrong(DictStore):
        asked: set[str] = set()

        def get_file(self, path: str, local: Path) -> None:
            body = self.objects[self._at(path)]
            local.write_bytes(body if path in self.asked else flipped(body, -1))
            self.asked.add(path)

    store = FirstWrong()
    into(store, job.root)
    assert verified(store, "full").exit_code == 0
    assert store.asked


def test_a_store_that_is_away_is_not_asked_for_ever(job: LocalJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("state_runtime.maintenance.verify.roots._UNREACHABLE_MAX", 5)
    objects: dict[str, bytes] = {}
    into(WatchedStore(objects, lambda *_: None), job.root)
    store = WatchedStore(objects, away(lambda path: path.startswith(DATA)))
    report = verified(store, "full", threads=1)
    assert (report.complete, report.exit_code) == (False, 4)
    assert report.objects < len([p for p in objects if p.startswith(DATA)])


def test_a_boundary_that_cannot_be_read_ends_it(plain: DictStore) -> None:
    """Nobody knows which snapshots there are."""
    furnish(plain)
    boundary = max(p for p in plain.objects if p.startswith("boundary/"))
    plain.objects[boundary] = b"x"
    with pytest.raises(CorruptManifest):
        verified(plain)


def test_a_snapshot_that_is_given_up_meanwhile_is_no_damage(job: LocalJob) -> None:
    """Its files go while they are looked at."""
    objects: dict[str, bytes] = {}
    quiet = WatchedStore(objects, lambda *_: None)
    into(quiet, job.root)
    started = []

    def watch(operation: str, path: str) -> None:
        if path.startswith(DATA) and operation == "read" and not started:
            started.append(path)
            delete_snapshots(quiet, [1, 2, 3, 4], clock=FakeClock(), ids=CountingIds(prefix=9))

    report = verified(WatchedStore(objects, watch), "full", threads=1)
    assert started
    assert (report.findings, report.exit_code) == ((), 0)
    assert 7 in report.snapshots


# --- files of shards -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["arrow", "rocksdb"])
def test_files_of_shards_are_verified_too(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The changelog switched off: the listing, and every file of every shard."""
    monkeypatch.setattr("state_runtime.task.persist_files.SMALL_FILE_BYTES_MAX", 0)
    run = Run(tmp_path, parallelism=2, backend=backend)
    run.epoch("a", "b", "c")
    run.epoch("a", "d")
    root = run.catalog.root
    report = verified(root)
    assert (report.exit_code, report.findings) == (0, ())
    assert report.rows > 0
    files = [path for path in data_of(root) if path.startswith("files/")]
    used = {r.path for i in run.catalog.snapshot_ids() for r in references(root, run.catalog.manifest(i))}
    assert set(files) & used
    for path in sorted(set(files) & used):
        body = root.read(path, 1 << 30)
        replaced(root, path, flipped(body, len(body) // 2))
        damaged = verified(root)
        assert damaged.exit_code == 5, path
        assert path in {f.path for f in damaged.findings}
        if not path.endswith(".json"):
            assert {f.operator for f in damaged.findings} == {"counts"}
        replaced(root, path, body)
        root.delete(path)
        assert path in {f.path for f in verified(root, "structure").findings}
        root.put(path, body)
    assert verified(root).exit_code == 0


# --- a place, and a report to go on from -----------------------------------------------------------------------------


def place(root: Store, **changed: Any) -> VerifyReport:
    given: dict[str, Any] = {
        "snapshot_id": None, "level": "full", "clock": FakeClock(), "ids": CountingIds(prefix=2), "threads": 2, **changed
    }  # fmt: skip
    return verify_place(root, **given)


@BOTH
def test_all_of_a_job_is_its_savepoints_too(root: Store) -> None:
    furnish(root)
    report = place(root)
    assert (report.exit_code, report.savepoints) == (0, 1)
    path = next(p.path for p in root.list_objects("savepoints/before/tables"))
    replaced(root, path, b"x")
    report = place(root)
    assert {(f.path, f.kind) for f in report.findings} == {(path, "damaged")}
    # The folder by itself, and a snapshot of the job without it.
    assert place(root.child("savepoints/before")).exit_code == 5
    assert place(root, snapshot_id=7).exit_code == 0


def test_a_savepoint_that_says_it_is_complete_and_is_not_is_found(root: Store) -> None:
    furnish(root)
    root.delete("savepoints/before/job.json")
    assert [f.path for f in place(root).findings] == ["savepoints/before/job.json"]
    root.delete(f"savepoints/before/{manifest_path(5)}")
    root.remove_empty_folders("savepoints/before/snapshots/00000000000000000005")
    assert f"savepoints/before/{manifest_path(5)}" in {f.path for f in place(root).findings}


@BOTH
def test_a_verification_that_was_cut_goes_on(root: Store, tmp_path: Path) -> None:
    """By a local file that says what was good; what was bad is looked at again."""
    furnish(root)
    table = next(t.path for t in all_tables_of(root, 7))
    body = root.read(table, 1 << 30)
    replaced(root, table, flipped(body, 30))
    file = tmp_path / "report"
    with FoundGood(file, place=root.url, level="full") as good:
        first = place(root, good=good)
    assert [f.path for f in first.findings] == [table]
    with file.open("a") as out:
        out.write("changelog/cut-off-by-a-crash")
    with FoundGood(file, place=root.url, level="full") as good:
        second = place(root, good=good)
    assert [f.path for f in second.findings] == [table]
    assert (second.objects, second.objects_read) == (first.objects, 1)
    replaced(root, table, body)
    with FoundGood(file, place=root.url, level="full") as good:
        assert place(root, good=good).exit_code == 0
    with pytest.raises(InvalidConfiguration, match="not of this verification"):
        FoundGood(file, place="elsewhere", level="full")
    (tmp_path / "other").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidConfiguration):
        FoundGood(tmp_path / "other", place=root.url, level="full")


# --- samples ---------------------------------------------------------------------------------------------------------


@given(st.text(max_size=20), st.floats(0, 1), st.floats(0, 1), st.text(max_size=5))
@examples(200)
def test_a_larger_share_reads_everything_that_a_smaller_one_does(
    path: str, one: float, other: float, seed: str
) -> None:
    small, large = sorted((one, other))
    assert is_in_sample(path, large, seed) or not is_in_sample(path, small, seed)
    assert is_in_sample(path, 1.0, seed)
    assert not is_in_sample(path, 0.0, seed)


def test_a_sample_is_about_its_share_and_seeds_differ() -> None:
    paths = [f"tables/op/state/{n}.parquet" for n in range(4000)]
    picked = {seed: {p for p in paths if is_in_sample(p, 0.25, seed)} for seed in ("a", "b")}
    assert all(800 < len(found) < 1200 for found in picked.values())
    assert picked["a"] != picked["b"]


def test_findings_say_who_for_people_and_machines() -> None:
    finding = Finding("damaged", "x", "why", (3,), "op", "state", 0, (1 << 63) - 1)
    assert finding.whose == "op/state [0000000000000000, 7fffffffffffffff]"
    assert finding.to_json_dict()["hash_high"] == "7fffffffffffffff"
    assert Finding("missing", "x", "why", ()).whose == "all operators"


def test_folders_of_copies_verify_as_the_original(job: LocalJob, tmp_path: Path) -> None:
    """By plain tools: `cp -r` and a rename."""
    shutil.copytree(job.root.url, tmp_path / "renamed")
    assert place(open_store(str(tmp_path / "renamed"))).exit_code == 0
