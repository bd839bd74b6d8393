"""Rows as bytes and back, many at a time: for a backend that stores keys and values, not columns; pure and vectorised.

A row of some columns is

    nulls    one bit per column, 1 is null; a null's bytes below are zero
    numbers  for each column its little-endian bytes if its type has a fixed width, else the length of its bytes (4
             bytes)
    bytes    for each column without a fixed width, one after the other

    string, binary   the bytes themselves
    struct           a row of its fields
    list             number of elements (4 bytes), length of each (4 bytes), and each as a row of one column
    map              as a list of structs of key and value

Inconsistent data is refused: data from a disk is not trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.base.errors import InvalidData, check

__all__ = ["RowCodec", "binary_of_bytes", "bytes_of_rows", "join_binary", "numbers_of_rows", "pieces_of_rows"]

Places = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
_BYTES = pa.large_binary()
_NO_BYTES = pa.scalar(b"", _BYTES)
_LENGTH = 4  # bytes of a length


class RowCodec:
    """Encodes rows of columns of given types.

    Args:
        types: of the columns.
        canonical: equal keys get equal bytes, under Spark's grouping equality: -0.0 becomes 0.0, and all NaNs become
            the same.

    Raises:
        InvalidData: a type cannot be stored.
    """

    def __init__(self, types: Sequence[pa.DataType], *, canonical: bool = False) -> None:
        self.types = tuple(types)
        self._canonical = canonical
        self._widths = [_width(kind) for kind in self.types]
        self._inner = [_inner(kind, canonical) for kind in self.types]
        sizes = [_LENGTH if width is None else width for width in self._widths]
        ends = np.cumsum([-(-len(self.types) // 8), *sizes])
        self._places = [int(end) for end in ends[:-1]]
        self._fixed = int(ends[-1])

    def encode(self, columns: Sequence[pa.Array], count: int) -> pa.Array:
        """Encode `count` rows as a large_binary array without nulls."""
        matrix = np.zeros((count, self._fixed), dtype=np.uint8)
        blobs = []
        for number, (column, place) in enumerate(zip(columns, self._places, strict=True)):
            check(len(column) == count, f"a column of {len(column)} rows in a batch of {count}")
            absent = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
            if absent is not None:
                matrix[:, number // 8] |= absent.astype(np.uint8) << np.uint8(number % 8)
            width = self._widths[number]
            if width is None:
                blob = self._encode_bytes(column, number)
                blobs.append(blob)
                width, raw = _LENGTH, np.diff(_offsets(blob)).astype("<u4").view(np.uint8)
            elif width == 0:
                continue
            else:
                raw = self._encode_fixed(column, width, absent)
            matrix[:, place : place + width] = raw.reshape(count, width)
        return join_binary(binary_of_bytes(matrix), *blobs)

    def decode(self, rows: pa.Array, first: int | None = None) -> list[pa.Array]:
        """Decode the columns of encoded rows.

        Args:
            rows: large_binary without nulls.
            first: number of leading columns to decode; those must have a fixed width. None: all columns.

        Raises:
            ValueError: not rows of these columns.
        """
        count = len(rows)
        if count == 0:
            return [pa.nulls(0, kind) for kind in self.types[:first]]
        offsets = _offsets(rows)
        data = _data(rows)
        starts, ends = offsets[:-1], offsets[1:]
        if bool(np.any(ends - starts < self._fixed)):
            raise ValueError("a row is too short for its columns")
        at = starts + self._fixed
        columns = []
        for number, kind in enumerate(self.types[:first]):
            absent = (data[starts + number // 8] >> np.uint8(number % 8) & 1).astype(np.bool_)
            width, place = self._widths[number], self._places[number]
            if width is None:
                lengths = _words(data, starts + place, "<u4").astype(np.int64)
                if bool(np.any(at + lengths > ends)):
                    raise ValueError("a value is longer than its row")
                columns.append(self._decode_bytes(_slices_of_rows(rows, at, lengths), number, absent))
                at = at + lengths
            else:
                columns.append(_decode_fixed(data, starts + place, kind, width, absent, count))
        if first is None and bool(np.any(at != ends)):
            raise ValueError("a row is longer than its values")
        return columns

    def _encode_fixed(self, column: pa.Array, width: int, absent: Mask | None) -> npt.NDArray[np.uint8]:
        kind = column.type
        if pa.types.is_boolean(kind):
            flags: npt.NDArray[np.uint8] = column.cast(pa.uint8()).fill_null(0).to_numpy()
            return flags
        raw = np.frombuffer(column.buffers()[1], dtype=np.uint8)
        raw = raw[column.offset * width : (column.offset + len(column)) * width].reshape(len(column), width)
        if self._canonical and pa.types.is_floating(kind):
            numbers = np.ascontiguousarray(raw).view(f"<f{width}").reshape(-1)
            numbers = numbers + numbers.dtype.type(0)
            numbers[np.isnan(numbers)] = np.nan
            raw = numbers.view(np.uint8).reshape(len(column), width)
        if absent is not None:
            raw = np.where(absent[:, None], np.uint8(0), raw)
        return raw

    def _encode_bytes(self, column: pa.Array, number: int) -> pa.Array:
        kind, inner = column.type, self._inner[number]
        if inner is None:
            blob = column.cast(pa.large_string()).cast(_BYTES) if _is_text(kind) else column.cast(_BYTES)
            return blob.fill_null(b"") if blob.null_count else blob
        if pa.types.is_struct(kind):
            return inner.encode(column.flatten(), len(column))
        counts, elements = _elements_of(column)
        encoded = inner.encode(elements, len(elements[0]))
        ends = np.concatenate(([0], np.cumsum(counts)))
        places = _offsets(encoded)
        lengths = np.diff(places).astype("<u4")
        return join_binary(
            binary_of_bytes(counts.astype("<u4").view(np.uint8).reshape(len(counts), _LENGTH)),
            pa.Array.from_buffers(_BYTES, len(counts), [None, pa.py_buffer(ends * _LENGTH), pa.py_buffer(lengths)]),
            pa.Array.from_buffers(_BYTES, len(counts), [None, pa.py_buffer(places[ends]), encoded.buffers()[2]]),
        )

    def _decode_bytes(self, blob: pa.Array, number: int, absent: Mask) -> pa.Array:
        kind, inner = self.types[number], self._inner[number]
        validity = _validity(absent)
        if inner is None:
            plain = pa.Array.from_buffers(_BYTES, len(blob), [validity, *blob.buffers()[1:]])
            # Casting to a string checks that the bytes are one.
            return plain.cast(kind) if kind != _BYTES else plain
        if pa.types.is_struct(kind):
            return pa.Array.from_buffers(kind, len(blob), [validity], children=inner.decode(blob))
        counts, elements = _split_elements(blob)
        columns = inner.decode(elements)
        wide = pa.types.is_large_list(kind)
        ends = np.concatenate(([0], np.cumsum(counts))).astype(np.int64 if wide else np.int32)
        if pa.types.is_map(kind):
            pairs = pa.struct([kind.key_field, kind.item_field])
            columns = [pa.Array.from_buffers(pairs, len(columns[0]), [None], children=columns)]
        return pa.Array.from_buffers(kind, len(blob), [validity, pa.py_buffer(ends)], children=columns)


def _width(kind: pa.DataType) -> int | None:
    """Return the bytes of a type of fixed width; None for others."""
    if pa.types.is_null(kind):
        return 0
    if pa.types.is_boolean(kind):
        return 1
    if _inner(kind, False) is not None or _is_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return None
    if pa.types.is_primitive(kind) or pa.types.is_decimal(kind):
        return int(kind.bit_width) // 8
    raise InvalidData(f"a column of type {kind} cannot be stored row by row; use the Arrow backend for it")


def _inner(kind: pa.DataType, canonical: bool) -> RowCodec | None:
    if pa.types.is_struct(kind):
        return RowCodec([field.type for field in kind], canonical=canonical)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return RowCodec([kind.value_type], canonical=canonical)
    if pa.types.is_map(kind):
        return RowCodec([kind.key_type, kind.item_type], canonical=canonical)
    return None


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _elements_of(column: pa.Array) -> tuple[Places, list[pa.Array]]:
    """Return the number of elements of each list or map, and all elements as one column; for maps one column of keys
    and one of values."""
    offset_type = np.int64 if pa.types.is_large_list(column.type) else np.int32
    ends = np.frombuffer(column.buffers()[1], dtype=offset_type) if len(column) else np.zeros(1, dtype=offset_type)
    places: Places = ends[column.offset : column.offset + len(column) + 1].astype(np.int64)
    counts = np.diff(places)
    if column.null_count:
        counts = np.where(column.is_null().to_numpy(zero_copy_only=False), 0, counts)
    picked = pa.array(_ranges(places[:-1], counts, 1))
    if pa.types.is_map(column.type):
        return counts, [column.keys.take(picked), column.items.take(picked)]
    return counts, [column.values.take(picked)]


def _split_elements(blob: pa.Array) -> tuple[Places, pa.Array]:
    """Return the number of elements of each encoded list, and all encoded elements."""
    offsets, data = _offsets(blob), _data(blob)
    starts, ends = offsets[:-1], offsets[1:]
    # A null list was written as an empty one.
    if bool(np.any(ends - starts < _LENGTH)):
        raise ValueError("a list has no length")
    counts = _words(data, starts, "<u4").astype(np.int64)
    first = starts + _LENGTH * (counts + 1)
    if bool(np.any(first > ends)):
        raise ValueError("a list is longer than its row")
    lengths = _words(data, _ranges(starts + _LENGTH, counts, _LENGTH), "<u4").astype(np.int64)
    before = np.concatenate(([0], np.cumsum(lengths)))
    of_row = np.concatenate(([0], np.cumsum(counts)))
    if bool(np.any(first + before[of_row[1:]] - before[of_row[:-1]] != ends)):
        raise ValueError("a list has another length than its elements")
    return counts, _slices_of_rows(blob, np.repeat(first - before[of_row[:-1]], counts) + before[:-1], lengths)


def _decode_fixed(
    data: npt.NDArray[np.uint8], places: Places, kind: pa.DataType, width: int, absent: Mask, count: int
) -> pa.Array:
    if width == 0:
        return pa.nulls(count, kind)
    if pa.types.is_boolean(kind):
        bits = np.packbits(data[places] != 0, bitorder="little")
        return pa.Array.from_buffers(kind, count, [_validity(absent), pa.py_buffer(bits)])
    numbers = np.ascontiguousarray(_words(data, places, f"V{width}"))
    return pa.Array.from_buffers(kind, count, [_validity(absent), pa.py_buffer(numbers.view(np.uint8))])


def _validity(absent: Mask) -> pa.Buffer | None:
    return pa.py_buffer(np.packbits(~absent, bitorder="little")) if bool(absent.any()) else None


# --- arrays of bytes -------------------------------------------------------------------------------------------------


def join_binary(first: pa.Array, *others: Any) -> pa.Array:
    """Join, row by row, the bytes of some large_binary arrays."""
    return pc.binary_join_element_wise(first, *others, _NO_BYTES) if others else first


def binary_of_bytes(matrix: npt.NDArray[np.uint8]) -> pa.Array:
    """Return a matrix of bytes as a large_binary array, one value per row."""
    count, width = matrix.shape
    ends = np.arange(count + 1, dtype=np.int64) * width
    return pa.Array.from_buffers(_BYTES, count, [None, pa.py_buffer(ends), pa.py_buffer(np.ascontiguousarray(matrix))])


def bytes_of_rows(rows: pa.Array) -> list[bytes]:
    """Return the values of a large_binary array without nulls, as Python's bytes."""
    if len(rows) == 0:
        return []
    ends = _offsets(rows)
    data = _data(rows)[ends[0] : ends[-1]].tobytes()
    return [data[start:end] for start, end in pairwise((ends - ends[0]).tolist())]


def numbers_of_rows(rows: pa.Array, place: int | Places, layout: str) -> npt.NDArray[Any]:
    """Return the number at `place` of each value of a large_binary array, of a numpy type such as `>u8`.

    Raises:
        ValueError: a value is shorter.
    """
    offsets = _offsets(rows)
    if bool(np.any(np.diff(offsets) < place + np.dtype(layout).itemsize)):
        raise ValueError("a stored row is too short")
    return _words(_data(rows), offsets[:-1] + place, layout)


def pieces_of_rows(rows: pa.Array, place: int | Places, lengths: Places | None = None) -> pa.Array:
    """Return, of each value of a large_binary array, `lengths` bytes from `place` on; without `lengths` all bytes left.

    Raises:
        ValueError: a value is shorter.
    """
    offsets = _offsets(rows)
    starts, ends = offsets[:-1] + place, offsets[1:]
    lengths = ends - starts if lengths is None else lengths
    if bool(np.any(lengths < 0)) or bool(np.any(starts + lengths > ends)):
        raise ValueError("a stored row is too short")
    return _slices_of_rows(rows, starts, lengths)


def _slices_of_rows(rows: pa.Array, starts: Places, lengths: Places) -> pa.Array:
    """Return a piece of each value of a large_binary array.

    Args:
        starts: counted from the array's first byte; ascending, and the pieces do not overlap.
    """
    count = len(starts)
    if count == 0:
        return pa.array([], _BYTES)
    # Every second value of an array over the same bytes is a piece, the others are the bytes between.
    ends = np.empty(2 * count, dtype=np.int64)
    ends[::2], ends[1::2] = starts, starts + lengths
    between = pa.Array.from_buffers(_BYTES, 2 * count - 1, [None, pa.py_buffer(ends), rows.buffers()[2]])
    return between.take(pa.array(np.arange(0, 2 * count, 2)))


def _offsets(rows: pa.Array) -> Places:
    buffer = rows.buffers()[1]
    if len(rows) == 0:
        return np.zeros(1, dtype=np.int64)
    return np.frombuffer(buffer, dtype=np.int64)[rows.offset : rows.offset + len(rows) + 1]


def _data(rows: pa.Array) -> npt.NDArray[np.uint8]:
    buffer = rows.buffers()[2]
    return np.frombuffer(buffer if buffer is not None else b"", dtype=np.uint8)


def _words(data: npt.NDArray[np.uint8], places: Places, layout: str) -> npt.NDArray[Any]:
    """Return words that begin anywhere: a view with one at every byte."""
    size = np.dtype(layout).itemsize
    if len(places) == 0:
        return np.empty(0, dtype=layout)
    return np.ndarray((len(data) - size + 1,), dtype=layout, buffer=data, strides=(1,))[places]


def _ranges(starts: Places, counts: Places, step: int) -> Places:
    """Return, for each start, `counts` places, `step` apart."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - step * before, counts) + step * np.arange(int(counts.sum()), dtype=np.int64)
