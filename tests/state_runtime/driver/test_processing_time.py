"""Processing time while the machine's clock is wrong: what follows from a time that was never reached cannot be taken back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
from fake_fs import FakeFs
from inflight_chains import ALARMS
from inflight_laws import under
from inflight_root import BATCHES
from inflight_world import FIRST_BATCH_MS, Frame, World, start
from model import empty_manifest, seeds

from state_runtime.base.errors import StoreUnavailable
from state_runtime.base.limits import CLOCK_JUMP_MS, CLOCK_LASTS_S
from state_runtime.base.settings import JobSettings
from state_runtime.base.trusted_clock import TrustedClock
from state_runtime.driver.processing_time import ProcessingTime
from state_runtime.snapshot.manifest import Manifest, TimeEntry
from state_runtime.store import FsspecStore, open_store

NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000
MONTH_MS = 30 * DAY_MS


@dataclass
class Machine:
    """Time that goes by, and a wall clock that may be wrong."""

    passed_s: float = 0.0
    wrong_ms: int = 0

    def now_ms(self) -> int:
        return self.right_ms + self.wrong_ms

    @property
    def right_ms(self) -> int:
        return NOW_MS + int(self.passed_s * 1000)

    def monotonic_s(self) -> float:
        return 1_000.0 + self.passed_s


def nobody() -> None:
    """No other machine tells the time."""
    return


def head_at(at_ms: int, written_ms: int = 0) -> Manifest:
    return replace(empty_manifest("u" * 32, 2), time=TimeEntry(at_ms), created_at_ms=written_ms)


@pytest.mark.parametrize("jump_ms", [MONTH_MS, -MONTH_MS, CLOCK_JUMP_MS + 1_000])
def test_a_jump_of_the_clock_is_not_believed_before_it_has_lasted(
    jump_ms: int, caplog: pytest.LogCaptureFixture
) -> None:
    """State that expires and timers that fire for a wrong clock are lost: time goes on as it would have without the jump, and the
    log says so once."""
    machine = Machine()
    clock = TrustedClock(machine, nobody)
    machine.wrong_ms = jump_ms
    while machine.passed_s < CLOCK_LASTS_S:
        assert abs(clock.now_ms() - machine.right_ms) < 10
        machine.passed_s += 10.0
    assert [r.levelno for r in caplog.records] == [logging.ERROR]
    assert abs(clock.now_ms() - machine.now_ms()) < 10, "a time that stays must count in the end"
    assert clock.now_ms() == machine.now_ms()


def test_a_clock_that_is_set_right_in_time_has_changed_nothing() -> None:
    machine = Machine()
    clock = TrustedClock(machine, nobody)
    for wrong_ms in (0, MONTH_MS, 0, -MONTH_MS, 2 * MONTH_MS, 0):
        machine.wrong_ms = wrong_ms
        machine.passed_s += CLOCK_LASTS_S * 0.9
        assert abs(clock.now_ms() - machine.right_ms) < 10


@pytest.mark.parametrize("step_ms", [1_000, -1_000, CLOCK_JUMP_MS - 1_000])
def test_corrections_of_a_clock_are_followed_at_once(step_ms: int, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    clock = TrustedClock(machine, nobody)
    machine.wrong_ms = step_ms
    assert clock.now_ms() == machine.now_ms()
    assert not caplog.records


def test_the_stores_clock_confirms_a_jump_or_contradicts_it() -> None:
    """A host that was suspended is right at once; a wrong clock stays wrong however long it lasts. A store that does not answer is
    no witness, and is not asked at every look."""
    asked = 0

    def telling(store_ms: Callable[[], int]) -> Callable[[], int]:
        def told() -> int:
            nonlocal asked
            asked += 1
            return store_ms()

        return told

    machine = Machine()
    clock = TrustedClock(machine, telling(machine.now_ms))
    machine.wrong_ms = MONTH_MS
    assert clock.now_ms() == machine.now_ms()

    machine = Machine()
    clock = TrustedClock(machine, telling(lambda: machine.right_ms))
    machine.wrong_ms, asked = MONTH_MS, 0
    for _ in range(1_000):
        machine.passed_s += CLOCK_LASTS_S / 100
        assert abs(clock.now_ms() - machine.right_ms) < 10
    assert 0 < asked <= 1_000

    def away() -> int:
        raise StoreUnavailable("away")

    machine = Machine()
    clock = TrustedClock(machine, telling(away))
    machine.wrong_ms, asked = MONTH_MS, 0
    for _ in range(100):
        machine.passed_s += 0.1
        assert abs(clock.now_ms() - machine.right_ms) < 10
    assert asked == 1


def test_a_store_that_takes_long_to_tell_the_time_holds_up_no_other_thread() -> None:
    """A heartbeat, an upload and an epoch ask for the time; a store may hang for a minute."""
    machine = Machine()
    asked_by_others: list[int] = []

    def witness_ms() -> int:
        if machine.wrong_ms:
            other = threading.Thread(target=lambda: asked_by_others.append(clock.now_ms()), daemon=True)
            other.start()
            other.join(timeout=30)
        return machine.now_ms()

    clock = TrustedClock(machine, witness_ms)
    machine.wrong_ms = MONTH_MS
    assert clock.now_ms() == machine.now_ms()
    (other_ms,) = asked_by_others
    assert abs(other_ms - machine.right_ms) < 10


def test_an_answer_that_took_long_neither_confirms_a_jump_nor_contradicts_it() -> None:
    """The clock fell back by just as long as the store took to answer: what it said is what the wrong clock says now."""
    machine, long_s = Machine(), CLOCK_JUMP_MS / 1000 + 100

    def witness_ms() -> int:
        told_ms = machine.right_ms
        if machine.wrong_ms:
            machine.passed_s += long_s
        return told_ms

    clock = TrustedClock(machine, witness_ms)
    machine.wrong_ms = -int(long_s * 1000)
    for _ in range(3):
        assert abs(clock.now_ms() - machine.right_ms) < 10
        machine.passed_s += 1


def test_a_store_on_another_machine_tells_the_time_and_leaves_nothing(tmp_path: Path) -> None:
    """What lies on this machine has its clock, and is no witness against it."""
    fs = FakeFs()
    assert FsspecStore(fs, "bucket/job", "s3://bucket/job").now_ms() == 1_700_000_000_000
    assert not fs.objects
    assert open_store("memory://clocks").now_ms() is None
    assert open_store(str(tmp_path)).now_ms() is None


def test_a_run_that_starts_with_a_wrong_clock_has_the_stores_time() -> None:
    """There is no time before it to compare with."""
    machine = Machine(wrong_ms=MONTH_MS)
    clock = TrustedClock(machine, lambda: machine.right_ms)
    machine.passed_s += 5.0
    assert abs(clock.now_ms() - machine.right_ms) < 10


def test_processing_time_neither_falls_nor_stands_still() -> None:
    """Whatever the clock does, in one run and over restarts: at least half of the time that goes by. A month that was believed would
    stop all timers and TTL for a month otherwise."""
    for _, draw in seeds(50):
        machine, head = Machine(), head_at(NOW_MS + draw.choice([-MONTH_MS, 0, 5_000, MONTH_MS]), NOW_MS)
        reached = [(head.time.batch_time_ms, machine.passed_s)] if head.time else []
        for _ in range(5):
            time = ProcessingTime(TrustedClock(machine, nobody), head, head.created_at_ms)
            for _ in range(20):
                machine.passed_s += draw.choice([0.001, 0.1, 1.0, 600.0, CLOCK_LASTS_S])
                machine.wrong_ms = draw.choice([machine.wrong_ms, machine.wrong_ms, 0, 300, -300, MONTH_MS, -MONTH_MS])
                planned_ms = draw.choice([None, machine.now_ms() - draw.choice([0, 50])])
                looked_ms = time.now_ms(head)
                at_ms = time.now_ms(head, planned_ms)
                assert planned_ms is not None or at_ms == looked_ms
                head = head_at(at_ms, machine.right_ms)
                reached.append((at_ms, machine.passed_s))
        for (before_ms, before_s), (after_ms, after_s) in pairwise(reached):
            assert after_ms >= before_ms + (after_s - before_s) * 500 - 700, "it stands still"


def test_processing_time_is_the_clocks_again_once_it_has_caught_up() -> None:
    machine = Machine()
    head = head_at(NOW_MS + 60_000, NOW_MS)
    time = ProcessingTime(machine, head, head.created_at_ms)
    machine.passed_s = 60.0
    assert time.now_ms(head) == NOW_MS + 90_000
    machine.passed_s = 121.0
    assert time.now_ms(head) == machine.now_ms()
    assert time.now_ms(head, machine.now_ms() - 40) == machine.now_ms() - 40, "Spark's time of a batch counts"


def test_short_runs_get_on_by_the_time_between_them(caplog: pytest.LogCaptureFixture) -> None:
    """A job that runs for a minute each day is half a day further each day."""
    machine = Machine()
    head = head_at(NOW_MS + MONTH_MS, NOW_MS)
    for day in range(1, 11):
        machine.passed_s = day * 86_400.0
        head = head_at(ProcessingTime(machine, head, head.created_at_ms).now_ms(head), machine.now_ms())
        assert head.time is not None
        assert head.time.batch_time_ms == NOW_MS + MONTH_MS + day * 43_200_000
    assert all("ahead of the clock" in r.getMessage() for r in caplog.records)
    assert caplog.records


def test_no_epoch_has_the_time_of_a_clock_that_jumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one of a batch, for which Spark has asked the clock, nor one without; and no snapshot has its date."""
    [(_, draw)] = seeds(1)
    world = World(tmp_path, draw, BATCHES, ALARMS)
    under(world, monkeypatch)
    driver = start(world, JobSettings(parallelism=2))
    for number, batch in enumerate(BATCHES):
        world.off_ms = MONTH_MS if number > 0 else 0
        driver.run_batch(Frame(batch), number)
        while driver.is_due():
            driver.run_without_batch(Frame())
        last = driver._committer.last
        assert last.time is not None
        assert last.source is not None
        assert last.source.batch_id == number
        assert FIRST_BATCH_MS <= last.time.batch_time_ms < FIRST_BATCH_MS + MONTH_MS // 2
        assert last.created_at_ms < FIRST_BATCH_MS + MONTH_MS // 2
    driver.stop()
    driver.close(0.0)


def test_what_goes_by_between_two_runs_counts_in_a_job_of_short_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind the snapshot by which each run takes the job over, which is as old as the run."""
    [(_, draw)] = seeds(1)
    world = World(tmp_path, draw, BATCHES, ALARMS)
    under(world, monkeypatch)
    world.off_ms = MONTH_MS  # wrong from the first moment on, so there is nothing to compare it with
    reached = []
    for number, batch in enumerate(BATCHES[:3]):
        driver = start(world, JobSettings(parallelism=2))
        driver.run_batch(Frame(batch), number)
        time = driver._committer.last.time
        assert time is not None
        reached.append(time.batch_time_ms)
        driver.stop()
        driver.close(0.0)
        world.off_ms = number * DAY_MS  # right from the second run on, a day after the first, and so on
    assert reached[2] - reached[1] >= DAY_MS // 2
