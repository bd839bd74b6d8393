"""The contract of a sink, as a test that any sink runs: each epoch once, whoever publishes it, and however often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa

from state_runtime.base.actor import Actor
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import StillstateError
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.maintenance.output.withdraw import withdraw_output
from state_runtime.pipeline.sinks import Sink
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.snapshot.manifest import StagedOutput
from state_runtime.store import Store

__all__ = ["check_sink"]

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])


def check_sink(make: Callable[[], Sink], read: Callable[[], Sequence[dict[str, Any]]], root_url: str) -> None:
    """Check that a sink keeps its promise: rows of an epoch are in the target once, or not at all.

    Rows have a text `k` and an integer `n`, and no two rows have the same `k`: a sink that merges by `k` passes, too.
    Each law begins where the one before has ended; the target is empty at first.

    Args:
        make: returns the sink, as a driver that has just started makes it, for one and the same target.
        read: returns the target's rows, as its readers see them; other columns than `k` and `n` do not matter.
        root_url: of a folder in which a sink may stage, as that of a job's root.

    Raises:
        AssertionError: with the law that is broken.

    Example:
        def test_my_sink(tmp_path):
            check_sink(lambda: MySink(tmp_path / "table"), lambda: rows_of(tmp_path / "table"), str(tmp_path / "root"))
    """
    writer = _Writer(make, root_url, "1" * 32)
    expected: list[tuple[str, int]] = []

    def has(law: str) -> None:
        found = sorted((row["k"], row["n"]) for row in read())
        _hold(found == sorted(expected), f"{law}: the target has {found}, and should have {sorted(expected)}")

    first = writer.staged(1)
    has("what is staged is not visible before it is published")
    writer.sink.publish(writer.spec, first, None)
    expected += _rows(writer, 1)
    has("an epoch that is published is visible")
    writer.sink.publish_again(writer.spec, first, None)
    has("an epoch that is published again by the same driver comes once")
    restarted = _Writer(make, root_url, writer.root_id)
    restarted.sink.publish_again(restarted.spec, first, None)
    has("an epoch that is published again by the next driver comes once")

    second, zombie = restarted.staged(2), _Writer(make, root_url, writer.root_id)
    zombie.sink.newest_published_epoch(zombie.spec)  # it has looked at the target, and sleeps
    restarted.sink.publish(restarted.spec, second, None)
    expected += _rows(writer, 2)
    zombie.sink.publish(zombie.spec, second, None)
    has("an epoch that a driver which was thought dead publishes, too, comes once")
    third = restarted.staged(3)
    restarted.sink.publish(restarted.spec, third, None)
    expected += _rows(writer, 3)
    zombie.sink.publish_again(zombie.spec, second, None)
    has("an older epoch that is published again behind a newer one comes once")

    fourth, sleeper = restarted.staged(4), _Writer(make, root_url, writer.root_id)

    def takes_over() -> None:
        restarted.sink.publish(restarted.spec, fourth, None)
        restarted.sink.settle(restarted.spec, fourth)

    _publish_asleep(sleeper, fourth, takes_over)
    expected += _rows(writer, 4)
    has("an epoch that another driver publishes while this one sleeps before its staged rows comes once")

    other = _Writer(make, root_url, "2" * 32)
    has_none = other.sink.newest_published_epoch(other.spec) == 0
    _hold(has_none, "a root that was made anew has published nothing here")
    other.sink.publish(other.spec, other.staged(1), None)
    expected += _rows(other, 1)
    has("epoch 1 of another root is not taken for that of the first one")
    newest = restarted.sink.newest_published_epoch(restarted.spec)
    _hold(newest in (0, 4), f"the newest epoch of the first root is 4 (0 if the target does not say), not {newest}")

    nothing = StagedOutput(other.spec.name, 2, ())
    other.sink.publish(other.spec, nothing, None)
    has("an epoch without rows changes nothing")
    if restarted.sink.on_rollback == "replace":
        _check_withdrawal(restarted, _Writer(make, root_url, writer.root_id), has)
        expected += _rows(writer, 7)
        restarted.sink.publish(restarted.spec, restarted.staged(7), None)
        has("an epoch behind those that were taken out is visible")


def _check_withdrawal(writer: _Writer, zombie: _Writer, has: Callable[[str], None]) -> None:
    """The job goes back behind epoch 5, while a driver is about to publish epoch 6."""
    writer.sink.publish(writer.spec, writer.staged(5), None)
    sixth, left = writer.staged(6), [(5, 6)]
    zombie.sink.newest_published_epoch(zombie.spec)
    writer.spec.remove_abandoned(term=2, named=frozenset())
    actor = Actor(SYSTEM_CLOCK, SYSTEM_IDS)
    withdraw_output(writer.sink, writer.spec, left, actor)
    has("output of an epoch that the job went back behind is taken out")
    withdraw_output(writer.sink, writer.spec, left, actor)
    has("taking it out again changes nothing")
    with suppress(StillstateError):
        zombie.sink.publish(zombie.spec, sixth, None)
    has("a driver which was thought dead publishes no epoch that the job went back behind")


def _hold(is_so: bool, law: str) -> None:
    if not is_so:
        raise AssertionError(law)


def _publish_asleep(writer: _Writer, output: StagedOutput, meanwhile: Callable[[], None]) -> None:
    """Publish with a driver that falls asleep where it first asks for the store of its staged rows."""
    spec = _Asleep(**vars(writer.spec))
    vars(spec)["meanwhile"] = [meanwhile]
    try:
        writer.sink.publish(spec, output, None)
    except StillstateError as error:
        law = "a driver that sleeps before its staged rows finds the epoch in the target, and its rows gone: no error"
        raise AssertionError(f"{law}; it raised {error}") from error


class _Asleep(SinkSpec):
    """Something happens before its store is given for the first time."""

    def store(self) -> Store:
        """See `SinkSpec.store`."""
        meanwhile: list[Callable[[], None]] = vars(self)["meanwhile"]
        if meanwhile:
            meanwhile.pop()()
        return super().store()


class _Writer:
    """A driver's side of a sink."""

    def __init__(self, make: Callable[[], Sink], root_url: str, root_id: str) -> None:
        self.root_id = root_id
        self.sink = make()
        self.sink.check(SCHEMA, "the sink")
        self.spec: SinkSpec = self.sink.spec("tested", root_id, "out", (root_url, {}))

    def staged(self, epoch: int) -> StagedOutput:
        """Stage an epoch's rows, as two tasks do."""
        files: list[Any] = []
        for shard, row in enumerate(_rows(self, epoch)):
            staging = self.spec.open(1, epoch, shard, "attempt")
            staging.write(pa.RecordBatch.from_pylist([{"k": row[0], "n": row[1]}], schema=SCHEMA))
            files += staging.finish().files
        return StagedOutput(self.spec.name, epoch, tuple(files))


def _rows(writer: _Writer, epoch: int) -> list[tuple[str, int]]:
    return [(f"{writer.root_id[:1]}-{epoch}-{shard}", 10 * epoch + shard) for shard in range(2)]
