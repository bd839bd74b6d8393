"""Rows as data files of an Iceberg table, and the files that they replace. A commit makes them part of the table.

Uses of pyiceberg that are not in its public interface are here: how it writes data files, and how it reads one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.base.limits import MIB
from state_runtime.sinks.iceberg_catalog import iceberg_library
from state_runtime.sinks.merge_rows import without_keys

__all__ = ["append_files", "merge_files"]

_BYTES_AT_A_TIME: Final = 256 * MIB
"""Rows that are in memory before they are written: files of an epoch's tasks become one, if they are small."""


class _Writer:
    """Rows on their way into data files."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._columns = iceberg_library().io.pyarrow.schema_to_pyarrow(table.schema(), include_field_ids=False)
        self._waiting: list[pa.Table] = []
        self._bytes = 0
        self.files: list[Any] = []

    def add(self, rows: pa.Table) -> None:
        """Add rows. They may lack columns of the table."""
        if rows.num_rows:
            self._waiting.append(_as(rows, self._columns))
            self._bytes += rows.nbytes
        if self._bytes >= _BYTES_AT_A_TIME:
            self.flush()

    def flush(self) -> list[Any]:
        """Write what waits; return all files."""
        if self._waiting:
            rows, self._waiting, self._bytes = pa.concat_tables(self._waiting), [], 0
            write = iceberg_library().io.pyarrow._dataframe_to_data_files  # noqa: SLF001 - see above
            self.files += write(table_metadata=self._table.metadata, df=rows, io=self._table.io)
        return self.files


def append_files(table: Any, tables: Iterable[pa.Table]) -> list[Any]:
    """Write rows as data files of a table."""
    writer = _Writer(table)
    for rows in tables:
        writer.add(rows)
    return writer.flush()


def merge_files(
    table: Any, rows: pa.Table, keys: Sequence[str], removed: pa.Table | None
) -> tuple[list[Any], list[Any]]:
    """Write rows, and those that stay of files with rows of equal keys.

    Returns:
        The files to take out of the table, and those to put in.
    """
    merged = rows.select(list(keys))
    if removed is not None and removed.num_rows:
        merged = pa.concat_tables([merged, removed.select(list(keys))])
    writer, gone = _Writer(table), []
    if merged.num_rows and table.current_snapshot() is not None:
        for task in table.scan(row_filter=_about(merged)).plan_files():
            stays = without_keys(_read(table, task, keys), merged, keys)
            if pc.all(stays).as_py():
                continue
            gone.append(task.file)
            if pc.any(stays).as_py():
                writer.add(_read(table, task, table.schema().as_arrow().names).filter(stays))
    writer.add(rows)
    return gone, writer.flush()


def _read(table: Any, task: Any, names: Sequence[str]) -> pa.Table:
    """Return a data file's rows, without those that delete files take out."""
    library = iceberg_library()
    scan = library.io.pyarrow.ArrowScan(
        table_metadata=table.metadata,
        io=table.io,
        projected_schema=table.schema().select(*names),
        row_filter=library.expressions.AlwaysTrue(),
    )
    whole = library.table.FileScanTask(task.file, delete_files=task.delete_files)
    return scan.to_table(tasks=[whole])


def _about(keys: pa.Table) -> Any:
    """Return a condition that all rows with such keys fulfil, by which files are passed over: the keys' least and
    greatest values."""
    ex = iceberg_library().expressions
    condition: Any = ex.AlwaysTrue()
    for name in keys.column_names:
        column = keys[name]
        one: Any = ex.AlwaysFalse()
        if column.null_count < len(column):
            if not _has_range(column):
                continue
            ends = pc.min_max(column)
            one = ex.And(
                ex.GreaterThanOrEqual(name, ends["min"].as_py()), ex.LessThanOrEqual(name, ends["max"].as_py())
            )
        condition = ex.And(condition, ex.Or(one, ex.IsNull(name)) if column.null_count else one)
    return condition


def _has_range(column: pa.ChunkedArray) -> bool:
    """Return whether files are passed over by such values: NaN has no place between others."""
    kind = column.type
    return bool(pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_date(kind))


def _as(rows: pa.Table, columns: pa.Schema) -> pa.Table:
    """Return rows with a table's columns in its order; those that they lack are null."""
    return pa.table(
        [
            rows[f.name].cast(f.type) if f.name in rows.column_names else pa.nulls(rows.num_rows, f.type)
            for f in columns
        ],
        schema=columns,
    )
