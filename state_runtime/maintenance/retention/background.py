"""Retention beside the driver's epochs: old checkpoints are given up in a thread of its own, a few dozen at a time."""

from __future__ import annotations

import logging
import threading

from state_runtime.base import faults
from state_runtime.base.clock import Clock
from state_runtime.base.errors import CorruptData, Fenced, InvalidConfiguration, MissingSnapshot
from state_runtime.base.ids import Ids
from state_runtime.base.settings import JobSettings, RetentionPolicy
from state_runtime.maintenance.delete.snapshots import delete_objects, give_up, remove_given_up, settle
from state_runtime.maintenance.marks import CLOCK_SKEW_MS, Existing, Marker, read_existing, read_holders
from state_runtime.maintenance.retention.policy import DELETED_SHARE_MAX, Item, check_share, plan_retention
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.ownership import Proof
from state_runtime.snapshot.paths import BOUNDARY_DIR, boundary_path, sequence_of
from state_runtime.store import Store

__all__ = ["BackgroundRetention", "checkpoints_in_a_round", "policy_of_driver"]

_LOG = logging.getLogger(__name__)

_ROUND_MIN = 16
_BOUNDARIES_KEPT = 8
_BACK_OFF_S = (5.0, 300.0)  # after the first failure, and at most; doubled in between
_THREADS = 4  # the epochs' uploads come first


def checkpoints_in_a_round(settings: JobSettings) -> int:
    """After how many checkpoints old ones are looked for: so many more than the policy keeps there are at most."""
    return max(_ROUND_MIN, settings.retention.retained_checkpoints // 4)


def policy_of_driver(settings: JobSettings) -> RetentionPolicy:
    """The job's rules; where they do not say how many newest are kept, `retained_checkpoints`."""
    kept = settings.retention
    return RetentionPolicy.of(kept).model_copy(update={"keep_last": kept.keep_last or kept.retained_checkpoints})


class BackgroundRetention:
    """Gives up checkpoints that no rule keeps and nobody needs, and removes what only they needed.

    Life cycle: idle → working (a thread) → idle. `committed` returns at once and never raises: a checkpoint never waits
    for it. A round that fails is logged and tried again after a pause that doubles; what it left is ended by the next,
    or by `stillstate gc`.

    What snapshots need is kept in mind, so a round reads no manifest of this run again. The requests of a round are in
    docs/design/0017-deletion.md.

    A round may sleep at any point and wake in a root that is another's by now. So each boundary and each few deletions
    follow a proof that the root is still this run's; without it the round ends, and no other begins.

    Args:
        proof: of the run.

    Attributes:
        failures_in_a_row: rounds that failed since the last that succeeded.
        given_up: checkpoints that were given up and removed.
    """

    def __init__(self, root: Store, settings: JobSettings, ids: Ids, clock: Clock, proof: Proof) -> None:
        self._root = root
        self._proof = proof
        self._fenced = False
        self._settings = settings
        self._ids = ids
        self._clock = clock
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._new: list[Manifest] = []
        self._marker: Marker | None = None
        self._created: dict[int, int] = {}
        self._round_id = 0
        self._retry_s = 0.0
        self._is_share_told = False
        self.failures_in_a_row = 0
        self.given_up = 0

    def committed(self, manifest: Manifest) -> None:
        """A checkpoint is durable and its output published; begin a round if it is time for one."""
        retained = self._settings.retention.retained_checkpoints
        if not retained or self._fenced:
            return
        with self._lock:
            self._new.append(manifest)
            # Ids count on from 1, so below this there cannot be too many.
            is_due = (
                manifest.snapshot_id > retained
                and manifest.snapshot_id - self._round_id >= checkpoints_in_a_round(self._settings)
                and self._clock.monotonic_s() >= self._retry_s
            )
            if self._thread is not None or not is_due:
                # What is not looked at by then is read from the store.
                del self._new[: -checkpoints_in_a_round(self._settings)]
                return
            self._round_id = manifest.snapshot_id
            new, self._new = self._new, []
            thread = threading.Thread(target=self._run, args=(new,), name="stillstate-retention", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # No more threads on this machine; a later checkpoint tries again.
                _LOG.exception("old checkpoints in %s could not be looked for", self._root.url)
                self._failed()
                return
            self._thread = thread

    def join(self, timeout_s: float) -> None:
        """Wait for a round under way; one that is cut short is ended later."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _run(self, new: list[Manifest]) -> None:
        try:
            self._round(new)
        except Fenced as error:
            _LOG.warning("old checkpoints do not expire any more: %s", error)
            with self._lock:
                self._fenced = True
                self._thread = None
            return
        except Exception:
            # The job must go on, whatever happened here.
            _LOG.exception("old checkpoints in %s could not be expired", self._root.url)
            with self._lock:
                self._failed()
                self._thread = None
            return
        with self._lock:
            self.failures_in_a_row = 0
            self._thread = None

    def _failed(self) -> None:
        self.failures_in_a_row += 1
        first, most = _BACK_OFF_S
        self._retry_s = self._clock.monotonic_s() + min(first * 2 ** min(self.failures_in_a_row - 1, 30), most)
        self._round_id = 0

    def _round(self, new: list[Manifest]) -> None:
        root, clock, ids = self._root, self._clock, self._ids
        marker = self._marker = self._marker or Marker(root, clock, is_proven=True)
        for manifest in new:
            self._know(marker, manifest)
        existing = read_existing(root)
        for snapshot_id in existing.snapshot_ids:
            if snapshot_id not in self._created:
                try:
                    self._know(marker, marker.catalog.manifest(snapshot_id))
                except MissingSnapshot:
                    continue  # on its way
        # Of a round that was cut short, this run's or another's.
        since = existing.boundary.sequence
        settle(root, existing.boundary.going, self._proof, clock=clock, ids=ids, since=since)
        doomed = self._doomed(existing, marker)
        if doomed:
            give_up(root, doomed, existing.snapshot_ids, self._proof, clock=clock, ids=ids, since=since)
            faults.reach("retention-given-up")
        removed = remove_given_up(
            root, {*doomed, *existing.given_up}, self._proof, marker=marker, clock=clock, threads=_THREADS
        )
        if removed.snapshot_ids:
            faults.reach("retention-removed")
        self.given_up += len(removed.snapshot_ids)
        if removed.failures:
            _LOG.warning(
                "%d objects of expired checkpoints could not be deleted, first %s: %s",
                len(removed.failures),
                removed.failures[0].path,
                removed.failures[0].message,
            )
        self._tidy()
        left = set(existing.snapshot_ids) - set(removed.snapshot_ids)
        marker.forget_all_but(left)
        self._created = {i: at for i, at in self._created.items() if i in left}

    def _know(self, marker: Marker, manifest: Manifest) -> None:
        try:
            marker.add(manifest)
        except CorruptData:
            # Another collector may have given it up since; else it is found damaged when marks are made, and the round
            # ends there.
            _LOG.warning("snapshot %d cannot be read", manifest.snapshot_id, exc_info=True)
            return
        self._created[manifest.snapshot_id] = manifest.created_at_ms

    def _doomed(self, existing: Existing, marker: Marker) -> list[int]:
        holders, _ = read_holders(self._root, self._clock, marker.records)
        items = [
            Item(kind="checkpoint", name=str(i), order=i, created_at_ms=self._created[i], held=holders.get(i, ()))
            for i in existing.snapshot_ids
            if i in self._created
        ]
        policy = policy_of_driver(self._settings)
        decisions = plan_retention(items, policy, now_ms=self._clock.now_ms() - CLOCK_SKEW_MS)
        doomed = [int(d.item.name) for d in decisions if not d.kept]
        if policy.goes_by_age and len(doomed) > checkpoints_in_a_round(self._settings):
            try:
                check_share(decisions, DELETED_SHARE_MAX)
            except InvalidConfiguration as error:
                # Once, and not in each round: it may stay so for days.
                _LOG.log(
                    logging.DEBUG if self._is_share_told else logging.ERROR,
                    "old checkpoints in %s stay: %s. Either the clock is wrong, or the job stood still, or the rules "
                    "were changed: `stillstate retain` shows what they delete, and deletes it with --max-share 1. By "
                    "itself the driver does it once newer checkpoints are half of all",
                    self._root.url,
                    error,
                )
                self._is_share_told = True
                return []
        self._is_share_told = False
        return doomed

    def _tidy(self) -> None:
        """Remove old boundaries; the newest counts."""
        sequences = [s for s in map(sequence_of, self._root.list_names(BOUNDARY_DIR)) if s is not None]
        newest = max(sequences, default=0)
        delete_objects(
            self._root,
            [boundary_path(s) for s in sequences if s <= newest - _BOUNDARIES_KEPT],
            prove=self._proof.check,
            threads=_THREADS,
        )
