"""A table in PostgreSQL as one writer sees it: what it has of this writer, and epochs that say so in their transaction.

The memory is a table beside it, `stillstate_epochs`, with a row for each writer. A transaction locks the row of its
writer before it writes anything. So a second driver of the same writer waits, and then sees what the first has done;
and whatever became of a transaction whose answer was lost, the next one waits for its end and reads it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, stop_after_delay, wait_random_exponential

from state_runtime.base import faults
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.patience import patience_s
from state_runtime.sinks.sql_address import Address, psycopg_of
from state_runtime.sinks.sql_catalog import FoundTable, exists, found_table, schema_of
from state_runtime.sinks.sql_copy import csv_of, null_patterns
from state_runtime.sinks.sql_errors import explained, name_of, passes
from state_runtime.sinks.sql_statements import Epochs, Memory, Owners, Statements
from state_runtime.sinks.sql_types import IDENTIFIER_BYTES_MAX

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import Composed

__all__ = ["SqlTable", "Write"]

ATTEMPTS_MAX: Final = 30
"""With waits of up to four seconds: a server that is started again, or whose standby takes over, is waited for."""
_WAIT_S_MAX: Final = 4.0
_OLDEST: Final = 150_000
"""PostgreSQL 15 has unique indexes in which null is equal to null. Older ones are not maintained any more."""
_MAKING: Final = 0x5354494C4C
"""The lock of drivers that make tables."""
_SETTINGS: Final = (
    # A driver that sleeps in its transaction, or another session that has locked the table, ends an attempt; the
    # attempts are bounded.
    "SELECT set_config('lock_timeout', '5s', true), set_config('idle_in_transaction_session_timeout', '60s', true)",
    # With `off` the server would lose an epoch that it has confirmed, if it crashes within a second. The next
    # checkpoint removes what is staged of it.
    "SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'",
)
_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class _Again(Exception):
    """It was not done, or that is not known: look again."""


@dataclass(frozen=True)
class Write:
    """An epoch's rows, and what is done with them.

    Attributes:
        rows: gives them, anew for each attempt.
        names: of their columns.
        merge_on: rows take the place of those with equal keys, each key is there once; empty: they are appended.
        removed: keys whose rows go, none of which is among the rows.
    """

    rows: Callable[[], Iterable[pa.Table]]
    names: Sequence[str]
    merge_on: Sequence[str] = ()
    removed: pa.Table | None = None


class SqlTable:
    """One table.

    Args:
        name: `table` or `schema.table`, as the catalog has it; without a schema it is in the first one of the search
            path.
        wait: between two attempts, by default random and growing.
    """

    def __init__(self, name: str, address: Address, *, wait: Any = None) -> None:
        parts = name.split(".")
        if "\x00" in name or len(parts) > 2 or not all(0 < len(p.encode()) <= IDENTIFIER_BYTES_MAX for p in parts):
            raise InvalidConfiguration(
                f"SqlSink: {name!r} names no table: it is table or schema.table, each of 1 to {IDENTIFIER_BYTES_MAX} "
                "bytes and without quotes"
            )
        self.name = name
        self._address = address
        self._schema, self._table = ("", *parts)[-2:]
        self._wait = wait_random_exponential(max=_WAIT_S_MAX) if wait is None else wait
        self._open: list[psycopg.Connection[Any]] = []
        weakref.finalize(self, _close, self._open)

    @property
    def place(self) -> str:
        """The table, its database and its host, for messages and to compare two of them."""
        return f"{self.name} in {self._address.shown}"

    def found(self) -> FoundTable | None:
        """Return the table as it is; None if there is none.

        Raises:
            InvalidConfiguration: there is no such schema, or the server is too old.
        """
        return self.retried(lambda connection: found_table(connection, self._schema_in(connection), self._table))

    def newest(self, writer: str) -> int:
        """Return the newest epoch of a writer that the table has; 0 if none."""

        def look(connection: psycopg.Connection[Any]) -> int:
            schema = self._schema_in(connection)
            if not exists(connection, schema, Epochs.name):
                return 0
            return _number(connection, Epochs(schema).newest(writer))

        return self.retried(look)

    def owners(self, connection: psycopg.Connection[Any]) -> Owners:
        """Return the statements on the table of owners, which is made if it is not there."""
        schema = self._schema_in(connection)
        if not exists(connection, schema, Owners.name):
            with _making(connection):
                _make_memory(connection, schema)
        return Owners(schema)

    def make(self, columns: pa.Schema, merge_on: Sequence[str], *, add_columns: bool) -> None:
        """Make what is missing: the table, with a key if rows are merged; its new columns; our tables beside it. It is
        one transaction: a crash leaves all of it or nothing. A role that may make no tables needs them to be there."""

        def act(connection: psycopg.Connection[Any]) -> None:
            schema = self._schema_in(connection)
            statements = Statements(schema, self._table)
            with _making(connection):
                found = found_table(connection, schema, self._table)
                if found is None:
                    missing = statements.make(columns, merge_on)
                else:
                    known = {column.name for column in found.columns}
                    missing = [statements.add(field) for field in columns if add_columns and field.name not in known]
                for statement in missing:
                    connection.execute(statement)
                _make_memory(connection, schema)

        self.retried(act, columns.names)

    def write(self, writer: str, epoch: int, write: Write) -> bool:
        """Write an epoch's rows in one transaction, unless the table has this epoch of the writer, or a later one.

        Returns:
            Whether this call did.

        Raises:
            StoreUnavailable: the server, or other transactions, let no attempt through. What became of the last one is
                not known; the next start reads it.
            StoreRefused: the role may not do it. InvalidPipeline: the table does not take the rows.
        """

        def act(connection: psycopg.Connection[Any]) -> bool:
            schema = self._schema_in(connection)
            epochs, statements = Epochs(schema), Statements(schema, self._table)
            with connection.transaction():
                _set(connection)
                connection.execute(epochs.begin(writer, self._table))
                # Another driver of this writer waits here until this transaction ends, and reads what it has done.
                if _number(connection, epochs.lock(writer)) >= epoch:
                    return False
                faults.reach("sql-locked")
                _put(connection, statements, write)
                connection.execute(epochs.write(writer, epoch, self._table))
                faults.reach("sql-written")
            return True

        return self.retried(act, write.names)

    def _schema_in(self, connection: psycopg.Connection[Any]) -> str:
        """Return the schema's name. It is looked up each time: a pooler may give each transaction another session."""
        schema = schema_of(connection, self._schema)
        if schema is None:
            raise InvalidConfiguration(
                f"there is no schema for the table {self.place}: create it (CREATE SCHEMA), or name another one"
            )
        return schema

    def retried(self, action: Callable[[psycopg.Connection[Any]], T], columns: Sequence[str] = ()) -> T:
        """Do it with a connection; again if what was in the way passes by itself.

        An action is a look, or one transaction that looks first: so it may be repeated whatever became of it.

        Args:
            columns: that a message may name.
        """
        library = psycopg_of()
        retrying = Retrying(
            stop=stop_after_attempt(ATTEMPTS_MAX) | stop_after_delay(patience_s()),
            wait=self._wait,
            retry=retry_if_exception_type(_Again),
            reraise=True,
        )
        last: list[psycopg.Error] = []

        def attempt() -> T:
            try:
                return action(self._connected())
            except library.Error as error:
                _close(self._open)
                last[:] = [error]
                if not passes(error):
                    raise explained(error, self.place, columns, self._address.redact) from None
                _LOG.info("the table %s is tried again: %s", self.place, name_of(error, self._address.redact))
                raise _Again from None

        try:
            return retrying(attempt)
        except _Again:
            raise explained(last[0], self.place, columns, self._address.redact) from None

    def _connected(self) -> psycopg.Connection[Any]:
        """Return a connection that is as good as is known; it stays open until the next error."""
        if not self._open:
            self._open.append(self._address.connect())
            version = self._open[0].info.server_version
            if version < _OLDEST:
                _close(self._open)
                raise InvalidConfiguration(
                    f"SqlSink needs PostgreSQL 15 or newer, and {self._address.shown} is {version // 10_000}: upgrade "
                    "it"
                )
        return self._open[0]


@contextmanager
def _making(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """A transaction that makes tables. Two sessions that make one at once would both find that it is not there."""
    with connection.transaction():
        _set(connection)
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_MAKING])
        yield


def _set(connection: psycopg.Connection[Any]) -> None:
    for setting in _SETTINGS:
        connection.execute(setting)


def _make_memory(connection: psycopg.Connection[Any], schema: str) -> None:
    memories: Sequence[Memory] = (Epochs(schema), Owners(schema))
    for memory in memories:
        if not exists(connection, schema, memory.name):
            connection.execute(memory.make())


def _put(connection: psycopg.Connection[Any], statements: Statements, write: Write) -> None:
    """Put rows into the table, in the transaction of the caller."""
    if not write.merge_on:
        _copy(connection, statements.append(write.names), write.rows())
        return
    if write.removed is not None and write.removed.num_rows:
        keys = write.removed.select(write.merge_on)
        make, copy, removals = statements.remove(write.merge_on, null_patterns(keys, write.merge_on))
        connection.execute(make)
        _copy(connection, copy, [keys])
        for removal in removals:
            connection.execute(removal)
    make, copy, put = statements.merge(write.names, write.merge_on)
    connection.execute(make)
    _copy(connection, copy, write.rows())
    connection.execute(put)


def _copy(connection: psycopg.Connection[Any], statement: Composed, rows: Iterable[pa.Table]) -> None:
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        for table in rows:
            for text in csv_of(table):
                copy.write(memoryview(text))


def _number(connection: psycopg.Connection[Any], statement: Composed) -> int:
    row = connection.execute(statement).fetchone()
    return int(row[0]) if row is not None else 0


def _close(connections: list[psycopg.Connection[Any]]) -> None:
    while connections:
        connections.pop().close()
