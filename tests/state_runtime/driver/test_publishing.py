"""Sinks publish side by side, each in the order of its epochs; what one has published stays if another fails."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from model import FakeClock

from state_runtime.base.errors import InvalidData, StoreRefused, StoreUnavailable
from state_runtime.driver.publishing import PublishedOutputs, publish_all
from state_runtime.snapshot.manifest import StagedFile, StagedOutput

WAIT_S = 30


class Target:
    """A sink's target, and in which threads it was written to."""

    def __init__(self, name: str, *, of_user: bool = False) -> None:
        self.name, self.may_have_python = name, of_user
        self.epochs: list[int] = []
        self.threads: set[str] = set()


def outputs(*pairs: tuple[str, int]) -> list[StagedOutput]:
    return [StagedOutput(name, epoch, (StagedFile("a", "b", 1, 1),)) for name, epoch in pairs]


def publish(
    targets: list[Target], given: list[StagedOutput], how: Any = lambda target, epoch: None
) -> PublishedOutputs:
    by_name = {target.name: target for target in targets}

    def one(sink: Any, output: StagedOutput) -> None:
        how(sink, output.epoch)
        sink.epochs.append(output.epoch)
        sink.threads.add(threading.current_thread().name)

    return publish_all(given, lambda output: by_name[output.sink], one, FakeClock())  # type: ignore[arg-type, return-value]


def left(done: PublishedOutputs) -> dict[str, list[int]]:
    return {name: [output.epoch for output in of.outputs] for name, of in done.left.items()}


def test_a_sink_does_not_wait_for_another_one_and_keeps_the_order_of_its_epochs() -> None:
    slow, quick = Target("slow"), Target("quick")
    quick_is_done = threading.Event()

    def how(target: Target, epoch: int) -> None:
        if target is slow:
            assert quick_is_done.wait(WAIT_S), "it would wait for ever if one came after the other"
        elif epoch == 2:
            quick_is_done.set()

    done = publish([slow, quick], outputs(("slow", 1), ("quick", 1), ("slow", 2), ("quick", 2)), how)
    assert (slow.epochs, quick.epochs) == ([1, 2], [1, 2])
    assert (list(done.took_ms), done.left) == (["slow", "quick"], {})


@pytest.mark.parametrize("error", [InvalidData, StoreRefused])
def test_what_a_sink_has_published_stays_if_another_fails_and_the_failure_is_told(error: type[Exception]) -> None:
    bad, well = Target("bad"), Target("well")

    def how(target: Target, epoch: int) -> None:
        if target is bad:
            raise error("the target of bad takes no such rows")

    with pytest.raises(error, match="bad"):
        publish([bad, well], outputs(("bad", 1), ("well", 1), ("well", 2)), how)
    assert (bad.epochs, well.epochs) == ([], [1, 2])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("publish")]


def test_a_sink_that_is_away_leaves_its_output_and_stops_no_other_one() -> None:
    """What it took before it went is not left."""
    away, well = Target("away"), Target("well")

    def how(target: Target, epoch: int) -> None:
        if target is away and epoch == 2:
            raise StoreUnavailable("the store of away does not answer")

    done = publish([away, well], outputs(("away", 1), ("well", 1), ("away", 2), ("away", 3), ("well", 2)), how)
    assert (away.epochs, well.epochs) == ([1], [1, 2])
    assert (left(done), list(done.took_ms)) == ({"away": [2, 3]}, ["well"])
    assert isinstance(done.left["away"].error, StoreUnavailable)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("publish")]


def test_a_function_of_the_users_is_called_in_the_drivers_own_thread() -> None:
    """Its session, and whatever else belongs to a thread, is as it was."""
    function, table = Target("function", of_user=True), Target("table")
    publish([function, table], outputs(("function", 1), ("table", 1), ("function", 2)))
    assert function.threads == {threading.current_thread().name}
    assert table.threads != function.threads
    assert function.epochs == [1, 2]


def test_a_function_of_the_users_is_not_waited_for() -> None:
    """It would be called in another thread, while epochs run."""
    function = Target("function", of_user=True)

    def how(target: Target, epoch: int) -> None:
        raise StoreUnavailable("what the function writes to does not answer")

    with pytest.raises(StoreUnavailable):
        publish([function], outputs(("function", 1)), how)


def test_one_sink_needs_no_other_thread() -> None:
    table = Target("table")
    publish([table], outputs(("table", 1)))
    assert table.threads == {threading.current_thread().name}
    assert publish([table], []) == PublishedOutputs()
