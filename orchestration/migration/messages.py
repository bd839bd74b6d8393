"""Messages for people about a migration or a fork: its next step, and its result."""

from __future__ import annotations

from typing import Final

from state_runtime.snapshot.migration import Migration, MigrationStep
from stillstate.orchestration.migration.effects import RolledBack

__all__ = ["error_of", "said_of"]

_SAID_OF_A_FORK: Final[dict[MigrationStep, str]] = {
    "save": "making a savepoint of the other job, which goes on running",
    "verify": "reading the copy",
    "start": "starting the new job",
    "watch": "waiting for its first checkpoint",
}
_SAID: Final[dict[MigrationStep, str]] = {
    "save": "making a savepoint, and stopping the driver",
    "verify": "reading the savepoint",
    "move": "carrying the job to its new place",
    "go-back": "going back, in place",
    "start": "starting the new run",
    "watch": "waiting for its first checkpoints",
    "leave": "giving the old place up",
    "go-home": "taking it back: giving the new place up",
    "stop-new": "taking it back: ending the new run",
    "restore": "taking it back: looking whether it has committed",
    "start-old": "taking it back: starting the job as it was",
    "copy": "copying what the new job begins with",
    "clear": "undo: remove the copied objects",
}


def said_of(migration: Migration) -> str:
    """Return the text of the effect of a step, for people."""
    of_a_fork = _SAID_OF_A_FORK.get(migration.step) if migration.fork_of else None
    return of_a_fork or _SAID[migration.step]


def error_of(migration: Migration, job: str, failure: str = "") -> RolledBack | None:
    """Return the error that an ended migration ends its caller with; None if it was kept.

    Args:
        failure: of the migrator; empty: the recorded one.
    """
    if migration.step == "kept":
        return None
    if migration.fork_of:
        return RolledBack(
            f"job {job!r} was not forked from {migration.fork_of!r}, which goes on; the objects copied for it "
            f"were removed. {failure or migration.reason}"
        )
    as_it_was = "runs again" if migration.was_running else "is stopped"
    return RolledBack(
        f"job {job!r} was not migrated to {migration.target} and {as_it_was} with {migration.before}. "
        f"{failure or migration.reason}"
    )
