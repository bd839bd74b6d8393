"""Materializations on the roots of tests: records and pins that the engine's own functions wrote."""

from __future__ import annotations

from job_roots import JobRoot

from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.materialize.records import Pin, Record, beat, claim, view_of, write_record


def begin(root: JobRoot) -> Pin:
    """A materialization of the newest snapshot begins."""
    latest = root.catalog.latest()
    assert latest is not None
    pin = claim(root.catalog.root, latest, clock=root.clock, ids=SYSTEM_IDS)
    assert pin is not None
    return pin


def fail(root: JobRoot) -> Pin:
    """One begins and says that it failed."""
    return beat(root.catalog.root, begin(root), root.clock, failed=True)


def finish(root: JobRoot, pin: Pin | None = None) -> Record:
    """One ends well; it has no tables, but its numbers."""
    pin = pin or begin(root)
    latest = root.catalog.latest()
    assert latest is not None
    record = Record(
        pin.record_id,
        pin.job_uid,
        pin.snapshot_id,
        pin.writer,
        "minor",
        root.clock.now_ms() - 1500,
        root.clock.now_ms(),
        view_of(latest, pin.snapshot_id),
        ranges=3,
        read_bytes=5000,
        written_bytes=500,
        rows=40,
        log_bytes=2000,
        shared_tables=7,
    )
    write_record(root.catalog.root, record)
    return record
