"""Garbage collection beside the driver's epochs: once a day it removes, without a person, the remains of failed
savepoints, unadopted folds and killed writers."""

from __future__ import annotations

import logging
import threading

from state_runtime.base.clock import Clock
from state_runtime.base.errors import Fenced
from state_runtime.base.ids import Ids
from state_runtime.base.settings import JobSettings
from state_runtime.maintenance.gc.collect import apply_gc, plan_gc
from state_runtime.snapshot.ownership import Proof
from state_runtime.store import Store

__all__ = ["BackgroundCollection"]

_LOG = logging.getLogger(__name__)

FIRST_AFTER_S = 600.0
"""The delay of a run's first collection: a run that is shorter, or restarts often, does not list its root each time."""
EVERY_S = 86_400.0
AGAIN_AFTER_S = 3_600.0  # after a collection that failed
_THREADS = 4  # the epochs' uploads come first


class BackgroundCollection:
    """Collects only proven garbage: both passes of `stillstate gc`, with its age floor of a day.

    Life cycle: idle → collecting (a thread) → idle. `committed` returns at once and never raises. A collection that
        fails is logged and tried again an hour later. It may sleep at any point, and the root may be another's when it
        wakes: every few deletions it makes the same proof as retention.

    Args:
        proof: of the run.
        owner: of the run, `host:pid`.

    Attributes:
        collected: number of removed objects and expired savepoints.
        failures_in_a_row: collections that failed since the last that succeeded.
    """

    def __init__(self, root: Store, settings: JobSettings, ids: Ids, clock: Clock, proof: Proof, owner: str) -> None:
        self._root = root
        self._settings = settings
        self._ids = ids
        self._clock = clock
        self._proof = proof
        self._owner = owner
        self._thread: threading.Thread | None = None
        self._next_s = clock.monotonic_s() + FIRST_AFTER_S
        self._is_off = not settings.retention.retained_checkpoints
        self.collected = 0
        self.failures_in_a_row = 0

    def committed(self) -> None:
        """Note a checkpoint that is durable and whose output is published; begin a collection if one is due."""
        thread = self._thread
        if self._is_off or self._clock.monotonic_s() < self._next_s or (thread is not None and thread.is_alive()):
            return
        thread = threading.Thread(target=self._run, name="stillstate-collection", daemon=True)
        self._next_s = self._clock.monotonic_s() + EVERY_S
        try:
            thread.start()
        except RuntimeError:
            # No more threads on this machine.
            _LOG.exception("garbage in %s could not be looked for", self._root.url)
            self._next_s = self._clock.monotonic_s() + AGAIN_AFTER_S
            return
        self._thread = thread

    def join(self, timeout_s: float) -> None:
        """Wait for a collection under way; any later collection finishes an interrupted one."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._collect()
            self.failures_in_a_row = 0
        except Fenced as error:
            _LOG.warning("garbage is not collected any more: %s", error)
            self._is_off = True
        except Exception:
            # The job must go on after any error here.
            _LOG.exception("garbage in %s could not be collected", self._root.url)
            self.failures_in_a_row += 1
            self._next_s = self._clock.monotonic_s() + AGAIN_AFTER_S

    def _collect(self) -> None:
        root, clock = self._root, self._clock
        plan = plan_gc(root, clock=clock, failed_ttl_s=self._settings.retention.failed_ttl_s)
        if plan.is_empty:
            return
        result = apply_gc(
            root, plan, clock=clock, ids=self._ids, owner=self._owner, proof=self._proof, threads=_THREADS
        )
        self.collected += result.total + len(result.savepoints)
        _LOG.info(
            "collected %d objects with %d bytes and %d savepoints that had failed, in %s",
            result.total,
            result.bytes,
            len(result.savepoints),
            root.url,
        )
        for failure in result.failures[:1]:
            _LOG.warning("%d objects could not be deleted, first %s", len(result.failures), failure.path)
