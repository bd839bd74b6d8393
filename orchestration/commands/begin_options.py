"""Options that `run` and `start` share: how and where a run begins."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from stillstate.orchestration.config.start_options import StartOptions

__all__ = ["BeginOptions", "SessionSettingsOption", "with_begin_options"]

TakeoverOption = Annotated[
    bool, typer.Option("--takeover", help="Take the job from a driver that still runs; it is fenced and ends.")
]
DroppedOption = Annotated[
    bool,
    typer.Option(
        "--allow-dropped-state",
        help="Start although the pipeline no longer has some operators or states of the newest snapshot; what they "
        "held is never read again.",
    ),
]
DrainedOption = Annotated[
    bool,
    typer.Option("--allow-drained", help="Go on although the newest snapshot was drained: its windows have closed."),
]
TakeOutputOption = Annotated[
    bool,
    typer.Option(
        "--take-output",
        help="Write to output folders that belong to another root of this job, which no run will ever use again.",
    ),
]
DropInflightOption = Annotated[
    bool,
    typer.Option(
        "--drop-inflight",
        help="Drop the snapshot's rows in flight: the changed pipeline cannot process them. They are "
        "lost. (To process them first: `stillstate savepoint JOB NAME --stop --drain-inflight` with the old code.)",
    ),
]
SessionSettingsOption = Annotated[
    bool,
    typer.Option(
        "--accept-session-settings",
        help="Start although settings of Spark's session that change results (time zone, ANSI mode, …) are others "
        "than in the newest snapshot; the new ones are recorded.",
    ),
]
IdleOption = Annotated[
    bool, typer.Option("--until-idle", help="Process the input that is there, then finish (availableNow).")
]
FromOption = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="PLACE",
        help="Where a job without snapshots begins: STORE/JOB, STORE/JOB@ID, or the folder of a savepoint. "
        "What it needs is copied.",
        show_default=False,
    ),
]
ClaimOption = Annotated[
    bool,
    typer.Option(
        "--claim", help="Take the root over: no other job may use it, and it is removed after the first checkpoint."
    ),
]
FromSnapshotOption = Annotated[
    str | None,
    typer.Option(
        "--from-snapshot",
        metavar="ID|NAME",
        help="Go back to an older snapshot of this job, or to a savepoint, as `stillstate snapshots` names it. Output "
        "written since then stays; rows that are processed again appear in it again, under higher epoch numbers.",
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class BeginOptions:
    """The options that a user gave for a new run."""

    takeover: TakeoverOption = False
    until_idle: IdleOption = False
    allow_dropped_state: DroppedOption = False
    allow_drained: DrainedOption = False
    take_output: TakeOutputOption = False
    drop_inflight: DropInflightOption = False
    accept_session_settings: SessionSettingsOption = False
    place: FromOption = ""
    claim: ClaimOption = False
    from_snapshot: FromSnapshotOption = None

    def start_options(self) -> StartOptions:
        """Return these options in the form that a driver takes.

        Raises:
            InvalidConfiguration: the options contradict each other.
        """
        from state_runtime.snapshot.locate import own_restore_point
        from stillstate.orchestration.config.begin_at import BeginAt
        from stillstate.orchestration.config.start_options import StartOptions

        wanted = own_restore_point(self.from_snapshot) if self.from_snapshot is not None else None
        return StartOptions(
            takeover=self.takeover,
            until_idle=self.until_idle,
            allow_dropped_state=self.allow_dropped_state,
            allow_drained=self.allow_drained,
            take_output=self.take_output,
            drop_inflight=self.drop_inflight,
            accept_session_settings=self.accept_session_settings,
            begin=BeginAt(self.place, self.claim, wanted),
        )


def with_begin_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take `options: BeginOptions`, each field of which is an option of the command line.

    Typer reads a command's signature: there, one parameter for each field replaces `options`.
    """
    names = [f.name for f in fields(BeginOptions)]

    def wrapped(**given: Any) -> None:
        options = BeginOptions(**{name: given.pop(name) for name in names})
        command(**given, options=options)

    parameters: list[inspect.Parameter] = []
    for parameter in _parameters(command):
        parameters.extend(_parameters(BeginOptions) if parameter.name == "options" else [parameter])
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return wrapped


def _parameters(of: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return parameters with evaluated types, not their text: Typer reads them where the names are not defined."""
    hints = get_type_hints(of, include_extras=True)
    given = inspect.signature(of).parameters.values()
    return [p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY) for p in given]
