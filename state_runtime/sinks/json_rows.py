"""Rows as JSON text; pure, column by column, without a Python object for a row.

Each column becomes an array of fragments, and the fragments of a row are joined. pyarrow reads JSON and does not write
it. Values look as Spark's `to_json` has them, but for two: a field that is null is written, as `null`, and times keep
their microseconds.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.state.text import is_readable

__all__ = ["json_objects", "plain_texts", "unwritable"]

_TEXT: Final = pa.large_string()
_CONTROL_MAX: Final = 0x20
_SHORT: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


def unwritable(kind: pa.DataType) -> pa.DataType | None:
    """Return the type inside of `kind`, or itself, that has no form in JSON; None if all of it has one."""
    types = pa.types
    if types.is_dictionary(kind):
        return unwritable(kind.value_type)
    if types.is_nested(kind):
        inner = [unwritable(kind.field(number).type) for number in range(kind.num_fields)]
        found = next((one for one in inner if one is not None), None)
        return kind if found is None and types.is_union(kind) else found
    return kind if types.is_duration(kind) or types.is_interval(kind) else None


def json_objects(rows: pa.RecordBatch) -> pa.LargeStringArray:
    """Return for each row a JSON object of all its columns."""
    return _objects([(field.name, column) for field, column in zip(rows.schema, rows.columns)], rows.num_rows)


def plain_texts(column: pa.Array) -> pa.LargeStringArray:
    """Return values as text without quotes, null for null: text itself, numbers and times as in JSON, others as
    JSON."""
    if pa.types.is_dictionary(column.type):
        return plain_texts(column.dictionary_decode())
    text = _unquoted(column)
    if text is None:
        text = _fragments(column)
    return pc.if_else(column.is_valid(), text, pa.scalar(None, _TEXT))


def _objects(columns: list[tuple[str, pa.Array]], length: int) -> pa.LargeStringArray:
    if not columns:
        return pa.repeat(pa.scalar("{}", _TEXT), length)
    parts: list[pa.Array | pa.Scalar] = []
    for number, (name, column) in enumerate(columns):
        quoted = _quoted(pa.array([name], _TEXT))[0].as_py()
        parts += [pa.scalar(("," if number else "{") + quoted + ":", _TEXT), _fragments(column)]
    return _joined(*parts, pa.scalar("}", _TEXT))


def _fragments(column: pa.Array) -> pa.LargeStringArray:
    """Return each value as JSON; no element is null."""
    kind, types = column.type, pa.types
    if types.is_dictionary(kind):
        return _fragments(column.dictionary_decode())
    if types.is_null(kind):
        return pa.repeat(pa.scalar("null", _TEXT), len(column))
    text = _unquoted(column)
    if text is None:
        text = _nested(column)
    elif types.is_floating(kind):
        text = _with_words_for_infinities(text, column)
    elif not (types.is_boolean(kind) or types.is_integer(kind) or types.is_decimal(kind)):
        text = _quoted(text)
    return pc.if_else(column.is_valid(), text, pa.scalar("null", _TEXT))


def _unquoted(column: pa.Array) -> pa.LargeStringArray | None:
    """Return a column's values as text; None for nested values, and what is below a null does not matter."""
    kind, types = column.type, pa.types
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return _readable(column).cast(_TEXT)
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return pa.array([None if v is None else base64.b64encode(v).decode() for v in column.to_pylist()], _TEXT)
    if types.is_timestamp(kind):
        text = pc.replace_substring(column.cast(pa.timestamp(kind.unit)).cast(_TEXT), " ", "T")
        return _joined(text, pa.scalar("Z", _TEXT)) if kind.tz else text
    if types.is_decimal(kind):
        return column.cast(pa.string()).cast(_TEXT)
    if types.is_float16(kind):
        return column.cast(pa.float32()).cast(_TEXT)
    return None if types.is_nested(kind) else column.cast(_TEXT)


def _nested(column: pa.Array) -> pa.LargeStringArray:
    kind = column.type
    if pa.types.is_struct(kind):
        fields = [(kind.field(number).name, column.field(number)) for number in range(kind.num_fields)]
        return _objects(fields, len(column))
    if pa.types.is_map(kind):
        entries = pa.struct([pa.field("key", kind.key_type, False), pa.field("value", kind.item_type)])
        return _lists(column.cast(pa.list_(entries)), _entries, "{", "}")
    return _lists(column, _fragments, "[", "]")


def _lists(
    column: pa.Array, of_elements: Callable[[pa.Array], pa.LargeStringArray], opening: str, closing: str
) -> pa.LargeStringArray:
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    elements = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), of_elements(column.flatten()))
    joined = pc.binary_join(elements, pa.scalar(",", _TEXT))
    return _joined(pa.scalar(opening, _TEXT), joined, pa.scalar(closing, _TEXT))


def _entries(entries: pa.StructArray) -> pa.LargeStringArray:
    """Return the entries of maps; names in JSON are text, whatever the key is."""
    return _joined(_quoted(plain_texts(entries.field(0))), pa.scalar(":", _TEXT), _fragments(entries.field(1)))


def _with_words_for_infinities(text: pa.LargeStringArray, column: pa.Array) -> pa.LargeStringArray:
    """JSON has no such numbers: they are the words that Spark writes, and reads back."""
    values = column.cast(pa.float64())
    if pc.all(pc.is_finite(values)).as_py() is not False:
        return text
    sign = pc.if_else(pc.greater(values, 0.0), '"Infinity"', '"-Infinity"').cast(_TEXT)
    text = pc.if_else(pc.is_inf(values), sign, text)
    return pc.if_else(pc.is_nan(values), pa.scalar('"NaN"', _TEXT), text)


def _quoted(text: pa.LargeStringArray) -> pa.LargeStringArray:
    if pc.any(pc.match_substring_regex(text, r'[\x00-\x1f"\\]')).as_py():
        text = pc.replace_substring(pc.replace_substring(text, "\\", "\\\\"), '"', '\\"')
        if pc.any(pc.match_substring_regex(text, r"[\x00-\x1f]")).as_py():
            for control in map(chr, range(_CONTROL_MAX)):
                text = pc.replace_substring(text, control, _SHORT.get(control, f"\\u{ord(control):04x}"))
    quote = pa.scalar('"', _TEXT)
    return _joined(quote, text, quote)


def _readable(column: pa.Array) -> pa.Array:
    """Return text as it is; bytes that are not UTF-8 become U+FFFD, as JSON has no others."""
    if is_readable(column):
        return column
    raw = column.cast(pa.large_string()).view(pa.large_binary()).to_pylist()
    return pa.array([None if value is None else value.decode(errors="replace") for value in raw], _TEXT)


def _joined(*parts: pa.Array | pa.Scalar) -> pa.LargeStringArray:
    return pc.binary_join_element_wise(*parts, pa.scalar("", _TEXT))
