"""Lives of `make soak-edges`: a target, the disturbances that it meets, and the law at its end."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, cycle, islice
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import psutil
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from state_runtime.base.errors import Fenced, Unavailable
from tests.soak.edges_driver import Act, Armed, Given, drive, manifests_of, publish_old_ones
from tests.soak.edges_record import difference
from tests.soak.edges_targets import DRIVER_POINTS, TARGETS, Place, Target

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

__all__ = ["DISTURBANCES_OF_A_LIFE", "Blow", "LawBroken", "Life", "Server", "deck", "live", "name_of", "target_of"]

DISTURBANCES_OF_A_LIFE: Final = 8
_MOMENT_S_MAX: Final = 0.15
"""Behind the recovery of a driver: a few epochs of a table in a folder, or some part of one with a server."""
_HANGS_S: Final = 240.0
_KILLED: Final = -int(signal.SIGKILL)
_ENDS_WELL: Final = frozenset({0, Unavailable.exit_code})
_ZOMBIE_ENDS: Final = frozenset({0, Fenced.exit_code, Unavailable.exit_code})

Kind = Literal["driver", "driver, at a moment", "server", "server, at a moment", "server and driver", "zombie"]


class LawBroken(AssertionError):
    """Rows are lost or doubled, or a process that should have gone on did not."""


class Server(Protocol):
    """A server that can be killed and started again on its files."""

    def start(self) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True)
class Blow:
    """One disturbance.

    Attributes:
        point: the step at which it comes; of a moment, the step behind which it is drawn.
    """

    kind: Kind
    point: str


@cache
def _all_of(target: Target) -> tuple[Blow, ...]:
    """Each kind at each step, once."""
    found = [Blow("driver", point) for point in (*DRIVER_POINTS, *target.points)]
    found += [Blow("driver, at a moment", "driver-recovered")] * len(target.points)
    found += [Blow("zombie", point) for point in ("driver-staged", "driver-named", *target.points)]
    if target.server:
        kinds: tuple[Kind, ...] = ("server", "server and driver")
        found += [Blow(kind, point) for kind in kinds for point in target.points]
        found += [Blow("server, at a moment", "driver-recovered")]
    return tuple(found)


def deck(seed: str, target: Target) -> Iterator[Blow]:
    """Disturbances without end: each one of a target comes once before any comes again, in an order of the seed."""
    draw = random.Random(f"{seed} {target.name}")
    blows = _all_of(target)
    return chain.from_iterable(draw.sample(blows, len(blows)) for _ in cycle([None]))


def name_of(seed: int, number: int) -> str:
    """Of the n-th life."""
    return f"{seed}-{number}"


def target_of(name: str) -> Target:
    """Of a life, by its name."""
    return TARGETS[int(name.rpartition("-")[2]) % len(TARGETS)]


def blows_of(name: str) -> list[Blow]:
    """What a life meets, by its name."""
    seed, _, number = name.rpartition("-")
    first = int(number) // len(TARGETS) * DISTURBANCES_OF_A_LIFE
    return list(islice(deck(seed, target_of(name)), first, first + DISTURBANCES_OF_A_LIFE))


class _Process:
    """A driver."""

    def __init__(self, work: Callable[[Given, Connection], None], given: Given) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["tests.soak.edges_driver"])
        self._line, other = context.Pipe()
        self.process: BaseProcess = context.Process(target=work, args=(given, other), daemon=True)
        self.process.start()
        other.close()
        self.said = ""

    def comes_to(self, point: str) -> bool:
        """Wait until it says that it is at its point. Return whether it came there before its end."""
        while self._line in wait([self._line, self.process.sentinel], _HANGS_S):
            try:
                word = self._line.recv()
            except EOFError:
                break
            if word == point:
                return True
            self.said = word
        self.process.join(1)
        if self.process.is_alive():
            self.kill()
            raise LawBroken(f"a driver hung before {point}")
        return False

    def go_on(self) -> None:
        """Answer one that waits."""
        self._line.send("go on")

    def kill(self) -> None:
        """End it by SIGKILL, whatever it does."""
        self.process.kill()
        self.process.join()

    def is_killed_within(self, moment_s: float) -> bool:
        """Kill it when the moment has come. Return whether it lived until then."""
        self.process.join(moment_s)
        lived = self.process.is_alive()
        self.kill()
        return lived

    def waits_asleep(self) -> None:
        """Wait until the kernel has stopped it."""
        asleep = Retrying(
            retry=retry_if_result(lambda status: status != psutil.STATUS_STOPPED),
            stop=stop_after_delay(_HANGS_S),
            wait=wait_fixed(0.005),
        )
        asleep(psutil.Process(self.process.pid).status)

    def wake(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self, allowed: frozenset[int]) -> int:
        """Wait for its end.

        Raises:
            LawBroken: it hangs, or ends with another exit code.
        """
        self.comes_to("its end")
        self.process.join(_HANGS_S)
        code = self.process.exitcode
        if code is None:
            self.kill()
            raise LawBroken(f"a driver hung; {self.said}")
        if code not in allowed:
            raise LawBroken(f"a driver ended with {code}; {self.said or 'its error is above'}")
        return code


@dataclass
class Life:
    """One target and what was done to it.

    Attributes:
        kills: by kind and step.
        notes: what else happened, counted.
        rows: at the end.
    """

    name: str
    target: Target
    place: Place
    server: Server | None
    draw: random.Random
    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    epochs: int = 0
    _begun_so_far: list[_Process] = field(default_factory=list)

    def meet(self, blow: Blow) -> None:
        """Play one disturbance; the drivers that follow go on from what it left."""
        acts: Mapping[str, Callable[[Blow], None]] = {
            "driver": self._driver_dies,
            "driver, at a moment": self._driver_dies_at_a_moment,
            "zombie": self._driver_sleeps,
            "server": self._server_dies,
            "server, at a moment": self._server_dies,
            "server and driver": self._server_dies,
        }
        acts[blow.kind](blow)

    def _begun(self, point: str = "", act: Act = "die", *, passage: int = 1, epochs: int = 1) -> _Process:
        armed = Armed(point, passage, act) if point else None
        return self._process(drive, Given(self.target.name, self.place, epochs, armed))

    def _process(self, work: Callable[[Given, Connection], None], given: Given) -> _Process:
        self._begun_so_far.append(_Process(work, given))
        return self._begun_so_far[-1]

    def close(self) -> None:
        """No process outlives a life: one that sleeps would for ever."""
        for process in self._begun_so_far:
            process.kill()

    def _drawn(self) -> int:
        return self.draw.choice((1, 1, 2, 3))

    def _note_kill(self, blow: Blow) -> None:
        self.kills[blow.kind, blow.point] += 1

    def _driver_dies(self, blow: Blow) -> None:
        process = self._begun(blow.point, passage=self._drawn_for(blow.point))
        if process.end(_ENDS_WELL | {_KILLED}) == _KILLED:
            self._note_kill(blow)
        else:
            self.notes["came to its end first"] += 1

    def _driver_dies_at_a_moment(self, blow: Blow) -> None:
        process = self._begun(blow.point, "tell", epochs=50)
        if not process.comes_to(blow.point):
            raise LawBroken(f"a driver did not come to its first epoch: {process.said}")
        process.go_on()
        if process.is_killed_within(self.draw.uniform(0, _MOMENT_S_MAX)):
            self._note_kill(blow)

    def _driver_sleeps(self, blow: Blow) -> None:
        """A driver sleeps until its successor has gone on, or is just going on; then it wakes up, and goes on too."""
        zombie = self._begun(blow.point, "sleep", passage=self._drawn_for(blow.point), epochs=2)
        if not zombie.comes_to(blow.point):
            zombie.end(_ENDS_WELL)
            self.notes["came to its end first"] += 1
            return
        zombie.waits_asleep()
        is_beside = blow.point in self.target.locks or self.draw.random() < 0.5
        at = (
            "driver-owns"
            if blow.point in self.target.locks
            else self.draw.choice((*self.target.points, "driver-named"))
        )
        successor = self._begun(at if is_beside else "", "tell", epochs=2)
        if is_beside and successor.comes_to(at):
            zombie.wake()
            successor.go_on()
            is_all_published = successor.end(_ENDS_WELL) == 0
        else:
            is_all_published = successor.end(_ENDS_WELL) == 0
            zombie.wake()
        code = zombie.end(_ZOMBIE_ENDS)
        self._note_kill(blow)
        if is_all_published:
            self._holds(f"behind a driver that slept at {blow.point}")  # later epochs would hide what it did
        self.notes[f"zombie that woke {'beside' if is_beside else 'behind'} its successor ended with {code}"] += 1

    def _server_dies(self, blow: Blow) -> None:
        assert self.server is not None
        process = self._begun(blow.point, "tell", passage=self._drawn_for(blow.point), epochs=2)
        if not process.comes_to(blow.point):
            process.end(_ENDS_WELL)
            self.notes["came to its end first"] += 1
            return
        if blow.kind == "server, at a moment":
            process.go_on()
            process.process.join(self.draw.uniform(0, _MOMENT_S_MAX))
        self.server.kill()
        try:
            if blow.kind == "server and driver":
                process.kill()
            elif blow.kind == "server":
                process.go_on()
        finally:
            self.server.start()
        if blow.kind != "server and driver":
            code = process.end(_ENDS_WELL)
            self.notes["driver outlived its server" if code == 0 else "driver gave up its server"] += 1
        self._note_kill(blow)

    def _drawn_for(self, point: str) -> int:
        """The passage. A start passes its points once."""
        once = ("driver-fenced-others", "driver-owns", "driver-recovered", "kafka-fenced")
        return 1 if point in once else self._drawn()

    def ends(self) -> None:
        """The last driver is left alone, an old one publishes all again, and readers see each row once.

        Raises:
            LawBroken: they do not.
        """
        last = self._begun(epochs=2)
        if last.end(_ENDS_WELL):
            self._begun(epochs=1).end(frozenset({0}))
        self._holds("at the end")
        self._process(publish_old_ones, Given(self.target.name, self.place, 0)).end(_ZOMBIE_ENDS)
        self.notes["old epochs published again by a driver that slept"] += 1
        self._holds("when an old driver has published all again")

    def _holds(self, when: str) -> None:
        epochs = manifests_of(self.place).epochs()
        wanted, found = self.target.wanted(self.place.life, epochs), self.target.read(self.place)
        between = difference(found, wanted)
        if not between.is_none:
            raise LawBroken(
                f"{self.target.name}, {when}: {between.lost.total()} rows lost, {between.doubled.total()} doubled: "
                f"{dict(between.lost)}, {dict(between.doubled)}"
            )
        if self.target.keeps_order:
            _keeps_order(found, wanted)
        self.rows, self.epochs = between.rows, len(epochs)


def _keeps_order(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    for key in {row[0] for row in wanted} - {None}:
        if [row for row in found if row[0] == key] != [row for row in wanted if row[0] == key]:
            raise LawBroken(f"rows of the key {key!r} are not in the order of their epochs")


def live(
    name: str,
    server: Server | None = None,
    address: str = "",
    *,
    blows: Sequence[Blow] | None = None,
    tell: Callable[[Blow], None] = lambda blow: None,
) -> Life:
    """One life, to its end.

    Args:
        blows: its disturbances, by default those that follow from its name.
        server, address: of the target's server.
        tell: hears of each disturbance before it comes.

    Raises:
        LawBroken: the folder stays.
    """
    target = target_of(name)
    folder = tempfile.mkdtemp(prefix=f"soak-edges-{name}-")
    unique = f"{name}-{Path(folder).name[-8:].replace('_', 'x')}".lower()
    place = Place(folder, name, unique, hashlib.md5(unique.encode()).hexdigest(), address)
    life = Life(name, target, place, server, random.Random(name))
    try:
        for blow in blows_of(name) if blows is None else blows:
            tell(blow)
            life.meet(blow)
        life.ends()
    finally:
        life.close()
    return life
