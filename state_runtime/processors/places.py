"""Places of rows in states that keep many for a key, and how many of them are read at once."""

from __future__ import annotations

import numpy as np

from state_runtime.base.errors import InvalidData
from state_runtime.processors.operator import EpochClock
from state_runtime.state.table import Hashes

__all__ = ["STORED_ROWS_PER_READ", "Places"]

PLACE_BITS = 28
STORED_ROWS_PER_READ = 1 << 20
"""Stored rows of touched keys are read in pieces of about this size; a single key with more rows is one piece."""


class Places:
    """Unique places of an epoch's new rows: the epoch is in the high bits, so that storing need not read the stored
    places."""

    def __init__(self, uid: str, clock: EpochClock) -> None:
        self._uid = uid
        self._base = np.uint64(clock.epoch << PLACE_BITS)
        self._taken = 0

    def next(self, count: int) -> Hashes:
        """Return `count` places, above all earlier ones; both sides share them, which does no harm.

        Raises:
            InvalidData: the epoch has no places left.
        """
        first, self._taken = self._taken + 1, self._taken + count
        if self._taken >= 1 << PLACE_BITS:
            raise InvalidData(
                f"operator {self._uid!r}: {self._taken:,} rows to keep in one task and epoch; at most 2^{PLACE_BITS} - "
                "1 have a place. Read less per epoch or use more shards"
            )
        places: Hashes = np.arange(first, self._taken + 1, dtype=np.uint64) | self._base
        return places
