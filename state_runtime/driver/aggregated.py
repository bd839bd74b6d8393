"""Which operators' rows Spark aggregates before the shuffle: chosen by the numbers of their newest epochs; pure.

Aggregation pays off where an epoch has many rows of few keys. It never changes a result (pipeline/partial_rows.py).
So each run chooses for itself, and a repeated epoch may choose differently.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from state_runtime.base.settings import PartialAggregation
from state_runtime.task.acknowledgement import Acknowledgement

__all__ = ["Aggregated"]

ROWS_MIN = 50_000
"""Below it the second plan costs about as much as it saves (docs/design/0029-partial-rows.md)."""
KEYS_PER_ROW_MAX = 0.5
FEWER_MAX = 0.75
"""Partial rows per row above which aggregation did not pay off: many tasks had a few rows of each key."""
PAUSE_EPOCHS = 32
"""Number of epochs without aggregation after that."""


@dataclass
class Aggregated:
    """The choice for the next epoch, among the operators that allow aggregation.

    Life cycle: made with the run → per epoch `chosen`, then `seen` with what its tasks acknowledged.
    """

    mode: PartialAggregation
    able: frozenset[str]
    _chosen: set[str] = field(default_factory=set)
    _pause: dict[str, int] = field(default_factory=dict)

    def chosen(self) -> frozenset[str]:
        """Return the uids of the operators whose rows are aggregated first."""
        if self.mode == "auto":
            return frozenset(self._chosen)
        return self.able if self.mode == "on" else frozenset()

    def seen(self, epoch: Iterable[tuple[str, Acknowledgement]]) -> None:
        """Learn from an epoch.

        Args:
            epoch: operator uid and acknowledgement of each of its tasks.
        """
        of_operator: dict[str, list[Acknowledgement]] = {}
        for uid, acknowledgement in epoch:
            if uid in self.able:
                of_operator.setdefault(uid, []).append(acknowledgement)
        for uid, tasks in of_operator.items():
            if not all(t.is_done for t in tasks):
                continue  # it changed fewer rows than it has keys
            rows, partial = (sum(getattr(t, name) for t in tasks) for name in ("input_rows", "partial_rows"))
            if partial > rows * FEWER_MAX:
                self._pause[uid] = PAUSE_EPOCHS
            if self._is_worth_it(uid, rows, partial or sum(t.changed_rows for t in tasks)):
                self._chosen.add(uid)
            else:
                self._chosen.discard(uid)

    def _is_worth_it(self, uid: str, rows: int, keys: int) -> bool:
        if self._pause.get(uid, 0):
            self._pause[uid] -= 1
            return False
        return rows >= ROWS_MIN and keys <= rows * (FEWER_MAX if uid in self._chosen else KEYS_PER_ROW_MAX)
