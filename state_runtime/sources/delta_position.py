"""A position in a Delta table: its form in snapshots; pure.

It names the version that is read next, and how many of its files have been read: a batch may end within a version.
The form names the table's id, which Delta gives to a table when it is made: another table at the same place has
another one.

    {"version": 1, "delta": {"table": "853e5bde-…", "next": 7, "files": 2}}

`"whole": true` beside it says that the files are all those of the table at that version: where a job begins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from state_runtime.base.errors import CorruptData

__all__ = ["DeltaPosition"]

_VERSION: Final = 1
_NUMBER_MAX: Final = 2**62
_ID_CHARACTERS_MAX: Final = 200


@dataclass(frozen=True)
class DeltaPosition:
    """What is read next of a table.

    Attributes:
        table: its id.
        next: the version.
        files: of that version, in the order of `delta_commits.py`, that have been read.
        is_whole: the files are all that the table has at that version, and not those that the version adds.
    """

    table: str
    next: int
    files: int = 0
    is_whole: bool = False

    def behind(self) -> DeltaPosition:
        """Return the position behind this version."""
        return DeltaPosition(self.table, self.next + 1)

    def within(self, files: int) -> DeltaPosition:
        """Return the position behind some of this version's files."""
        return replace(self, files=files)

    def to_json(self) -> dict[str, Any]:
        """Return the form in snapshots."""
        found: dict[str, Any] = {"table": self.table, "next": self.next, "files": self.files}
        return {"version": _VERSION, "delta": {**found, "whole": True} if self.is_whole else found}

    @staticmethod
    def from_json(document: Any) -> DeltaPosition:
        """Read the form in snapshots.

        Raises:
            CorruptData: it is none.
        """
        found = document.get("delta") if isinstance(document, dict) and document.get("version") == _VERSION else None
        if not isinstance(found, dict):
            raise _not_a_position(document)
        table, is_whole = found.get("table"), found.get("whole", False)
        numbers = [found.get("next"), found.get("files")]
        if not isinstance(table, str) or not 0 < len(table) <= _ID_CHARACTERS_MAX or type(is_whole) is not bool:
            raise _not_a_position(document)
        if not all(type(number) is int and 0 <= number < _NUMBER_MAX for number in numbers):
            raise _not_a_position(document)
        return DeltaPosition(table, found["next"], found["files"], is_whole)


def _not_a_position(document: Any) -> CorruptData:
    return CorruptData(
        f"the snapshot's position of a Delta table cannot be read: {str(document)[:200]}. Restore the snapshot from a "
        "copy, or start from an older one"
    )
