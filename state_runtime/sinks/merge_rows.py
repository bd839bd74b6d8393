"""Rows that are merged into a table by their keys; pure and vectorised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.base.errors import InvalidPipeline

__all__ = ["check_merge_columns", "last_of_each", "without_keys", "without_removed"]


def check_merge_columns(schema: pa.Schema, merge_on: Sequence[str], remove_where: str, where: str) -> None:
    """Refuse keys that the rows do not have, and a mark of removed rows that is not boolean.

    Args:
        where: whose rows they are, for the message.

    Raises:
        InvalidPipeline: names the column.
    """
    for name in (*merge_on, *([remove_where] if remove_where else [])):
        if name not in schema.names:
            raise InvalidPipeline(f"{where}: there is no column {name!r}; it has {', '.join(schema.names)}")
    if remove_where and not pa.types.is_boolean(schema.field(remove_where).type):
        raise InvalidPipeline(
            f"{where}: remove_where needs a boolean column, and {remove_where!r} is "
            f"{schema.field(remove_where).type}; make one in a transform"
        )


def last_of_each(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Return of rows with equal keys the last one, in their order."""
    numbered = rows.append_column("__stillstate_row", pa.array(np.arange(rows.num_rows)))
    last = numbered.group_by(list(keys)).aggregate([("__stillstate_row", "max")])["__stillstate_row_max"]
    return rows.take(pa.array(np.sort(last.to_numpy())))


def without_removed(rows: pa.Table, remove_where: str) -> tuple[pa.Table, pa.Table]:
    """Return the rows that stay and those that go, both without the column that marks those (null: it stays)."""
    gone = pc.fill_null(rows[remove_where], False)
    rows = rows.drop_columns([remove_where])
    return rows.filter(pc.invert(gone)), rows.filter(gone)


def without_keys(rows: pa.Table, merged: pa.Table, keys: Sequence[str]) -> pa.Array:
    """Return for each row whether none of `merged` has its keys, as a mask. Null is equal to null."""
    count, codes = rows.num_rows, np.zeros(rows.num_rows + merged.num_rows, dtype=np.int64)
    for key in keys:
        both = pa.chunked_array([*rows[key].chunks, *merged[key].cast(rows.schema.field(key).type).chunks])
        column = pc.dictionary_encode(both, null_encoding="encode").combine_chunks()
        indices = (column if isinstance(column, pa.DictionaryArray) else column.chunk(0)).indices.to_numpy()
        # Dense again after each column: products of many columns' values would not fit into 64 bits.
        codes = np.unique(codes * (int(indices.max(initial=0)) + 1) + indices, return_inverse=True)[1]
    return pa.array(~np.isin(codes[:count], codes[count:]))
