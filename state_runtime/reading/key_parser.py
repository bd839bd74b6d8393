"""Conversion of keys, map keys and conditions, as values or as text, to columns of one row; pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from state_runtime.base.errors import InvalidConfiguration, InvalidData
from state_runtime.state.ddl import DdlColumn, parse_value

__all__ = ["KeyParser", "listed"]


@dataclass(frozen=True)
class KeyParser:
    """Checks values against the columns of a state.

    Messages never hold a value: it may be a person's name.

    Attributes:
        name: of operator and state, for messages.
    """

    name: str

    def one_row(self, given: Mapping[str, Any], columns: Sequence[DdlColumn], what: str) -> list[pa.Array]:
        """Return a key or map key as columns of one row.

        Raises:
            InvalidConfiguration: a column too many or too few. InvalidData: a value that does not fit its column.
        """
        names = [column.name for column in columns]
        for name in given:
            if name not in names:
                raise InvalidConfiguration(f"{self.name} has no {what} column {name!r}; it has: {listed(names)}")
        missing = [name for name in names if name not in given]
        if missing:
            raise InvalidConfiguration(
                f"{self.name}: the {what} lacks {listed(missing)}; a {what} has all of {listed(names)}. "
                "To find rows by some of them, use `where`, which reads the whole state"
            )
        return [self._array(column, given[column.name], f"{what} column") for column in columns]

    def conditions(self, where: Mapping[str, Any], columns: Mapping[str, DdlColumn]) -> list[tuple[int, pa.Array]]:
        """Return positions and wanted values.

        Args:
            columns: all that are shown, in order.

        Raises:
            InvalidConfiguration: a column that cannot be compared. InvalidData: a value that does not fit its column.
        """
        found = []
        for position, (name, column) in enumerate(columns.items()):
            if name in where:
                if column.is_nested or column.type is None:
                    raise InvalidConfiguration(
                        f"{self.name}: column {name!r} is {column.type_text}, which cannot be compared"
                    )
                found.append((position, self._array(column, where[name], "column")))
        return found

    def parsed(self, texts: Sequence[str], what: str, columns: Mapping[str, DdlColumn]) -> dict[str, Any]:
        """Return values by column from texts `column=value`; a column without `=` is null.

        Raises:
            InvalidConfiguration: an unknown column, or one twice. InvalidData: a value that its type cannot have.
        """
        parsed: dict[str, Any] = {}
        for text in texts:
            # A column's name may hold "=": the longest matching name is taken.
            fits = [name for name in columns if text == name or text.startswith(f"{name}=")]
            if not fits:
                given = text.partition("=")[0][:80]
                raise InvalidConfiguration(
                    f"{self.name} has no {what} {given!r}; it has: {listed(columns)}. "
                    f"Write {next(iter(columns))}=VALUE, or {next(iter(columns))} alone for null"
                )
            name = max(fits, key=len)
            if name in parsed:
                raise InvalidConfiguration(f"{self.name}: {what} {name!r} was given twice")
            try:
                parsed[name] = None if text == name else _from_text(text[len(name) + 1 :], columns[name].type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError, RecursionError):
                raise self._misfit(columns[name], what) from None
        return parsed

    def _array(self, column: DdlColumn, value: Any, what: str) -> pa.Array:
        """Return one value as a column of one row."""
        if column.type is None:
            raise self._misfit(column, what)
        try:
            return pa.array([value], type=column.type, from_pandas=False)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            raise self._misfit(column, what) from None  # Arrow's own message holds the value

    def _misfit(self, column: DdlColumn, what: str) -> InvalidData:
        hint = _hint(column.type)
        return InvalidData(
            f"{self.name}: {what} {column.name!r} is {column.type_text}, and the given value does not fit"
            f"{'; write it like ' + hint if hint else ''}"
        )


def _from_text(text: str, kind: pa.DataType | None) -> Any:
    """Parse a value from its text: nested types as JSON, all others as people write them."""
    if kind is None or not pa.types.is_nested(kind):
        return parse_value(text, kind)
    value = json.loads(text)
    # Arrow skips fields that a struct does not have; a misspelled one must not become a null.
    if isinstance(value, dict) and pa.types.is_struct(kind) and not set(value) <= {field.name for field in kind}:
        raise ValueError("a field that the struct does not have")
    return pa.scalar(value, kind)


def _hint(kind: pa.DataType | None) -> str:
    if kind is None:
        return ""
    for is_kind, hint in (
        (pa.types.is_boolean, "true or false"),
        (pa.types.is_integer, "42"),
        (pa.types.is_floating, "1.5"),
        (pa.types.is_decimal, "1.50"),
        (pa.types.is_binary, "00ff7a"),
        (pa.types.is_date, "2013-01-31"),
        (pa.types.is_timestamp, "2013-01-31 12:00:00"),
        (pa.types.is_struct, 'JSON, {"field": 1}'),
    ):
        if is_kind(kind):
            return hint
    return ""


def listed(names: Iterable[str]) -> str:
    """Join names for a message."""
    return ", ".join(names) or "none"
