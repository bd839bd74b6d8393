"""The documents of a materialization in the store: a pin while it works, a record when it is done; and how the driver
adopts a record.

    materializations/<20-digit id>.started.json   the pin: the snapshot that is read, its reader, the last heartbeat
    materializations/<20-digit id>.json           the record: the data that was folded into new tables

The process that claims the next id by creating its pin may work; the record is created once and never changed. Neither
changes a manifest: the driver takes the record into its next one, if the snapshot that it continues from still has
exactly the files that were folded. So no lock is needed between a materialization and a running driver, a restarting
one, or another materialization: of two that folded the same, the first is adopted and the second fits no more.

Garbage collection must keep what `protected` returns. A pin protects the snapshot that is read and every file whose
name holds its writer; a record protects its new files until long after it is too old to be adopted. The pin comes first
and the snapshot is checked after it: a collector that lists pins after it has chosen the objects to delete cannot miss
it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Literal

from state_runtime.base.clock import Clock
from state_runtime.base.errors import CorruptData, CorruptManifest, Unavailable
from state_runtime.base.ids import Ids
from state_runtime.base.limits import CLAIM_ATTEMPTS_MAX, MANIFEST_BYTES_MAX, SMALL_JSON_BYTES_MAX
from state_runtime.snapshot.create_once import Proposal, create_next
from state_runtime.snapshot.document import decode_document, encode_document
from state_runtime.snapshot.manifest import FileEntry, LayerEntry, Manifest, TableEntry
from state_runtime.snapshot.paths import MATERIALIZATIONS_DIR, manifest_path, materialization_path
from state_runtime.store import Store
from state_runtime.store.paths import check_relative_path

__all__ = [
    "ADOPTED_FOR_MS",
    "PIN_LIVE_MS",
    "Pin",
    "Protected",
    "Record",
    "apply",
    "beat",
    "claim",
    "fits",
    "holds",
    "is_too_old",
    "open_pins",
    "protected",
    "read_pin",
    "read_record",
    "record_ids",
    "view_of",
    "write_record",
]

_MINUTE_MS = 60_000
_DAY_MS = 24 * 60 * _MINUTE_MS

PIN_LIVE_MS = _MINUTE_MS
"""A pin without a heartbeat for this time has no living owner; no process waits for it."""
PIN_KEPT_MS = _DAY_MS
"""The objects that such a pin protects are kept for this time: its owner may only be slow."""
ADOPTED_FOR_MS = _DAY_MS
"""A record older than this is not adopted any more."""
RECORD_KEPT_MS = 2 * _DAY_MS
"""A record's files are kept for this time: twice as long as they may be adopted, so that clocks may differ by a day."""


@dataclass(frozen=True, kw_only=True)
class Pin:
    """A materialization under way.

    Attributes:
        record_id: numbers materializations of a job; claimed by creating the pin, never used twice.
        snapshot_id: the snapshot that is read.
        writer: unique; part of the name of each file that it writes.
        heartbeat_ms: time of its last heartbeat.
        state: "failed" if it reported a failure; a finished one has a record.
    """

    record_id: int
    job_uid: str
    snapshot_id: int
    writer: str
    started_at_ms: int
    heartbeat_ms: int
    state: Literal["running", "failed"] = "running"


@dataclass(frozen=True)
class Record:
    """A finished materialization of snapshot `snapshot_id`: its new files, and those that they replace.

    Attributes:
        mode: "major" if any base table was written.
        view: digest of the layers and segments that were folded (`view_of`).
        base, deltas: new tables: of the first layer, and of a new layer above all others.
        removed: paths of the tables that they replace, or that no reader can read any more.
        source_logs, removed_source_logs: the same of the sources' logs of seen files.
        folds_shards: whether the files of shards below all tables were folded in.
        ranges: number of folded cells.
        log_bytes: of the segments that were folded.
        shared_tables: number of tables that stay as they are.
    """

    record_id: int
    job_uid: str
    snapshot_id: int
    writer: str
    mode: Literal["minor", "major"]
    started_at_ms: int
    finished_at_ms: int
    view: str
    base: tuple[TableEntry, ...] = ()
    deltas: tuple[TableEntry, ...] = ()
    removed: tuple[str, ...] = ()
    source_logs: tuple[FileEntry, ...] = ()
    removed_source_logs: tuple[str, ...] = ()
    folds_shards: bool = False
    ranges: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    rows: int = 0
    log_bytes: int = 0
    shared_tables: int = 0

    def encode(self) -> bytes:
        """Return the file's bytes."""
        return encode_document("materialization", self)

    @staticmethod
    def decode(data: bytes, where: str) -> Record:
        """Parse and check; every path in the result is a plain relative one.

        Raises:
            CorruptManifest, UnsupportedFormat: see `decode_document`.
        """
        record = decode_document("materialization", Record, data, where)
        for path in [*(t.path for t in record.base + record.deltas), *(f.path for f in record.source_logs)]:
            check_relative_path(path)
        for table in record.base + record.deltas:
            if table.last_snapshot_id != record.snapshot_id or not 0 <= table.hash_low <= table.hash_high < 1 << 64:
                raise CorruptManifest(
                    f"{where} is damaged: {table.path} is not a table of snapshot {record.snapshot_id}"
                )
        return record


# --- adoption: pure ----------------------------------------------------------------------------------------------


def view_of(manifest: Manifest, snapshot_id: int) -> str:
    """Return a digest of the input of a materialization of `snapshot_id`, as a manifest names it: layers, segments up
    to it, files of shards.

    Names of files are unique, so equal digests mean the same files in the same order.
    """
    seen = [
        manifest.job_uid,
        [[[t.path, layer.newest_in(t)] for t in layer.tables] for layer in manifest.layers],
        [[f.path for f in layer.source_logs] for layer in manifest.layers],
        [s.path for s in manifest.segments if s.snapshot_id <= snapshot_id],
        manifest.shards.path if manifest.shards is not None else "",
    ]
    return hashlib.sha256(json.dumps(seen, separators=(",", ":")).encode()).hexdigest()


def fits(draft: Manifest, record: Record) -> bool:
    """Whether the manifest still has exactly the files that the record folded. Later segments do not matter."""
    return (
        draft.job_uid == record.job_uid
        and draft.snapshot_id >= record.snapshot_id
        # Its tables hold a snapshot that is not in this history, and may have other columns.
        and not draft.abandons(record.snapshot_id)
        and view_of(draft, record.snapshot_id) == record.view
    )


def is_too_old(record: Record, now_ms: int) -> bool:
    """Whether a record may not be adopted any more: garbage collection keeps its files for a limited time
    (`RECORD_KEPT_MS`)."""
    return now_ms - record.finished_at_ms >= ADOPTED_FOR_MS


def apply(draft: Manifest, record: Record) -> Manifest:
    """Return the manifest with the record's tables in the place of those that they fold; call it only if it `fits`.

    Segments that were written while the materialization ran stay. The first layer stays the base: each of its tables,
    new or old, now has the snapshot that it holds.
    """
    at = record.snapshot_id
    removed, removed_logs = set(record.removed), set(record.removed_source_logs)
    logs = tuple(f for layer in draft.layers for f in layer.source_logs if f.path not in removed_logs)
    kept = [
        tuple(replace(t, last_snapshot_id=layer.newest_in(t)) for t in layer.tables if t.path not in removed)
        for layer in draft.layers
    ]
    base = tuple(
        sorted((*(kept[0] if kept else ()), *record.base), key=lambda t: (t.operator, t.state, t.hash_low, t.path))
    )
    layers = [LayerEntry(0, at, base, (*logs, *record.source_logs))]
    layers += [
        replace(layer, tables=t, source_logs=()) for layer, t in zip(draft.layers[1:], kept[1:], strict=True) if t
    ]
    if record.deltas:
        folded = [s.snapshot_id for s in draft.segments if s.snapshot_id <= at]
        layers.append(LayerEntry(min(folded, default=at), at, record.deltas))
    segments = tuple(s for s in draft.segments if s.snapshot_id > at)
    shards = None if record.folds_shards else draft.shards
    return replace(draft, layers=tuple(layers), segments=segments, shards=shards)


def holds(manifest: Manifest, record: Record) -> bool:
    """Whether a manifest has adopted the record (and nothing was folded over it since)."""
    paths = {t.path for layer in manifest.layers for t in layer.tables}
    paths |= {f.path for layer in manifest.layers for f in layer.source_logs}
    new = [t.path for t in record.base + record.deltas] + [f.path for f in record.source_logs]
    if new:
        return all(path in paths for path in new)
    return not any(path in paths for path in record.removed) and not any(
        s.snapshot_id <= record.snapshot_id for s in manifest.segments
    )


# --- in the store ------------------------------------------------------------------------------------------------


def record_ids(root: Store) -> tuple[list[int], list[int]]:
    """Return the ids with a record, and the ids with a pin (with or without a record); ascending."""
    done, started = [], []
    for name in root.list_names(MATERIALIZATIONS_DIR):
        stem, _, rest = name.partition(".")
        if len(stem) == 20 and stem.isascii() and stem.isdigit():
            if rest == "json":
                done.append(int(stem))
            elif rest == "started.json":
                started.append(int(stem))
    return done, started


def read_record(root: Store, record_id: int) -> Record:
    """Read and check one record.

    Raises:
        FileNotFoundError: it does not exist. CorruptManifest, UnsupportedFormat: it cannot be trusted or read.
    """
    path = materialization_path(record_id)
    record = Record.decode(root.read(path, MANIFEST_BYTES_MAX), f"{root.url}/{path}")
    if record.record_id != record_id:
        raise CorruptManifest(f"{root.url}/{path} says that it is materialization {record.record_id}")
    return record


def open_pins(root: Store) -> list[int]:
    """Return the ids of the materializations that have a pin and no record."""
    done, started = record_ids(root)
    return sorted(set(started) - set(done))


def read_pin(root: Store, record_id: int) -> Pin | None:
    """Read one pin; None if it was collected since it was listed.

    Raises:
        CorruptManifest, UnsupportedFormat: it cannot be trusted or read.
    """
    path = materialization_path(record_id, started=True)
    try:
        data = root.read(path, SMALL_JSON_BYTES_MAX)
    except FileNotFoundError:
        return None
    return decode_document("materialization-pin", Pin, data, f"{root.url}/{path}")


def claim(root: Store, manifest: Manifest, *, clock: Clock, ids: Ids) -> Pin | None:
    """Take the next id and pin a snapshot; None if the snapshot was deleted before the pin was there.

    Raises:
        StoreUnavailable, OutcomeUnknown: the store does not answer; a pin created by then is abandoned.
    """

    def propose() -> Proposal[Pin]:
        done, started = record_ids(root)
        now_ms = clock.now_ms()
        pin = Pin(
            record_id=max([0, *done, *started]) + 1,
            job_uid=manifest.job_uid,
            snapshot_id=manifest.snapshot_id,
            writer=ids.uid(),
            started_at_ms=now_ms,
            heartbeat_ms=now_ms,
        )
        path = materialization_path(pin.record_id, started=True)
        return Proposal(path, encode_document("materialization-pin", pin), pin)

    pin = create_next(
        root,
        propose,
        contended=lambda: Unavailable(
            f"{CLAIM_ATTEMPTS_MAX} others began a materialization in {root.url} at the same time; try again later"
        ),
    )
    return pin if root.exists(manifest_path(manifest.snapshot_id)) else None


def beat(root: Store, pin: Pin, clock: Clock, *, failed: bool = False) -> Pin:
    """Record that the materialization lives, or that it failed; only its owner calls it.

    Raises:
        Unavailable: it was silent for so long (a suspended host) that its files may be collected by now.
    """
    if not failed:
        check_awake(pin, clock)
    pin = replace(pin, heartbeat_ms=clock.now_ms(), state="failed" if failed else "running")
    root.put(materialization_path(pin.record_id, started=True), encode_document("materialization-pin", pin))
    return pin


def check_awake(pin: Pin, clock: Clock) -> None:
    """Refuse a pin that was silent for half of the time that its files are kept: a collector may have read it before.

    Raises:
        Unavailable: see `beat`.
    """
    silent_ms = clock.now_ms() - pin.heartbeat_ms
    if silent_ms >= PIN_KEPT_MS // 2:
        raise Unavailable(
            f"materialization {pin.record_id} was not heard of for {silent_ms / 3_600_000:.0f} hours: what it wrote "
            "may be collected by now, so it is not recorded. Materialize again"
        )


def write_record(root: Store, record: Record) -> None:
    """Create the record: from here on the driver may adopt it.

    Raises:
        CorruptData: another writer has used the id. StoreUnavailable, OutcomeUnknown: see `Store.create`.
    """
    path = materialization_path(record.record_id)

    def contended() -> CorruptData:
        return CorruptData(f"{root.url}/{path} exists, although its id was claimed for this materialization; try again")

    create_next(root, lambda: Proposal(path, record.encode(), record), contended=contended, attempts_max=1)


@dataclass(frozen=True)
class Protected:
    """The objects that garbage collection must keep for materializations.

    Attributes:
        snapshots: treated as live, with all objects that they name.
        writers: files with one of these in their name are kept.
        paths: files that a record may still bring into a manifest.
    """

    snapshots: frozenset[int] = frozenset()
    writers: frozenset[str] = frozenset()
    paths: frozenset[str] = frozenset()

    def keeps(self, path: str) -> bool:
        """Whether a file must be kept although no live snapshot names it."""
        # For a table the writer is in the file's name, for a source's log in its folder's name.
        parts = (part.split("-") for part in path.split("/"))
        return path in self.paths or any(len(part) > 1 and part[1] in self.writers for part in parts)


def protected(root: Store, now_ms: int, memo: dict[int, Record] | None = None) -> Protected:
    """Return the current needs of materializations; call it after a collector has chosen the objects to delete.

    Args:
        memo: records that were read before (they never change); filled here. For a caller that asks repeatedly.

    Raises:
        CorruptManifest, UnsupportedFormat, StoreUnavailable: nothing may be deleted then.
    """
    memo = {} if memo is None else memo
    snapshots, writers, paths = set(), set(), set()
    done, started = record_ids(root)
    for pin in (read_pin(root, record_id) for record_id in sorted(set(started) - set(done))):
        if pin is not None and pin.state == "running" and now_ms - pin.heartbeat_ms < PIN_KEPT_MS:
            snapshots.add(pin.snapshot_id)
            writers.add(pin.writer)
    for record_id in done:
        try:
            record = memo[record_id] = memo.get(record_id) or read_record(root, record_id)
        except FileNotFoundError:
            continue  # it had expired, and another collector removed it
        if now_ms - record.finished_at_ms < RECORD_KEPT_MS:
            paths |= {t.path for t in record.base + record.deltas} | {f.path for f in record.source_logs}
    for record_id in memo.keys() - set(done):
        del memo[record_id]
    return Protected(frozenset(snapshots), frozenset(writers), frozenset(paths))
