"""The newest epochs task by task: the one slow task is in it, whatever the parallelism; and it stays small."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from inflight_root import BATCHES, go_on
from inflight_world import World
from maintenance_root import FakeWorld, Job
from model import CountingIds

from state_runtime.base.errors import CorruptManifest, StoreUnavailable
from state_runtime.base.limits import SMALL_JSON_BYTES_MAX
from state_runtime.base.progress import Progress
from state_runtime.base.settings import CheckpointSettings, JobSettings, MaterializationSettings
from state_runtime.changelog.inflight import RowsLeft
from state_runtime.driver.epoch_line import EpochLine
from state_runtime.driver.heartbeat import Heartbeat
from state_runtime.driver.savepoint_requests import Savepoints
from state_runtime.driver.task_history import EPOCHS_MAX, MOST_LEFT_MAX, SLOWEST_MAX, TaskHistory, epoch_of
from state_runtime.snapshot.epoch_tasks import EpochTasks, RunEpochs, decode_epochs, encode_epochs
from state_runtime.snapshot.paths import epochs_path, epochs_term_of, heartbeat_path, term_of
from state_runtime.snapshot.term_files import newest_term, read_epochs, read_status, write_epochs
from state_runtime.store import Store
from state_runtime.task.acknowledgement import Acknowledgement

AT = 1_700_000_000_000


def task(shard: int, took_ms: int, *, left: int = 0, **more: Any) -> Acknowledgement:
    rows = {7: (RowsLeft(0, 9, left, 10 * left),)} if left else {}
    given = {"input_rows": 10, "processed_rows": 8, "began_at_ms": AT, "processed_at_ms": AT + took_ms, **more}
    return Acknowledgement(epoch="e", stage=0, shard=shard, left=rows, **given)


def one(number: int, *tasks: Acknowledgement, uid: str = "op") -> EpochTasks:
    return epoch_of(Progress(epoch=number, batch_id=number - 1), [(uid, a) for a in tasks or (task(0, 5),)])


def test_the_slowest_task_is_first_and_nothing_is_lost_from_the_sums() -> None:
    """Whoever looks for the one slow task finds it on the first line; and no row is unaccounted for."""
    tasks = [task(n, 10 + n % 13, left=n % 2) for n in range(1_000)]
    tasks[617] = task(617, 60_000, left=1)
    found = one(3, *tasks)
    assert (found.tasks[0].shard, found.tasks[0].took_ms) == (617, 60_000)
    assert [t.took_ms for t in found.tasks] == sorted((t.took_ms for t in found.tasks), reverse=True)
    assert found.others is not None
    assert len(found.tasks) + found.others.tasks == 1_000
    assert sum(t.input_rows for t in found.tasks) + found.others.input_rows == 10_000
    assert sum(t.left_rows for t in found.tasks) + found.others.left_rows == 500


def test_a_shard_with_most_rows_in_flight_is_told_although_others_took_longer() -> None:
    """Where all tasks stop at a deadline, chance decides which of them took longest."""
    tasks = [task(n, 1_000 + n) for n in range(200)]
    tasks[0] = task(0, 1_000, left=1_000_000)
    found = one(3, *tasks)
    assert 0 in {t.shard for t in found.tasks}
    assert len(found.tasks) == SLOWEST_MAX + 1, "shards without rows in flight are no candidates"
    many = one(3, *(task(n, 1_000 + n, left=1_000 - n) for n in range(200)))
    assert {t.shard for t in many.tasks} == {*range(MOST_LEFT_MAX), *range(200 - SLOWEST_MAX, 200)}


def test_what_a_task_did_is_told_as_it_acknowledged_it() -> None:
    """Each number has one meaning, and one place that it comes from."""
    a = task(
        4, 70, left=3, slices=2, spilled_bytes=99, restored="primary", restore_ms=12.5, executor="x" * 100
    )  # fmt: skip
    a = replace(a, left={7: (RowsLeft(0, 9, 3, 1), RowsLeft(10, 19, 4, 1)), 8: (RowsLeft(0, 9, 5, 1),)})
    found = one(3, a).tasks[0]
    assert (found.operator, found.shard, found.left_rows, found.slices) == ("op", 4, 12, 2)
    assert (found.spilled_bytes, found.restored, found.restore_ms) == (99, "primary", 12.5)
    assert (found.began_at_ms, found.processed_at_ms, found.took_ms) == (AT, AT + 70, 70)
    assert found.executor == "x" * 64
    assert one(3, replace(a, began_at_ms=0)).tasks[0].took_ms == 0, "it does not say when it began"


def test_the_newest_epochs_are_kept_and_those_without_a_task_push_none_out() -> None:
    """An idle job with a watermark has an epoch without a task whenever its clock moves."""
    book = TaskHistory()
    for number in range(1, 30):
        book = book.after(one(number)).after(epoch_of(Progress(epoch=number), []))
    assert [e.epoch for e in book.epochs] == [*range(29, 29 - EPOCHS_MAX, -1)]


def test_an_epoch_names_the_first_snapshot_that_it_is_in() -> None:
    """How long a row waited until it was durable: that of the first one, and none before."""
    book = TaskHistory().after(one(1)).after(one(2)).durable(1, snapshot_id=5, at_ms=50)
    assert [(e.epoch, e.snapshot_id, e.durable_at_ms) for e in book.epochs] == [(2, 0, 0), (1, 5, 50)]
    later = book.durable(2, snapshot_id=6, at_ms=60)
    assert [(e.epoch, e.snapshot_id, e.durable_at_ms) for e in later.epochs] == [(2, 6, 60), (1, 5, 50)]


@pytest.mark.parametrize("shards", [1, 40, 1_000, 20_000])
def test_the_document_is_small_whatever_the_job_has(shards: int) -> None:
    """It is rewritten every few seconds, and read with a limit: ten epochs fit, with names as long as can be."""
    big = 10**12
    one_task = {"slices": big, "spilled_bytes": big, "restore_ms": 1e6 / 3, "executor": "e" * 64, "restored": "primary"}
    tasks = [task(n, n, left=big, input_rows=big, processed_rows=big, **one_task) for n in range(shards)]
    epoch, book = one(1, *tasks, uid="u" * 63), TaskHistory()
    for number in range(EPOCHS_MAX):
        book = book.after(replace(epoch, epoch=big + number))
    told = RunEpochs(term=big, run_uid="r" * 40, epochs=book.durable(2 * big, snapshot_id=big, at_ms=AT).epochs)
    data = encode_epochs(told)
    assert len(data) < SMALL_JSON_BYTES_MAX
    assert decode_epochs(data, "here") == told


def test_a_document_that_would_be_too_large_to_be_read_loses_its_oldest_epochs() -> None:
    """Names of executors come from outside: what is written is always what a reader takes."""
    tasks = [task(n, n, executor="\u2603" * 64) for n in range(SLOWEST_MAX)]
    told = RunEpochs(term=1, run_uid="r", epochs=tuple(one(n, *tasks) for n in range(20, 0, -1)))
    data = encode_epochs(told)
    assert len(data) <= SMALL_JSON_BYTES_MAX
    kept = decode_epochs(data, "here").epochs
    assert kept == told.epochs[: len(kept)]
    assert kept


def test_names_of_the_document_are_no_terms() -> None:
    """Whoever looks for the newest run, of this version or an earlier one, passes them over."""
    name = epochs_path(7).rpartition("/")[2]
    assert epochs_term_of(name) == 7
    assert term_of(name) is None
    for other in (heartbeat_path(7), epochs_path(7).replace("0", "x"), "7.epochs.json", ".epochs.json"):
        assert epochs_term_of(other.rpartition("/")[2]) is None


# --- beside the heartbeat -----------------------------------------------------------------------------------------


class Beating:
    """A heartbeat of a run whose driver is played, and what was asked of the store."""

    def __init__(self) -> None:
        self.world = FakeWorld()
        self.job = Job(self.world.connect(), self.world.clock).checkpoints(2)
        self.asked: list[str] = []
        self.refused = ""
        self.driver: Any = SimpleNamespace(
            tasks=TaskHistory(), steps=(), restoring=lambda: (0, 0), progress=None, sinks_away=tuple
        )
        savepoints = Savepoints(
            self.job.root, self.job.committer.info, 1, clock=self.world.clock, ids=CountingIds(8)
        )  # fmt: skip
        self.root: Store = self.world.root(before=self._before)
        self.job.committer.ownership = replace(self.job.committer.ownership, root=self.root)
        self.beat = Heartbeat(self.root, self.job.committer, 1.0, self.world.clock, threading.Event(), savepoints)
        self.beat.watch(self.driver)

    def _before(self, operation: str, path: str) -> None:
        self.asked.append(f"{operation} {path.rpartition('/')[2]}")
        if self.refused and path.endswith(self.refused):
            raise StoreUnavailable(f"{path} cannot be written now")

    def puts(self) -> list[str]:
        """The names that one heartbeat writes."""
        self.asked.clear()
        self.beat._beat()
        return [line.partition(" ")[2] for line in self.asked if line.startswith("put ")]


def test_it_is_written_after_an_epoch_and_not_again_before_the_next() -> None:
    """An idle job costs no request more than before."""
    beating = Beating()
    beat, epochs = f"{1:020d}.heartbeat.json", f"{1:020d}.epochs.json"
    assert beating.puts() == [beat]
    beating.driver.tasks = beating.driver.tasks.after(one(1)).after(one(2))
    assert beating.puts() == [beat, epochs]
    assert beating.asked.count(f"read {1:020d}.json") == 2, "whose the root is, before each of the two"
    assert beating.puts() == [beat]
    assert beating.asked.count(f"read {1:020d}.json") == 1
    beating.driver.tasks = beating.driver.tasks.durable(2, snapshot_id=3, at_ms=AT)
    assert beating.puts() == [beat, epochs]
    told = read_epochs(beating.job.root)
    assert told is not None
    assert (told.term, told.run_uid) == (1, beating.job.committer.term.run_uid)
    assert told.epochs == beating.driver.tasks.epochs
    assert beating.puts() == [beat]


def test_a_store_that_does_not_take_it_keeps_no_heartbeat_away_and_gets_it_later() -> None:
    """Nothing is decided by it, and much by the heartbeat."""
    beating = Beating()
    beating.driver.tasks = beating.driver.tasks.after(one(1))
    beating.refused = ".epochs.json"
    beating.world.clock.advance_s(100)
    beating.beat._beat()
    status = read_status(beating.job.root)
    assert status is not None
    assert status.at_ms == beating.world.clock.now_ms()
    assert beating.beat.fenced is None
    assert read_epochs(beating.job.root) is None
    beating.refused = ""
    beating.beat._beat()
    assert read_epochs(beating.job.root) is not None


def test_the_last_heartbeat_tells_the_last_epochs() -> None:
    """A run that ends, or fails, between two heartbeats: its newest epoch is the one that is looked for."""
    beating = Beating()
    beating.beat.start()
    beating.driver.tasks = beating.driver.tasks.after(one(9))
    beating.beat.finish("failed", "out of memory")
    told = read_epochs(beating.job.root)
    assert told is not None
    assert [e.epoch for e in told.epochs] == [9]


def test_the_newest_run_that_told_of_epochs_is_read_and_a_damaged_document_is_named() -> None:
    """After a restart the epochs before it are what there is to look at, until the new run has one."""
    job = Job(FakeWorld().connect())
    assert read_epochs(job.root) is None
    for term in (1, 2):
        write_epochs(job.root, RunEpochs(term=term, run_uid=job.committer.term.run_uid, epochs=(one(term),)))
        job.start()
    assert newest_term(job.root) == 3
    told = read_epochs(job.root)
    assert told is not None
    assert told.term == 2
    job.root.put(epochs_path(2), b"{}")
    with pytest.raises(CorruptManifest, match=r"epochs\.json is damaged"):
        read_epochs(job.root)


@pytest.mark.parametrize("term", [1, 9])
def test_what_a_job_of_before_told_in_the_same_root_is_not_this_jobs(term: int) -> None:
    """Versions that do not know the document leave it when they delete a job; terms begin anew with the next one."""
    job = Job(FakeWorld().connect())
    write_epochs(job.root, RunEpochs(term=term, run_uid="of the job before", epochs=(one(700),)))
    assert read_epochs(job.root) is None
    own = RunEpochs(term=1, run_uid=job.committer.term.run_uid, epochs=(one(1),))
    write_epochs(job.root, own)
    assert read_epochs(job.root) == own


# --- by the driver ------------------------------------------------------------------------------------------------


def test_a_driver_tells_of_each_epoch_what_its_progress_has_in_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both come from the same acknowledgements, with rows in flight too; and after its checkpoint an epoch names the
    snapshot."""
    world = World(tmp_path, random.Random(1), [list(batch) for batch in BATCHES])
    settings = JobSettings(
        parallelism=3,
        local_dir=str(tmp_path / "local"),
        materialization=MaterializationSettings(by="dagster"),
        placement="off",
        checkpoint=CheckpointSettings(mode="unaligned"),
    )
    seen: list[tuple[Progress, EpochTasks]] = []
    report = EpochLine._report

    def noted(self: EpochLine, progress: Progress) -> None:
        report(self, progress)
        newest, last = self.tasks.epochs[0], self._committer.last
        if newest.epoch == progress.epoch:
            seen.append((progress, newest))
            assert (newest.snapshot_id, newest.durable_at_ms) == (last.snapshot_id, last.created_at_ms)

    monkeypatch.setattr(EpochLine, "_report", noted)
    go_on(world, settings)
    assert [p.epoch for p, _ in seen] == sorted({p.epoch for p, _ in seen})
    for progress, newest in seen:
        assert newest.others is None
        assert newest.batch_id == progress.batch_id
        if progress.inflight is not None:
            assert progress.inflight.processed_rows == sum(t.processed_rows for t in newest.tasks)
            assert progress.inflight.slices == sum(t.slices for t in newest.tasks)
            assert progress.inflight.rows == sum(t.left_rows for t in newest.tasks)
            assert progress.inflight.slowest_ms == newest.tasks[0].took_ms
    first = min(t.operator for t in seen[0][1].tasks if t.input_rows == max(t.input_rows for t in seen[0][1].tasks))
    came = sum(t.input_rows for _, newest in seen for t in newest.tasks if t.operator == first)
    assert came == sum(map(len, BATCHES))
    assert any(t.left_rows for _, newest in seen for t in newest.tasks), "no rows were in flight"
