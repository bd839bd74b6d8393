"""Pins: who needs a snapshot, and for how long. As long as one lives, the snapshot is not given up.

    pins/<20-digit snapshot id>-<uid>.json

A pin is placed by creating its file and then looking at the boundary: if the snapshot was given up meanwhile, the pin
is taken back and the caller told. A collector writes the boundary and then looks at the pins: if one appeared, it takes
the snapshot back. So one of the two sees the other, whatever the order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from state_runtime.base.clock import Clock
from state_runtime.base.errors import InvalidConfiguration, SnapshotExpired
from state_runtime.base.ids import Ids
from state_runtime.base.limits import SMALL_JSON_BYTES_MAX
from state_runtime.snapshot.document import decode_document, encode_document
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.paths import PINS_DIR, manifest_path, pin_path, pinned_id_of
from state_runtime.store import Created, Store

__all__ = ["PinReason", "SnapshotPin", "pin_snapshot", "read_pins", "renew_pin", "start_pins", "unpin"]

PinReason = Literal["user", "savepoint", "start", "copy", "read", "verify", "convert"]


@dataclass(frozen=True)
class SnapshotPin:
    """Somebody's need of a snapshot.

    Attributes:
        reason: what it is for; only a "user" pin stays until it is taken off.
        holder: for people, e.g. `savepoint 'before-upgrade'` or `host:pid`. No secrets.
        expires_at_ms: it is void from then on, by the collector's clock (which allows for skew); 0 is never.
    """

    snapshot_id: int
    uid: str
    reason: PinReason
    holder: str
    note: str
    created_at_ms: int
    expires_at_ms: int = 0

    @property
    def path(self) -> str:
        return pin_path(self.snapshot_id, self.uid)

    def is_void(self, now_ms: int) -> bool:
        """Whether nobody needs it any more."""
        return 0 < self.expires_at_ms <= now_ms


def pin_snapshot(
    root: Store,
    snapshot_id: int,
    *,
    reason: PinReason,
    holder: str,
    clock: Clock,
    ids: Ids,
    note: str = "",
    lasts_ms: int = 0,
) -> SnapshotPin:
    """Keep a snapshot from being given up.

    Args:
        lasts_ms: how long; 0 is until `unpin`. Whoever works longer keeps it (snapshot/kept_pin.py).

    Raises:
        SnapshotExpired: it was given up; there is no pin.
        StoreUnavailable, OutcomeUnknown: there may be one.
    """
    now_ms = clock.now_ms()
    expires_at_ms = now_ms + lasts_ms if lasts_ms else 0
    pin = SnapshotPin(
        snapshot_id=snapshot_id,
        uid=ids.uid(),
        reason=reason,
        holder=holder,
        note=note,
        created_at_ms=now_ms,
        expires_at_ms=expires_at_ms,
    )
    if root.create(pin.path, encode_document("pin", pin)) is not Created.MINE:
        raise InvalidConfiguration(f"{root.url}/{pin.path} exists already; try again")
    _check_kept(root, pin)
    return pin


def renew_pin(root: Store, pin: SnapshotPin, *, lasts_ms: int, clock: Clock) -> SnapshotPin:
    """Hold on for longer; the pin's owner only.

    Raises:
        SnapshotExpired: the pin had run out, and the snapshot was given up; there is no pin any more.
        StoreUnavailable: it may last for longer.
    """
    pin = replace(pin, expires_at_ms=clock.now_ms() + lasts_ms)
    root.put(pin.path, encode_document("pin", pin))
    _check_kept(root, pin)
    return pin


def _check_kept(root: Store, pin: SnapshotPin) -> None:
    # After the file is there: whoever gives the snapshot up looks at the pins after it has said so. Where a whole root
    # was removed, the boundary went last, and no longer says so.
    if not read_boundary(root).keeps(pin.snapshot_id) or not root.exists(manifest_path(pin.snapshot_id)):
        unpin(root, pin)
        raise SnapshotExpired(
            f"snapshot {pin.snapshot_id} in {root.url} expired just before it was used; choose a newer one"
        )


def unpin(root: Store, pin: SnapshotPin) -> None:
    """Take a pin off; one that is gone is fine."""
    root.delete(pin.path)


def read_pins(root: Store) -> list[SnapshotPin]:
    """All pins, void ones too, by snapshot.

    Raises:
        CorruptManifest, UnsupportedFormat: somebody's need cannot be read; nothing may be deleted.
    """
    pins = []
    for name in root.list_names(PINS_DIR):
        if pinned_id_of(name) is None:
            continue
        path = f"{PINS_DIR}/{name}"
        try:
            data = root.read(path, SMALL_JSON_BYTES_MAX)
        except FileNotFoundError:
            continue  # taken off meanwhile
        pins.append(decode_document("pin", SnapshotPin, data, f"{root.url}/{path}"))
    return sorted(pins, key=lambda p: (p.snapshot_id, p.created_at_ms, p.uid))


def start_pins(root: Store, job_uid: str) -> list[SnapshotPin]:
    """The pins that starts of a job have placed in a root, also those of starts that were killed.

    Raises:
        CorruptManifest, UnsupportedFormat, StoreUnavailable: see `read_pins`.
    """
    return [pin for pin in read_pins(root) if pin.reason == "start" and pin.note == job_uid]
