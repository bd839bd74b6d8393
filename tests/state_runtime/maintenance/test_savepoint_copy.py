"""Savepoints of a stopped job: pinned, copied, completed; after kills, faults and by others, on a disk and on S3."""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from local_job import LocalJob
from model import ALL_HASHES, OPERATOR, CountingIds, FakeClock
from test_restore import changes

from state_runtime.base.errors import (
    InvalidConfiguration,
    JobNotFound,
    MissingSnapshot,
    SavepointExists,
    SnapshotInUse,
    StoreUnavailable,
)
from state_runtime.base.settings import CheckpointSettings, JobSettings
from state_runtime.maintenance.copy import make_savepoint as savepoint_copy
from state_runtime.maintenance.copy.make_savepoint import (
    SavepointWork,
    pin_for_savepoint,
    release_pins,
    resume_savepoint,
    savepoint_of_stopped,
)
from state_runtime.maintenance.copy.objects import needed_objects
from state_runtime.materialize import apply, materialize
from state_runtime.reading.references import references
from state_runtime.snapshot.document import FORMAT_VERSION, encode_document
from state_runtime.snapshot.expiry_boundary import advance_boundary
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.snapshot.locate import OpenedSnapshot, open_snapshot
from state_runtime.snapshot.paths import JOB_FILE
from state_runtime.snapshot.pins import read_pins
from state_runtime.snapshot.savepoint_record import (
    ATTEMPTS_MAX,
    SavepointRecord,
    create_savepoint,
    list_savepoints,
    read_record,
    read_savepoint,
    rewrite_savepoint,
    take_over,
)
from state_runtime.store import Store, open_store
from tests.stored import read_states

HERE = Path(__file__).parents[1]


@dataclass
class Root:
    """A job root on some store, made without Spark."""

    job: LocalJob
    store: Store
    url: str
    options: dict[str, Any]

    def states(self, at: OpenedSnapshot) -> dict[str, str]:
        """Rows as text: NaN is among them."""
        found = read_states(at.root, at.manifest, OPERATOR, self.job.operator.state_schemas, *ALL_HASHES)
        return {state: repr(pa.Table.from_batches([batch]).to_pylist()) for state, batch in found.items()}

    def check_complete(self, name: str) -> None:
        """The savepoint is a snapshot by itself, equal to the one it was made from."""
        record = read_savepoint(self.store, name)
        assert record.state == "COMPLETED"
        source = open_snapshot(self.store, record.snapshot_id)
        copied = open_snapshot(self.store.child(f"savepoints/{name}"))
        assert copied.manifest == source.manifest
        assert copied.info == source.info
        needed = {ref.path for ref in references(source.root, source.manifest)}
        records = {"savepoint.json", *(f"savepoint-{n}.json" for n in range(2, record.number + 1))}
        assert {found.path for found in copied.root.list_objects("")} == {*needed, *records, JOB_FILE}
        assert self.states(copied) == self.states(source)
        assert read_pins(self.store) == []
        assert record.copied_bytes == record.total_bytes > 0

    def work(self, **changed: Any) -> SavepointWork:
        return SavepointWork(self.store, "here:1", FakeClock(), CountingIds(prefix=9), **changed)


@cache
def template() -> LocalJob:
    """Epochs with inline and direct changes, tables, and a log above them; made once."""
    settings = JobSettings(checkpoint=CheckpointSettings(inline_bytes_max=400))
    job, rng = LocalJob(Path(tempfile.mkdtemp(prefix="savepoints-")), settings=settings), random.Random(4)
    atexit.register(shutil.rmtree, job.folder)
    for number in range(5):
        job.epoch(changes(rng, job))
        if number == 2:
            record = materialize(job.root, job.manifest, settings=settings, clock=FakeClock(), ids=job.ids)
            job.adopt(apply(job.manifest, record))
    job.root.create(JOB_FILE, encode_document("job", JobInfo("job-1", "job", 32768, FORMAT_VERSION, 1)))
    return job


def local_root(folder: Path) -> Root:
    """A copy of the template."""
    shutil.copytree(template().store_url, folder / "store")
    job = LocalJob(folder, settings=template().settings)
    job.manifest = template().manifest
    return Root(job, job.root, f"{job.store_url}/job", {})


@pytest.fixture(params=["disk", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    return root_on(request.param, request, tmp_path)


def root_on(kind: str, request: pytest.FixtureRequest, folder: Path) -> Root:
    made = local_root(folder)
    if kind == "disk":
        return made
    url, options = request.getfixturevalue("s3_location")
    store = open_store(f"{url}/job", options)
    for found in made.store.list_objects(""):
        store.put(found.path, made.store.read(found.path, 1 << 30))
    return Root(made.job, store, f"{url}/job", options)


def test_a_savepoint_of_a_stopped_job_is_a_complete_copy(root: Root) -> None:
    """And the job's own root has nothing more than its folder: no pin is left."""
    before = {found.path for found in root.store.list_objects("")}
    seen: list[SavepointRecord] = []
    record = savepoint_of_stopped(root.work(watch=seen.append), "one", tags=("release",), note="v2")
    assert (record.state, record.tags, record.note, record.attempts) == ("COMPLETED", ("release",), "v2", 1)
    root.check_complete("one")
    assert {found.path for found in root.store.list_objects("")} - before == {
        f"savepoints/one/{found.path}" for found in root.store.child("savepoints/one").list_objects("")
    }
    assert seen[-1] == record
    assert [r.copied_bytes for r in seen] == sorted(r.copied_bytes for r in seen)
    assert list_savepoints(root.store) == [record]


def test_a_savepoint_lives_when_the_job_is_gone_and_its_folder_was_renamed(tmp_path: Path) -> None:
    """By itself: no file of the job's root is needed, and no name of a folder."""
    root = local_root(tmp_path)
    savepoint_of_stopped(root.work(), "one")
    expected = root.states(open_snapshot(root.store))
    elsewhere = tmp_path / "else" / "where"
    elsewhere.parent.mkdir()
    shutil.move(Path(root.url) / "savepoints" / "one", elsewhere)
    shutil.rmtree(root.url)
    moved = open_snapshot(open_store(str(elsewhere)))
    assert root.states(moved) == expected
    record = read_record(moved.root)
    assert record is not None
    assert (record.name, record.state) == ("one", "COMPLETED")


# --- kills -------------------------------------------------------------------------------------------------------

POINTS = (
    "savepoint-requested",
    "savepoint-pinned",
    "savepoint-object-copied:1",
    "savepoint-object-copied:4",
    "savepoint-copied",
    "savepoint-completed",
)


def run_in_process(root: Root, action: str, kill_at: str = "") -> subprocess.CompletedProcess[str]:
    place = json.dumps({"url": root.url, "options": root.options})
    environment = {**os.environ, "STILLSTATE_KILL_AT": kill_at, "PYTHONPATH": str(HERE.parents[1])}
    return subprocess.run(
        [sys.executable, str(HERE / "savepoint_process.py"), action, "one", place],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("kind", "point"), [*(("disk", p) for p in POINTS), ("s3", POINTS[3]), ("s3", POINTS[4])]
)  # fmt: skip
def test_a_copy_that_was_killed_is_gone_on_with_by_another_process(
    kind: str, point: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """SIGKILL at each step. Until it is complete it is no snapshot, and the pin keeps the one that it is made from."""
    root = root_on(kind, request, tmp_path)
    killed = run_in_process(root, "make", point)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    record = read_savepoint(root.store, "one")
    folder = root.store.child("savepoints/one")
    if point == "savepoint-completed":
        assert record.state == "COMPLETED"
    else:
        assert record.state == "IN_PROGRESS"
        if point != "savepoint-copied":
            assert folder.list_names("snapshots") == []
    if point != "savepoint-requested":
        (pin,) = read_pins(root.store)
        assert (pin.reason, pin.snapshot_id, pin.holder) == ("savepoint", record.snapshot_id, "savepoint one")
        assert pin.expires_at_ms > 0, "one that nobody goes on with does not keep its snapshot for ever"
    there = {found.path: found.modified_ms for found in folder.list_objects("") if found.path.startswith("changelog")}
    assert resume_savepoint(root.work(), "one", force=True).state == "COMPLETED"
    root.check_complete("one")
    after = {found.path: found.modified_ms for found in folder.list_objects("")}
    assert {path: after[path] for path in there} == there, "what was copied is not copied again"


def test_one_that_goes_on_may_be_killed_too(tmp_path: Path) -> None:
    root = local_root(tmp_path)
    for point in POINTS[1:-1]:
        killed = run_in_process(root, "resume" if point != POINTS[1] else "make", point)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = run_in_process(root, "resume")
    assert done.stdout.strip() == "COMPLETED", done.stderr
    root.check_complete("one")
    assert read_savepoint(root.store, "one").attempts == len(POINTS[1:-1]) + 1


# --- others ------------------------------------------------------------------------------------------------------


def in_progress(root: Root, clock: FakeClock, name: str = "one") -> SavepointRecord:
    """As a driver leaves it that dies."""
    record = SavepointRecord(
        name, "u", "job", "job-1", "IN_PROGRESS", "user", clock.now_ms(), "driver:1", clock.now_ms(),
        snapshot_id=root.job.manifest.snapshot_id, attempts=1,
    )  # fmt: skip
    create_savepoint(root.store, record)
    return record


def test_a_savepoint_is_taken_over_only_after_a_silence(tmp_path: Path) -> None:
    root, clock = local_root(tmp_path), FakeClock()
    in_progress(root, clock)
    work = SavepointWork(root.store, "here:1", clock, CountingIds())
    clock.advance_s(30)
    with pytest.raises(SnapshotInUse, match=r"the last sign of driver:1 was at 2023-11-14"):
        resume_savepoint(work, "one")
    clock.advance_s(31)
    assert resume_savepoint(work, "one").state == "COMPLETED"
    root.check_complete("one")


def test_the_owner_before_notices_that_it_was_relieved_and_its_last_words_count_no_more(tmp_path: Path) -> None:
    """Two copy at once: the bytes are the same, and one of them has the say."""
    root, clock = local_root(tmp_path), FakeClock()
    record = in_progress(root, clock)
    old = SavepointWork(root.store, "driver:1", clock, CountingIds())
    taken: list[SavepointRecord] = []

    def watch(seen: SavepointRecord) -> None:
        if not taken and seen.copied_objects == 2:
            taken.append(
                take_over(root.store, read_savepoint(root.store, "one"), "IN_PROGRESS", owner="x:2", clock=clock)
            )

    old.watch = watch
    with pytest.raises(SnapshotInUse, match="taken over by its owner number 2"):
        old.carry_out(record)
    assert read_savepoint(root.store, "one") == taken[0]
    assert root.work().carry_out(taken[0]).state == "COMPLETED"
    root.check_complete("one")


def test_a_savepoint_that_is_being_deleted_is_not_gone_on_with(tmp_path: Path) -> None:
    root, clock = local_root(tmp_path), FakeClock()
    take_over(root.store, in_progress(root, clock), "DELETING", owner="gc:1", clock=clock)
    with pytest.raises(SnapshotInUse, match="DELETING"):
        resume_savepoint(root.work(), "one", force=True)


def test_what_a_dead_run_never_began_is_abandoned_not_made_later(tmp_path: Path) -> None:
    """Asked for yesterday's state, nobody gets today's under that name."""
    root, clock = local_root(tmp_path), FakeClock()
    record = SavepointRecord("one", "u", "job", "job-1", "REQUESTED", "user", 1, "driver:1", clock.now_ms(), term=3)
    create_savepoint(root.store, record)
    gone = resume_savepoint(root.work(), "one", force=True)
    assert (gone.state, gone.snapshot_id) == ("ABANDONED", 0)
    assert "term 3" in gone.message
    assert root.store.child("savepoints/one").list_names("") == ["savepoint-2.json", "savepoint.json"]


def test_a_taken_name_is_refused_and_nothing_is_pinned(tmp_path: Path) -> None:
    root = local_root(tmp_path)
    first = savepoint_of_stopped(root.work(), "one")
    with pytest.raises(SavepointExists):
        savepoint_of_stopped(root.work(), "one")
    assert read_savepoint(root.store, "one") == first
    assert read_pins(root.store) == []


def test_there_is_nothing_to_save_without_a_snapshot(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "none"))
    work = SavepointWork(store, "h:1", FakeClock(), CountingIds())
    with pytest.raises(JobNotFound):
        savepoint_of_stopped(work, "one")
    store.create(JOB_FILE, encode_document("job", JobInfo("u", "job", 32768, FORMAT_VERSION, 1)))
    with pytest.raises(MissingSnapshot, match="no snapshot yet"):
        savepoint_of_stopped(work, "one")
    assert list_savepoints(store) == []


def test_a_savepoint_of_a_drained_job_says_so(tmp_path: Path) -> None:
    root = local_root(tmp_path)
    root.job.adopt(replace(root.job.manifest, drained=True))
    assert savepoint_of_stopped(root.work(), "one").drained
    assert open_snapshot(root.store.child("savepoints/one")).manifest.drained


# --- faults ------------------------------------------------------------------------------------------------------


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Errors that copying meets, one an attempt; it succeeds when there are none left."""
    errors: list[BaseException] = []
    copy = savepoint_copy.copy_snapshot

    def failing_copy(*args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return copy(*args, **kwargs)

    monkeypatch.setattr(savepoint_copy, "copy_snapshot", failing_copy)
    return errors


def waiting(clock: FakeClock, waits: list[float]) -> Any:
    def wait(seconds: float) -> bool:
        waits.append(seconds)
        clock.advance_s(seconds)
        return False

    return wait


def test_what_may_pass_is_tried_again_with_pauses_that_grow(tmp_path: Path, failing: list[BaseException]) -> None:
    root, clock, waits = local_root(tmp_path), FakeClock(), list[float]()
    failing += [StoreUnavailable("busy"), OSError("reset"), StoreUnavailable("busy")]
    seen: list[SavepointRecord] = []
    work = SavepointWork(
        root.store, "h:1", clock, CountingIds(), wait=waiting(clock, waits), watch=seen.append
    )  # fmt: skip
    record = savepoint_of_stopped(work, "one")
    assert (record.state, record.attempts, record.message) == ("COMPLETED", 4, "")
    assert waits == [1.0, 2.0, 4.0]
    assert {r.message for r in seen if r.next_attempt_at_ms} == {"StoreUnavailable: busy", "OSError: reset"}
    root.check_complete("one")


def test_it_fails_for_good_after_the_last_attempt_lets_the_snapshot_go_and_can_be_resumed(
    tmp_path: Path, failing: list[BaseException]
) -> None:
    root, clock, waits = local_root(tmp_path), FakeClock(), list[float]()
    failing += [StoreUnavailable("busy")] * ATTEMPTS_MAX
    work = SavepointWork(root.store, "h:1", clock, CountingIds(), wait=waiting(clock, waits))
    record = savepoint_of_stopped(work, "one")
    assert (record.state, record.message, record.attempts) == ("FAILED", "StoreUnavailable: busy", ATTEMPTS_MAX)
    assert len(waits) == ATTEMPTS_MAX - 1
    assert read_savepoint(root.store, "one") == record
    assert read_pins(root.store) == []
    assert resume_savepoint(work, "one").attempts == 1
    root.check_complete("one")


@pytest.mark.parametrize("error", [InvalidConfiguration("wrong"), KeyError("a bug")])
def test_what_cannot_pass_is_not_tried_again(tmp_path: Path, failing: list[BaseException], error: Exception) -> None:
    root = local_root(tmp_path)
    failing.append(error)
    record = savepoint_of_stopped(root.work(wait=lambda seconds: pytest.fail("no second attempt")), "one")
    assert (record.state, record.attempts) == ("FAILED", 1)
    assert type(error).__name__ in record.message


@pytest.mark.parametrize("independent", [False, True])
def test_a_savepoint_of_damaged_data_is_never_complete(tmp_path: Path, independent: bool) -> None:
    """A link to a damaged object is as damaged, and has the right size: each is read and compared, whatever it holds."""
    root = local_root(tmp_path)
    manifest = open_snapshot(root.store).manifest
    for number, path in enumerate(sorted(needed_objects(root.store, manifest))):
        body = root.store.read(path, 1 << 30)
        root.store.put(path, bytes([*body[:-1], body[-1] ^ 1]))
        record = savepoint_of_stopped(root.work(), f"s{number}", independent=independent)
        assert record.state == "FAILED"
        assert path in record.message
        root.store.put(path, body)
        assert resume_savepoint(root.work(), f"s{number}").state == "COMPLETED", "what is mended can be gone on with"
    assert number > 2


def test_a_snapshot_that_was_given_up_fails_the_savepoint_and_says_so(tmp_path: Path) -> None:
    """Nobody had pinned it: the driver died before it could."""
    root, clock = local_root(tmp_path), FakeClock()
    record = in_progress(root, clock)
    newest = record.snapshot_id + 1
    root.job.adopt(root.job.manifest)
    gone = [record.snapshot_id]
    advance_boundary(root.store, lambda now: now.announcing(gone, [*gone, newest]), clock=clock, ids=CountingIds())
    advance_boundary(root.store, lambda now: now.settling(gone, []), clock=clock, ids=CountingIds())
    failed = resume_savepoint(root.work(), "one", force=True)
    assert failed.state == "FAILED"
    assert "expired" in failed.message
    assert root.store.child("savepoints/one").list_names("snapshots") == []


def test_a_lost_answer_to_the_last_write_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record says COMPLETED, and the writer got a timeout: it is not copied again."""
    root = local_root(tmp_path)
    lost = [True]

    def losing(store: Store, record: SavepointRecord, prove: Callable[[], None]) -> SavepointRecord:
        written = rewrite_savepoint(store, record, prove)
        if record.state == "COMPLETED" and lost:
            lost.pop()
            raise StoreUnavailable("no answer")
        return written

    monkeypatch.setattr(savepoint_copy, "rewrite_savepoint", losing)
    record = savepoint_of_stopped(root.work(wait=lambda seconds: pytest.fail("no second attempt")), "one")
    assert (record.state, record.attempts, lost) == ("COMPLETED", 1, [])
    root.check_complete("one")


def test_work_that_is_ended_leaves_the_savepoint_to_anybody_at_once(tmp_path: Path) -> None:
    """A driver that stops does not keep others waiting until it is taken for dead."""
    root = local_root(tmp_path)
    ended = threading.Event()
    work = root.work(ended=ended)
    work.watch = lambda record: ended.set() if record.copied_objects == 2 else None
    record = savepoint_of_stopped(work, "one")
    assert record.state == "IN_PROGRESS"
    assert record.is_stale(work.clock.now_ms())
    assert resume_savepoint(root.work(), "one").state == "COMPLETED"
    root.check_complete("one")


# --- pins --------------------------------------------------------------------------------------------------------


def test_a_pin_is_renewed_placed_anew_once_it_is_void_and_taken_off_with_its_savepoint_only(tmp_path: Path) -> None:
    root, clock, ids = local_root(tmp_path), FakeClock(), CountingIds()
    snapshot_id = root.job.manifest.snapshot_id
    pin_for_savepoint(root.store, "one", snapshot_id, clock=clock, ids=ids)
    pin_for_savepoint(root.store, "two", snapshot_id, clock=clock, ids=ids)
    (first, _) = read_pins(root.store)
    clock.advance_s(3600)
    pin_for_savepoint(root.store, "one", snapshot_id, clock=clock, ids=ids)
    (renewed, _) = read_pins(root.store)
    assert renewed.uid == first.uid
    assert renewed.expires_at_ms > first.expires_at_ms
    clock.advance_s(savepoint_copy.PIN_LASTS_MS / 1000 + 1)
    pin_for_savepoint(root.store, "one", snapshot_id, clock=clock, ids=ids)
    anew = next(pin for pin in read_pins(root.store) if pin.holder == "savepoint one")
    assert anew.uid != first.uid
    release_pins(root.store, "one")
    assert [pin.holder for pin in read_pins(root.store)] == ["savepoint two"]
