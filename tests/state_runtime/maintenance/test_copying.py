"""Copies of snapshots: complete by themselves, repeatable, data before the manifest; on a disk, on S3, and from one to the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from local_job import LocalJob
from model import CountingIds, DictStore, FakeClock
from moved_job import INFO, WatchedStore, into, made_job, states_of

from state_runtime.base.errors import (
    CorruptData,
    InvalidConfiguration,
    MissingFile,
    SnapshotExpired,
    StoreUnavailable,
)
from state_runtime.maintenance.copy.objects import CopyProgress, CopyResult, copy_snapshot, needed_objects
from state_runtime.maintenance.delete.snapshots import give_up
from state_runtime.snapshot.document import encode_document
from state_runtime.snapshot.manifest import Manifest, StagedFile, StagedOutput
from state_runtime.snapshot.ownership import JobProof
from state_runtime.snapshot.paths import JOB_FILE, manifest_path
from state_runtime.store import Store, open_store


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> LocalJob:
    """Read only."""
    return made_job(tmp_path_factory.mktemp("job"), shapes=("value", "map"), epochs=4)


@pytest.fixture(params=["disk to disk", "disk to s3", "s3 to disk", "s3 to s3", "dict to dict"])
def ends(request: pytest.FixtureRequest, tmp_path: Path, job: LocalJob) -> tuple[Store, Store]:
    """A source with the job, and an empty target."""

    def end(kind: str, name: str) -> Store:
        if kind == "dict":
            return DictStore()
        if kind == "disk":
            return open_store(str(tmp_path / name))
        url, options = request.getfixturevalue("s3_location")
        return open_store(f"{url}/{name}", options)

    kinds = request.param.split(" to ")
    return into(end(kinds[0], "source"), job.root), end(kinds[1], "target")


def copied(source: Store, manifest: Manifest, target: Store, **changed: Any) -> CopyResult:
    given: dict[str, Any] = {"rewrite": None, "clock": FakeClock(), "ids": CountingIds(prefix=3), **changed}
    return copy_snapshot(source, manifest, target, **given)


def paths_in(store: Store) -> set[str]:
    return {found.path for found in store.list_objects("")}


def clear(store: Store) -> None:
    for path in paths_in(store):
        store.delete(path)


def test_a_copy_needs_nothing_of_its_source(ends: tuple[Store, Store], job: LocalJob) -> None:
    """Self-contained: the source may go. And it has what the snapshot needs, and no more."""
    source, target = ends
    seen: list[CopyProgress] = []
    result = copied(source, job.manifest, target, progress=seen.append)
    needed = needed_objects(source, job.manifest)
    assert paths_in(target) == {*needed, manifest_path(job.manifest.snapshot_id)}
    assert (result.objects, result.objects_copied) == (len(needed), len(needed))
    assert result.bytes == result.bytes_copied == sum(source.size(path) for path in needed)
    assert [p.objects_done for p in seen] == list(range(1, len(needed) + 1))
    assert (seen[-1].objects, seen[-1].bytes_done, seen[-1].bytes) == (len(needed), result.bytes, result.bytes)
    expected = states_of(job, source, job.manifest)
    clear(source)
    assert states_of(job, target, job.manifest) == expected
    assert any(rows for rows in expected.values())


def test_a_copy_that_is_repeated_copies_what_is_not_there(ends: tuple[Store, Store], job: LocalJob) -> None:
    """Resumable: what is right is not copied again; what was cut is."""
    source, target = ends
    copied(source, job.manifest, target)
    gone, cut = sorted(needed_objects(source, job.manifest))[:2]
    target.delete(gone)
    whole = target.read(cut, 1 << 30)
    target.delete(cut)
    target.put(cut, whole[:-1])
    result = copied(source, job.manifest, target)
    assert result.objects_copied == 2
    assert target.read(cut, 1 << 30) == whole
    assert copied(source, job.manifest, target).objects_copied == 0


def test_what_is_in_the_target_is_believed_by_its_content(ends: tuple[Store, Store], job: LocalJob) -> None:
    """The same name and size is not enough: a byte changes on a wire and on a disk, also inside one store."""
    source, target = ends
    copied(source, job.manifest, target)
    needed = needed_objects(source, job.manifest)
    for path in needed:
        body = target.read(path, 1 << 30)
        target.delete(path)  # only the name, where the source has the same bytes by a link
        # The last byte of a direct object is the end of its last part; of all others it is in their digest.
        target.put(path, body[:-1] + bytes([body[-1] ^ 1]))
    result = copied(source, job.manifest, target)
    assert result.objects_copied == result.objects
    assert all(target.read(path, 1 << 30) == source.read(path, 1 << 30) for path in needed)


def test_the_manifest_comes_last_and_only_if_all_data_came(job: LocalJob) -> None:
    """Stopped before any operation at the target, there is no snapshot, or all of it."""
    source = into(DictStore(), job.root)
    needed = set(needed_objects(source, job.manifest))
    for last in range(200):
        count = 0

        def watch(operation: str, path: str, last: int = last) -> None:
            nonlocal count
            count += 1
            if count > last:
                raise StoreUnavailable("away")

        objects: dict[str, bytes] = {}
        target = WatchedStore(objects, watch)
        try:
            copied(source, job.manifest, target, threads=1)
        except StoreUnavailable:
            assert manifest_path(job.manifest.snapshot_id) not in objects or needed <= set(objects)
            continue
        break
    else:
        raise AssertionError("it never ended")
    assert last > len(needed)


def test_damage_in_the_source_is_not_copied(job: LocalJob) -> None:
    """Between stores every digest is compared; the manifest of a damaged copy is never written."""
    for path in needed_objects(job.root, job.manifest):
        source, target = into(DictStore(), job.root), DictStore()
        body = bytearray(source.objects[path])
        body[len(body) // 2] ^= 1
        source.objects[path] = bytes(body)
        with pytest.raises(CorruptData):
            copied(source, job.manifest, target)
        assert path not in target.objects
        assert manifest_path(job.manifest.snapshot_id) not in target.objects


def test_an_answer_that_was_altered_on_its_way_is_no_damage(job: LocalJob) -> None:
    """It is read once more before anybody speaks of damage."""
    source = into(DictStore(), job.root)
    flipped: set[str] = set()

    class Flipping(DictStore):
        def get_file(self, path: str, local: Path) -> None:
            super().get_file(path, local)
            if path not in flipped:
                flipped.add(path)
                local.write_bytes(local.read_bytes()[:-1])

    result = copied(Flipping(source.objects), job.manifest, DictStore())
    assert len(flipped) == result.objects_copied


def test_a_file_that_is_gone_with_its_snapshot_is_no_damage(ends: tuple[Store, Store], job: LocalJob) -> None:
    """Given up meanwhile is expired; gone without that is missing."""
    source, target = ends
    manifest = Manifest.decode(source.read(manifest_path(4), 1 << 20), "")
    path = manifest.segments[0].path
    body = source.read(path, 1 << 30)
    source.delete(path)
    with pytest.raises(MissingFile, match=path):
        copied(source, manifest, target)
    source.put(path, body)
    source.put(JOB_FILE, encode_document("job", INFO))
    clock, ids = FakeClock(), CountingIds(prefix=8)
    give_up(source, [4], range(1, 7), JobProof(source, INFO.uid), clock=clock, ids=ids)
    source.delete(path)
    with pytest.raises(SnapshotExpired):
        copied(source, manifest, target)
    assert manifest_path(4) not in paths_in(target)


def test_another_snapshot_of_that_id_is_not_overwritten(ends: tuple[Store, Store], job: LocalJob) -> None:
    source, target = ends
    other = replace(job.manifest, commit_id="somebody else's").encode()
    target.create(manifest_path(job.manifest.snapshot_id), other)
    with pytest.raises(InvalidConfiguration, match="another snapshot"):
        copied(source, job.manifest, target)
    assert target.read(manifest_path(job.manifest.snapshot_id), 1 << 20) == other


def test_an_id_that_the_target_has_given_up_is_refused(job: LocalJob) -> None:
    """Nobody would ever read it."""
    target = DictStore()
    target.put(JOB_FILE, encode_document("job", INFO))
    target.put(manifest_path(99), b"a newer one")
    ids, proof = [job.manifest.snapshot_id, 99], JobProof(target, INFO.uid)
    give_up(target, ids[:1], ids, proof, clock=FakeClock(), ids=CountingIds())
    with pytest.raises(InvalidConfiguration, match="given snapshot"):
        copied(job.root, job.manifest, target)


def test_a_copy_may_say_something_else_of_the_same_files(ends: tuple[Store, Store], job: LocalJob) -> None:
    """A child's first manifest has an id and a job of its own."""
    source, target = ends

    def child(manifest: Manifest) -> Manifest:
        return replace(manifest, snapshot_id=manifest.snapshot_id + 1, commit_id="child")

    result = copied(source, job.manifest, target, rewrite=child)
    assert result.manifest == child(job.manifest)
    assert Manifest.decode(target.read(manifest_path(result.manifest.snapshot_id), 1 << 20), "") == result.manifest
    assert copied(source, job.manifest, target, rewrite=child).objects_copied == 0


def test_output_that_the_next_run_delivers_goes_along_if_it_is_there(job: LocalJob) -> None:
    """It lies below the root until a later snapshot settles it."""
    source, target = into(DictStore(), job.root), DictStore()
    staged = [StagedFile(f"outputs/alarms/{1:020d}/{n}.parquet", f"{n}", 3, 1) for n in range(2)]
    elsewhere = StagedFile("_stillstate/staging/x/1.parquet", "1", 3, 1)
    source.put(staged[0].staged, b"out")
    manifest = replace(job.manifest, outputs=(StagedOutput("alarms", 1, (*staged, elsewhere)),))
    source.objects[manifest_path(manifest.snapshot_id)] = manifest.encode()
    copied(source, manifest, target)
    assert target.objects[staged[0].staged] == b"out"
    assert staged[1].staged not in target.objects
