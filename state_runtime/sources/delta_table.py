"""What the source asks of a Delta table: its versions, the files of each, and the rows of a file. On deltalake."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as pa_fs
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from state_runtime.base.errors import (
    CorruptData,
    InvalidConfiguration,
    InvalidData,
    MissingSource,
    StoreRefused,
    Unavailable,
)
from state_runtime.base.secrets import redacted
from state_runtime.sources.delta_commits import (
    CHANGE_TYPE,
    Commit,
    Metadata,
    Protocol,
    TableFile,
    ordered,
    parse_commit,
)
from state_runtime.sources.delta_position import DeltaPosition

__all__ = ["AWAY_S", "OpenedTable", "TableLog", "check_same_table", "library", "rows_of"]

AWAY_S: Final = 60.0
"""How long a question is repeated while the store does not answer; then the run ends, and is started again."""
_WAIT_S_MAX: Final = 2.0
_REFUSED: Final = re.compile(r"\b40[13]\b|forbidden|access ?denied|unauthorized|permission denied", re.IGNORECASE)
_VERSION_FILE: Final = re.compile(r"_delta_log/(\d{20})\.json\Z")
T = TypeVar("T")


class _Away(Exception):
    """The store does not answer: ask again."""


@dataclass(frozen=True)
class OpenedTable:
    """A table at one version.

    Attributes:
        files: returns all of its files, in the order of positions.
    """

    version: int
    metadata: Metadata
    protocol: Protocol
    files: Callable[[], Sequence[TableFile]]


class TableLog:
    """Questions about one table.

    Args:
        options: for deltalake's object store, with secrets.
        secrets: texts that no message may have.
        where: the source, for messages.
        away_s: how long a question is repeated while the store does not answer.
    """

    def __init__(
        self,
        uri: str,
        options: Mapping[str, str],
        where: str,
        *,
        secrets: Sequence[str] = (),
        away_s: float = AWAY_S,
        wait: Any = None,
    ) -> None:
        self._uri = uri
        self._options = dict(options)
        self._where = where
        self._secrets = secrets
        self._away_s = away_s
        self._wait = wait_random_exponential(multiplier=0.1, max=_WAIT_S_MAX) if wait is None else wait
        self._filesystem: Any = None

    @property
    def filesystem(self) -> pa_fs.FileSystem:
        """What reads the table's files, with paths below the table."""
        if self._filesystem is None:
            from deltalake.fs import DeltaStorageHandler

            self._filesystem = pa_fs.PyFileSystem(DeltaStorageHandler(self._uri, self._options or None))
        return self._filesystem

    def opened(self, version: int | None = None) -> OpenedTable:
        """Return the table as it is now, or at a version.

        Raises:
            MissingSource: there is no table, or its log does not have the version any more.
        """
        library_ = library()

        def look() -> Any:
            return library_.DeltaTable(self._uri, version=version, storage_options=self._options or None)

        try:
            table = self.asked(look)
        except library_.exceptions.DeltaError as error:
            is_there = version is not None and self.asked(
                lambda: library_.DeltaTable.is_deltatable(self._uri, self._options or None)
            )
            if is_there:
                raise self.gone(version or 0) from error
            if isinstance(error, library_.exceptions.TableNotFoundError) or version is not None:
                raise MissingSource(
                    f"{self._where}: there is no Delta table, or it may not be seen. Make it, or correct the place, "
                    "and start again. The state is kept"
                ) from error
            raise CorruptData(f"{self._where}: the table cannot be read: {self._told(error)}") from error
        of, protocol = table.metadata(), table.protocol()
        metadata = Metadata(str(of.id), table.schema().to_json(), tuple(of.partition_columns), dict(of.configuration))
        features = frozenset(protocol.reader_features or ())
        return OpenedTable(
            int(table.version()),
            metadata,
            Protocol(int(protocol.min_reader_version), features),
            lambda: self.asked(lambda: self._files(table)),
        )

    def _files(self, table: Any) -> Sequence[TableFile]:
        vectors = set(pa.table(table.deletion_vectors().read_all()).column("filepath").to_pylist())
        at_ms = int(table.history(1)[0].get("timestamp", 0))
        version = int(table.version())
        found = pa.table(table.get_add_actions(flatten=False))
        names = found.column_names
        return ordered(
            TableFile(
                path=unquote(row["path"]),
                bytes=row["size_bytes"],
                partition=row["partition"] if "partition" in names else {},
                modified_ms=row["modification_time"],
                has_vector=any(str(name).endswith(row["path"]) for name in vectors),
                version=version,
                committed_ms=at_ms,
            )
            for row in found.select([n for n in names if n not in ("null_count", "min", "max")]).to_pylist()
        )

    def has(self, version: int) -> bool:
        """Return whether the log has the file of a version."""
        info = self.asked(lambda: self.filesystem.get_file_info(_file_of(version)))
        return bool(info.type == pa_fs.FileType.File)

    def commit(self, version: int) -> Commit:
        """Return what a version did.

        Raises:
            MissingSource: the log does not have it any more. CorruptData: it cannot be read.
        """

        def look() -> str:
            with self.filesystem.open_input_stream(_file_of(version)) as stream:
                return bytes(stream.read()).decode()

        try:
            return parse_commit(version, self.asked(look))
        except FileNotFoundError as error:
            raise self.gone(version) from error

    def earliest(self) -> int:
        """Return the first version that the log still has the file of; -1 if it has none."""
        selector = pa_fs.FileSelector("_delta_log")
        listed = self.asked(lambda: self.filesystem.get_file_info(selector))
        found = [match.group(1) for info in listed if (match := _VERSION_FILE.search(info.path))]
        return min(map(int, found), default=-1)

    def gone(self, version: int) -> MissingSource:
        """Return the error about a version that cannot be read any more."""
        return MissingSource(
            f"{self._where}: version {version} of the table is wanted, and its log has versions from {self.earliest()} "
            "on: it was cleaned before the job had read it. The state is kept. Go on without what is gone with another "
            "start position under another name of the source. A longer delta.logRetentionDuration prevents it"
        )

    def asked(self, ask: Callable[[], T]) -> T:
        """Ask, again while the store does not answer.

        Raises:
            Unavailable: it did not in time. StoreRefused: it refuses.
        """

        def once() -> T:
            try:
                return ask()
            except FileNotFoundError:
                raise
            except OSError as error:
                told = self._told(error)
                if isinstance(error, PermissionError) or _REFUSED.search(told):
                    raise StoreRefused(
                        f"{self._where}: {told}. Somebody must grant it, or correct the source's storage_options"
                    ) from error
                raise _Away(f"{self._where}: the store does not answer: {told}") from error

        retrying = Retrying(
            retry=retry_if_exception_type(_Away), stop=stop_after_delay(self._away_s), wait=self._wait, reraise=True
        )
        try:
            return retrying(once)
        except _Away as error:
            raise Unavailable(f"{error}. The job goes on where it was once it does") from error

    def away(self, error: OSError) -> Unavailable:
        """Return the error about a store that failed in the middle of a file."""
        return Unavailable(f"{self._where}: a file cannot be read: {self._told(error)}. The epoch is tried again")

    def _told(self, error: BaseException) -> str:
        """Return an error's text in one line, without secrets."""
        # Cut last: a part of a secret would not be found.
        text = " ".join(re.sub(r"\x1b\[\d*m", "", str(error)).split())
        return redacted(text, self._secrets)[:500]


def check_same_table(start: DeltaPosition, opened: OpenedTable, where: str) -> None:
    """Compare the table that was read with the one that is there now.

    Raises:
        MissingSource: it is another one, or it went back to before what was read.
    """
    if opened.metadata.id != start.table:
        raise MissingSource(
            f"{where}: the table was replaced by another one since the job read it (its id was {start.table} and is "
            f"{opened.metadata.id}): its versions count anew. The state is kept. Bring the old one back, or read the "
            "new one under another name of the source"
        )
    if start.next > opened.version + 1:
        raise MissingSource(
            f"{where}: version {start.next} of the table is wanted next, and it has versions up to {opened.version}: "
            "it was put back from an older copy, or starting names a version that is not there yet. The state is kept"
        )


def rows_of(log: TableLog, file: TableFile, columns: pa.Schema, where: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file, with the columns of a stream.

    Args:
        columns: of the stream. What the file lacks is null.

    Raises:
        MissingSource: the file is gone. InvalidData: it cannot be read as such columns.
    """
    inside = [field for field in columns if field.name not in file.partition and field.name not in _OF_CHANGES]
    if CHANGE_TYPE in columns.names and file.change == "in file":
        inside.append(columns.field(CHANGE_TYPE))
    # Spark's own writers may have times as INT96, of which only microseconds are a value of a stream.
    form = ds.ParquetFileFormat(read_options=ds.ParquetReadOptions(coerce_int96_timestamp_unit="us"))
    try:
        fragment = form.make_fragment(file.path, filesystem=log.filesystem)
        scanner = log.asked(lambda: fragment.scanner(schema=pa.schema(inside), batch_size=_ROWS))
        for batch in scanner.to_batches():
            if batch.num_rows:
                yield _completed(batch, file, columns)
    except FileNotFoundError as error:
        raise MissingSource(
            f"{where}: {file.path} of version {file.version} is gone: a vacuum removed it before the job had read it. "
            "The state is kept. Restore the file, or go on without it with another start position under another name "
            "of the source. A longer delta.deletedFileRetentionDuration prevents it"
        ) from error
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise InvalidData(
            f"{where}: {file.path} of version {file.version} cannot be read as the table's columns "
            f"({str(error).splitlines()[0][:200]}): repair the table, or pass over the version"
        ) from error
    except OSError as error:
        raise log.away(error) from error


_ROWS: Final = 10_000
_OF_CHANGES: Final = (CHANGE_TYPE, "_commit_version", "_commit_timestamp")


def _completed(batch: pa.RecordBatch, file: TableFile, columns: pa.Schema) -> pa.RecordBatch:
    def column(field: pa.Field) -> pa.Array:
        if field.name in batch.schema.names:
            return batch.column(field.name)
        return pa.repeat(_value(file, field), batch.num_rows)

    return pa.RecordBatch.from_arrays([column(field) for field in columns], schema=columns)


def _value(file: TableFile, field: pa.Field) -> pa.Scalar:
    """Return the value that a column has in all rows of a file."""
    if field.name in file.partition:
        return partition_value(file.partition[field.name], field.type)
    of = {
        CHANGE_TYPE: file.change,
        "_commit_version": file.version,
        "_commit_timestamp": file.committed_ms * 1000,
    }
    return pa.scalar(of[field.name], pa.int64() if field.name == "_commit_timestamp" else None).cast(field.type)


def partition_value(value: Any, kind: pa.DataType) -> pa.Scalar:
    """Return a partition's value, from what it is or from the text that Delta's log has: empty is null, and times
    without a zone are UTC."""
    if value is None or value == "":
        return pa.scalar(None, kind)
    if not isinstance(value, str) or pa.types.is_string(kind):
        return pa.scalar(value, kind)
    if pa.types.is_timestamp(kind):
        text = pa.array([value.replace(" ", "T").removesuffix("Z")])
        naive = text.cast(pa.timestamp("us"))
        return (pc.assume_timezone(naive, "UTC") if kind.tz else naive).cast(kind)[0]
    return pa.array([value]).cast(kind)[0]


def _file_of(version: int) -> str:
    return f"_delta_log/{version:020}.json"


def library() -> Any:
    """Return deltalake.

    Raises:
        InvalidConfiguration: it is not installed.
    """
    try:
        import deltalake
        import deltalake.exceptions
    except ImportError as error:
        raise InvalidConfiguration(
            "a Delta table needs the package deltalake: pip install 'stillstate[delta]'"
        ) from error
    return deltalake
