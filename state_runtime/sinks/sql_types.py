"""Which of PostgreSQL's types hold which columns of rows without a loss; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import pyarrow as pa

from state_runtime.base.errors import InvalidPipeline

__all__ = ["IDENTIFIER_BYTES_MAX", "TableColumn", "check_types", "misfits", "type_for"]

IDENTIFIER_BYTES_MAX: Final = 63
"""PostgreSQL cuts longer names, and says so in a notice only."""
_COLUMNS_MAX: Final = 1_600
_SYSTEM_COLUMNS: Final = frozenset({"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"})
_NUMERIC_DIGITS_MAX: Final = 131_072
_PLAIN: Final[Mapping[pa.DataType, tuple[str, frozenset[str]]]] = MappingProxyType(
    {
        pa.bool_(): ("boolean", frozenset({"bool"})),
        pa.int8(): ("smallint", frozenset({"int2", "int4", "int8"})),
        pa.int16(): ("smallint", frozenset({"int2", "int4", "int8"})),
        pa.int32(): ("integer", frozenset({"int4", "int8", "float8"})),
        pa.int64(): ("bigint", frozenset({"int8"})),
        pa.float32(): ("real", frozenset({"float4"})),
        pa.float64(): ("double precision", frozenset({"float8"})),
        pa.date32(): ("date", frozenset({"date"})),
        pa.time64("us"): ("time", frozenset({"time"})),
        pa.timestamp("us"): ("timestamp", frozenset({"timestamp"})),
        pa.timestamp("us", "UTC"): ("timestamptz", frozenset({"timestamptz"})),
        pa.string(): (
            "text",
            frozenset({"text", "varchar", "bpchar", "citext", "json", "jsonb", "uuid", "xml", "inet", "cidr"}),
        ),
        pa.binary(): ("bytea", frozenset({"bytea"})),
    }
)
"""Per type the one that a new table gets, and those that a table may have (PostgreSQL's internal names)."""
_DIGITS: Final[Mapping[pa.DataType, int]] = MappingProxyType(
    {pa.int8(): 3, pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}
)


@dataclass(frozen=True)
class TableColumn:
    """A column of a table that is there.

    Attributes:
        type: PostgreSQL's internal name of it, of a domain that of its base.
        shown: as people write it.
        modifier: digits and such, as the catalog has it; -1 for none.
        is_enum: its values are listed names.
        needs_value: it takes no null, and has no default.
        is_made: the server computes it, and takes no value for it.
        takes_null: there is no NOT NULL on it.
    """

    name: str
    type: str
    shown: str
    modifier: int = -1
    is_enum: bool = False
    needs_value: bool = False
    is_made: bool = False
    takes_null: bool = True


def type_for(kind: pa.DataType) -> str | None:
    """Return the type of a new table's column, in SQL; None if there is none for it."""
    if pa.types.is_decimal128(kind):
        return f"numeric({kind.precision}, {kind.scale})"
    known = _PLAIN.get(_plain(kind))
    return known[0] if known else None


def check_types(columns: pa.Schema, where: str) -> None:
    """Refuse columns that a table in PostgreSQL cannot have.

    Args:
        where: whose columns they are, for the message.

    Raises:
        InvalidPipeline: names the column, and the cast to write.
    """
    if len(columns) > _COLUMNS_MAX or not len(columns):
        raise InvalidPipeline(
            f"{where}: a table in PostgreSQL has 1 to {_COLUMNS_MAX:,} columns, and the rows have {len(columns):,}"
        )
    for field in columns:
        if field.name in _SYSTEM_COLUMNS or not 0 < len(field.name.encode()) <= IDENTIFIER_BYTES_MAX:
            raise InvalidPipeline(
                f"{where}: a table in PostgreSQL cannot have a column {field.name!r}: names have 1 to "
                f"{IDENTIFIER_BYTES_MAX} bytes, and {', '.join(sorted(_SYSTEM_COLUMNS))} are its own. Rename it in a "
                "transform"
            )
        if type_for(field.type) is None:
            raise InvalidPipeline(
                f"{where}: a table in PostgreSQL cannot have {field.name!r} of type {field.type}; make another column "
                f"of it in a transform: {_way_out(field)}"
            )


def misfits(rows: pa.Schema, table: Sequence[TableColumn]) -> str:
    """Return why such rows do not fit into a table that is there; "" if they do. It may lack columns."""
    known = {column.name: column for column in table}
    for field in rows:
        column = known.get(field.name)
        if column is None:
            continue
        if column.is_made:
            return f"column {field.name} is computed by the server there: take it out of the rows"
        if not _holds(column, _plain(field.type)):
            return f"column {field.name} is {column.shown} there, which does not hold every {field.type} of the rows"
    lacking = [column.name for column in table if column.needs_value and column.name not in rows.names]
    if lacking:
        return (
            f"column {lacking[0]} takes no null, has no default, and the rows do not have it: give it a default, or "
            "the rows the column"
        )
    return ""


def _holds(column: TableColumn, kind: pa.DataType) -> bool:
    if column.type == "numeric" and (pa.types.is_decimal128(kind) or kind in _DIGITS):
        digits, scale = (kind.precision, kind.scale) if pa.types.is_decimal128(kind) else (_DIGITS[kind], 0)
        there_digits, there_scale = _numeric(column.modifier)
        return bool(there_scale >= scale and there_digits - there_scale >= digits - scale)
    if kind not in _PLAIN:
        return False
    if column.is_enum:
        return bool(kind == pa.string())
    if column.type in ("timestamp", "timestamptz", "time") and column.modifier not in (-1, 6):
        return False  # it would round
    return column.type in _PLAIN[kind][1]


def _numeric(modifier: int) -> tuple[int, int]:
    """Return digits and scale of a numeric column; without a modifier it has as many as anybody wants."""
    if modifier < 4:
        return 2 * _NUMERIC_DIGITS_MAX, _NUMERIC_DIGITS_MAX
    packed = modifier - 4
    return packed >> 16, ((packed & 0x7FF) ^ 0x400) - 0x400


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return a type without what makes no difference: the width of offsets, the zone in which times are shown."""
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_binary(kind):
        return pa.binary()
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")
    return kind


def _way_out(field: pa.Field) -> str:
    types, name = pa.types, f"`{field.name}`"
    if types.is_null(field.type):
        return f"CAST({name} AS STRING), or leave it out"
    if types.is_struct(field.type):
        inner = ", ".join(f"{name}.{inner.name}" for inner in list(field.type)[:3])
        return f"its fields ({inner}), or to_json({name}), which a column of type jsonb takes, too"
    if types.is_nested(field.type):
        return f"to_json({name}), which a column of type jsonb takes, too"
    return f"CAST({name} AS STRING)"
