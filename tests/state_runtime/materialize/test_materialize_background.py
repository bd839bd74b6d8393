"""Materialization beside the driver: what it adopts, what it refuses, and that no failure reaches the job."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Any

import pytest
from model import (
    ALL_HASHES,
    ALL_KEYS,
    OPERATOR,
    SCHEMA,
    STATE,
    CountingIds,
    DictStore,
    FakeClock,
    StateWriter,
    recorded,
    rows_of,
)

from state_runtime.base.errors import CorruptData, CorruptManifest, CorruptSegment, StoreUnavailable, Unavailable
from state_runtime.base.settings import JobSettings, MaterializationSettings
from state_runtime.materialize import BackgroundMaterializer, Record, background, protected
from state_runtime.materialize.records import ADOPTED_FOR_MS, Pin, beat, claim, open_pins, read_pin, read_record
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import manifest_path, materialization_path
from tests.job_settings import job_settings
from tests.stored import read_states

EAGER = JobSettings(materialization=MaterializationSettings(min_bytes=1, ratio=0.01))
NEVER = JobSettings(materialization=MaterializationSettings(by="dagster"))


class Bench:
    """A driver's commits, its materializer, and a clock that only the test moves."""

    def __init__(self, settings: JobSettings = EAGER) -> None:
        self.writer = StateWriter()
        self.clock = FakeClock()
        self.root = self.writer.root
        self.materializer = BackgroundMaterializer(self.root, settings, self.writer.ids, self.clock)
        self.expected: dict[Any, Any] = {}

    def commit(self, changed: dict[Any, Any]) -> Manifest:
        """One checkpoint, as the driver makes it."""
        self.writer.manifest = self.materializer.take(self.writer.manifest)
        manifest = self.writer.epoch(changed)
        self.root.put(manifest_path(manifest.snapshot_id), manifest.encode())
        self.materializer.settled(manifest)
        self.expected |= changed
        self.check()
        return manifest

    def work(self, manifest: Manifest | None = None) -> None:
        """Let the thread begin and end."""
        self.materializer.start_if_due(manifest or self.writer.manifest)
        self.materializer.join(30)

    def check(self) -> None:
        stored = read_states(self.root, self.writer.manifest, OPERATOR, {STATE: SCHEMA}, *ALL_HASHES)[STATE]
        assert rows_of(stored) == self.expected


def test_a_finished_fold_goes_into_the_next_commit_and_is_then_forgotten() -> None:
    """A record is kept until a committed manifest holds it, however many commits fail in between."""
    bench = Bench()
    committed = bench.commit({ALL_KEYS[0]: (1, "a")})
    assert bench.materializer.take(committed) is committed
    bench.work()
    draft = bench.materializer.take(committed)
    assert (len(draft.layers), draft.segments) == (1, ())
    bench.materializer.settled(committed)  # another manifest was committed, without the tables
    assert bench.materializer.completed == 0
    assert bench.materializer.take(committed) == draft
    bench.materializer.settled(draft)
    assert bench.materializer.completed == 1
    assert bench.materializer.take(draft) is draft
    bench.commit({ALL_KEYS[1]: (1, "b")})


def test_only_one_fold_runs_and_none_while_a_record_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two records over one chain could not both be adopted."""
    bench = Bench()
    committed = bench.commit({ALL_KEYS[0]: (1, "a")})
    go, started = threading.Event(), []
    fold = background.materialize

    def slow(*args: Any, **kwargs: Any) -> Any:
        started.append(1)
        go.wait(30)
        return fold(*args, **kwargs)

    monkeypatch.setattr(background, "materialize", slow)
    bench.materializer.start_if_due(committed)
    bench.materializer.start_if_due(committed)
    assert bench.materializer.take(committed) is committed, "nothing is taken before the fold has ended"
    go.set()
    bench.materializer.join(30)
    bench.work()
    assert len(started) == 1


def test_a_failed_fold_is_logged_counted_and_tried_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed materialization never fails the job; the pauses double."""
    bench = Bench()
    committed = bench.commit({ALL_KEYS[0]: (1, "a")})
    fold = background.materialize
    failures = iter([OSError("disk"), MemoryError("memory"), CorruptSegment("damaged")])
    tries = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        tries.append(bench.clock.monotonic_s())
        error = next(failures, None)
        if error is not None:
            raise error
        return fold(*args, **kwargs)

    monkeypatch.setattr(background, "materialize", failing)
    began_s = bench.clock.monotonic_s()
    with caplog.at_level(logging.ERROR):
        for _ in range(80):
            bench.work()
            bench.clock.advance_s(0.125)
            if len(tries) == 3 and not tries[3:]:
                assert bench.materializer.failures_in_a_row == 3
                assert bench.materializer.take(committed) is committed
    assert [at - began_s for at in tries] == [0, 1, 3, 7]
    assert caplog.text.count("materialization of snapshot 1 failed") == 3
    assert bench.materializer.failures_in_a_row == 0
    assert len(bench.materializer.take(committed).layers) == 1


def test_a_failed_fold_ends_its_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the next one need not wait for it to grow old."""
    bench = Bench()
    manifest = bench.commit({ALL_KEYS[0]: (1, "a")})
    path = manifest.segments[0].path
    body = bench.root.read(path, 1 << 20)
    bench.root.delete(path)
    bench.work()
    assert bench.materializer.failures_in_a_row == 1
    pin = read_pin(bench.root, 1)
    assert pin is not None
    assert pin.state == "failed"
    bench.root.put(path, body)
    bench.clock.advance_s(1)
    bench.work()
    assert bench.materializer.failures_in_a_row == 0
    assert read_record(bench.root, 2).snapshot_id == 1


def test_a_thread_that_cannot_start_does_not_fail_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine at its limit of threads: the epoch is committed already, and a later one tries again."""
    bench = Bench()
    committed = bench.commit({ALL_KEYS[0]: (1, "a")})

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    bench.materializer.start_if_due(committed)
    monkeypatch.undo()
    bench.clock.advance_s(1)
    bench.work()
    assert len(bench.materializer.take(committed).layers) == 1


# --- records of others -------------------------------------------------------------------------------------------


def test_a_record_of_another_process_is_adopted_within_seconds_and_only_once() -> None:
    """The driver does not fold itself; it looks for records, not at every commit."""
    bench = Bench(NEVER)
    bench.commit({ALL_KEYS[0]: (1, "a")})
    bench.work()
    record = recorded(bench.root, bench.writer.manifest, clock=bench.clock)
    bench.work()
    assert bench.materializer.take(bench.writer.manifest) is bench.writer.manifest, "it has just looked"
    bench.commit({ALL_KEYS[1]: (1, "b")})
    bench.clock.advance_s(5)
    bench.work()
    manifest = bench.commit({ALL_KEYS[2]: (1, "c")})
    assert [t.path for t in manifest.layers[0].tables] == [t.path for t in record.base]
    assert [s.snapshot_id for s in manifest.segments] == [2, 3]
    bench.clock.advance_s(5)
    bench.work()
    assert bench.commit({ALL_KEYS[3]: (1, "d")}).layers == manifest.layers
    assert bench.materializer.completed == 1


def test_the_first_checkpoint_of_a_run_adopts_what_waits() -> None:
    bench = Bench(NEVER)
    bench.commit({ALL_KEYS[0]: (1, "a")})
    recorded(bench.root, bench.writer.manifest, clock=bench.clock)
    bench.materializer = BackgroundMaterializer(bench.root, NEVER, bench.writer.ids, bench.clock)
    bench.materializer.look(bench.writer.manifest)
    assert [s.snapshot_id for s in bench.commit({ALL_KEYS[1]: (1, "b")}).segments] == [2]


def test_a_record_of_a_snapshot_that_was_committed_meanwhile_is_found_at_the_next_look() -> None:
    """The thread holds an older manifest than the one that was folded."""
    bench = Bench(NEVER)
    older = bench.commit({ALL_KEYS[0]: (1, "a")})
    newer = bench.commit({ALL_KEYS[1]: (1, "b")})
    recorded(bench.root, newer, clock=bench.clock)
    bench.work(older)
    assert bench.materializer.take(newer) is newer
    bench.clock.advance_s(5)
    bench.work(newer)
    assert len(bench.materializer.take(newer).layers) == 1


def spoil_file(root: DictStore, record: Record) -> None:
    root.delete(record.base[0].path)


def spoil_size(root: DictStore, record: Record) -> None:
    root.put(record.base[0].path, b"short")


def spoil_record(root: DictStore, record: Record) -> None:
    path = materialization_path(record.record_id)
    root.put(path, root.read(path, 1 << 20)[:-9])


def spoil_path(root: DictStore, record: Record) -> None:
    hostile = replace(record, base=(replace(record.base[0], path="../../other/file"),))
    root.put(materialization_path(record.record_id), hostile.encode())


def spoil_number(root: DictStore, record: Record) -> None:
    root.put(materialization_path(record.record_id), replace(record, record_id=9).encode())


def spoil_range(root: DictStore, record: Record) -> None:
    hostile = replace(record, base=(replace(record.base[0], hash_low=1 << 70),))
    root.put(materialization_path(record.record_id), hostile.encode())


@pytest.mark.parametrize("spoil", [spoil_file, spoil_size, spoil_record, spoil_path, spoil_number, spoil_range])
def test_a_record_that_cannot_be_trusted_is_passed_over_and_the_next_good_one_adopted(spoil: Any) -> None:
    """A manifest must never name what is not there, and nothing outside of the job root."""
    bench = Bench(NEVER)
    manifest = bench.commit({ALL_KEYS[0]: (1, "a")})
    record = recorded(bench.root, manifest, clock=bench.clock)
    assert isinstance(bench.root, DictStore)
    spoil(bench.root, record)
    bench.work()
    assert bench.materializer.take(manifest) is manifest
    recorded(bench.root, manifest, clock=bench.clock)
    bench.clock.advance_s(5)
    bench.work()
    assert len(bench.materializer.take(manifest).layers) == 1


def test_a_record_with_a_path_outside_of_the_job_root_is_not_read() -> None:
    bench = Bench(NEVER)
    record = recorded(bench.root, bench.commit({ALL_KEYS[0]: (1, "a")}), clock=bench.clock)
    assert isinstance(bench.root, DictStore)
    spoil_path(bench.root, record)
    with pytest.raises(CorruptData, match="not a plain relative path"):
        read_record(bench.root, record.record_id)


def test_a_record_that_waited_too_long_is_not_adopted() -> None:
    """Garbage collection may have begun to take its files."""
    bench = Bench(NEVER)
    manifest = bench.commit({ALL_KEYS[0]: (1, "a")})
    recorded(bench.root, manifest, clock=bench.clock)
    bench.clock.at_ms += ADOPTED_FOR_MS
    bench.work()
    assert bench.materializer.take(manifest) is manifest


def test_a_record_that_waited_too_long_in_memory_is_dropped() -> None:
    """A job without input commits nothing over a weekend; its fold of Friday is collected by Sunday."""
    bench = Bench()
    manifest = bench.commit({ALL_KEYS[0]: (1, "a")})
    bench.work()
    bench.clock.at_ms += ADOPTED_FOR_MS - 1
    assert bench.materializer.take(manifest) is not manifest
    bench.clock.at_ms += 1
    assert bench.materializer.take(manifest) is manifest


def test_a_record_that_fits_no_more_when_the_commit_comes_is_dropped() -> None:
    """Another was adopted first: by the driver that this one took over from."""
    bench = Bench()
    manifest = bench.commit({ALL_KEYS[0]: (1, "a")})
    bench.work()
    other = background.apply(manifest, recorded(bench.root, manifest, clock=bench.clock))
    assert bench.materializer.take(other) is other
    assert bench.materializer.take(manifest) is manifest, "it is forgotten"


def test_two_do_not_fold_at_once_and_nobody_waits_for_the_dead() -> None:
    """A pin that is heard of keeps others from folding the same for nothing; one that is not does not."""
    bench = Bench()
    manifest = bench.commit({ALL_KEYS[0]: (1, "a")})
    pin = claim(bench.root, manifest, clock=bench.clock, ids=CountingIds(prefix=3))
    assert pin is not None
    for _ in range(12):
        bench.work()
        assert bench.materializer.take(manifest) is manifest
        bench.clock.advance_s(10)
        pin = beat(bench.root, pin, bench.clock)
    bench.clock.advance_s(60)
    bench.work()
    assert len(bench.materializer.take(manifest).layers) == 1


def test_a_damaged_pin_holds_up_no_fold_and_every_collection() -> None:
    bench = Bench()
    manifest = bench.commit({ALL_KEYS[0]: (1, "a")})
    bench.root.put(materialization_path(1, started=True), b"{}")
    with pytest.raises(CorruptManifest):
        protected(bench.root, bench.clock.now_ms())
    bench.work()
    assert len(bench.materializer.take(manifest).layers) == 1


def test_ids_are_claimed_once_however_many_begin_together() -> None:
    bench = Bench()
    manifest = bench.commit({ALL_KEYS[0]: (1, "a")})
    pins: list[Pin] = []
    barrier = threading.Barrier(8)

    def begin(number: int) -> None:
        barrier.wait()
        pin = claim(bench.root, manifest, clock=bench.clock, ids=CountingIds(prefix=number))
        assert pin is not None
        pins.append(pin)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(pin.record_id for pin in pins) == list(range(1, 9)) == open_pins(bench.root)


def test_a_store_that_does_not_answer_fails_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the look at a run's start nor the thread."""
    bench = Bench()
    manifest = bench.commit({ALL_KEYS[0]: (1, "a")})

    def down(path: str) -> list[str]:
        raise StoreUnavailable("down")

    monkeypatch.setattr(bench.root, "list_names", down)
    bench.materializer.look(manifest)
    bench.work()
    assert bench.materializer.failures_in_a_row == 1
    monkeypatch.undo()
    bench.clock.advance_s(5)
    bench.work()
    assert len(bench.materializer.take(manifest).layers) == 1


def test_a_manifest_near_its_bound_is_folded_even_if_that_is_nobodys_task() -> None:
    """Else the job would end with it."""
    bench = Bench(NEVER)
    manifest = bench.commit({ALL_KEYS[0]: (1, "a")})
    many = replace(manifest, segments=manifest.segments * 17_000)
    assert len(many.encode()) < 8 << 20
    assert bench.materializer._why(many, bench.clock.monotonic_s()) == "manifest"
    assert bench.materializer._why(manifest, bench.clock.monotonic_s()) is None


def test_the_driver_materializes_while_the_process_that_should_is_away(caplog: pytest.LogCaptureFixture) -> None:
    """Dagster was stopped for a night: the log must not grow all that time; and once it is back, it does its work again."""
    bench = Bench(job_settings(EAGER, materialize=False, materialize_takeover_s=600))
    bench.commit({ALL_KEYS[0]: (1, "a")})
    bench.work()
    bench.clock.advance_s(599)
    bench.work()
    assert bench.materializer.take(bench.writer.manifest) is bench.writer.manifest, "it may still come"
    assert not caplog.records
    bench.clock.advance_s(1)
    bench.work()
    assert "materialization has been due for 600 s (bytes)" in caplog.text
    assert bench.commit({ALL_KEYS[1]: (1, "b")}).layers
    bench.work()
    assert len(bench.commit({ALL_KEYS[2]: (1, "c")}).segments) == 1, "at once, as long as the other one is away"
    assert len(caplog.records) == 1
    background.materialize(
        bench.root, bench.writer.manifest, settings=EAGER, clock=bench.clock, ids=bench.writer.ids
    )  # the other one is back
    bench.clock.advance_s(60)
    bench.work()
    bench.commit({ALL_KEYS[3]: (1, "d")})
    bench.clock.advance_s(60)
    bench.work()
    assert len(bench.commit({ALL_KEYS[0]: (2, "a")}).segments) == 2, "its task again"


def test_what_is_not_due_all_along_is_not_taken_over() -> None:
    """The time counts from when it was due, and not from the run's start."""
    bench = Bench(
        job_settings(
            EAGER,
            materialize=False,
            materialize_takeover_s=600,
            materialize_min_bytes=1 << 30,
            materialize_interval_s=10_000,
        )
    )
    bench.commit({ALL_KEYS[0]: (1, "a")})
    for _ in range(3):
        bench.clock.advance_s(3000)
        bench.work()
    assert bench.materializer.take(bench.writer.manifest) is bench.writer.manifest


def test_where_no_process_can_fold_the_thread_does() -> None:
    """Otherwise the log would grow until no manifest can hold it. Twice the process is asked again each time."""
    bench, asked = Bench(), []

    def nowhere(manifest: Manifest) -> Record:
        asked.append(manifest.snapshot_id)
        raise Unavailable("the folding process could not be started")

    bench.materializer = BackgroundMaterializer(bench.root, EAGER, bench.writer.ids, bench.clock, nowhere)
    committed = bench.commit({ALL_KEYS[0]: (1, "a")})
    for failures in (1, 2, 0):
        bench.work()
        assert bench.materializer.failures_in_a_row == failures
        bench.clock.advance_s(10)
    assert len(asked) == 2
    assert not bench.materializer.take(committed).segments
