"""The stream that a run is about."""

from collections.abc import Collection
from typing import Final

from state_runtime.base.errors import InvalidConfiguration

__all__ = ["chosen"]

_NAMED_MAX: Final = 5


def chosen(asked: str, selected: Collection[str]) -> str:
    """Return the one stream of a run: the one that its configuration names, else the one whose assets were selected.

    Only one, because a run takes the slot of one stream among runs (`dagster.yaml`): a run of two would take neither's.

    Raises:
        InvalidConfiguration: no stream is meant, or several.
    """
    if asked:
        if asked not in selected:
            raise InvalidConfiguration(f"stream {asked[:80]!r} is not one of the selected streams. {_HOW}")
        return asked
    if len(selected) != 1:
        named = ", ".join(sorted(selected)[:_NAMED_MAX])
        raise InvalidConfiguration(f"{len(selected)} streams are selected ({named} …), and a run is about one. {_HOW}")
    return next(iter(selected))


_HOW: Final = "Give its name as `stream` in the run's configuration, or select the assets of one stream"
