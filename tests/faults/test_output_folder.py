"""What a start needs of the output folder: nothing of what is published, everything of what is not, and to be its only owner."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from state_runtime.base.actor import Actor
from state_runtime.base.errors import MissingFile, SnapshotInUse, StoreUnavailable
from state_runtime.driver.checkpointer import Checkpointer
from state_runtime.maintenance.move.execute import execute_move
from state_runtime.maintenance.move.plan import plan_move
from state_runtime.pipeline import output_owner
from state_runtime.snapshot.handover import Moving
from state_runtime.snapshot.manifest import StagedOutput
from state_runtime.snapshot.paths import MOVING_FILE, PUBLISHED_FILE
from state_runtime.snapshot.publication_log import is_published
from tests.faults import engine
from tests.faults.starts import Shop, World, expected_output

JOB = "job"


@dataclass
class Place(World):
    """A world whose output folder can be another one."""

    folder_of_output: str = "out"

    @property
    def out(self) -> Path:
        return self.folder / self.folder_of_output

    def writing_to(self, name: str) -> Place:
        """The same with another output folder."""
        return replace(self, folder_of_output=name)

    def fails_at(self, call: str, until: int, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        """A run that is killed around the publication of its first epoch: `call` is "before" or "after" it."""
        known = self.newest(JOB, shop).epoch
        publish = engine.ParquetSink.publish

        def dying(sink: Any, spec: Any, output: StagedOutput, spark: Any) -> None:
            if call == "after" or output.epoch <= known:
                publish(sink, spec, output, spark)
            if output.epoch > known:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(engine.ParquetSink, "publish", dying)
            with pytest.raises(Killed):
                self.run(JOB, shop, until)
        self.clock.advance_s(3600)


class Killed(BaseException):
    """The process ends here: it closes nothing."""


@pytest.fixture
def world(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def home(world: Place) -> Shop:
    """The store of a job that has run to a good end."""
    shop = Shop(str(world.folder / "store"))
    world.run(JOB, shop, 3)
    return shop


def relocated(world: Place, shop: Shop, name: str, *, stays: bool) -> Shop:
    """The job root at another place, by hand."""
    target = world.folder / name
    shutil.copytree(Path(shop.url) / JOB, target / JOB)
    if not stays:
        shutil.rmtree(Path(shop.url) / JOB)
    return Shop(str(target))


def take_away(world: Place) -> Counter[tuple[str, int]]:
    """A consumer moves all published files on; what they held."""
    taken = world.published(JOB)
    for path in world.out.glob("part-*"):
        path.unlink()
    return taken


# --- what is published is published ------------------------------------------------------------------------------------


def test_a_restart_needs_no_file_that_was_published(world: Place, home: Shop) -> None:
    """Compaction, a lifecycle rule or an archiving consumer takes files away when it likes."""
    taken = take_away(world)
    world.run(JOB, home, 5)
    assert taken + world.published(JOB) == expected_output(0, 5)


def test_the_commit_log_says_what_a_killed_run_has_published(
    world: Place, home: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not note it in the job root, and its files are gone since: nothing is missing."""
    world.fails_at("after", 4, home, monkeypatch)
    assert not is_published(home.root(JOB), world.newest(JOB, home).outputs)
    taken = take_away(world)
    world.run(JOB, home, 6)
    assert taken + world.published(JOB) == expected_output(0, 6)


def test_a_job_whose_output_is_published_may_get_another_output_folder(world: Place, home: Shop) -> None:
    """The new folder holds what comes from now on, and nothing twice."""
    before = world.published(JOB)
    other = world.writing_to("out-2")
    other.run(JOB, home, 6)
    assert before + other.published(JOB) == expected_output(0, 6)


def test_a_root_that_was_relocated_without_its_output_goes_on(world: Place, home: Shop) -> None:
    """The output stayed in another region: nothing of it is needed."""
    moved = relocated(world, home, "elsewhere", stays=False)
    before = world.published(JOB)
    shutil.rmtree(world.out)
    world.run(JOB, moved, 6)
    assert before + world.published(JOB) == expected_output(0, 6)


def test_a_root_that_was_relocated_with_its_output_goes_on(
    world: Place, home: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose newest output is not published: it lies in the folder that came along."""
    world.fails_at("before", 4, home, monkeypatch)
    moved = relocated(world, home, "elsewhere", stays=False)
    world.out.rename(world.folder / "out-2")
    other = world.writing_to("out-2")
    other.run(JOB, moved, 6)
    assert other.published(JOB) == expected_output(0, 6)


def test_output_that_is_neither_published_nor_staged_still_fails_loudly(
    world: Place, home: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run died before it published: another folder has nothing of it. The old one does, and nothing is lost there."""
    world.fails_at("before", 4, home, monkeypatch)
    with pytest.raises(MissingFile, match="start it once with that one"):
        world.writing_to("out-2").run(JOB, home, 6)
    world.clock.advance_s(3600)
    world.run(JOB, home, 6)
    assert world.published(JOB) == expected_output(0, 6)


def test_lost_output_is_made_anew_from_the_snapshot_before(
    world: Place, home: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way out that the message names: input since then is read again, and nothing of the lost files is asked for."""
    before = world.newest(JOB, home).snapshot_id
    published = world.published(JOB)
    world.fails_at("before", 4, home, monkeypatch)
    other = world.writing_to("out-2")
    other.run(JOB, home, 6, from_snapshot=before)
    assert published + other.published(JOB) == expected_output(0, 6)


def test_the_word_in_the_root_is_only_of_what_was_published(
    world: Place, home: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends while its sink is away leaves it as it was: the next start must publish."""
    root = home.root(JOB)
    before = root.read(PUBLISHED_FILE, 10_000)

    def fails(*_: Any) -> None:
        raise StoreUnavailable("the output store does not answer")

    with monkeypatch.context() as patch:
        for name in ("publish", "publish_again"):
            patch.setattr(engine.ParquetSink, name, fails)
        world.run(JOB, home, 5)
    assert root.read(PUBLISHED_FILE, 10_000) == before
    assert not is_published(root, world.newest(JOB, home).outputs)
    world.clock.advance_s(3600)
    world.run(JOB, home, 5)
    assert world.published(JOB) == expected_output(0, 5)


def test_a_run_that_was_replaced_leaves_no_word(world: Place, home: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """It slept before its end: the root may have been moved or deleted meanwhile, and must not get a file again."""
    root = home.root(JOB)
    leave = Checkpointer._leave_word

    def sleeping(self: Checkpointer) -> None:
        world.open(world.beginning(JOB, home))
        root.delete(PUBLISHED_FILE)
        leave(self)

    monkeypatch.setattr(Checkpointer, "_leave_word", sleeping)
    world.run(JOB, home, 5)
    assert not root.exists(PUBLISHED_FILE)


def test_a_claimer_with_another_output_folder_needs_nothing_of_the_old_one(world: Place, home: Shop) -> None:
    """The claimed job had ended well: it left nothing to publish on its behalf."""
    world.clock.advance_s(3600)
    before = world.published(JOB)
    other = world.writing_to("out-2")
    other.run("new", home, 6, home.start(JOB, "CLAIM"))
    assert before + other.published("new") == expected_output(0, 6)


# --- one owner ---------------------------------------------------------------------------------------------------------


def staged(world: Place) -> set[str]:
    return {p.name for p in world.out.glob("_stillstate/staging/*/*/*.parquet")}


def test_starting_a_copy_of_a_root_leaves_the_originals_staged_output(
    world: Place, home: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same uid, same name, same folder: to the copy it looks like what a killed run of its own left behind."""
    copied = relocated(world, home, "copy", stays=True)
    world.fails_at("before", 5, home, monkeypatch)
    waiting = staged(world)
    assert waiting
    for _ in range(2):
        with pytest.raises(SnapshotInUse, match=r"belongs to the job root .*store/job.*one of the two is a copy"):
            world.run(JOB, copied, 5)
        assert staged(world) == waiting
    world.run(JOB, home, 6)
    assert world.published(JOB) == expected_output(0, 6)


def test_a_copy_with_an_output_folder_of_its_own_runs_beside_the_original(world: Place, home: Shop) -> None:
    """What the message advises."""
    copied = relocated(world, home, "copy", stays=True)
    other = world.writing_to("out-2")
    other.run(JOB, copied, 6)
    world.run(JOB, home, 6)
    assert world.published(JOB) == expected_output(0, 6)
    assert other.published(JOB) == expected_output(3, 6)


def test_a_copy_gets_the_output_once_the_original_is_deleted(world: Place, home: Shop) -> None:
    """Then it is the job."""
    copied = relocated(world, home, "copy", stays=True)
    shutil.rmtree(home.url)
    world.run(JOB, copied, 6)
    assert world.published(JOB) == expected_output(0, 6)


def test_whoever_insists_gets_the_output_and_the_original_is_refused_from_then_on(
    world: Place, home: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly one of the two has it at any time; and what was staged before it changed hands is kept."""
    copied = relocated(world, home, "copy", stays=True)
    world.fails_at("before", 5, home, monkeypatch)
    waiting = staged(world)
    world.run(JOB, copied, 5, take_output=True)
    assert waiting <= staged(world)
    with pytest.raises(SnapshotInUse, match=r"belongs to the job root .*copy/job"):
        world.run(JOB, home, 5)
    world.run(JOB, copied, 6)
    assert waiting <= staged(world)


def test_nobody_takes_the_output_of_a_run_that_is_alive(world: Place, home: Shop) -> None:
    """Insisting is a word about runs that never come back; this one is there."""
    copied = relocated(world, home, "copy", stays=True)
    live = world.open(world.beginning(JOB, home))
    world.beat(live, home.root(JOB), "running")
    with pytest.raises(SnapshotInUse, match=r"is alive.*Stop that run first"):
        world.run(JOB, copied, 5, take_output=True)


def test_a_root_under_another_spelling_of_its_place_is_the_same_one(world: Place, home: Shop) -> None:
    """A link, a mount, `s3a` for `s3`: it shows the snapshot that this run has just made."""
    (world.folder / "link").symlink_to(home.url)
    world.run(JOB, Shop(str(world.folder / "link")), 5)
    world.run(JOB, home, 6)
    assert world.published(JOB) == expected_output(0, 6)


def test_an_owner_that_cannot_be_looked_at_keeps_its_output(
    world: Place, home: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known of it, so nothing is taken; whoever knows says so."""
    moved = relocated(world, home, "elsewhere", stays=False)
    read = output_owner.read_job_info

    def unreachable(root: Any) -> Any:
        if root.url == home.root(JOB).url:
            raise StoreUnavailable("no route to the old store")
        return read(root)

    monkeypatch.setattr(output_owner, "read_job_info", unreachable)
    with pytest.raises(SnapshotInUse, match=r"cannot be looked at \(no route to the old store\).*--take-output"):
        world.run(JOB, moved, 5)
    world.run(JOB, moved, 6, take_output=True)
    assert world.published(JOB) == expected_output(0, 6)


def moved(world: Place, home: Shop) -> Shop:
    """The job, by `stillstate move`."""
    world.clock.advance_s(3600)
    target = Shop(str(world.folder / "elsewhere"))
    plan = plan_move(home.root(JOB), target.root(JOB), mode="move", snapshot_id=None, clock=world.clock)
    execute_move(home.root(JOB), target.root(JOB), plan, actor=Actor(world.clock, world.ids, "h", 1))
    return target


def test_a_job_that_was_moved_takes_its_output_along_wherever_it_came_from(
    world: Place, home: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old place may be another cloud that the new one cannot reach: `moved.json` says that nothing is left there."""
    target, read = moved(world, home), output_owner.read_job_info

    def unreachable(root: Any) -> Any:
        if root.url == home.root(JOB).url:
            raise StoreUnavailable("no route to the old store")
        return read(root)

    monkeypatch.setattr(output_owner, "read_job_info", unreachable)
    world.run(JOB, target, 6)
    assert world.published(JOB) == expected_output(0, 6)


def test_what_a_move_left_at_its_source_is_no_other_job(world: Place, home: Shop) -> None:
    """Its last step, the removal of the source, was cut: nobody can run what is there."""
    shutil.copytree(home.url, world.folder / "kept")
    target = moved(world, home)
    shutil.copytree(world.folder / "kept", home.url, dirs_exist_ok=True)
    rest = Moving(
        uid="aa",
        role="source",
        mode="move",
        what="root",
        other_url=target.root(JOB).url,
        job_uid=world.newest(JOB, target).job_uid,
        snapshot_id=0,
        at_ms=1,
        host="h",
        pid=1,
    )
    home.root(JOB).put(MOVING_FILE, rest.encode())
    world.run(JOB, target, 6)
    assert world.published(JOB) == expected_output(0, 6)


def test_a_path_on_the_disk_of_another_host_is_not_taken_for_a_root_that_is_gone(
    world: Place, home: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same output folder, job roots on the disks of two hosts: what is not here may be there."""
    moved = relocated(world, home, "elsewhere", stays=False)
    (document,) = world.out.glob("_stillstate/owners/*/*.json")
    owner = output_owner.decode_document("output-owner", output_owner.OutputOwner, document.read_bytes(), "here")
    document.write_bytes(output_owner.encode_document("output-owner", replace(owner, host="another")))
    with pytest.raises(SnapshotInUse, match="a folder of the host 'another' and cannot be looked at from here"):
        world.run(JOB, moved, 6)


def test_two_starts_at_once_do_not_both_get_the_output(
    world: Place, home: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between looking and writing another root takes it: the later one looks again, and is refused."""
    shutil.rmtree(world.out)
    copied = relocated(world, home, "copy", stays=True)
    begin, raced = output_owner.create_next, []

    def racing(output: Any, propose: Any, **given: Any) -> Any:
        def proposes() -> Any:
            found = propose()
            if not raced:
                raced.append(True)
                world.run(JOB, home, 5)
            return found

        return begin(output, proposes, **given)

    monkeypatch.setattr(output_owner, "create_next", racing)
    with pytest.raises(SnapshotInUse, match="one of the two is a copy"):
        world.run(JOB, copied, 5)
    assert world.published(JOB) == expected_output(3, 5)
