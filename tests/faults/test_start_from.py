"""Jobs that begin from any snapshot: within a store and across stores, with other settings, several from one, and after every crash."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model import SECRET, empty_manifest

from state_runtime.base.actor import Actor
from state_runtime.base.errors import (
    CorruptData,
    CorruptManifest,
    Fenced,
    InvalidConfiguration,
    JobAlreadyRunning,
    JobRootMismatch,
    MissingFile,
    MissingSnapshot,
    SnapshotExpired,
    SnapshotInUse,
    StoreRefused,
    UnsupportedFormat,
)
from state_runtime.driver.rollback import execute_rollback, plan_rollback
from state_runtime.driver.start_position import StartFrom
from state_runtime.maintenance.convert.into_savepoint import convert_small
from state_runtime.maintenance.copy.make_savepoint import SavepointWork, savepoint_of_stopped
from state_runtime.maintenance.copy.objects import CopyProgress, needed_objects
from state_runtime.maintenance.delete.claimed import end_claim
from state_runtime.maintenance.delete.roots import delete_root
from state_runtime.maintenance.delete.snapshots import delete_snapshots
from state_runtime.maintenance.verify.roots import verify_root
from state_runtime.pipeline.compatibility import refuse_drained
from state_runtime.reading.references import references
from state_runtime.snapshot import fencing
from state_runtime.snapshot.catalog import Catalog, read_job_info
from state_runtime.snapshot.claim import read_claim
from state_runtime.snapshot.document import FORMAT_WITH_SOURCES, encode_document
from state_runtime.snapshot.expiry_boundary import advance_boundary
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.snapshot.manifest import Manifest, StagedFile, StagedOutput
from state_runtime.snapshot.paths import CLAIM_FILE, JOB_FILE, manifest_path
from state_runtime.snapshot.pins import pin_snapshot, read_pins, unpin
from state_runtime.snapshot.savepoint_record import SavepointFormat, SavepointRecord, create_savepoint
from state_runtime.store import LocalStore, Store, open_store
from tests.faults import engine
from tests.faults.starts import BATCHES, Shop, World, expected_output, listing
from tests.s3_server import CountingServer

ROUTES = ("local → local", "local → s3", "s3 → local", "s3 → s3")


@pytest.fixture(scope="module")
def server() -> Iterator[CountingServer]:
    with CountingServer() as running:
        yield running


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def local(tmp_path: Path) -> Shop:
    return Shop(str(tmp_path / "store"))


@pytest.fixture
def shops(server: CountingServer, tmp_path: Path) -> Callable[[str], tuple[Shop, Shop]]:
    """The stores of a route: of the source, and of the job that begins."""

    def made(route: str) -> tuple[Shop, Shop]:
        def shop(kind: str, name: str) -> Shop:
            if kind == "local":
                return Shop(str(tmp_path / name))
            return Shop(f"s3://{server.bucket}/{tmp_path.name}/{name}", server.options)

        first, second = route.split(" → ")
        return shop(first, "theirs"), shop(second, "ours")

    return made


def grown(world: World, shop: Shop, job: str = "old") -> None:
    """A job after four batches: a base table, a tail with packed and with direct segments, a local copy on the host."""
    world.run(job, shop, 2)
    world.fold(job, shop)
    world.run(job, shop, 4, inline_bytes_max=0)
    assert world.newest(job, shop).layers
    assert world.newest(job, shop).segments


# --- NO_CLAIM ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("route", ROUTES)
def test_several_jobs_begin_from_one_snapshot_and_the_source_may_go_after_the_first_checkpoint(
    world: World, shops: Callable[[str], tuple[Shop, Shop]], route: str
) -> None:
    """Each with settings of its own: parallelism, backend, changelog. The source's files are the same bytes before and after."""
    theirs, ours = shops(route)
    grown(world, theirs)
    source = world.newest("old", theirs)
    before = listing(theirs.root("old"))
    world.run("one", ours, 5, theirs.start("old"), parallelism=3, backend="rocksdb")
    world.run("two", ours, 5, theirs.start("old"), parallelism=1, changelog="off")
    world.run("three", theirs, 5, theirs.start("old"))
    assert listing(theirs.root("old")) == before
    assert not read_pins(theirs.root("old"))
    deleted = delete_root(theirs.root("old"), clock=world.clock, ids=world.ids, owner="h:1")
    assert not deleted.failures
    assert not theirs.root("old").list_names("")
    for job, shop in (("one", ours), ("two", ours), ("three", theirs)):
        world.run(job, shop, 8, theirs.start("old"), parallelism=2)
        manifest = world.newest(job, shop)
        if manifest.shards is None:
            world.check(job, shop, 8)
        world.check_output(job, 4, 8)
        (origin,) = manifest.origins
        assert (origin.job_uid, origin.snapshot_id, origin.commit_id, origin.mode) == (
            source.job_uid, source.snapshot_id, source.commit_id, "NO_CLAIM",
        )  # fmt: skip
    assert (
        len({world.newest(job, shop).job_uid for job, shop in (("one", ours), ("two", ours), ("three", theirs))}) == 3
    )


def test_local_files_of_the_source_keep_bytes_and_times(world: World, local: Shop) -> None:
    """Not even a time changes, whatever is shared between the folders."""
    grown(world, local)
    root = Path(local.url) / "old"

    def seen() -> dict[str, tuple[int, int]]:
        return {
            str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in root.rglob("*") if p.is_file()
        }  # fmt: skip

    before = seen()
    world.run("new", local, 8, local.start("old"))
    assert seen() == before
    shutil.rmtree(root)
    world.run("new", local, 8)
    world.check("new", local, 8)


def test_the_first_ids_and_terms_follow_those_of_the_source(world: World, local: Shop) -> None:
    """Names of copied files hold ids and terms: what the job writes itself is always younger."""
    grown(world, local)
    source = world.newest("old", local)
    committer = world.open(world.beginning("new", local, local.start("old")))
    assert committer.last.snapshot_id == source.snapshot_id + 1
    assert committer.last.kind == "fencing"
    assert committer.term.term > source.term
    assert committer.last.epoch >= source.epoch


def test_output_of_the_source_is_not_the_job_s(world: World, local: Shop) -> None:
    """Whoever staged it publishes it; the child's first manifest does not name it."""
    grown(world, local)
    assert world.newest("old", local).outputs
    committer = world.open(world.beginning("new", local, local.start("old")))
    assert not committer.last.outputs
    assert not local.root("new").list_names("outputs")


def test_an_older_snapshot_may_be_named(world: World, local: Shop) -> None:
    grown(world, local)
    ids = Catalog(open_store(local.url), "old").snapshot_ids()
    wanted = ids[1]  # of the first batch
    world.run("new", local, 8, local.start("old", snapshot_id=wanted))
    world.check("new", local, 8)
    world.check_output("new", 1, 8)


def test_a_read_only_source_serves_without_a_pin(
    world: World, local: Shop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    grown(world, local)
    writes = ("create", "put", "put_file", "delete", "move")
    for name in writes:
        kept = getattr(LocalStore, name)

        def refusing(self: LocalStore, path: str, *args: Any, kept: Any = kept) -> Any:
            if self.url.startswith(str(tmp_path / "store" / "old")):
                raise StoreRefused("read-only file system")
            return kept(self, path, *args)

        monkeypatch.setattr(LocalStore, name, refusing)
    world.run("new", local, 8, local.start("old"))
    world.check("new", local, 8)


def test_the_snapshot_is_pinned_while_it_is_copied(world: World, local: Shop) -> None:
    grown(world, local)
    seen: list[tuple[int, str]] = []
    progress: list[CopyProgress] = []

    def on_copy(now: CopyProgress) -> None:
        progress.append(now)
        seen.extend((p.snapshot_id, p.reason) for p in read_pins(local.root("old")))

    world.open(world.beginning("new", local, local.start("old"), on_copy=on_copy))
    assert set(seen) == {(world.newest("old", local).snapshot_id, "start")}
    assert not read_pins(local.root("old"))
    assert progress[-1].objects_done == progress[-1].objects == len(progress)
    assert progress[-1].bytes_done == progress[-1].bytes > 0


def test_a_pin_of_a_long_copy_is_renewed(world: World, local: Shop) -> None:
    grown(world, local)
    lasting: list[int] = []

    def on_copy(now: CopyProgress) -> None:
        world.clock.advance_s(1800)
        lasting.extend(p.expires_at_ms - world.clock.now_ms() for p in read_pins(local.root("old")))

    world.open(world.beginning("new", local, local.start("old"), on_copy=on_copy))
    assert len(lasting) > 3
    assert all(left > 0 for left in lasting)


def test_a_restart_goes_on_from_its_own_snapshot(world: World, local: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """And says so, where it is told the very place that it began with. The source may have gone on, or be gone."""
    grown(world, local)
    world.run("new", local, 5, local.start("old"))
    world.run("old", local, 8)
    with caplog.at_level("INFO"):
        world.run("new", local, 8, local.start("old"))
    assert "it does not start from" in caplog.text
    world.check("new", local, 8)
    world.check_output("new", 4, 8)


def test_a_job_with_snapshots_does_not_silently_ignore_another_beginning(world: World, local: Shop) -> None:
    """Whoever says `--from …/before-upgrade` after a bad upgrade means to be back there. Going on from the bad state
    with exit code 0 would be taken for it."""
    grown(world, local)
    world.run("new", local, 5, local.start("old"))
    began_with = world.newest("new", local).origins[-1].snapshot_id
    savepoint = world.savepoint("new", local, "before-upgrade")
    world.run("new", local, 6)
    before = listing(local.root("new"))
    for start in (
        StartFrom(savepoint),
        local.start("other"),
        local.start("old", "CLAIM"),
        local.start("old", snapshot_id=began_with + 1),
    ):
        with pytest.raises(
            InvalidConfiguration, match=r"has snapshots of its own.*start_from.*rollback.*--from-snapshot"
        ) as said:
            world.beginning("new", local, start).look()
        assert start.place in str(said.value)
        assert f"{local.place('old')}@{began_with}" in str(said.value)
    with pytest.raises(InvalidConfiguration, match="has snapshots of its own"):
        world.beginning("old", local, local.start("new")).look()
    assert listing(local.root("new")) == before
    local.root("old").delete(JOB_FILE)  # the source need not exist any more
    for again in (local.start("old"), local.start("old", snapshot_id=began_with)):
        assert world.beginning("new", local, again).look() == world.newest("new", local)


def test_a_source_that_loses_a_file_gives_a_typed_error_and_no_snapshot(world: World, local: Shop) -> None:
    grown(world, local)
    manifest = world.newest("old", local)
    local.root("old").delete(manifest.layers[0].tables[0].path)
    with pytest.raises(MissingFile, match="is missing in"):
        world.open(world.beginning("new", local, local.start("old")))
    assert Catalog(open_store(local.url), "new").latest() is None


def test_a_snapshot_that_was_given_up_is_not_started_from(world: World, local: Shop) -> None:
    """Its manifest may still lie there, and its files be half gone."""
    grown(world, local)
    existing = Catalog(open_store(local.url), "old").snapshot_ids()
    advance_boundary(
        local.root("old"), lambda now: now.announcing(existing[:2], existing), clock=world.clock, ids=world.ids
    )
    with pytest.raises(SnapshotExpired, match="has expired"):
        world.beginning("new", local, local.start("old", snapshot_id=existing[1])).look()
    assert not local.root("new").list_names("")


@pytest.mark.parametrize(
    ("place", "error", "words"),
    [
        ("{store}/nobody", Exception, "neither a job root nor a savepoint"),
        ("{store}/old@77", MissingSnapshot, "has no snapshot 77"),
        ("{store}/old@x", InvalidConfiguration, "is not a snapshot id"),
        ("{store}/new", InvalidConfiguration, "cannot start from itself"),
    ],
)
def test_a_place_that_is_none_is_refused_before_anything_is_written(
    world: World, local: Shop, place: str, error: type[Exception], words: str
) -> None:
    grown(world, local)
    with pytest.raises(error, match=words):
        world.beginning("new", local, StartFrom(place.format(store=local.url))).look()
    assert not local.root("new").list_names("")


def test_a_start_that_was_killed_does_not_begin_empty(world: World, local: Shop) -> None:
    """A root that was to begin with a snapshot and has none yet: another start without it would lose everything without a word."""
    grown(world, local)

    def on_copy(now: CopyProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        world.open(world.beginning("new", local, local.start("old"), on_copy=on_copy))
    with pytest.raises(InvalidConfiguration, match=r"was begun from .*old@\d+ \(NO_CLAIM\) and has no snapshot yet"):
        world.beginning("new", local).look()
    with pytest.raises(InvalidConfiguration, match="was begun from"):
        world.beginning("new", local, local.start("old", snapshot_id=2)).look()
    with pytest.raises(InvalidConfiguration, match="was begun from"):
        world.beginning("new", local, local.start("old", "CLAIM")).look()
    # The source has gone on meanwhile: the job begins with what it was begun with.
    world.run("old", local, 6)
    world.run("new", local, 8, local.start("old"))
    world.check_output("new", 4, 8)


def test_what_a_killed_start_has_copied_is_not_copied_again(
    world: World, shops: Callable[[str], tuple[Shop, Shop]], server: CountingServer
) -> None:
    """Over both attempts each object is written once."""
    theirs, ours = shops("local → s3")
    grown(world, theirs)

    def on_copy(now: CopyProgress) -> None:
        if now.objects_done == 3:
            raise KeyboardInterrupt

    first = len(server.requests)
    with pytest.raises(KeyboardInterrupt):
        world.open(world.beginning("new", ours, theirs.start("old"), on_copy=on_copy))
    world.open(world.beginning("new", ours, theirs.start("old")))
    data = ("changelog", "tables")
    written = Counter(
        path for method, path in server.requests[first:] if method == "PUT" and path.split("/")[3] in data
    )
    assert len(written) > 3
    assert set(written.values()) == {1}


def test_two_first_starts_at_once_begin_with_one_snapshot(world: World, local: Shop) -> None:
    """Even if the source goes on between them. The later one takes the job over, as always."""
    grown(world, local)
    first = world.beginning("new", local, local.start("old"))
    first.look()
    world.run("old", local, 6)
    second = world.beginning("new", local, local.start("old"))
    second.look()
    one = first.open(lambda info: world.newest("old", local), host="h", pid=1)
    two = second.open(lambda info: world.newest("old", local), host="h", pid=2)
    assert two.last.snapshot_id == one.last.snapshot_id + 1
    assert two.last.origins == one.last.origins
    with pytest.raises(Fenced):
        one.commit(one.last)


def test_a_start_with_and_one_without_a_snapshot_do_not_both_win(world: World, local: Shop) -> None:
    """Their first ids differ, so creating them would not tell: job.json does."""
    grown(world, local)
    without, having = world.beginning("new", local), world.beginning("new", local, local.start("old"))
    assert without.look() is None
    having.look()

    def stop(now: CopyProgress) -> None:
        raise KeyboardInterrupt

    having._on_copy = stop
    with pytest.raises(KeyboardInterrupt):
        having.open(lambda info: world.newest("old", local), host="h", pid=1)
    with pytest.raises(InvalidConfiguration, match="does not begin empty"):
        without.open(lambda info: world.newest("old", local), host="h", pid=1)
    other, late = world.beginning("other", local), world.beginning("other", local, local.start("old"))
    other.look()
    late.look()
    other.open(lambda info: empty_manifest(info.uid), host="h", pid=1)
    with pytest.raises(InvalidConfiguration, match="begun empty by another start"):
        late.open(lambda info: world.newest("old", local), host="h", pid=1)


# --- crashes -----------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process is gone."""


class Dying:
    """Kills at the n-th write to any local store, before or after its effect."""

    WRITES = ("create", "put", "put_file", "delete", "move", "copy_from", "remove_empty_folders")

    def __init__(self, patch: pytest.MonkeyPatch, at: int, *, after: bool) -> None:
        self.count = 0
        self.dead = False
        lock = threading.Lock()
        for name in self.WRITES:
            kept = getattr(LocalStore, name)

            def dying(store: LocalStore, *args: Any, kept: Any = kept) -> Any:
                with lock:
                    self.count += 1
                    dies = self.count == at
                    if self.dead or (dies and not after):
                        self.dead = True
                        raise Killed
                    result = kept(store, *args)
                    if dies:
                        self.dead = True
                        raise Killed
                    return result

            patch.setattr(LocalStore, name, dying)


def killed_before_publishing(world: World, shop: Shop, job: str, until: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose driver dies after the manifest of its first checkpoint."""
    published, publish = world.newest(job, shop).epoch, engine.ParquetSink.publish

    def dying(sink: Any, spec: Any, output: StagedOutput, spark: Any) -> None:
        if output.epoch > published:
            raise Killed
        publish(sink, spec, output, spark)

    with monkeypatch.context() as patch:
        patch.setattr(engine.ParquetSink, "publish", dying)
        with pytest.raises(BaseException):  # noqa: B017 - the driver is gone
            world.run(job, shop, until)


@pytest.mark.parametrize("mode", ["NO_CLAIM", "CLAIM"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_beginning_that_was_killed_at_any_write_goes_on(tmp_path: Path, mode: str, after: bool) -> None:
    """Whatever was written: the same start again ends in the same place, and a claimed source is held by this job only."""
    prepared = World(tmp_path / "prepared")
    grown(prepared, Shop(str(tmp_path / "prepared" / "store")))
    for at in range(1, 200):
        world = World(tmp_path / str(at), ids=prepared.ids)
        shutil.copytree(tmp_path / "prepared", world.folder)
        shop = Shop(str(world.folder / "store"))
        before = listing(shop.root("old"))
        with pytest.MonkeyPatch.context() as patch:
            dying = Dying(patch, at, after=after)
            with contextlib.suppress(Killed):
                world.open(world.beginning("new", shop, shop.start("old", mode)))
        if not dying.dead:
            assert at > 10, "the kills must have reached every write"
            return
        if mode == "NO_CLAIM":
            assert listing(shop.root("old")) == before
        world.run("new", shop, 5, shop.start("old", mode))
        world.check("new", shop, 5)
        world.check_output("new", 4, 5)
        if mode == "NO_CLAIM":
            assert listing(shop.root("old")) == before
        else:
            assert not (world.folder / "store" / "old").exists(), f"killed at write {at}"
        shutil.rmtree(world.folder)
    raise AssertionError("no end")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_removal_that_was_killed_at_any_write_is_gone_on_with_by_the_next_run(tmp_path: Path, after: bool) -> None:
    """The old root is never readable as less than it was: whole, or given up."""
    prepared = World(tmp_path / "prepared")
    shop = Shop(str(tmp_path / "prepared" / "store"))
    grown(prepared, shop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "state_runtime.maintenance.delete.claimed.end_claim",
            lambda *_, **__: (_ for _ in ()).throw(StoreRefused("not now")),
        )
        prepared.run("new", shop, 5, shop.start("old", "CLAIM"))
    whole = prepared.newest("old", shop)
    uid = prepared.newest("new", shop).job_uid
    for at in range(1, 200):
        world = World(tmp_path / str(at), ids=prepared.ids)
        shutil.copytree(tmp_path / "prepared", world.folder)
        ours = Shop(str(world.folder / "store"))
        with pytest.MonkeyPatch.context() as patch:
            dying = Dying(patch, at, after=after)
            with contextlib.suppress(Killed):
                end_claim(ours.root("old"), uid, owner="h:1", clock=world.clock, ids=world.ids)
        if not dying.dead:
            assert at > 10
            return
        left = Catalog(open_store(ours.url), "old").latest()
        assert left is None or left == whole
        # The next run of the job goes on with it; `place` in job.json names the prepared folder, so it is called by hand.
        assert end_claim(ours.root("old"), uid, owner="h:1", clock=world.clock, ids=world.ids).gone
        assert not (world.folder / "store" / "old").exists(), f"killed at write {at}"
        world.check("new", ours, 5)
        shutil.rmtree(world.folder)
    raise AssertionError("no end")


# --- CLAIM -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
def test_claim_ends_with_the_old_root_empty_and_gone(
    world: World, shops: Callable[[str], tuple[Shop, Shop]], route: str
) -> None:
    """After the first checkpoint; not before."""
    theirs, ours = shops(route)
    grown(world, theirs)
    committer = world.open(world.beginning("new", ours, theirs.start("old", "CLAIM")))
    world.beat(committer, ours.root("new"), "finished")
    assert world.newest("old", theirs), "a job without a checkpoint of its own may still need it"
    world.run("new", ours, 8, theirs.start("old", "CLAIM"), parallelism=3)
    assert not list(theirs.root("old").list_objects(""))
    if route.startswith("local"):
        assert not (Path(theirs.url) / "old").exists()
    world.check("new", ours, 8)
    assert world.newest("new", ours).origins[-1].mode == "CLAIM"
    assert world.published("old") + world.published("new") == expected_output(0, 8)
    entries = list(world.out.glob("_stillstate/commits/*/*.json"))
    assert len(entries) == 8, "what the old job had published and the claimer published again has one entry"


def test_a_savepoint_is_claimed_whole_and_its_job_lives_on(world: World, local: Shop) -> None:
    grown(world, local)
    place = world.savepoint("old", local, "before")
    world.run("new", local, 8, StartFrom(place, "CLAIM"))
    world.check("new", local, 8)
    assert not (Path(local.url) / "old" / "savepoints" / "before").exists()
    world.run("old", local, 8)
    world.check("old", local, 8)
    world.check_output("old", 0, 8)
    world.check_output("new", 4, 8)


def test_a_claimed_root_refuses_to_run_and_to_be_started_from(world: World, local: Shop) -> None:
    """Each refusal names the claimer. So does a copy of it: nobody knows whose it is."""
    grown(world, local)
    world.open(world.beginning("new", local, local.start("old", "CLAIM")))
    shutil.copytree(Path(local.url) / "old", Path(local.url) / "copy")
    for job in ("old", "copy"):
        with pytest.raises(SnapshotInUse, match="was claimed by job 'new'"):
            world.beginning(job, local).look()
        for mode in ("NO_CLAIM", "CLAIM"):
            with pytest.raises(SnapshotInUse, match="was claimed by job 'new'"):
                world.beginning("other", local, local.start(job, mode)).look()
    assert not local.root("other").list_names("")


def test_a_run_that_did_not_see_the_claim_is_refused_or_fenced(
    world: World, local: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim's file and then its fence; a run's term and then its look: one of the two always meets the other."""
    grown(world, local)
    zombie = world.open(world.beginning("old", local))
    world.beat(zombie, local.root("old"), "running")
    world.clock.advance_s(3600)  # it sleeps
    world.open(world.beginning("new", local, local.start("old", "CLAIM")))
    with pytest.raises(Fenced):
        zombie.commit(zombie.last)
    # Another one begins just before the claim, and looks just after it.
    grown(world, local, "more")
    real, claimed = fencing.claim_term, []

    def claim_meanwhile(root: Store, **options: Any) -> Any:
        term = real(root, **options)
        if root.url.endswith("/more") and not claimed:
            claimed.append(True)
            world.clock.advance_s(3600)
            world.open(world.beginning("newer", local, local.start("more", "CLAIM")))
        return term

    late = world.beginning("more", local)
    late.look()
    monkeypatch.setattr(fencing, "claim_term", claim_meanwhile)
    before = world.newest("more", local)
    with pytest.raises(SnapshotInUse, match="was claimed by job 'newer'"):
        late.open(lambda info: before, host="h", pid=1)


def test_what_the_source_committed_before_the_fence_is_not_lost(world: World, local: Shop) -> None:
    """A driver that was silent for long commits once more, after the claimer has looked: the claimer begins with that."""
    grown(world, local)
    zombie = world.open(world.beginning("old", local))
    world.clock.advance_s(3600)
    claiming = world.beginning("new", local, local.start("old", "CLAIM"))
    claiming.look()
    last = zombie.commit(replace(zombie.last, kind="checkpoint", epoch=77))
    opened = claiming.open(lambda info: last, host="h", pid=1)
    assert opened.last.epoch == 77


def test_a_source_that_runs_is_not_claimed(world: World, local: Shop) -> None:
    grown(world, local)
    running = world.open(world.beginning("old", local))
    world.beat(running, local.root("old"), "running")
    with pytest.raises(SnapshotInUse, match=r"cannot be claimed: job 'old' is run by term .*stillstate stop old"):
        world.beginning("new", local, local.start("old", "CLAIM")).look()
    world.open(world.beginning("new", local, local.start("old")))  # it may be forked meanwhile
    running.commit(running.last)


def test_of_two_jobs_that_claim_one_root_one_does(world: World, local: Shop) -> None:
    grown(world, local)
    one = world.beginning("one", local, local.start("old", "CLAIM"))
    two = world.beginning("two", local, local.start("old", "CLAIM"))
    one.look()
    two.look()
    one.open(lambda info: world.newest("old", local), host="h", pid=1)
    with pytest.raises(SnapshotInUse, match="was claimed by job 'one'"):
        two.open(lambda info: world.newest("old", local), host="h", pid=1)
    assert not local.root("two").list_names("")


def test_a_pinned_snapshot_is_not_claimed(world: World, local: Shop) -> None:
    grown(world, local)
    root, newest = local.root("old"), world.newest("old", local)
    pin = pin_snapshot(root, newest.snapshot_id, reason="user", holder="the auditors", clock=world.clock, ids=world.ids)
    with pytest.raises(SnapshotInUse, match=r"it is pinned \(user\) for the auditors"):
        world.beginning("new", local, local.start("old", "CLAIM")).look()
    unpin(root, pin)
    world.run("new", local, 8, local.start("old", "CLAIM"))
    assert not root.list_names("")


def test_what_others_need_of_a_claimed_root_stays_and_is_named(
    world: World, local: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """A pinned older checkpoint and a savepoint; the next run tries again, and ends it when they are gone."""
    grown(world, local)
    root = local.root("old")
    ids = Catalog(open_store(local.url), "old").snapshot_ids()
    place = world.savepoint("old", local, "kept")
    record = SavepointRecord("kept", "u", "old", "j", "COMPLETED", "user", 0, "h:1", 0)
    create_savepoint(root, record)
    pin = pin_snapshot(root, ids[1], reason="user", holder="the auditors", clock=world.clock, ids=world.ids)
    world.run("new", local, 6, local.start("old", "CLAIM"))
    assert "a pin of the auditors" in caplog.text
    assert "savepoint 'kept'" in caplog.text
    left = Catalog(open_store(local.url), "old")
    assert left.snapshot_ids()[0] == ids[1]
    assert len(left.snapshot_ids()) == 2, "and the newest"
    world.run("audit", local, 6, StartFrom(place))  # a savepoint below it is a root of its own
    unpin(root, pin)
    shutil.rmtree(Path(local.url) / "old" / "savepoints")
    world.run("new", local, 8, local.start("old", "CLAIM"))
    assert not (Path(local.url) / "old").exists()
    world.check("new", local, 8)


def test_files_that_are_not_ours_stay_in_a_claimed_root(
    world: World, local: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    grown(world, local)
    (Path(local.url) / "old" / "notes.txt").write_text("mine")
    world.run("new", local, 8, local.start("old", "CLAIM"))
    assert os.listdir(Path(local.url) / "old") == ["notes.txt"]
    assert "notes.txt" in caplog.text


def test_unpublished_output_of_a_claimed_job_is_published_by_the_claimer(
    world: World, local: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its driver was killed between manifest and publishing. The files get the names that they would have had."""
    grown(world, local)
    killed_before_publishing(world, local, "old", 5, monkeypatch)
    world.clock.advance_s(3600)
    assert world.published("old") == expected_output(0, 4)
    world.run("new", local, 8, local.start("old", "CLAIM"))
    assert world.published("old") == expected_output(0, 5)
    world.check_output("new", 5, 8)
    entries = sorted(p.parent.name for p in world.out.glob("_stillstate/commits/*/*.json"))
    assert len(entries) == 8, "one for each epoch, under whoever staged it"


def test_staged_files_below_the_root_move_with_a_claim_only(world: World, local: Shop) -> None:
    """`foreach_epoch` delivers them again: to the claimer's function, under the same epoch; a fork has no part in it."""
    grown(world, local)
    run = world.open(world.beginning("old", local))
    path = f"outputs/calls/{run.term.term:020d}/x.parquet"
    local.root("old").put(path, b"rows")
    output = StagedOutput("calls", 9, (StagedFile(path, path, 4, 1),))
    run.commit(replace(run.last, kind="checkpoint", outputs=(output,)))
    world.beat(run, local.root("old"), "stopped")
    fork = world.open(world.beginning("fork", local, local.start("old")))
    assert not fork.last.outputs
    assert not local.root("fork").exists(path)
    claim = world.open(world.beginning("claim", local, local.start("old", "CLAIM")))
    assert claim.last.outputs == (output,)
    assert local.root("claim").read(path, 10) == b"rows"


def test_a_claim_that_was_taken_back_meanwhile_is_not_simply_made_again(world: World, local: Shop) -> None:
    """The old job may have gone on since."""
    grown(world, local)

    def on_copy(now: CopyProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        world.open(world.beginning("new", local, local.start("old", "CLAIM"), on_copy=on_copy))
    local.root("old").delete(CLAIM_FILE)
    world.run("old", local, 6)
    with pytest.raises(SnapshotInUse, match="was taken back since"):
        world.open(world.beginning("new", local, local.start("old", "CLAIM")))
    world.run("old", local, 8)
    world.check_output("old", 0, 8)


# --- decided on what is really gone on from ---------------------------------------------------------------------------


def not_drained(content: Manifest | None, info: JobInfo | None) -> None:
    refuse_drained(content, "job 'job'", allow_drained=False)


def test_a_snapshot_that_was_drained_between_the_look_and_the_open_is_not_gone_on_from(
    world: World, local: Shop
) -> None:
    """A takeover while the old run drains: its last snapshot lands after the look. The start is refused, and fences
    nobody: the old run, which still lives, may end well."""
    world.run("job", local, 3)
    old = world.open(world.beginning("job", local))
    late = world.beginning("job", local)
    late.look(not_drained)
    drained = old.commit(replace(old.last, kind="checkpoint", drained=True))
    with pytest.raises(InvalidConfiguration, match=f"snapshot {drained.snapshot_id} .* was drained"):
        late.open(lambda info: empty_manifest(info.uid, 2), host="h", pid=2)
    assert world.newest("job", local) == drained
    old.commit(replace(old.last, kind="checkpoint"))


def test_what_is_committed_while_a_start_fences_is_decided_on_too(
    world: World, local: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last moment: the fencing snapshot is proposed, and its id is lost to a drained snapshot of the old run."""
    world.run("job", local, 3)
    old = world.open(world.beginning("job", local))
    real = fencing.leave_mark

    def commit_meanwhile(root: Store, term: Any) -> None:
        real(root, term)
        old.commit(replace(old.last, kind="checkpoint", drained=True))

    monkeypatch.setattr(fencing, "leave_mark", commit_meanwhile)
    with pytest.raises(InvalidConfiguration, match="was drained"):
        world.open(world.beginning("job", local), not_drained)
    assert world.newest("job", local).drained
    assert world.newest("job", local).kind == "checkpoint"


def test_a_claimed_source_that_was_drained_meanwhile_is_decided_on_before_the_job_begins(
    world: World, local: Shop
) -> None:
    """The claim waits for the next attempt, which says --allow-drained; no job.json, and nothing was copied."""
    grown(world, local)
    zombie = world.open(world.beginning("old", local))
    world.clock.advance_s(3600)
    claiming = world.beginning("new", local, local.start("old", "CLAIM"))
    claiming.look(not_drained)
    last = zombie.commit(replace(zombie.last, kind="checkpoint", drained=True, epoch=77))
    with pytest.raises(InvalidConfiguration, match="was drained"):
        claiming.open(lambda info: last, host="h", pid=1)
    assert not local.root("new").list_names("")
    assert world.open(world.beginning("new", local, local.start("old", "CLAIM"))).last.epoch == 77


def test_an_older_snapshot_that_was_drained_is_decided_on_and_not_the_newest(world: World, local: Shop) -> None:
    """Going back behind the drained snapshot is a way out of it; going back to it is going on from it."""
    world.run("job", local, 3)
    good = world.newest("job", local).snapshot_id
    old = world.open(world.beginning("job", local))
    drained = old.commit(replace(old.last, kind="checkpoint", drained=True)).snapshot_id
    old.commit(replace(old.last, kind="checkpoint", drained=False))
    with pytest.raises(InvalidConfiguration, match="was drained"):
        world.open(world.beginning("job", local, from_snapshot=drained), not_drained)
    assert not world.open(world.beginning("job", local, from_snapshot=good), not_drained).last.drained


# --- relocation --------------------------------------------------------------------------------------------------------


def copied(world: World, source: Shop, job: str, target: Shop, name: str) -> None:
    """As `cp -r` or a bucket copy does it: names and bytes, in any order."""
    if "://" not in source.url and "://" not in target.url:
        shutil.copytree(Path(source.url) / job, Path(target.url) / name)
        return
    for path, (_, body) in listing(source.root(job), without="-").items():
        target.root(name).put(path, body)


@pytest.mark.long
@pytest.mark.parametrize("route", ROUTES)
def test_a_copied_root_runs_and_is_started_from(
    world: World, shops: Callable[[str], tuple[Shop, Shop]], route: str
) -> None:
    """Beside the one that it was copied from: same uid, same name or another, and nothing of the two is mixed up."""
    theirs, ours = shops(route)
    grown(world, theirs)
    copied(world, theirs, "old", ours, "copy")
    copied(world, theirs, "old", theirs, "twin")
    other = [["key-1"] * 3, *[["key-2"]] * 3]
    world.run("old", theirs, 6)
    world.run("copy", ours, 8, batches=[*BATCHES[:4], *other])
    world.run("twin", theirs, 8)
    world.run("old", theirs, 8)
    world.check("old", theirs, 8)
    world.check_output("old", 0, 8)
    world.check("copy", ours, 8, [*BATCHES[:4], *other])
    world.run("child", ours, 8, ours.start("copy"), batches=[*BATCHES[:4], *other])
    world.check("child", ours, 8, [*BATCHES[:4], *other])
    hosts = {p.name for p in (world.folder / "host" / "state").iterdir() if p.is_dir()}
    world.check("twin", theirs, 8)
    assert len(hosts) == 3, "each root has local copies of its own on a host"


def test_a_renamed_root_runs(world: World, local: Shop) -> None:
    grown(world, local)
    (Path(local.url) / "old").rename(Path(local.url) / "renamed")
    world.run("renamed", local, 8)
    world.check("renamed", local, 8)
    assert world.published("old") + world.published("renamed") == expected_output(0, 8)


def test_a_savepoint_s_folder_is_moved_and_started_from_and_run(world: World, local: Shop, tmp_path: Path) -> None:
    grown(world, local)
    place = Path(world.savepoint("old", local, "sp"))
    shutil.rmtree(Path(local.url) / "old" / "changelog")
    shutil.copytree(place, tmp_path / "elsewhere" / "anything")
    place.rename(Path(local.url) / "promoted")
    world.run("new", local, 8, StartFrom(str(tmp_path / "elsewhere" / "anything")))
    world.run("promoted", local, 8)
    for job in ("new", "promoted"):
        world.check(job, local, 8)
        world.check_output(job, 4, 8)


def test_a_copy_of_a_live_root_without_its_last_manifest_is_an_older_snapshot(world: World, local: Shop) -> None:
    """Copied while it was written: data was there before the manifest that names it, and the copy missed the manifest."""
    grown(world, local)
    world.run("old", local, 6)
    copied(world, local, "old", local, "copy")
    last = world.newest("copy", local).snapshot_id
    (Path(local.url) / "copy" / manifest_path(last)).unlink()
    world.run("child", local, 8, local.start("copy"))
    world.run("copy", local, 8)
    for job in ("child", "copy"):
        world.check(job, local, 8)
        world.check_output(job, 5, 8)


def test_a_copy_of_a_live_root_goes_on_from_its_newest_whole_snapshot(
    world: World, local: Shop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Data was copied before `snapshots/`: the newest manifests name what the copy lacks. In place the same is damage."""
    grown(world, local, "job")
    whole = world.newest("job", local).snapshot_id
    copied = tmp_path / "copies" / "job"
    shutil.copytree(Path(local.url) / "job", copied)
    world.run("job", local, 6)
    shutil.rmtree(copied / "snapshots")
    shutil.copytree(Path(local.url) / "job" / "snapshots", copied / "snapshots")
    newest = world.newest("job", local).snapshot_id
    copies = Shop(str(tmp_path / "copies"))
    with caplog.at_level("WARNING"):
        committed = world.open(world.beginning("job", copies))
    # The next run's fencing snapshot has the same content, and needs nothing else.
    assert f"goes back to snapshot {whole + 1}, the newest one that is whole" in caplog.text
    assert committed.last.abandoned == ((whole + 2, newest),)
    world.check("job", copies, 4)
    in_place = local.root("job")
    in_place.delete(world.newest("job", local).segments[-1].path)
    caplog.clear()
    assert world.beginning("job", local).look() == world.newest("job", local), "the restore says MissingFile, loudly"
    assert "goes back" not in caplog.text
    shutil.rmtree(copied / "changelog")
    shutil.rmtree(copied / "tables")
    shutil.move(copied, copies.url + "/moved")
    with pytest.raises(MissingFile, match=r"no snapshot in .* is whole"):
        world.beginning("moved", copies).look()


def test_a_job_that_is_to_begin_with_a_copy_of_a_live_root_is_told_which_snapshot_is_whole(
    world: World, local: Shop, tmp_path: Path
) -> None:
    """Before job.json says what it begins with: the same start goes on with the snapshot that the message names."""
    grown(world, local, "job")
    whole = world.newest("job", local).snapshot_id
    copied = tmp_path / "copies" / "job"
    shutil.copytree(Path(local.url) / "job", copied)
    world.run("job", local, 6)
    shutil.rmtree(copied / "snapshots")
    shutil.copytree(Path(local.url) / "job" / "snapshots", copied / "snapshots")
    copies = Shop(str(tmp_path / "copies"))
    # The next run's fencing snapshot has the same content, and needs nothing else.
    with pytest.raises(MissingFile, match=rf"taken while the job ran: try `@{whole + 1}`"):
        world.open(world.beginning("new", local, copies.start("job")))
    assert read_job_info(local.root("new")) is None, "nothing was written"
    world.open(world.beginning("new", local, copies.start("job", snapshot_id=whole + 1)))
    assert world.newest("new", local).snapshot_id > 0
    shutil.rmtree(copied / "changelog")
    shutil.rmtree(copied / "tables", ignore_errors=True)
    with pytest.raises(MissingFile, match="no other one there is whole either"):
        world.open(world.beginning("newer", local, copies.start("job")))


def test_files_of_two_roots_in_one_folder_are_refused(world: World, local: Shop) -> None:
    """The folder's name says nothing, so `job.json` and the manifests must agree."""
    grown(world, local)
    world.run("other", local, 1)
    shutil.copy(Path(local.url) / "other" / JOB_FILE, Path(local.url) / "old" / JOB_FILE)
    with pytest.raises(JobRootMismatch, match="files of two job roots were mixed"):
        world.beginning("old", local).look()
    with pytest.raises(JobRootMismatch, match="files of two job roots were mixed"):
        world.beginning("new", local, local.start("old")).look()
    (Path(local.url) / "old" / JOB_FILE).unlink()
    with pytest.raises(JobRootMismatch, match=r"no job\.json"):
        world.beginning("old", local).look()


def test_a_root_that_was_put_back_from_an_older_copy_forgets_what_came_after_it(world: World, local: Shop) -> None:
    """The same place, uid and ids, and another history since: neither local copies nor files kept on the host may serve it."""
    root, backup = Path(local.url) / "old", world.folder / "backup"
    world.run("old", local, 3)
    shutil.copytree(root, backup)
    shutil.copytree(world.out, world.folder / "out-backup")
    world.run("old", local, 4)
    shutil.rmtree(world.folder / "host" / "state")
    world.run("old", local, 5, parallelism=3)  # restored from the store: the host keeps what it read of it
    for folder, kept in ((root, backup), (world.out, world.folder / "out-backup")):
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
    other = [*BATCHES[:3], ["key-1"] * 7, ["key-1"], ["key-3"]]
    world.run("old", local, 4, batches=other)
    shutil.rmtree(world.folder / "host" / "state")
    world.run("old", local, 5, batches=other, parallelism=3)
    world.run("old", local, 6, batches=other)
    world.check("old", local, 6, other)


# --- going back --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["arrow", "rocksdb"])
@pytest.mark.parametrize("changelog", ["on", "off"])
def test_a_job_goes_back_to_an_older_snapshot(world: World, local: Shop, backend: Any, changelog: Any) -> None:
    """Other input follows: nothing of the abandoned history is in the state, and epochs count on."""
    how: Mapping[str, Any] = {"backend": backend, "changelog": changelog}
    world.run("job", local, 3, **how)
    target = world.newest("job", local)
    world.run("job", local, 6, **how)
    abandoned = world.newest("job", local)
    other = [*BATCHES[:3], ["key-1"] * 7, ["key-9"], ["key-3"] * 2]
    world.run("job", local, 5, from_snapshot=target.snapshot_id, batches=other, **how)
    newest = world.newest("job", local)
    assert newest.abandoned == ((target.snapshot_id + 1, abandoned.snapshot_id),)
    assert newest.snapshot_id > abandoned.snapshot_id
    assert newest.epoch > abandoned.epoch
    world.run("job", local, 6, batches=other, **{**how, "changelog": "on"})
    found = world.published("job")
    assert found == expected_output(0, 6) + expected_output(3, 6, other), (
        "what was published stays, what comes is added"
    )
    if changelog == "on":
        world.check("job", local, 6, other)


def test_going_back_twice_abandons_what_is_no_ancestor(world: World, local: Shop) -> None:
    world.run("job", local, 2)
    first = world.newest("job", local).snapshot_id
    world.run("job", local, 3)
    second = world.newest("job", local).snapshot_id
    world.run("job", local, 4, from_snapshot=first)
    third = world.newest("job", local).snapshot_id
    # Back into the abandoned part: it is an ancestor again, and what came instead is not.
    opened = world.open(world.beginning("job", local, from_snapshot=second))
    assert opened.last.abandoned == ((second + 1, third),)
    world.beat(opened, local.root("job"), "stopped")
    world.run("job", local, 8)
    world.check("job", local, 8)


def test_what_cannot_be_gone_back_to_is_refused(world: World, local: Shop) -> None:
    with pytest.raises(MissingSnapshot, match="has no snapshot yet to go back to"):
        world.beginning("job", local, from_snapshot=3).look()
    world.run("job", local, 4)
    existing = Catalog(open_store(local.url), "job").snapshot_ids()
    with pytest.raises(MissingSnapshot, match="has no snapshot 99"):
        world.beginning("job", local, from_snapshot=99).look()
    advance_boundary(
        local.root("job"), lambda now: now.announcing(existing[:2], existing), clock=world.clock, ids=world.ids
    )
    with pytest.raises(SnapshotExpired, match="has expired"):
        world.beginning("job", local, from_snapshot=existing[1]).look()


@pytest.mark.parametrize("damage", ["empty", "flipped", "newer format"])
@pytest.mark.parametrize("newest_two", [False, True])
def test_a_damaged_newest_snapshot_can_be_gone_back_behind(
    world: World, local: Shop, damage: str, newest_two: bool
) -> None:
    """Only by somebody who names an older one. Ids, epochs and output count on as if the newest could be read; then the
    damaged one can be deleted, and everything works again."""
    world.run("job", local, 3)
    target = world.newest("job", local).snapshot_id
    world.run("job", local, 5)
    lost = world.newest("job", local)
    root = local.root("job")
    for snapshot_id in range(lost.snapshot_id - newest_two, lost.snapshot_id + 1):
        body = root.read(manifest_path(snapshot_id), 1 << 20)
        flipped = bytes([*body[:-10], body[-10] ^ 1, *body[-9:]])
        newer = encode_document("manifest", lost, FORMAT_WITH_SOURCES + 1)
        root.put(manifest_path(snapshot_id), {"empty": b"", "flipped": flipped, "newer format": newer}[damage])
    before = listing(root)
    with pytest.raises((CorruptManifest, UnsupportedFormat)):
        world.beginning("job", local).look()
    with pytest.raises((CorruptManifest, UnsupportedFormat), match=r"First go back to an older one"):
        delete_snapshots(root, [lost.snapshot_id], clock=world.clock, ids=world.ids, damaged=True)
    assert listing(root) == before
    world.run("job", local, 5, from_snapshot=target)
    newest = world.newest("job", local)
    assert newest.abandoned == ((target + 1, lost.snapshot_id),)
    assert newest.epoch > lost.epoch
    world.check("job", local, 5)
    assert world.published("job") == expected_output(0, 5) + expected_output(3, 5)
    damaged = range(lost.snapshot_id - newest_two, lost.snapshot_id + 1)
    delete_snapshots(root, damaged, clock=world.clock, ids=world.ids, damaged=True)
    assert not set(damaged) & set(Catalog(open_store(local.url), "job").snapshot_ids())
    world.run("job", local, 6)
    world.check("job", local, 6)


def rolled_back(world: World, shop: Shop, job: str, place: str) -> Manifest:
    catalog = Catalog(open_store(shop.url, shop.options), job, world.clock)
    plan = plan_rollback(catalog, place, storage_options=shop.options)
    return execute_rollback(catalog, plan, Actor(world.clock, world.ids, "h", 9))


@pytest.mark.parametrize("kind", ["own", "savepoint of a kept one", "savepoint of a given up one", "copy"])
def test_a_rollback_returns_in_place_and_can_itself_be_gone_back_behind(
    world: World, local: Shop, kind: str, tmp_path: Path
) -> None:
    """To a snapshot of its own, or to a savepoint or a copy of one that its root may have forgotten."""
    grown(world, local, "job")
    target = world.newest("job", local)
    place = world.savepoint("job", local, "before-upgrade")
    if kind == "copy":
        shutil.copytree(Path(local.url) / "job", tmp_path / "archive")
        place = f"{tmp_path / 'archive'}@{target.snapshot_id}"
    world.run("job", local, 6)
    bad = world.newest("job", local).snapshot_id
    root = local.root("job")
    if kind == "savepoint of a given up one":
        old = [i for i in Catalog(open_store(local.url), "job").snapshot_ids() if i < bad]
        delete_snapshots(root, old, clock=world.clock, ids=world.ids)
        collect_all(root)
    committed = rolled_back(world, local, "job", f"@{target.snapshot_id}" if kind == "own" else place)
    assert committed.snapshot_id == bad + 1
    assert committed.abandoned == ((target.snapshot_id + 1, bad),)
    world.check("job", local, 4)
    other = [*BATCHES[:4], ["key-1"] * 7, ["key-9"]]
    world.run("job", local, 6, batches=other)
    world.check("job", local, 6, other)
    assert world.published("job") == expected_output(0, 6) + expected_output(4, 6, other)
    rolled_back(world, local, "job", f"@{bad}")
    world.check("job", local, 6)


def saved(
    world: World, shop: Shop, job: str, name: str, format: SavepointFormat = "native", *, independent: bool = True
) -> Store:
    """A savepoint of a stopped job; without `independent` of the same files."""
    work = SavepointWork(
        shop.root(job), "h:9", world.clock, world.ids, wait=lambda seconds: False, convert=convert_small
    )
    record = savepoint_of_stopped(work, name, format=format, independent=independent)
    assert record.state == "COMPLETED", record.message
    return shop.root(job).child(f"savepoints/{name}")


def damage(root: Store, paths: list[str]) -> None:
    """One byte changed, the end missing, the object gone: one after the other. At least the first two of a kind."""
    for number, path in enumerate(paths):
        body = root.read(path, 1 << 30)
        root.delete(path)  # its name only: a savepoint may have the same bytes by a link
        if number % 3 < 2:
            root.put(path, bytes([*body[:-1], body[-1] ^ 1]) if number % 3 == 0 else body[:-1])


@pytest.mark.parametrize("kind", ["savepoint", "canonical savepoint", "copy", "start from a savepoint"])
def test_a_rollback_uses_the_bytes_of_what_is_named(world: World, local: Shop, kind: str, tmp_path: Path) -> None:
    """Not those that the root has under the same names: it may be gone back because the root is damaged. What is
    damaged is replaced, so other snapshots that need the same objects are whole again too."""
    grown(world, local, "job")
    target, root = world.newest("job", local), local.root("job")
    place = saved(world, local, "job", "kept", "canonical" if kind.startswith("canonical") else "native")
    if kind == "copy":
        shutil.copytree(Path(local.url) / "job", tmp_path / "archive")
        place = open_store(str(tmp_path / "archive"))
    needed = needed_objects(root, target)
    world.run("job", local, 5)
    damage(root, sorted(needed))
    assert verify_root(root, snapshot_ids=[target.snapshot_id], level="full", clock=world.clock, ids=world.ids).findings
    if kind == "start from a savepoint":
        world.open(world.beginning("job", local, from_snapshot="kept"))
    else:
        rolled_back(world, local, "job", f"{place.url}@{target.snapshot_id}")
    world.check("job", local, 4)
    held = Catalog.of_root(place).manifest(target.snapshot_id)
    assert {ref.path for ref in references(root, world.newest("job", local)) if ref.kind != "manifest"} == set(
        needed_objects(place, held)
    )
    for path in needed_objects(place, held):
        assert root.read(path, 1 << 30) == place.read(path, 1 << 30), path
    assert not list(place.list_shared(""))
    if not kind.startswith("canonical"):
        assert not verify_root(root, level="full", clock=world.clock, ids=world.ids).findings
    world.run("job", local, 6)
    world.check("job", local, 6)


@pytest.mark.parametrize("independent", [True, False])
def test_going_back_to_what_is_damaged_itself_changes_nothing(world: World, local: Shop, independent: bool) -> None:
    """Neither the job's newest snapshot, nor what was right in its root."""
    grown(world, local, "job")
    target, root = world.newest("job", local), local.root("job")
    place = saved(world, local, "job", "kept", independent=independent)
    world.run("job", local, 5)
    path = target.layers[0].tables[0].path
    for store in (root, place):
        body = store.read(path, 1 << 30)
        store.put(path, bytes([*body[:-1], body[-1] ^ 1]))
    before = listing(root)
    with pytest.raises(CorruptData, match=path):
        rolled_back(world, local, "job", place.url)
    with pytest.raises(CorruptData, match=path):
        world.open(world.beginning("job", local, from_snapshot="kept"))
    assert listing(root) == before


def collect_all(root: Store) -> None:
    """As after many collections: nothing is left but what the snapshots need."""
    catalog = Catalog.of_root(root)
    needed = {ref.path for i in catalog.snapshot_ids() for ref in references(root, catalog.manifest(i))}
    for folder in ("changelog", "tables"):
        for found in list(root.list_objects(folder)):
            if found.path not in needed:
                root.delete(found.path)


def test_a_rollback_serves_where_the_newest_snapshot_is_damaged(world: World, local: Shop) -> None:
    """Also to a savepoint of the damaged one itself: then nothing is abandoned."""
    grown(world, local, "job")
    newest = world.newest("job", local)
    place = world.savepoint("job", local, "kept")
    local.root("job").put(manifest_path(newest.snapshot_id), b"")
    committed = rolled_back(world, local, "job", place)
    assert (committed.snapshot_id, committed.abandoned) == (newest.snapshot_id + 1, ())
    world.check("job", local, 4)
    world.run("job", local, 6)
    world.check("job", local, 6)


def test_a_reset_job_begins_empty_and_what_it_had_can_be_gone_back_to(world: World, local: Shop) -> None:
    grown(world, local, "job")
    before = world.newest("job", local)
    committed = rolled_back(world, local, "job", "")
    assert not committed.segments
    assert not committed.layers
    assert committed.source is None
    assert committed.abandoned == ((1, before.snapshot_id),)
    assert committed.epoch >= before.epoch
    world.run("job", local, 3)
    world.check("job", local, 3)
    rolled_back(world, local, "job", f"@{before.snapshot_id}")
    world.check("job", local, 4)


def test_what_is_not_a_past_of_the_job_is_not_rolled_back_to(world: World, local: Shop, tmp_path: Path) -> None:
    """Another job's state, a history that went on apart, one that is newer than the root, a run that lives."""
    grown(world, local, "job")
    shutil.copytree(Path(local.url) / "job", tmp_path / "apart")
    shutil.copytree(Path(local.url) / "job", tmp_path / "older")
    world.run("other", local, 2)
    apart = Shop(str(tmp_path))
    world.run("apart", apart, 6)
    world.run("job", local, 6)
    root, newest = local.root("job"), world.newest("job", local).snapshot_id
    world.clock.advance_s(3600)
    before = listing(root)
    for place, error in (
        (local.place("other"), JobRootMismatch),
        (apart.place("apart", newest), InvalidConfiguration),
        (local.place("job"), InvalidConfiguration),
        (local.place("job", 999), MissingSnapshot),
    ):
        with pytest.raises(error):
            rolled_back(world, local, "job", place)
    with pytest.raises(InvalidConfiguration, match="is newer than anything"):
        rolled_back(world, apart, "older", local.place("job"))
    assert listing(root) == before
    world.beat(world.open(world.beginning("job", local)), root, "running")
    with pytest.raises(JobAlreadyRunning):
        rolled_back(world, local, "job", f"@{newest}")


def test_output_that_was_staged_since_is_not_published_after_going_back(
    world: World, local: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoint was made and its output not published: it belongs to what is abandoned. That of the target is."""
    world.run("job", local, 3)
    target = world.newest("job", local).snapshot_id
    killed_before_publishing(world, local, "job", 4, monkeypatch)
    world.run("job", local, 4, from_snapshot=target)
    world.check_output("job", 0, 4)


# --- secrets -----------------------------------------------------------------------------------------------------------


def test_no_secret_of_the_source_is_stored_or_shown(
    world: World, shops: Callable[[str], tuple[Shop, Shop]], server: CountingServer, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, ours = shops("s3 → local")
    secret = str(server.options["secret"])
    grown(world, theirs)
    start = theirs.start("old", "CLAIM")
    assert secret not in repr(start)
    world.run("new", ours, 8, start)
    stored = b"".join(body for _, body in listing(ours.root("new")).values())
    assert secret.encode() not in stored
    assert secret not in caplog.text
    assert SECRET not in caplog.text
    info = read_job_info(ours.root("new"))
    assert info is not None
    assert info.started_from is not None
    assert read_claim(ours.root("new")) is None
