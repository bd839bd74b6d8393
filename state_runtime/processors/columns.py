"""Conversions between Arrow columns and Python values, and between Arrow types; a column at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.base.errors import InvalidData
from state_runtime.state.text import is_readable

__all__ = [
    "Misfit",
    "UnknownField",
    "fit_column",
    "from_normal",
    "from_python",
    "read_columns",
    "refuse_unknown_fields",
    "to_python",
    "told",
]


class Misfit(ValueError):
    """Why a value does not fit, for messages: the text holds no value; the text of Arrow's own error does."""


class UnknownField(Misfit):
    """A value names a field that its struct does not have. Arrow would drop it."""


def told(error: Exception) -> str:
    """Return why a value does not fit, as a suffix in brackets; empty if the reason may hold the value."""
    return f" ({error})" if isinstance(error, Misfit) else ""


def refuse_unknown_fields(values: Iterable[Any], data_type: pa.DataType) -> None:
    """Check nested Python values for names of fields that their structs do not have.

    Raises:
        UnknownField: a value has one. Values of another shape than the type may raise TypeError or ValueError.
    """
    if pa.types.is_nested(data_type):
        there = [v for v in values if isinstance(v, dict | list | tuple | np.ndarray)]  # pandas has other nulls too
        for inner, inner_type in _parts(there, data_type):
            refuse_unknown_fields(inner, inner_type)


def to_python(column: pa.Array) -> list[Any]:
    """Return a column as Python values: the same as `to_pylist`, faster for numbers, dates and times."""
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        if column.null_count == 0:
            numbers: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
            return numbers
        numbers = pc.fill_null(column, 0).to_numpy(zero_copy_only=False).tolist()
        for position in pc.indices_nonzero(column.is_null()).to_pylist():
            numbers[position] = None
        return numbers
    if pa.types.is_date32(column.type) or (pa.types.is_timestamp(column.type) and column.type.unit == "us"):
        times = _times(column)
        if times is not None:
            return times
    values: list[Any] = column.to_pylist()
    return values


def read_columns(
    columns: Sequence[pa.Array], names: Sequence[str], read: Callable[[pa.Array], list[Any]], uid: str
) -> list[list[Any]]:
    """Return columns of an operator as Python values, by `to_python` or another function.

    Raises:
        InvalidData: a time that Python's datetime cannot represent; the message names the column, and holds no value.
    """
    made = []
    for column, name in zip(columns, names):
        try:
            made.append(read(column))
        except (OverflowError, ValueError):
            raise InvalidData(
                f"operator {uid!r}: column {name!r} ({column.type}) holds a date or time that Python cannot represent: "
                "its years are 1 to 9999, in UTC and in the session's time zone. Filter or correct such rows before "
                "the operator, or hand the column over as a number (`unix_micros`)"
            ) from None  # Arrow's own message holds the value
    return made


def _times(column: pa.Array) -> list[Any] | None:
    """Return dates and times, made by numpy; None if one is beyond Python's years, for which Arrow raises an error."""
    numbers = column.to_numpy(zero_copy_only=False)
    there = np.flatnonzero(~np.isnat(numbers))
    values: list[Any] = numbers.tolist()
    if int in set(map(type, values)):
        return None
    if not len(there) or not getattr(column.type, "tz", None):
        return values
    zone = column[int(there[0])].as_py().tzinfo
    offset = zone.utcoffset(None)  # None if it differs in summer
    if offset is not None and not offset:
        return [None if v is None else v.replace(tzinfo=zone) for v in values]
    return [None if v is None else zone.fromutc(v.replace(tzinfo=zone)) for v in values]


def from_python(values: Sequence[Any], field: pa.Field, describe: Callable[[], str]) -> pa.Array:
    """Return Python values as a column of the field's type; refuse values for which Spark would silently store null or
    a truncated number.

    Args:
        describe: names the column's owner for the message (operator, state or output).

    Raises:
        InvalidData: a value does not fit the type. The message holds its type and position, never the value.
    """
    try:
        plain = [_plain(v) for v in values] if pa.types.is_nested(field.type) else values
        return _array(plain, field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        position, culprit = _first_misfit(values, field.type)
        raise InvalidData(
            f"{describe()}: column {field.name!r} is declared as {field.type}, but value {position + 1} of "
            f"{len(values)} is a {type(culprit).__name__} that does not fit{told(error)}. Change the declared schema "
            "or convert the value"
        ) from None  # Arrow's own message holds the value


def from_normal(values: Sequence[Any], field: pa.Field, describe: Callable[[], str]) -> pa.Array:
    """Do the same as `from_python` for values that are known to have the type in which the column is read: only their
    range is checked.

    Raises:
        InvalidData: a value is beyond the range of the field's type. The message holds its type and position.
    """
    try:
        return pa.array(values, type=field.type, from_pandas=False)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return from_python(values, field, describe)


def fit_column(column: pa.Array, field: pa.Field, describe: Callable[[], str]) -> pa.Array:
    """Return a column in the field's type, if every value keeps its meaning.

    Numbers change their width if they fit, times their unit and zone, texts and binaries their offsets. Other casts
    that Arrow offers (parse a text, round to a decimal, overflow to infinity, make nulls of a struct with other fields)
    are refused.

    Args:
        describe: names the column's owner for the message (operator, state or output).

    Raises:
        InvalidData: the type or a value does not fit, or a text is not UTF-8. The message holds no value.
    """
    if column.type != field.type:
        column = _converted(column, field, describe)
    if not is_readable(column):
        raise InvalidData(
            f"{describe()}: column {field.name!r} holds text whose bytes are not UTF-8. Declare it as binary, or "
            "decode it before"
        )
    return column


def _converted(column: pa.Array, field: pa.Field, describe: Callable[[], str]) -> pa.Array:
    try:
        if not _converts(column.type, field.type):
            raise ValueError("another kind of type")
        if pa.types.is_decimal(field.type) and pa.types.is_integer(column.type):
            column = column.cast(pa.decimal128(19, 0))  # else Arrow checks the widest long instead of the values
        fitted = column.cast(field.type)
        if pa.types.is_float32(field.type) and pc.sum(pc.is_inf(fitted)).as_py() != pc.sum(pc.is_inf(column)).as_py():
            raise ValueError("beyond the range")
    except (pa.ArrowException, ValueError):
        raise InvalidData(
            f"{describe()}: column {field.name!r} is declared as {field.type} but holds {column.type} values that do "
            "not fit. Change the declared schema or convert the column"
        ) from None  # Arrow's own message holds the value
    return fitted


def _converts(have: pa.DataType, want: pa.DataType) -> bool:
    """Return whether values of one type can represent values of another."""
    types = pa.types
    if have == want or types.is_null(have):
        return True
    if types.is_dictionary(have):
        return _converts(have.value_type, want)
    if types.is_struct(have) and types.is_struct(want):
        inner = zip(have, want)
        return [f.name for f in have] == [f.name for f in want] and all(_converts(a.type, b.type) for a, b in inner)
    if types.is_map(have) and types.is_map(want):
        return _converts(have.key_type, want.key_type) and _converts(have.item_type, want.item_type)
    if _is_list(have) and _is_list(want):
        return _converts(have.value_type, want.value_type)
    if types.is_decimal(want) and types.is_integer(have):
        return True
    return any(kind(have) and kind(want) for kind in _KINDS)


def _is_list(data_type: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(data_type) or types.is_large_list(data_type) or types.is_fixed_size_list(data_type))


_KINDS: tuple[Callable[[pa.DataType], bool], ...] = (
    lambda t: bool(pa.types.is_integer(t) or pa.types.is_floating(t)),
    lambda t: bool(pa.types.is_decimal(t)),
    lambda t: bool(pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_string_view(t)),
    lambda t: bool(
        pa.types.is_binary(t)
        or pa.types.is_large_binary(t)
        or pa.types.is_fixed_size_binary(t)
        or pa.types.is_binary_view(t)
    ),
    lambda t: bool(pa.types.is_date(t)),
    lambda t: bool(pa.types.is_timestamp(t)),
    lambda t: bool(pa.types.is_duration(t)),
)


def _array(values: Sequence[Any], data_type: pa.DataType) -> pa.Array:
    """Return a list as an array; refuse values that Arrow would silently convert.

    Arrow would truncate a fraction or a time of day, make 1 of True, infinity of a large double, a text of bytes, a
    date or a time of a number; also inside a list, a map or a struct.
    """
    made = pa.array(_looked_at(values, data_type), type=data_type, from_pandas=False)
    if pa.types.is_float32(data_type) and pc.sum(pc.is_inf(made)).as_py() and any(map(_overflows, values)):
        raise OverflowError("beyond the range")
    return made


def _looked_at(values: Sequence[Any], data_type: pa.DataType) -> Sequence[Any]:
    """Return the checked values; for a text column, integers as text, because Arrow does not convert them."""
    types = set(map(type, values))  # made in C: values are only checked one by one if it holds an odd type
    if pa.types.is_nested(data_type):
        for inner, inner_type in _parts([v for v in values if v is not None], data_type):
            _looked_at(inner, inner_type)
            if pa.types.is_float32(inner_type) and any(map(_overflows, inner)):
                raise OverflowError("beyond the range")
    elif pa.types.is_integer(data_type):
        if _any_of(types, (float, np.floating, Decimal)) and any(v is not None and v != int(v) for v in values):
            raise ValueError("a fraction")
    elif pa.types.is_floating(data_type):
        if _any_of(types, (bool, np.bool_)):
            raise TypeError("a boolean")
    elif pa.types.is_string(data_type) or pa.types.is_large_string(data_type):
        if _any_of(types, (bytes, bytearray, memoryview)):
            raise TypeError("bytes")
        if int in types:
            return [str(v) if type(v) is int else v for v in values]  # as Spark does
    elif pa.types.is_temporal(data_type):
        if _any_of(types, (int, float, Decimal, np.number)):
            raise TypeError("a number")
        if pa.types.is_date(data_type) and any(hasattr(t, "hour") for t in types) and any(map(_has_time, values)):
            raise TypeError("more than a date")
    return values


def _parts(values: Sequence[Any], data_type: pa.DataType) -> Iterator[tuple[list[Any], pa.DataType]]:
    """Yield the inner values of nested values, per type. For values of another shape Arrow raises an error."""
    if pa.types.is_struct(data_type):
        unknown = set(chain.from_iterable(v for v in values if isinstance(v, dict))) - {f.name for f in data_type}
        if unknown:
            raise UnknownField(f"the struct has no field {min(map(str, unknown))!r}")
        for number, field in enumerate(data_type):
            named = [v.get(field.name) for v in values if isinstance(v, dict)]
            yield named + [v[number] for v in values if isinstance(v, tuple) and len(v) > number], field.type
    elif pa.types.is_map(data_type):
        pairs = [pair for v in values for pair in (v.items() if isinstance(v, dict) else v)]
        yield [key for key, _ in pairs], data_type.key_type
        yield [item for _, item in pairs], data_type.item_type
    elif _is_list(data_type):
        yield list(chain.from_iterable(values)), data_type.value_type


def _any_of(types: set[type[Any]], kinds: tuple[type[Any], ...]) -> bool:
    return any(issubclass(t, kinds) for t in types)


def _overflows(value: Any) -> bool:
    return isinstance(value, int | float | np.floating) and math.isfinite(value) and abs(float(value)) > _SINGLE_MAX


_SINGLE_MAX = float(np.finfo(np.float32).max)


def _has_time(value: Any) -> bool:
    return hasattr(value, "hour") and any((value.hour, value.minute, value.second, value.microsecond))


def _first_misfit(values: Sequence[Any], data_type: pa.DataType) -> tuple[int, Any]:
    for position, value in enumerate(values):
        try:
            _array([_plain(value)], data_type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            return position, value
    return 0, values[0] if values else None


def _plain(value: Any) -> Any:
    """Return rows inside values as dictionaries, which Arrow takes for structs."""
    if isinstance(value, tuple) and hasattr(value, "__fields__"):
        return {name: _plain(v) for name, v in zip(value.__fields__, value)}
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, tuple):
        return tuple([_plain(v) for v in value])  # Arrow takes a tuple for a struct, field by field, or for an array
    return value
