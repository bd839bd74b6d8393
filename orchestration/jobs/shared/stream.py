"""Which stream a run is about, and what the run is then called by."""

from collections.abc import Collection
from typing import Any, Final

import dagster as dg

from state_runtime.base.errors import InvalidConfiguration
from stillstate.orchestration.workers import add_tags

__all__ = ["StreamConfig", "chosen", "tag_run"]

_NAMED_MAX: Final = 5


class StreamConfig(dg.Config):
    """Which stream.

    Attributes:
        stream: the name of the job in `stillstate.yaml`.
    """

    stream: str


def chosen(asked: str, selected: Collection[str]) -> str:
    """The one stream of a run: the one that its configuration names, else the one whose assets were selected.

    One, because a run holds the place of a stream among runs (`dagster.yaml`): two in one run would hold neither's.

    Raises:
        InvalidConfiguration: none is meant, or several.
    """
    if asked:
        if asked not in selected:
            raise InvalidConfiguration(f"stream {asked[:80]!r} is none of the streams that were selected. {_HOW}")
        return asked
    if len(selected) != 1:
        named = ", ".join(sorted(selected)[:_NAMED_MAX])
        raise InvalidConfiguration(f"{len(selected)} streams are selected ({named} …), and a run is about one. {_HOW}")
    return next(iter(selected))


_HOW: Final = "Give its name as `stream` in the run's configuration, or select the assets of one stream"


def tag_run(context: Any, tag: str, value: str) -> None:
    """Give a run that a person launched the tag that requests of sensors and schedules come with.

    From here on the queue counts it. Two that are launched by hand in the same moment may both begin: what keeps them
    from doing harm is terms, records and plans on the store, not Dagster.
    """
    if context.run.tags.get(tag) != value:
        add_tags(context.instance, context.run.run_id, {tag: value})
