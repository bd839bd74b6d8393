"""Between Arrow columns and Python values, a column at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.errors import InvalidData

__all__ = ["from_python", "to_python"]


def to_python(column: pa.Array) -> list[Any]:
    """A column as Python values: what `to_pylist` gives, faster for numbers."""
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        if column.null_count == 0:
            numbers: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
            return numbers
        numbers = pc.fill_null(column, 0).to_numpy(zero_copy_only=False).tolist()
        for position in pc.indices_nonzero(column.is_null()).to_pylist():
            numbers[position] = None
        return numbers
    values: list[Any] = column.to_pylist()
    return values


def from_python(values: Sequence[Any], field: pa.Field, describe: Callable[[], str]) -> pa.Array:
    """Python values as a column of the field's type; Spark would silently store null or a truncated number, we refuse.

    Args:
        describe: what the column is, for the message (operator, state or output).

    Raises:
        InvalidData: a value does not fit the type. The message holds its type and position, never the value.
    """
    try:
        plain = [_plain(v) for v in values] if pa.types.is_nested(field.type) else values
        return pa.array(plain, type=field.type, from_pandas=False)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        position, culprit = _first_misfit(values, field.type)
        raise InvalidData(
            f"{describe()}: column {field.name!r} is declared as {field.type}, but value {position + 1} of {len(values)} "
            f"is a {type(culprit).__name__} that does not fit. Change the declared schema or convert the value"
        ) from error


def _first_misfit(values: Sequence[Any], data_type: pa.DataType) -> tuple[int, Any]:
    for position, value in enumerate(values):
        try:
            pa.array([_plain(value)], type=data_type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            return position, value
    return 0, values[0] if values else None


def _plain(value: Any) -> Any:
    """Rows inside values as dictionaries, which Arrow takes for structs."""
    if isinstance(value, tuple) and hasattr(value, "__fields__"):
        return {name: _plain(v) for name, v in zip(value.__fields__, value)}
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
