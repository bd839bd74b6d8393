"""What waits for a sink that is away, for heartbeats; pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SinkState"]


@dataclass(frozen=True)
class SinkState:
    """A sink that is away: its staged output waits, and the job goes on. A sink that answers has no state.

    Attributes:
        name: of the sink in the pipeline.
        away_since_ms: wall clock of the driver when publishing failed first.
        epochs, bytes: of the output that waits.
        said: why it does not answer.
        holds_up: whether so much waits that the job begins no further epoch.
    """

    name: str
    away_since_ms: int
    epochs: int
    bytes: int
    said: str = ""
    holds_up: bool = False

    def away_s(self, now_ms: int) -> float:
        """Return for how long it has been away."""
        return max(0.0, (now_ms - self.away_since_ms) / 1000)
