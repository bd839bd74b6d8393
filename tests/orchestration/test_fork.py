"""A job begins beside another one with that one's state: in the end it runs and needs nothing of the other, or nothing
of it is left; and the other one never notices, whatever died in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from forked_job import NEW, OLD, SETTINGS, Forked, files_of
from migrated_job import ENDS, Died, crashed

from state_runtime.base.errors import (
    InvalidConfiguration,
    JobNotFound,
    MissingSnapshot,
    SnapshotInUse,
    StoreUnavailable,
)
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.maintenance.copy.make_savepoint import SavepointWork, savepoint_of_stopped
from state_runtime.maintenance.delete.roots import delete_root
from state_runtime.maintenance.delete.snapshots import delete_snapshots
from state_runtime.pipeline.output_owner import OWNERS_DIR
from state_runtime.snapshot.catalog import Catalog, read_job_info
from state_runtime.snapshot.document import encode_document
from state_runtime.snapshot.fencing import open_job_root
from state_runtime.snapshot.migration import Migration, encode_migration, read_migration
from state_runtime.snapshot.pins import read_pins
from state_runtime.snapshot.savepoint_record import list_savepoints
from state_runtime.store import open_store
from state_runtime.store.local import LocalStore
from stillstate.orchestration.config.effective_settings import effective_settings, refuse_while_migrating
from stillstate.orchestration.config.spec import StartFromSpec
from stillstate.orchestration.migration.fork_plan import ForkFound, ForkRequest, plan_fork
from stillstate.orchestration.migration.messages import error_of
from stillstate.orchestration.migration.migrate import fork_or_resume, migrate_or_resume
from stillstate.orchestration.migration.plan import Request
from stillstate.orchestration.recovery.observe import observe

FORK = ForkRequest(of=OLD)
THERE = ForkFound(source_root="/a/job", root="/b/beside", place="/a/job@7", snapshot_id=7, snapshot_bytes=2048)


def fresh(write_config: Callable[..., Path], number: int) -> Forked:
    """Two jobs of their own."""
    config = write_config(OLD, NEW, extra=SETTINGS)
    config.write_text(config.read_text().replace("store: state\n", f"store: state-{number}\n"))
    return Forked(config)


@pytest.fixture
def made(write_config: Callable[..., Path]) -> Forked:
    """The job `job`, which runs, and `beside`, which never did."""
    return fresh(write_config, 0).running()


# -- what is planned --------------------------------------------------------------------------------------------------


def test_a_plan_says_what_the_job_begins_with_and_where_older_rows_stay() -> None:
    plan = plan_fork(NEW, FORK, THERE, 60)
    assert (plan.begins_with, plan.timeout_s) == ("/a/job@7", 60)
    text = plan.markdown()
    assert "begins with /a/job@7" in text
    assert "rows that job has put out before are in its output alone" in text
    assert "copy what it needs (2.0 KiB) to /b/beside" in text
    assert "savepoint" not in text
    made_now = plan_fork(NEW, FORK, replace(THERE, place=""), 60)
    assert "make a savepoint of job, which goes on running" in made_now.steps()
    assert "remove the copy and the savepoint" in made_now.steps()[-1]


@pytest.mark.parametrize(
    ("job", "found", "said"),
    [
        (OLD, THERE, "cannot be forked to itself"),
        (NEW, replace(THERE, root="/a/job"), "one lies in the other"),
        (NEW, replace(THERE, root="/a/job/inside/beside"), "one lies in the other"),
        (NEW, replace(THERE, source_root="/b/beside/inside/job"), "one lies in the other"),
        (NEW, replace(THERE, has_begun=True), "has begun already"),
        (NEW, replace(THERE, begins_with="/c/other"), "take `start_from` out"),
        (NEW, replace(THERE, shared_outputs=("options.out",)), "an output folder of its own"),
    ],
)
def test_two_jobs_that_would_be_in_each_others_way_are_not_forked(job: str, found: ForkFound, said: str) -> None:
    with pytest.raises((InvalidConfiguration, SnapshotInUse), match=said):
        plan_fork(job, FORK, found, 60)


def test_a_timeout_that_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="timeout"):
        plan_fork(NEW, ForkRequest(of=OLD, timeout_s=-1), THERE, 60)


def test_a_plan_changes_nothing(made: Forked) -> None:
    before = made.old_files()
    plan = made.migrator().plan_fork(FORK)
    assert plan.place == "", "of a job that runs a savepoint is made"
    assert made.old_files() == before
    assert files_of(made.new_root) == {}


def test_of_a_job_that_does_not_run_the_newest_snapshot_is_taken(write_config: Callable[..., Path]) -> None:
    made = fresh(write_config, 1).ended()
    newest = made.old.committer.last.snapshot_id
    assert made.migrator().plan_fork(FORK).place == f"{made.old_root.url}@{newest}"


def test_a_job_that_has_begun_is_not_forked_to(made: Forked) -> None:
    open_job_root(made.new_root, NEW, clock=made.old.clock, ids=SYSTEM_IDS)
    with pytest.raises(SnapshotInUse, match="has begun already"):
        made.migrator().plan_fork(FORK)


def test_a_place_that_is_not_there_is_refused(made: Forked) -> None:
    for at in ("77", "no-such-savepoint"):
        with pytest.raises(MissingSnapshot):
            made.migrator().plan_fork(ForkRequest(of=OLD, at=at))


def test_a_job_whose_file_says_another_beginning_is_not_forked_to(made: Forked) -> None:
    """Each later start would be refused for it."""
    made.specs[NEW] = made.specs[NEW].model_copy(update={"start_from": StartFromSpec(place="/c/other")})
    with pytest.raises(InvalidConfiguration, match="begins with /c/other"):
        made.migrator().plan_fork(FORK)


def test_an_output_folder_of_the_other_job_is_refused_and_a_common_input_is_not(made: Forked, tmp_path: Path) -> None:
    """Its sinks have left their names there; the file alone does not say which paths are output."""
    own = f"{OLD}-{made.old.catalog.job_info().uid[:8]}-out"
    open_store(str(tmp_path / "out")).put(f"{OWNERS_DIR}/{own}/{1:020d}.json", b"{}")
    options = {"inbox": str(tmp_path / "in"), "out": str(tmp_path / "out")}
    update = {"options": options, "path_options": ["inbox", "out"]}
    made.specs[NEW] = made.specs[NEW].model_copy(update=update)
    with pytest.raises(InvalidConfiguration, match=r"options\.out of job 'beside'"):
        made.migrator().plan_fork(FORK)
    made.specs[NEW] = made.specs[NEW].model_copy(update={"options": {**options, "out": str(tmp_path / "other")}})
    assert made.migrator().plan_fork(FORK).job == NEW


# -- the law ----------------------------------------------------------------------------------------------------------


def check(made: Forked, last: Migration, step: str, before: dict[str, bytes]) -> None:
    """The other job runs on, with every byte that it had; the new one runs with its state, or nothing of it is left."""
    assert last == read_migration(made.new_root)
    assert last.step == step
    (old,) = made.old_drivers.runs
    assert old.state == "running", "nobody has fenced or stopped it"
    after = made.old_files()
    # A driver goes on: it commits, and says that it lives.
    assert {path: after.get(path) for path in before if "heartbeat" not in path} == {
        path: body for path, body in before.items() if "heartbeat" not in path
    }
    assert not read_pins(made.old_root)
    made.old.check()
    if step == "rolled-back":
        assert not made.new_drivers.live()
        assert {o.path.partition("/")[0] for o in made.new_root.list_objects("")} == {"migrations"}
        assert not list_savepoints(made.old_root)
        return
    (new,) = made.new_drivers.live()
    held, told = effective_settings(made.specs[NEW], made.new_root)
    assert (held.parallelism, told) == (new.parallelism, ""), "it has the settings of the file, now and later"
    begun = Catalog.of_root(made.new_root).job_info()
    assert begun.started_from is not None
    assert (begun.uid, begun.started_from.mode) == (last.uid, "NO_CLAIM")
    assert begun.uid != made.old.catalog.job_info().uid
    made.new.checkpoint()
    made.new.check()
    kept = made.old_drivers.rows_of(last.snapshot_id)
    assert kept.keys() <= made.new.rows[made.new.committer.last.snapshot_id].keys(), "it has begun with that state"


@pytest.mark.parametrize(("behaviour", "step"), ENDS)
def test_a_fork_runs_beside_the_job_or_nothing_of_it_is_left(made: Forked, behaviour: str, step: str) -> None:
    before = made.behaving(behaviour).old_files()
    migrator = made.migrator()
    last = migrator.fork(migrator.plan_fork(FORK))
    check(made, last, step, before)
    error = error_of(last, NEW, migrator.failure)
    assert (error is None) == (step == "kept")
    if behaviour == "dies":
        assert "was not forked from 'job', which goes on" in str(error)
        assert "it broke" in str(error)
        assert "the last words" in str(error)
        assert "the last words" not in last.reason, "what a driver writes may be anything"


@pytest.mark.parametrize("behaviour", ["works", "dies"])
def test_a_job_that_does_not_run_is_not_changed_by_a_byte(write_config: Callable[..., Path], behaviour: str) -> None:
    made = fresh(write_config, 1).ended().behaving(behaviour)
    before = made.old_files()
    migrator = made.migrator()
    migrator.fork(migrator.plan_fork(FORK))
    assert made.old_files() == before
    assert bool(made.new_drivers.live()) == (behaviour == "works")


def test_a_fork_begins_with_the_snapshot_that_was_named(made: Forked) -> None:
    older = made.old.committer.last.snapshot_id - 1
    migrator = made.migrator()
    last = migrator.fork(migrator.plan_fork(ForkRequest(of=OLD, at=f"{older}")))
    assert (last.step, last.snapshot_id, last.savepoint) == ("kept", older, "")
    assert not list_savepoints(made.old_root), "none was needed"


@pytest.mark.parametrize(("behaviour", "step"), [("works", "kept"), ("dies", "rolled-back")])
def test_a_savepoint_that_was_named_is_somebodys_and_stays(made: Forked, behaviour: str, step: str) -> None:
    work = SavepointWork(made.old_root, "somebody:1", made.old.clock, SYSTEM_IDS)
    savepoint_of_stopped(work, "before-upgrade")
    made.behaving(behaviour)
    migrator = made.migrator()
    last = migrator.fork(migrator.plan_fork(ForkRequest(of=OLD, at="before-upgrade")))
    assert last.step == step
    assert [record.name for record in list_savepoints(made.old_root)] == ["before-upgrade"]


def test_what_becomes_of_the_other_job_does_not_reach_the_new_one(made: Forked) -> None:
    """Its retention, its garbage collection and even its end: the new job has files of its own."""
    migrator = made.migrator()
    last = migrator.fork(migrator.plan_fork(FORK))
    made.old_drivers.stop()
    old = Catalog.of_root(made.old_root, made.old.clock)
    *older, _ = old.snapshot_ids()
    delete_snapshots(made.old_root, older, clock=made.old.clock, ids=SYSTEM_IDS)
    made.new.checkpoint()
    made.new.check()
    delete_root(made.old_root, clock=made.old.clock, ids=SYSTEM_IDS, owner="o:1", with_savepoints=True)
    assert read_job_info(made.old_root) is None
    made.new.checkpoint()
    assert last.snapshot_id in made.new.check()


def test_what_becomes_of_the_new_job_does_not_reach_the_other_one(made: Forked) -> None:
    migrator = made.migrator()
    migrator.fork(migrator.plan_fork(FORK))
    before = made.old_files()
    made.new_drivers.stop()
    delete_root(made.new_root, clock=made.old.clock, ids=SYSTEM_IDS, owner="o:1")
    assert made.old_files() == before
    made.old.checkpoint()
    made.old.check()


def test_what_was_taken_back_may_be_tried_again(made: Forked) -> None:
    before = made.behaving("dies").old_files()
    migrator = made.migrator()
    migrator.fork(migrator.plan_fork(FORK))
    made.behaving("works")
    migrator = made.migrator()
    check(made, migrator.fork(migrator.plan_fork(FORK)), "kept", before)


def test_a_run_that_commits_while_it_is_given_up_is_kept(made: Forked) -> None:
    """What it has published would come again under the same numbers if the job were begun anew."""
    before = made.behaving("hangs").old_files()

    def on_point(point: str) -> None:
        if point == "recorded stop-new":
            made.new.checkpoint()
            made.behaving("works")

    migrator = made.migrator(on_point)
    last = migrator.fork(migrator.plan_fork(FORK))
    check(made, last, "kept", before)
    assert "was started again" in last.reason
    assert [run.state for run in made.new_drivers.runs] == ["stopped", "running"]


def test_a_copy_that_is_damaged_is_not_started(made: Forked) -> None:
    before = made.old_files()

    def on_point(point: str) -> None:
        if point == "recorded verify":
            path = next(o.path for o in made.new_root.list_objects("changelog"))
            body = bytearray(made.new_root.read(path, 1 << 20))
            body[len(body) // 3] ^= 1
            made.new_root.delete(path)  # the name: on a local disk the bytes are the other job's too
            made.new_root.put(path, bytes(body))

    migrator = made.migrator(on_point)
    last = migrator.fork(migrator.plan_fork(FORK))
    check(made, last, "rolled-back", before)
    assert "is damaged" in last.reason
    assert not made.new_drivers.runs


def test_a_snapshot_that_is_given_up_meanwhile_ends_the_fork(made: Forked) -> None:
    older = made.old.committer.last.snapshot_id - 1

    def on_point(point: str) -> None:
        if point == "recorded copy":
            delete_snapshots(made.old_root, [older], clock=made.old.clock, ids=SYSTEM_IDS)

    migrator = made.migrator(on_point)
    last = migrator.fork(migrator.plan_fork(ForkRequest(of=OLD, at=str(older))))
    assert last.step == "rolled-back"
    assert str(older) in last.reason
    assert not made.new_drivers.runs


def test_a_driver_that_dies_before_the_savepoint_leaves_its_newest_snapshot(made: Forked) -> None:
    def on_point(point: str) -> None:
        if point == "recorded save":
            made.old_drivers.on_poll = lambda: (
                made.old_drivers.runs[0].state == "running"
                and made.old_drivers._end(made.old_drivers.runs[0], "failed", "it broke")
            )

    migrator = made.migrator(on_point)
    last = migrator.fork(migrator.plan_fork(FORK))
    assert last.step == "kept"
    assert last.savepoint.endswith("-again")
    assert last.fork_at.endswith(last.savepoint)


# -- a crash at every point -------------------------------------------------------------------------------------------


def points(made: Forked) -> list[str]:
    """All points of a fork that nothing interrupts."""
    passed: list[str] = []
    migrator = made.migrator(passed.append)
    migrator.fork(migrator.plan_fork(FORK))
    return passed


def test_a_fork_goes_through_these_steps(made: Forked) -> None:
    assert points(made)[::2] == [f"recorded {step}" for step in ("save", "copy", "verify", "start", "watch")]


@pytest.mark.parametrize(("behaviour", "step"), ENDS)
def test_a_fork_that_dies_at_any_point_is_gone_on_with(
    write_config: Callable[..., Path], behaviour: str, step: str
) -> None:
    for at in range(1, 1 + len(points(fresh(write_config, 0).running().behaving(behaviour)))):
        made = fresh(write_config, at).running().behaving(behaviour)
        before = made.old_files()
        assert crashed(made, lambda m: m.fork(m.plan_fork(FORK)), at) is None
        check(made, made.migrator().resume(), step, before)


@pytest.mark.parametrize(("behaviour", "step"), ENDS)
def test_a_fork_whose_processes_all_die_ends_all_the_same(made: Forked, behaviour: str, step: str) -> None:
    """Each process does one effect and dies before it can say so; the next one does it again and records it."""
    before = made.behaving(behaviour).old_files()
    last = crashed(made, lambda m: m.fork(m.plan_fork(FORK)), 2)
    for _ in range(30):
        if last is not None:
            break
        last = crashed(made, lambda m: m.resume(), 4)
    assert last is not None
    check(made, last, step, before)


class CutCopies:
    """The process dies before the `at`-th document that it creates in the new root, until the copy is done."""

    def __init__(self, root: str, at: int) -> None:
        self.root, self.at, self.count = root, at, 0
        self.is_over = False

    def hear(self, point: str) -> None:
        self.is_over = self.is_over or point == "done copy"

    def passes(self, store: LocalStore) -> None:
        if store.url != self.root or self.is_over:
            return
        self.count += 1
        if self.count == self.at:
            raise Died


def test_a_copy_that_dies_before_any_write_is_gone_on_with(
    write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two points a copy has many effects."""
    create = LocalStore.create
    at = died = 0
    while True:
        at += 1
        made = fresh(write_config, at).running()
        before = made.old_files()
        cut = CutCopies(made.new_root.url, at)

        def counted(store: LocalStore, path: str, body: object, cut: CutCopies = cut) -> object:
            cut.passes(store)
            return create(store, path, body)  # type: ignore[arg-type]

        monkeypatch.setattr(LocalStore, "create", counted)
        migrator = made.migrator(cut.hear)
        plan = migrator.plan_fork(FORK)
        try:
            migrator.fork(plan)
        except Died:
            died += 1
        else:
            break
        finally:
            monkeypatch.setattr(LocalStore, "create", create)
        if read_migration(made.new_root) is not None:
            check(made, made.migrator().resume(), "kept", before)
    assert died == 4, "the record of save, that of copy, job.json, and the manifest; data go by copies inside the store"


# -- at the same time, and what others see ----------------------------------------------------------------------------


def test_of_two_forks_to_one_job_the_second_is_refused(made: Forked) -> None:
    before = made.old_files()
    one, other = made.migrator(), made.migrator()
    plan, second = one.plan_fork(FORK), other.plan_fork(FORK)
    refused: list[str] = []

    def on_poll() -> None:
        made.old_drivers.on_poll = lambda: None
        with pytest.raises(SnapshotInUse, match="under way"):
            other.fork(second)
        with pytest.raises(SnapshotInUse, match="the fork of job 'job'"):
            other.plan_fork(FORK)
        refused.append("both")

    made.old_drivers.on_poll = on_poll
    check(made, one.fork(plan), "kept", before)
    assert refused


def died_at(made: Forked, wanted: str) -> None:
    def on_point(point: str) -> None:
        if point == wanted:
            raise Died

    migrator = made.migrator(on_point)
    with pytest.raises(Died):
        migrator.fork(migrator.plan_fork(FORK))


@pytest.mark.parametrize("point", ["done save", "done copy", "done verify"])
def test_nobody_starts_a_job_whose_fork_is_under_way_and_it_is_seen(made: Forked, point: str) -> None:
    """Before its first driver too: it would begin empty, or with half of a copy."""
    before = made.old_files()
    died_at(made, point)
    made.old_drivers.poll(7200)
    catalog = Catalog(open_store(made.specs[NEW].store), NEW)
    seen = observe(made.specs[NEW], catalog, made.new_drivers, made.old.clock)  # type: ignore[arg-type]
    assert (seen.health.verdict, seen.health.needs_recovery, seen.health.is_overdue) == ("migrating", False, True)
    with pytest.raises(SnapshotInUse, match="stillstate migrate beside --resume"):
        refuse_while_migrating(NEW, made.new_root)
    refuse_while_migrating(OLD, made.old_root)
    check(made, made.migrator().resume(), "kept", before)


def test_a_store_that_does_not_answer_takes_nothing_back(made: Forked, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can pass by itself leaves the fork where it is."""
    before = made.old_files()

    def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("away")

    with monkeypatch.context() as patched:
        patched.setattr("stillstate.orchestration.migration.forking.StartPosition.fill", away)
        migrator = made.migrator()
        with pytest.raises(StoreUnavailable):
            migrator.fork(migrator.plan_fork(FORK))
    now = read_migration(made.new_root)
    assert now is not None
    assert now.step == "copy"
    check(made, made.migrator().resume(), "kept", before)


def test_without_the_other_job_in_the_file_a_fork_is_not_gone_on_with(made: Forked) -> None:
    before = made.old_files()
    died_at(made, "done copy")
    spec = made.specs.pop(OLD)

    def gone(name: str) -> object:
        raise JobNotFound(f"no job {name!r}")

    migrator = made.migrator()
    migrator._other = gone  # type: ignore[assignment]
    with pytest.raises(JobNotFound):
        migrator.resume()
    now = read_migration(made.new_root)
    assert now is not None
    assert now.step == "copy", "nobody has taken it over"
    made.specs[OLD] = spec
    check(made, made.migrator().resume(), "kept", before)


def test_whoever_asks_again_goes_on_and_whoever_asks_for_something_else_is_refused(made: Forked) -> None:
    before = made.old_files()
    died_at(made, "done copy")
    for other in (ForkRequest(of="third"), ForkRequest(of=OLD, at="3")):
        with pytest.raises(SnapshotInUse, match="Go on with that one first"):
            fork_or_resume(made.migrator(), other, on_plan=lambda plan: None)
    with pytest.raises(SnapshotInUse, match="something else"):
        migrate_or_resume(made.migrator(), Request(is_move=True), on_plan=lambda plan: None)
    plans: list[object] = []
    check(made, fork_or_resume(made.migrator(), FORK, on_plan=plans.append), "kept", before)
    assert not plans, "it was shown when it began"


def test_after_a_fork_the_job_is_migrated_like_any_other(made: Forked) -> None:
    migrator = made.migrator()
    migrator.fork(migrator.plan_fork(FORK))
    migrator = made.migrator()
    plan = migrator.plan(Request(is_restart=True))
    assert plan.before.parallelism == 2
    assert migrator.migrate(plan).step == "kept"


def test_records_of_other_migrations_are_as_earlier_versions_wrote_them(made: Forked) -> None:
    died_at(made, "done save")
    record = read_migration(made.new_root)
    assert record is not None
    assert b"fork_of" in encode_migration(record)
    plain = replace(record, fork_of="", fork_at="")
    assert b"fork_" not in encode_migration(plain)
    assert len(encode_migration(plain)) < len(encode_document("migration", plain))
