"""How far a job is behind a Delta table, asked beside the job: files, bytes, the age of the oldest, when its log goes.

Each version's file in the log is read once, and kept as sizes until the job has read the version. Of a table in which
nothing happens two small questions are asked: is the next version there, and the last one still.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from state_runtime.base.errors import MissingSource, StillstateError
from state_runtime.base.source_state import SourceState
from state_runtime.sources.age_trend import AgeTrend
from state_runtime.sources.delta_commits import Commit, Metadata, TableFile, files_waiting
from state_runtime.sources.delta_position import DeltaPosition
from state_runtime.sources.delta_table import TableLog, check_same_table

__all__ = ["DeltaLag", "Waiting", "log_kept_s", "unread"]

_COMMITS_MAX: Final = 200
"""Versions that are read in one look. A job that is farther behind is told how far after some more of them."""
_KEPT: Final = "delta.logRetentionDuration"
_KEPT_DEFAULT: Final = "interval 30 days"
_IS_CLEANED: Final = "delta.enableExpiredLogCleanup"
_UNIT_S: Final[Mapping[str, float]] = {
    "microsecond": 1e-6, "millisecond": 1e-3, "second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86_400.0,
    "week": 7 * 86_400.0,
}  # fmt: skip
_PERIOD: Final = re.compile(r"(\d{1,15})\s+([a-z]+?)s?(?:\s+|\Z)")


@dataclass(frozen=True)
class Waiting:
    """What a stream reads of one version, without the names of its files.

    Attributes:
        sizes: of its files in bytes, in the order in which positions count them.
        times_ms: since when each of them waits: all since the commit, or each since it was written.
        committed_ms: when the version was; 0 if the log does not say it.
        is_whole: these are all files of the table at that version, and not those that the version adds.
    """

    sizes: Sequence[int] = ()
    times_ms: Sequence[int] = ()
    committed_ms: int = 0
    is_whole: bool = False

    @staticmethod
    def of_commit(files: Sequence[TableFile], committed_ms: int) -> Waiting:
        """Return it for the files that a version gives to a stream."""
        since_ms = committed_ms or min((file.modified_ms for file in files), default=0)
        return Waiting(_numbers(file.bytes for file in files), (since_ms,), committed_ms)

    @staticmethod
    def of_table(files: Sequence[TableFile]) -> Waiting:
        """Return it for all files of a table: where a job begins."""
        committed_ms = files[0].committed_ms if files else 0
        written_ms = _numbers(file.modified_ms for file in files)
        return Waiting(_numbers(file.bytes for file in files), written_ms, committed_ms, is_whole=True)

    def since_ms(self, files: int) -> int:
        """Return since when the first waits that is behind so many files."""
        return self.times_ms[min(files, len(self.times_ms) - 1)]


def _numbers(values: Iterable[int]) -> Sequence[int]:
    return array("q", values)


@dataclass(frozen=True)
class Unread:
    """What is behind a position; `oldest_ms` is 0 if nothing is."""

    files: int = 0
    bytes: int = 0
    oldest_ms: int = 0


def unread(position: DeltaPosition, newest: int, waiting: Mapping[int, Waiting]) -> Unread:
    """Return what a table has behind a position; pure.

    Args:
        newest: version of the table.
        waiting: by version, of all from the position's on.
    """
    files = total = oldest_ms = 0
    for version in range(position.next, newest + 1):
        read = position.files if version == position.next else 0
        sizes = waiting[version].sizes[read:]
        if sizes and not files:
            oldest_ms = waiting[version].since_ms(read)
        files += len(sizes)
        total += sum(sizes)
    return Unread(files, total, oldest_ms)


def log_kept_s(settings: Mapping[str, str]) -> float:
    """Return for how long a table keeps a version in its log, at least; -1 if it removes none, or if its setting cannot
    be read. It is removed by a checkpoint that is written later, if at all."""
    if settings.get(_IS_CLEANED, "true").strip().lower() != "true":
        return -1.0
    text = settings.get(_KEPT, _KEPT_DEFAULT).strip().lower().removeprefix("interval").strip()
    total, at = 0.0, 0
    while at < len(text):
        found = _PERIOD.match(text, at)
        if found is None or found[2] not in _UNIT_S:
            return -1.0
        total += int(found[1]) * _UNIT_S[found[2]]
        at = found.end()
    return total if text else -1.0


class DeltaLag:
    """Asks the log of one table; used by one thread.

    Args:
        name: of the source, for people.
        log: of the table; a question that gets no answer is not repeated.
        version, metadata: of the table when the source was opened.
        where: the source, for messages.
        changes, skip_changes: see `DeltaSource`.
    """

    def __init__(
        self,
        name: str,
        log: TableLog,
        version: int,
        metadata: Metadata,
        where: str,
        *,
        changes: bool,
        skip_changes: bool,
    ) -> None:
        self.state = SourceState(name, unit="files")
        self._log = log
        self._newest = version
        self._metadata = metadata
        self._table = metadata.id
        self._where = where
        self._changes, self._skip_changes = changes, skip_changes
        self._waiting: dict[int, Waiting] = {}
        self._trend = AgeTrend()

    def reads(self, offset: Any) -> bool:
        """Return whether a position is one in this table."""
        try:
            return DeltaPosition.from_json(offset).table == self._table
        except StillstateError:
            return False

    def look(self, offset: Any | None, now_ms: int) -> SourceState:
        """Ask once, and return what is known now.

        Args:
            offset: up to where the job has read, one that it `reads`; None: it has not begun.
        """
        position = None if offset is None else DeltaPosition.from_json(offset)
        try:
            is_counted = self._follow(position or DeltaPosition(self._table, self._newest + 1))
            known = SourceState(self.state.name, asked_at_ms=now_ms, unit="files")
            self.state = known if position is None else self._compared(known, position, now_ms, is_counted=is_counted)
        except StillstateError as error:
            since_ms = self.state.away_since_ms or now_ms
            self.state = replace(self.state, away_since_ms=since_ms, said=str(error).splitlines()[0])
        return self.state

    def _follow(self, position: DeltaPosition) -> bool:
        """Read the versions that wait and are not known yet.

        Returns:
            Whether all that there are have been read.
        """
        self._waiting = {version: of for version, of in self._waiting.items() if version >= position.next}
        known, left = self._newest, _COMMITS_MAX
        while left > 0 and self._log.has(self._newest + 1):
            self._read_newest(self._log.commit(self._newest + 1))
            left -= 1
        is_odd = position.next > self._newest + 1 or (self._newest == known and not self._log.has(known))
        if left > 0 and is_odd:
            self._open_anew(position)
        missing = [n for n in range(position.next, self._newest + 1) if not self._is_known(n, position)]
        for version in missing[:left]:
            is_whole = position.is_whole and version == position.next
            self._waiting[version] = self._whole(version) if is_whole else self._of(self._log.commit(version))
        return left > len(missing)

    def _is_known(self, version: int, position: DeltaPosition) -> bool:
        of = self._waiting.get(version)
        return of is not None and of.is_whole == (position.is_whole and version == position.next)

    def _whole(self, version: int) -> Waiting:
        return Waiting.of_table(self._log.opened(version).files())

    def _of(self, commit: Commit) -> Waiting:
        files = files_waiting(commit, changes=self._changes, skip_changes=self._skip_changes)
        return Waiting.of_commit(files, commit.at_ms)

    def _read_newest(self, commit: Commit) -> None:
        if commit.metadata is not None:
            if commit.metadata.id != self._table:
                raise MissingSource(
                    f"{self._where}: version {commit.version} made another table of it (its id was {self._table} and "
                    f"is {commit.metadata.id}): the job goes no further"
                )
            self._metadata = commit.metadata
        self._waiting[commit.version] = self._of(commit)
        self._newest = commit.version

    def _open_anew(self, position: DeltaPosition) -> None:
        """Look what became of a table whose log does not have a version that was there.

        Raises:
            MissingSource: it is another one, or one of before.
        """
        opened = self._log.opened()
        check_same_table(position, opened, self._where)
        if opened.version < self._newest:
            self._waiting = {}
        self._newest, self._metadata = opened.version, opened.metadata

    def _compared(self, known: SourceState, position: DeltaPosition, now_ms: int, *, is_counted: bool) -> SourceState:
        """Return what waits behind a position; of a table that is not counted yet, the age of the oldest alone."""
        until = position.next
        while self._is_known(until, position):
            until += 1
        found = unread(position, until - 1, self._waiting)
        left_s, kept_s = self._retention(position, now_ms)
        told = replace(known, oldest_unread_ms=found.oldest_ms, retention_left_s=left_s, kept_s=kept_s)
        if is_counted:
            versions = max(0, self._newest + 1 - position.next)
            told = replace(told, behind=found.files, behind_bytes=found.bytes, behind_versions=versions)
        return replace(told, age_change_s=self._trend.change_s(now_ms, told.age_s(now_ms)))

    def _retention(self, position: DeltaPosition, now_ms: int) -> tuple[float, float]:
        """Return in how many seconds the log may be cleaned of the first version that the job needs, and for how many a
        version is kept; -1: never, or not known.

        A version goes with a checkpoint that is written behind it. The newest one, whose files a job begins with, may
        be as old as it likes.
        """
        kept_s = log_kept_s(self._metadata.settings)
        first = self._waiting.get(position.next)
        if kept_s < 0 or (first is not None and position.is_whole and position.next == self._newest):
            return -1.0, -1.0
        if first is None or not first.committed_ms:
            return -1.0, kept_s
        return max(0.0, (first.committed_ms - now_ms) / 1000 + kept_s), kept_s

    def close(self) -> None:
        """There is nothing to close: a question ends with its answer."""
