"""Steps of a run that failed for a transient reason and are taken again; nothing of the failed attempt stays."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from state_runtime.base.errors import can_pass
from state_runtime.driver.checkpointer import Checkpointer
from state_runtime.driver.driver_state import DriverState
from state_runtime.snapshot.commit import Committer
from state_runtime.spark.errors import typed_error
from state_runtime.task.acknowledgement import Acknowledgement

__all__ = ["Retries"]

_LOG = logging.getLogger(__name__)

Done = TypeVar("Done")
"""The result of a step that succeeded."""

# From the first wait to the longest. With the default of three failures a store may be away for about two minutes:
# Spark's action and the store's own repetitions take time too.
_WAIT_S = 5.0
_WAIT_GROWTH = 4.0
_WAIT_MAX_S = 120.0


class Retries:
    """Takes steps of one run.

    Args:
        so_far: returns the acknowledgements of the action that failed.
        tolerable: how many failures in a row are tried again.
        wait: waits the given seconds before the step is tried again; returns whether to abandon it instead.

    Attributes:
        failures: of all steps, in the whole run.
    """

    def __init__(
        self,
        state: DriverState,
        committer: Committer,
        checkpointer: Checkpointer,
        so_far: Callable[[], list[Acknowledgement]],
        *,
        tolerable: int,
        wait: Callable[[float], bool],
    ) -> None:
        self._state = state
        self._committer = committer
        self._checkpointer = checkpointer
        self._so_far = so_far
        self._tolerable = tolerable
        self._wait = wait
        self.failures = 0

    def take(self, what: str, step: Callable[[], Done]) -> Done:
        """Take a step; again while its error is transient, and at most `tolerable` times in a row.

        A run that ends costs a start of Spark and a restore; two minutes without the store should not cost that. A step
        that failed has not happened: the driver state is as before it. Its staged and uploaded objects are removed as
        far as the stores answer, and never named by a manifest.

        Not tried again: anything after the create of a manifest was tried, because it may have happened; the steps
        after the manifest; an error that the same call would get again.
        """
        failures = 0
        while True:
            before, last = self._state.standing(), self._committer.last
            try:
                return step()
            except Exception as error:
                typed = typed_error(error)
                failures += 1
                self.failures += 1
                is_open = self._checkpointer.is_committing or self._committer.last is not last
                if is_open or not can_pass(typed) or failures > self._tolerable:
                    raise
                self._checkpointer.remove(self._so_far(), self._state.interval.since(before.interval))
                self._state.back_to(before)
                wait_s = min(_WAIT_MAX_S, _WAIT_S * _WAIT_GROWTH ** (failures - 1))
                _LOG.warning(
                    "%s %d failed (%d of at most %d times in a row) and is run again in %.0f s: %s: %s",
                    what, before.interval.head.epoch + 1, failures, self._tolerable, wait_s,
                    type(typed).__name__, typed,
                )  # fmt: skip
                if self._wait(wait_s):
                    raise
