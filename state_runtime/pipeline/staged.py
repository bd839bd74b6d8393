"""The files that tasks staged for the sinks of an epoch; values only, pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from state_runtime.snapshot.manifest import StagedFile, StagedOutput

__all__ = ["StagedFiles", "staged_outputs"]


@dataclass(frozen=True)
class StagedFiles:
    """The files that one task staged for one sink."""

    sink: str
    files: tuple[StagedFile, ...]


def staged_outputs(acknowledged: Sequence[StagedFiles], sinks: Iterable[str], epoch: int) -> tuple[StagedOutput, ...]:
    """Return per sink, by name, the files that all tasks of an epoch staged."""
    return tuple(
        StagedOutput(name, epoch, tuple(f for staged in acknowledged if staged.sink == name for f in staged.files))
        for name in sinks
    )
