"""When to fold, and what: cells of the hash range, triggers, thresholds; pure.

A state's tables lie on a grid of *cells*: closed ranges of key hashes whose width is a power of two (dyadic), so that
two cells are disjoint or one holds the other. A cell has at most one base table, and deltas above it that do not reach
beyond it. So each cell is folded by itself: those that changed much get a new base table (*major*), those that changed
little a delta (*minor*), and the tables of all others are shared between snapshots as they are.

Costs, with r = `materialize_ratio` (docs/design/0009-materialization.md derives and measures them):

- space: live bytes × (1 + r/2 + r/4) on average: deltas grow to r × base before a major fold, the log to r/2 × base
before any;
- writing: a byte of log is written once as log, about once as delta, and (1 + r)/r times at most by major folds.

Thresholds are jittered by the base table's name, so that cells that filled up alike do not all become due at once; the
name is new with each major fold, so the order changes too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from state_runtime.base.limits import KIB, MIB
from state_runtime.base.settings import JobSettings
from state_runtime.changelog.segment import PartEntry
from state_runtime.changelog.versions import check_dropped
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, StateEntry, TableEntry
from state_runtime.state.table import HASH_MAX

__all__ = [
    "Cell",
    "FoldPlan",
    "FoldSizes",
    "LogPart",
    "Mode",
    "StoredTable",
    "Unit",
    "due",
    "grid",
    "make_plan",
    "threshold",
]

Mode = Literal["auto", "minor", "major"]
Range = tuple[int, int]

_REPLAY_BYTES_PER_S = 32 * MIB  # until a restore of the job was measured
_ENTRY_BYTES = 260  # what a segment or a table takes in a manifest, about
_MANIFEST_BYTES = 128 * KIB  # half of what a manifest may grow to; a log of more than this much of it is folded


@dataclass(frozen=True)
class FoldSizes:
    """Sizes that the grid aims at; tests make them small.

    Attributes:
        table_bytes: of a base table. Larger where a state would have more than `cells_max` of them.
        small_bytes: a base table up to this size is rewritten with every change: cheaper than another file.
        unit_bytes: log, base and deltas that are folded as one piece of work; the log of one is in memory at once.
        deltas_max: above one cell.
        unfolded_bytes: decoded, of a log whose batches are folded together with the tables; a longer one is folded
            first.
        sampled_rows: of a cell's log, to learn how many rows folding leaves of it.
    """

    table_bytes: int = 32 * MIB
    cells_max: int = 256
    small_bytes: int = MIB
    unit_bytes: int = 128 * MIB
    deltas_max: int = 8
    unfolded_bytes: int = 96 * MIB
    sampled_rows: int = 8_192


@dataclass(frozen=True)
class LogPart:
    """A part of a segment, and the checkpoint that it was written for."""

    segment: str
    part: PartEntry
    snapshot_id: int

    @property
    def path(self) -> str:
        return self.part.path or self.segment


@dataclass(frozen=True)
class StoredTable:
    """A table, and the newest snapshot that it holds."""

    table: TableEntry
    snapshot_id: int

    @property
    def range(self) -> Range:
        return self.table.hash_low, self.table.hash_high


@dataclass(frozen=True)
class Cell:
    """One range of the grid.

    Attributes:
        base: at most one table, unless the grid changes here.
        deltas: newest first.
        major: a new base must be written, because it was asked for or the grid changes here.
        threshold: bytes of deltas from which a new base is due.
    """

    low: int
    high: int
    base: tuple[StoredTable, ...] = ()
    deltas: tuple[StoredTable, ...] = ()
    major: bool = False
    threshold: float = 0.0

    @property
    def base_bytes(self) -> int:
        return sum(t.table.bytes for t in self.base)

    @property
    def delta_bytes(self) -> int:
        return sum(t.table.bytes for t in self.deltas)


@dataclass(frozen=True)
class Unit:
    """Neighbouring cells of one state that are folded together; the log's parts newest first."""

    operator: str
    state: str
    cells: tuple[Cell, ...]
    log: tuple[LogPart, ...]

    @property
    def low(self) -> int:
        return self.cells[0].low

    @property
    def high(self) -> int:
        return self.cells[-1].high


@dataclass(frozen=True)
class FoldPlan:
    """What one materialization does.

    Attributes:
        dropped: paths of tables that nobody can read any more, because their operator or state was given up.
    """

    snapshot_id: int
    mode: Mode
    units: tuple[Unit, ...]
    dropped: tuple[str, ...] = ()


def due(
    manifest: Manifest, settings: JobSettings, *, since_s: float | None = None, replay_bytes_per_s: float = 0.0
) -> str | None:
    """Why the log should be folded now; None if it need not be. Cheap: asked after every checkpoint.

    Args:
        since_s: seconds since the last fold; None if unknown.
        replay_bytes_per_s: how fast a restore read, as measured; 0 takes a careful guess.

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
    if segments >= settings.materialize_max_segments:
        return "segments"
    if log_bytes >= max(settings.materialize_min_bytes, settings.materialize_ratio / 2 * manifest.table_bytes):
        return "bytes"
    if log_bytes / (replay_bytes_per_s or _REPLAY_BYTES_PER_S) >= settings.materialize_replay_s:
        return "replay"
    if since_s is not None and since_s >= settings.materialize_interval_s:
        return "interval"
    return None


def threshold(path: str, ratio: float) -> float:
    """The share of a base table's bytes that its deltas may reach: 3/4 to 5/4 of the ratio, drawn from the table's
    name."""
    draw = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") / HASH_MAX
    return ratio * (0.75 + 0.5 * draw)


def make_plan(
    manifest: Manifest,
    log: Sequence[LogPart],
    mode: Mode,
    settings: JobSettings,
    *,
    sizes: FoldSizes | None = None,
) -> FoldPlan:
    """What to fold of a snapshot, in which pieces.

    Args:
        log: all state parts of its segments, newest first.
        mode: "minor" writes deltas only (where there is a base), "major" writes every base anew, "auto" decides for
            each cell.

    Raises:
        CorruptSegment: the log or a table holds a state that its operator does not have and did not drop.
    """
    sizes = sizes or FoldSizes()
    everything = manifest.shards is not None
    # How the files' bytes are shared between states nobody knows; too many cells only cost a little.
    files_bytes = manifest.shards.total_bytes if manifest.shards is not None else 0
    states = {(o.uid, s.name): (o, s) for o in manifest.operators for s in o.states}
    tables, dropped = _tables(manifest, states)
    parts: dict[tuple[str, str], list[LogPart]] = {key: [] for key in states}
    for piece in log:
        key = (piece.part.operator, piece.part.state)
        if key not in states:
            _check_dropped(manifest, key, piece.snapshot_id, piece.path)
        elif piece.snapshot_id >= _since(*states[key]):
            parts[key].append(piece)
    units: list[Unit] = []
    for key in states:
        bases, deltas = tables[key]
        edges, forced = grid(bases, deltas, parts[key], sizes, files_bytes)
        forced = forced | {cell for cell in edges if mode == "major" or everything}
        cells = [_cell(cell, bases, deltas, cell in forced, settings.materialize_ratio) for cell in edges]
        units += _units(key, cells, parts[key], sizes, mode, everything)
    return FoldPlan(manifest.snapshot_id, mode, tuple(units), tuple(dropped))


Tables = tuple[list[StoredTable], list[StoredTable]]


def _tables(
    manifest: Manifest, states: dict[tuple[str, str], tuple[OperatorEntry, StateEntry]]
) -> tuple[dict[tuple[str, str], Tables], list[str]]:
    """Per state its base tables, and its deltas newest first; and the paths of those that nobody reads."""
    found: dict[tuple[str, str], Tables] = {key: ([], []) for key in states}
    dropped: list[str] = []
    for number, layer in reversed(list(enumerate(manifest.layers))):
        for table in layer.tables:
            key, newest = (table.operator, table.state), layer.newest_in(table)
            if key not in states:
                _check_dropped(manifest, key, newest, table.path)
                dropped.append(table.path)
            elif newest < _since(*states[key]):
                dropped.append(table.path)
            else:
                found[key][0 if number == 0 else 1].append(StoredTable(table, newest))
    return found, dropped


def _since(operator: OperatorEntry, state: StateEntry) -> int:
    return max(operator.since, state.since)


def _check_dropped(manifest: Manifest, key: tuple[str, str], snapshot_id: int, path: str) -> None:
    """Operators that the manifest does not describe were given up; a state that its operator does not have must have
    been."""
    operator = next((o for o in manifest.operators if o.uid == key[0]), None)
    if operator is not None:
        check_dropped(operator, key[1], snapshot_id, path)


# --- the grid ----------------------------------------------------------------------------------------------------


def grid(
    bases: Sequence[StoredTable],
    deltas: Sequence[StoredTable],
    log: Sequence[LogPart],
    sizes: FoldSizes,
    files_bytes: int = 0,
) -> tuple[list[Range], set[Range]]:
    """The cells of one state, in order: together they are all hashes. And those whose tables must be written anew.

    The grid is that of the base tables, with the gaps between them filled; neighbours that have become small are
    joined, and what has grown too large is split. Tables of older formats that lie on no grid are all written anew.
    """
    cells = _filled([t.range for t in bases])
    if cells is None or not all(any(low <= t.range[0] and t.range[1] <= high for low, high in cells) for t in deltas):
        forced = {(0, HASH_MAX)}
        cells = [(0, HASH_MAX)]
    else:
        forced = set()
    stored = [*bases, *deltas]
    weights = _Weights(
        [(*t.range, t.table.bytes) for t in stored]
        + [(p.part.hash_low, p.part.hash_high, p.part.length) for p in log]
        + ([(0, HASH_MAX, files_bytes)] if files_bytes else [])
    )
    target = max(sizes.table_bytes, -(-weights.total // sizes.cells_max))
    joined: list[Range] = []
    for cell in cells:
        joined.append(cell)
        while len(joined) > 1 and (parent := _parent(joined[-2], joined[-1])) and weights.of(parent) <= target / 4:
            forced = (forced - set(joined[-2:])) | {parent}
            joined[-2:] = [parent]
    result: list[Range] = []
    for cell in joined:
        pieces = _split(cell, weights, target) if weights.of(cell) > 2 * target else [cell]
        if len(pieces) > 1 or cell in forced:
            forced = (forced - {cell}) | set(pieces)
        result += pieces
    return result, forced


class _Weights:
    """Bytes of ranges, as if each file's rows were spread evenly over its own range; vectorised over the files."""

    def __init__(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        self._low: npt.NDArray[np.float64] = np.array([low for low, _, _ in pieces], dtype=np.float64)
        high = np.array([high for _, high, _ in pieces], dtype=np.float64)
        self._width = np.maximum(high - self._low, 1.0)
        self._bytes: npt.NDArray[np.float64] = np.array([size for _, _, size in pieces], dtype=np.float64)
        self.total = int(self._bytes.sum())

    def of(self, cell: Range) -> float:
        covered = np.minimum(float(cell[1]), self._low + self._width) - np.maximum(float(cell[0]), self._low)
        return float((self._bytes * np.clip(covered / self._width, 0.0, 1.0)).sum())


def _filled(ranges: Sequence[Range]) -> list[Range] | None:
    """The ranges with the gaps between them filled by the widest cells that fit; None if they are not disjoint
    cells."""
    cells: list[Range] = []
    at = 0
    for low, high in sorted(ranges):
        width = high - low + 1
        if low < at or width & (width - 1) or low % width:
            return None
        cells += _blocks(at, low)
        cells.append((low, high))
        at = high + 1
    return cells + _blocks(at, HASH_MAX + 1)


def _blocks(at: int, end: int) -> list[Range]:
    """The half-open range as the fewest cells."""
    blocks: list[Range] = []
    while at < end:
        width = (at & -at) or HASH_MAX + 1
        while at + width > end:
            width //= 2
        blocks.append((at, at + width - 1))
        at += width
    return blocks


def _parent(left: Range, right: Range) -> Range | None:
    """The cell whose halves these are."""
    width = left[1] - left[0] + 1
    if left[1] + 1 != right[0] or right[1] - right[0] + 1 != width or left[0] % (2 * width):
        return None
    return left[0], right[1]


def _split(cell: Range, weights: _Weights, target: float) -> list[Range]:
    """Halves of halves, until each weighs no more than the target."""
    if weights.of(cell) <= target or cell[0] == cell[1]:
        return [cell]
    middle = (cell[0] + cell[1]) // 2
    return _split((cell[0], middle), weights, target) + _split((middle + 1, cell[1]), weights, target)


def _cell(cell: Range, bases: Iterable[StoredTable], deltas: Iterable[StoredTable], major: bool, ratio: float) -> Cell:
    low, high = cell
    base = tuple(t for t in bases if t.range[0] <= high and t.range[1] >= low)
    above = tuple(t for t in deltas if t.range[0] <= high and t.range[1] >= low)
    limit = threshold(base[0].table.path, ratio) * sum(t.table.bytes for t in base) if base else 0.0
    return Cell(low, high, base, above, major, limit)


def _units(
    key: tuple[str, str],
    cells: Sequence[Cell],
    log: Sequence[LogPart],
    sizes: FoldSizes,
    mode: Mode,
    everything: bool,
) -> list[Unit]:
    """The cells that have something to fold, neighbours together as far as they fit into one unit."""
    raw = _Weights([(p.part.hash_low, p.part.hash_high, p.part.raw_bytes) for p in log])
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
