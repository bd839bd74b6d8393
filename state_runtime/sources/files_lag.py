"""How far a job is behind a folder that Spark's own file source reads: files, bytes, the age of the oldest.

The folder is listed beside the run, at most every half minute and for at most a tenth of the time. What the job has
read is in Spark's log of seen files, on the driver's disk; its new lines are read in between.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from state_runtime.base.clock import Clock
from state_runtime.base.errors import StillstateError
from state_runtime.base.source_state import SourceState
from state_runtime.sources.age_trend import AgeTrend
from state_runtime.sources.files_listed import Listed, kept_ms_of, listed, local_folder

__all__ = ["FilesLag", "folder_lags"]

_EVERY_S: Final = 30.0
_SHARE: Final = 0.1
_UNSURE_S: Final = 300.0
"""A folder of too many names, or one of which it is not certain what Spark takes, is seldom another one soon."""

SeenLines = Callable[[int, int], Iterable[str]]
"""Returns the lines of Spark's log of seen files, of the entries behind one up to another."""


def folder_lags(
    options: Iterable[Mapping[str, str]],
    scheme_of: Callable[[str], str | None],
    seen_lines: Callable[[int], SeenLines],
    clock: Clock,
) -> list[FilesLag | None]:
    """Return what asks those of a query's sources that are folders of this machine; None for each other one.

    Args:
        options: of all of its sources, in the order of its plan, with keys in lower case.
        scheme_of: returns the scheme of the file system that a path is of; None: unknown.
        seen_lines: of the source at a place of the plan.
    """
    folders = [(local_folder(of, scheme_of), kept_ms_of(of)) for of in options]
    return [
        None if folder is None else FilesLag(folder, kept_ms, seen_lines(place), clock)
        for place, (folder, kept_ms) in enumerate(folders)
    ]


class FilesLag:
    """Lists one folder; used by one thread.

    Args:
        folder: without a link or a pattern of Spark's.
        kept_ms: see `kept_ms_of`.
        seen_lines: of this source.
    """

    def __init__(self, folder: str, kept_ms: int | None, seen_lines: SeenLines, clock: Clock) -> None:
        self.state = SourceState(folder, unit="files")
        self._folder = folder
        self._kept_ms = kept_ms
        self._seen_lines = seen_lines
        self._clock = clock
        self._read_to = -1
        self._newest_ms = 0
        self._listed: dict[str, Listed] | None = None
        self._read: set[str] = set()
        self._due_s = clock.monotonic_s()
        self._trend = AgeTrend()

    def reads(self, offset: Any) -> bool:
        """Return whether a position is one of a file source."""
        return isinstance(offset, dict) and offset.keys() == {"logOffset"} and type(offset["logOffset"]) is int

    def look(self, offset: Any | None, now_ms: int) -> SourceState:
        """List the folder if it is time to, and return what is known now.

        Args:
            offset: up to where the job has read, one that it `reads`; None: it has not begun.
        """
        try:
            asked_at_ms = self.state.asked_at_ms
            if self._clock.monotonic_s() >= self._due_s:
                self._list()
                asked_at_ms = now_ms
            self._take(-1 if offset is None else int(offset["logOffset"]))
            known = replace(self.state, away_since_ms=0, said="", asked_at_ms=asked_at_ms)
            self.state = self._counted(known, now_ms)
        except (OSError, StillstateError, ValueError, KeyError) as error:
            since_ms = self.state.away_since_ms or now_ms
            said = f"source {self._folder!r} cannot be listed: {(str(error) or type(error).__name__).splitlines()[0]}"
            self.state = replace(self.state, away_since_ms=since_ms, said=said)
        return self.state

    def _list(self) -> None:
        began_s = self._clock.monotonic_s()
        try:
            found = listed(self._folder)
        finally:
            ended_s = self._clock.monotonic_s()
            self._due_s = ended_s + max(_EVERY_S, (ended_s - began_s) / _SHARE)
        if found is None:
            self._due_s += _UNSURE_S
        else:
            self._read &= found.keys()
        self._listed = found

    def _take(self, until: int) -> None:
        """Note what the job has read since the last time.

        Of the log's beginning only names that are there are kept. A position is older than the listing that comes with
        it, so a name of then that is not in the listing is gone; what the job reads later may be newer than it.
        """
        if until <= self._read_to or self._listed is None:
            return
        is_first, prefix = self._read_to < 0, self._folder.rstrip("/") + "/"
        for line in self._seen_lines(self._read_to, until):
            entry = json.loads(line)
            self._newest_ms = max(self._newest_ms, int(entry["timestamp"]))
            name = unquote(urlsplit(entry["path"]).path).removeprefix(prefix)
            if not is_first or name in self._listed:
                self._read.add(name)
        self._read_to = until

    def _counted(self, known: SourceState, now_ms: int) -> SourceState:
        if self._listed is None:
            return replace(known, behind=-1, behind_bytes=-1, oldest_unread_ms=0, age_change_s=None)
        oldest_ms = 0 if self._kept_ms is None else self._newest_ms - self._kept_ms
        waiting = [
            file for name, file in self._listed.items() if name not in self._read and file.modified_ms >= oldest_ms
        ]
        told = replace(
            known,
            behind=len(waiting),
            behind_bytes=sum(file.bytes for file in waiting),
            oldest_unread_ms=min((file.modified_ms for file in waiting), default=0),
        )
        return replace(told, age_change_s=self._trend.change_s(now_ms, told.age_s(now_ms)))

    def close(self) -> None:
        """There is nothing to close."""
