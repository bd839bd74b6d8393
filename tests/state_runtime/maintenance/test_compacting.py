"""A compacted output folder has each row once, wherever a compaction dies, and whoever works on the folder beside it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from lake import SCHEMA, SHARDS, UID, WRITER, Crash, Lake, at_point, die
from model import empty_manifest
from power_loss import Disk

from state_runtime.base import faults
from state_runtime.base.errors import CorruptData, CorruptManifest, InvalidPipeline, MissingFile
from state_runtime.base.faults import COMPACTION_KILL_POINTS
from state_runtime.maintenance.output import compact as compaction
from state_runtime.maintenance.output.compact import Compacted, plan_folder
from state_runtime.maintenance.output.plan import Folder, plan_compaction
from state_runtime.pipeline import compactions
from state_runtime.pipeline.compactions import COMPACTING_DIR, COMPACTIONS_DIR, finish, finish_all, numbers_of
from state_runtime.pipeline.output_owner import Claimant
from state_runtime.snapshot.manifest import StagedOutput
from state_runtime.store import LocalStore, Store, StoredObject
from state_runtime.store.s3 import S3Store
from tests.s3_server import CountingServer


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "out"))


def test_files_of_closed_epochs_become_one_with_their_rows_in_the_order_of_the_epochs(lake: Lake) -> None:
    lake.publish(5)
    before = len(lake.files())
    done = lake.compact()
    assert (done.inputs, done.outputs, done.rows, done.left) == (4 * SHARDS, 1, 4 * SHARDS * 3, 0)
    compacted, *newest = lake.tables()
    assert len(lake.files()) == before - done.inputs + 1
    assert compacted["epoch"].to_pylist() == sorted(compacted["epoch"].to_pylist())
    assert compacted["n"].to_pylist() == list(range(2 * 3, 10 * 3))
    assert [table["epoch"][0].as_py() for table in newest] == [5, 5]
    assert lake.numbers() == lake.expected()
    seen = ds.dataset(lake.place, format="parquet", exclude_invalid_files=False).to_table()
    assert sorted(seen["n"].to_pylist()) == lake.expected(), "readers that skip names with _ see the same"
    assert lake.compact().inputs == 0, "a second one finds nothing to do"


def test_nothing_of_an_epoch_that_is_staged_pending_newest_or_young_is_touched(lake: Lake, tmp_path: Path) -> None:
    lake.publish(2)
    pending, staged = lake.stage(3), lake.stage(4)
    for file in pending.files:  # its run died before the entry of the commit log
        lake.store.move(file.staged, file.final)
    before = {o.path: o.bytes for o in lake.store.list_objects("")}
    assert lake.compact(min_age_s=3600).inputs == 0, "every entry is younger"
    assert {o.path: o.bytes for o in lake.store.list_objects("")} == before
    lake.publish()  # epoch 3 once more is another test's; here: 1 and 2 close
    lake.epoch = 4
    assert lake.compact().inputs == 2 * SHARDS
    for file in (*pending.files, *staged.files):
        assert lake.store.exists(file.final) or lake.store.exists(file.staged)


def test_new_files_stay_below_the_target_and_large_ones_are_left(lake: Lake) -> None:
    lake.publish(3, rows=20_000)
    size = lake.outputs[1].files[0].bytes
    lake.publish(6)
    small = lake.outputs[5].files[0].bytes
    target = 6 * small
    assert size > target
    lake.compact(target_bytes=target)
    sizes = {o.path: o.bytes for o in lake.store.list_objects("") if not o.path.startswith("_")}
    compacted = [bytes_ for path, bytes_ in sizes.items() if "-c0" in path]
    assert compacted
    assert max(compacted) <= target
    assert len([path for path in sizes if path in {f.final for f in lake.outputs[1].files}]) == SHARDS


def test_a_large_compacted_file_is_not_written_again_for_a_few_rows(lake: Lake) -> None:
    """Else each night would write all of it."""
    lake.publish(9)
    lake.compact()
    large = next(path for path in lake.files() if "-c0" in path)
    lake.publish(1)
    lake.compact()
    assert large in lake.files()
    lake.publish(30)
    lake.compact()
    assert large not in lake.files(), "as many bytes are new"
    assert lake.numbers() == lake.expected()


@pytest.mark.parametrize("passage", [1, 2])
@pytest.mark.parametrize("point", COMPACTION_KILL_POINTS)
@pytest.mark.parametrize("repaired_by", ["compaction", "start"])
def test_a_crash_anywhere_loses_no_row_and_the_next_compaction_or_start_leaves_each_once(
    lake: Lake, point: str, passage: int, repaired_by: str
) -> None:
    lake.publish(5)
    once = passage if point == "compaction-input-removed" else 1
    with at_point(point, die, once), pytest.raises(Crash):
        lake.compact()
    assert set(lake.numbers()) == set(lake.expected()), "a row is never missing"
    if repaired_by == "start":
        own(lake)
    else:
        lake.compact()
    assert lake.numbers() == lake.expected()
    assert numbers_of(lake.store).open == ()
    lake.publish()
    lake.compact()
    assert lake.numbers() == lake.expected()


def own(lake: Lake) -> None:
    """What a start does at a sink."""
    root = LocalStore(Path(lake.place).parent / "root")
    claimant = Claimant(
        job="job",
        root=root,
        newest=empty_manifest(job_uid=UID),
        host="here",
        run_uid="r",
        open_root=lambda url: LocalStore(Path(url)),
        clock=lake.clock,
    )
    lake.sink.own(lake.spec, claimant)


def test_a_loss_of_power_at_any_moment_loses_no_row_and_the_next_compaction_leaves_each_once(tmp_path: Path) -> None:
    """A disk forgets what was not synced: a removal, too. So an end may be there only if its inputs cannot come back."""
    top, moments = tmp_path / "disk", dict[frozenset[str], dict[str, bytes]]()
    top.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(top, patch)
        lake = Lake(str(top / "out"), shards=1)
        lake.publish(4)

        def remember() -> None:
            found = disk.survivors()
            moments[frozenset(found)] = found

        disk.after = remember
        lake.compact()
        disk.close()
    assert len(moments) > 5
    for number, survivors in enumerate(moments.values()):
        after = Lake(str(tmp_path / f"after-{number}" / "out"), shards=1, outputs=lake.outputs)
        for path, body in survivors.items():
            file = tmp_path / f"after-{number}" / path
            if file.suffix:  # others are folders whose names are there and no more
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(body)
        assert set(after.numbers()) == set(lake.expected())
        after.compact()
        assert after.numbers() == lake.expected(), sorted(survivors)


@pytest.mark.parametrize("point", [*COMPACTION_KILL_POINTS, "compaction-listed"])
def test_two_compactions_at_once_leave_each_row_once(lake: Lake, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one does all of its work while the first one stands at a point; then the first one goes on."""
    lake.publish(5)
    planned = plan_folder

    def plan(*args: Any, **how: Any) -> Any:
        found = planned(*args, **how)
        faults.reach("compaction-listed")
        return found

    monkeypatch.setattr(compaction, "plan_folder", plan)
    others: list[Compacted] = []
    with at_point(point, lambda: others.append(lake.compact())) as passed:
        lake.compact()
    assert passed
    assert others
    assert lake.numbers() == lake.expected()
    assert list(lake.store.list_objects(COMPACTING_DIR)) == []


@pytest.mark.parametrize("point", COMPACTION_KILL_POINTS)
def test_a_compaction_that_slept_while_its_file_was_compacted_again_changes_nothing(lake: Lake, point: str) -> None:
    lake.publish(4)

    def others() -> None:
        lake.compact()
        lake.publish(12)
        lake.compact()

    with at_point(point, others):
        lake.compact()
    assert lake.numbers() == lake.expected()
    lake.compact()
    assert lake.numbers() == lake.expected()


@pytest.mark.parametrize("point", COMPACTION_KILL_POINTS)
def test_a_job_publishes_beside_a_compaction(lake: Lake, point: str) -> None:
    lake.publish(4)
    with at_point(point, lake.publish):
        lake.compact()
    assert lake.numbers() == lake.expected()


def test_an_epoch_that_was_compacted_is_not_published_again_by_anybody(lake: Lake) -> None:
    lake.publish(5)
    lake.compact()
    for output in lake.outputs.values():
        lake.sink.publish_again(lake.spec, output, None)
        lake.sink.publish(lake.spec, output, None)  # a driver that was thought dead
    assert lake.numbers() == lake.expected()
    assert lake.sink.newest_published_epoch(lake.spec) == 5
    lost = lake.stage(6)
    for file in lost.files:
        lake.store.delete(file.staged)
    with pytest.raises(MissingFile, match="does not say that epoch 6 was published"):
        lake.sink.publish_again(lake.spec, lost, None)


def test_a_start_still_knows_the_columns_of_a_compacted_folder(lake: Lake) -> None:
    lake.publish(5)
    lake.compact()
    own(lake)
    other = pa.schema([("k", pa.int64()), ("n", pa.int64())])
    with pytest.raises(InvalidPipeline, match="column k is string there and int64"):
        lake.sink.check_place(lake.sink.layout(other), (), "sink 'legs'")
    lake.sink.check_place(lake.sink.layout(SCHEMA), (), "sink 'legs'")
    lake.spec.remove_abandoned(2, set())
    assert lake.numbers() == lake.expected()


def test_each_folder_by_value_keeps_its_rows(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "out"), partition_by=("k",))
    lake.publish(4)
    lake.compact()
    assert len([path for path in lake.files() if path.startswith("k=k0/") and "-c0" in path]) == 1
    assert lake.numbers() == lake.expected()
    table = ds.dataset(lake.place, format="parquet", partitioning="hive").to_table()
    assert all(n % 2 == int(k[1]) for k, n in zip(table["k"].to_pylist(), table["n"].to_pylist(), strict=True))


def test_files_with_other_columns_are_not_merged(lake: Lake) -> None:
    """A column came with epoch 3: a file has the columns of its rows."""
    lake.publish(2)
    lake.publish(3, schema=SCHEMA.append(pa.field("more", pa.string())))
    done = lake.compact()
    assert done.outputs == 2
    assert [table.column_names for table in lake.tables()[:2]] == [["k", "n", "epoch"], ["k", "n", "more", "epoch"]]
    assert lake.numbers() == lake.expected()


def test_files_of_other_writers_are_left_unless_all_are_asked_for(lake: Lake) -> None:
    lake.publish(3)
    other = lake.sink.spec("job", "f" * 16, "legs", ("unused", {}))
    for epoch in range(1, 4):
        task = other.open(1, epoch, 0, "0" * 16)
        task.write(pa.RecordBatch.from_pylist([{"k": "a", "n": -epoch}], schema=SCHEMA))
        lake.sink.publish(other, StagedOutput("legs", epoch, task.finish().files), None)
    assert lake.compact().inputs == 2 * SHARDS
    lake.publish(3)
    assert lake.compact(writers=None).inputs == 2 + 1 + 3 * SHARDS
    assert lake.numbers() == sorted([-3, -2, -1, *lake.expected()])
    lake.store.put(f"part-{WRITER}-{1:020d}-00000-mine-000.parquet", lake.store.read(lake.files()[-1], 1 << 20))
    lake.publish(2)
    lake.compact()
    assert f"part-{WRITER}-{1:020d}-00000-mine-000.parquet" in lake.files(), "the commit log does not name it"


def test_a_file_that_a_reader_has_removed_is_no_input(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.publish(4)
    gone = lake.outputs[2].files[0].final
    merged = compaction._merged

    def removing(store: Store, *args: Any) -> Any:
        store.delete(gone)
        return merged(store, *args)

    monkeypatch.setattr(compaction, "_merged", removing)
    done = lake.compact()
    assert (done.inputs, done.left) == (0, 3 * SHARDS)
    monkeypatch.undo()
    assert lake.compact().inputs == 3 * SHARDS - 1
    assert set(lake.expected()) - set(lake.numbers()) == {12, 13, 14}


def test_a_file_that_cannot_be_read_ends_it_and_nothing_is_removed(lake: Lake) -> None:
    lake.publish(4)
    path = lake.outputs[2].files[0].final
    data = lake.store.read(path, 1 << 20)
    before = lake.files()
    for damaged in (b"x" * len(data), data[:40] + b"\xff" * 40 + data[80:]):
        lake.store.put(path, damaged)
        with pytest.raises(CorruptData, match=r"cannot be read as Parquet.*Nothing was removed"):
            lake.compact()
        assert lake.files() == before


def altered(data: bytes) -> bytes:
    """A file with one other byte, in which a reader that compares no checksum finds other rows."""
    rows = pq.read_table(pa.BufferReader(data))
    for at in range(len(data)):
        other = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        try:
            if pq.read_table(pa.BufferReader(other)).equals(rows) is False:
                return other
        except (pa.ArrowException, OSError):
            continue
    raise AssertionError("each byte matters to the reader")


def test_a_value_that_was_altered_on_the_disk_is_not_carried_into_a_new_file(lake: Lake) -> None:
    """The pages of our files have checksums; without them the new file would say that all is well."""
    lake.publish(4)
    path = lake.outputs[2].files[0].final
    lake.store.put(path, altered(lake.store.read(path, 1 << 20)))
    before = lake.files()
    with pytest.raises(CorruptData, match="cannot be read as Parquet"):
        lake.compact()
    assert lake.files() == before


def test_a_new_file_with_other_rows_is_found_before_anything_is_removed(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.publish(4)
    before, put_file = lake.files(), LocalStore.put_file

    def damaging(self: LocalStore, local: Path, path: str) -> None:
        table = pq.read_table(local)
        pq.write_table(table.slice(1), local)
        put_file(self, local, path)

    monkeypatch.setattr(LocalStore, "put_file", damaging)
    with pytest.raises(CorruptData, match="all inputs are there"):
        lake.compact()
    assert lake.files() == before
    assert numbers_of(lake.store).newest == 0


def test_a_compaction_whose_file_is_gone_before_it_had_its_name_is_void(lake: Lake) -> None:
    lake.publish(4)
    with at_point("compaction-agreed", die), pytest.raises(Crash):
        lake.compact()
    for found in list(lake.store.list_objects(COMPACTING_DIR)):
        lake.store.delete(found.path)
    assert finish(lake.store, 1) is False
    assert lake.numbers() == lake.expected()
    assert lake.compact().inputs == 3 * SHARDS, "its inputs are those of the next one"
    assert lake.numbers() == lake.expected()


def test_an_end_is_not_taken_back(lake: Lake) -> None:
    """Whoever slept before the end finds a file that is gone, and must not call it void."""
    lake.publish(4)
    lake.compact()
    lake.store.delete(next(path for path in lake.files() if "-c0" in path))  # its reader has archived it
    assert finish(lake.store, 1) is True
    assert b"done" in lake.store.read(f"{COMPACTIONS_DIR}/{1:020d}.end.json", 1 << 16)


@pytest.mark.parametrize(
    "path", ["_stillstate/commits/a.json", "../other/part-a.parquet", "data.parquet", "part-x.csv"]
)
def test_a_document_removes_nothing_but_output(lake: Lake, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.publish(4)
    with at_point("compaction-agreed", die), pytest.raises(Crash):
        lake.compact()
    found = compactions._read(lake.store, 1)
    object.__setattr__(found, "inputs", (path,))
    lake.store.put(f"{COMPACTIONS_DIR}/{1:020d}.json", compactions.encode_document("compaction", found))
    with pytest.raises(CorruptManifest, match="no output of a job"):
        finish_all(lake.store)
    assert lake.numbers() == lake.expected()


def test_files_of_killed_compactions_are_removed_after_a_day(lake: Lake) -> None:
    lake.publish(4)
    with at_point("compaction-staged", die), pytest.raises(Crash):
        lake.compact()
    (left,) = lake.store.list_objects(COMPACTING_DIR)
    (Path(lake.place) / COMPACTING_DIR / ".tmp-killed").write_bytes(b"half")
    lake.clock.at_ms = left.modified_ms + 3600 * 1000
    lake.compact()
    assert [o.path for o in lake.store.list_objects(COMPACTING_DIR)] == [left.path], "it may be at work"
    lake.clock.at_ms = left.modified_ms + 86_400_000 * 2
    lake.compact()
    assert list((Path(lake.place) / COMPACTING_DIR).iterdir()) == []


def test_a_plan_changes_nothing_and_says_what_a_compaction_does(lake: Lake) -> None:
    lake.publish(5)
    before = {o.path: o.bytes for o in lake.store.list_objects("")}
    plan = plan_folder(lake.store, lake.actor, writers=[WRITER], min_age_s=0)
    assert {o.path: o.bytes for o in lake.store.list_objects("")} == before
    assert (plan.files, plan.inputs, plan.files_after, plan.open_files) == (5 * SHARDS, 4 * SHARDS, 1 + SHARDS, SHARDS)
    shown: list[tuple[int, int]] = []
    done = lake.compact(on_progress=lambda some, of: shown.append((some, of)))
    assert (done.inputs, done.input_bytes) == (plan.inputs, plan.input_bytes)
    assert shown == [(plan.input_bytes, plan.input_bytes)]
    assert len(lake.files()) == plan.files_after


def test_no_group_has_more_than_a_thousand_files(lake: Lake) -> None:
    """While they are removed readers see rows twice: that is to be short."""
    names = [f"part-{WRITER}-{n:020d}-00000-a-000.parquet" for n in range(1, 2502)]
    log = [f"_stillstate/commits/{WRITER}/{n:020d}.json" for n in range(1, 2502)]
    folder = Folder.of(StoredObject(path, 10, 1) for path in (*names, *log))
    plan = plan_compaction(folder, known=0, writers=[WRITER], target_bytes=1 << 30, logged_before_ms=2)
    assert [len(group.files) for group in plan.groups] == [1000, 1000, 500]
    assert all(a.last_epoch < b.first_epoch for a, b in pairwise(plan.groups))


def test_a_file_of_a_compaction_that_has_not_ended_is_no_input(lake: Lake) -> None:
    """It alone shows that the inputs of that one may go."""
    made = f"part-{WRITER}-{1:020d}-{4:020d}-c{3:020d}.parquet"
    names = [f"part-{WRITER}-{n:020d}-00000-a-000.parquet" for n in (5, 6, 7)]
    log = [f"_stillstate/commits/{WRITER}/{n:020d}.json" for n in range(1, 8)]
    folder = Folder.of(StoredObject(path, 10, 1) for path in (made, *names, *log))
    for known, inputs in ((2, 2), (3, 3)):
        plan = plan_compaction(folder, known=known, writers=[WRITER], target_bytes=1 << 30, logged_before_ms=2)
        assert plan.inputs == inputs


def test_a_plan_beside_a_compaction_leaves_its_file_alone(lake: Lake) -> None:
    lake.publish(4)
    plans = []

    def look() -> None:
        lake.publish(4)
        plans.append(plan_folder(lake.store, lake.actor, writers=[WRITER], min_age_s=0))

    with at_point("compaction-removed", look):
        lake.compact()
    (plan,) = plans
    inputs = [file.path for group in plan.groups for file in group.files]
    assert inputs
    assert not [path for path in inputs if "-c0" in path]


@pytest.mark.long
def test_on_s3_each_row_stays_once_whatever_request_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A move is a copy and a deletion there; a process may end behind each of them."""
    changed: list[str] = []
    last = [0]

    def counting(name: str, method: Any) -> Any:
        def call(self: Any, *args: Any, **how: Any) -> Any:
            result = method(self, *args, **how)
            changed.append(name)
            if last[0] and len(changed) == last[0]:
                raise Crash
            return result

        return call

    for name in ("create", "put_file", "delete", "copy_from"):
        monkeypatch.setattr(S3Store, name, counting(name, getattr(S3Store, name)))
    with CountingServer() as server:
        for number in range(1, 30):
            lake = Lake(f"s3://lake/out-{number}", dict(server.options), shards=1)
            lake.publish(3)
            changed.clear()
            last[0] = number
            try:
                lake.compact()
                died = False
            except Crash:
                died = True
            last[0] = 0
            assert set(lake.numbers()) == set(lake.expected()), f"behind {changed}"
            lake.compact()
            assert lake.numbers() == lake.expected(), f"behind {changed}"
            if not died:
                assert {"create", "put_file", "delete", "copy_from"} <= set(changed)
                return
    raise AssertionError("it never came to its end")
