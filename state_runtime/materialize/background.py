"""Materialization beside the driver's epochs: decides when to fold, and adopts records, its own and those of others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from state_runtime.base.clock import Clock
from state_runtime.base.errors import CorruptData, UnsupportedFormat
from state_runtime.base.ids import Ids
from state_runtime.base.limits import MIB
from state_runtime.base.settings import JobSettings
from state_runtime.materialize.plan import due
from state_runtime.materialize.priority import give_way
from state_runtime.materialize.records import (
    PIN_LIVE_MS,
    Pin,
    Record,
    apply,
    fits,
    holds,
    is_too_old,
    open_pins,
    read_pin,
    read_record,
    record_ids,
)
from state_runtime.materialize.run import materialize
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import materialization_path
from state_runtime.store import Store

__all__ = ["BackgroundMaterializer", "adoptable", "other_at_work"]

_LOG = logging.getLogger(__name__)

_URGENT = ("manifest", "segments")
"""Reasons to fold that cannot wait: manifests and restarts would grow beyond their limits."""
_POLL_S = 5.0  # how often the store is asked for records of others
_BACK_OFF_S = (1.0, 300.0)  # after the first failure, and at most; doubled in between
_FAILURES_ELSEWHERE_MAX = 2
_LOOKED_AT_MAX = 64  # newest records that are considered; older ones cannot fit any more
_EMERGENCY_BYTES = 4 * MIB  # approximate size of a manifest from which the driver folds even if another process should
_SEGMENT_BYTES = 260


class BackgroundMaterializer:
    """Looks for records to adopt and folds when it is time, one task at a time, in a separate thread.

    Life cycle: idle → working (a thread) → done (a record waits for the next commit) → idle. The driver calls `look`
    once, `start_if_due` after a commit, `take` before one and `settled` after it. All but `look` return at once, and
    they never raise. Failures are logged and counted, and tried again after a pause that doubles.

    Args:
        prove: raises if the root is not the run's any more (snapshot/ownership.py); called before each write.
        fold: folds a snapshot elsewhere; None folds in the thread itself, as do retries after two failures in a row.

    Attributes:
        failures_in_a_row: folds that failed since the last that succeeded; an alarm is due at 3.
        completed: number of records that were adopted.
    """

    def __init__(
        self,
        root: Store,
        settings: JobSettings,
        ids: Ids,
        clock: Clock,
        fold: Callable[[Manifest], Record] | None = None,
        prove: Callable[[], None] | None = None,
    ) -> None:
        self._prove = prove
        self._fold = fold or self._fold_here
        self._root = root
        self._settings = settings
        self._ids = ids
        self._clock = clock
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._result: Record | None = None
        self._refused: set[int] = set()
        self._polled_s: float | None = None
        self._retry_s = 0.0
        self._folded_s = clock.monotonic_s()
        self._due_since_s: float | None = None
        self._took_over = False
        self.failures_in_a_row = 0
        self.completed = 0

    def look(self, manifest: Manifest) -> None:
        """Look for a record now, in the caller's thread: at a run's start, so that its first checkpoint adopts a
        waiting record."""
        self._polled_s = self._clock.monotonic_s()
        try:
            record = adoptable(self._root, manifest, self._clock, refused=self._refused)
        except Exception:
            # The next look finds it; the run must start after any error here.
            _LOG.exception("could not look for materializations of snapshot %d", manifest.snapshot_id)
            return
        with self._lock:
            if self._thread is None and self._result is None:
                self._result = record

    def start_if_due(self, manifest: Manifest, *, can_wait: bool = False) -> None:
        """Begin to look for records, and to fold `manifest`, if it is time for either and no thread runs.

        Args:
            can_wait: the job has more urgent work: fold only if the number of segments requires it.
        """
        with self._lock:
            if self._thread is not None or self._result is not None:
                return
            now_s = self._clock.monotonic_s()
            why = self._why(manifest, now_s) if now_s >= self._retry_s else None
            why = None if can_wait and why not in _URGENT else why
            polls = self._polled_s is None or now_s - self._polled_s >= _POLL_S
            if why is None and not polls:
                return
            thread = threading.Thread(
                target=self._run, args=(manifest, why), name="stillstate-materializer", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                # No more threads on this machine; the next commit tries again.
                _LOG.exception("materialization of snapshot %d could not start", manifest.snapshot_id)
                self._failed()
                return
            self._thread = thread

    def take(self, draft: Manifest) -> Manifest:
        """Return `draft` with the waiting record's tables, if there is a record and it still fits.

        The caller must call `settled` once it knows whether the manifest was committed.
        """
        with self._lock:
            if self._result is None:
                return draft
            # A record may wait for days without input; the files of one that is too old may be collected by now.
            if not fits(draft, self._result) or is_too_old(self._result, self._clock.now_ms()):
                _LOG.info("materialization %d does not fit any more, or is too old", self._result.record_id)
                self._refused.add(self._result.record_id)
                self._result = None
                return draft
            return apply(draft, self._result)

    def record_of(self, draft: Manifest) -> str:
        """Return the path of the record whose tables a draft names and no manifest names yet; empty without one.

        The record was written after the tables: if it exists, they do.
        """
        with self._lock:
            if self._result is None or not holds(draft, self._result):
                return ""
            return materialization_path(self._result.record_id)

    def settled(self, committed: Manifest) -> None:
        """Forget a record that a committed manifest holds."""
        with self._lock:
            if self._result is not None and holds(committed, self._result):
                self._refused.add(self._result.record_id)
                self._result = None
                self.completed += 1

    def join(self, timeout_s: float) -> None:
        """Wait up to the timeout for a running fold; its files are garbage if no driver adopts them."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _why(self, manifest: Manifest, now_s: float) -> str | None:
        why = due(
            manifest,
            self._settings,
            since_s=now_s - self._folded_s,
            replay_bytes_per_s=_replay_rate(manifest),
        )
        if self._settings.materialization.by == "driver" or (why is not None and self._others_are_away(why, now_s)):
            return why
        if why is None:
            self._due_since_s = None
        # Another process should materialize. If none does, the manifest would exceed its limit and the job would end.
        return "manifest" if len(manifest.segments) * _SEGMENT_BYTES >= _EMERGENCY_BYTES else None

    def _others_are_away(self, why: str, now_s: float) -> bool:
        """Whether the other process is late: it has not materialized for
        `materialization.driver_takes_over_after_s` since a fold was due.

        From then on the driver folds as soon as a fold is due, until it finds a record to adopt.
        """
        takeover_s = self._settings.materialization.driver_takes_over_after_s
        if not takeover_s:
            return False
        if self._due_since_s is None:
            self._due_since_s = now_s
        if not self._took_over and now_s - self._due_since_s >= takeover_s:
            self._took_over = True
            _LOG.warning(
                "a materialization has been due for %.0f s (%s), and the process that should make it has not: this "
                "driver materializes until the other one does again. With `by: dagster`, look at Dagster's daemon, the "
                "materialization sensor and the queue",
                now_s - self._due_since_s,
                why,
            )
        return self._took_over

    def _run(self, manifest: Manifest, why: str | None) -> None:
        give_way()
        try:
            self._polled_s = self._clock.monotonic_s()
            record = adoptable(self._root, manifest, self._clock, refused=self._refused)
            if record is not None:
                self._took_over = False
            if record is None and why is not None and other_at_work(self._root, self._clock) is None:
                # If no process can be started, or none lives long enough, the log must still be folded.
                fold = self._fold if self.failures_in_a_row < _FAILURES_ELSEWHERE_MAX else self._fold_here
                record = fold(manifest)
                _LOG.info("materialization %d of snapshot %d (%s)", record.record_id, record.snapshot_id, why)
        except Exception:
            # The job must go on after any error here; the log stays and is folded later.
            _LOG.exception("materialization of snapshot %d failed", manifest.snapshot_id)
            with self._lock:
                self._failed()
                self._thread = None
            return
        with self._lock:
            if record is not None:
                self.failures_in_a_row = 0
                self._retry_s = 0.0
                self._folded_s = self._clock.monotonic_s()
                self._due_since_s = None
            self._result, self._thread = record, None

    def _fold_here(self, manifest: Manifest) -> Record:
        return materialize(
            self._root, manifest, settings=self._settings, clock=self._clock, ids=self._ids, prove=self._prove
        )

    def _failed(self) -> None:
        self.failures_in_a_row += 1
        first, most = _BACK_OFF_S
        pause = min(first * 2 ** min(self.failures_in_a_row - 1, 30), most)
        self._retry_s = self._clock.monotonic_s() + pause


def adoptable(root: Store, manifest: Manifest, clock: Clock, *, refused: set[int]) -> Record | None:
    """Return the newest record that fits a manifest and whose files all exist.

    Args:
        refused: ids to skip; ids that are found unfit are added. (A record that does not fit a manifest does not fit
            its successors either.)

    Raises:
        StoreUnavailable: nothing is known then.
    """
    now_ms = clock.now_ms()
    for record_id in sorted(set(record_ids(root)[0]) - refused, reverse=True)[:_LOOKED_AT_MAX]:
        try:
            record = read_record(root, record_id)
        except (CorruptData, UnsupportedFormat, FileNotFoundError) as error:
            _LOG.warning("materialization %d cannot be read and is passed over: %s", record_id, error)
            refused.add(record_id)
            continue
        if record.snapshot_id > manifest.snapshot_id:
            continue  # it folds a snapshot that was committed meanwhile
        files = [(f.path, f.bytes) for f in (*record.base, *record.deltas)]
        files += [(f.path, f.bytes) for f in record.source_logs]
        if (
            fits(manifest, record)
            and not is_too_old(record, now_ms)
            and all(_is_there(root, path, size) for path, size in files)
        ):
            return record
        refused.add(record_id)
    return None


def other_at_work(root: Store, clock: Clock) -> Pin | None:
    """Return a live materialization of the job: a second one would fold the same in vain. A damaged pin has no owner.

    Raises:
        StoreUnavailable: nothing is known then.
    """
    now_ms = clock.now_ms()
    for record_id in reversed(open_pins(root)):
        try:
            pin = read_pin(root, record_id)
        except (CorruptData, UnsupportedFormat) as error:
            _LOG.warning("the pin of materialization %d cannot be read and is passed over: %s", record_id, error)
            continue
        if pin is not None and pin.state == "running" and now_ms - pin.heartbeat_ms < PIN_LIVE_MS:
            return pin
    return None


def _is_there(root: Store, path: str, size: int) -> bool:
    try:
        return root.size(path) == size
    except FileNotFoundError:
        return False


def _replay_rate(manifest: Manifest) -> float:
    """Return the speed, in bytes a second, of the newest recorded restore; 0 without one."""
    for progress in (manifest.progress, manifest.previous):
        if progress is not None and progress.restore_ms > 0 and progress.restored_bytes > 0:
            return progress.restored_bytes / progress.restore_ms * 1000
    return 0.0
