"""Staged output of sinks that are away: it waits, named by each manifest, while state and checkpoints go on.

A sink is away once publishing failed for a reason that passes by itself (`can_pass`). From then on a thread of its own
tries again, oldest epoch first. Output that is published is left out of the next manifest; a crash in between publishes
it again, which ends in the same state. So nothing but a manifest has to know what waits: a run that ends, or is killed,
leaves it to the next one.

If more waits than `pending_output_bytes_max`, or more files than a manifest should name, the driver begins no further
epoch until a sink has taken some.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from state_runtime.base import faults
from state_runtime.base.clock import Clock
from state_runtime.base.errors import can_pass
from state_runtime.base.limits import PENDING_FILES_MAX
from state_runtime.base.sink_state import SinkState
from state_runtime.snapshot.manifest import StagedOutput
from state_runtime.spark.errors import typed_error

__all__ = ["WaitingOutputs"]

_LOG = logging.getLogger(__name__)

# From the first wait to the longest. A database that starts again takes seconds, and each attempt has the patience of
# its library.
_RETRY_S = 1.0
_RETRY_MAX_S = 30.0


@dataclass
class _Lane:
    """What waits for one sink, oldest first."""

    outputs: list[StagedOutput]
    since_ms: int
    said: str
    failures: int = 1
    is_hurried: bool = False
    thread: threading.Thread = field(init=False)


class WaitingOutputs:
    """The output of one run that waits. Thread-safe; each sink that is away has one daemon thread until it is back.

    Args:
        publish: publishes one output that may be published already.
        prove: raises `Fenced` if the root is another run's by now; called before each attempt, because a thread may
            sleep for an hour between two.
        bytes_max: see `is_full`.
    """

    def __init__(
        self,
        publish: Callable[[StagedOutput], None],
        prove: Callable[[], object],
        clock: Clock,
        *,
        bytes_max: int,
    ) -> None:
        self._publish = publish
        self._prove = prove
        self._clock = clock
        self._bytes_max = bytes_max
        self._changed = threading.Condition()
        self._lanes: dict[str, _Lane] = {}
        self._failure: BaseException | None = None
        self._is_closed = False
        self._was_full = False

    # --- what the driver asks ------------------------------------------------------------------------------------

    @property
    def named(self) -> tuple[StagedOutput, ...]:
        """The output that waits, each sink's oldest first: the next manifest must name it."""
        with self._changed:
            return tuple(output for lane in self._lanes.values() for output in lane.outputs)

    @property
    def is_full(self) -> bool:
        """Whether more bytes wait than `bytes_max`, or more files than a manifest should name."""
        with self._changed:
            return self._is_full()

    def is_away(self, sink: str) -> bool:
        """Return whether output of this sink waits: newer output must wait behind it."""
        with self._changed:
            return sink in self._lanes

    def states(self) -> tuple[SinkState, ...]:
        """Return what waits for each sink that is away; for any thread, without waiting."""
        with self._changed:
            is_full = self._is_full()
            return tuple(
                SinkState(
                    name=sink,
                    away_since_ms=lane.since_ms,
                    epochs=len({output.epoch for output in lane.outputs}),
                    bytes=_bytes_of(lane.outputs),
                    said=lane.said,
                    holds_up=is_full,
                )
                for sink, lane in self._lanes.items()
            )

    @property
    def has_failed(self) -> bool:
        """Whether a sink has failed for good while its output waited."""
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raise the error of a sink that failed for good while its output waited; the run must end with it."""
        with self._changed:
            if self._failure is not None:
                raise self._failure

    # --- events --------------------------------------------------------------------------------------------------

    def begin(self, sink: str, outputs: Sequence[StagedOutput], error: BaseException) -> None:
        """Let output wait for a sink that could not be reached, and try again beside the epochs.

        Args:
            outputs: of this sink, in the order of its epochs.
            error: that publishing the first of them met.
        """
        lane = _Lane(list(outputs), self._clock.now_ms(), _sentence(error))
        lane.thread = threading.Thread(target=self._take, args=(sink, lane), name=f"away-{sink}", daemon=True)
        with self._changed:
            self._lanes[sink] = lane
            _LOG.warning(
                "sink %r is away: %s. The job goes on; what it stages for this sink waits, up to %s bytes "
                "(pending_output_bytes_max), and is published once the sink is back",
                sink, lane.said, f"{self._bytes_max:,}",
            )  # fmt: skip
            self._tell_if_full()
        lane.thread.start()

    def add(self, sink: str, outputs: Sequence[StagedOutput]) -> bool:
        """Let newer output wait behind what waits for a sink. Return False if the sink is back: nothing waits."""
        with self._changed:
            lane = self._lanes.get(sink)
            if lane is None:
                return False
            lane.outputs.extend(outputs)
            self._tell_if_full()
            return True

    def wait_until_empty(self, is_enough: Callable[[], bool], look_interval_s: float = 0.2) -> bool:
        """Try all sinks at once, and wait until nothing waits, or a sink has failed for good, or it is enough.

        Returns:
            Whether nothing waits any more.
        """
        with self._changed:
            for lane in self._lanes.values():
                lane.is_hurried = True
            self._changed.notify_all()
            while self._lanes and self._failure is None and not is_enough():
                self._changed.wait(look_interval_s)
            return not self._lanes

    def close(self, timeout_s: float) -> None:
        """Begin no further attempt, and wait for those under way up to the timeout. What waits is left to the next
        run."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            lanes = dict(self._lanes)
        for sink, lane in lanes.items():
            lane.thread.join(timeout_s)
            left = [output for output in self.named if output.sink == sink]
            if left:
                _LOG.warning(
                    "sink %r is still away: the output of %d epochs (%s bytes) waits; it is staged, the newest "
                    "snapshot names it, and the next run publishes it", sink, len(left), f"{_bytes_of(left):,}",
                )  # fmt: skip

    # --- the thread of one sink ----------------------------------------------------------------------------------

    def _take(self, sink: str, lane: _Lane) -> None:
        """Publish what waits for one sink, oldest first, until nothing does."""
        while self._waited(lane):
            try:
                self._prove()
                output = lane.outputs[0]
                self._publish(output)
                faults.reach("waiting-output-published")
            except BaseException as error:
                if not self._goes_on_after(sink, lane, typed_error(error)):
                    return
                continue
            if self._is_back_after(sink, lane, output):
                return

    def _waited(self, lane: _Lane) -> bool:
        """Wait until the next attempt. Return whether there is one."""
        wait_s = min(_RETRY_MAX_S, _RETRY_S * 2.0 ** (lane.failures - 1)) if lane.failures else 0.0
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or lane.is_hurried, wait_s)
            lane.is_hurried = False
            return not self._is_closed

    def _goes_on_after(self, sink: str, lane: _Lane, error: BaseException) -> bool:
        with self._changed:
            lane.failures, lane.said = lane.failures + 1, _sentence(error)
            if can_pass(error):
                return True
            _LOG.error("sink %r cannot take what waits for it: %s", sink, lane.said)
            self._failure = self._failure or error
            self._changed.notify_all()
            return False

    def _is_back_after(self, sink: str, lane: _Lane, output: StagedOutput) -> bool:
        """Take note that an output is published. Return whether it was the last one."""
        with self._changed:
            lane.outputs.remove(output)
            lane.failures = 0
            self._was_full = self._is_full()
            if not lane.outputs:
                del self._lanes[sink]
                away_s = (self._clock.now_ms() - lane.since_ms) / 1000
                _LOG.warning("sink %r is back after %.0f s; all that waited for it is published", sink, away_s)
            self._changed.notify_all()
            return not lane.outputs

    def _is_full(self) -> bool:
        waiting = [output for lane in self._lanes.values() for output in lane.outputs]
        return bool(waiting) and (
            _bytes_of(waiting) > self._bytes_max or sum(len(o.files) for o in waiting) > PENDING_FILES_MAX
        )

    def _tell_if_full(self) -> None:
        is_full = self._is_full()
        if is_full and not self._was_full:
            _LOG.warning(
                "no epoch begins until %s can be reached: more output waits than pending_output_bytes_max allows",
                ", ".join(f"sink {sink!r}" for sink in self._lanes),
            )
        self._was_full = is_full


def _bytes_of(outputs: Sequence[StagedOutput]) -> int:
    return sum(file.bytes for output in outputs for file in output.files)


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
