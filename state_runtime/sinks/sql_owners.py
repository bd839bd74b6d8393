"""Who writes into a table, as documents in a table beside it: see pipeline/output_owner.py.

A root and a copy of it have one id, so for the table of epochs they are one writer: what the one has written, the other
would take for its own, and its rows would not come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from state_runtime.base.errors import CorruptData
from state_runtime.sinks.sql_table import SqlTable
from state_runtime.store import Created

if TYPE_CHECKING:
    import psycopg

__all__ = ["SqlOwners"]


class SqlOwners:
    """The documents of owners, in the database of a table."""

    def __init__(self, table: SqlTable) -> None:
        self._table = table

    @property
    def url(self) -> str:
        """The table, for messages."""
        return self._table.place

    def create(self, path: str, body: bytes) -> Created:
        """Create a document, if there is none of that name. After a lost answer it is read back."""

        def act(connection: psycopg.Connection[Any]) -> Created:
            owners = self._table.owners(connection)
            with connection.transaction():
                connection.execute(owners.create(path, body.decode()))
            row = connection.execute(owners.read(path)).fetchone()
            return Created.MINE if row is not None and row[0] == body.decode() else Created.LOST

        return self._table.retried(act)

    def read(self, path: str, bytes_max: int) -> bytes:
        """Return a document."""
        row = self._table.retried(
            lambda connection: connection.execute(self._table.owners(connection).read(path)).fetchone()
        )
        if row is None:
            raise FileNotFoundError(f"{path} of {self.url}")
        body = str(row[0]).encode()
        if len(body) > bytes_max:
            raise CorruptData(
                f"{path} of {self.url} has more than {bytes_max} bytes; remove the row if it is not yours"
            )
        return body

    def list_names(self, path: str) -> list[str]:
        """Return the names of documents directly below a path."""
        rows = self._table.retried(
            lambda connection: connection.execute(self._table.owners(connection).below(f"{path}/")).fetchall()
        )
        return sorted(str(name) for (name,) in rows)
