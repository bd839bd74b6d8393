"""Partial results that are lists: elements of many lists with their groups, and each group's first ones; pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.state.table import Positions

__all__ = ["elements_of", "elements_of_both", "first_of_each", "without_null"]


def elements_of(lists: Sequence[pa.Array], group_of_list: Positions) -> tuple[list[pa.Array], Positions]:
    """Return the elements of several columns of lists, row by row of equal lengths, and the group of each element."""
    parents = pc.list_parent_indices(lists[0]).to_numpy(zero_copy_only=False)
    return [pc.list_flatten(column) for column in lists], group_of_list[parents]


def elements_of_both(old: Sequence[pa.Array], new: Sequence[pa.Array]) -> tuple[list[pa.Array], Positions]:
    """Do the same for two lists per row, which belong to one group."""
    return elements_of([pa.concat_arrays([o, n]) for o, n in zip(old, new)], np.tile(np.arange(len(new[0])), 2))


def without_null(lists: pa.Array) -> pa.Array:
    """Return lists with an empty one in the place of null, which stands for no rows."""
    return pc.coalesce(lists, pa.scalar([], lists.type)) if lists.null_count else lists


def first_of_each(
    columns: Sequence[pa.Array],
    keys: Sequence[Positions],
    group: Positions,
    *,
    count: int,
    limit: int,
    fields: Sequence[pa.Field],
) -> list[pa.Array]:
    """Return columns of lists for `count` groups: each group's first `limit` elements in the order of `keys`.

    Args:
        keys: the sort keys of elements, the most important last, as for `numpy.lexsort`.
        group: the group of each element; a group may have no elements.
        fields: of the results.
    """
    order = np.lexsort((*keys, group))
    sizes = np.bincount(group, minlength=count)
    within = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    picked = pa.array(order[within < limit])
    offsets = pa.array(np.concatenate(([0], np.cumsum(np.minimum(sizes, limit)))), type=pa.int32())
    return [
        pa.ListArray.from_arrays(offsets, column.take(picked), type=field.type)
        for column, field in zip(columns, fields, strict=True)
    ]
