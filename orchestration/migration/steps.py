"""The order of a migration's steps, and the judgement of a new run that is watched; pure.

step        its effect                                          done              it failed
save        a savepoint; then the driver stops                  verify            start-old
verify      the savepoint is read and compared                  go-back or start  start-old
move        the root is copied to another store, and counts     start             start-old
copy        of a fork: its first snapshot is in its own root    verify            clear
go-back     the job goes back, in place, to the named snapshot  start             stop-new
start       a driver starts, with the target settings           watch             stop-new
watch       its first checkpoints come                          kept              stop-new
leave       of a job that was moved: the old root is deleted    kept              raised: repeat it
stop-new    all processes of the new run are ended              restore           raised: repeat it
go-home     of a job that was moved: the new root is deleted    start-old         raised: repeat it
restore     in place to the savepoint, if there is newer state  start-old         raised: repeat it
start-old   a driver starts, with the settings before           rolled-back       raised: repeat it
clear       of a fork: the copy is removed                      rolled-back       raised: repeat it

A fork's `save` makes a savepoint of another job, which continues to run, and is left out if no savepoint is made;
`verify` reads the copy. A fork has no driver to start again: each step before `kept` that fails leads to `clear`.

An error that can pass by itself (the store does not answer) is no failure: it is raised, and the migration continues
from that step when it is resumed. A store that refuses (no room, no permission) has answered: that is a failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.migration import Migration, MigrationStep
from state_runtime.snapshot.term_files import RunStatus
from stillstate.orchestration.launchers.port import Liveness
from stillstate.orchestration.text import counted_text

__all__ = ["Watched", "has_same_state", "judge_watched", "step_after", "step_back_from"]

_TAKEN_BACK_BY: Final[dict[MigrationStep, MigrationStep]] = {
    "save": "start-old",
    "verify": "start-old",
    "move": "start-old",
    "go-back": "stop-new",
    "start": "stop-new",
    "watch": "stop-new",
}
"""The step that follows a failed one; a failure of the other steps is raised."""

_TAKEN_BACK_BY_OF_A_FORK: Final[dict[MigrationStep, MigrationStep]] = {
    "save": "clear",
    "copy": "clear",
    "verify": "clear",
    "start": "stop-new",
    "watch": "stop-new",
}

_DONE_OF_A_FORK: Final[dict[MigrationStep, MigrationStep]] = {
    "save": "copy",
    "copy": "verify",
    "stop-new": "clear",
    "clear": "rolled-back",
}

_DONE_OF_A_MOVE: Final[dict[MigrationStep, MigrationStep]] = {
    "verify": "move",
    "watch": "leave",
    "stop-new": "go-home",
}

_DONE: Final[dict[MigrationStep, MigrationStep]] = {
    "save": "verify",
    "verify": "start",
    "move": "start",
    "go-back": "start",
    "start": "watch",
    "watch": "kept",
    "leave": "kept",
    "stop-new": "restore",
    "restore": "start-old",
    "go-home": "start-old",
    "start-old": "rolled-back",
}


def step_after(migration: Migration) -> MigrationStep:
    """Return the step that follows a finished one."""
    if migration.fork_of and migration.step in _DONE_OF_A_FORK:
        return _DONE_OF_A_FORK[migration.step]
    if migration.step == "verify" and migration.go_back_to:
        return "go-back"
    if migration.to_root and migration.step in _DONE_OF_A_MOVE:
        return _DONE_OF_A_MOVE[migration.step]
    return _DONE[migration.step]


def step_back_from(migration: Migration) -> MigrationStep | None:
    """Return the step that follows a failed one; None: the failure is raised, and the step is repeated."""
    return (_TAKEN_BACK_BY_OF_A_FORK if migration.fork_of else _TAKEN_BACK_BY).get(migration.step)


@dataclass(frozen=True)
class Watched:
    """The result of a look at the new run; `is_up` None: nothing is decided yet.

    Attributes:
        is_stopped: it is not up because a person has stopped it: the job stays stopped.
    """

    is_up: bool | None
    why: str = ""
    is_stopped: bool = False


def judge_watched(
    status: RunStatus | None, migration: Migration, process: Liveness, *, made: int, is_late: bool
) -> Watched:
    """Judge whether the new run is up, or will not come up. Its checkpoints count: each follows an epoch in which every
    shard was restored, also while no rows come (`StartedBy.on_trial`). Such an epoch comes once: if the source has
    nothing new when the deadline is over, one checkpoint is enough.

    Args:
        status: of the newest run.
        process: what is known of its process.
        made: checkpoints that runs of this migration have committed.
        is_late: the deadline is over.
    """
    wanted = migration.checkpoints
    if made >= wanted:
        return Watched(
            True, f"{made} checkpoints of the new run" if made > 1 else "the first checkpoint of the new run"
        )
    if status is not None and status.term >= migration.run_term:
        who = f"term {status.term}"
        if status.state in ("finished", "stopped"):
            why = f"{who} {status.state} after {counted_text(made, 'checkpoint')}"
            return Watched(made > 0, why, is_stopped=not made and status.state == "stopped")
        if process != "restarting" and (status.state in ("failed", "fenced") or process == "dead"):
            return Watched(
                False,
                f"{who} ended after {counted_text(made, 'checkpoint')}: {status.message or 'its process is gone'}",
            )
        if is_late and made and status.quiet:
            return Watched(True, f"{counted_text(made, 'checkpoint')} of the new run, whose source has nothing new")
    if is_late:
        return Watched(False, f"{made} of {wanted} checkpoints within {migration.timeout_s:g} s")
    return Watched(None)


def has_same_state(one: Manifest, other: Manifest) -> bool:
    """Whether two snapshots of a job have the same state and input position; a start alone changes neither."""
    return all(
        getattr(one, field) == getattr(other, field)
        for field in ("segments", "layers", "shards", "source", "time", "drained")
    )
