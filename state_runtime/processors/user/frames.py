"""Data frames for the pandas flavour: cut from one large frame per shard, and converted together.

A DataFrame takes tens of microseconds to make and hundreds to convert to Arrow; a batch has tens of thousands of keys.
So the shard's rows become one frame, each key gets a slice of its blocks, and outputs of equal layout are concatenated
block by block before one conversion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.base.errors import InvalidData
from state_runtime.processors.columns import Misfit, refuse_unknown_fields, told
from state_runtime.state.text import is_readable

__all__ = ["NullableIntegers", "frames_to_batches", "nullable_integers", "split_frame", "table_to_frame"]


@dataclass(frozen=True)
class NullableIntegers:
    """An integer column with nulls, whose dtype Spark chooses per frame.

    Attributes:
        values: as doubles, NaN where null.
        nulls_before: per row the number of nulls before it; at the end the number of all nulls.
    """

    name: str
    values: np.ndarray[Any, np.dtype[np.float64]]
    nulls_before: list[int]


def nullable_integers(rows: pa.RecordBatch) -> list[NullableIntegers]:
    """Return the integer columns of some rows that have nulls."""
    found = []
    for field, column in zip(rows.schema, rows.columns):
        if pa.types.is_integer(field.type) and column.null_count:
            nulls = np.concatenate(([0], np.cumsum(column.is_null().to_numpy(zero_copy_only=False))))
            values = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            found.append(NullableIntegers(field.name, values, nulls.tolist()))
    return found


def table_to_frame(rows: pa.RecordBatch) -> pd.DataFrame:
    """Return rows as one frame with the dtypes that Spark's worker infers.

    int64 (also in columns with nulls, which are 0 here, see `split_frame`), float64, datetime64[ns] without a zone in
    the session's time zone (taken from the type), maps and structs as dictionaries, and object for the rest.
    """
    columns = []
    for field, column in zip(rows.schema, rows.columns):
        if pa.types.is_integer(field.type):
            column = (pc.fill_null(column, 0) if column.null_count else column).cast(pa.int64())
        elif pa.types.is_floating(field.type):
            column = column.cast(pa.float64(), safe=False)
        elif pa.types.is_timestamp(field.type) and field.type.tz is not None:
            column = pc.local_timestamp(column)
        columns.append(column)
    table = pa.Table.from_arrays(columns, names=rows.schema.names)
    convert: Any = partial(table.to_pandas, date_as_object=True, maps_as_pydicts="strict", integer_object_nulls=True)
    try:
        frame: pd.DataFrame = convert(coerce_temporal_nanoseconds=True)
    except pa.ArrowInvalid:
        frame = convert()  # a time that nanoseconds cannot hold (after 2262): microseconds
    return frame


def split_frame(
    frame: pd.DataFrame, start: int, stop: int, rows_max: int, nullable: Sequence[NullableIntegers] = ()
) -> Iterator[pd.DataFrame]:
    """Yield the frames of one key: rows `start … stop`, at most `rows_max` each, with an index from 0.

    Args:
        nullable: integer columns with nulls: int64 in a frame without nulls, else float64.
    """
    # pandas has no public way to cut a frame without the cost of label handling; these internals are stable in pandas
    # 2, which the package pins, and tests/processors compares the result with iloc.
    internals: Any = pd.DataFrame
    manager: Any = frame._mgr
    for low in range(start, stop, rows_max):
        high = min(low + rows_max, stop)
        piece = internals._from_mgr(manager.get_slice(slice(low, high), axis=1), axes=[])
        piece._mgr.set_axis(1, pd.RangeIndex(high - low))
        for column in nullable:
            if column.nulls_before[high] > column.nulls_before[low]:
                piece[column.name] = column.values[low:high]
        yield piece


def frames_to_batches(
    frames: Sequence[Any], schema: pa.Schema, where: str, time_zone: str = "UTC"
) -> Iterator[pa.RecordBatch]:
    """Yield output frames as batches of the declared schema; columns are matched by name.

    Frames with equal column labels and block layout are concatenated first. Order within a layout is kept.

    Args:
        time_zone: of the session: the zone of datetime64 columns without a zone, if a timestamp is declared.

    Raises:
        InvalidData: not a frame, a column is missing, or a value does not fit.
    """
    layouts: dict[Any, list[pd.DataFrame]] = {}
    for frame in frames:
        if not isinstance(frame, pd.DataFrame):
            raise InvalidData(f"{where}: the processor yielded a {type(frame).__name__}; yield pandas data frames")
        if len(frame.index):
            layouts.setdefault(_layout(frame), []).append(frame)
    for same in layouts.values():
        yield _to_batch(_concat_same_layout(same), schema, where, time_zone)


def _layout(frame: pd.DataFrame) -> Any:
    """Return the layout that frames must share to be concatenated: labels, and each block's dtype and places."""
    blocks = frame._mgr.blocks
    return (
        tuple(frame.columns),
        tuple((block.dtype, block.mgr_locs.as_array.tobytes()) for block in blocks),
    )


def _concat_same_layout(frames: Sequence[pd.DataFrame]) -> dict[Any, Any]:
    """Return columns by label; values are numpy arrays, or pandas arrays for extension types."""
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


def _to_batch(columns: dict[Any, Any], schema: pa.Schema, where: str, time_zone: str) -> pa.RecordBatch:
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
            arrays.append(_to_array(values, field.type, time_zone))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise InvalidData(
                f"{where}: column {field.name!r} is declared as {field.type} but holds {getattr(values, 'dtype', '?')} "
                f"values that do not fit{told(error)}. Change the declared schema or convert the column"
            ) from None  # Arrow's own message holds the value
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _to_array(values: Any, data_type: pa.DataType, time_zone: str) -> pa.Array:
    kind = getattr(getattr(values, "dtype", None), "kind", "")
    if kind == "M" and getattr(values.dtype, "tz", None) is None and pa.types.is_timestamp(data_type) and data_type.tz:
        wall = pa.Array.from_pandas(values).cast(pa.timestamp("us"))
        return _in_zone(wall, time_zone).cast(data_type)
    if pa.types.is_nested(data_type):
        refuse_unknown_fields(values, data_type)
    made = pa.Array.from_pandas(values, type=data_type, safe=True)
    if not is_readable(made):  # columns of Arrow's own types are taken as they are
        raise Misfit("text that is not UTF-8")
    return made


def _in_zone(wall: pa.Array, time_zone: str) -> pa.Array:
    """Convert local times to moments. In an hour that occurs twice, the second occurrence is taken.

    Raises:
        Misfit: a time in the gap of an hour that the clocks skip.
    """
    as_moments = partial(pc.assume_timezone, wall, time_zone, ambiguous="latest")
    try:
        return as_moments(nonexistent="raise")
    except pa.ArrowInvalid:
        as_moments(nonexistent="earliest")  # raises for any other reason
        raise Misfit(
            f"a local time that does not exist in the session's time zone {time_zone}, where the clocks skip an hour; "
            f"give times with a zone, for example by tz_localize({time_zone!r}, nonexistent='shift_forward')"
        ) from None
