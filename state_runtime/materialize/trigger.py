"""Whether a job has anything to fold, from its store alone: checked before a Spark session is started for it, and again
in the session."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from state_runtime.base.clock import Clock
from state_runtime.base.settings import MaterializationMode
from state_runtime.materialize.background import adoptable, other_at_work
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest

__all__ = ["MaterializationResult", "what_to_materialize"]


@dataclass(frozen=True)
class MaterializationResult:
    """The result of one call, in numbers.

    Attributes:
        mode: "major" if any base table was rewritten, "none" if nothing was done.
        reason: why nothing was done; else empty.
        ranges: cells of the hash range that were folded.
        read_bytes, written_bytes: of log and tables.
        rows: written.
        log_bytes_folded: of the segments that a restart need not replay any more, once the driver has adopted the
            record.
        shared_tables: tables that stay as they are.
        snapshot_id: the folded snapshot; 0 without a snapshot.
        record_id: of the record; None if nothing was done.
    """

    mode: Literal["none", "minor", "major"]
    reason: str = ""
    ranges: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    rows: int = 0
    log_bytes_folded: int = 0
    shared_tables: int = 0
    duration_s: float = 0.0
    snapshot_id: int = 0
    record_id: int | None = None

    @property
    def write_amplification(self) -> float:
        """Bytes written for each folded byte of log; 0 if no log was folded."""
        return self.written_bytes / self.log_bytes_folded if self.log_bytes_folded else 0.0


def what_to_materialize(catalog: Catalog, mode: MaterializationMode, clock: Clock) -> Manifest | MaterializationResult:
    """Return the snapshot whose log a fold would fold now; or, if there is nothing to fold, the result with the reason.

    The answer is valid only for the moment: another process may begin to fold right after.

    Raises:
        CorruptData: the newest snapshot is damaged. Unavailable: nothing is known then.
    """
    manifest = catalog.latest()
    if manifest is None:
        return MaterializationResult("none", "the job has no snapshot yet")
    nothing = partial(MaterializationResult, "none", snapshot_id=manifest.snapshot_id)
    if not manifest.state_segments:
        if mode != "major":
            return nothing("there is no changelog to fold")
        if not manifest.layers and manifest.shards is None:
            return nothing("there is no changelog to fold, and no table to rewrite")
    other = other_at_work(catalog.root, clock)
    if other is not None:
        return nothing(f"materialization {other.record_id} is under way")
    waiting = adoptable(catalog.root, manifest, clock, refused=set())
    if waiting is not None:
        return nothing(f"materialization {waiting.record_id} waits for the job's next checkpoint")
    return manifest
