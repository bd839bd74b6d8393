"""Layout of the local runs of one state, and merging them a bounded piece at a time; pure.

A *run* is sorted by key hash; newer runs hide older ones. It consists of one or more files (*pieces*) with ascending,
disjoint hash ranges. A *merge* turns several neighbouring runs into one, over several epochs: each epoch takes the next
hash range of all inputs, writes one more piece of the output, and raises the inputs' lower bound. So at any moment the
output holds the hashes below the bound, and the inputs those above it. A look-up needs no special case, and no epoch
pays for a full rewrite, for any size of state.

Several merges may be under way, over different runs. The newest (smallest) is served first, so that small ones need not
wait for a large one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

__all__ = [
    "BUDGET_ROWS_MIN",
    "Layout",
    "Merge",
    "Run",
    "RunFile",
    "Version",
    "add_run",
    "budget_rows",
    "plan_merge",
    "record_piece",
    "side_by_side",
    "start_merge",
]

# An epoch may always rewrite this many rows: a few tens of milliseconds, so that small epochs get through large merges.
BUDGET_ROWS_MIN = 65_536
# Bounds the pieces of a run, and so the files that a look-up opens.
_PIECES_PER_RUN_MAX = 64


@dataclass(frozen=True)
class RunFile:
    """One sorted file on disk.

    Attributes:
        digest: SHA-256 of its bytes, its identity on the primary store; "" as long as it is not stored there.
        low, high: only rows with a hash in this closed range count: a file that was taken over from a shard of another
            parallelism may hold others.
        check: XXH3-128 of its bytes, compared several times as fast. It detects damage by a disk, but the writer of a
            file could forge it. "" in files of versions before this one, which have a digest.
    """

    file: str
    rows: int
    bytes: int
    digest: str
    low: int = 0
    high: int = (1 << 64) - 1
    check: str = ""


@dataclass(frozen=True)
class Run:
    """Pieces in ascending hash order; rows with a hash below `low` have moved to the output of a merge.

    Attributes:
        taken_ms: of a state with an index by time: rows due by then were handled by an earlier epoch; None: no rows
            were handled yet.
    """

    pieces: tuple[RunFile, ...] = ()
    low: int = 0
    taken_ms: int | None = None

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)


@dataclass(frozen=True)
class Merge:
    """A merge under way: `runs[start]` is its output until now, the `count` runs after it are its inputs."""

    start: int
    count: int


@dataclass(frozen=True)
class Layout:
    """The runs of one state, newest first, and the merges among them, newest first."""

    runs: tuple[Run, ...] = ()
    merges: tuple[Merge, ...] = ()

    @property
    def files(self) -> tuple[RunFile, ...]:
        return tuple(piece for run in self.runs for piece in run.pieces)

    def with_files(self, changed: Callable[[RunFile], RunFile]) -> Layout:
        """Return the layout with other descriptions of the same files."""
        runs = tuple(replace(run, pieces=tuple(changed(piece) for piece in run.pieces)) for run in self.runs)
        return replace(self, runs=runs)

    def with_taken(self, through_ms: int) -> Layout:
        """Return the layout after an epoch that handled the rows due by a time in all current runs."""
        runs = tuple(
            replace(r, taken_ms=through_ms if r.taken_ms is None else max(r.taken_ms, through_ms)) for r in self.runs
        )
        return replace(self, runs=runs)

    def inputs(self, merge: Merge) -> tuple[Run, ...]:
        """Return the runs that a merge reads, newest first."""
        return self.runs[merge.start + 1 : merge.start + 1 + merge.count]

    def reaches_bottom(self, merge: Merge) -> bool:
        """Return whether nothing older is below a merge: its output needs no tombstones."""
        return merge.start + 1 + merge.count == len(self.runs)


@dataclass(frozen=True)
class Version:
    """The parts of a version; immutable. See `state_runtime.state.backend.StoredVersion` for the last three."""

    version: str
    parent: str
    states: Mapping[str, Layout] = field(default_factory=dict)
    snapshot_id: int = 0
    epoch: str = ""
    restored_from: str = ""

    @property
    def files(self) -> tuple[RunFile, ...]:
        """Every file of the version."""
        return tuple(file for layout in self.states.values() for file in layout.files)


def side_by_side(columns: Sequence[Sequence[Run]]) -> tuple[Run, ...]:
    """Combine the runs of several shards as those of one.

    Args:
        columns: per shard its runs, newest first; the shards in ascending order of their disjoint hash ranges.

    Returns:
        Runs, newest first. Which of two shards is older does not matter, because no row of one hides a row of the
        other.
    """
    depth = max((len(column) for column in columns), default=0)
    runs = []
    for number in range(depth):
        # Aligned at the bottom: large old runs are beside large old runs.
        beside = [column[number - depth + len(column)] for column in columns if number >= depth - len(column)]
        taken = [run.taken_ms for run in beside]
        earliest = None if None in taken else min(t for t in taken if t is not None)
        runs.append(Run(tuple(piece for run in beside for piece in run.pieces), 0, earliest))
    return tuple(runs)


def add_run(layout: Layout, *files: RunFile) -> Layout:
    """Return the layout with a new run on top.

    Args:
        files: its pieces, in order of hash.
    """
    merges = tuple(replace(m, start=m.start + 1) for m in layout.merges)
    return Layout((Run(files), *layout.runs), merges)


def start_merge(layout: Layout, runs_max: int) -> Layout:
    """Begin to merge the newest runs if too many of them are in no merge yet."""
    free = layout.merges[0].start if layout.merges else len(layout.runs)
    count = plan_merge([run.rows for run in layout.runs[:free]], max(2, runs_max // 2))
    if count == 1:
        return layout
    merges = (Merge(0, count), *(replace(m, start=m.start + 1) for m in layout.merges))
    # The output has handled only as much as the least of its inputs. From now on it is raised together with them.
    taken = [run.taken_ms for run in layout.runs[:count]]
    output = Run(taken_ms=None if None in taken else min(t for t in taken if t is not None))
    return Layout((output, *layout.runs), merges)


def plan_merge(rows_newest_first: Sequence[int], runs_max: int) -> int:
    """Return how many of the newest runs to merge into one (1: none).

    Tiered: no merge while there are at most `runs_max` runs. Then the newer half is merged. The next older run is
    included as long as it is at most twice as large as the runs included before. So from 4 runs on each row is
    rewritten about log2(state / epoch) times over its life (twice that at worst), and small states stay in one or two
    runs.
    """
    if len(rows_newest_first) <= runs_max:
        return 1
    count = max(2, len(rows_newest_first) // 2)
    total = sum(rows_newest_first[:count])
    while count < len(rows_newest_first) and rows_newest_first[count] <= 2 * total:
        total += rows_newest_first[count]
        count += 1
    return count


def budget_rows(layout: Layout, changed_rows: int, runs_max: int, rows_min: int = BUDGET_ROWS_MIN) -> int:
    """Return how many rows this epoch may read for merges."""
    total = sum(run.rows for run in layout.runs)
    # Tiered merging rewrites a row about log2(state / epoch) times over its life, at most; half of it is the usual
    # case.
    rewrites = 2 + math.log2(1 + total / max(1, changed_rows)) / 2
    budget = max(rows_min, rewrites * changed_rows, total / _PIECES_PER_RUN_MAX)
    # Merges that fall behind get a larger budget, so that runs do not pile up without end.
    return int(budget * max(1.0, len(layout.runs) / (2 * runs_max)))


def record_piece(layout: Layout, merge: Merge, piece: RunFile | None, next_low: int | None) -> Layout:
    """Return the layout after one more range of a merge.

    Args:
        piece: written for the range; None if every row of it was dropped.
        next_low: the inputs' new lower bound; None if the merge is finished.
    """
    output = layout.runs[merge.start]
    if piece is not None:
        output = replace(output, pieces=(*output.pieces, piece))
    end = merge.start + 1 + merge.count
    if next_low is not None:
        inputs = tuple(replace(run, low=next_low) for run in layout.inputs(merge))
        return replace(layout, runs=(*layout.runs[: merge.start], output, *inputs, *layout.runs[end:]))
    kept = (output,) if output.pieces else ()
    gone = merge.count + 1 - len(kept)
    merges = tuple(
        replace(m, start=m.start - gone) if m.start > merge.start else m for m in layout.merges if m != merge
    )
    return Layout((*layout.runs[: merge.start], *kept, *layout.runs[end:]), merges)
