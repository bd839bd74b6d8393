"""The savepoint that a schedule or a person requests in Dagster; a schedule's is skipped if nothing is new.

If a driver dies while it has the request, is recovered, or hands over to another run, the request is lost: a request to
one run does not apply to the next. So it is requested again, under a name that a second request cannot spoil:

    left by the first request            then
    nothing                              the same name is requested again
    REQUESTED, of a run that is over     another name: the next run abandons the first one
    IN_PROGRESS, COMPLETED               that one is waited for; if its owner is gone, this process resumes it

The request goes to the run that has the job by then. If the job is still down, its newest snapshot is saved: its
recovery continues from that snapshot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, Final, TypeVar

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.errors import JobNotFound, MissingSnapshot, StillstateError, Unavailable, can_pass, check
from state_runtime.maintenance.copy.savepointer import Savepointer
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.control import ControlRequest
from state_runtime.snapshot.savepoint_record import (
    SavepointFormat,
    SavepointRecord,
    SavepointState,
    SavepointThen,
    list_savepoints,
    read_savepoint,
)
from stillstate.orchestration.running.make_savepoint import failed
from stillstate.orchestration.text import duration_text

__all__ = ["PATIENCE_S", "SavepointWish", "periodic_savepoint", "requested_savepoint"]

PATIENCE_S: Final = 300.0
"""From the first failure on. A supervisor brings a driver back within seconds and Dagster within a minute. A store that
does not answer for longer should be reported, and the run has a slot that other jobs wait for."""
_PAUSE_FIRST_S: Final = 1.0
_PAUSE_MAX_S: Final = 30.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SavepointWish:
    """The request of a person; the fields are those of `Savepointer.make`."""

    name: str | None = None
    then: SavepointThen = "continue"
    tags: tuple[str, ...] = ()
    note: str = ""
    format: SavepointFormat = "native"
    independent: bool = False
    drain_inflight: bool = False


def requested_savepoint(
    maker: Savepointer,
    wish: SavepointWish,
    *,
    clock: Clock = SYSTEM_CLOCK,
    poll: Callable[[float], object] | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> SavepointRecord:
    """Make the savepoint that a person requests, also if nothing is new. Wait up to `PATIENCE_S` for faults that pass
    by themselves.

    Returns:
        The record, COMPLETED.

    Raises:
        SavepointExists: the job has one of that name. Unavailable: it could not be made, or not in that time. And the
            errors of `Savepointer.make`.
    """
    name = maker.new_name() if wish.name is None else wish.name
    asked: dict[str, Any] = {**vars(wish), "name": name, "trigger": "user"}
    ways: Iterator[Callable[..., SavepointRecord | ControlRequest]] = chain(
        [maker.make],
        repeat(maker.make_or_join),  # by then the name may be taken by the savepoint that the first call has requested
    )
    return _repeated(lambda: _completed(next(ways)(**asked), ("FAILED", "ABANDONED")), clock, poll, say)


def periodic_savepoint(
    catalog: Catalog,
    maker: Savepointer,
    tags: tuple[str, ...],
    *,
    clock: Clock = SYSTEM_CLOCK,
    poll: Callable[[float], object] | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> SavepointRecord | str:
    """Make a savepoint, named by the time; if the job does not run, of its newest snapshot. Wait up to `PATIENCE_S` for
    faults that pass by themselves.

    Args:
        poll: waits; returns at once in tests.
        say: gets a line on why it is requested again.

    Returns:
        The record, COMPLETED; or why none was made: there is nothing to save, or nothing new since the last one.

    Raises:
        Unavailable: it could not be made, or not in that time. And the errors of `Savepointer.make`.
    """
    names = [maker.new_name()]
    return _repeated(lambda: _ask(catalog, maker, names, tags), clock, poll, say)


def _repeated(
    ask: Callable[[], T], clock: Clock, poll: Callable[[float], object] | None, say: Callable[[str], object]
) -> T:
    """Ask until it is done, or until `PATIENCE_S` are over since the first failure that may pass."""
    wait: Callable[[float], object] = threading.Event().wait if poll is None else poll
    began_s: float | None = None
    tries = 0
    while True:
        try:
            return ask()
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
    """The savepoint has failed after every attempt of its maker."""


def _ask(catalog: Catalog, maker: Savepointer, names: list[str], tags: tuple[str, ...]) -> SavepointRecord | str:
    """Ask once.

    Args:
        names: that were requested; another is added if the last one cannot be used any more.

    Raises:
        _NotMade: the savepoint has failed. Other `Unavailable`: repeat it.
    """
    skipped = _nothing_to_save(catalog, names)
    if skipped is not None:
        return skipped
    if _is_void(catalog, maker, names[-1]):
        names.append(maker.new_name())
    return _completed(maker.make_or_join(names[-1], trigger="schedule", tags=tags, note="made by Dagster"), ("FAILED",))


def _completed(made: SavepointRecord | ControlRequest, final: Sequence[SavepointState]) -> SavepointRecord:
    """Return the record, if it is COMPLETED.

    Raises:
        _NotMade: it is in one of the states `final`. Other `Unavailable`: repeat it.
    """
    check(isinstance(made, SavepointRecord), "a savepoint that is waited for is made")
    assert isinstance(made, SavepointRecord)
    problem = failed(made)
    if problem is None:
        return made
    raise _NotMade(str(problem)) if made.state in final else problem


def _nothing_to_save(catalog: Catalog, ours: list[str]) -> str | None:
    """Return why no savepoint is made, None if one is made."""
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
    """Whether a name is taken by a savepoint that will never be made."""
    try:
        record = read_savepoint(catalog.root, name)
    except MissingSnapshot:
        return False
    return record.state == "ABANDONED" or (record.state == "REQUESTED" and not maker.is_term_live(record.term))
