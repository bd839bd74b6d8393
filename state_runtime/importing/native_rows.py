"""Rows of a query's operator in a checkpoint, read by Spark's own reader, in the columns of the same state here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from state_runtime.base.errors import InvalidConfiguration, InvalidData
from state_runtime.importing.native_queries import INDEX, NativeRead
from state_runtime.reading.rows import RowLayout
from state_runtime.spark.query_parts import NativeColumn
from state_runtime.spark.sql import quoted

__all__ = ["first_line", "rows_of_query"]


def rows_of_query(
    spark: SparkSession, checkpoint: str, batch_id: int, number: int, read: NativeRead, layout: RowLayout
) -> DataFrame:
    """Return the rows of a state.

    Args:
        number: Spark's of the operator.

    Raises:
        InvalidConfiguration: the checkpoint has other columns than the query. InvalidData: Spark cannot read it.
    """
    options = {"batchId": str(batch_id), "operatorId": str(number), **({"storeName": read.store} if read.store else {})}
    try:
        frame = spark.read.format("statestore").options(**options).load(checkpoint)
    except PySparkException as error:
        hint = " (a join's state is taken in the forms 2 and 3 of spark.sql.streaming.join.stateFormatVersion)"
        raise InvalidData(
            f"Spark cannot read operator {number} of {checkpoint}{hint if read.store else ''}: {first_line(error)}"
        ) from error
    where = f"operator {layout.operator.uid!r}"
    if read.rows is not None:
        made = _rows_of_side(frame, read, read.rows, layout, where)
        _check_types(made, layout, where)
        return made
    keys, values = (_columns(frame, name) for name in ("key", "value"))
    _check(keys, [read.keys], f"{where}: its key")
    _check(values, read.values, where)
    flat = _flat(
        frame,
        {"key": _numbered("n" if read.is_session else "k", len(keys)), "value": _names_of_value(read, len(values))},
    )
    _check_windows(flat, read, where)
    made = flat.where(read.where).selectExpr(*(f"{sql} AS {quoted(name)}" for name, sql in read.columns.items()))
    _check_types(made, layout, where)
    return made


def _rows_of_side(
    frame: DataFrame, read: NativeRead, rows: Callable[[DataFrame], DataFrame], layout: RowLayout, where: str
) -> DataFrame:
    """Return the rows of a side of a join: the plan of the query computes its columns of what Spark keeps."""
    where = f"{where}, its {layout.state.name} side"
    _check(_columns(frame, "value"), read.values, where)
    own = layout.versions.keys
    there = _columns(frame, "key")
    if len(there) != len(own) + 1 or there[-1] != INDEX:
        raise InvalidConfiguration(
            f"{where} has {len(there) - 1} key columns in the checkpoint, and {len(own)} in the job's query. Give "
            "job.query the code that the query had; it can be changed after the import"
        )
    keys, values = _numbered("k", len(own)), _numbered("v", len(read.values[0]) - 1)
    flat = _flat(frame, {"key": [*keys, INDEX.name], "value": [*values, "matched"]})
    made = rows(flat.select(*values, "matched", INDEX.name, *keys))
    # Rows of a key meet those of the other side: another key would leave them to others, which have not met them.
    same = " AND ".join(f"{quoted(c.name)} <=> {key}" for c, key in zip(own, keys, strict=True))
    if made.where(f"NOT ({same})").limit(1).count():
        raise InvalidConfiguration(
            f"{where} is kept by other keys in the checkpoint than the job's query has. Give job.query the code that "
            "the query had; it can be changed after the import"
        )
    return made.where(read.where).selectExpr(*(f"{sql} AS {quoted(name)}" for name, sql in read.columns.items()))


def first_line(error: Exception) -> str:
    """Return what an error of Spark's says, without the plan below it."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _numbered(letter: str, count: int) -> list[str]:
    return [f"{letter}{place}" for place in range(count)]


def _names_of_value(read: NativeRead, count: int) -> list[str]:
    """Return names for the columns of a value: those of the keys before the others."""
    if read.is_session:
        return [*_numbered("k", len(read.keys)), *_numbered("v", count - len(read.keys))]
    own = len(read.values[0])
    return [*_numbered("x", count - own), *_numbered("v", own)]


def _flat(frame: DataFrame, names: Mapping[str, Sequence[str]]) -> DataFrame:
    """Return the fields of structs as columns with other names, by their places: several may have one name, and what
    Spark prunes of a source it finds by name, but for what is cast."""
    casts, fields = [], []
    for struct, wanted in names.items():
        if wanted:
            columns = zip(wanted, _columns(frame, struct), strict=True)
            casts.append(
                f"CAST({struct} AS struct<{', '.join(f'{name}: {c.type}' for name, c in columns)}>) AS {struct}"
            )
            fields.append(f"{struct}.*")
    return frame.selectExpr(*casts).select(*fields) if casts else frame


def _columns(frame: DataFrame, name: str) -> tuple[NativeColumn, ...]:
    struct = frame.schema[name].dataType
    fields = struct.fields if isinstance(struct, T.StructType) else []
    return tuple(NativeColumn(field.name, field.dataType.simpleString()) for field in fields)


def _check(there: Sequence[NativeColumn], wanted: Sequence[Sequence[NativeColumn]], where: str) -> None:
    if not any(tuple(there) == tuple(form) for form in wanted):
        shown = [", ".join(f"{c.name} {c.type}" for c in columns) or "none" for columns in (there, wanted[0])]
        raise InvalidConfiguration(
            f"{where} has the columns ({shown[0]}) in the checkpoint, and ({shown[1]}) in the job's query. Give "
            "job.query the code that the query had; it can be changed after the import"
        )


def _check_windows(rows: DataFrame, read: NativeRead, where: str) -> None:
    """Refuse windows of another length: no column tells it, and rows to come would meet none of them."""
    if not read.window_us:
        return
    length = f"timestampdiff(MICROSECOND, {read.window}.start, {read.window}.end)"
    other = (
        rows.where(f"{length} {'<' if read.is_session else '<>'} {read.window_us}")
        .selectExpr(f"{length} AS us")
        .first()
    )
    if other is not None:
        raise InvalidConfiguration(
            f"{where} has windows of {other.us / 1e6:g} s in the checkpoint, and the job's query has windows of "
            f"{read.window_us / 1e6:g} s{' at least' if read.is_session else ''}. Give job.query the code that the "
            "query had"
        )


def _check_types(made: DataFrame, layout: RowLayout, where: str) -> None:
    """Refuse a column that Spark keeps with another type than the state here has it."""
    versions = layout.versions
    wanted = {("key", c.name): c.type_text for c in versions.keys} | {
        ("value", c.name): c.type_text for c in versions.values
    }
    for name, role in layout.shown.roles().items():
        if role in wanted and made.schema[name].dataType.simpleString().lower() != wanted[role].lower():
            raise InvalidConfiguration(
                f"{where}: Spark keeps {name} as {made.schema[name].dataType.simpleString()}, and here it is "
                f"{wanted[role]}; its state cannot be imported. Cast what it is made of after the import"
            )
