"""Export of a state to one file on this host, in bounded memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from state_runtime.base.errors import InvalidConfiguration, InvalidData
from state_runtime.reading.snapshot import ReadableState
from state_runtime.state.table import HASH_MAX, hashes_of

__all__ = ["FORMATS", "Exported", "export_state"]

FORMATS = (".parquet", ".arrow", ".csv")
_ROW_GROUP_ROWS = 131_072


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    rows: int
    bytes: int


def export_state(
    state: ReadableState,
    target: Path,
    *,
    columns: Sequence[str] | None = None,
    overwrite: bool = False,
    on_progress: Callable[[float], None] | None = None,
) -> Exported:
    """Write a state's live rows into a file, ordered by key hash. The file appears complete, or not at all.

    Args:
        target: `.parquet`, `.arrow` (IPC file) or `.csv`.
        columns: the columns, in this order; None is all.
        on_progress: called with the share of the state that was read.

    Raises:
        InvalidConfiguration: another suffix, the file exists, there is no such folder or column, or CSV cannot hold a
            column.
        MissingFile, CorruptSegment, SnapshotExpired, StoreUnavailable: see `SnapshotReader`; no file is left.
    """
    if target.suffix not in FORMATS:
        raise InvalidConfiguration(f"{target}: the suffix chooses the format; use one of {', '.join(FORMATS)}")
    if target.exists() and not overwrite:
        raise InvalidConfiguration(f"{target} is there already; give another name, or say that it is to be replaced")
    schema = state.schema(columns)
    if target.suffix == ".csv" and (nested := [f.name for f in schema if pa.types.is_nested(f.type)]):
        raise InvalidConfiguration(f"CSV cannot hold column {nested[0]!r}; leave it out, or write .parquet")
    if not target.parent.is_dir():
        raise InvalidConfiguration(f"there is no folder {target.parent}; make it first")
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}-", suffix=".part", dir=target.parent)
    os.close(descriptor)
    part = Path(name)
    try:
        rows = _write(part, target.suffix, schema, _tables(state, schema.names, on_progress))
        exported = Exported(rows, part.stat().st_size)
        os.replace(part, target)
        return exported
    finally:
        part.unlink(missing_ok=True)


def _tables(
    state: ReadableState, columns: Sequence[str], on_progress: Callable[[float], None] | None
) -> Iterator[pa.Table]:
    values = state.shown.values_of(columns)
    for batch in state.snapshot.reader().read(state.operator, state.name, columns=values):
        yield state.shown.show(batch, columns)
        if on_progress is not None:
            on_progress(int(hashes_of(batch)[-1]) / HASH_MAX)
    if on_progress is not None:
        on_progress(1.0)


def _write(path: Path, suffix: str, schema: pa.Schema, tables: Iterator[pa.Table]) -> int:
    rows = 0
    first = next(tables, None)
    # The stored rows have types that the manifest alone does not tell.
    schema = schema if first is None else first.schema
    with _writer(path, suffix, schema) as writer:
        table = first
        while table is not None:
            rows += table.num_rows
            try:
                table = table.cast(schema)
            except pa.ArrowException as error:
                raise InvalidData(f"rows of one state have different types: {error}") from error
            if suffix == ".parquet":
                writer.write_table(table, row_group_size=_ROW_GROUP_ROWS)
            else:
                writer.write_table(table)
            table = next(tables, None)
    return rows


def _writer(path: Path, suffix: str, schema: pa.Schema) -> AbstractContextManager[Any]:
    writer: AbstractContextManager[Any]
    if suffix == ".parquet":
        writer = pq.ParquetWriter(path, schema, compression="zstd")
    elif suffix == ".csv":
        writer = pa_csv.CSVWriter(path, schema)
    else:
        writer = pa.ipc.new_file(str(path), schema)
    return writer
