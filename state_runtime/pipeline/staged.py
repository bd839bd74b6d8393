"""The rows that tasks staged for the sinks of an epoch; values only, pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from state_runtime.snapshot.manifest import StagedFile, StagedOutput

__all__ = ["StagedFiles", "staged_outputs"]


@dataclass(frozen=True)
class StagedFiles:
    """What one task staged for one sink: files, or rows that the driver stages (driver/packed_outputs.py).

    Attributes:
        rows: few rows that are in no file yet, as a stream of Arrow; b"": none.
    """

    sink: str
    files: tuple[StagedFile, ...]
    rows: bytes = field(default=b"", repr=False)


def staged_outputs(acknowledged: Sequence[StagedFiles], sinks: Iterable[str], epoch: int) -> tuple[StagedOutput, ...]:
    """Return per sink, by name, the files that all tasks of an epoch staged."""
    return tuple(
        StagedOutput(name, epoch, tuple(f for staged in acknowledged if staged.sink == name for f in staged.files))
        for name in sinks
    )
