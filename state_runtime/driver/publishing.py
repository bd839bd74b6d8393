"""Publishing of the output that a manifest names: sinks side by side, each in the order of its epochs.

A sink that is away leaves its output unpublished and stops no other one; see driver/waiting_outputs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from state_runtime.base import faults
from state_runtime.base.clock import Clock
from state_runtime.base.errors import can_pass
from state_runtime.pipeline.sinks import Sink
from state_runtime.snapshot.manifest import StagedOutput
from state_runtime.spark.errors import typed_error

__all__ = ["Left", "PublishedOutputs", "publish_all"]


@dataclass(frozen=True)
class Left:
    """Output of one sink that is not published, or not known to be, in the order of its epochs; and the error."""

    outputs: tuple[StagedOutput, ...]
    error: BaseException


@dataclass
class PublishedOutputs:
    """The result of `publish_all`.

    Attributes:
        took_ms: the milliseconds of each sink that has published all of its output.
        left: by sink, the output of sinks that are away.
    """

    took_ms: dict[str, float] = field(default_factory=dict)
    left: dict[str, Left] = field(default_factory=dict)


def publish_all(
    outputs: Sequence[StagedOutput],
    sink_of: Callable[[StagedOutput], Sink],
    publish: Callable[[Sink, StagedOutput], None],
    clock: Clock,
) -> PublishedOutputs:
    """Publish all outputs; return when each sink has published its own, or has failed.

    Sinks that are functions of the user's are called in this thread, one after the other, as they ever were; the others
    at the same time, in threads that have ended when this returns or raises. What a sink has published stays, also if
    another one fails: publishing is repeated by the next run.

    Args:
        publish: publishes one output.

    Raises:
        StillstateError: of the first sink, in their order, that failed for a reason that does not pass by itself, or
            whose handling of output is the user's.
    """
    of_sinks: dict[str, list[StagedOutput]] = {}
    for output in outputs:
        of_sinks.setdefault(output.sink, []).append(output)
    result = PublishedOutputs()

    def publish_in_order(name: str) -> None:
        begun_s = clock.monotonic_s()
        for number, output in enumerate(of_sinks[name]):
            sink = sink_of(output)
            try:
                publish(sink, output)
            except Exception as error:
                typed = typed_error(error)
                if sink.may_have_python or not can_pass(typed):
                    raise
                result.left[name] = Left(tuple(of_sinks[name][number:]), typed)
                return
            faults.reach("one-output-published")
        result.took_ms[name] = (clock.monotonic_s() - begun_s) * 1000

    beside = [name for name, own in of_sinks.items() if not sink_of(own[0]).may_have_python]
    if len(of_sinks) < 2 or not beside:
        for name in of_sinks:
            publish_in_order(name)
        return result
    with ThreadPoolExecutor(len(beside), thread_name_prefix="publish") as pool:
        futures: dict[str, Future[None]] = {name: pool.submit(publish_in_order, name) for name in beside}
        for name in of_sinks:
            if name not in futures:
                publish_in_order(name)
        for name in beside:
            futures[name].result()
    result.took_ms = {name: result.took_ms[name] for name in of_sinks if name in result.took_ms}
    return result
