"""An Iceberg table as one writer sees it: what it has of this writer, and commits that say so in the same transaction.

The table's metadata is the only memory: each commit makes a snapshot and sets the property `stillstate.epoch.<writer>`,
and the catalog takes both or none. Properties outlive the snapshots, which expire. A commit is made at the snapshot
that was looked at, or not at all. So whoever was first, a repetition or another driver, is seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import pyarrow as pa
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from state_runtime.base import faults
from state_runtime.base.errors import CorruptData, InvalidPipeline, StoreUnavailable
from state_runtime.pipeline.output_layout import OutputLayout
from state_runtime.sinks.iceberg_catalog import CatalogAddress, iceberg_library
from state_runtime.sinks.iceberg_rows import append_files, merge_files
from state_runtime.sinks.iceberg_upkeep import expired_ids, files_of, without_needed
from state_runtime.store import Created

__all__ = ["IcebergLog"]

_LOG = logging.getLogger(__name__)
ATTEMPTS_MAX: Final = 30
"""With waits of up to two seconds: three other writers that commit all the time are outlasted."""
_WAIT_S_MAX: Final = 2.0
_EPOCH: Final = "stillstate.epoch."
_OWNER: Final = "stillstate.owner."
_OF_THE_STORE: Final = frozenset(
    {
        "CommitFailedException",
        "CommitStateUnknownException",
        "ValidationException",
        "ServiceUnavailableError",
        "ServerError",
        "TooManyRequestsError",
        "AuthorizationExpiredError",
        "WaitingForLockException",
        "NoSuchTableError",
        "TableAlreadyExistsError",
        "OperationalError",
        "InterfaceError",
        "TimeoutError",
        "BotoCoreError",
        "ClientError",
        "TTransportException",
    }
)
"""Classes that say that a commit was not made, or that nothing answered; those of catalogs' own clients by name."""


_T = TypeVar("_T")


class _Again(Exception):
    """A commit was not made, or it is not known: look again."""


class IcebergLog:
    """One table.

    Args:
        identifier: `namespace.table`.
        address: of its catalog.
        wait: between two attempts, by default random and growing.
    """

    def __init__(self, identifier: str, address: CatalogAddress, *, wait: Any = None) -> None:
        self._identifier = tuple(identifier.split("."))
        self._address = address
        self._wait = wait_random_exponential(max=_WAIT_S_MAX) if wait is None else wait
        self._catalog: Any = None
        self._table: Any = None

    @property
    def place(self) -> str:
        """The table, for messages."""
        return f"{'.'.join(self._identifier)} of the catalog {self._address.name!r}"

    url = place

    def layout(self) -> OutputLayout | None:
        """Return the table's columns and those that it is partitioned by; None if there is no table."""
        table = self._opened()
        if table is None:
            return None
        names = {field.source_id: table.schema().find_column_name(field.source_id) for field in table.spec().fields}
        columns = iceberg_library().io.pyarrow.schema_to_pyarrow(table.schema(), include_field_ids=False)
        return OutputLayout(self.place, columns, tuple(names.values()))

    def version_of(self, writer: str) -> int:
        """Return the newest epoch that a writer has committed here; 0 if none."""
        table = self._opened()
        return 0 if table is None else _version(table, writer)

    def make(self, columns: pa.Schema, partition_by: Sequence[str], *, add_columns: bool) -> None:
        """Make the namespace and the table, if they are not there, and add columns that the table lacks."""
        self._retried(lambda: self._make(columns, partition_by, add_columns))

    def _make(self, columns: pa.Schema, partition_by: Sequence[str], add_columns: bool) -> None:
        table = self._table or self._opened()
        if table is None:
            if not self._catalog.namespace_exists(self._identifier[:-1]):
                self._catalog.create_namespace_if_not_exists(self._identifier[:-1])
            with self._catalog.create_table_transaction(self._identifier, columns) as transaction:
                if partition_by:
                    with transaction.update_spec() as spec:
                        for name in partition_by:
                            spec.add_identity(name)
            return
        if add_columns and set(columns.names) - set(table.schema().as_arrow().names):
            self._table = None
            with table.update_schema() as change:
                change.union_by_name(columns)

    def append(self, writer: str, version: int, tables: Callable[[], Iterable[pa.Table]]) -> bool:
        """Append rows, once for a version of a writer; return whether this call did.

        Args:
            tables: returns the rows, part by part. It is called once, unless the table's columns or its partitions
                change meanwhile.
        """
        written: dict[tuple[Any, ...], list[Any]] = {}

        def change(table: Any, transaction: Any, mark: dict[str, str]) -> None:
            now = (table.metadata.table_uuid, table.metadata.current_schema_id, table.metadata.default_spec_id)
            if now not in written:
                written[now] = append_files(table, tables())
            faults.reach("iceberg-written")
            with transaction.update_snapshot(snapshot_properties=mark).fast_append() as snapshot:
                for file in written[now]:
                    snapshot.append_data_file(file)

        return self._once(writer, version, change)

    def merge(self, writer: str, version: int, rows: pa.Table, keys: Sequence[str], removed: pa.Table | None) -> bool:
        """Put rows in the place of those with equal keys, once for a version of a writer; return whether this call did.

        Args:
            rows: each key once.
            removed: keys whose rows go.
        """

        def change(table: Any, transaction: Any, mark: dict[str, str]) -> None:
            gone, new = merge_files(table, rows, keys, removed)
            faults.reach("iceberg-written")
            with transaction.update_snapshot(snapshot_properties=mark).overwrite() as snapshot:
                # By itself it looks only into manifests of these files' partitions, compared by value:
                # it would refuse a partition of NaN.
                snapshot.delete_by_predicate(iceberg_library().expressions.AlwaysTrue())
                for file in gone:
                    snapshot.delete_data_file(file)
                for file in new:
                    snapshot.append_data_file(file)

        return self._once(writer, version, change)

    def sizes(self) -> list[int] | None:
        """Return the bytes of the data files that readers see; None if there is no table."""
        table = self._opened()
        if table is None:
            return None
        with self._explained():
            return [task.file.file_size_in_bytes for task in table.scan().plan_files()]

    def expire(self, before_ms: int, *, dry_run: bool) -> tuple[int, int]:
        """Let snapshots expire that are older, and delete the files that only they had; return how many of each. A
        crash behind the commit leaves files that nobody names, until orphan files are removed.

        Args:
            dry_run: change nothing.
        """

        def attempt() -> tuple[list[int], set[str]]:
            table = self._needed()
            ids = expired_ids(table, before_ms)
            files = files_of(table, ids) if ids else set()
            if ids and not dry_run:
                self._table = None
                table.maintenance.expire_snapshots().by_ids(ids).commit()
            return ids, files

        ids, files = self._retried(attempt)
        if ids and not dry_run:
            # Once more by what the table is now: somebody may have put a file back into it meanwhile.
            files = self._retried(lambda: without_needed(self._needed(), files))
            self._retried(lambda: self._delete(files))
        return len(ids), len(files)

    def _delete(self, files: Iterable[str]) -> None:
        io = self._needed().io
        for file in files:
            try:
                io.delete(file)
            except FileNotFoundError:
                _LOG.info("%s of the Iceberg table %s was deleted already", file, self.place)

    def create(self, path: str, body: bytes) -> Created:
        """Create a document of an owner, if there is none of that name: a property, with a snapshot without rows."""

        def attempt() -> Created:
            table = self._needed()
            there = table.metadata.properties.get(_OWNER + path)
            if there is not None:
                return Created.MINE if there == body.decode() else Created.LOST
            self._commit(table, {_OWNER + path: body.decode()}, _nothing)
            return Created.MINE

        return self._retried(attempt)

    def read(self, path: str, bytes_max: int) -> bytes:
        """Return a document of an owner."""
        table = self._opened()
        body = table.metadata.properties.get(_OWNER + path) if table is not None else None
        if body is None:
            raise FileNotFoundError(f"{path} of {self.place}")
        if len(body) > bytes_max:
            raise CorruptData(f"{path} of {self.place} has more than {bytes_max} bytes; unset the property {_OWNER}…")
        return str(body).encode()

    def list_names(self, path: str) -> list[str]:
        """Return the names of documents directly below a path."""
        table, prefix = self._opened(), f"{_OWNER}{path}/"
        found = table.metadata.properties if table is not None else {}
        return sorted({key.removeprefix(prefix).partition("/")[0] for key in found if key.startswith(prefix)})

    def _once(self, writer: str, version: int, change: Callable[[Any, Any, dict[str, str]], None]) -> bool:
        """Commit, unless the table has this version of the writer, or a later one."""

        def attempt() -> bool:
            table = self._needed()
            if _version(table, writer) >= version:
                return False
            self._commit(table, {_EPOCH + writer: str(version)}, change)
            return True

        return self._retried(attempt)

    def _commit(self, table: Any, mark: dict[str, str], change: Callable[[Any, Any, dict[str, str]], None]) -> None:
        """Commit a snapshot and the properties that say what it is, at the snapshot that was looked at."""
        # The first attempt of the next commit looks at the table that this one leaves.
        self._table = None
        transaction = _without_retries(table).transaction()
        change(table, transaction, mark)
        transaction.set_properties(mark)
        faults.reach("iceberg-before-commit")
        transaction.commit_transaction()

    def _retried(self, act: Callable[[], _T]) -> _T:
        """Act, and look again if another writer was faster, or if the answer did not come.

        Raises:
            StoreUnavailable: other writers, or the catalog, let no attempt through. InvalidPipeline: the table does not
                take this.
        """

        def attempt() -> _T:
            try:
                return act()
            except Exception as error:
                if not _passes(error):
                    raise
                self._table = None
                said = self._said(error)
                _LOG.info("the Iceberg table %s is looked at again: %s", self.place, said)
                raise _Again(said) from None

        retrying = Retrying(
            stop=stop_after_attempt(ATTEMPTS_MAX), wait=self._wait, retry=retry_if_exception_type(_Again), reraise=True
        )
        with self._explained():
            try:
                return retrying(attempt)
            except _Again as error:
                raise StoreUnavailable(
                    f"the Iceberg table {self.place} took no commit in {ATTEMPTS_MAX} attempts: {error}. Nothing is "
                    "lost: start again; the output is staged and comes then"
                ) from None

    def _needed(self) -> Any:
        table = self._table or self._opened()
        if table is None:
            raise iceberg_library().exceptions.NoSuchTableError(f"there is no table {self.place}")
        return table

    def _opened(self) -> Any:
        """Return the table as it is now; None if there is none."""
        library = iceberg_library()
        with self._explained():
            if self._catalog is None:
                self._catalog = self._address.load()
            try:
                self._table = self._catalog.load_table(self._identifier)
            except (library.exceptions.NoSuchTableError, library.exceptions.NoSuchNamespaceError):
                self._table = None
            return self._table

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say what a library's error means, without its chain: that may show a secret."""
        try:
            yield
        except Exception as error:
            if _is_ours(error):
                raise
            self._table, said = None, self._said(error)
            if _passes(error):
                raise StoreUnavailable(
                    f"the Iceberg table {self.place} cannot be reached: {said}. Start again"
                ) from None
            raise InvalidPipeline(
                f"the Iceberg table {self.place} does not take the rows: {said}. What is staged stays, and comes when "
                "the table, or the code, is put right and the job is started"
            ) from None

    def _said(self, error: BaseException) -> str:
        first = next(iter(str(error).splitlines()), "")
        return self._address.redact(f"{type(error).__name__}: {first}")


def _nothing(table: Any, transaction: Any, mark: dict[str, str]) -> None:
    """A snapshot without a row: so a commit is refused if another one came between."""
    with transaction.update_snapshot(snapshot_properties={}).fast_append():
        pass


def _version(table: Any, writer: str) -> int:
    return int(table.metadata.properties.get(_EPOCH + writer, 0))


def _without_retries(table: Any) -> Any:
    """Return the table for one attempt: pyiceberg's own retries put a commit on top of whatever came between, and would
    not see that the other one was of the same epoch. The stored properties stay as they are."""
    properties = {**table.metadata.properties, "commit.retry.num-retries": "0"}
    metadata = table.metadata.model_copy(update={"properties": properties})
    return type(table)(
        table.name(), metadata, table.metadata_location, table.io, table.catalog, getattr(table, "config", {})
    )


def _is_ours(error: BaseException) -> bool:
    return type(error).__module__.startswith("state_runtime.") or isinstance(error, _Again)


def _passes(error: BaseException) -> bool:
    """Return whether an error may go by itself."""
    if _is_ours(error):
        return False
    return isinstance(error, OSError) or any(kind.__name__ in _OF_THE_STORE for kind in type(error).__mro__)
