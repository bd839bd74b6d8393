"""Whether the next epoch is one task for all shards: chosen by the numbers of the newest ones; pure.

In an epoch of few rows most of the time is spent on a shuffle and on a task for each shard. One task does the same, one
shard after the other (task/single_task.py). It never changes a result, so each run chooses for itself.

An epoch that continues rows in flight is never one task: it has a backlog, which needs all cores, and the rows of many
epochs. An epoch with a deadline may be: each shard of its task keeps to the deadline as a separate task would,
and rows that are left wait as usual. But if the deadline comes before one task would be refused, parallel shards get
further until then, so that the batch takes fewer epochs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from state_runtime.driver.context import DriverContext
from state_runtime.pipeline.compile import Stage
from state_runtime.store import LocalStore
from state_runtime.task.acknowledgement import Acknowledgement
from state_runtime.task.single_task import SingleTaskLimits

__all__ = ["LIMITS", "SingleTask", "may_be_single_task"]

LIMITS = SingleTaskLimits()
"""Beyond them a single-task epoch is refused."""
ROWS_MAX = 16_384
"""Rows of the operator with the most of them. Far more rows are faster on all cores with a shuffle; the break-even
point was not measured (docs/design/0033-floor.md)."""
TASKS_MS_MAX = 500.0
"""If user code takes longer over few rows, the shards should run in parallel."""
SHARDS_MAX = 16
"""A shard takes some milliseconds even without rows; many of them are faster on all cores."""
PAUSE_EPOCHS = 32
PAUSE_EPOCHS_MAX = 1 << 15
"""After a wrong guess an epoch was slow, or ran twice: the more often, the longer the pause until the next guess."""


@dataclass
class SingleTask:
    """The choice for each epoch of a run.

    Life cycle: made with the run → per epoch `choose`, (`refused`), then `seen` with its tasks' acknowledgements.

    Attributes:
        allowed: see `may_be_single_task`.
    """

    allowed: bool
    _is_small: bool = False
    _is_chosen: bool = False
    _pause: int = 0
    _last_pause: int = 0

    def choose(self, within_s: float | None, *, goes_on: bool) -> bool:
        """Return whether the next epoch is one task. The first one of a run is not: it restores and may have a backlog.

        Args:
            within_s: the epoch's time; None: no limit.
            goes_on: it continues rows in flight.
        """
        fits = within_s is None or within_s >= LIMITS.time_max_s
        self._is_chosen = self.allowed and self._is_small and self._pause == 0 and fits and not goes_on
        return self._is_chosen

    def refused(self) -> None:
        """Note that the single-task epoch was too much for one task."""
        self._is_chosen = False
        self._pause = self._last_pause = min(max(PAUSE_EPOCHS, self._last_pause * 2), PAUSE_EPOCHS_MAX)

    def seen(self, acknowledged: Sequence[Acknowledgement], stages: Sequence[Stage], tasks_ms: float) -> None:
        """Learn from an epoch; nothing is learned if no shard had work in it.

        Args:
            tasks_ms: the duration of its action.
        """
        if not acknowledged:
            return
        # Before this epoch starts a new pause below: a pause covers the epochs after the one that starts it.
        self._pause = max(0, self._pause - 1)
        if self._is_chosen and tasks_ms > TASKS_MS_MAX:
            self.refused()
        uploads = any(a.changes.uploads.uploads for a in acknowledged)
        leaves = any(not a.is_done for a in acknowledged)
        is_quick = _rows_max(acknowledged, stages) <= ROWS_MAX and tasks_ms <= TASKS_MS_MAX
        self._is_small = is_quick and not uploads and not leaves


def may_be_single_task(context: DriverContext, *, has_executors: bool) -> bool:
    """Return whether a run's epochs may be one task at all.

    They may not with several executors, because each has its own shards. They may not if tasks send data to a store:
    tasks of several shards do it in parallel, one task would wait for each of them. That is so for uploads without the
    changelog, and for a distant sink. And a sink above all operators gets all rows of the source, in as many tasks as
    the source has, while the operators may get few of them.
    """
    stages = context.pipeline.stages
    of_operators = {name for stage in stages if stage.operator is not None for name in stage.sinks}
    is_near = all(isinstance(context.sinks[name].store(), LocalStore) for name in of_operators)
    first = [stages[number] for number in context.pipeline.stages_with_new_rows]
    begins_with_operator = bool(first) and all(stage.operator is not None for stage in first)
    is_one_process = not has_executors and context.settings.changelog == "on" and context.parallelism <= SHARDS_MAX
    return is_one_process and is_near and begins_with_operator


def _rows_max(acknowledged: Iterable[Acknowledgement], stages: Sequence[Stage]) -> int:
    """Return the rows of the operator with the most. Rows that Spark aggregated before count one by one: the one task
    would have to aggregate all of them."""
    rows: dict[int, int] = {}
    for a in acknowledged:
        if stages[a.stage].operator is not None:
            rows[a.stage] = rows.get(a.stage, 0) + a.input_rows
    return max(rows.values(), default=0)
