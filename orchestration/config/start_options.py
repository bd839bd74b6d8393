"""The options that a run is started with, as the command line, Dagster and launchers pass them on to the driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stillstate.orchestration.config.begin_at import NEWEST, BeginAt

__all__ = ["AS_IT_IS", "StartOptions"]


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """Options of a start. By default the job continues as it was, unless another driver has it.

    Attributes:
        takeover: take the job from a driver that still runs; it is fenced.
        until_idle: process the input that is there, then finish.
        allow_dropped_state: although the pipeline no longer has some operators or states of the newest snapshot.
        allow_drained: although the newest snapshot was drained.
        drop_inflight: discard the rows that are in flight.
        accept_session_settings: although settings of Spark's session that change results are others than before.
        take_output: write to output folders that belong to another root of the job.
        begin: at which snapshot.
    """

    takeover: bool = False
    until_idle: bool = False
    allow_dropped_state: bool = False
    allow_drained: bool = False
    take_output: bool = False
    drop_inflight: bool = False
    accept_session_settings: bool = False
    begin: BeginAt = NEWEST

    def always(self) -> list[str]:
        """Return the driver's arguments that also hold for a restart in place after this start."""
        return ["--until-idle"] if self.until_idle else []

    def once(self) -> list[str]:
        """Return the driver's arguments of this start only: a restart that went back again would undo later work."""
        return [
            *(["--takeover"] if self.takeover else []),
            *(["--allow-dropped-state"] if self.allow_dropped_state else []),
            *(["--allow-drained"] if self.allow_drained else []),
            *(["--take-output"] if self.take_output else []),
            *(["--drop-inflight"] if self.drop_inflight else []),
            *(["--accept-session-settings"] if self.accept_session_settings else []),
            *self.begin.arguments(),
        ]


AS_IT_IS: Final = StartOptions()
