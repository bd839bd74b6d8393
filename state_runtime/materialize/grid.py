"""The grid of a state's tables: cells of the hash range, and when a cell's base is due; pure.

A state's tables are on a grid of *cells*: closed ranges of key hashes whose width is a power of two (dyadic), so that
two cells are disjoint or one contains the other. A cell has at most one base table, and deltas above it that do not
reach beyond it. So each cell is folded separately: cells with many changes get a new base table (*major*), those with
few a delta (*minor*), and snapshots share the unchanged tables of all other cells.

Thresholds are jittered by the base table's name, so that cells that filled up alike do not all become due at once; the
name is new with each major fold, so the order changes too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from state_runtime.base.limits import MIB, TABLES_MAX
from state_runtime.base.settings import MaterializationSettings
from state_runtime.changelog.snapshot_state import StoredPart, StoredTable
from state_runtime.state.table import HASH_MAX

__all__ = ["Cell", "MaterializationSizes", "Range", "Weights", "cell_of", "grid", "threshold"]

Range = tuple[int, int]

_CELLS_LIMIT = 4096  # of one state, if each had its target size; with half of that there are twice as many


@dataclass(frozen=True)
class MaterializationSizes:
    """Sizes that the grid aims at; tests make them small.

    Attributes:
        table_bytes: of a base table. It is larger, up to `cell_bytes_max`, if a state would have more than `cells_max`
            of them; beyond that a larger state has more cells. Manifests must be able to name them all. So from 1 TiB
            on tables get larger again, regardless of the settings.
        small_bytes: a base table up to this size is rewritten with every change: cheaper than another file.
        unit_bytes: log, base and deltas that are folded as one piece of work; the log of one is in memory at once.
        deltas_max: above one cell.
        unfolded_bytes: decoded, of a log whose batches are folded together with the tables; a longer one is folded
            first.
        sampled_rows: of a cell's log, to estimate how many rows folding leaves of it.
    """

    table_bytes: int = 32 * MIB
    cells_max: int = MaterializationSettings().cells_max
    cell_bytes_max: int = MaterializationSettings().cell_bytes_max
    small_bytes: int = MIB
    unit_bytes: int = 128 * MIB
    deltas_max: int = 8
    unfolded_bytes: int = 96 * MIB
    sampled_rows: int = 8_192

    @staticmethod
    def of(settings: MaterializationSettings) -> MaterializationSizes:
        """Return the sizes of a job."""
        return MaterializationSizes(cells_max=settings.cells_max, cell_bytes_max=settings.cell_bytes_max)

    def cell_bytes(self, state_bytes: int) -> int:
        """Return the target bytes of a cell, by the state's bytes; a cell that is split has at least half of it."""
        wanted = min(-(-state_bytes // self.cells_max), self.cell_bytes_max)
        return max(self.table_bytes, wanted, -(-state_bytes // _CELLS_LIMIT))

    def bounded(self, bases: int) -> MaterializationSizes:
        """Limit the deltas per cell, so that a manifest can name the tables of all `bases` cells of all states."""
        return replace(self, deltas_max=max(1, min(self.deltas_max, TABLES_MAX // max(bases, 1) - 1)))


@dataclass(frozen=True)
class Cell:
    """One range of the grid.

    Attributes:
        base: at most one table, unless the grid changes here.
        deltas: newest first.
        major: a new base must be written, because it was requested or the grid changes here.
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


def threshold(path: str, ratio: float) -> float:
    """Return the share of a base table's bytes that its deltas may reach: 3/4 to 5/4 of the ratio, derived from the
    table's name."""
    draw = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") / HASH_MAX
    return ratio * (0.75 + 0.5 * draw)


def grid(
    bases: Sequence[StoredTable],
    deltas: Sequence[StoredTable],
    log: Sequence[StoredPart],
    sizes: MaterializationSizes,
    files_bytes: int = 0,
) -> tuple[list[Range], set[Range]]:
    """Return the cells of one state, in order (together they are all hashes), and those whose tables must be rewritten.

    The grid is that of the base tables, with the gaps between them filled. Small neighbours are joined, and cells that
    are too large are split. Tables of older formats that are on no grid are all rewritten.
    """
    cells = _filled([t.hash_range for t in bases])
    if cells is None or not all(
        any(low <= t.hash_range[0] and t.hash_range[1] <= high for low, high in cells) for t in deltas
    ):
        forced = {(0, HASH_MAX)}
        cells = [(0, HASH_MAX)]
    else:
        forced = set()
    stored = [*bases, *deltas]
    weights = Weights(
        [(*t.hash_range, t.table.bytes) for t in stored]
        + [(*p.hash_range, p.part.length) for p in log]
        + ([(0, HASH_MAX, files_bytes)] if files_bytes else [])
    )
    target = sizes.cell_bytes(weights.total)
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


class Weights:
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
    """Fill the gaps between the ranges with the widest cells that fit; None if the ranges are not disjoint cells."""
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
    """Divide the half-open range into the fewest cells."""
    blocks: list[Range] = []
    while at < end:
        width = (at & -at) or HASH_MAX + 1
        while at + width > end:
            width //= 2
        blocks.append((at, at + width - 1))
        at += width
    return blocks


def _parent(left: Range, right: Range) -> Range | None:
    """Return the cell whose halves these are; None if they are not."""
    width = left[1] - left[0] + 1
    if left[1] + 1 != right[0] or right[1] - right[0] + 1 != width or left[0] % (2 * width):
        return None
    return left[0], right[1]


def _split(cell: Range, weights: Weights, target: float) -> list[Range]:
    """Halve the cell repeatedly, until each part weighs no more than the target."""
    if weights.of(cell) <= target or cell[0] == cell[1]:
        return [cell]
    middle = (cell[0] + cell[1]) // 2
    return _split((cell[0], middle), weights, target) + _split((middle + 1, cell[1]), weights, target)


def cell_of(
    cell: Range, bases: Iterable[StoredTable], deltas: Iterable[StoredTable], major: bool, ratio: float
) -> Cell:
    low, high = cell
    base = tuple(t for t in bases if t.hash_range[0] <= high and t.hash_range[1] >= low)
    above = tuple(t for t in deltas if t.hash_range[0] <= high and t.hash_range[1] >= low)
    limit = threshold(base[0].table.path, ratio) * sum(t.table.bytes for t in base) if base else 0.0
    return Cell(low=low, high=high, base=base, deltas=above, major=major, threshold=limit)
