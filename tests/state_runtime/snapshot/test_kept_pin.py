"""A pin that is kept alive while work goes on: in time, never after it was lost, and not for longer than the work."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

import pytest
from fake_fs import FakeFs
from model import CountingIds, FakeClock

from state_runtime.base.actor import Actor
from state_runtime.base.errors import OutcomeUnknown, SnapshotExpired, StoreRefused, Unavailable
from state_runtime.snapshot.expiry_boundary import ExpiryBoundary, advance_boundary
from state_runtime.snapshot.kept_pin import LASTS_MS, RENEWED_AFTER_MS, KeptPin, kept_pin
from state_runtime.snapshot.paths import manifest_path
from state_runtime.snapshot.pins import SnapshotPin, pin_snapshot, read_pins
from state_runtime.store.fsspec_store import FsspecStore


class World:
    """A root on a store with faults, and somebody who works on its snapshot 3."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.actor = Actor(self.clock, CountingIds())
        self.fs = FakeFs()
        self.root = FsspecStore(self.fs, "/root", "fake://root", retry_wait_max_s=0.0)
        self.root.put(manifest_path(3), b"the snapshot")

    def keep(self, do_without: tuple[type[Unavailable], ...] = ()) -> AbstractContextManager[KeptPin]:
        return kept_pin(
            self.root,
            3,
            reason="copy",
            holder="a copier",
            note="attempt",
            actor=self.actor,
            do_without=do_without,
        )

    def pins(self) -> list[SnapshotPin]:
        return read_pins(self.root)

    def pass_ms(self, ms: int) -> None:
        self.clock.at_ms += ms

    def give_up(self) -> None:
        """What a collector does that finds no pin that is not void."""
        assert all(pin.is_void(self.clock.now_ms()) for pin in self.pins())

        def without_it(now: ExpiryBoundary) -> ExpiryBoundary | None:
            return now.announcing([3], [3, 4])

        announced = advance_boundary(self.root, without_it, clock=self.clock, ids=self.actor.ids)
        advance_boundary(self.root, lambda now: now.settling(announced.going, ()), clock=self.clock, ids=self.actor.ids)

    def fail(self, operation: str, error: Exception) -> None:
        def before(called: str, path: str) -> None:
            if called == operation and "/pins/" in path:
                raise error

        self.fs.before = before

    def heal(self) -> None:
        self.fs.before = lambda called, path: None


@pytest.fixture
def world() -> World:
    return World()


def test_the_snapshot_is_pinned_while_the_work_goes_on_and_no_longer(world: World) -> None:
    """Nobody gives it up meanwhile, and it does not stay for ever."""
    with world.keep() as kept:
        assert kept.is_pinned
        assert [(pin.snapshot_id, pin.reason) for pin in world.pins()] == [(3, "copy")]
    assert world.pins() == []


def test_a_pin_is_renewed_before_it_runs_out_however_long_the_work_takes(world: World) -> None:
    """The work takes ten times as long as a pin lasts; at no beat is it void."""
    with world.keep() as kept:
        first = world.pins()[0]
        for _ in range(10 * LASTS_MS // RENEWED_AFTER_MS):
            world.pass_ms(RENEWED_AFTER_MS)
            kept.beat()
            (pin,) = world.pins()
            assert not pin.is_void(world.clock.now_ms())
            assert pin.path == first.path


def test_a_pin_is_not_written_at_every_beat(world: World) -> None:
    """A beat comes after every object: thousands of them must not become thousands of requests."""
    with world.keep() as kept:
        puts = []
        world.fs.before = lambda called, path: puts.append(path) if called == "put" else None
        for _ in range(1000):
            kept.beat()
        assert puts == []
        world.pass_ms(RENEWED_AFTER_MS + 1)
        kept.beat()
        kept.beat()
        assert len(puts) == 1


def test_a_renewal_that_fails_is_tried_again_while_the_pin_lasts(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that does not answer for a while ends no work; it is said."""
    with world.keep() as kept:
        world.fail("put", PermissionError("not now"))
        world.pass_ms(RENEWED_AFTER_MS + 1)
        with caplog.at_level(logging.WARNING):
            kept.beat()
        assert "could not be renewed and is tried again" in caplog.text
        world.heal()
        world.pass_ms(RENEWED_AFTER_MS + 1)
        kept.beat()
        assert world.pins()[0].expires_at_ms == world.clock.now_ms() + LASTS_MS


def test_a_pin_that_ran_out_while_the_store_did_not_answer_is_an_error(world: World) -> None:
    """Nothing keeps the snapshot any more: the work must not go on as if something did."""
    with world.keep() as kept:
        world.fail("create", PermissionError("still not"))
        world.pass_ms(LASTS_MS + 1)
        with pytest.raises(Unavailable):
            kept.beat()


def test_a_lost_pin_is_not_renewed_and_the_caller_is_told(world: World) -> None:
    """The snapshot was given up while the process slept: what it copies from there may be gone."""
    with world.keep() as kept:
        world.pass_ms(LASTS_MS + 1)
        world.give_up()
        with pytest.raises(SnapshotExpired, match="expired"):
            kept.beat()
    assert world.pins() == []


def test_a_sleeper_does_not_revive_a_pin_that_ran_out(world: World) -> None:
    """Its file stays as void as it was; the snapshot is there still, and is held by a new one that was asked for."""
    with world.keep() as kept:
        (old,) = world.pins()
        world.pass_ms(LASTS_MS + 1)
        kept.beat()
        assert old in world.pins(), "not renewed: what a collector has read of it stays true"
        (new,) = [pin for pin in world.pins() if pin.path != old.path]
        assert not new.is_void(world.clock.now_ms())
    assert world.pins() == []


def test_the_pins_of_attempts_that_were_killed_go_with_the_one_that_succeeds(world: World) -> None:
    """Those of the same work only; what other people hold stays."""
    options: dict[str, Any] = {"holder": "h", "clock": world.clock, "ids": world.actor.ids}
    pin_snapshot(world.root, 3, reason="copy", note="attempt", **options)
    other = pin_snapshot(world.root, 3, reason="copy", note="another", **options)
    user = pin_snapshot(world.root, 3, reason="user", note="attempt", **options)
    with pytest.raises(ValueError, match="failed"), world.keep():
        raise ValueError("the copy failed")
    assert len(world.pins()) == 3, "an attempt that fails takes its own off and leaves the rest to the next"
    with world.keep():
        pass
    assert sorted(pin.path for pin in world.pins()) == sorted([other.path, user.path])


def test_a_pin_that_cannot_be_given_back_does_not_fail_the_work(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The work is done, and the pin ends by itself."""
    with caplog.at_level(logging.WARNING), world.keep():
        world.fail("delete", PermissionError("no"))
    assert "end by themselves" in caplog.text
    world.pass_ms(LASTS_MS + 1)
    assert all(pin.is_void(world.clock.now_ms()) for pin in world.pins())


def test_a_source_that_may_only_be_read_is_used_without_a_pin_where_the_caller_says_so(world: World) -> None:
    """Everybody else is told: their work hangs on it."""
    world.fail("create", PermissionError("read-only"))
    with world.keep(do_without=(StoreRefused,)) as kept:
        assert not kept.is_pinned
        world.pass_ms(LASTS_MS + 1)
        kept.beat()
    with pytest.raises(StoreRefused), world.keep(do_without=(OutcomeUnknown,)):
        pytest.fail("the work began without the pin that it needs")


def test_a_snapshot_that_was_given_up_is_never_worked_on(world: World) -> None:
    """Not even by who can do without a pin: that is no fault of the store."""
    world.give_up()
    with pytest.raises(SnapshotExpired), world.keep(do_without=(Unavailable,)):
        pytest.fail("the work began on a snapshot that is gone")
