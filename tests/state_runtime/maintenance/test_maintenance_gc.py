"""Garbage collection: what nobody needs goes, what may still be named stays, and any doubt deletes nothing."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from maintenance_root import DAY_S, JOB, Death, FakeWorld, Interrupt, Job, dies_at_first_delete, dying
from model import CountingIds, FakeClock
from schedule import one_at_a_time

from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import (
    CorruptManifest,
    InvalidConfiguration,
    JobNotFound,
    JobRootMismatch,
    MissingFile,
    SnapshotInUse,
    StillstateError,
    StoreUnavailable,
    Unavailable,
    UnsupportedFormat,
)
from state_runtime.maintenance import marks
from state_runtime.maintenance.delete.snapshots import delete_snapshots
from state_runtime.maintenance.gc import collect as gc
from state_runtime.maintenance.gc import survey
from state_runtime.maintenance.gc.collect import CollectionResult, apply_gc, plan_gc
from state_runtime.maintenance.gc.plan import Candidate, GcPlan
from state_runtime.maintenance.gc.safety import dangers_of_collection
from state_runtime.maintenance.plans import Made
from state_runtime.materialize import materialize
from state_runtime.materialize.records import claim
from state_runtime.reading.references import references
from state_runtime.snapshot.document import encode_document
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.handover import Moving
from state_runtime.snapshot.paths import (
    boundary_path,
    epochs_path,
    heartbeat_path,
    listing_path,
    manifest_path,
    materialization_path,
    named_for,
    pin_path,
    savepoint_path,
    segment_path,
    shard_file_path,
    term_path,
)
from state_runtime.snapshot.pins import pin_snapshot
from state_runtime.snapshot.savepoint_record import SavepointRecord, create_savepoint
from state_runtime.store import Store, open_store

ORPHAN = segment_path(1, "00000000000000000003-orphan.seg")
ANSWERED = "control/00000000000000000001-savepoint-a"


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Somebody may act in the middle of another one's create."""
    with one_at_a_time():
        yield


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld()


@pytest.fixture
def job(world: FakeWorld) -> Job:
    """Snapshots 1 … 4; then two days later 5, so that what was written before is old."""
    job = Job(world.connect(), world.clock).checkpoints(3)
    job.root.put(ORPHAN, b"orphan")
    world.clock.advance_s(2 * DAY_S)
    job.checkpoint()
    return job


def planned(root: Store, clock: FakeClock, **options: Any) -> GcPlan:
    return plan_gc(root, clock=clock, **options)


def applied(root: Store, plan: GcPlan, clock: FakeClock, **options: Any) -> CollectionResult:
    return apply_gc(root, plan, clock=clock, ids=CountingIds(9), owner="test", threads=1, **options)


def collected(job: Job, root: Store | None = None, **options: Any) -> set[str]:
    """Both passes; what is gone."""
    before = {o.path for o in job.root.list_objects("")}
    plan = planned(root or job.root, job.clock, **options)
    applied(root or job.root, plan, job.clock)
    job.check()
    return before - {o.path for o in job.root.list_objects("")}


# --- on every store --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["local", "s3"])
def test_a_collection_on_a_real_store_takes_orphans_and_what_was_given_up(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The store's own clock says what is old: the floor is none here, and the newest manifest decides."""
    url, options = (str(tmp_path / "s"), None) if place == "local" else request.getfixturevalue("s3_location")
    clock = FakeClock(SYSTEM_CLOCK.now_ms() + 3_600_000)
    job = Job(open_store(url, options), clock, inline_bytes_max=0).checkpoints(3)
    job.fold()
    job.root.put(ORPHAN, b"orphan")
    later = materialize(job.root, job.committer.last, "major", clock=job.clock, ids=job.ids)
    if place == "s3":  # its listings have whole seconds
        _until_the_next_second(job.root)
    else:
        _set_back(tmp_path / "s" / JOB)
    job.checkpoint()
    delete_snapshots(job.root, [1, 2], clock=job.clock, ids=CountingIds(2))
    gone = collected(job, min_age_s=0, unsafe_min_age=True)
    assert gone == {ORPHAN}
    assert job.root.exists(materialization_path(later.record_id))
    job.root.put("notes.txt", b"mine")
    assert planned(job.root, job.clock).foreign == ("notes.txt",)


def _set_back(folder: Path) -> None:
    """A local file's time of writing cannot be set: wait until the disk's clock has moved on."""
    seen = folder / "seen"
    seen.write_bytes(b"")
    while True:
        later = folder / "later"
        later.write_bytes(b"")
        moved = later.stat().st_mtime_ns // 1_000_000 > seen.stat().st_mtime_ns // 1_000_000
        later.unlink()
        if moved:
            break
    seen.unlink()


def _until_the_next_second(root: Store) -> None:
    root.put("_probe-1", b"")
    first = next(o.modified_ms for o in root.list_objects("") if o.path == "_probe-1")
    for _ in range(10_000):
        root.put("_probe-1", b"")
        if next(o.modified_ms for o in root.list_objects("") if o.path == "_probe-1") > first:
            break
    root.delete("_probe-1")


# --- age and the watermark -------------------------------------------------------------------------------------------


def test_an_orphan_that_is_old_enough_goes_and_nothing_else(job: Job) -> None:
    assert collected(job) == {ORPHAN}


def test_a_plan_deletes_nothing_and_names_what_and_why(job: Job, world: FakeWorld) -> None:
    before = dict(world.objects)
    plan = planned(job.root, job.clock)
    assert world.objects == before
    assert [(c.path, c.kind, c.bytes, c.reason) for c in plan.candidates] == [
        (ORPHAN, "segment", 6, "no snapshot needs it")
    ]
    assert plan.needed_objects > 8
    assert plan.needed_bytes > 0


def test_what_is_younger_than_the_newest_manifest_is_kept_however_old_it_is(job: Job, world: FakeWorld) -> None:
    """Scenario 3 and 19: the job may stand still for a year and then name it; also what has a name of earlier versions,
    which does not say for which snapshot it is."""
    for name in ("00000000000000000006-pending.seg", "direct-op-1f.seg"):
        job.root.put(segment_path(1, name), b"pending")
    world.clock.advance_s(365 * DAY_S)
    assert collected(job) == {ORPHAN}
    assert planned(job.root, job.clock).young_objects == 2


@pytest.mark.parametrize(
    "name",
    [
        segment_path(1, "00000000000000000006-1f.seg"),
        segment_path(1, named_for(6, "direct-op") + "-1f.seg"),
        segment_path(1, named_for(6, "rows-op") + "-1f.seg"),
        listing_path(1, "00000000000000000006-1f"),
        shard_file_path(1, "op", named_for(6, "3-v1-1f") + "-1f"),
    ],
)
def test_what_is_for_a_snapshot_to_come_is_kept_whatever_the_stores_clock_said(
    job: Job, world: FakeWorld, name: str
) -> None:
    """The clock ran days ahead when the newest manifest was written, and again where the collector looks; in between it was right.
    Once a snapshot of that id is there without it, it is an orphan as any other."""
    job.root.put(name, b"under way")
    world.times[f"/store/{JOB}/{name}"] = world.clock.now_ms() - int(9 * DAY_S * 1000)
    assert collected(job) == {ORPHAN}
    job.checkpoint()
    assert collected(job) == {name}


def test_a_manifest_of_the_future_makes_nothing_old(job: Job, world: FakeWorld) -> None:
    """The clock of a local store was set back since: also of data whose name says nothing, of earlier versions."""
    old = f"changelog/{1:020d}/direct-op-1f.seg"
    job.root.put(old, b"under way")
    world.clock.advance_s(3 * DAY_S)
    job.checkpoint()
    world.clock.advance_s(-3 * DAY_S)
    assert collected(job) == {ORPHAN}
    world.clock.advance_s(3 * DAY_S)
    assert collected(job) == {old}


def test_the_floor_is_measured_from_the_newest_manifest(job: Job) -> None:
    assert not planned(job.root, job.clock, min_age_s=3 * DAY_S).candidates
    assert planned(job.root, job.clock, min_age_s=1.5 * DAY_S).candidates


def test_a_local_clock_that_is_years_ahead_deletes_no_data_earlier(job: Job, world: FakeWorld) -> None:
    """Scenario 23: ages of data are the store's own."""
    young = segment_path(1, "00000000000000000005-young.seg")
    world.times[f"/store/{JOB}/{young}"] = world.clock.now_ms() - 3600_000
    world.objects[f"/store/{JOB}/{young}"] = b"young"
    ahead = FakeClock(world.clock.now_ms() + 1000 * DAY_S * 1000)
    assert {c.path for c in planned(job.root, ahead).candidates} >= {ORPHAN}
    assert young not in {c.path for c in planned(job.root, ahead).candidates}


@pytest.mark.parametrize("age", [0.0, -1.0, float("nan"), 60.0, 3599.0])
def test_a_floor_that_is_none_or_low_is_refused_unless_it_is_said_to_be_unsafe(job: Job, age: float) -> None:
    with pytest.raises(InvalidConfiguration, match="age floor"):
        planned(job.root, job.clock, min_age_s=age)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf")])
def test_failed_savepoints_are_kept_for_some_time(job: Job, ttl_s: float) -> None:
    """None at all would take the ones whose error somebody reads just now; half a second is somebody's own word."""
    with pytest.raises(InvalidConfiguration, match="must be more than 0 seconds"):
        planned(job.root, job.clock, failed_ttl_s=ttl_s)
    assert planned(job.root, job.clock, failed_ttl_s=0.5).failed_ttl_s == 0.5


def test_of_a_root_without_snapshots_no_data_is_garbage(world: FakeWorld) -> None:
    """A job that is being started from another one copies its files before it has a manifest."""
    job = Job(world.connect(), world.clock)
    job.root.put(ORPHAN, b"copied")
    job.root.delete(manifest_path(1))
    world.clock.advance_s(30 * DAY_S)
    assert not planned(job.root, job.clock).candidates


# --- what is kept, and what refuses ----------------------------------------------------------------------------------


def test_foreign_names_are_reported_and_kept(job: Job, world: FakeWorld) -> None:
    for name in ("README", "changelog/notes.txt", "tables/x/y/z.csv", "changelog/1/short.seg", "other/a/b"):
        world.objects[f"/store/{JOB}/{name}"] = b"mine"
        world.times[f"/store/{JOB}/{name}"] = 0
    plan = planned(job.root, job.clock)
    assert plan.foreign_objects == 5
    assert set(plan.foreign) == {
        "README",
        "changelog/notes.txt",
        "tables/x/y/z.csv",
        "changelog/1/short.seg",
        "other/a/b",
    }
    assert collected(job) == {ORPHAN}


def test_a_missing_file_that_is_needed_refuses_and_is_named_with_its_snapshot(job: Job) -> None:
    """Scenario 28: what is left may be what somebody repairs it with."""
    path = job.catalog.manifest(5).segments[0].path
    job.root.delete(path)
    with pytest.raises(MissingFile, match=rf"{path} is missing, which snapshot 2, 3, 4, 5 needs"):
        planned(job.root, job.clock)


def test_a_file_of_another_size_refuses(job: Job) -> None:
    path = job.catalog.manifest(5).segments[0].path
    job.root.put(path, b"cut")
    with pytest.raises(MissingFile, match="another size"):
        planned(job.root, job.clock)


@pytest.mark.parametrize(
    "path",
    [
        manifest_path(3),
        pin_path(3, "x"),
        materialization_path(1),
        materialization_path(2, started=True),
        boundary_path(1),
        f"{savepoint_path('x')}/savepoint.json",
    ],
)
@pytest.mark.parametrize("newer", [False, True])
def test_what_cannot_be_read_or_is_newer_than_we_are_refuses(job: Job, path: str, newer: bool) -> None:
    """Scenarios 24-26, and finding 10: an unknown kind of reference is a reference."""
    plan = planned(job.root, job.clock)
    body = encode_document("manifest", _pin(1), 99) if newer else b"damaged"
    if newer:
        kind = {"sna": "manifest", "pin": "pin", "bou": "boundary", "sav": "savepoint"}.get(path[:3], "materialization")
        kind = "materialization-pin" if "started" in path else kind
        body = body.replace(b'"manifest"', f'"{kind}"'.encode(), 1)
    job.root.put(path, body)
    expected = UnsupportedFormat if newer else CorruptManifest
    with pytest.raises(expected):
        planned(job.root, job.clock)
    with pytest.raises(expected):
        applied(job.root, plan, job.clock)
    assert job.root.exists(ORPHAN)


@pytest.mark.parametrize("folder", ["snapshots", "boundary", "pins", "materializations", "terms", "changelog", ""])
def test_a_listing_that_fails_deletes_nothing(job: Job, world: FakeWorld, folder: str) -> None:
    """Scenario 41."""
    plan = planned(job.root, job.clock)
    job.root.put(pin_path(77, "x"), encode_document("pin", _pin(77)))
    materialize(job.root, job.committer.last, "major", clock=job.clock, ids=job.ids)

    def fail(operation: str, path: str) -> None:
        if operation == "list" and path == f"/store/{JOB}/{folder}".rstrip("/"):
            raise OSError(errno.EIO, "a page of the listing failed")

    for run in (lambda r: planned(r, job.clock), lambda r: applied(r, plan, job.clock)):
        with pytest.raises(StoreUnavailable):
            run(world.root(before=fail))
    assert job.root.exists(ORPHAN)


def test_a_root_that_is_being_moved_is_left_alone(job: Job) -> None:
    """Not all of it may have arrived, and whoever takes it away does it whole."""
    plan = planned(job.root, job.clock)
    moving = Moving("m", "target", "copy", "root", "elsewhere", "j", 0, 0, "h", 1)
    job.root.put("moving.json", moving.encode())
    for run in (
        lambda: planned(job.root, job.clock),
        lambda: applied(job.root, plan, job.clock),
        lambda: delete_snapshots(job.root, [1], clock=job.clock, ids=CountingIds(2)),
    ):
        with pytest.raises(SnapshotInUse, match="elsewhere"):
            run()
    assert job.root.exists(ORPHAN)


def _pin(snapshot_id: int) -> Any:
    from state_runtime.snapshot.pins import SnapshotPin

    return SnapshotPin(snapshot_id, "x", "user", "h", "", 0)


def test_tables_of_a_fold_under_way_and_of_a_record_are_kept(job: Job, world: FakeWorld) -> None:
    """FLINK-28440, and a driver that adopts a record late."""
    pin = claim(job.root, job.committer.last, clock=job.clock, ids=CountingIds(4))
    assert pin is not None
    table = f"tables/op/count/{5:020d}-{pin.writer}-1.parquet"
    log = f"tables/_sources/{5:020d}-{pin.writer}/source-0.log"
    recorded = materialize(job.root, job.committer.last, "major", clock=job.clock, ids=job.ids)
    for path in (table, log):
        job.root.put(path, b"written")
    for path in (table, log, *(t.path for t in recorded.base)):
        world.times[f"/store/{JOB}/{path}"] = 0
    assert collected(job) == {ORPHAN}


def test_a_pinned_snapshot_that_was_given_up_keeps_its_files(job: Job, world: FakeWorld) -> None:
    """A collector died between boundary and pins: whoever holds the pin still reads."""
    pin_snapshot(job.root, 2, reason="copy", holder="copier", clock=job.clock, ids=CountingIds(3))
    boundary = replace(read_boundary(job.root), sequence=1, snapshot_id=3, kept=(1, 3), uid="x")
    job.root.put(boundary_path(1), encode_document("boundary", boundary))
    assert collected(job) == {ORPHAN}
    assert job.root.exists(manifest_path(2))


def test_a_pin_that_came_after_its_snapshot_was_gone_holds_it_for_a_day(job: Job, world: FakeWorld) -> None:
    """Whoever placed it died before he looked, and was told nothing: such a pin would hold the files for ever."""
    with dying():
        delete_snapshots(world.root(before=dies_at_first_delete), [2], clock=job.clock, ids=CountingIds(2), threads=1)
    late = replace(_pin(2), uid="late", created_at_ms=job.clock.now_ms(), expires_at_ms=0)
    job.root.put(late.path, encode_document("pin", late))
    job.clock.advance_s(0.9 * DAY_S)
    assert manifest_path(2) not in collected(job)
    assert job.root.exists(late.path)
    job.clock.advance_s(0.2 * DAY_S)
    assert late.path in collected(job)
    assert manifest_path(2) in collected(job)
    assert job.check() == [1, 3, 4, 5]


def test_a_newest_snapshot_that_goes_before_it_is_read_is_looked_for_anew(job: Job, world: FakeWorld) -> None:
    """What later ones share with older ones is known through the newest of the listing alone."""
    came: list[int] = []

    def meanwhile(operation: str, path: str) -> None:
        if operation == "read" and path.endswith(manifest_path(5)) and not came:
            came.append(6)
            job.checkpoint()
            delete_snapshots(job.root, [1, 2, 3, 4, 5], clock=job.clock, ids=CountingIds(2), threads=1)

    root = world.root(before=meanwhile)
    existing, _, found = marks.mark(root, marks.Marker(root, job.clock), job.clock)
    assert came
    assert existing.snapshot_ids == (6,)
    assert set(found.needed) == {r.path for r in references(job.root, job.committer.last) if r.kind != "manifest"}


def test_snapshots_that_go_again_and_again_while_they_are_read_delete_nothing(job: Job, world: FakeWorld) -> None:
    busy = False

    def meanwhile(operation: str, path: str) -> None:
        nonlocal busy
        if operation == "read" and path.endswith(manifest_path(job.committer.last.snapshot_id)) and not busy:
            busy = True
            job.checkpoint()
            delete_snapshots(
                job.root, [job.committer.last.snapshot_id - 1], clock=job.clock, ids=CountingIds(2), threads=1
            )
            busy = False

    root = world.root(before=meanwhile)
    with pytest.raises(Unavailable, match="while they were read"):
        marks.mark(root, marks.Marker(root, job.clock), job.clock)


def test_what_a_run_of_another_job_left_stops_collections_and_deletions_and_is_named(
    job: Job, world: FakeWorld
) -> None:
    """The job that was here before was deleted while it slept; what is needed cannot be told from its snapshot."""
    job.root.put(manifest_path(6), replace(job.committer.last, snapshot_id=6, job_uid="f" * 32, origins=()).encode())
    with pytest.raises(JobRootMismatch, match=re.escape(manifest_path(6))):
        collected(job)
    with pytest.raises(JobRootMismatch):  # 5 is the one that the job goes on from
        delete_snapshots(job.root, [5], clock=job.clock, ids=CountingIds(2), threads=1)
    assert read_boundary(job.root).keeps(5)
    job.root.delete(manifest_path(6))
    assert collected(job) == {ORPHAN}


def test_a_job_that_is_deleted_while_it_is_looked_at_is_not_called_damaged(job: Job, world: FakeWorld) -> None:
    def meanwhile(operation: str, path: str) -> None:
        if operation == "read" and path.endswith(manifest_path(5)):
            for found in list(job.root.list_objects("")):
                if not found.path.endswith(("manifest.json", "/boundary")):
                    job.root.delete(found.path)

    with pytest.raises(JobNotFound, match="was deleted, or moved elsewhere"):
        planned(world.root(before=meanwhile), job.clock)


# --- leftovers -------------------------------------------------------------------------------------------------------


def test_a_deletion_that_was_cut_short_is_ended(job: Job, world: FakeWorld) -> None:
    with dying():
        delete_snapshots(
            world.root(before=dies_at_first_delete), [1, 2], clock=job.clock, ids=CountingIds(2), threads=1
        )
    assert read_boundary(job.root).sequence == 2
    plan = planned(job.root, job.clock)
    assert plan.given_up == (1, 2)
    assert applied(job.root, plan, job.clock).given_up == (1, 2)
    assert job.check() == [3, 4, 5]
    assert manifest_path(1) not in world.names()


def test_snapshots_that_are_going_are_settled_and_then_gone(job: Job) -> None:
    from state_runtime.snapshot.expiry_boundary import advance_boundary

    advance_boundary(job.root, lambda now: now.announcing([1], [1, 2, 3, 4, 5]), clock=job.clock, ids=CountingIds(2))
    assert collected(job) == {ORPHAN}
    assert manifest_path(1) in collected(job)


def test_expired_records_and_abandoned_pins_go_but_never_the_newest_id(job: Job, world: FakeWorld) -> None:
    """Ids are never used twice: whoever claims the next one looks at the highest."""
    first = materialize(job.root, job.committer.last, "major", clock=job.clock, ids=job.ids)
    assert claim(job.root, job.committer.last, clock=job.clock, ids=CountingIds(4)) is not None
    assert claim(job.root, job.committer.last, clock=job.clock, ids=CountingIds(4)) is not None
    world.clock.advance_s(4 * DAY_S)
    job.checkpoint()
    gone = collected(job)
    assert {t.path for t in first.base} <= gone
    assert materialization_path(1) in gone
    assert materialization_path(1, started=True) in gone
    assert materialization_path(2, started=True) in gone
    assert materialization_path(3, started=True) not in gone
    assert materialize(job.root, job.committer.last, "major", clock=job.clock, ids=job.ids).record_id == 4


def test_requests_answers_probes_old_terms_boundaries_and_void_pins_go(job: Job, world: FakeWorld) -> None:
    clock, root = job.clock, job.root
    delete_snapshots(root, [1], clock=clock, ids=CountingIds(2))
    delete_snapshots(root, [2], clock=clock, ids=CountingIds(3))
    pin_snapshot(root, 3, reason="read", holder="reader", clock=clock, ids=CountingIds(4), lasts_ms=1000)
    held = pin_snapshot(root, 4, reason="user", holder="user", clock=clock, ids=CountingIds(5))
    root.put(pin_path(2, "late"), encode_document("pin", replace(_pin(2), uid="late")))
    for number in range(survey.TERMS_KEPT + 2):
        root.put(term_path(number + 1), root.read(term_path(1), 1 << 20))
        root.put(heartbeat_path(number + 1), b"old")
        root.put(epochs_path(number + 1), b"old")
    newest = survey.TERMS_KEPT + 2
    names = [f"control/{1:020d}-stop-a.json", f"control/{newest:020d}-stop-b.json", "_probe-77"]
    names += [f"control/{newest:020d}-savepoint-c.json", f"control/{newest:020d}-savepoint-c.answer.json"]
    for name in names:
        root.put(name, b"x")
    root.put(heartbeat_path(newest), encode_document("heartbeat", _status(newest, clock)))
    clock.advance_s(3 * DAY_S)
    gone = collected(job)
    assert gone == {
        ORPHAN,
        names[0],
        "_probe-77",
        names[3],
        names[4],
        *(boundary_path(n) for n in (1, 2)),  # the last one before the newest tells a sleeper that the root is his
        *(path(n) for n in (1, 2) for path in (term_path, heartbeat_path, epochs_path)),
        pin_path(2, "late"),
        *(p for p in gone if p.startswith(f"pins/{3:020d}")),
    }
    assert len([p for p in gone if p.startswith("pins/")]) == 2
    assert root.exists(held.path)


def _status(term: int, clock: FakeClock) -> Any:
    from state_runtime.snapshot.term_files import RunStatus

    return RunStatus(term, "r", "stopped", clock.now_ms(), 0, 2.0, 1, "h")


def test_an_answered_request_goes_before_its_answer() -> None:
    """The other way round a crash would make it a request again."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock)
    request = f"control/{1:020d}-savepoint-c"
    for ending in (".json", ".answer.json"):
        job.root.put(request + ending, b"x")
    world.clock.advance_s(3 * DAY_S)
    plan = planned(job.root, job.clock)
    for at in range(1, 200):
        copy = world.copy()
        with dying():
            applied(copy.root(before=Death(at)), plan, copy.clock)
        assert not (request + ".json" in copy.names() and request + ".answer.json" not in copy.names())
        if not {request + ".json", request + ".answer.json"} & copy.names():
            break
    else:
        pytest.fail("it was never collected")


def test_savepoints_that_failed_long_ago_go_and_others_stay(job: Job, world: FakeWorld) -> None:
    now_ms = job.clock.now_ms()
    for name, state in (("bad", "FAILED"), ("void", "ABANDONED"), ("good", "COMPLETED"), ("busy", "IN_PROGRESS")):
        create_savepoint(
            job.root,
            SavepointRecord(
                name,
                f"u-{name}",
                JOB,
                "j",
                state,
                "schedule",
                now_ms,
                "o",
                now_ms,
                finished_at_ms=now_ms,  # type: ignore[arg-type]
            ),
        )
        job.root.put(f"{savepoint_path(name)}/changelog/{1:020d}/x.seg", b"copied")
    assert not planned(job.root, job.clock).savepoints
    world.clock.advance_s(8 * DAY_S)
    plan = planned(job.root, job.clock)
    assert [name for name, _ in plan.savepoints] == ["bad", "void"]
    assert applied(job.root, plan, job.clock).savepoints == ("bad", "void")
    assert not [n for n in world.names() if n.startswith(("savepoints/bad", "savepoints/void"))]
    assert len([n for n in world.names() if n.startswith(("savepoints/good", "savepoints/busy"))]) == 4


def test_the_look_before_an_unattended_collection_stands_up_for_what_counts_whatever_the_plan_says(job: Job) -> None:
    """Apart from what made the plan: snapshots that have not expired, what they need, and savepoints that are complete."""
    now_ms = job.clock.now_ms()
    for name, state in (("bad", "FAILED"), ("good", "COMPLETED")):
        times = (now_ms, "o", now_ms)
        record = SavepointRecord(name, f"u-{name}", JOB, "j", state, "schedule", *times, finished_at_ms=now_ms)  # type: ignore[arg-type]
        create_savepoint(job.root, record)
    job.clock.advance_s(8 * DAY_S)
    plan = planned(job.root, job.clock)
    assert [name for name, _ in plan.savepoints] == ["bad"]
    assert not dangers_of_collection(job.root, plan, clock=job.clock, share_max=1.0)
    newest = job.committer.last
    needed = newest.segments[-1]
    spoilt = replace(
        plan,
        savepoints=(*plan.savepoints, ("good", "no reason")),
        given_up=(newest.snapshot_id,),
        candidates=(*plan.candidates, Candidate(needed.path, "segment", needed.total_bytes, 0, "no reason")),
    )
    assert dangers_of_collection(job.root, spoilt, clock=job.clock, share_max=1.0) == [
        f"{needed.path} is needed now",
        f"snapshot {newest.snapshot_id} has not expired",
        "savepoint 'good' is complete, and only retention or a user deletes it",
    ]


# --- plans -----------------------------------------------------------------------------------------------------------


def test_only_what_both_passes_found_is_deleted(job: Job, world: FakeWorld) -> None:
    plan = planned(job.root, job.clock)
    second = segment_path(1, "00000000000000000003-second.seg")
    job.root.put(second, b"written since")
    world.times[f"/store/{JOB}/{second}"] = 0
    done = applied(job.root, plan, job.clock)
    assert done.objects == {"segment": 1}
    assert second in world.names()


def test_an_object_that_was_written_anew_since_the_plan_stays(job: Job, world: FakeWorld) -> None:
    plan = planned(job.root, job.clock)
    job.root.put(ORPHAN, b"orphan")
    done = applied(job.root, plan, job.clock)
    assert (done.total, done.kept) == (0, 1)
    assert ORPHAN in world.names()


def test_a_plan_of_another_job_or_an_old_one_is_refused(job: Job, world: FakeWorld) -> None:
    plan = planned(job.root, job.clock)
    with pytest.raises(InvalidConfiguration, match="was made for job"):
        applied(job.root, replace(plan, made=replace(plan.made, job_uid="other")), job.clock)
    with pytest.raises(InvalidConfiguration, match="was made for job"):
        applied(job.root, replace(plan, made=replace(plan.made, place="elsewhere")), job.clock)
    world.clock.advance_s(8 * DAY_S)
    with pytest.raises(InvalidConfiguration, match="days old"):
        applied(job.root, plan, job.clock)
    assert ORPHAN in world.names()


def test_a_plan_is_a_document_that_comes_back_as_it_was(job: Job, tmp_path: Path) -> None:
    plan = planned(job.root, job.clock)
    plan.write(tmp_path / "plan")
    assert GcPlan.read(tmp_path / "plan") == plan
    body = (tmp_path / "plan").read_bytes()
    (tmp_path / "plan").write_bytes(body.replace(b"orphan", b"needed"))
    with pytest.raises(CorruptManifest):
        GcPlan.read(tmp_path / "plan")
    with pytest.raises(InvalidConfiguration):
        GcPlan.read(tmp_path / "none")
    with pytest.raises(InvalidConfiguration):
        plan.write(tmp_path / "no" / "folder")


def test_a_plan_of_an_earlier_version_is_read(job: Job, tmp_path: Path) -> None:
    """Its `made` said one number more, the boundary's, which nobody looked at; who has planned already can execute."""

    @dataclass(frozen=True)
    class MadeBefore(Made):
        boundary_sequence: int = 7

    plan = planned(job.root, job.clock)
    before = MadeBefore(**asdict(plan.made))
    replace(plan, made=before).write(tmp_path / "plan")
    assert b"boundary_sequence" in (tmp_path / "plan").read_bytes()
    assert GcPlan.read(tmp_path / "plan") == plan


def test_a_plan_may_be_executed_twice(job: Job) -> None:
    plan = planned(job.root, job.clock)
    assert applied(job.root, plan, job.clock).total == 1
    again = applied(job.root, plan, job.clock)
    assert (again.total, again.failures) == (0, ())


# --- faults and races ------------------------------------------------------------------------------------------------


def test_a_key_that_cannot_be_deleted_is_named_and_the_others_go(job: Job, world: FakeWorld) -> None:
    other = segment_path(1, "00000000000000000003-other.seg")
    job.root.put(other, b"x")
    world.times[f"/store/{JOB}/{other}"] = 0

    def refuse(operation: str, path: str) -> None:
        if operation == "delete" and path.endswith(ORPHAN):
            raise PermissionError(errno.EACCES, "AccessDenied")

    done = applied(world.root(before=refuse), planned(job.root, job.clock), job.clock)
    assert [f.path for f in done.failures] == [ORPHAN]
    assert done.objects == {"segment": 1}
    assert collected(job) == {ORPHAN}


def busy_world() -> tuple[FakeWorld, Job]:
    """Orphans, a fold that is not adopted, given-up snapshots, a pin: something of everything."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock, inline_bytes_max=0).checkpoints(2)
    job.fold()
    job.checkpoint()
    job.root.put(ORPHAN, b"orphan")
    with dying():
        delete_snapshots(
            world.root(before=dies_at_first_delete), [1, 2], clock=job.clock, ids=CountingIds(2), threads=1
        )
    pin_snapshot(job.root, 3, reason="user", holder="somebody", clock=job.clock, ids=CountingIds(3))
    world.clock.advance_s(2 * DAY_S)
    job.checkpoint()
    return world, job


def test_a_death_at_any_request_harms_nothing_and_the_next_collection_ends_it() -> None:
    prepared, job = busy_world()
    plan = planned(prepared.root(), job.clock)
    whole = prepared.copy()
    applied(whole.root(), plan, job.clock)
    for at in range(1, 500):
        world = prepared.copy()
        death = Death(at)
        with dying():
            applied(world.root(before=death), plan, job.clock)
        job.check(world.root(), rows=False)
        applied(world.root(), planned(world.root(), job.clock), job.clock)
        assert world.names() == whole.names()
        if death.count < at:
            break
    assert at > 40


def test_two_at_once_do_what_one_does() -> None:
    prepared, job = busy_world()
    plan = planned(prepared.root(), job.clock)
    whole = prepared.copy()
    applied(whole.root(), plan, job.clock)
    for at in range(1, 500):
        world = prepared.copy()
        interrupt = Interrupt(at, lambda world=world: applied(world.root(), plan, job.clock))  # type: ignore[misc]
        done = applied(world.root(before=interrupt), plan, job.clock)
        assert not done.failures
        job.check(world.root(), rows=False)
        assert world.names() == whole.names()
        if interrupt.count < at:
            break
    assert at > 40


def lives(job: Job, world: FakeWorld, at: int, split: int) -> set[str]:
    """A collection without a floor, while the job writes a segment before request `at` and commits it before `at + split`."""
    segment: list[Any] = []

    def write() -> None:
        job.writer.manifest = job.committer.last
        segment.append(job.writer.epoch({("k0", 0.0): (100, "y")}))
        world.clock.advance_s(1)

    def commit() -> None:
        job.committer.commit(replace(segment[0], kind="checkpoint"))

    steps = {at: write, at + split: commit}
    count = 0

    def before(operation: str, path: str) -> None:
        nonlocal count
        count += 1
        step = steps.pop(count, None)
        if step is not None:
            step()

    plan = planned(world.root(before=before), job.clock, min_age_s=0, unsafe_min_age=True)
    applied(world.root(before=before), plan, job.clock)
    for step in list(steps.values()):
        step()
    job.check(world.root(), rows=False)
    return world.names()


@pytest.mark.parametrize("split", [1, 3, 8, 25])
def test_a_live_job_loses_nothing_although_the_floor_is_none(split: int) -> None:
    """The order of reads alone: watermark, manifests, listing, and both passes."""
    for at in range(1, 110, 2):
        world = FakeWorld()
        job = Job(world.connect(), world.clock).checkpoints(3)
        world.clock.advance_s(10)
        job.root.put(ORPHAN, b"orphan")
        world.clock.advance_s(10)
        job.checkpoint()
        assert ORPHAN not in lives(job, world, at, split)


# --- every guard is needed -------------------------------------------------------------------------------------------


def loses(run: Callable[[], object]) -> None:
    """With a guard removed something that is needed is lost."""
    with pytest.raises((AssertionError, StillstateError, FileNotFoundError)):
        run()


def test_without_the_watermark_a_live_job_loses_its_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_watermark_ms", lambda root, newest, now_ms: 1 << 60)
    monkeypatch.setattr(survey.Survey, "_is_under_way", lambda self, kind, path: False)
    loses(lambda: [test_a_live_job_loses_nothing_although_the_floor_is_none(split) for split in (3, 8, 25)])


def test_without_the_materializations_needs_a_fold_under_way_loses_its_tables(
    monkeypatch: pytest.MonkeyPatch, job: Job, world: FakeWorld
) -> None:
    from state_runtime.materialize.records import Protected

    monkeypatch.setattr(Protected, "keeps", lambda self, path: False)
    loses(lambda: test_tables_of_a_fold_under_way_and_of_a_record_are_kept(job, world))


def test_without_the_check_of_what_is_missing_a_damaged_root_is_swept(
    monkeypatch: pytest.MonkeyPatch, job: Job
) -> None:
    job.root.delete(job.catalog.manifest(5).segments[0].path)
    monkeypatch.setattr(survey.Survey, "_check", lambda self, suspects: None)
    assert planned(job.root, job.clock).candidates


def test_without_both_passes_what_came_between_is_deleted(
    monkeypatch: pytest.MonkeyPatch, job: Job, world: FakeWorld
) -> None:
    plan = planned(job.root, job.clock)
    job.root.put(ORPHAN, b"another one")
    monkeypatch.setattr(gc, "_delete", _delete_planned(plan))
    applied(job.root, plan, job.clock)
    assert ORPHAN not in world.names()


def _delete_planned(plan: GcPlan) -> Any:
    real = gc._delete
    return lambda root, chosen, *rest: real(root, plan.candidates, *rest)


def test_local_times_are_when_a_name_came_to_be(tmp_path: Path) -> None:
    """A hard link or `cp -a` keeps the time of writing of its source: the copy would look old at once."""
    store = open_store(str(tmp_path))
    store.put("a", b"x")
    os.utime(tmp_path / "a", (1, 1))
    store.copy("a", "b")
    assert all(o.modified_ms > 1_000_000_000_000 for o in store.list_objects(""))


def test_marks_are_of_a_commit_and_not_of_an_id(job: Job, world: FakeWorld) -> None:
    """The same id may be another snapshot by now, for whoever has not proven that the root is still his own."""
    marker = marks.Marker(job.root, job.clock)
    known = marker.of(5)[0]
    other = replace(job.catalog.manifest(5), commit_id="another-commit", segments=())
    world.objects[f"/store/{JOB}/{manifest_path(5)}"] = other.encode()
    assert marker.of(5)[0] != known
    assert not [path for path in marker.of(5)[0] if path.endswith(".seg")]


def test_marks_of_a_snapshot_are_read_once(job: Job, world: FakeWorld) -> None:
    reads: list[str] = []
    root = world.root(before=lambda operation, path: reads.append(path) if operation == "read" else None)
    marker = marks.Marker(root, job.clock, is_proven=True)
    marks.mark(root, marker, job.clock)
    first = [p for p in reads if p.endswith("manifest.json")]
    marks.mark(root, marker, job.clock)
    assert [p for p in reads if p.endswith("manifest.json")] == first
    marker.forget_all_but([5])
    assert marker.recall(4) is None
    assert marker.recall(5) is not None
