"""A Delta table as a stream, without Spark's connector; see docs/delta-in.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

from pyspark.sql import types as T
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.secrets import refuse_secrets, with_secrets
from state_runtime.sources.delta_commits import (
    CHANGE_TYPE,
    Metadata,
    TableFile,
    check_columns,
    check_files,
    check_readable,
    files_to_read,
)
from state_runtime.sources.delta_lag import DeltaLag
from state_runtime.sources.delta_plan import end_of_batch, files_between, in_parts
from state_runtime.sources.delta_position import DeltaPosition
from state_runtime.sources.delta_table import AWAY_S, OpenedTable, TableLog, check_same_table, library, rows_of
from state_runtime.sources.python_source import HAS_LIMITS, check_limit, telling
from state_runtime.sources.watch import remember_opened
from state_runtime.spark.arrow import arrow_schema_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["DeltaSource"]

if HAS_LIMITS:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxFiles, SupportsTriggerAvailableNow

FORMAT: Final = "stillstate-delta"
FILES_MAX: Final = 1000
_KEPT_MAX: Final = 2000
"""Versions whose files are kept between planning a batch's end and its parts."""
_SECRET: Final = re.compile(r"(?i)secret|password|token|credential|account_?key|access_?key|sas")
_OF_CHANGES: Final = (
    T.StructField(CHANGE_TYPE, T.StringType()),
    T.StructField("_commit_version", T.LongType()),
    T.StructField("_commit_timestamp", T.TimestampType()),
)


class DeltaSource:
    """A Delta table as a stream; give it to `read()`, or open it with `load(spark)`.

    It needs no jar: tasks read with deltalake and Arrow. A job without a snapshot begins with all rows that the table
    has, in parts; then come the rows of each version, once. Positions are in snapshots, with the table's id.

    Args:
        uri: path or URL of the table, without credentials.
        starting: where a job without a snapshot begins: "all" rows that the table has, "latest": only what is added
            from now on, or a version, whose rows are the first.
        changes: read the change data feed: also rows that were removed or changed, with the columns `_change_type`
            (insert, update_preimage, update_postimage, delete), `_commit_version` and `_commit_timestamp`. The table
            needs `delta.enableChangeDataFeed`. A batch ends with a version then.
        skip_changes: pass over versions that remove or change rows. Without either such a version ends the run.
        max_files_per_trigger: how many files a batch has at most; None: 1,000. Spark 4.1 does not tell a source of
            Python how far it may go: there a batch goes to the end.
        storage_options: for deltalake's access to the store, without secrets.
        storage_options_env: environment variables that hold the values of further options, such as
            `{"AWS_SECRET_ACCESS_KEY": "LAKE_SECRET"}`. Only the variables' names are kept; each process reads its own
            environment.

    Example:
        orders = job.read(sources.delta("/lake/orders"))
    """

    def __init__(
        self,
        uri: str,
        *,
        starting: Literal["all", "latest"] | int = "all",
        changes: bool = False,
        skip_changes: bool = False,
        max_files_per_trigger: int | None = None,
        storage_options: Mapping[str, str] | None = None,
        storage_options_env: Mapping[str, str] | None = None,
    ) -> None:
        if not uri:
            raise InvalidConfiguration("sources.delta needs a table; give it a path or a URL")
        parts = urlsplit(str(uri))
        if parts.password:
            raise InvalidConfiguration(
                "the URL given to sources.delta holds a password: name an environment variable that holds it, in "
                "storage_options_env"
            )
        is_version = type(starting) is int and starting >= 0
        if not is_version and starting not in ("all", "latest"):
            raise InvalidConfiguration(f'starting must be "all", "latest" or a version (got {starting!r})')
        if changes and skip_changes:
            raise InvalidConfiguration("changes reads what skip_changes passes over: give sources.delta one of them")
        if max_files_per_trigger is not None and max_files_per_trigger < 1:
            raise InvalidConfiguration(f"max_files_per_trigger must be at least 1 (got {max_files_per_trigger})")
        refuse_secrets(storage_options or {}, _SECRET, "storage_options_env")
        self.uri = str(uri)
        self.max_files_per_trigger = max_files_per_trigger
        self._config: dict[str, Any] = {
            "uri": self.uri,
            "starting": starting,
            "changes": changes,
            "skip_changes": skip_changes,
            "files_max": max_files_per_trigger or FILES_MAX,
            "options": dict(storage_options or {}),
            "options_env": dict(storage_options_env or {}),
        }

    def __repr__(self) -> str:
        return f"sources.delta({self.uri!r})"

    def __call__(self, spark: SparkSession) -> DataFrame:
        return self.load(spark)

    def load(self, spark: SparkSession) -> DataFrame:
        """Return the stream as a DataFrame of a session, with the columns that the table has now.

        Raises:
            InvalidConfiguration: deltalake is not installed, this Spark lacks what is asked for, or the table cannot be
                read exactly. MissingSource: there is no table. Unavailable: its store does not answer.
        """
        check_limit("max_files_per_trigger", self.max_files_per_trigger, spark)
        opened = _log_of(self._config).opened()
        check_readable(opened.metadata, opened.protocol, _where(self._config), changes=self._config["changes"])
        config = json.dumps(
            {
                **self._config,
                "schema": opened.metadata.schema,
                "partition_by": list(opened.metadata.partition_by),
            }
        )
        _check_partition_columns(columns_of(json.loads(config)), opened, _where(self._config))
        spark.dataSource.register(DeltaDataSource)
        # The files of the table, which may be many, are not kept for it.
        remember_opened(self._told_apart(), partial(self.lag, opened.version, opened.metadata))
        return spark.readStream.format(FORMAT).options(config=config).load()

    def _told_apart(self) -> str:
        """Return what it reads, and from where: a job may read a table and its changes."""
        return f"{self!r} changes={self._config['changes']} skip_changes={self._config['skip_changes']}"

    def lag(self, version: int, metadata: Metadata) -> DeltaLag:
        """Return what asks the table's log about this source beside a job.

        Args:
            version, metadata: of the table when it was opened.
        """
        log = _log_of(self._config, away_s=0)
        reads = {name: self._config[name] for name in ("changes", "skip_changes")}
        return DeltaLag(self.uri, log, version, metadata, _where(self._config), **reads)


def _check_partition_columns(columns: T.StructType, opened: OpenedTable, where: str) -> None:
    """Refuse what the log writes as text in more than one way."""
    for name in opened.metadata.partition_by:
        if isinstance(columns[name].dataType, T.BinaryType):
            raise InvalidConfiguration(
                f"{where}: the table is partitioned by {name!r}, which is binary; its values cannot be told exactly "
                "from the log. Partition it by something else"
            )


def _where(of: Mapping[str, Any]) -> str:
    return f"source {of['uri']!r}"


def _log_of(of: Mapping[str, Any], away_s: float = AWAY_S) -> TableLog:
    library()
    options = with_secrets(of["options"], of["options_env"], _where(of))
    secrets = [options[key] for key in of["options_env"]]
    return TableLog(of["uri"], options, _where(of), secrets=secrets, away_s=away_s)


def columns_of(of: Mapping[str, Any]) -> T.StructType:
    """Return the columns of a stream. All may be null: a file may lack one that the table got later."""
    table = T.StructType.fromJson(json.loads(of["schema"]))
    fields = [T.StructField(field.name, field.dataType) for field in table]
    return T.StructType([*fields, *(_OF_CHANGES if of["changes"] else ())])


class DeltaDataSource(DataSource):
    """What Spark knows of the source; its options hold no secret."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> T.StructType:
        """Return the columns."""
        return columns_of(json.loads(self.options["config"]))

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        """Return the reader of this version of Spark."""
        return _LimitedReader(self.options["config"]) if HAS_LIMITS else _PlainReader(self.options["config"])


class _Part(InputPartition):
    """Some files, for one task."""

    def __init__(self, files: Sequence[TableFile]) -> None:
        self.files = files


class _Reader(DataSourceStreamReader):
    """Plans batches in a process beside the driver, and reads their files in tasks."""

    def __init__(self, config: str) -> None:
        self._of = json.loads(config)
        self._where = _where(self._of)
        self._log_made: TableLog | None = None
        self._newest: OpenedTable | None = None
        self._kept: dict[tuple[int, bool], Sequence[TableFile]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_log_made": None, "_newest": None, "_kept": {}}

    @property
    def _log(self) -> TableLog:
        if self._log_made is None:
            self._log_made = _log_of(self._of)
        return self._log_made

    def initialOffset(self) -> dict[str, Any]:
        """Return where a job without a snapshot begins."""
        with telling():
            opened, starting = self._log.opened(), self._of["starting"]
            here = DeltaPosition(opened.metadata.id, opened.version)
            if starting == "all":
                return DeltaPosition(here.table, here.next, is_whole=True).to_json()
            if starting == "latest":
                return here.behind().to_json()
            return DeltaPosition(here.table, starting).to_json()

    def _opened(self, start: DeltaPosition) -> OpenedTable:
        """Return the table as it is now, compared with the one that was read.

        The file of the next version is asked for first: while it is not there, and that of the one before is, nothing
        has happened, and the table is not opened.
        """
        known = self._newest
        is_quiet = known is not None and known.version == start.next - 1 and known.metadata.id == start.table
        if known is not None and is_quiet and not self._log.has(start.next) and self._log.has(known.version):
            return known
        opened = self._log.opened()
        check_same_table(start, opened, self._where)
        check_readable(opened.metadata, opened.protocol, self._where, changes=self._of["changes"])
        self._newest = opened
        return opened

    def _files(self, at: DeltaPosition) -> Sequence[TableFile]:
        """Return all files that a position's version gives to the stream."""
        key = (at.next, at.is_whole)
        if key not in self._kept:
            found = self._log.opened(at.next).files() if at.is_whole else self._added(at.next)
            check_files(found, self._of["partition_by"], self._where)
            while len(self._kept) >= _KEPT_MAX:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = found
        return self._kept[key]

    def _added(self, version: int) -> Sequence[TableFile]:
        commit = self._log.commit(version)
        if commit.metadata is not None or commit.protocol is not None:
            newest = self._newest or self._log.opened()
            metadata = commit.metadata or newest.metadata
            check_readable(metadata, commit.protocol or newest.protocol, self._where, changes=self._of["changes"])
            check_columns(self._of["schema"], metadata, newest.metadata, self._where)
        return files_to_read(commit, self._where, changes=self._of["changes"], skip_changes=self._of["skip_changes"])

    def _end(self, start: DeltaPosition, newest: int, files_max: int | None) -> DeltaPosition:
        return end_of_batch(start, newest, self._files, files_max, whole_versions=self._of["changes"])

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the files of a batch, in groups, each for one task."""
        with telling():
            begin, until = DeltaPosition.from_json(start), DeltaPosition.from_json(end)
            if self._newest is None:
                self._opened(begin)
            return [_Part(files) for files in in_parts(files_between(begin, until, self._files))]

    def read(self, partition: Any) -> Iterator[Any]:
        """Yield the rows of some files; runs in a task."""
        with telling():
            columns = arrow_schema_of(columns_of(self._of))
            for file in partition.files:
                yield from rows_of(self._log, file, columns, self._where)


if HAS_LIMITS:

    class _LimitedReader(_Reader, SupportsTriggerAvailableNow):
        _target: int | None = None
        _seen: DeltaPosition | None = None

        def getDefaultReadLimit(self) -> ReadLimit:
            return ReadMaxFiles(self._of["files_max"])

        def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
            """Return how far the next batch goes."""
            with telling():
                begin = DeltaPosition.from_json(start)
                newest = self._opened(begin).version
                self._seen = DeltaPosition(begin.table, newest + 1)
                until = newest if self._target is None else min(newest, self._target)
                files_max = None if isinstance(limit, ReadAllAvailable) else self._of["files_max"]
                return self._end(begin, until, files_max).to_json()

        def reportLatestOffset(self) -> dict[str, Any] | None:
            """Return how far the table was when it was asked last; Spark shows it in its progress."""
            return None if self._seen is None else self._seen.to_json()

        def prepareForTriggerAvailableNow(self) -> None:
            """Go no further than what there is now."""
            with telling():
                self._target = self._log.opened().version


class _PlainReader(_Reader):
    """For Spark 4.1, which asks only how far the table is."""

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]
        with telling():
            opened = self._log.opened()
            return DeltaPosition(opened.metadata.id, opened.version + 1).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        with telling():
            self._opened(DeltaPosition.from_json(start))
        return super().partitions(start, end)
