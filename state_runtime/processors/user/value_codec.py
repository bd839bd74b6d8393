"""Values of states: the values that user code may write, those that it reads, and their Arrow columns; by schema.

User code reads the same values as in Spark: structs are Rows, arrays lists, maps dictionaries, timestamps datetimes
without a zone in the time zone of the process. It may write looser ones (dictionaries for structs, datetimes with a
zone, pandas and numpy scalars, a whole double for a long). A written value is converted at once to the form in which
it is read. So it is read back the same in this epoch and in any later one, and a list that user code changes
afterwards does not change the state.

Where Spark would silently store null or truncate a value, Stillstate refuses it: at once (fields, structure, types),
or when the column is made (ranges of numbers), still within the epoch. docs/parity.md lists the conversions.
"""

from __future__ import annotations

import datetime as dt
import math
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from decimal import Context, Decimal, InvalidOperation
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from state_runtime.processors.columns import from_normal, from_python, to_python
from state_runtime.processors.user.rows import row_class_of
from state_runtime.processors.user.user_errors import InvalidStateValue

__all__ = ["ValueCodec", "can_be_changed", "local_timestamps", "read_column"]

Convert: TypeAlias = Callable[[Any], Any]

_Type: TypeAlias = type[Any]
_BARE = (str, bytes, int, float, Decimal, dt.date, dt.timedelta, np.generic)  # a datetime is a date, a bool is an int
_SIGNATURES_MAX = 256

_EXACT = Context(prec=100)  # more digits than any decimal column has; the default of 28 would refuse long ones


class ValueCodec:
    """The rows of one schema: a state's values, or the keys of a map.

    Args:
        schema: at least one field.
        where: operator and state, for messages.
        takes_bare: whether a bare value may be given for a row of one field, as Spark's own processors give keys of
        maps.

    Attributes:
        plain: the types of rows (tuples) that are read as they are written; all others go through `row_of`, which adds
            to them. Empty if a field has to be checked in every row.
        is_plain: whether a row is a tuple of such types; every call checks it for every row.
        fresh: copies a row so that user code shares no mutable part with the state; None if rows have no mutable part.
    """

    __slots__ = (
        "_fields",
        "_fixes",
        "_is_loose",
        "_makes",
        "_names",
        "_reads",
        "_takes_bare",
        "_where",
        "fresh",
        "is_plain",
        "plain",
        "schema",
        "width",
    )

    def __init__(self, schema: pa.Schema, where: str, *, takes_bare: bool = False) -> None:
        self.schema = schema
        self.width = len(schema)
        self._where = where
        self._names = ", ".join(schema.names)
        self._takes_bare = takes_bare and self.width == 1
        plain = [_plain_of(f.type) for f in schema]
        self._fixes = [_fix_of(f.type) for f in schema]
        self._reads = [_read_of(f.type) for f in schema]
        self._makes = [_make_of(f.type) for f in schema]
        self._fields = list(schema)
        self._is_loose = None in plain
        self.plain: set[tuple[_Type | None, ...]] = set() if self._is_loose else {tuple(plain)}
        self.is_plain = _plain_check(self.width, self.plain)
        copies = [_copy_of(f.type) for f in schema]
        self.fresh = _row_copy(copies) if any(copies) else None

    def row_of(self, value: Any, method: str) -> tuple[Any, ...]:
        """Convert a row of user code to the form in which it is read.

        Raises:
            InvalidStateValue: not a row of this schema's fields, or a field of another kind that cannot be converted
                without loss.
        """
        if self._takes_bare and isinstance(value, _BARE):
            value = (value,)
        if (
            value is None
            or isinstance(value, str | bytes | Mapping | set | frozenset)
            or not isinstance(value, Iterable)
        ):
            raise InvalidStateValue(
                f"{self._where}: {method}() got a {type(value).__name__}; give a tuple (or a Row) with the fields "
                f"{self._names}"
            )
        row = tuple(value)
        if len(row) != self.width:
            raise InvalidStateValue(
                f"{self._where}: {method}() got {len(row)} fields, the schema has {self.width}: {self._names}"
            )
        try:
            fixed = tuple([None if v is None else fix(v) for fix, v in zip(self._fixes, row)])
        except _REFUSALS:
            raise self._misfit(row, method) from None  # the cause may hold the value
        if not self._is_loose and len(self.plain) < _SIGNATURES_MAX and all(map(operator.is_, fixed, row)):
            self.plain.add(tuple(map(type, row)))  # the same types with nulls at other places
        return fixed

    def _misfit(self, row: tuple[Any, ...], method: str) -> InvalidStateValue:
        for field, fix, value in zip(self._fields, self._fixes, row):
            try:
                if value is not None:
                    fix(value)
            except _REFUSALS as error:
                why = f" ({error})" if isinstance(error, _Misfit) else ""
                return InvalidStateValue(
                    f"{self._where}: {method}() got a {type(value).__name__} for field {field.name!r}, which is "
                    "declared as "
                    f"{field.type}, and it does not fit{why}. Change the declared schema or convert the value"
                )
        return InvalidStateValue(f"{self._where}: {method}() got a value that does not fit")

    def rows(self, columns: Sequence[pa.Array]) -> list[tuple[Any, ...]]:
        """Return stored columns as the rows that user code reads.

        Raises:
            InvalidStateValue: Python cannot represent one of the values. Imported states may hold such values.
        """
        return list(zip(*map(self._read, self._reads, columns, self._fields)))

    def _read(self, read: Callable[[pa.Array], list[Any]], column: pa.Array, field: pa.Field) -> list[Any]:
        try:
            return read(column)
        except (ValueError, OverflowError):
            raise InvalidStateValue(
                f"{self._where}: a stored value of {field.name!r} ({field.type}) cannot be represented by Python: "
                "years are 1 to 9999, in UTC and in the time zone of the process, and text is UTF-8. Nothing was "
                "changed. Correct it where this state was imported from, or keep it as a number (`unix_micros`), and "
                "begin a new job with it (docs/guide.md, 'Begin with state')"
            ) from None  # the cause holds the value

    def row_at(self, columns: Sequence[pa.Array]) -> Callable[[int], tuple[Any, ...]]:
        """Return a function that gives one row as `rows` does; it decodes no other row."""
        cells = [
            _cell_of(partial(self._read, read, field=field), column)
            for read, column, field in zip(self._reads, columns, self._fields)
        ]
        if len(cells) == 1:
            (only,) = cells
            return lambda at: (only(at),)
        return lambda at: tuple([cell(at) for cell in cells])

    def columns(self, rows: Sequence[tuple[Any, ...] | None], *, holes: bool = False) -> list[pa.Array]:
        """Return rows as columns to store.

        Args:
            holes: whether the rows include None, which becomes null.

        Raises:
            InvalidData: a value does not fit its field.
        """
        if holes:
            empty = (None,) * self.width
            rows = [empty if row is None else row for row in rows]
        columns: Sequence[Sequence[Any]] = list(zip(*rows)) if rows else [()] * self.width
        return [
            make(values, field, lambda: self._where) for make, values, field in zip(self._makes, columns, self._fields)
        ]


def _plain_check(width: int, plain: Set[tuple[_Type | None, ...]]) -> Callable[[Any], bool]:
    """Return a check whether a row is a tuple whose types are in `plain`.

    Written out for few fields: `tuple(map(type, row))` takes three times as long, and every row is checked.
    """

    def one(row: Any) -> bool:
        return type(row) is tuple and len(row) == 1 and (type(row[0]),) in plain

    def two(row: Any) -> bool:
        return type(row) is tuple and len(row) == 2 and (type(row[0]), type(row[1])) in plain

    def three(row: Any) -> bool:
        return type(row) is tuple and len(row) == 3 and (type(row[0]), type(row[1]), type(row[2])) in plain

    def four(row: Any) -> bool:
        return (
            type(row) is tuple and len(row) == 4 and (type(row[0]), type(row[1]), type(row[2]), type(row[3])) in plain
        )

    def many(row: Any) -> bool:
        return type(row) is tuple and tuple(map(type, row)) in plain

    return {1: one, 2: two, 3: three, 4: four}.get(width, many)


_QUARTER_S: Final = 900


class _Misfit(Exception):
    """Why a value does not fit; the text holds no value."""


_REFUSALS = (_Misfit, TypeError, ValueError, OverflowError, InvalidOperation)


# --- reading -----------------------------------------------------------------------------------------------------


def read_column(column: pa.Array) -> list[Any]:
    """Return a column as the values that user code reads from a state."""
    return _read_of(column.type)(column)


def local_timestamps(column: pa.Array) -> list[Any]:
    """Return timestamps with a zone as datetimes without one, in the process's time zone, as Spark's states do."""
    moments = column.cast(pa.timestamp("us"))
    return to_python(moments if _local_is_utc() else _local_times(moments))


def _local_times(moments: pa.Array) -> pa.Array:
    """Convert by the offsets of the process's zone, which need not have a name. They are looked up once per occurring
    quarter of an hour, and per second only in a quarter in which the clocks change."""
    of_row = moments.cast(pa.int64()).fill_null(0).to_numpy()
    seconds = of_row // 1_000_000
    quarters, quarter_of_row = np.unique(seconds // _QUARTER_S, return_inverse=True)
    first, last = _offsets_s(quarters * _QUARTER_S), _offsets_s(quarters * _QUARTER_S + _QUARTER_S - 1)
    offsets_s = first[quarter_of_row]
    changing = (first != last)[quarter_of_row]
    if changing.any():
        offsets_s[changing] = _offsets_s(seconds[changing])
    is_null = moments.is_null().to_numpy(zero_copy_only=False)
    return pa.array(of_row + offsets_s * 1_000_000, mask=is_null).cast(pa.timestamp("us"))


def _offsets_s(seconds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the offsets of the process's zone from UTC, in seconds."""
    return np.fromiter((time.localtime(s).tm_gmtoff for s in seconds.tolist()), np.int64, len(seconds))


def _read_of(data_type: pa.DataType) -> Callable[[pa.Array], list[Any]]:
    if pa.types.is_timestamp(data_type) and data_type.tz is not None:
        return local_timestamps
    convert = _as_read(data_type) if pa.types.is_nested(data_type) else None
    if convert is None:
        return to_python
    return lambda column: [None if v is None else convert(v) for v in column.to_pylist()]


def _cell_of(read: Convert, column: pa.Array) -> Callable[[int], Any]:
    """Return a function that gives one row of a column as `read` does."""
    kind = column.type
    if column.null_count == 0 and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        numbers: Callable[[int], Any] = column.to_numpy(zero_copy_only=False).item
        return numbers
    return lambda at: read(column.slice(at, 1))[0]


def _as_read(data_type: pa.DataType) -> Convert | None:
    """Return the conversion from `to_pylist` of a nested value to the value that user code reads; None if equal."""
    if pa.types.is_struct(data_type):
        make = row_class_of([f.name for f in data_type])
        inner = [_nullable(_as_read(f.type)) for f in data_type]
        return lambda value: tuple.__new__(make, [fix(v) for fix, v in zip(inner, value.values())])
    if pa.types.is_map(data_type):
        key, item = _nullable(_as_read(data_type.key_type)), _nullable(_as_read(data_type.item_type))
        return lambda value: {key(k): item(v) for k, v in value}
    if pa.types.is_list(data_type) or pa.types.is_large_list(data_type):
        element = _as_read(data_type.value_type)
        if element is None:
            return None
        each = _nullable(element)
        return lambda value: [each(v) for v in value]
    if pa.types.is_timestamp(data_type) and data_type.tz is not None:
        return _local
    return None


def can_be_changed(data_type: pa.DataType) -> bool:
    """Return whether values of a type, as user code reads them, are mutable: lists and maps, at any depth."""
    return _copy_of(data_type) is not None


def _row_copy(copies: Sequence[Convert | None]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    each = [_nullable(copy) for copy in copies]
    return lambda row: tuple([copy(value) for copy, value in zip(each, row)])


def _copy_of(data_type: pa.DataType) -> Convert | None:
    """Return a function that copies a value as user code reads it, down to the last list; None if it is immutable."""
    if pa.types.is_struct(data_type):
        copies = [_copy_of(f.type) for f in data_type]
        if not any(copies):
            return None  # a Row is a tuple
        make, inner = row_class_of([f.name for f in data_type]), [_nullable(copy) for copy in copies]
        return lambda value: tuple.__new__(make, [copy(v) for copy, v in zip(inner, value)])
    if pa.types.is_map(data_type):
        items = _copy_of(data_type.item_type)
        if items is None:
            return dict
        item = _nullable(items)
        return lambda value: {k: item(v) for k, v in value.items()}
    if pa.types.is_list(data_type) or pa.types.is_large_list(data_type):
        elements = _copy_of(data_type.value_type)
        if elements is None:
            return list
        element = _nullable(elements)
        return lambda value: [element(v) for v in value]
    return None


def _nullable(convert: Convert | None) -> Convert:
    if convert is None:
        return lambda value: value
    return lambda value: None if value is None else convert(value)


# --- writing -----------------------------------------------------------------------------------------------------


def _plain_of(data_type: pa.DataType) -> _Type | None:
    """Return the one Python type whose values are read as they are written; None if the value must be checked."""
    return next((plain for is_kind, plain, _ in _KINDS if is_kind(data_type)), None)


def _fix_of(data_type: pa.DataType) -> Convert:
    """Return the conversion from a value of user code (not null) to the form in which it is read."""
    types = pa.types
    for is_kind, plain, fix in _KINDS:
        if is_kind(data_type):
            return partial(_plain_or, plain, fix)
    if types.is_timestamp(data_type):
        return _local_time if data_type.tz is not None else _wall_time
    if types.is_float32(data_type):
        return _single
    if types.is_decimal(data_type):
        return _decimal_of(data_type.precision, data_type.scale)
    if types.is_struct(data_type):
        return _struct_of(data_type)
    if types.is_map(data_type):
        return _map_of(data_type)
    if types.is_list(data_type) or types.is_large_list(data_type):
        element = _element_of(data_type.value_type)
        return lambda value: [element(v) for v in _sequence(value, "an array")]
    return lambda value: value.item() if isinstance(value, np.generic) else value


def _plain_or(plain: _Type, fix: Convert, value: Any) -> Any:
    return value if type(value) is plain else fix(value)


def _element_of(data_type: pa.DataType) -> Convert:
    """Return the conversion of `_fix_of` for values inside other values: nulls too."""
    fix = _fix_of(data_type)
    return lambda value: None if value is None else fix(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating | Decimal):
        raise _Misfit("not a whole number")
    if value != int(value):
        raise _Misfit("it has a fraction")
    return int(value)


def _double(value: Any) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise _Misfit("not a number")
    number = float(value)
    if isinstance(value, int | np.integer) and int(number) != int(value):
        raise _Misfit("a double does not have that many digits")
    return number


def _single(value: Any) -> float:
    number = _double(value)
    if math.isfinite(number) and abs(number) > _SINGLE_MAX:
        raise _Misfit("beyond the range")
    single = float(np.float32(number))
    if isinstance(value, int | np.integer) and single != number:
        raise _Misfit("a float does not have that many digits")
    return single


_SINGLE_MAX = float(np.finfo(np.float32).max)


def _truth(value: Any) -> bool:
    if not isinstance(value, np.bool_):
        raise _Misfit("not a boolean")
    return bool(value)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise _Misfit("not a text")
    return str(int(value))


def _bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes | bytearray | memoryview):
        raise _Misfit("not bytes")
    return bytes(value)


def _day(value: Any) -> dt.date:
    if isinstance(value, np.datetime64):
        value = value.item()
    if not isinstance(value, dt.date):
        raise _Misfit("not a date")
    nanosecond: Any = getattr(value, "nanosecond", 0)  # of a pandas.Timestamp
    if isinstance(value, dt.datetime) and (value.time() != dt.time() or nanosecond):
        raise _Misfit("it has a time of day, which would be lost")
    return dt.date(value.year, value.month, value.day)


def _span(value: Any) -> dt.timedelta:
    if isinstance(value, np.timedelta64):
        value = value.item()
    if not isinstance(value, dt.timedelta):
        raise _Misfit("not a timedelta")
    if getattr(value, "nanoseconds", 0):
        raise _Misfit("it has nanoseconds, which would be lost")
    return dt.timedelta(value.days, value.seconds, value.microseconds)


_KINDS: tuple[tuple[Callable[[pa.DataType], bool], _Type, Convert], ...] = (
    (pa.types.is_integer, int, _whole),
    (pa.types.is_float64, float, _double),
    (pa.types.is_boolean, bool, _truth),
    (lambda t: bool(pa.types.is_string(t) or pa.types.is_large_string(t)), str, _text),
    (lambda t: bool(pa.types.is_binary(t) or pa.types.is_large_binary(t)), bytes, _bytes),
    (pa.types.is_date32, dt.date, _day),
    (pa.types.is_duration, dt.timedelta, _span),
)
"""Kinds of types with one Python type whose values are read as they are written, and the conversion of other values."""


def _struct_of(data_type: pa.DataType) -> Convert:
    names = [f.name for f in data_type]
    make = row_class_of(names)
    inner = [_element_of(f.type) for f in data_type]

    def convert(value: Any) -> Any:
        if isinstance(value, Mapping):
            unknown = [k for k in value if k not in names]
            if unknown:
                raise _Misfit(f"a struct of {', '.join(names)} got other fields")
            value = [value.get(name) for name in names]
        value = _sequence(value, "a struct")
        if len(value) != len(names):
            raise _Misfit(f"a struct of {', '.join(names)} got {len(value)} fields")
        return tuple.__new__(make, [fix(v) for fix, v in zip(inner, value)])

    return convert


def _map_of(data_type: pa.DataType) -> Convert:
    key, item = _element_of(data_type.key_type), _element_of(data_type.item_type)

    def convert(value: Any) -> Any:
        pairs = value.items() if isinstance(value, Mapping) else _sequence(value, "a map")
        return {key(k): item(v) for k, v in pairs}

    return convert


def _sequence(value: Any, what: str) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, np.ndarray) and value.ndim > 0:
        listed: list[Any] = value.tolist()
        return listed
    raise _Misfit(f"{what} is a {type(value).__name__}")


def _decimal_of(precision: int, scale: int) -> Convert:
    unit, limit = Decimal(1).scaleb(-scale), Decimal(1).scaleb(precision - scale)

    def convert(value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            value = Decimal(value)
        if not isinstance(value, Decimal) or not value.is_finite():
            raise _Misfit("not a decimal")
        fitted = value.quantize(unit, context=_EXACT) if value.as_tuple().exponent != -scale else value
        if fitted != value:
            raise _Misfit(f"more than {scale} digits after the point")
        if not -limit < fitted < limit:
            raise _Misfit(f"more than {precision - scale} digits before the point")
        return fitted

    return convert


def _python_time(value: Any) -> dt.datetime:
    if hasattr(value, "to_pydatetime"):  # a pandas.Timestamp is a datetime too, but Arrow reads its nanoseconds
        value = value.to_pydatetime(warn=False)
    if not isinstance(value, dt.datetime):
        raise _Misfit("not a datetime")
    return value


def _local_time(value: Any) -> dt.datetime:
    moment = _python_time(value)
    return moment if moment.tzinfo is None else _local(moment)


def _wall_time(value: Any) -> dt.datetime:
    return _python_time(value).replace(tzinfo=None)


def _local(moment: dt.datetime) -> dt.datetime:
    return moment.astimezone().replace(tzinfo=None)


def _local_is_utc() -> bool:
    return time.timezone == 0 and not time.daylight


Describe: TypeAlias = Callable[[], str]


def _make_of(data_type: pa.DataType) -> Callable[[Sequence[Any], pa.Field, Describe], pa.Array]:
    """Return how a column is made of normal values: datetimes without a zone are in the zone of the process."""
    if _plain_of(data_type) is not None:
        return from_normal
    if not _holds_moments(data_type):
        return from_python
    moments = _to_moments(data_type)

    def make(values: Sequence[Any], field: pa.Field, describe: Describe) -> pa.Array:
        if not _local_is_utc():
            values = [None if v is None else moments(v) for v in values]
        return from_python(values, field, describe)

    return make


def _holds_moments(data_type: pa.DataType) -> bool:
    if pa.types.is_timestamp(data_type):
        return data_type.tz is not None
    return pa.types.is_nested(data_type) and any(
        _holds_moments(data_type.field(i).type) for i in range(data_type.num_fields)
    )


def _to_moments(data_type: pa.DataType) -> Convert:
    """Return a function that adds the zone to datetimes without one inside a normal value."""
    if pa.types.is_timestamp(data_type) and data_type.tz is not None:
        return lambda value: value.astimezone(dt.UTC) if isinstance(value, dt.datetime) else value
    if pa.types.is_struct(data_type):
        inner = [_nullable(_to_moments(f.type)) for f in data_type]
        names = [f.name for f in data_type]
        return lambda value: {name: fix(v) for name, fix, v in zip(names, inner, value)}
    if pa.types.is_map(data_type):
        key, item = _nullable(_to_moments(data_type.key_type)), _nullable(_to_moments(data_type.item_type))
        return lambda value: {key(k): item(v) for k, v in value.items()}
    if pa.types.is_list(data_type) or pa.types.is_large_list(data_type):
        each = _nullable(_to_moments(data_type.value_type))
        return lambda value: [each(v) for v in value]
    return lambda value: value
