"""Starting a run and committing: what is refused, and what stays untouched."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from model import CountingIds, DictStore, FakeClock, empty_manifest

from state_runtime.base.actor import Actor
from state_runtime.base.errors import (
    CorruptManifest,
    Fenced,
    JobAlreadyRunning,
    JobNotFound,
    MissingSnapshot,
    OutcomeUnknown,
    UnsupportedFormat,
)
from state_runtime.base.process_space import process_space
from state_runtime.driver.start_position import StartPosition
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.control import pending_stop, request_stop
from state_runtime.snapshot.document import FORMAT_VERSION, FORMAT_WITH_SOURCES, encode_document
from state_runtime.snapshot.expiry_boundary import ExpiryBoundary, read_boundary
from state_runtime.snapshot.fencing import live_run, open_job_root, open_run, refuse_if_live
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.snapshot.manifest import Manifest, SourcePosition, StagedFile, StagedOutput
from state_runtime.snapshot.paths import JOB_FILE, boundary_path, heartbeat_path, manifest_path, term_path
from state_runtime.snapshot.term_files import RunState, RunStatus, newest_term, read_status, write_status
from state_runtime.store import Created

HERE = socket.gethostname()


@pytest.fixture
def store() -> DictStore:
    return DictStore()


@pytest.fixture
def catalog(store: DictStore, clock: FakeClock) -> Catalog:
    return Catalog(store, "job", clock)


def start(catalog: Catalog, clock: FakeClock, ids: CountingIds) -> Committer:
    info = open_job_root(catalog.root, "job", clock=clock, ids=ids)
    return open_run(catalog, info, empty_manifest(info.uid), actor=Actor(clock, ids, HERE, 1))


def test_the_first_start_makes_a_root_a_term_and_a_fencing_snapshot(
    catalog: Catalog, clock: FakeClock, ids: CountingIds
) -> None:
    """And a second start takes over from exactly there."""
    first = start(catalog, clock, ids)
    assert (first.term.term, first.last.snapshot_id, first.last.kind) == (1, 1, "fencing")
    assert catalog.latest() == first.last
    second = start(catalog, clock, ids)
    assert second.info == first.info
    assert (second.term.term, second.last.snapshot_id, second.last.term) == (2, 2, 2)


def test_a_fencing_snapshot_has_the_content_of_the_newest(catalog: Catalog, clock: FakeClock, ids: CountingIds) -> None:
    """Output that was committed and not yet published must be in it, or a crash would lose it."""
    first = start(catalog, clock, ids)
    output = StagedOutput("out", 2, (StagedFile("a", "b", 1, 1),))
    source = SourcePosition(0, "{}", "v1", "", "{}")
    committed = first.commit(
        replace(first.last, kind="checkpoint", outputs=(output,), source=source, versions={"op": "-" * 16})
    )
    fencing = start(catalog, clock, ids).last
    unchanged = replace(
        fencing,
        kind="checkpoint",
        snapshot_id=committed.snapshot_id,
        term=committed.term,
        commit_id=committed.commit_id,
        created_at_ms=committed.created_at_ms,
        previous=committed.previous,
    )
    assert unchanged == committed


def test_a_fenced_committer_stays_fenced_and_says_who(catalog: Catalog, clock: FakeClock, ids: CountingIds) -> None:
    """Whoever lost the job once must not win a later id by luck."""
    old = start(catalog, clock, ids)
    start(catalog, clock, ids)
    with pytest.raises(Fenced, match=r"newest term 2, this is term 1\); this run stops and publishes nothing"):
        old.commit(old.last)
    catalog.root.delete(manifest_path(2))
    with pytest.raises(Fenced):
        old.commit(old.last)
    assert catalog.root.list_names("snapshots") == ["00000000000000000001"]


def test_an_unknown_outcome_is_passed_on_and_nothing_is_cleaned_up(
    catalog: Catalog, clock: FakeClock, ids: CountingIds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest may be there: the next run finds it and goes on from it."""
    first = start(catalog, clock, ids)
    create = DictStore.create

    def lose(self: DictStore, path: str, body: bytes) -> Created:
        create(self, path, body)
        raise OutcomeUnknown("lost")

    monkeypatch.setattr(DictStore, "create", lose)
    with pytest.raises(OutcomeUnknown):
        first.commit(replace(first.last, kind="checkpoint", versions={"op": "x"}))
    monkeypatch.undo()
    assert start(catalog, clock, ids).last.versions == {"op": "x"}


@pytest.mark.parametrize("damage", ["empty", "half", "flip", "newer", "other id"])
def test_a_damaged_newest_manifest_stops_the_start_and_nothing_is_written(
    store: DictStore, catalog: Catalog, clock: FakeClock, ids: CountingIds, damage: str
) -> None:
    """Going on from an older snapshot, or over the damaged one, would lose data without a word."""
    run = start(catalog, clock, ids)
    run.commit(replace(run.last, kind="checkpoint"))
    at = f"job/{manifest_path(2)}"
    body = store.objects[at]
    flipped = bytes([*body[:-10], body[-10] ^ 1, *body[-9:]])
    store.objects[at] = {
        "empty": b"",
        "half": body[: len(body) // 2],
        "flip": flipped,
        "newer": encode_document("manifest", run.last, FORMAT_WITH_SOURCES + 1),
        "other id": replace(run.last, snapshot_id=7).encode(),
    }[damage]
    before = dict(store.objects)
    with pytest.raises(UnsupportedFormat if damage == "newer" else CorruptManifest):
        start(catalog, clock, ids)
    assert store.objects == before


@pytest.mark.parametrize("body", [b"", b"{}", b"\0" * 100])
def test_a_damaged_boundary_or_job_file_stops_the_start(
    store: DictStore, catalog: Catalog, clock: FakeClock, ids: CountingIds, body: bytes
) -> None:
    """A guard that cannot be read is not "nothing was collected"."""
    run = start(catalog, clock, ids)
    catalog.root.put(boundary_path(1), body)
    with pytest.raises(CorruptManifest):
        run.commit(run.last)
    with pytest.raises(CorruptManifest):
        start(catalog, clock, ids)
    catalog.root.delete(boundary_path(1))
    catalog.root.put(JOB_FILE, body)
    before = dict(store.objects)
    with pytest.raises(CorruptManifest):
        start(catalog, clock, ids)
    assert store.objects == before


def test_a_root_of_a_newer_version_is_refused_untouched(store: DictStore, clock: FakeClock, ids: CountingIds) -> None:
    """A downgrade must not write old formats among new ones."""
    info = JobInfo("u", "job", 32768, FORMAT_WITH_SOURCES + 1, 0)
    store.child("job").put(JOB_FILE, encode_document("job", info, FORMAT_WITH_SOURCES + 1))
    before = dict(store.objects)
    with pytest.raises(UnsupportedFormat, match="Upgrade"):
        open_job_root(store.child("job"), "job", clock=clock, ids=ids)
    assert store.objects == before


def test_first_starts_at_the_same_instant_agree_on_one_job(store: DictStore, clock: FakeClock) -> None:
    """Only one uid wins, and every starter gets that one."""
    together = threading.Barrier(6)
    found: list[JobInfo] = []

    def run(number: int) -> None:
        together.wait()
        found.append(open_job_root(store.child("job"), "job", clock=clock, ids=CountingIds(number)))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({info.uid for info in found}) == 1
    assert len(found) == 6


def test_a_collected_id_is_fenced_at_the_start_too(catalog: Catalog, clock: FakeClock, ids: CountingIds) -> None:
    """A root whose manifests vanished looks new; the boundary tells that it is not."""
    start(catalog, clock, ids)
    catalog.root.delete(manifest_path(1))
    catalog.root.put(boundary_path(1), encode_document("boundary", ExpiryBoundary(1, 5, (), 0, "u")))
    with pytest.raises(Fenced, match="collected boundary 5"):
        start(catalog, clock, ids)
    assert read_boundary(catalog.root).snapshot_id == 5


def beat(
    catalog: Catalog,
    state: RunState,
    clock: FakeClock,
    pid: int,
    host: str = HERE,
    interval_s: float = 2.0,
    space: str = "",
) -> None:
    term = newest_term(catalog.root)
    write_status(
        catalog.root,
        RunStatus(term, "r", state, clock.now_ms(), clock.now_ms(), interval_s, pid, host, process_space=space),
    )


def dead_pid() -> int:
    """A process id that surely belongs to nobody any more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("state", ["running", "starting"])
def test_a_second_driver_is_turned_away_by_a_live_one(
    catalog: Catalog, clock: FakeClock, ids: CountingIds, state: RunState
) -> None:
    """A typing error must not take a job over; the message says how to do it on purpose."""
    refuse_if_live(catalog, clock)
    start(catalog, clock, ids)
    beat(catalog, state, clock, pid=1, host="elsewhere")
    with pytest.raises(JobAlreadyRunning, match=r"term 1 .*on elsewhere.*stillstate stop job.*--takeover"):
        refuse_if_live(catalog, clock)


def test_a_run_that_has_claimed_and_not_spoken_yet_is_live(
    catalog: Catalog, clock: FakeClock, ids: CountingIds
) -> None:
    """Java and Spark need a while to start; there is no heartbeat before that."""
    open_run(
        catalog,
        open_job_root(catalog.root, "job", clock=clock, ids=ids),
        empty_manifest(),
        actor=Actor(clock, ids, "elsewhere", 1),
    )
    with pytest.raises(JobAlreadyRunning):
        refuse_if_live(catalog, clock)
    clock.advance_s(31)
    refuse_if_live(catalog, clock)


@pytest.mark.parametrize("state", ["stopped", "finished", "failed", "fenced"])
def test_an_ended_run_turns_nobody_away(catalog: Catalog, clock: FakeClock, ids: CountingIds, state: RunState) -> None:
    """Its heartbeat is fresh, but says that it is over."""
    start(catalog, clock, ids)
    beat(catalog, state, clock, pid=1, host="elsewhere")
    refuse_if_live(catalog, clock)


def test_a_silent_run_turns_nobody_away(catalog: Catalog, clock: FakeClock, ids: CountingIds) -> None:
    """Five intervals without a word; and a clock that jumped back makes nobody dead."""
    start(catalog, clock, ids)
    beat(catalog, "running", clock, pid=1, host="elsewhere")
    clock.advance_s(9.9)
    with pytest.raises(JobAlreadyRunning):
        refuse_if_live(catalog, clock)
    clock.advance_s(0.2)
    refuse_if_live(catalog, clock)
    clock.advance_s(-3600)
    with pytest.raises(JobAlreadyRunning):
        refuse_if_live(catalog, clock)


def test_a_live_run_in_another_container_of_the_same_host_name_is_not_taken_for_dead(
    catalog: Catalog, clock: FakeClock, ids: CountingIds
) -> None:
    """A pod and its replacement, `hostname:` of a compose file: its process id is nobody's here, and that says nothing. Whoever
    deletes, moves, claims, rolls back or starts asks `live_run`."""
    start(catalog, clock, ids)
    pid = dead_pid()
    beat(catalog, "running", clock, pid=pid, space=process_space())
    assert live_run(catalog, clock) is None
    beat(catalog, "running", clock, pid=pid, space="another boot:1")
    assert live_run(catalog, clock) is not None
    clock.advance_s(11)
    assert live_run(catalog, clock) is None, "its heartbeat says in the end that it is gone"


@pytest.mark.parametrize(
    ("space", "is_live"), [("another boot:1", True), (process_space(), False), ("", False)], ids=["other", "own", "old"]
)
def test_a_run_that_has_not_spoken_yet_tells_by_its_term_where_its_process_is(
    catalog: Catalog, clock: FakeClock, ids: CountingIds, space: str, is_live: bool
) -> None:
    """Between its claim and its first heartbeat. Without the space, as earlier versions wrote terms, the name of the
    host must do; their bytes are what they were."""
    beginning = StartPosition(catalog, clock=clock, ids=ids)
    beginning.look()
    opened = beginning.open(lambda info: empty_manifest(), host=HERE, pid=dead_pid(), process_space=space)
    status = catalog.status()
    assert status is not None
    assert (status.state, status.process_space) == ("starting", space)
    assert (live_run(catalog, clock) is not None) == is_live
    body = json.loads(catalog.root.read(term_path(opened.term.term), 10_000).splitlines()[1])
    assert ("process_space" in body) == bool(space)


def test_a_run_whose_process_is_gone_from_this_host_turns_nobody_away(
    catalog: Catalog, clock: FakeClock, ids: CountingIds
) -> None:
    """After a kill -9 the restart need not wait; of another host nothing is known."""
    start(catalog, clock, ids)
    pid = dead_pid()
    beat(catalog, "running", clock, pid=pid)
    refuse_if_live(catalog, clock)
    beat(catalog, "running", clock, pid=pid, host="elsewhere")
    with pytest.raises(JobAlreadyRunning):
        refuse_if_live(catalog, clock)
    beat(catalog, "running", clock, pid=os.getpid())
    with pytest.raises(JobAlreadyRunning):
        refuse_if_live(catalog, clock)


def test_a_status_is_the_newest_runs_and_no_other(catalog: Catalog, clock: FakeClock, ids: CountingIds) -> None:
    """A zombie that goes on beating must not look like the job."""
    assert catalog.status() is None
    start(catalog, clock, ids)
    beat(catalog, "running", clock, pid=1)
    start(catalog, clock, ids)
    status = read_status(catalog.root)
    assert status is not None
    assert (status.term, status.state) == (2, "starting")


def test_a_damaged_heartbeat_is_corrupt_not_dead(catalog: Catalog, clock: FakeClock, ids: CountingIds) -> None:
    """Guessing "dead" would start a second driver."""
    start(catalog, clock, ids)
    catalog.root.put(heartbeat_path(1), b"{")
    with pytest.raises(CorruptManifest):
        refuse_if_live(catalog, clock)


def test_the_catalog_says_what_is_missing_and_what_there_is(
    catalog: Catalog, clock: FakeClock, ids: CountingIds
) -> None:
    """Errors that help."""
    with pytest.raises(JobNotFound, match="appears with the job's first start"):
        catalog.job_info()
    assert catalog.latest() is None
    run = start(catalog, clock, ids)
    run.commit(run.last)
    with pytest.raises(MissingSnapshot, match="the newest are: 1, 2"):
        catalog.manifest(9)
    assert catalog.snapshot_ids() == [1, 2]
    assert catalog.snapshot_ids(after=1) == [2]


def test_a_folder_without_manifest_is_no_snapshot(catalog: Catalog, clock: FakeClock, ids: CountingIds) -> None:
    """Its writer died before the manifest, or is about to finish."""
    run = start(catalog, clock, ids)
    catalog.root.put("snapshots/00000000000000000002/other", b"x")
    assert catalog.latest() == run.last


def test_a_stop_request_reaches_its_term_only(
    store: DictStore, catalog: Catalog, clock: FakeClock, ids: CountingIds
) -> None:
    """A request to an older run must not stop the new one."""
    request_stop(store, "job", 1, clock=clock, ids=ids)
    request_stop(store, "job", 1, clock=clock, ids=ids)
    found = pending_stop(catalog.root, 1)
    assert found is not None
    assert (found.action, found.term) == ("stop", 1)
    assert pending_stop(catalog.root, 2) is None
    assert pending_stop(catalog.root, 10) is None


def test_a_manifest_names_its_job(catalog: Catalog, clock: FakeClock, ids: CountingIds) -> None:
    """Identity fields are the committer's, whatever the draft says."""
    run = start(catalog, clock, ids)
    fencing = run.last
    draft = replace(fencing, job_uid="forged", snapshot_id=99, term=99, commit_id="forged", format_version=9)
    committed: Manifest = run.commit(draft)
    assert (committed.job_uid, committed.snapshot_id, committed.term) == (run.info.uid, 2, 1)
    assert committed.commit_id not in ("forged", fencing.commit_id)
    assert committed.format_version == FORMAT_VERSION
