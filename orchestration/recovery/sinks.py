"""What a person should know of the sinks of a job that runs; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from state_runtime.base.sink_state import SinkState
from stillstate.orchestration.recovery.sources import AWAY_TOLD_S
from stillstate.orchestration.text import bytes_text, count_text, time_text

__all__ = ["SinkTrouble", "sink_trouble"]


@dataclass(frozen=True)
class SinkTrouble:
    """A headline, and one line with moments and no durations.

    Attributes:
        holds_up: the job stands still because of it.
    """

    headline: str
    reason: str
    holds_up: bool


def sink_trouble(sinks: Sequence[SinkState], now_ms: int) -> SinkTrouble | None:
    """Return the trouble of the sink that needs a look first: one that holds up the job, or else the one that has been
    away for longest."""
    told = [sink for sink in sinks if sink.holds_up or sink.away_s(now_ms) >= AWAY_TOLD_S]
    if not told:
        return None
    sink = min(told, key=lambda sink: sink.away_since_ms)
    waits = (
        f"sink {sink.name!r} does not take output since {time_text(sink.away_since_ms)} ({sink.said}); output of "
        f"{count_text(sink.epochs)} epochs ({bytes_text(sink.bytes)}) waits for it"
    )
    if not sink.holds_up:
        return SinkTrouble("a sink is away", f"{waits}, and the job goes on", holds_up=False)
    return SinkTrouble(
        "a sink that is away holds the job up",
        f"{waits}, more than checkpoint.pending_output_bytes_max: nothing is read until it takes some",
        holds_up=True,
    )
