"""When batches begin, in the form that a caller of `run` gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from state_runtime.base.errors import InvalidConfiguration

__all__ = ["every_s", "sparks_trigger"]

_SPARKS: Final = ("processingTime", "availableNow", "once")


def every_s(seconds: float) -> dict[str, Any]:
    """Return the trigger of a batch every `seconds`, as Spark's `DataStreamWriter.trigger` takes it."""
    return {"processingTime": f"{max(1, round(seconds * 1000))} milliseconds"}


def sparks_trigger(given: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Convert a trigger in Spark's form, or in that of stillstate.yaml, to what `DataStreamWriter.trigger` takes.

    Raises:
        InvalidConfiguration: it is neither.
    """
    if given is None or given == {}:
        return None
    if isinstance(given, Mapping) and len(given) == 1:
        ((name, value),) = given.items()
        if name in _SPARKS:
            return given
        if name == "available_now" and value is True:
            return {"availableNow": True}
        if name == "processing_time_s" and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return every_s(value)
    raise InvalidConfiguration(
        f'trigger={given!r} must be {{"processing_time_s": 1}} (a batch every second), {{"available_now": True}} (what '
        'is there now, then the end), the same in Spark\'s words ({"processingTime": "1 second"}, {"availableNow": '
        "True}), or None (as fast as possible)"
    )
