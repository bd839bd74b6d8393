"""Layout that the Parquet files of one folder must share, so that a reader takes them for one table.

A reader takes the columns from one file, or from all: a column must have one name, in one spelling, and one type in
all files, and all files are in folders by the same columns. A column, or a field of a struct, may come or go.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import pyarrow as pa
import pyarrow.parquet as pq

from state_runtime.base.errors import CorruptData, InvalidPipeline
from state_runtime.base.limits import KIB, MIB
from state_runtime.snapshot.manifest import StagedFile
from state_runtime.store import Store

__all__ = [
    "OutputLayout",
    "check_columns",
    "difference",
    "footer_of",
    "refuse_layouts_beside",
    "refuse_other_files",
]

_LOG = logging.getLogger(__name__)
_AT_A_TIME = 16
"""Number of files that are read in parallel: each takes a request or two."""
_FOOTER_BYTES = 64 * KIB
_FOOTER_BYTES_MAX = 16 * MIB
"""Size of the footer of a file with thousands of columns; files with larger footers are not checked."""


@dataclass(frozen=True)
class OutputLayout:
    """How a sink lays its rows out.

    Attributes:
        place: URL of the folder.
        columns: all of them, with those that name folders.
        partition_by: those that name folders.
    """

    place: str
    columns: pa.Schema
    partition_by: tuple[str, ...] = ()


def check_columns(schema: pa.Schema, epoch_column: str | None, where: str) -> None:
    """Refuse columns that readers of Parquet files could not tell apart, or that cannot be written.

    Args:
        epoch_column: the column that the sink adds.
        where: whose columns they are, for the message.

    Raises:
        InvalidPipeline: names the columns and the remedy.
    """
    taken = [name for name in schema.names if epoch_column and name.lower() == epoch_column.lower()]
    if taken:
        raise InvalidPipeline(
            f"{where}: the rows have a column {taken[0]!r}, and the sink adds one named {epoch_column!r}: files with "
            'both could not be read. Rename yours, or give the added one another name: ParquetSink(…, epoch_column="…"'
            "), or None for none"
        )
    for path, kind in _structs(schema):
        names = [field.name.lower() for field in kind]
        twice = [field.name for field in kind if names.count(field.name.lower()) > 1]
        if twice or not names:
            what = f"fields that only case tells apart ({', '.join(twice)})" if twice else "no fields"
            raise InvalidPipeline(
                f"{where}: the struct {path!r} has {what}, which Spark cannot read back from Parquet files. Rebuild "
                "the struct in a transform, or write it as text (to_json)"
            )


def refuse_layouts_beside(layouts: Mapping[str, OutputLayout]) -> None:
    """Refuse sinks of one job that write different columns or different folder levels into one folder.

    Args:
        layouts: by the sinks' names.

    Raises:
        InvalidPipeline: two of them do.
    """
    for (one, first), (other, second) in combinations(layouts.items(), 2):
        what = ""
        if first.place == second.place:
            columns = (sorted(first.columns.names), sorted(second.columns.names))
            what = "they have other columns" if columns[0] != columns[1] else difference(first, second)
        elif any(
            inner.place.startswith(f"{outer.place}/") and outer.partition_by
            for outer, inner in ((first, second), (second, first))
        ):
            what = "one lies among the folders by value of the other"
        if what:
            where = first.place if first.place == second.place else f"{first.place} and {second.place}"
            raise InvalidPipeline(
                f"the sinks {one!r} and {other!r} both write to {where}, and no reader could take their files "
                f"for one table: {what}. Give each a folder of its own"
            )


def refuse_other_files(store: Store, layout: OutputLayout, files: Sequence[StagedFile], where: str) -> None:
    """Refuse to write beside files that no reader could read together with the new ones.

    Args:
        files: of the folder: one of each writer. A file that is gone, or cannot be read as Parquet, is skipped: it
            already belongs to its readers.
        where: which sink it is, for the message.

    Raises:
        InvalidPipeline: names the file and the difference. StoreUnavailable: start again.
    """
    with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="outputs") as pool:
        layouts = list(pool.map(partial(_layout_of, store), files))
    for file, there in zip(files, layouts, strict=True):
        what = difference(there, layout) if there is not None else ""
        if what:
            raise InvalidPipeline(
                f"{where}: {store.url} has files of other rows, such as {file.final}, and no reader could take them "
                f"and the new ones for one table: {what}. Nothing was changed. Give the sink a new folder, or move the "
                "old files to another one with their _stillstate folder; or make the old columns in a transform (cast)"
            )


def difference(there: OutputLayout, here: OutputLayout) -> str:
    """Return why files of two layouts are not one table; "" if they are."""
    if there.partition_by != here.partition_by:
        return (
            f"they are partitioned by {_listed(there.partition_by)}, and the new ones by {_listed(here.partition_by)}"
        )
    return _of_fields(
        [f for f in there.columns if f.name not in there.partition_by],
        [f for f in here.columns if f.name not in here.partition_by],
        "",
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "no column"


def _of_fields(there: Iterable[pa.Field], here: Iterable[pa.Field], prefix: str) -> str:
    known = {field.name.lower(): field for field in there}
    common = [(known[f.name.lower()], f) for f in here if f.name.lower() in known]
    renamed = next((pair for pair in common if pair[0].name != pair[1].name), None)
    if renamed is not None:
        return f"column {prefix}{renamed[1].name} is written {prefix}{renamed[0].name} there"
    return next(filter(None, (_of_types(a.type, b.type, f"{prefix}{b.name}") for a, b in common)), "")


def _of_types(there: pa.DataType, here: pa.DataType, path: str) -> str:
    types = pa.types
    if types.is_struct(there) and types.is_struct(here):
        return _of_fields(there, here, f"{path}.")
    if types.is_map(there) and types.is_map(here):
        key = _of_types(there.key_type, here.key_type, f"{path}.key")
        return key or _of_types(there.item_type, here.item_type, f"{path}.value")
    if _is_list(there) and _is_list(here):
        return _of_types(there.value_type, here.value_type, f"{path}.element")
    if _stored(there) == _stored(here):
        return ""
    return f"column {path} is {there} there and {here} in the new ones"


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _stored(kind: pa.DataType) -> pa.DataType:
    """Return a type as Parquet stores it: without the session's time zone, for any width of Arrow's offsets."""
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")
    if pa.types.is_large_string(kind):
        return pa.string()
    return pa.binary() if pa.types.is_large_binary(kind) else kind


def _structs(fields: Iterable[pa.Field], prefix: str = "") -> Iterator[tuple[str, pa.StructType]]:
    """Yield all structs inside some columns, with their paths."""
    for field in fields:
        path, kind = f"{prefix}{field.name}", field.type
        if pa.types.is_struct(kind):
            yield path, kind
        if pa.types.is_nested(kind):
            yield from _structs((kind.field(n) for n in range(kind.num_fields)), f"{path}.")


def _layout_of(store: Store, file: StagedFile) -> OutputLayout | None:
    """Return the layout of a file that was published, or is about to be; None if it cannot be read."""
    for path in (file.final, file.staged):
        try:
            footer = footer_of(store, path, file.bytes)
        except FileNotFoundError:
            continue
        except CorruptData as error:
            _LOG.info("the columns of %s in %s are not known: %s", path, store.url, error)
            return None
        try:
            columns = pq.read_schema(pa.BufferReader(footer))
        except (pa.ArrowException, OSError) as error:
            _LOG.info("the columns of %s in %s are not known: %s", path, store.url, error)
            return None
        folders = [folder.partition("=")[0] for folder in file.final.split("/")[:-1] if "=" in folder]
        return OutputLayout(store.url, columns, tuple(folders))
    return None


def footer_of(store: Store, path: str, size: int) -> bytes:
    """Return the end of a Parquet file, with all of its footer, unless that is too large."""
    tail = store.read_range(path, max(0, size - _FOOTER_BYTES), min(size, _FOOTER_BYTES))
    wanted = int.from_bytes(tail[-8:-4], "little") + 8
    if wanted <= len(tail) or wanted > min(size, _FOOTER_BYTES_MAX):
        return tail
    return store.read_range(path, size - wanted, wanted)
