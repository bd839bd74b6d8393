"""What PostgreSQL's catalog says of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from state_runtime.sinks.sql_types import TableColumn

if TYPE_CHECKING:
    import psycopg

__all__ = ["FoundTable", "exists", "found_table", "schema_of"]

_TABLE: Final = """
SELECT c.oid, c.relkind::text, c.relpersistence::text
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = %s
"""
_COLUMNS: Final = """
SELECT a.attname, coalesce(b.typname, t.typname), pg_catalog.format_type(a.atttypid, a.atttypmod),
       CASE WHEN b.oid IS NULL THEN a.atttypmod ELSE t.typtypmod END,
       coalesce(b.typtype, t.typtype) = 'e',
       a.attnotnull AND NOT a.atthasdef AND a.attidentity = '',
       a.attgenerated <> '' OR a.attidentity = 'a',
       NOT a.attnotnull
FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
LEFT JOIN pg_catalog.pg_type b ON t.typtype = 'd' AND b.oid = t.typbasetype
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""
_KEYS: Final = """
SELECT array_agg(a.attname::text), i.indnullsnotdistinct
FROM pg_catalog.pg_index i JOIN pg_catalog.pg_attribute a
  ON a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
WHERE i.indrelid = %s AND i.indisunique AND i.indimmediate AND i.indisvalid
  AND i.indpred IS NULL AND i.indexprs IS NULL
GROUP BY i.indexrelid, i.indnullsnotdistinct
"""
_REFUSED_KINDS: Final[Mapping[str, str]] = {
    "f": "it is a foreign table, which is not in the transaction of its epochs",
    "v": "it is a view; name the table below it",
    "m": "it is a materialized view; name the table below it",
}
_KINDS: Final = ("r", "p")


@dataclass(frozen=True)
class FoundTable:
    """A table that is there.

    Attributes:
        refusal: why no epoch can be in it exactly once; "" if it can.
        keys: for each unique index without conditions its columns, and whether null is equal to null in it.
    """

    columns: tuple[TableColumn, ...]
    refusal: str
    keys: tuple[tuple[frozenset[str], bool], ...]

    def has_key(self, names: Sequence[str]) -> bool:
        """Return whether the table has each key once by its own rules, keys with nulls included."""
        can_be_null = {column.name for column in self.columns if column.takes_null}
        return any(
            columns == frozenset(names) and (nulls_are_equal or not can_be_null & columns)
            for columns, nulls_are_equal in self.keys
        )


def schema_of(connection: psycopg.Connection[Any], name: str) -> str | None:
    """Return a schema by its name, or, without a name, the first one of the search path; None if there is none."""
    if name:
        row = connection.execute("SELECT nspname FROM pg_catalog.pg_namespace WHERE nspname = %s", [name]).fetchone()
    else:
        row = connection.execute("SELECT current_schema()").fetchone()
    return None if row is None or row[0] is None else str(row[0])


def exists(connection: psycopg.Connection[Any], schema: str, name: str) -> bool:
    """Return whether there is a table of that name."""
    return connection.execute(_TABLE, [schema, name]).fetchone() is not None


def found_table(connection: psycopg.Connection[Any], schema: str, name: str) -> FoundTable | None:
    """Return a table; None if there is none."""
    row = connection.execute(_TABLE, [schema, name]).fetchone()
    if row is None:
        return None
    number, kind, persistence = row
    columns = tuple(TableColumn(*found) for found in connection.execute(_COLUMNS, [number]).fetchall())
    keys = connection.execute(_KEYS, [number]).fetchall()
    refusal = "" if kind in _KINDS else _REFUSED_KINDS.get(kind, "it is no table")
    if not refusal and persistence != "p":
        refusal = (
            "it is unlogged: a crash of the server would empty it, and the epochs that were in it would not come again"
        )
    return FoundTable(columns, refusal, tuple((frozenset(names), bool(equal)) for names, equal in keys))
