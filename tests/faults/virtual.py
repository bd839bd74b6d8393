"""Virtual time for uploads, and a file system that fails as real ones do; everything is drawn from one seed, so a seed is a schedule.

Nothing here waits: an attempt "takes" as long as the seed says, a timer rings when virtual time reaches it, and the order of all
events is fixed. A failing seed is replayed with STILLSTATE_TEST_SEED.
"""

from __future__ import annotations

import errno
import heapq
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from fake_fs import FakeFs

from state_runtime.store import FsspecStore

EVENTS_MAX = 200_000


class VirtualTime:
    """`Attempts` and `Clock` in one, without threads: events run in the order of their time, when somebody waits."""

    def __init__(self, duration_s: Callable[[], float] = lambda: 0.01) -> None:
        self.now_s = 1_700_000_000.0
        self.duration_s = duration_s
        self.lock = threading.Condition()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def now_ms(self) -> int:
        return int(self.now_s * 1000)

    def monotonic_s(self) -> float:
        return self.now_s

    def advance_s(self, seconds: float) -> None:
        self.wait(lambda: False, seconds)

    def start(self, call: Callable[[], None]) -> None:
        self._at(self.now_s + self.duration_s(), call)

    def after(self, delay_s: float, call: Callable[[], None]) -> Callable[[], None]:
        live = [True]
        self._at(self.now_s + delay_s, lambda: call() if live[0] else None)

        def cancel() -> None:
            live[0] = False

        return cancel

    def wait(self, until: Callable[[], bool], timeout_s: float) -> bool:
        end_s = self.now_s + timeout_s
        while not until():
            if not self._events or self._events[0][0] > end_s:
                self.now_s = max(self.now_s, end_s)
                return until()
            self._step()
        return True

    def drain(self) -> None:
        """Let everything end that ever will."""
        for _ in range(EVENTS_MAX):
            if not self._events:
                return
            self._step()
        raise AssertionError("events beget events without end")

    def forget(self) -> None:
        """The process dies: nothing that it began goes on."""
        self._events.clear()

    def _at(self, at_s: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (at_s, self._count, call))

    def _step(self) -> None:
        at_s, _, call = heapq.heappop(self._events)
        self.now_s = max(self.now_s, at_s)
        call()


class Killed(BaseException):
    """The process is gone: no handler of its own sees it."""


@dataclass(frozen=True)
class FaultPlan:
    """Chances of each fault per request.

    Attributes:
        before: fails without an effect: lost request, reset in the middle of the body, 5xx.
        after: fails after its effect: lost answer, timeout.
        refused: AccessDenied.
        outage: begins a time in which a number of requests in a row fail.
        kill: ends the process before or after a write.
        slow, hang: of an upload's attempt.
    """

    before: float = 0.0
    after: float = 0.0
    refused: float = 0.0
    outage: float = 0.0
    kill: float = 0.0
    slow: float = 0.0
    hang: float = 0.0


CALM = FaultPlan()
OUTAGE_REQUESTS_MAX = 40
_ERRORS: tuple[Callable[[], Exception], ...] = (
    lambda: OSError(errno.EIO, "InternalError"),
    lambda: OSError(errno.EBUSY, "SlowDown"),
    lambda: TimeoutError("read timed out"),
    lambda: ConnectionResetError("reset by peer"),
)


class FaultyFs(FakeFs):
    """A file system whose answers are drawn from a seed; what it stores is always whole, as an object store's is.

    `requests` counts by operation and kind of object; `interrupt` is called before each (`slept` is its own to set). After `dies` was set (or drawn) every request raises `Killed`.
    """

    def __init__(self, objects: dict[str, bytes], rng: random.Random, plan: FaultPlan = CALM) -> None:
        super().__init__(objects)
        self.rng = rng
        self.plan = plan
        self.dead = False
        self.slept = False
        self.interrupt: Callable[[], None] = lambda: None
        self.requests: Counter[tuple[str, str]] = Counter()
        self.faults: Counter[str] = Counter()
        self._outage_left = 0
        self.before = self._before
        self.after = self._after

    def attempt_s(self) -> float:
        """How long the next upload attempt takes, in virtual time."""
        drawn = self.rng.random()
        if drawn < self.plan.hang:
            return 100_000.0
        return self.rng.uniform(0.8, 4.0) if drawn < self.plan.hang + self.plan.slow else self.rng.uniform(0.01, 0.3)

    def _hit(self, name: str, chance: float) -> bool:
        hit = chance > 0 and self.rng.random() < chance
        self.faults[name] += hit
        return hit

    def _kill(self) -> None:
        if self.dead or self._hit("kill", self.plan.kill):
            self.dead = True
            raise Killed

    def _before(self, operation: str, path: str) -> None:
        self.interrupt()
        self.requests[operation, _kind(path)] += 1
        self._kill()
        if self._hit("refused", self.plan.refused):
            raise PermissionError(errno.EACCES, "AccessDenied")
        if self._hit("outage", self.plan.outage):
            self._outage_left = self.rng.randint(3, OUTAGE_REQUESTS_MAX)
        if self._outage_left > 0 or self._hit("before", self.plan.before):
            self._outage_left = max(self._outage_left - 1, 0)
            raise self.rng.choice(_ERRORS)()

    def _after(self, operation: str, path: str) -> None:
        self._kill()
        if self._hit("after", self.plan.after):
            raise self.rng.choice(_ERRORS)()


def _kind(path: str) -> str:
    name = path.rsplit("/", 1)[-1]
    if name.endswith(".seg"):
        return "direct" if name.startswith("direct-") else "segment"
    return "manifest" if name == "manifest.json" else name if name == "boundary" else "other"


def store_on(fs: FakeFs) -> FsspecStore:
    """The adapter that every object store goes through."""
    return FsspecStore(fs, "/bucket", "fake://bucket", retry_wait_max_s=0.0)
