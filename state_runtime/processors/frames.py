"""Data frames for the pandas flavour: cut out of one big frame per shard, and gathered without a conversion per frame.

A DataFrame costs tens of microseconds to make and hundreds to convert to Arrow; a batch has tens of thousands of keys.
So the shard's rows become one frame, each key gets a slice of its blocks, and outputs of equal layout are concatenated
block by block before one conversion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from state_runtime.errors import InvalidData

__all__ = ["frames_to_batches", "split_frame", "table_to_frame"]


def table_to_frame(rows: pa.RecordBatch) -> pd.DataFrame:
    """Rows as one frame with the dtypes that Spark's worker infers: int64, float64 (also for ints with nulls), object."""
    columns = []
    for field, column in zip(rows.schema, rows.columns):
        if pa.types.is_integer(field.type) and column.null_count == 0:
            column = column.cast(pa.int64())
        elif pa.types.is_integer(field.type) or pa.types.is_floating(field.type):
            column = column.cast(pa.float64(), safe=False)
        columns.append(column)
    frame: pd.DataFrame = pa.Table.from_arrays(columns, names=rows.schema.names).to_pandas(date_as_object=True)
    return frame


def split_frame(frame: pd.DataFrame, start: int, stop: int, rows_max: int) -> Iterator[pd.DataFrame]:
    """Frames of one key: rows `start … stop`, at most `rows_max` each, with an index from 0."""
    # pandas has no public way to cut a frame without paying for label handling; these internals are stable in pandas 2,
    # which the package pins, and tests/processors compares the result with iloc.
    internals: Any = pd.DataFrame
    manager: Any = frame._mgr
    for low in range(start, stop, rows_max):
        high = min(low + rows_max, stop)
        piece = internals._from_mgr(manager.get_slice(slice(low, high), axis=1), axes=[])
        piece._mgr.set_axis(1, pd.RangeIndex(high - low))
        yield piece


def frames_to_batches(frames: Sequence[Any], schema: pa.Schema, where: str) -> Iterator[pa.RecordBatch]:
    """Output frames as batches of the declared schema; columns are matched by name.

    Frames with equal column labels and block layout are put together first. Order within a layout is kept.

    Raises:
        InvalidData: not a frame, a column is missing, or a value does not fit.
    """
    layouts: dict[Any, list[pd.DataFrame]] = {}
    for frame in frames:
        if not isinstance(frame, pd.DataFrame):
            raise InvalidData(f"{where}: handleInputRows yielded a {type(frame).__name__}; yield pandas data frames")
        if len(frame.index):
            layouts.setdefault(_layout(frame), []).append(frame)
    for same in layouts.values():
        yield _to_batch(_concat_same_layout(same), schema, where)


def _layout(frame: pd.DataFrame) -> Any:
    """What must be equal for two frames' blocks to be concatenated: labels, and each block's dtype and places."""
    blocks = frame._mgr.blocks
    return (
        tuple(frame.columns),
        tuple((block.dtype, block.mgr_locs.as_array.tobytes()) for block in blocks),
    )


def _concat_same_layout(frames: Sequence[pd.DataFrame]) -> dict[Any, Any]:
    """Columns by label; values are numpy arrays, or pandas arrays for extension types."""
    first = frames[0]
    labels = list(first.columns)
    columns: dict[Any, Any] = {}
    for number, block in enumerate(first._mgr.blocks):
        values = [frame._mgr.blocks[number].values for frame in frames]
        places = block.mgr_locs.as_array
        if isinstance(block.values, np.ndarray):
            together = np.concatenate(values, axis=1) if len(values) > 1 else values[0]
            for row, place in enumerate(places):
                columns[labels[place]] = together[row]
        else:
            # Blocks of times are two-dimensional extension arrays: one row per column.
            for row, place in enumerate(places):
                parts = [pd.Series(v if getattr(v, "ndim", 1) == 1 else v[row]) for v in values]
                columns[labels[place]] = pd.concat(parts)
    return {label: columns[label] for label in labels}


def _to_batch(columns: dict[Any, Any], schema: pa.Schema, where: str) -> pa.RecordBatch:
    by_name = all(isinstance(label, str) for label in columns)
    ordered = list(columns.values())
    arrays = []
    for position, field in enumerate(schema):
        if by_name and field.name in columns:
            values = columns[field.name]
        elif not by_name and position < len(ordered):
            values = ordered[position]
        else:
            raise InvalidData(
                f"{where}: column {field.name!r} is declared but the frame has {sorted(map(str, columns))}; "
                "yield every declared column"
            )
        try:
            arrays.append(pa.Array.from_pandas(values, type=field.type, safe=True))
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            raise InvalidData(
                f"{where}: column {field.name!r} is declared as {field.type} but holds {getattr(values, 'dtype', '?')} "
                "values that do not fit. Change the declared schema or convert the column"
            ) from None  # Arrow's own message holds the value
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
