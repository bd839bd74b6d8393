"""When to fold, and what: cells of the hash range, triggers, thresholds; pure.

Costs, with r = `materialization.ratio` (docs/design/0009-materialization.md derives and measures them):

- space: live bytes × (1 + r/2 + r/4) on average: deltas grow to r × base before a major fold, the log to r/2 × base
before any fold;
- writing: a byte of log is written once as log, about once as delta, and (1 + r)/r times at most by major folds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from state_runtime.base.limits import KIB, MIB
from state_runtime.base.settings import JobSettings, MaterializationMode
from state_runtime.changelog.snapshot_state import SnapshotState, StoredPart, StoredTable
from state_runtime.materialize.grid import Cell, MaterializationSizes, Weights, cell_of, grid
from state_runtime.snapshot.manifest import Manifest

__all__ = ["MaterializationPlan", "Unit", "due", "make_plan", "replay_s"]

_REPLAY_BYTES_PER_S = 32 * MIB  # until a restore of the job was measured
_ENTRY_BYTES = 260  # approximate size of a segment or a table in a manifest
_MANIFEST_BYTES = 128 * KIB  # half of the size limit of a manifest; a log that takes more of it is folded


@dataclass(frozen=True)
class Unit:
    """Neighbouring cells of one state that are folded together; the log's parts newest first."""

    operator: str
    state: str
    cells: tuple[Cell, ...]
    log: tuple[StoredPart, ...]

    @property
    def low(self) -> int:
        return self.cells[0].low

    @property
    def high(self) -> int:
        return self.cells[-1].high


@dataclass(frozen=True)
class MaterializationPlan:
    """The work of one materialization.

    Attributes:
        dropped: paths of tables that no reader can read any more, because their operator or state was dropped.
    """

    snapshot_id: int
    mode: MaterializationMode
    units: tuple[Unit, ...]
    dropped: tuple[str, ...] = ()


def due(
    manifest: Manifest, settings: JobSettings, *, since_s: float | None = None, replay_bytes_per_s: float = 0.0
) -> str | None:
    """Return the reason to fold the log now; None without a reason. Cheap: called after every checkpoint.

    Args:
        since_s: seconds since the last fold; None if unknown.
        replay_bytes_per_s: measured speed of a restore; 0 uses a careful guess.

    Returns:
        "manifest", "segments", "bytes", "replay" or "interval".
    """
    segments = len(manifest.segments)
    if not manifest.state_segments:
        return None  # with the changelog off the files of shards are the state
    tables = sum(len(layer.tables) for layer in manifest.layers)
    log_bytes = manifest.log_bytes
    if segments * _ENTRY_BYTES >= _MANIFEST_BYTES and segments >= tables:
        return "manifest"
    if segments >= settings.materialization.max_segments:
        return "segments"
    if log_bytes >= max(settings.materialization.min_bytes, settings.materialization.ratio / 2 * manifest.table_bytes):
        return "bytes"
    if replay_s(log_bytes, replay_bytes_per_s) >= settings.materialization.replay_s:
        return "replay"
    if since_s is not None and since_s >= settings.materialization.interval_s:
        return "interval"
    return None


def replay_s(log_bytes: int, replay_bytes_per_s: float = 0.0) -> float:
    """Estimate the time that a restart needs to replay a log.

    Args:
        replay_bytes_per_s: as measured; 0 uses a careful guess.
    """
    return log_bytes / (replay_bytes_per_s or _REPLAY_BYTES_PER_S)


def make_plan(
    manifest: Manifest,
    log: Sequence[StoredPart],
    mode: MaterializationMode,
    settings: JobSettings,
    *,
    sizes: MaterializationSizes | None = None,
) -> MaterializationPlan:
    """Plan the folding of a snapshot, in pieces.

    Args:
        log: the parts of its segments that count, newest first (`materialize.log.read_log`).
        mode: "minor" writes deltas only (if there is a base), "major" rewrites every base, "auto" decides for each
            cell.

    Raises:
        CorruptSegment: a table holds a state that its operator does not have and did not drop.
    """
    sizes = sizes or MaterializationSizes.of(settings.materialization)
    everything = manifest.shards is not None
    # The share of each state in the files' bytes is unknown; too many cells only cost a little.
    files_bytes = manifest.shards.total_bytes if manifest.shards is not None else 0
    tables, dropped = _tables(manifest)
    parts: dict[tuple[str, str], list[StoredPart]] = {key: [] for key in tables}
    for piece in log:
        parts[piece.part.operator, piece.state].append(piece)
    units: list[Unit] = []
    for key, (bases, deltas) in tables.items():
        edges, forced = grid(bases, deltas, parts[key], sizes, files_bytes)
        forced = forced | {cell for cell in edges if mode == "major" or everything}
        cells = [cell_of(cell, bases, deltas, cell in forced, settings.materialization.ratio) for cell in edges]
        units += _units(key, cells, parts[key], sizes, mode, everything)
    return MaterializationPlan(manifest.snapshot_id, mode, tuple(units), tuple(dropped))


Tables = tuple[list[StoredTable], list[StoredTable]]


def _tables(manifest: Manifest) -> tuple[dict[tuple[str, str], Tables], list[str]]:
    """Return per state its base tables, and its deltas newest first; and the paths of tables that no reader reads."""
    found: dict[tuple[str, str], Tables] = {(o.uid, s.name): ([], []) for o in manifest.operators for s in o.states}
    read: set[str] = set()
    for stored in SnapshotState(manifest).tables():
        bases, deltas = found[stored.table.operator, stored.state]
        (deltas if stored.layer else bases).append(stored)
        read.add(stored.path)
    return found, [t.path for layer in reversed(manifest.layers) for t in layer.tables if t.path not in read]


def _units(
    key: tuple[str, str],
    cells: Sequence[Cell],
    log: Sequence[StoredPart],
    sizes: MaterializationSizes,
    mode: MaterializationMode,
    everything: bool,
) -> list[Unit]:
    """Return the cells that have something to fold; neighbours are together if they fit into one unit."""
    raw = Weights([(*p.hash_range, p.part.raw_bytes) for p in log])
    units: list[Unit] = []
    group: list[Cell] = []
    size = 0.0

    def close() -> None:
        nonlocal size
        if group:
            low, high = group[0].low, group[-1].high
            parts = tuple(p for p in log if p.part.hash_low <= high and p.part.hash_high >= low)
            units.append(Unit(*key, tuple(group), parts))
        group.clear()
        size = 0.0

    for cell in cells:
        touched = any(p.part.hash_low <= cell.high and p.part.hash_high >= cell.low for p in log)
        stored = bool(cell.base or cell.deltas or everything)
        overfull = mode != "minor" and bool(cell.base) and cell.delta_bytes >= cell.threshold
        if not (touched or (cell.major and stored) or (overfull and cell.deltas)):
            close()
            continue
        weight = raw.of((cell.low, cell.high)) + cell.base_bytes + cell.delta_bytes
        if group and size + weight > sizes.unit_bytes:
            close()
        group.append(replace(cell, major=cell.major or overfull))
        size += weight
    close()
    return units
