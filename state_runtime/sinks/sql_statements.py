"""The statements of a sink into PostgreSQL; pure. Names are quoted by psycopg and by nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pyarrow as pa

from state_runtime.sinks.sql_address import psycopg_of
from state_runtime.sinks.sql_copy import COPY_FORMAT
from state_runtime.sinks.sql_types import type_for

if TYPE_CHECKING:
    from psycopg.sql import Composed

__all__ = ["Epochs", "Memory", "Owners", "Statements"]

_BESIDE: Final = ("pg_temp", "stillstate_rows")
_GONE: Final = ("pg_temp", "stillstate_gone")


class Memory(ABC):
    """Statements on a table of ours in the schema of the user's table.

    Values stand in them as literals: beside a `%s`, a `%` in a name would be read as another one.
    """

    name: ClassVar[str]

    def __init__(self, schema: str) -> None:
        self._table = _identifier(schema, self.name)

    @abstractmethod
    def make(self) -> Composed:
        """The table itself."""


class Epochs(Memory):
    """The newest epoch of each writer."""

    name: ClassVar[str] = "stillstate_epochs"

    def make(self) -> Composed:
        """A row for each writer: its newest epoch, and, for people, where its rows went and when."""
        return _sql(
            "CREATE TABLE {} (writer text PRIMARY KEY, epoch bigint NOT NULL, table_name text NOT NULL, "
            "written_at timestamptz NOT NULL DEFAULT now())",
            self._table,
        )

    def newest(self, writer: str) -> Composed:
        return _sql("SELECT epoch FROM {} WHERE writer = {}", self._table, _literal(writer))

    def begin(self, writer: str, table: str) -> Composed:
        """A row for a writer that has none: so there is one to lock."""
        ask = "INSERT INTO {} (writer, epoch, table_name) VALUES ({}, 0, {}) ON CONFLICT (writer) DO NOTHING"
        return _sql(ask, self._table, _literal(writer), _literal(table))

    def lock(self, writer: str) -> Composed:
        """The newest epoch, once no other transaction is about to write one."""
        return _sql("SELECT epoch FROM {} WHERE writer = {} FOR UPDATE", self._table, _literal(writer))

    def write(self, writer: str, epoch: int, table: str) -> Composed:
        ask = "UPDATE {} SET epoch = {}, table_name = {}, written_at = now() WHERE writer = {}"
        return _sql(ask, self._table, _literal(epoch), _literal(table), _literal(writer))


class Owners(Memory):
    """Documents by their names, which say who writes: see sinks/sql_owners.py."""

    name: ClassVar[str] = "stillstate_owners"

    def make(self) -> Composed:
        return _sql("CREATE TABLE {} (path text PRIMARY KEY, body text NOT NULL)", self._table)

    def create(self, path: str, body: str) -> Composed:
        ask = "INSERT INTO {} (path, body) VALUES ({}, {}) ON CONFLICT (path) DO NOTHING"
        return _sql(ask, self._table, _literal(path), _literal(body))

    def read(self, path: str) -> Composed:
        return _sql("SELECT body FROM {} WHERE path = {}", self._table, _literal(path))

    def below(self, folder: str) -> Composed:
        """The names in a folder, whose name ends with a slash."""
        ask = "SELECT substr(path, length({0}) + 1) FROM {1} WHERE starts_with(path, {0})"
        return _sql(ask, _literal(folder), self._table)


class Statements:
    """Statements on the table that gets the rows, and on those that hold an epoch's rows beside it until its end."""

    def __init__(self, schema: str, name: str) -> None:
        self._table = _identifier(schema, name)

    def make(self, columns: pa.Schema, merge_on: Sequence[str]) -> list[Composed]:
        """The table, with a key by which rows are merged: in it null is equal to null.

        Half of each page of a table that is merged into stays free: a row's next version finds room beside it, and no
        index has to learn of it (docs/design/0050-postgresql.md).
        """
        ask = "CREATE TABLE {} ({}) WITH (fillfactor = 50)" if merge_on else "CREATE TABLE {} ({})"
        made = [_sql(ask, self._table, _listed([_column(field) for field in columns]))]
        if merge_on:
            can_be_null = any(columns.field(name).nullable for name in merge_on)
            unique = "CREATE UNIQUE INDEX ON {} ({}) NULLS NOT DISTINCT"
            key = unique if can_be_null else "ALTER TABLE {} ADD PRIMARY KEY ({})"
            made.append(_sql(key, self._table, _names(merge_on)))
        return made

    def add(self, field: pa.Field) -> Composed:
        """A column that the table lacks; rows that are there have null in it."""
        return _sql("ALTER TABLE {} ADD COLUMN IF NOT EXISTS {}", self._table, _column(field.with_nullable(True)))

    def append(self, names: Sequence[str]) -> Composed:
        return _copy(self._table, names)

    def merge(self, names: Sequence[str], merge_on: Sequence[str]) -> tuple[Composed, Composed, Composed]:
        """Make a table for the rows; copy them into it; put them in the place of those with equal keys.

        `ON CONFLICT` lets other writers write, too. It takes null for equal to null where the index does. Rows come in
        the order of the index, so that those of a page come together.
        """
        beside, columns, keys = _identifier(*_BESIDE), _names(names), _names(merge_on)
        rest = [name for name in names if name not in merge_on]
        update = _sql("UPDATE SET {}", _listed([_sql("{0} = EXCLUDED.{0}", _identifier(name)) for name in rest]))
        put = "INSERT INTO {} ({}) SELECT {} FROM {} ORDER BY {} ON CONFLICT ({}) DO {}"
        what = update if rest else _sql("NOTHING")
        return (
            self._beside(beside, names),
            _copy(beside, names),
            _sql(put, self._table, columns, columns, beside, keys, keys, what),
        )

    def remove(
        self, merge_on: Sequence[str], patterns: Sequence[tuple[bool, ...]]
    ) -> tuple[Composed, Composed, list[Composed]]:
        """Make a table for the keys of rows that go; copy them into it; remove the rows, one pattern of nulls in the
        keys after the other."""
        gone = _identifier(*_GONE)
        removals = [_sql("ANALYZE {}", gone)]
        for pattern in patterns:
            equal = [_equal(name, is_null) for name, is_null in zip(merge_on, pattern)]
            removals.append(_sql("DELETE FROM {} t USING {} s WHERE {}", self._table, gone, _listed(equal, " AND ")))
        return self._beside(gone, merge_on), _copy(gone, merge_on), removals

    def _beside(self, beside: Any, names: Sequence[str]) -> Composed:
        """A table of this transaction alone, with the types of the table and none of its rules."""
        ask = "CREATE TEMP TABLE {} ON COMMIT DROP AS SELECT {} FROM {} WITH NO DATA"
        return _sql(ask, beside, _names(names), self._table)


def _sql(text: str, *parts: Any) -> Composed:
    made: Composed = psycopg_of().sql.SQL(text).format(*parts)
    return made


def _literal(value: str | int) -> Any:
    return psycopg_of().sql.Literal(value)


def _identifier(*names: str) -> Any:
    return psycopg_of().sql.Identifier(*names)


def _listed(parts: Sequence[Any], by: str = ", ") -> Composed:
    made: Composed = psycopg_of().sql.SQL(by).join(parts)
    return made


def _names(names: Sequence[str]) -> Composed:
    return _listed([_identifier(name) for name in names])


def _column(field: pa.Field) -> Composed:
    kind = psycopg_of().sql.SQL(type_for(field.type) or "text")
    return _sql("{} {}{}", _identifier(field.name), kind, _sql("" if field.nullable else " NOT NULL"))


def _copy(table: Any, names: Sequence[str]) -> Composed:
    return _sql(f"COPY {{}} ({{}}) FROM STDIN {COPY_FORMAT}", table, _names(names))


def _equal(name: str, is_null: bool) -> Composed:
    equal = "t.{0} IS NULL AND s.{0} IS NULL" if is_null else "t.{0} = s.{0}"
    return _sql(equal, _identifier(name))
