"""Uploads that do not wait for one slow request: hedged attempts, first success wins, bytes in flight bounded.

One request in a thousand to an object store takes seconds, and a checkpoint waits for all of its own; so an attempt
that has taken longer than its timeout is not given up, it gets a rival (Dean and Barroso, "The Tail at Scale", hedged
requests; Flink's RetryingExecutor, FLIP-158). The rules:

- Every attempt writes an object of a name of its own. The first to succeed is the upload; its name is what the
changelog names.
- An attempt that fails in a way that may pass starts the next one at once; one that the store refused fails the upload
at once.
- An attempt that ends after the upload was decided deletes its own object. What a crash leaves is garbage that nothing
names.
- `attempts_max × timeout` starts them all; the upload as a whole fails at its deadline, which is never shorter than
that.
- The bytes of all uploads of a process are bounded, hanging attempts included: whoever would exceed the bound waits,
  the time is counted, and after the deadline the wait ends with an error that says so.

The logic only reacts to events (an attempt ended, a timer rang); what runs them is an `Attempts`: threads here, virtual
time in the tests, which so replay every schedule from its seed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from state_runtime.base.clock import Clock
from state_runtime.base.errors import StillstateError, StoreRefused, StoreUnavailable
from state_runtime.base.settings import UploadSettings
from state_runtime.changelog.changes import UploadTotals
from state_runtime.store import Body, Store

__all__ = ["Attempts", "ThreadedAttempts", "Upload", "Uploader"]

_LOG = logging.getLogger(__name__)


class Attempts(Protocol):
    """Runs attempts and timers, and lets a caller wait for what they bring about."""

    @property
    def lock(self) -> threading.Condition:
        """Guards all state of an uploader; notified when something changed."""
        ...

    def start(self, call: Callable[[], None]) -> None:
        """Run `call` elsewhere, soon."""
        ...

    def after(self, delay_s: float, call: Callable[[], None]) -> Callable[[], None]:
        """Run `call` elsewhere once `delay_s` has gone by. Returns what cancels it."""
        ...

    def wait(self, until: Callable[[], bool], timeout_s: float) -> bool:
        """Wait, with the lock held, until `until()`; False if the time is up before."""
        ...


class ThreadedAttempts:
    """Each attempt and each timer has a thread. They are daemons: a request that hangs must not keep a process
    alive."""

    def __init__(self) -> None:
        self.lock = threading.Condition()

    def start(self, call: Callable[[], None]) -> None:
        threading.Thread(target=call, name="stillstate-upload", daemon=True).start()

    def after(self, delay_s: float, call: Callable[[], None]) -> Callable[[], None]:
        timer = threading.Timer(delay_s, call)
        timer.daemon = True
        timer.start()
        return timer.cancel

    def wait(self, until: Callable[[], bool], timeout_s: float) -> bool:
        return self.lock.wait_for(until, timeout_s)


class Uploader:
    """All uploads of a process: one bound on their bytes. Thread-safe."""

    def __init__(self, policy: UploadSettings, clock: Clock, attempts: Attempts | None = None) -> None:
        self.policy = policy
        self._clock = clock
        self.run: Attempts = attempts or ThreadedAttempts()
        self._in_flight = 0
        self._totals = UploadTotals()
        self._untaken = UploadTotals()

    def take(self) -> UploadTotals:
        """What uploads cost since this was last asked."""
        with self.run.lock:
            taken, self._untaken = self._untaken, UploadTotals()
            return taken

    @property
    def totals(self) -> UploadTotals:
        """Of all uploads since the process began; attempts that are still late are not counted as left behind yet."""
        with self.run.lock:
            return self._totals

    def begin(self, root: Store, name: Callable[[], str], body: Body) -> Upload:
        """Begin an upload, once there is room for it.

        Args:
            root: where to.
            name: draws the path of one attempt, unique to it.

        Raises:
            StoreUnavailable: no room within the deadline: earlier uploads hang.
        """
        size = len(body)
        begun_s = self._clock.monotonic_s()

        def room() -> bool:
            return self._in_flight == 0 or self._in_flight + size <= self.policy.in_flight_bytes_max

        with self.run.lock:
            if not room() and not self.run.wait(room, self.policy.upload_s(size)):
                raise StoreUnavailable(
                    f"no room for an upload of {size:,} bytes to {root.url}: uploads of {self._in_flight:,} bytes do "
                    "not end. Check the network; raise upload.in_flight_bytes_max if the store is only slow"
                )
            self._in_flight += size
            wait_ms = (self._clock.monotonic_s() - begun_s) * 1000
            self.add(UploadTotals(uploads=1, bytes=size, wait_ms=wait_ms))
        upload = Upload(self, root, name, body, wait_ms)
        upload.start()
        return upload

    def add(self, more: UploadTotals) -> None:
        """Count; with the lock held."""
        self._totals += more
        self._untaken += more

    def leave(self, size: int) -> None:
        """The last attempt of an upload has ended; with the lock held."""
        self._in_flight -= size
        self.run.lock.notify_all()


class Upload:
    """One object on its way. Life cycle: started → decided (a name, or an error) → all attempts ended."""

    def __init__(self, uploader: Uploader, root: Store, name: Callable[[], str], body: Body, wait_ms: float) -> None:
        self._uploader = uploader
        self._root = root
        self._name = name
        self._body = body
        self._wait_ms = wait_ms
        self._started = 0
        self._running = 0
        self._winner = ""
        self._failure: BaseException | None = None
        self._last_error: Exception | None = None
        self._cancel_timer: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Begin the first attempt; called by the uploader once."""
        with self._uploader.run.lock:
            self._next_attempt()

    def result(self) -> str:
        """Wait for the upload, and give the path of the object.

        Raises:
            StoreRefused: the store will not take it. StoreUnavailable: no attempt succeeded in time.
        """
        # The deadline is a timer's; the longer wait here only ends one whose timer never rings.
        limit_s = 2 * self._uploader.policy.upload_s(len(self._body)) + 1.0
        with self._uploader.run.lock:
            self._uploader.run.wait(lambda: self._decided, limit_s)
            if not self._decided:
                self._decide(failure=self._timed_out())
            if self._failure is not None:
                raise self._failure
            return self._winner

    def abandon(self) -> None:
        """Nobody needs the object any more: it is deleted, now or when it arrives."""
        with self._uploader.run.lock:
            winner, self._winner = self._winner, ""
            self._decide(failure=StoreUnavailable(f"an upload to {self._root.url} was abandoned by its caller"))
        if winner:
            self._uploader.run.start(lambda: self._delete(winner))

    @property
    def totals(self) -> UploadTotals:
        """What this upload cost so far."""
        with self._uploader.run.lock:
            return UploadTotals(1, self._started, len(self._body), self._wait_ms)

    # --- events; all with the lock held, but for what reaches for the store ---

    @property
    def _decided(self) -> bool:
        return bool(self._winner) or self._failure is not None

    def _decide(self, *, winner: str = "", failure: BaseException | None = None) -> None:
        self._winner, self._failure = winner, failure
        self._cancel_timer()
        self._uploader.run.lock.notify_all()

    def _next_attempt(self) -> None:
        policy, size = self._uploader.policy, len(self._body)
        self._cancel_timer()
        self._started += 1
        self._running += 1
        self._uploader.add(UploadTotals(attempts=1))
        path = self._name()
        self._uploader.run.start(lambda: self._attempt(path))
        if self._started < policy.attempts_max:
            self._cancel_timer = self._uploader.run.after(policy.attempt_s(size), self._overdue)
        else:
            left_s = policy.upload_s(size) - (self._started - 1) * policy.attempt_s(size)
            self._cancel_timer = self._uploader.run.after(left_s, self._expired)

    def _overdue(self) -> None:
        with self._uploader.run.lock:
            if not self._decided:
                self._next_attempt()

    def _expired(self) -> None:
        with self._uploader.run.lock:
            if not self._decided:
                self._decide(failure=self._timed_out())

    def _attempt(self, path: str) -> None:
        """One attempt, on a thread of its own."""
        error: BaseException | None = None
        try:
            self._root.put(path, self._body)
        except BaseException as raised:
            error = raised  # decided upon below; nothing above this frame could handle it
        with self._uploader.run.lock:
            late = self._decided
            if not late and error is None:
                self._decide(winner=path)
            elif not late and error is not None:
                self._failed(error)
            self._running -= 1
            if self._running == 0:
                self._uploader.leave(len(self._body))
        if (late and error is None) or isinstance(error, StoreUnavailable):
            # A failed one may have landed nevertheless. Nobody knows its name but this attempt.
            self._delete(path)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, StoreRefused) or not isinstance(error, StoreUnavailable):
            self._decide(failure=error)
            return
        self._last_error = error
        if self._started < self._uploader.policy.attempts_max:
            self._next_attempt()
        elif self._running == 1:  # this one: no other can succeed any more
            self._decide(failure=error)

    def _timed_out(self) -> StoreUnavailable:
        why = f"; the last error was: {self._last_error}" if self._last_error is not None else ""
        return StoreUnavailable(
            f"{self._started} attempts to upload {len(self._body):,} bytes to {self._root.url} did not end within "
            f"{self._uploader.policy.upload_s(len(self._body)):.0f} s{why}. Check the network; the epoch is run again"
        )

    def _delete(self, path: str) -> None:
        try:
            self._root.delete(path)
        except (StillstateError, OSError) as error:
            _LOG.debug("%s was left behind in %s: %s", path, self._root.url, error)
            with self._uploader.run.lock:
                self._uploader.add(UploadTotals(left_behind=1))
