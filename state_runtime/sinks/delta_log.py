"""A Delta table as one writer sees it: what it has of this writer, and commits that say so in the same transaction.

The table's own log is the only memory: each commit has an application transaction (`txn`: an id and a version, of the
[Delta protocol](https://github.com/delta-io/delta/blob/master/PROTOCOL.md#transaction-identifiers)). A commit is made
at the version that was looked at, or not at all. So whoever was first, a repetition or another driver, is seen.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from state_runtime.base import faults
from state_runtime.base.clock import Clock
from state_runtime.base.errors import InvalidConfiguration, InvalidPipeline, StillstateError, StoreUnavailable
from state_runtime.pipeline.partitions import folder_values
from state_runtime.sinks.delta_history import Actions, ForeignCommit, LogCleaned, before_left

__all__ = ["DataFile", "DeltaLog", "statistics_of"]

_LOG = logging.getLogger(__name__)
ATTEMPTS_MAX: Final = 30
"""With waits of up to two seconds: three other writers that commit all the time are outlasted."""
UPKEEP_ATTEMPTS_MAX: Final = 3
"""Each one may write files that no commit names."""
_WAIT_S_MAX: Final = 2.0
_OF_THE_STORE: Final = re.compile(
    r"generic (?!deltatable)\w+ error|object.?store|timed? ?out|connection", re.IGNORECASE
)
"""What deltalake says of a store that does not answer, where it does not raise an OSError."""
_TEXT_MAX: Final = 32
"""Texts that are longer have no statistics, as in Delta's own writers, which cut them at this length."""


_T = TypeVar("_T")


class _Again(Exception):
    """A commit was not made, or it is not known: look again."""


@dataclass(frozen=True)
class DataFile:
    """A Parquet file in the table's folder.

    Attributes:
        path: below the table, with the folders that hold its partition values.
        statistics: see `statistics_of`.
    """

    path: str
    bytes: int
    statistics: str

    @property
    def partition_values(self) -> dict[str, str | None]:
        """The values that its folders name."""
        return folder_values(self.path)


class DeltaLog:
    """The log of one table.

    Args:
        place: path or URL, as deltalake takes it.
        options: for deltalake's object store; may hold secrets.
        clock: for the times of files in the log, which readers show.
        wait: between two attempts, by default random and growing.
    """

    def __init__(self, place: str, options: Mapping[str, str] | None, clock: Clock, *, wait: Any = None) -> None:
        self._place = place
        self._options = dict(options or {})
        self._clock = clock
        self._wait = wait_random_exponential(max=_WAIT_S_MAX) if wait is None else wait
        self._table: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None}

    def check_types(self, schema: pa.Schema, where: str) -> None:
        """Refuse columns that a Delta table cannot have.

        Args:
            where: whose columns they are, for the message.
        """
        for field in schema:
            try:
                kind = str(_library().Schema.from_arrow(pa.schema([field])).fields[0].type)
            except Exception as error:  # deltalake raises nothing more exact
                raise InvalidPipeline(
                    f"{where}: a Delta table cannot have {field.name!r} of type {field.type}; cast it in a transform "
                    f"({_first_line(error)})"
                ) from error
            if "void" in kind:
                raise InvalidPipeline(f"{where}: {field.name!r} has no type but null; cast it in a transform")

    def schema(self) -> tuple[pa.Schema, tuple[str, ...]] | None:
        """Return the table's columns and those that it is partitioned by; None if there is no table."""
        table = self._opened()
        if table is None:
            return None
        return pa.schema(table.schema().to_arrow()), tuple(table.metadata().partition_columns)

    def version_of(self, writer: str) -> int:
        """Return the newest version that a writer has committed here; 0 if none."""
        table = self._opened()
        return 0 if table is None else int(table.transaction_version(writer) or 0)

    def create(self, schema: pa.Schema, partition_by: Sequence[str]) -> None:
        """Make the table, if it is not there."""
        library = _library()
        if self._table is None and self._opened() is None:
            with self._explained():
                library.DeltaTable.create(
                    self._place,
                    library.Schema.from_arrow(schema),
                    mode="ignore",
                    partition_by=list(partition_by),
                    storage_options=self._options or None,
                )

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        """Add columns that the table lacks; all of them may be null."""
        library = _library()
        table = self._table or self._opened()
        known = set(pa.schema(table.schema().to_arrow()).names)
        missing = [field.with_nullable(True) for field in fields if field.name not in known]
        if missing:
            with self._explained():
                table.alter.add_columns(list(library.Schema.from_arrow(pa.schema(missing)).fields))

    def append(self, writer: str, version: int, files: Sequence[DataFile]) -> bool:
        """Make files part of the table, once for a version of a writer; return whether this call did."""
        library, now_ms = _library(), self._clock.now_ms()
        actions = [
            library.transaction.AddAction(file.path, file.bytes, file.partition_values, now_ms, True, file.statistics)
            for file in files
        ]

        def commit(table: Any, properties: Any) -> None:
            partitions = list(table.metadata().partition_columns)
            table.create_write_transaction(actions, "append", table.schema(), partitions, commit_properties=properties)

        return self._once(writer, version, commit)

    def merge(self, writer: str, version: int, rows: pa.Table, keys: Sequence[str], removed: pa.Table | None) -> bool:
        """Put rows in the place of those with equal keys, once for a version of a writer; return whether this call did.

        Args:
            rows: each key once.
            removed: keys whose rows go.
        """
        equal = " AND ".join(f"(t.`{key}` IS NOT DISTINCT FROM s.`{key}`)" for key in keys)
        marked = rows.append_column(_REMOVED, pa.array([False] * rows.num_rows, pa.bool_()))
        if removed is not None and removed.num_rows:
            gone = removed.append_column(_REMOVED, pa.array([True] * removed.num_rows, pa.bool_()))
            marked = pa.concat_tables([marked, gone], promote_options="default")
        columns = {f"`{name}`": f"s.`{name}`" for name in rows.column_names}

        def commit(table: Any, properties: Any) -> None:
            merger = table.merge(marked, equal, source_alias="s", target_alias="t", commit_properties=properties)
            merger = merger.when_matched_delete(f"s.{_REMOVED}").when_matched_update(columns, f"NOT s.{_REMOVED}")
            merger.when_not_matched_insert(columns, f"NOT s.{_REMOVED}").execute()

        return self._once(writer, version, commit)

    def withdraw(
        self, writer: str, left: Sequence[tuple[int, int]], actions_of: Callable[[int], Actions | None]
    ) -> int:
        """Restore the table to what it was before a writer's commits of some epochs. Return how many there were.

        The first commit is an empty one of the last such epoch: behind it no driver that slept commits one of them.
        Idempotent; a crash in between leaves the table as it was.

        Args:
            left: closed ranges of epochs, ascending; the newest epoch of the writer is not above them.
            actions_of: returns the actions of a commit in the table's log; None if it is there no more.

        Raises:
            InvalidPipeline: others have changed rows since, or the log, or a file, is not there any more.
        """
        if self._opened() is None:
            return 0
        has_published, last = self.version_of(writer) > 0, left[-1][1]
        self._fence(writer, last)
        if not has_published:
            return 0

        def attempt() -> int:
            table = self._needed()
            self._table = None
            found = before_left(table.version(), actions_of, writer, left)
            if found.commits:
                faults.reach("delta-before-restore")
                self._restore(table, found.version)
            return found.commits

        epochs = ", ".join(f"{first} to {last}" for first, last in left)
        advice = 'take them out by hand and start with on_rollback="continue", or go back to a snapshot before them'
        try:
            return self._retried(attempt, ATTEMPTS_MAX)
        except ForeignCommit as error:
            raise InvalidPipeline(
                f"the Delta table {self._place} has a commit of another writer (version {error.version}, "
                f"{error.operation or 'unknown operation'}) behind output of epochs {epochs}, which begins at version "
                f"{error.first}: it cannot be restored to what it was before them without losing that. Nothing was "
                f"changed: {advice}"
            ) from error
        except LogCleaned as error:
            raise InvalidPipeline(
                f"the log of the Delta table {self._place} does not reach back to the output of epochs {epochs} any "
                f"more. Nothing was changed: {advice}"
            ) from error

    def _fence(self, writer: str, version: int) -> None:
        """Commit a version of a writer without rows, unless the table has it."""

        def commit(table: Any, properties: Any) -> None:
            partitions = list(table.metadata().partition_columns)
            table.create_write_transaction([], "append", table.schema(), partitions, commit_properties=properties)

        self._once(writer, version, commit)

    def _restore(self, table: Any, version: int) -> None:
        library = _library()
        try:
            table.restore(version, commit_properties=library.CommitProperties(max_commit_retries=0))
        except library.exceptions.CommitFailedError:
            raise  # another writer was faster
        except library.exceptions.DeltaError as error:
            if _OF_THE_STORE.search(str(error)):
                raise
            raise InvalidPipeline(
                f"the Delta table {self._place} cannot be restored to version {version}, from before output of epochs "
                f'that are to go: {_first_line(error)}. Nothing was changed: start with on_rollback="continue" and '
                "take the output out by hand, or go back to a snapshot before it"
            ) from error

    def sizes(self) -> list[tuple[str, int]] | None:
        """Return the files that readers see, with their bytes; None if there is no table."""
        table = self._opened()
        if table is None:
            return None
        with self._explained():
            files = pa.table(table.get_add_actions(flatten=True))
        return list(zip(files["path"].to_pylist(), files["size_bytes"].to_pylist(), strict=True))

    def compact(self, target_bytes: int) -> Mapping[str, Any]:
        """Write small files anew as larger ones, in one commit without an epoch; return deltalake's numbers. What a
        crash leaves is no part of the table.

        Raises:
            StoreUnavailable: other writers changed the same files each time.
        """

        def attempt() -> Mapping[str, Any]:
            table = self._needed()
            # The next commit of an epoch looks at the table anew.
            self._table = None
            found: Mapping[str, Any] = table.optimize.compact(target_size=target_bytes)
            return found

        return self._retried(attempt, UPKEEP_ATTEMPTS_MAX)

    def vacuum(self, *, dry_run: bool) -> list[str]:
        """Delete files that were taken out of the table before the time for which it keeps them; return their names.

        Files that the table's log does not name are left: they may be those of an epoch that is about to be committed.
        """

        def attempt() -> list[str]:
            table = self._needed()
            self._table = None
            return list(table.vacuum(dry_run=dry_run))

        return self._retried(attempt, UPKEEP_ATTEMPTS_MAX)

    def _needed(self) -> Any:
        table = self._opened()
        if table is None:
            raise InvalidPipeline(f"there is no Delta table {self._place} any more; a start of the job makes it")
        return table

    def _once(self, writer: str, version: int, commit: Callable[[Any, Any], None]) -> bool:
        """Commit, unless the table has this version of the writer, or a later one.

        Raises:
            StoreUnavailable: other writers, or the store, let no attempt through.
        """
        library = _library()
        properties = library.CommitProperties(
            max_commit_retries=0, app_transactions=[library.Transaction(writer, version)]
        )

        def attempt() -> bool:
            return self._attempt(writer, version, lambda table: commit(table, properties))

        return self._retried(attempt, ATTEMPTS_MAX)

    def _retried(self, act: Callable[[], _T], attempts_max: int) -> _T:
        """Act, and again if another writer was faster, or if the answer did not come.

        Raises:
            StoreUnavailable: other writers, or the store, let no attempt through. InvalidPipeline: the table does not
                take this.
        """
        retrying = Retrying(
            stop=stop_after_attempt(attempts_max),
            wait=self._wait,
            retry=retry_if_exception_type(_Again),
            reraise=True,
        )
        try:
            return retrying(lambda: self._tried(act))
        except _Again as error:
            raise StoreUnavailable(
                f"the Delta table {self._place} took no commit in {attempts_max} attempts: {error}. Nothing is lost: "
                "start again; output of a job is staged and comes then"
            ) from error

    def _attempt(self, writer: str, version: int, commit: Callable[[Any], None]) -> bool:
        # The commit is made at the version after the one that was seen, or fails: then it is looked at again. So the
        # first attempt may go by what the table was when it was looked at last.
        table = self._table or self._opened()
        if int(table.transaction_version(writer) or 0) >= version:
            return False
        faults.reach("delta-before-commit")
        commit(table)
        return True

    def _tried(self, act: Callable[[], _T]) -> _T:
        library = _library()
        try:
            return act()
        except StillstateError:
            raise  # it says what it is already; one that passes is an OSError, too
        except (library.exceptions.CommitFailedError, OSError) as error:
            _LOG.info("a commit to the Delta table %s is tried again: %s", self._place, error)
            self._table = None
            raise _Again(str(error)) from error
        except library.exceptions.DeltaError as error:
            if _OF_THE_STORE.search(str(error)):
                self._table = None
                raise _Again(_first_line(error)) from error
            # It would say the same again: another type, or a feature of the table that deltalake cannot write.
            raise InvalidPipeline(
                f"the Delta table {self._place} does not take the rows: {_first_line(error)}. What is staged stays, "
                "and comes when the table, or the code, is put right and the job is started"
            ) from error

    def _opened(self) -> Any:
        """Return the table at its newest version; None if there is none."""
        library = _library()
        with self._explained():
            if self._table is not None:
                self._table.update_incremental()
            elif library.DeltaTable.is_deltatable(self._place, self._options or None):
                self._table = library.DeltaTable(self._place, storage_options=self._options or None)
            return self._table

    @contextmanager
    def _explained(self) -> Iterator[None]:
        library = _library()
        try:
            yield
        except (library.exceptions.DeltaError, OSError) as error:
            self._table = None
            raise StoreUnavailable(
                f"the Delta table {self._place} cannot be read or made: {error}. Start again"
            ) from error


_REMOVED: Final = "__stillstate_removed"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def statistics_of(metadata: pq.FileMetaData) -> str:
    """Return a file's rows, and of its plain columns the smallest and the greatest value and the nulls, as Delta's log
    has them: readers pass over files by them."""
    lowest: dict[str, Any] = {}
    highest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    for number in range(metadata.num_columns):
        columns = [group.column(number) for group in groups]
        name = columns[0].path_in_schema if columns else ""
        if "." in name or not columns or any(c.statistics is None for c in columns):
            continue
        if all(c.statistics.has_null_count for c in columns):
            nulls[name] = sum(c.statistics.null_count for c in columns)
        if all(c.statistics.has_min_max for c in columns):
            ends = [_as_json(min(c.statistics.min for c in columns)), _as_json(max(c.statistics.max for c in columns))]
            if None not in ends:
                lowest[name], highest[name] = ends
    return json.dumps({"numRecords": metadata.num_rows, "minValues": lowest, "maxValues": highest, "nullCount": nulls})


def _as_json(value: Any) -> Any:
    """Return a value as Delta's statistics have it; None for one that has no such form."""
    if isinstance(value, bool | bytes) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, int | float):
        return value
    if isinstance(value, str):
        return value if len(value) <= _TEXT_MAX else None
    if hasattr(value, "isoformat"):
        text = str(value.isoformat())
        return text.replace("+00:00", "Z") if "T" in text else text
    return None


def _library() -> Any:
    """Return deltalake.

    Raises:
        InvalidConfiguration: it is not installed.
    """
    try:
        import deltalake
        import deltalake.exceptions
        import deltalake.transaction
    except ImportError as error:
        raise InvalidConfiguration("DeltaSink needs the package deltalake: pip install 'stillstate[delta]'") from error
    return deltalake
