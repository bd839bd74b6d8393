"""A survey of a whole job root for garbage collection: needed, unneeded and foreign objects. Only reads; see
maintenance/gc/collect.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from state_runtime.base.clock import Clock
from state_runtime.base.errors import MissingFile
from state_runtime.base.limits import PLAN_OBJECTS_MAX
from state_runtime.maintenance.gc.plan import Candidate, GcPlan
from state_runtime.maintenance.layout import DATA_KINDS, kind_of, number_in
from state_runtime.maintenance.marks import (
    CLOCK_SKEW_MS,
    Existing,
    Holders,
    Marker,
    Marks,
    mark,
    size_fits,
    unless_deleted,
)
from state_runtime.maintenance.plans import Made
from state_runtime.materialize.records import PIN_KEPT_MS, RECORD_KEPT_MS, read_pin
from state_runtime.snapshot.handover import refuse_if_handed_over
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import SAVEPOINTS_DIR, manifest_path, materialization_path, named_snapshot_of
from state_runtime.snapshot.pins import read_pins
from state_runtime.snapshot.savepoint_record import list_savepoints, savepoint_names
from state_runtime.snapshot.term_files import newest_term
from state_runtime.store import Store, StoredObject

__all__ = ["Survey"]

TERMS_KEPT = 100
"""Number of runs whose term, last heartbeat and newest epochs are kept for inspection."""
_FOREIGN_SHOWN_MAX = 100
_KEPT = frozenset(
    ("job", "mark", "claim", "savepoint", "moving", "conversion", "building", "moved", "published", "migration")
)
_TOLD_EVERY = 1_000


@dataclass(kw_only=True)
class Survey:
    """The findings of a survey.

    Attributes:
        newest_id: of the newest snapshot, read before everything else.
        watermark_ms: when its manifest was written, but at most now; 0 without a snapshot: then no data is garbage.
        floor_ms: the age floor.
        told_ms: the local clock minus the largest clock difference: for ages of objects that hold no data.
        unneeded: objects of Stillstate that nothing needs.
    """

    root: Store
    marker: Marker
    existing: Existing
    holders: Holders
    marks: Marks
    term: int
    newest_id: int
    watermark_ms: int
    floor_ms: int
    told_ms: int
    failed_ttl_ms: int
    unneeded: list[StoredObject] = field(default_factory=list)
    needed_objects: int = 0
    needed_bytes: int = 0
    foreign: list[str] = field(default_factory=list)
    foreign_objects: int = 0

    @staticmethod
    def of(
        root: Store,
        clock: Clock,
        *,
        min_age_s: float,
        failed_ttl_s: float,
        on_listed: Callable[[int, int], None] | None = None,
    ) -> Survey:
        """Survey a root, in the order that maintenance/gc/collect.py defines.

        Raises:
            What `plan_gc` raises.
        """
        # The target of a copy or move may not hold all objects that its snapshots need.
        refuse_if_handed_over(root)
        marker = Marker(root, clock)
        term, newest = newest_term(root), marker.catalog.latest()
        watermark_ms = _watermark_ms(root, newest, clock.now_ms())
        existing, holders, marks = mark(root, marker, clock)
        survey = Survey(
            root=root,
            marker=marker,
            existing=existing,
            holders=holders,
            marks=marks,
            term=term,
            newest_id=newest.snapshot_id if newest is not None else 0,
            watermark_ms=watermark_ms,
            floor_ms=int(min_age_s * 1000),
            told_ms=clock.now_ms() - CLOCK_SKEW_MS,
            failed_ttl_ms=int(failed_ttl_s * 1000),
        )
        survey._list(on_listed)
        return survey

    def plan(self, at_ms: int) -> GcPlan:
        """Return the candidates and the numbers, as a document."""
        info = self.marker.catalog.job_info()
        made = Made(
            job=info.name,
            job_uid=info.uid,
            place=self.root.url,
            at_ms=at_ms,
            newest_snapshot_id=max(self.existing.snapshot_ids, default=0),
            term=self.term,
        )
        candidates = self.candidates()
        chosen = {c.path for c in candidates}
        young = [o for o in self.unneeded if o.path not in chosen and kind_of(o.path) in DATA_KINDS]
        return GcPlan(
            made=made,
            min_age_s=self.floor_ms / 1000,
            failed_ttl_s=self.failed_ttl_ms / 1000,
            candidates=tuple(candidates[:PLAN_OBJECTS_MAX]),
            given_up=tuple(self.given_up()),
            savepoints=tuple(self.savepoints()),
            needed_objects=self.needed_objects,
            needed_bytes=self.needed_bytes,
            young_objects=len(young),
            young_bytes=sum(o.bytes for o in young),
            foreign=tuple(self.foreign),
            foreign_objects=self.foreign_objects,
            is_cut=len(candidates) > PLAN_OBJECTS_MAX,
        )

    # --- garbage -----------------------------------------------------------------------------------------------------

    def candidates(self) -> list[Candidate]:
        """Return the objects that nothing needs and that are old enough, by path."""
        data = [
            Candidate(o.path, kind, o.bytes, o.modified_ms, "no snapshot needs it")
            for o in self.unneeded
            if (kind := kind_of(o.path)) in DATA_KINDS
            and o.modified_ms < self.watermark_ms - self.floor_ms
            and not self._is_under_way(kind, o.path)
        ]
        found = [*data, *self._leftovers({c.path for c in data})]
        return sorted(found, key=lambda c: c.path)

    def _is_under_way(self, kind: str, path: str) -> bool:
        """Whether, by its name, the newest run may still name the object: the clock may have jumped since the write."""
        if kind not in ("segment", "direct", "listing", "shard-file") or number_in(path) < self.term:
            return False
        return (named_snapshot_of(path) or 0) > self.newest_id

    def given_up(self) -> list[int]:
        """Return expired snapshots whose manifest is still stored: their removal was interrupted, or a process that
        slept created the manifest again."""
        ids = sorted(number_in(o.path) for o in self.unneeded if kind_of(o.path) == "manifest")
        return [i for i in ids if self.existing.boundary.is_gone(i) and i not in self.holders]

    def savepoints(self) -> list[tuple[str, str]]:
        """Return name and reason of the savepoints that have expired."""
        found = []
        for record in list_savepoints(self.root):
            if record.state in ("FAILED", "ABANDONED"):
                if self.told_ms - record.finished_at_ms >= self.failed_ttl_ms:
                    found.append(
                        (record.name, f"{record.state.lower()} {self.failed_ttl_ms // 1000:,} s ago or earlier")
                    )
            elif record.state == "DELETING" and record.is_stale(self.told_ms):
                found.append((record.name, "its deletion was cut short"))
        return found

    def _leftovers(self, data: set[str]) -> Iterator[Candidate]:
        """Yield unused objects without data that are older than the floor by the store's and the local clock."""
        by_path = {o.path: o for o in self.unneeded}
        reasons = {**self._void_pins(), **self._expired_records(by_path, data)}
        for found in self.unneeded:
            kind = kind_of(found.path)
            reason = reasons.get(found.path) or self._reason(found, by_path)
            if kind is not None and reason and found.modified_ms < self.told_ms - self.floor_ms:
                yield Candidate(found.path, kind, found.bytes, found.modified_ms, reason)

    def _reason(self, found: StoredObject, by_path: dict[str, StoredObject]) -> str:
        kind, number = kind_of(found.path), number_in(found.path)
        if kind == "boundary":  # the newest two are live
            return "newer boundaries count"
        if kind in ("term", "heartbeat", "epochs") and number <= self.term - TERMS_KEPT:
            return f"more than {TERMS_KEPT} runs ago"
        if kind in ("request", "answer") and number < self.term:
            return "to a run that has ended"
        if kind == "request" and found.path.removesuffix(".json") + ".answer.json" in by_path:
            return "answered"
        if kind == "answer" and found.path.removesuffix(".answer.json") + ".json" in by_path:
            return "an answer that was read long ago"
        if kind == "answer":
            return "its request is gone"
        if kind == "temporary":
            return "left by a writer that was killed"
        return "left by a probe of the store" if kind == "probe" else ""

    def _void_pins(self) -> dict[str, str]:
        boundary, reasons = self.existing.boundary, {}
        for pin in read_pins(self.root):
            if pin.is_void(self.told_ms):
                reasons[pin.path] = "expired"
            elif not boundary.is_gone(pin.snapshot_id) or boundary.is_tombstone:
                continue
            elif self.told_ms - pin.created_at_ms >= PIN_KEPT_MS:
                # This pin never counted, because a snapshot with a counting pin does not expire. Its process died
                # before it checked the boundary.
                reasons[pin.path] = "came too late for its snapshot"
            elif not self.root.exists(manifest_path(pin.snapshot_id)):
                reasons[pin.path] = "its snapshot is gone"
        return reasons

    def _expired_records(self, by_path: dict[str, StoredObject], data: set[str]) -> dict[str, str]:
        """Find records of materializations that are too old to be adopted, and pins without a living owner. The newest
        id stays: ids are never used twice."""
        reasons = {}
        started = {number_in(p) for p in by_path if kind_of(p) == "record-pin"}
        newest = max((*self.marker.records, *started), default=0)
        for record_id, record in self.marker.records.items():
            files = [*(t.path for t in record.base + record.deltas), *(f.path for f in record.source_logs)]
            left = [p for p in files if p in by_path and p not in data]
            if record_id < newest and self.told_ms - record.finished_at_ms >= RECORD_KEPT_MS and not left:
                reasons[materialization_path(record_id)] = "too old to be adopted"
                reasons[materialization_path(record_id, started=True)] = "too old to be adopted"
        for record_id in started - self.marker.records.keys() - {newest}:
            pin = read_pin(self.root, record_id)
            if pin is not None and (pin.state == "failed" or self.told_ms - pin.heartbeat_ms >= PIN_KEPT_MS):
                reasons[materialization_path(record_id, started=True)] = "failed, or its owner is gone"
        return reasons

    # --- the listing -------------------------------------------------------------------------------------------------

    def _list(self, on_listed: Callable[[int, int], None] | None) -> None:
        missing = dict(self.marks.needed)
        wrong: list[str] = []
        for count, found in enumerate(self._objects(), 1):
            if on_listed is not None and count % _TOLD_EVERY == 0:
                on_listed(count, 0)
            wanted = missing.pop(found.path, None)
            if wanted is not None and not size_fits(wanted, found.bytes):
                wrong.append(found.path)
            kind = kind_of(found.path)
            if kind is None:
                self._is_foreign(found.path)
            elif self.marks.keeps(found.path) or self._is_live(found.path):
                self.needed_objects += 1
                self.needed_bytes += found.bytes
            else:
                self.unneeded.append(found)
        with unless_deleted(self.root):
            self._check([*missing, *wrong])

    def _objects(self) -> Iterator[StoredObject]:
        """Yield all objects except those of savepoints, which are roots themselves; and files of killed writers."""
        yield from self.root.list_debris()
        for found in self.root.list_objects(""):
            if not found.path.startswith(f"{SAVEPOINTS_DIR}/"):
                yield found
        recorded = {record.name for record in list_savepoints(self.root)}
        for name in savepoint_names(self.root):
            if name not in recorded:
                self._is_foreign(f"{SAVEPOINTS_DIR}/{name}")

    def _is_foreign(self, path: str) -> None:
        self.foreign_objects += 1
        if len(self.foreign) < _FOREIGN_SHOWN_MAX:
            self.foreign.append(path)

    def _is_live(self, path: str) -> bool:
        kind, number = kind_of(path), number_in(path)
        if kind == "manifest":
            return not self.existing.boundary.is_gone(number)
            # The boundary before the newest stays: the writer of the newest one uses it, after a sleep, to prove that
            # the root is still its own.
        return kind in _KEPT or (kind == "boundary" and number >= self.existing.boundary.sequence - 1)

    def _check(self, suspects: list[str]) -> None:
        """Check that the suspects are really damaged.

        Raises:
            MissingFile: an object that a snapshot needs is missing, or has another size.
        """
        if not suspects:
            return
        # Another collector may have removed an expired snapshot during this listing.
        _, _, marks = mark(self.root, self.marker, _Still(self.told_ms + CLOCK_SKEW_MS))
        damaged = []
        for path in sorted(suspects):
            wanted = marks.needed.get(path)
            try:
                if wanted is None or size_fits(wanted, self.root.size(path)):
                    continue
            except FileNotFoundError:
                damaged.append(f"{path} is missing")
            else:
                damaged.append(f"{path} has another size")
        if damaged:
            path = damaged[0].split(" ")[0]
            whose = [i for i in marks.snapshot_ids if path in (self.marker.recall(i) or ())]
            raise MissingFile(
                f"{self.root.url} is damaged: {damaged[0]}, which snapshot {', '.join(map(str, whose[-5:]))} needs"
                + (f"; and {len(damaged) - 1} more" if len(damaged) > 1 else "")
                + ". Nothing was deleted. Restore the file from a copy, or delete the snapshots that need it"
            )


class _Still:
    """The clock of the survey, stopped at its begin."""

    def __init__(self, at_ms: int) -> None:
        self._at_ms = at_ms

    def now_ms(self) -> int:
        return self._at_ms

    def monotonic_s(self) -> float:
        return self._at_ms / 1000


def _watermark_ms(root: Store, newest: Manifest | None, now_ms: int) -> int:
    if newest is None:
        return 0
    path = manifest_path(newest.snapshot_id)
    found = [o for o in root.list_objects(path.rpartition("/")[0]) if o.path == path]
    # The snapshot expired and was removed since: then a newer one exists, and the next collection finds it.
    return min(found[0].modified_ms, now_ms) if found else 0
