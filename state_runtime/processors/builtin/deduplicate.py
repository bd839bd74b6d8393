"""The built-in `deduplicate`: the first row of each key, once; without a Python loop over rows or keys.

As Spark's `dropDuplicates` and `dropDuplicatesWithinWatermark`, row for row:

- Without event time the state holds every key that was ever seen.
- With event time, rows at or below the late watermark are dropped. A row without event time is never late.
- Event time among the keys: the watermark removes a key once it has passed the key's own time, because a row of that
  key would be late. A watermark never passes a null time.
- Within the watermark: a key is kept for the allowed delay, counted from the event time of its first row. Spark takes
  a null time for 1970 there, so such a key is removed as soon as the watermark moves; here, too.
- Other event time: only late rows are dropped, and the state grows, as in Spark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from state_runtime.base.errors import InvalidPipeline
from state_runtime.processors.event_time import check_event_time, micros_of, millis_up, nullable_millis, plus
from state_runtime.processors.user.keyed_batch import KeyedBatch
from state_runtime.processors.user.vectorized import TimeMode
from state_runtime.state.ordering import stable_order
from state_runtime.state.table import Mask, Positions, Time

__all__ = ["SEEN", "Deduplicate", "plan_deduplicate"]

SEEN = "seen"


@dataclass(frozen=True)
class Deduplicate:
    """Emits whole rows, in source order. The state holds only the keys.

    Attributes:
        event_time: column that decides when a key is removed; never if empty.
        delay_ms: within the watermark, how long after its event time a key is kept; None if event time is a key.
    """

    event_time: str = ""
    delay_ms: int | None = None

    @property
    def time_mode(self) -> TimeMode:
        """The clock that removes keys."""
        return "event" if self.event_time else "none"

    @property
    def state_time(self) -> Time:
        """Time column of the state."""
        return "due" if self.event_time else ""

    @property
    def modes(self) -> str:
        """The settings that cannot change while there is state: how long keys are kept."""
        if not self.event_time:
            return ""
        return f"by {self.event_time}" if self.delay_ms is None else f"within {self.delay_ms} ms of {self.event_time}"

    def process(self, batch: KeyedBatch) -> pa.RecordBatch | None:
        """Return the first row of each key that the state does not have."""
        found = batch.look_up(SEEN).found
        new = ~found
        if not bool(new.any()):
            return None
        first = batch.starts[new]
        if self.event_time:
            self._remember(batch, first, new, found)
        else:
            batch.write(SEEN, {}, new, found)
        return batch.rows.take(pa.array(first[stable_order(batch.sequence[first])]))

    def _remember(self, batch: KeyedBatch, first: Positions, new: Mask, found: Mask) -> None:
        """Store the keys that the watermark of this epoch would not remove at its end."""
        micros, valid = micros_of(batch.rows.column(self.event_time).take(pa.array(first)))
        if self.delay_ms is None:
            due = millis_up(micros)
        else:
            due, valid = plus(millis_up(micros), self.delay_ms), None
        stays = due > batch.watermark_ms
        if valid is not None:
            stays |= ~valid
        where = new.copy()
        where[new] = stays
        batch.write(SEEN, {}, where, found, due=nullable_millis(due, valid).filter(pa.array(stays)))


def plan_deduplicate(
    keys: Sequence[str], event_time: str, delay_ms: int, within_watermark: bool, schema: pa.Schema, uid: str
) -> Deduplicate:
    """Choose the form of deduplication.

    Args:
        event_time: the stream's event-time column; empty if it has none.
        delay_ms: allowed delay of that column.
        within_watermark: Spark's `dropDuplicatesWithinWatermark`.

    Raises:
        InvalidPipeline: the column is missing or no timestamp, or `within_watermark` is set without event time.
    """
    where = f"operator {uid!r}, deduplicate"
    if not event_time:
        if within_watermark:
            raise InvalidPipeline(
                f"{where}: within_watermark needs a stream with a watermark; call Spark's withWatermark on the stream "
                "that the job reads"
            )
        return Deduplicate()
    check_event_time(schema, event_time, where)
    if within_watermark:
        return Deduplicate(event_time, delay_ms)
    return Deduplicate(event_time) if event_time in keys else Deduplicate()
