"""What the upkeep of a sink's place is told, and what it says; values only, pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from state_runtime.base.limits import MIB

__all__ = ["MIN_AGE_S", "TARGET_BYTES", "OutputUpkeep", "OutputWork"]

TARGET_BYTES: Final = 128 * MIB
MIN_AGE_S: Final = 3600.0
"""Epochs that were published later are left alone. Of a store without a rename a driver that was thought dead may still
be copying one of its last files to its name."""


@dataclass(frozen=True, kw_only=True)
class OutputUpkeep:
    """How output is kept in order.

    Attributes:
        target_bytes: of a new file.
        min_age_s: Parquet: epochs that were published later are left alone.
        history_s: Iceberg: snapshots that are older expire. (Delta tables say themselves how long they keep files.)
    """

    target_bytes: int = TARGET_BYTES
    min_age_s: float = MIN_AGE_S
    history_s: float = 5 * 86_400.0


@dataclass(frozen=True, kw_only=True)
class OutputWork:
    """What was done for one sink's place; of a plan, what would be.

    Attributes:
        place: for messages, without secrets.
        files, bytes: that readers saw before.
        inputs, input_bytes: of them, those that were written anew.
        outputs, output_bytes: that took their places; of a plan an estimate, and no bytes.
        rows: in them; 0 if it is not known.
        removed: files that were deleted because no version that is kept needs them.
        expired: versions that are not kept any more.
    """

    place: str
    files: int
    bytes: int
    inputs: int = 0
    input_bytes: int = 0
    outputs: int = 0
    output_bytes: int = 0
    rows: int = 0
    removed: int = 0
    expired: int = 0

    @property
    def files_after(self) -> int:
        """Files that readers see then."""
        return self.files - self.inputs + self.outputs
