"""Spark's order of values as integers, a column at a time; pure and vectorised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.state.table import Mask, Positions

__all__ = ["has_order", "ranks_of", "ranks_of_rows"]


def has_order(data_type: pa.DataType) -> bool:
    """Return whether `ranks_of` takes a type: all but maps, void, intervals of months, and what is made of them."""
    types = pa.types
    if types.is_struct(data_type):
        return data_type.num_fields > 0 and all(has_order(field.type) for field in data_type)
    if types.is_list(data_type):
        return has_order(data_type.value_type)
    return not (types.is_nested(data_type) or types.is_null(data_type) or types.is_interval(data_type))


def ranks_of(column: pa.Array) -> tuple[Any, Mask | None]:
    """Return integers in the order of the values, and which rows have a value (None: all). A null's rank is the lowest
    integer.

    Structs are compared field by field, arrays element by element, and one that begins another one is smaller.
    """
    valid: Mask | None = None
    if column.null_count:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
    types = pa.types
    if types.is_floating(column.type):
        ranks = _ranks_of_floats(pc.fill_null(column.cast(pa.float64()), 0).to_numpy(zero_copy_only=False))
    elif types.is_integer(column.type) or types.is_boolean(column.type) or types.is_temporal(column.type):
        if types.is_date32(column.type):
            column = column.cast(pa.int32())  # Arrow has no direct cast from days to long
        ranks = pc.fill_null(column.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    elif types.is_struct(column.type):
        ranks = ranks_of_rows(column.flatten(), [False] * column.type.num_fields)
    elif types.is_list(column.type):
        ranks = _ranks_of_lists(column)
    else:
        ranks = pc.rank(column, sort_keys="ascending", tiebreaker="dense").to_numpy(zero_copy_only=False)
        ranks = ranks.astype(np.int64)
    if valid is not None:
        ranks = np.where(valid, ranks, np.iinfo(np.int64).min)
    return ranks, valid


def ranks_of_rows(columns: Sequence[pa.Array], ascending: Sequence[bool]) -> Positions:
    """Return integers in the order of rows by several columns from left to right, null below everything; equal rows
    have equal ranks.

    Args:
        ascending: per column whether a smaller value makes a higher rank: then null makes the highest.
    """
    parts: list[Any] = []
    for column, up in zip(columns, ascending, strict=True):
        ranks, valid = ranks_of(column)
        # The complement reverses the order and, unlike the negative, never overflows.
        found = [ranks] if valid is None else [valid, ranks]
        parts += [~part for part in found] if up else found
    if len(parts) == 1:
        alone: Positions = parts[0]
        return alone
    order = np.lexsort(parts[::-1])
    steps = np.zeros(len(order), dtype=np.bool_)
    for part in parts:
        in_order = part[order]
        steps[1:] |= in_order[1:] != in_order[:-1]
    rows = np.empty(len(order), dtype=np.int64)
    rows[order] = np.cumsum(steps)
    return rows


def _ranks_of_lists(lists: pa.Array) -> Positions:
    """Return ranks of lists: of the elements' ranks as bytes, whose order is that of the lists."""
    ranks, valid = ranks_of(pc.list_flatten(lists))
    codes = np.unique(ranks, return_inverse=True)[1] + 1
    if valid is not None:
        codes[~valid] = 0
    data = codes.astype(">u8")
    sizes = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    offsets = np.concatenate(([0], np.cumsum(sizes))) * data.itemsize
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data.tobytes())]
    texts = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(lists), buffers)
    return ranks_of(texts)[0]  # type: ignore[no-any-return]


def _ranks_of_floats(numbers: Any) -> Any:
    """Return a double's bits as an integer of the same order: for negatives all bits but the sign are inverted."""
    plain = np.where(np.isnan(numbers), np.nan, numbers + 0.0)  # one NaN, above infinity; one zero
    bits = plain.view(np.int64)
    return bits ^ ((bits >> 63) & np.int64(0x7FFF_FFFF_FFFF_FFFF))
