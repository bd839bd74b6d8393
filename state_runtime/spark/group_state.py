"""`applyInPandasWithState` as a processor in the pandas flavour: a value state, and a timer for the timeout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from pyspark.sql import types as T
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from state_runtime.spark.internals import private, private_of

__all__ = ["GroupFunction"]

_NO_TIMEOUT: Final = "NoTimeout"
_EVENT_TIME: Final = "EventTimeTimeout"


class GroupFunction(StatefulProcessor):
    """The user's function `(key, pandas frames, state) -> pandas frames`.

    Args:
        columns: that the function gets.
        timeout: as pyspark spells it.
    """

    def __init__(
        self, function: Callable[..., Any], schema: T.StructType, timeout: str, columns: Sequence[str]
    ) -> None:
        self.function = function
        self.schema = schema
        self.timeout = timeout
        self.columns = list(columns)

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", self.schema)
        # A key may have a timeout and no value.
        self.known = handle.getValueState("known", "is_defined boolean, timeout_ms long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        yield from self._call(key, (frame[self.columns] for frame in rows), timerValues, timed_out=False)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        import pandas as pd

        nothing = iter([pd.DataFrame({name: [] for name in self.columns})])
        yield from self._call(key, nothing, timerValues, timed_out=True)

    def _call(self, key: Any, frames: Iterator[Any], times: Any, *, timed_out: bool) -> Iterator[Any]:
        is_defined, timer_ms = self.known.get() or (False, -1)
        is_event, has_clock = self.timeout == _EVENT_TIME, self.timeout != _NO_TIMEOUT
        watermark_ms = times.getCurrentWatermarkInMs() if is_event else -1
        state = private_of("pyspark.sql.streaming.state", "GroupState")(
            optionalValue=tuple(self.value.get() or ()) if is_defined else None,
            batchProcessingTimeMs=times.getCurrentProcessingTimeInMs() if has_clock else 0,
            eventTimeWatermarkMs=watermark_ms or -1,
            timeoutConf=self.timeout,
            hasTimedOut=timed_out,
            watermarkPresent=is_event,
            defined=is_defined,
            updated=False,
            removed=False,
            timeoutTimestamp=-1,  # each call sets it anew, or has none
            keyAsUnsafe=b"",
            valueSchema=self.schema,
        )
        yield from self.function(key, frames, state)
        # As in Spark what the function did to the state counts when all of its rows are out.
        wanted_ms = private(state, "_timeout_timestamp")
        if private(state, "_removed"):
            self.value.clear()
            is_defined = False
        elif private(state, "_updated"):
            self.value.update(tuple(private(state, "_value")))
            is_defined = True
        # There a timeout is due behind its time, here a timer is due at it.
        if timer_ms not in (-1, wanted_ms):
            self.handle.deleteTimer(timer_ms + 1)
        if wanted_ms != -1 and (wanted_ms != timer_ms or timed_out):
            self.handle.registerTimer(wanted_ms + 1)
        if is_defined or wanted_ms != -1:
            self.known.update((is_defined, wanted_ms))
        else:
            self.known.clear()

    def close(self) -> None:
        """Nothing is open."""
