"""A pin that is renewed while work goes on: placed, renewed in time, given back at the end.

    (placed) ──beat──▶ renewed ──beat──▶ …  ──▶ given back
        │                 │
        │                 └─ the store does not answer: tried again at the next beat, as long as the pin lasts
        └─ without a pin, if the caller accepts that

A pin lasts for `LASTS_MS` and is renewed when `RENEWED_AFTER_MS` have passed: before it runs out, five renewals may
fail, or the work may pause for that time. The pin of a killed process stays, and expires later.

A pin that ran out (the process slept, or all renewals failed) has kept nothing meanwhile, and is not revived. It is
left to garbage collection, and a new one is placed. If the snapshot has expired, that raises `SnapshotExpired`. If it
has not, all its objects are still there: an expired snapshot never comes back once its data may be removed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from state_runtime.base.actor import Actor
from state_runtime.base.errors import CorruptData, Unavailable, UnsupportedFormat
from state_runtime.snapshot.pins import PinReason, SnapshotPin, pin_snapshot, read_pins, renew_pin, unpin
from state_runtime.store import Store

__all__ = ["LASTS_MS", "RENEWED_AFTER_MS", "KeptPin", "kept_pin"]

_LOG = logging.getLogger(__name__)

LASTS_MS = 60 * 60_000
"""Longer than any single step between two beats (the copy of one large object)."""
RENEWED_AFTER_MS = 10 * 60_000


@contextmanager
def kept_pin(
    root: Store,
    snapshot_id: int,
    *,
    reason: PinReason,
    holder: str,
    note: str = "",
    actor: Actor,
    do_without: tuple[type[Unavailable], ...] = (),
) -> Iterator[KeptPin]:
    """Keep a snapshot from expiring while the block runs. The block calls `beat` of the yielded pin regularly.

    At the end the pin is given back. After a successful block the pins of earlier attempts, which have the same reason
    and note, are removed too. If the store refuses that, it is logged; the pins expire later.

    Args:
        note: names the work, the same in each of its attempts; empty if attempts do not know of each other.
        do_without: errors of the store after which the block runs without a pin: for a read-only source. The caller
            must then detect itself that the snapshot expired.

    Raises:
        SnapshotExpired: the snapshot expired.
        StoreUnavailable, OutcomeUnknown: the pin could not be placed, and the caller needs one.
    """
    kept = KeptPin(root, snapshot_id, reason=reason, holder=holder, note=note, actor=actor)
    try:
        kept.place()
    except do_without as error:
        # This message explains later why a snapshot expired during a copy.
        _LOG.info("snapshot %d in %s is read without a pin: %s", snapshot_id, root.url, error)
    try:
        yield kept
    except BaseException:
        kept.give_back()
        raise
    kept.give_back(with_attempts_before=bool(note))


class KeptPin:
    """One pin of one worker. From one thread.

    Life cycle: made → `place` → `beat`* → `give_back`. If `place` failed, the rest does nothing.
    """

    def __init__(
        self, root: Store, snapshot_id: int, *, reason: PinReason, holder: str, note: str, actor: Actor
    ) -> None:
        self._root = root
        self._snapshot_id = snapshot_id
        self._reason: PinReason = reason
        self._holder = holder
        self._note = note
        self._actor = actor
        self._pin: SnapshotPin | None = None
        self._tried_ms = 0

    @property
    def is_pinned(self) -> bool:
        """Whether the store has the pin; False if the caller works without one."""
        return self._pin is not None

    def place(self) -> None:
        """Pin the snapshot.

        Raises:
            SnapshotExpired, StoreUnavailable, OutcomeUnknown: see `pin_snapshot`.
        """
        self._pin = pin_snapshot(
            self._root,
            self._snapshot_id,
            reason=self._reason,
            holder=self._holder,
            note=self._note,
            clock=self._actor.clock,
            ids=self._actor.ids,
            lasts_ms=LASTS_MS,
        )
        self._tried_ms = self._pin.created_at_ms

    def beat(self) -> None:
        """Renew the pin if it is time to.

        Raises:
            SnapshotExpired: the pin ran out, and the snapshot expired.
            StoreUnavailable, OutcomeUnknown: the pin ran out, and the store does not answer: nothing keeps the
                snapshot.
        """
        pin, now_ms = self._pin, self._actor.clock.now_ms()
        if pin is None:
            return
        if pin.is_void(now_ms):
            # Under another name: the old file is garbage, and a collector may be removing it now.
            self.place()
        elif now_ms - self._tried_ms > RENEWED_AFTER_MS:
            self._tried_ms = now_ms
            try:
                self._pin = renew_pin(self._root, pin, lasts_ms=LASTS_MS, clock=self._actor.clock)
            except Unavailable as error:
                _LOG.warning(
                    "the pin %s in %s could not be renewed and is tried again: %s", pin.path, self._root.url, error
                )

    def give_back(self, *, with_attempts_before: bool = False) -> None:
        """Remove the pin, and those of earlier attempts if requested. A store's refusal is logged."""
        pin, self._pin = self._pin, None
        if pin is None:
            return
        try:
            unpin(self._root, pin)
            for left in read_pins(self._root) if with_attempts_before else ():
                if (left.reason, left.note) == (self._reason, self._note):
                    unpin(self._root, left)
        except (Unavailable, CorruptData, UnsupportedFormat) as error:
            _LOG.warning(
                "pins (%s) in %s could not be taken off and end by themselves: %s", self._reason, self._root.url, error
            )
