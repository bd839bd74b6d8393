"""The savepoint that a schedule asks for: made, or skipped with a word.

A driver that dies while it is asked, is brought back, or hands over to another run takes the request with it: what was
asked of one run does not happen in the next. So it is asked again, by a name that a second request cannot spoil:

    what the first request left          then
    nothing                              the same name is asked for again
    REQUESTED, of a run that is over     another name: the next run gives the first one up
    IN_PROGRESS, COMPLETED               that one is waited for; if nobody goes on with it, this process does

It is asked of whoever has the job by then. Of a job that is still down the newest snapshot is saved: that is what its
recovery goes on from.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from orchestration.running.savepoints import Savepointer, failed
from orchestration.text import duration_text
from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.errors import JobNotFound, MissingSnapshot, StillstateError, Unavailable, can_pass
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.savepoint import SavepointRecord, list_savepoints, read_savepoint

__all__ = ["PATIENCE_S", "periodic_savepoint"]

PATIENCE_S: Final = 300.0
"""From the first failure on. A supervisor brings a driver back within seconds and Dagster within a minute; a store that
is away for longer should be told of, and the run has a slot that other jobs wait for."""
_PAUSE_FIRST_S: Final = 1.0
_PAUSE_MAX_S: Final = 30.0


def periodic_savepoint(
    catalog: Catalog,
    maker: Savepointer,
    tags: tuple[str, ...],
    *,
    clock: Clock = SYSTEM_CLOCK,
    poll: Callable[[float], object] | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> SavepointRecord | str:
    """Make a savepoint, named by the time; of a job that does not run, of its newest snapshot. What passes by itself is
    waited for, for `PATIENCE_S`.

    Args:
        poll: waits; returns at once in tests.
        say: told in a line why it is asked again.

    Returns:
        The record, COMPLETED; or why none was made: there is nothing to save, or nothing new since the last one.

    Raises:
        Unavailable: it could not be made, or not in that time. And what `Savepointer.make` raises.
    """
    wait: Callable[[float], object] = threading.Event().wait if poll is None else poll
    names = [maker.new_name()]
    began_s: float | None = None
    tries = 0
    while True:
        try:
            return _ask(catalog, maker, names, tags)
        except StillstateError as error:
            now_s = clock.monotonic_s()
            began_s = now_s if began_s is None else began_s
            tries += 1
            pause_s = min(_PAUSE_MAX_S, _PAUSE_FIRST_S * 2.0 ** min(tries - 1, 32))
            if not can_pass(error) or isinstance(error, _NotMade):
                raise
            if now_s + pause_s > began_s + PATIENCE_S:
                error.add_note(f"it was asked for {tries} times within {duration_text(now_s - began_s)}; none helped")
                raise
            say(f"{error}. It is asked for again in {duration_text(pause_s)}")
        wait(pause_s)


class _NotMade(Unavailable):
    """Whoever made it has tried what there was to try."""


def _ask(catalog: Catalog, maker: Savepointer, names: list[str], tags: tuple[str, ...]) -> SavepointRecord | str:
    """Ask once.

    Args:
        names: that were asked for; another is added where the last one can be nobody's any more.

    Raises:
        _NotMade: the savepoint has failed. Other `Unavailable`: repeat it.
    """
    skipped = _nothing_to_save(catalog, names)
    if skipped is not None:
        return skipped
    if _is_void(catalog, maker, names[-1]):
        names.append(maker.new_name())
    made = maker.make_or_join(names[-1], trigger="schedule", tags=tags, note="made by Dagster")
    problem = failed(made)
    if problem is None:
        return made
    raise _NotMade(str(problem)) if made.state == "FAILED" else problem


def _nothing_to_save(catalog: Catalog, ours: list[str]) -> str | None:
    """Why none is made, None if one is."""
    try:
        catalog.job_info()
    except JobNotFound as error:
        return str(error)
    newest = catalog.latest()
    if newest is None:
        return f"job {catalog.job!r} has no snapshot yet"
    for record in list_savepoints(catalog.root):
        if record.state == "COMPLETED" and record.snapshot_id == newest.snapshot_id and record.name not in ours:
            return f"savepoint {record.name!r} is of snapshot {newest.snapshot_id}, which is still the newest"
    return None


def _is_void(catalog: Catalog, maker: Savepointer, name: str) -> bool:
    """Whether a name is taken by what will never be made."""
    try:
        record = read_savepoint(catalog.root, name)
    except MissingSnapshot:
        return False
    return record.state == "ABANDONED" or (record.state == "REQUESTED" and not maker.is_term_live(record.term))
