"""Publishing of the output that a manifest names: sinks side by side, each in the order of its epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from state_runtime.base import faults
from state_runtime.base.clock import Clock
from state_runtime.pipeline.sinks import Sink
from state_runtime.snapshot.manifest import StagedOutput

__all__ = ["publish_all"]


def publish_all(
    outputs: Sequence[StagedOutput],
    sink_of: Callable[[StagedOutput], Sink],
    publish: Callable[[Sink, StagedOutput], None],
    clock: Clock,
) -> dict[str, float]:
    """Publish all outputs; return when each sink has published its own, or has failed.

    Sinks that are functions of the user's are called in this thread, one after the other, as they ever were; the others
    at the same time, in threads that have ended when this returns or raises. What a sink has published stays, also if
    another one fails: publishing is repeated by the next run.

    Args:
        publish: publishes one output.

    Returns:
        The milliseconds that each sink took.

    Raises:
        StillstateError: of the first sink, in their order, that failed.
    """
    of_sinks: dict[str, list[StagedOutput]] = {}
    for output in outputs:
        of_sinks.setdefault(output.sink, []).append(output)
    took_ms: dict[str, float] = {}

    def publish_in_order(name: str) -> None:
        begun_s = clock.monotonic_s()
        for output in of_sinks[name]:
            publish(sink_of(output), output)
            faults.reach("one-output-published")
        took_ms[name] = (clock.monotonic_s() - begun_s) * 1000

    beside = [name for name, own in of_sinks.items() if not sink_of(own[0]).may_have_python]
    if len(of_sinks) < 2 or not beside:
        for name in of_sinks:
            publish_in_order(name)
        return took_ms
    with ThreadPoolExecutor(len(beside), thread_name_prefix="publish") as pool:
        futures: dict[str, Future[None]] = {name: pool.submit(publish_in_order, name) for name in beside}
        for name in of_sinks:
            if name not in futures:
                publish_in_order(name)
        for name in beside:
            futures[name].result()
    return {name: took_ms[name] for name in of_sinks}
