"""One materialization from claim to record; this thread does the folding, or the tasks of a Spark job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from state_runtime.base import faults
from state_runtime.base.clock import Clock
from state_runtime.base.errors import Fenced, MissingSnapshot
from state_runtime.base.ids import Ids
from state_runtime.base.settings import JobSettings, MaterializationMode
from state_runtime.materialize.grid import MaterializationSizes
from state_runtime.materialize.log import read_log
from state_runtime.materialize.plan import MaterializationPlan, make_plan
from state_runtime.materialize.records import Pin, Record, beat, check_awake, claim, view_of, write_record
from state_runtime.materialize.source_logs import fold_source_logs
from state_runtime.materialize.write_tables import TablesContext, WrittenTables, fold_unit
from state_runtime.snapshot.manifest import Manifest
from state_runtime.store import Store

_LOG = logging.getLogger(__name__)

__all__ = ["BEAT_S", "FoldUnits", "Heart", "Reached", "fold_here", "fold_snapshot", "materialize"]

BEAT_S = 10.0

Reached = Callable[[int, int], None]
"""Called with (done, total) units during the work, by the working thread; also keeps a pin alive."""

FoldUnits = Callable[[MaterializationPlan, TablesContext, Reached], WrittenTables]
"""Folds all units of a plan, and reports its progress."""


@dataclass
class Heart:
    """Keeps a pin alive and reports the progress; only for the working thread."""

    root: Store
    pin: Pin
    clock: Clock
    on_progress: Callable[[int, int], None] | None = None
    prove: Callable[[], None] | None = None

    def reached(self, done: int, total: int) -> None:
        """Report the number of folded units, and renew the pin if it is time to."""
        if self.on_progress is not None:
            self.on_progress(done, total)
        if self.clock.now_ms() - self.pin.heartbeat_ms >= BEAT_S * 1000:
            if self.prove is not None:
                self.prove()
            self.pin = beat(self.root, self.pin, self.clock)


def fold_here(root: Store, ids: Ids, into: Store | None = None) -> FoldUnits:
    """Return a function that folds in this thread, unit by unit, and writes tables to `into` (None: the root)."""

    def fold(plan: MaterializationPlan, context: TablesContext, reached: Reached) -> WrittenTables:
        total = WrittenTables()
        reached(0, len(plan.units))
        for done, unit in enumerate(plan.units, 1):
            total = total + fold_unit(root, unit, context, ids=ids, into=into)
            reached(done, len(plan.units))
        return total

    return fold


def materialize(
    root: Store,
    manifest: Manifest,
    mode: MaterializationMode = "auto",
    *,
    settings: JobSettings | None = None,
    clock: Clock,
    ids: Ids,
    fold: FoldUnits | None = None,
    sizes: MaterializationSizes | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    prove: Callable[[], None] | None = None,
) -> Record:
    """Fold a snapshot's log into its tables, and record it. No existing object is changed or deleted.

    The order of writes is pin, tables, record. A crash between any two leaves files that no manifest names.

    Args:
        fold: does the work; in this thread if None.
        prove: raises if the root is not the caller's any more; called before an object is written under a number (pin
            and record). Tables have unique names, and are garbage if no manifest names them.

    Raises:
        MissingSnapshot: the snapshot is gone. MissingFile, CorruptSegment: it is damaged.
        StoreUnavailable, OutcomeUnknown: try again; the snapshot is unchanged.
    """
    settings = settings or JobSettings()
    sizes = sizes or MaterializationSizes.of(settings.materialization)
    if prove is not None:
        prove()
    pin = claim(root, manifest, clock=clock, ids=ids)
    if pin is None:
        raise MissingSnapshot(f"snapshot {manifest.snapshot_id} in {root.url} was deleted; materialize a newer one")
    heart = Heart(root, pin, clock, on_progress, prove)
    faults.reach("fold-claimed")
    try:
        record = fold_snapshot(
            root,
            manifest,
            mode,
            pin,
            settings=settings,
            sizes=sizes,
            clock=clock,
            fold=fold or fold_here(root, ids),
            reached=heart.reached,
        )
        check_awake(heart.pin, clock)
        if prove is not None:
            prove()
        write_record(root, record)
    except Fenced:
        # A pin of that number, if it exists, is another's.
        raise
    except BaseException:
        # So that no process waits for it; if this fails too, the pin expires by its age.
        _say_failed(root, heart.pin, clock, prove)
        raise
    faults.reach("fold-recorded")
    return record


def _say_failed(root: Store, pin: Pin, clock: Clock, prove: Callable[[], None] | None) -> None:
    try:
        if prove is not None:
            prove()
        beat(root, pin, clock, failed=True)
    except Exception:
        _LOG.warning("the pin of materialization %d could not be ended", pin.record_id, exc_info=True)


def fold_snapshot(
    root: Store,
    manifest: Manifest,
    mode: MaterializationMode,
    pin: Pin,
    *,
    settings: JobSettings,
    sizes: MaterializationSizes,
    clock: Clock,
    fold: FoldUnits,
    reached: Reached,
    into: Store | None = None,
) -> Record:
    """Write the tables that a snapshot folds to, and return the record of them, without writing it.

    Args:
        pin: names the written files; the caller decides whether it is stored, and whether anything keeps the snapshot.
        into: where tables are written, if not to the root itself; `fold` writes there too.

    Raises:
        MissingFile, CorruptSegment: the snapshot is damaged. StoreUnavailable: try again. Files written by then are
            garbage.
    """
    plan = make_plan(manifest, read_log(root, manifest), mode, settings, sizes=sizes)
    context = TablesContext.of(manifest, plan, pin.writer, sizes)
    folded = fold(plan, context, reached)
    faults.reach("fold-units-done")
    bases = any(True for _ in folded.base) or _replaces_base(manifest, folded.removed)
    logs, removed_logs = fold_source_logs(root, manifest, pin.writer, everything=plan.mode == "major", into=into)
    removed = tuple(dict.fromkeys((*folded.removed, *plan.dropped)))
    tables = sum(len(layer.tables) for layer in manifest.layers)
    return Record(
        record_id=pin.record_id,
        job_uid=manifest.job_uid,
        snapshot_id=manifest.snapshot_id,
        writer=pin.writer,
        mode="major" if bases else "minor",
        started_at_ms=pin.started_at_ms,
        finished_at_ms=clock.now_ms(),
        view=view_of(manifest, manifest.snapshot_id),
        base=folded.base,
        deltas=folded.deltas,
        removed=removed,
        source_logs=logs,
        removed_source_logs=removed_logs,
        folds_shards=manifest.shards is not None,
        ranges=sum(len(unit.cells) for unit in plan.units),
        read_bytes=folded.read_bytes,
        written_bytes=folded.written_bytes + sum(f.bytes for f in logs),
        rows=folded.rows,
        log_bytes=manifest.log_bytes,
        shared_tables=tables - len(removed),
    )


def _replaces_base(manifest: Manifest, removed: Iterable[str]) -> bool:
    gone = set(removed)
    return any(t.path in gone for t in (manifest.layers[0].tables if manifest.layers else ()))
