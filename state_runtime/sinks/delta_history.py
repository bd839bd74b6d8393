"""Which version of a Delta table has no commit of epochs that a job went back behind; pure, from the table's log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Actions", "BeforeLeft", "ForeignCommit", "LogCleaned", "before_left"]

Actions = Sequence[Mapping[str, Any]]
"""Of one commit, as its file in the log has them, a line each."""


class ForeignCommit(Exception):
    """Another writer has changed rows behind, or between, the commits that are to go.

    Attributes:
        version: of its commit.
        operation: that its commit names.
        first: the oldest version that is known to go.
    """

    def __init__(self, version: int, operation: str, first: int) -> None:
        super().__init__(version, operation, first)
        self.version, self.operation, self.first = version, operation, first


class LogCleaned(Exception):
    """The log does not reach back to the newest commit of an epoch that stays."""


@dataclass(frozen=True)
class BeforeLeft:
    """What a walk through the log has found.

    Attributes:
        version: the newest one without a commit of such an epoch; the table is as it was then once it is restored.
        commits: how many such commits are in the table's history now; 0: there is nothing to do.
    """

    version: int
    commits: int


def before_left(
    newest: int, actions_of: Callable[[int], Actions | None], writer: str, left: Sequence[tuple[int, int]]
) -> BeforeLeft:
    """Walk from the newest version back to the newest commit of an epoch that stays.

    What a RESTORE took out is passed over: behind one the walk goes on at the version that was restored. Commits that
    change no row (an optimized table, a setting) do not count.

    Args:
        actions_of: returns the actions of a version's commit; None if the log has it no more.
        writer: whose transactions are looked at.
        left: closed ranges of its epochs.

    Raises:
        ForeignCommit: the table cannot be restored without losing another's rows.
        LogCleaned: the walk came to the log's end.
    """
    version, found, first, foreign = newest, 0, newest + 1, None
    while version >= 0:
        actions = actions_of(version)
        if actions is None:
            raise LogCleaned
        of = _operation(actions)
        epoch = max((a["txn"]["version"] for a in actions if a.get("txn", {}).get("appId") == writer), default=None)
        if epoch is not None and not any(low <= epoch <= high for low, high in left):
            break
        if of is not None and of.get("operation") == "RESTORE":
            version = int(of["operationParameters"]["version"])
            continue
        if _changes_rows(actions):
            if epoch is None:
                foreign = foreign or (version, str((of or {}).get("operation", "")))
            else:
                found, first = found + 1, version
                if foreign is not None:
                    raise ForeignCommit(*foreign, first)
        version -= 1
    return BeforeLeft(first - 1, found)


def _operation(actions: Actions) -> Mapping[str, Any] | None:
    return next((action["commitInfo"] for action in actions if "commitInfo" in action), None)


def _changes_rows(actions: Actions) -> bool:
    return any(
        action[kind].get("dataChange", True) for action in actions for kind in ("add", "remove") if kind in action
    )
