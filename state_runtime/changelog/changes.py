"""The changes that a task sends to the driver, and the cost of uploading them; pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from state_runtime.changelog.parts import PartEntry

__all__ = ["TaskChanges", "UploadTotals", "only_parts"]


@dataclass(frozen=True)
class UploadTotals:
    """The cost of uploads; it adds up.

    Attributes:
        uploads: objects.
        attempts: begun for them.
        bytes: of the objects.
        wait_ms: time spent waiting for room below the bound on bytes in flight.
        left_behind: objects of late or failed attempts that could not be deleted: garbage.
    """

    uploads: int = 0
    attempts: int = 0
    bytes: int = 0
    wait_ms: float = 0.0
    left_behind: int = 0

    def __add__(self, other: UploadTotals) -> UploadTotals:
        return UploadTotals(
            self.uploads + other.uploads,
            self.attempts + other.attempts,
            self.bytes + other.bytes,
            self.wait_ms + other.wait_ms,
            self.left_behind + other.left_behind,
        )


@dataclass(frozen=True)
class TaskChanges:
    """The changes of one attempt of one task, as its acknowledgement carries them.

    Attributes:
        inline: `inline[i]` are the bytes of `parts[i]`, or empty if the part is in an object that the task uploaded.
        uploads: the cost of uploading that object.
    """

    parts: tuple[PartEntry, ...] = ()
    inline: tuple[bytes, ...] = ()
    uploads: UploadTotals = field(default_factory=UploadTotals)

    @property
    def rows(self) -> int:
        return sum(p.rows for p in self.parts)

    @property
    def bytes(self) -> int:
        return sum(p.length for p in self.parts)


def only_parts(changes: Sequence[TaskChanges], digests: Collection[str]) -> list[TaskChanges]:
    """Return the changes without the parts of other digests."""
    kept = []
    for task in changes:
        pairs = [(part, body) for part, body in zip(task.parts, task.inline, strict=True) if part.digest in digests]
        if pairs:
            kept.append(TaskChanges(tuple(part for part, _ in pairs), tuple(body for _, body in pairs), task.uploads))
    return kept
