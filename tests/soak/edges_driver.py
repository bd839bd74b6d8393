"""A driver of `make soak-edges`, without Spark: it stages, names, publishes, and dies or sleeps at a step.

The order of its steps is that of `state_runtime/driver/checkpointer.py`; sinks are called by their public port. It runs
in a process of its own, which is begun by a process that has imported all of this and used none of it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa

from state_runtime.base import faults
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import StillstateError, can_pass
from state_runtime.base.patience import patience
from state_runtime.pipeline.output_owner import Claimant
from state_runtime.snapshot.manifest import StagedFile, StagedOutput
from state_runtime.store import open_store
from tests.soak.edges_record import SCHEMA, SHARDS, Manifest, Manifests, rows_of
from tests.soak.edges_targets import TARGETS, Place, Target

__all__ = ["EPOCHS_MAX", "Armed", "Given", "drive", "manifests_of", "publish_old_ones"]

EPOCHS_MAX: Final = 8
_FIRST_PATIENCE_S: Final = 5.0

Act = Literal["die", "sleep", "tell"]


@dataclass(frozen=True)
class Armed:
    """What happens at a step.

    Attributes:
        passage: at which one, of this process.
        act: "die" by SIGKILL, "sleep" by SIGSTOP, or "tell" and wait for an answer.
    """

    point: str
    passage: int
    act: Act


@dataclass(frozen=True)
class Given:
    """What a driver is told.

    Attributes:
        epochs: how many it makes behind what it finds. If it is armed it goes on until it came to its point.
    """

    target: str
    place: Place
    epochs: int
    armed: Armed | None = None

    @property
    def kind(self) -> Target:
        return next(target for target in TARGETS if target.name == self.target)


def manifests_of(place: Place) -> Manifests:
    """The chain of a life."""
    return Manifests(Path(place.folder) / "manifests", place.job_uid)


class _Points:
    """Stands in for `faults.reach`."""

    def __init__(self, armed: Armed | None, line: Connection) -> None:
        self._armed = armed
        self._line = line
        self._passed = 0
        self.has_acted = armed is None

    def reach(self, point: str) -> None:
        armed = self._armed
        if armed is None or point != armed.point:
            return
        self._passed += 1
        if self._passed != armed.passage:
            return
        self.has_acted = True
        if armed.act == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        self._line.send(point)
        if armed.act == "sleep":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            self._line.recv()


class _Driver:
    """One driver of one sink."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self._place = given.place
        self._sink = given.kind.make(given.place)
        self._sink.check(SCHEMA, "sink 'out'")
        self._root = open_store(f"{given.place.folder}/root")
        self._spec = self._sink.spec("soak", given.place.job_uid, "out", (self._root.url, {}))
        self._manifests = manifests_of(given.place)
        self._last = self._manifests.newest()
        self._waiting: list[StagedOutput] = []

    def start(self) -> None:
        """Fence others, own the place, and publish what is named."""
        before = self._last
        layout = self._sink.layout(SCHEMA)
        if layout is not None:
            self._sink.check_place(layout, [f for o in before.outputs for f in o.files], "sink 'out'")
        self._commit(Manifest(before.sequence + 1, before.term + 1, before.epoch, {}, before.outputs, before.job_uid))
        faults.reach("driver-fenced-others")
        since_term = self._sink.own(self._spec, self._claimant())
        faults.reach("driver-owns")
        for output in self._last.outputs:
            self._sink.publish_again(self._spec, output, None)
        named = {file.staged for output in self._last.outputs for file in output.files}
        self._spec.remove_abandoned(self._last.term, named, since_term)
        # The target is looked at first: a driver that slept here finds newer epochs, and their manifests too.
        if self._sink.newest_published_epoch(self._spec) > self._manifests.newest().epoch:
            raise AssertionError("the target has an epoch that no manifest names")
        faults.reach("driver-recovered")

    def epoch(self) -> None:
        """One epoch, whole: staged, named, published; a sink that is away does not hold it up."""
        before = self._last
        output = self._staged(before.epoch + 1)
        faults.reach("driver-staged")
        outputs = (*self._waiting, *([output] if output.files else []))
        staged_by = {output.epoch: before.term}
        self._commit(Manifest(before.sequence + 1, before.term, output.epoch, staged_by, outputs, before.job_uid))
        faults.reach("driver-named")
        with patience(_FIRST_PATIENCE_S):
            self._waiting = self._left_of(outputs)
        faults.reach("driver-published")
        for done in before.outputs:
            if done not in self._last.outputs:
                self._sink.settle(self._spec, done)
        faults.reach("driver-settled")

    def end(self) -> None:
        """Publish what waits, with all the patience that the sink has.

        Raises:
            Unavailable: the next driver does.
        """
        for output in self._waiting:
            self._sink.publish_again(self._spec, output, None)

    def _left_of(self, outputs: tuple[StagedOutput, ...]) -> list[StagedOutput]:
        for number, output in enumerate(outputs):
            try:
                act = self._sink.publish_again if output in self._waiting else self._sink.publish
                act(self._spec, output, None)
            except StillstateError as error:
                if not can_pass(error):
                    raise
                return list(outputs[number:])
        return []

    def _commit(self, manifest: Manifest) -> None:
        self._manifests.create(manifest)
        self._last = manifest

    def _claimant(self) -> Claimant:
        newest: Any = self._last
        return Claimant(
            job="soak",
            root=self._root,
            newest=newest,
            host="here",
            run_uid=f"run-{self._last.term}",
            open_root=open_store,
            clock=SYSTEM_CLOCK,
        )

    def _staged(self, epoch: int) -> StagedOutput:
        term = self._last.term
        files: list[StagedFile] = []
        for shard in range(SHARDS):
            staging = self._spec.open(term, epoch, shard, "attempt")
            rows = rows_of(self._place.life, epoch, term, shard)
            staging.write(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
            files += staging.finish().files
        return StagedOutput(self._spec.name, epoch, tuple(files))


def drive(given: Given, line: Connection) -> None:
    """Be a driver, from its start to its end; the exit code is that of the command line."""
    points = _Points(given.armed, line)
    faults.reach = points.reach
    _ends_with_its_code(lambda: _drive(given, points), line)


def _drive(given: Given, points: _Points) -> None:
    driver = _Driver(given)
    driver.start()
    for number in range(EPOCHS_MAX):
        if number >= given.epochs and points.has_acted:
            break
        driver.epoch()
    driver.end()


def publish_old_ones(given: Given, line: Connection) -> None:
    """Be a driver that slept for very long: publish all that any manifest has ever named, the oldest last."""
    _ends_with_its_code(lambda: _publish_old_ones(given), line)


def _publish_old_ones(given: Given) -> None:
    sink = given.kind.make(given.place)
    sink.check(SCHEMA, "sink 'out'")
    spec = sink.spec("soak", given.place.job_uid, "out", (open_store(f"{given.place.folder}/root").url, {}))
    named = {output.epoch: output for manifest in manifests_of(given.place).all() for output in manifest.outputs}
    for _, output in sorted(named.items(), reverse=True):
        sink.publish(spec, output, None)


def _ends_with_its_code(work: Callable[[], None], line: Connection) -> None:
    code = 0
    try:
        work()
    except StillstateError as error:
        line.send(f"{type(error).__name__}: {error}")
        code = error.exit_code
    sys.stderr.flush()
    # As a driver that is done: threads of libraries that wait for a server do not hold it up.
    os._exit(code)
