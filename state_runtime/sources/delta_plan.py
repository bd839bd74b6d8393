"""How far a batch of a Delta table goes, and which files it has; pure but for the questions that it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from state_runtime.base.errors import CorruptData
from state_runtime.sources.delta_commits import TableFile
from state_runtime.sources.delta_position import DeltaPosition

__all__ = ["Files", "end_of_batch", "files_between", "in_parts"]

Files = Callable[[DeltaPosition], Sequence[TableFile]]
"""Returns all files of a position's version, in their order."""

_PART_BYTES: Final = 16 * 2**20
"""A task reads a hundred megabytes in a second; less than this is not worth a task of its own."""
_PART_FILES: Final = 64


def end_of_batch(
    start: DeltaPosition, newest: int, files: Files, files_max: int | None, *, whole_versions: bool
) -> DeltaPosition:
    """Return where a batch ends.

    Args:
        newest: the newest version of the table.
        files_max: of the batch; None: to the end.
        whole_versions: a batch ends with a version, however many files it has: changes of one commit come together.
    """
    at, left = start, files_max
    while at.next <= newest and (left is None or left > 0):
        waiting = _waiting(at, files)
        if left is not None and len(waiting) > left:
            if not whole_versions or at.is_whole:
                return at.within(at.files + left)
            # The first version of a batch is read whatever it has: else the stream would stand still.
            return at if at != start else at.behind()
        left = None if left is None else left - len(waiting)
        at = at.behind()
    return at


def files_between(start: DeltaPosition, end: DeltaPosition, files: Files) -> list[TableFile]:
    """Return the files of a batch."""
    found: list[TableFile] = []
    at = start
    while at.next < end.next:
        found += _waiting(at, files)
        at = at.behind()
    if at.next == end.next and end.files > at.files:
        found += _waiting(at, files)[: end.files - at.files]
    return found


def _waiting(at: DeltaPosition, files: Files) -> Sequence[TableFile]:
    found = files(at)
    if at.files > len(found):
        raise CorruptData(
            f"the snapshot's position is behind file {at.files} of version {at.next} of a Delta table, which has "
            f"{len(found)}: its log was altered. Restore the log, or begin under another name of the source"
        )
    return found[at.files :]


def in_parts(files: Sequence[TableFile]) -> list[list[TableFile]]:
    """Return files in groups, each for one task."""
    parts: list[list[TableFile]] = []
    held = 0
    for file in files:
        if not parts or held + file.bytes > _PART_BYTES or len(parts[-1]) >= _PART_FILES:
            parts.append([])
            held = 0
        parts[-1].append(file)
        held += file.bytes
    return parts
