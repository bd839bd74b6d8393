"""Pins of a run that begins: the snapshot that it begins with is kept until it has one of its own.

They carry the job's uid, so that a start that is repeated, and the end of a claim, find what killed attempts have left;
and they end by themselves after an hour without renewal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from state_runtime.base.clock import Clock
from state_runtime.base.errors import CorruptData, Unavailable, UnsupportedFormat
from state_runtime.base.ids import Ids
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.snapshot.pins import SnapshotPin, pin_snapshot, read_pins, renew_pin, unpin
from state_runtime.store import Store

__all__ = ["pinned", "start_pins"]

_LOG = logging.getLogger(__name__)

_LASTS_MS = 60 * 60_000
_RENEWED_MS = 10 * 60_000


@contextmanager
def pinned(
    root: Store, snapshot_id: int, info: JobInfo, place: str, clock: Clock, ids: Ids, *, required: bool = True
) -> Iterator[Callable[[], None]]:
    """Keep a snapshot for the start of a job. What is yielded is called now and then, from one thread, and renews the
    pin.

    Args:
        info, place: of the job that starts.
        required: whether a root that cannot be written is an error; else there is no pin then.

    Raises:
        SnapshotExpired: the snapshot was given up. StoreUnavailable, OutcomeUnknown: only if it is required.
    """
    pin: SnapshotPin | None = None
    try:
        holder = f"the start of job {info.name!r} ({place})"
        pin = pin_snapshot(
            root, snapshot_id, reason="start", holder=holder, note=info.uid, clock=clock, ids=ids, lasts_ms=_LASTS_MS
        )
    except Unavailable as error:
        if required:
            raise
        # Read-only, most likely. The copy checks each file, so a snapshot that is given up meanwhile is found out.
        _LOG.info("snapshot %d in %s is copied without a pin: %s", snapshot_id, root.url, error)
    renewed_ms = clock.now_ms()

    def beat() -> None:
        nonlocal pin, renewed_ms
        now_ms = clock.now_ms()
        if pin is None or now_ms - renewed_ms <= _RENEWED_MS:
            return
        renewed_ms = now_ms
        try:
            pin = renew_pin(root, pin, lasts_ms=_LASTS_MS, clock=clock)
        except Unavailable as error:
            _LOG.warning("the pin %s in %s could not be renewed; trying again later: %s", pin.path, root.url, error)

    try:
        yield beat
    except Exception:
        if pin is not None:
            _take_off(root, pin, "")
        raise
    if pin is not None:
        _take_off(root, pin, info.uid)


def start_pins(root: Store, job_uid: str) -> list[SnapshotPin]:
    """The pins that starts of a job have placed in a root.

    Raises:
        CorruptManifest, UnsupportedFormat, StoreUnavailable: see `read_pins`.
    """
    return [pin for pin in read_pins(root) if pin.reason == "start" and pin.note == job_uid]


def _take_off(root: Store, pin: SnapshotPin, job_uid: str) -> None:
    """Take a pin off, and (once the job needs nothing of the root) those of its attempts that were killed. They end by
    themselves else."""
    try:
        unpin(root, pin)
        for left in start_pins(root, job_uid) if job_uid else ():
            unpin(root, left)
    except (Unavailable, CorruptData, UnsupportedFormat) as error:
        _LOG.warning("pins of a start in %s could not be taken off, and end by themselves: %s", root.url, error)
