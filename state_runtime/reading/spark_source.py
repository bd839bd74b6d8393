"""`spark.read.format("stillstate")`: any snapshot as DataFrames.

    register(spark)                                   # or spark.dataSource.register(StillstateDataSource)
    spark.read.format("stillstate").options(operator="legs", state="seen").load("s3a://bucket/state/flights@120")

| option | what |
|---|---|
| `place` (or the path of `load`) | `<store>/<job>`, `<store>/<job>@<id>`, or the folder of a savepoint |
| `what` | `state` (default if `state` is given), `operators` (default), `snapshots`, `manifest`, `inflight` |
| `operator`, `state` | the state to read; its columns have their real types |
| `columns` | of a state, with commas: only these are read. Spark does not tell Python data sources which columns a
query needs; `.schema("a long, b string")` does the same |
| `inflight` | uid of an operator: its rows that are in flight, with its input columns, and `_operator`, `_epoch`,
`_key_hash`, `_place` |
| `hash_range` | of a state or of rows in flight, `LOW:HIGH`: only keys whose unsigned hash is in this range |
| `partitions` | of the same: number of hash ranges that are read in parallel; by default one for 64 MiB |

Conditions that name every key column by `=`, `<=>`, `in` or `is null` are answered by looking up those keys, if
filters are pushed down (`register` sets `spark.sql.python.filterPushdown.enabled`; or set it and the option
`pushdown`).

The snapshot is fixed when the DataFrame is made, so all its actions see the same rows. Credentials come from the
executors' environment, or from `register(spark, storage_options=…)`, which passes them to the tasks without showing
them in any plan; they are refused as options of a read, which Spark may show.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import types as T
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceWriter,
    EqualNullSafe,
    EqualTo,
    Filter,
    In,
    InputPartition,
    IsNull,
)

from state_runtime.base.errors import InvalidConfiguration, InvalidData, StillstateError
from state_runtime.base.limits import MIB
from state_runtime.reading.catalogs import RELATIONS, relation_rows
from state_runtime.reading.inflight import ReadableInflight
from state_runtime.reading.reader import ALL_HASHES, hash_ranges
from state_runtime.reading.snapshot import ReadableSnapshot, ReadableState, open_snapshot_for_reading
from state_runtime.spark.arrow import arrow_schema_of, spark_schema_of

__all__ = ["StillstateDataSource", "register"]

_FORMAT = "stillstate"
_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_OPTIONS = (
    "place",
    "path",
    "what",
    "operator",
    "state",
    "inflight",
    "columns",
    "hash_range",
    "partitions",
    "pushdown",
)
_PARTITION_BYTES = 64 * MIB
_PARTITIONS_MAX = 256
_KEYS_MAX = 1000
_KEYS_PER_TASK = 50


def register(spark: SparkSession, *, storage_options: Mapping[str, Any] | None = None, pushdown: bool = True) -> None:
    """Register the format in a session.

    Args:
        storage_options: for the stores that are read, as fsspec has them; they are sent to the tasks, and never
            shown.
        pushdown: also let conditions on keys reduce the data that is read: sets Spark's
            `spark.sql.python.filterPushdown.enabled`.
    """
    # A separate class: Spark makes instances from the options of a read alone, which its plans show.
    known = {"_storage_options": dict(storage_options or {}), "_pushdown": pushdown}
    if pushdown:
        spark.conf.set(_PUSHDOWN, "true")
    spark.dataSource.register(type("StillstateDataSource", (StillstateDataSource,), known))


class StillstateDataSource(DataSource):
    """The format `stillstate`; see the module."""

    _storage_options: ClassVar[Mapping[str, Any]] = {}
    _pushdown: ClassVar[bool] = False
    _fixed: str | None = None

    @classmethod
    def name(cls) -> str:
        return _FORMAT

    def schema(self) -> T.StructType:
        """Return the columns of the relation.

        Raises:
            InvalidConfiguration: options that cannot be combined, or a type that is not known without the job.
        """
        what = self._what()
        if what == "rows":
            return spark_schema_of(self._rows(self._open()).schema)
        if what != "state":
            return RELATIONS[what]
        state = self._state(self._open())
        schema = state.schema(self._columns(state))
        for field in schema:
            if pa.types.is_null(field.type):
                raise InvalidConfiguration(
                    f"column {field.name!r} of {state.operator}/{state.name} is "
                    f"{state.shown.by_name[field.name].type_text}, which "
                    "cannot be shown without the job; leave it out with the option `columns`"
                )
        return spark_schema_of(schema)

    def reader(self, schema: T.StructType) -> DataSourceReader:
        """Return the reader that runs in tasks."""
        what = self._what()
        if what == "rows":
            snapshot = self._open()
            rows = self._rows(snapshot)
            for name in schema.names:
                if name not in rows.schema.names:
                    raise InvalidConfiguration(
                        f"rows in flight of operator {rows.operator!r} have no column {name!r}; they have: "
                        f"{', '.join(rows.schema.names)}"
                    )
            asked = arrow_schema_of(schema)
            size = sum(p.bytes for p in rows.passes)
            return _InflightReader(snapshot.place, self._storage_options, rows.operator, asked, self._ranges(size))
        if what != "state":
            place = self._place() if what == "snapshots" else self._open().place
            return _RelationReader(what, place, self._storage_options, arrow_schema_of(schema))
        snapshot = self._open()
        state = self._state(snapshot)
        self._columns(state)
        state.wanted(schema.names)
        pushes = self._pushdown or self.options.get("pushdown", "").lower() == "true"
        return (_PushingReader if pushes else _StateReader)(
            snapshot.place,
            self._storage_options,
            state.operator,
            state.name,
            arrow_schema_of(schema),
            self._ranges(state.snapshot.reader().stored_bytes(state.operator, state.name)),
            state.key_columns,
            all(column.binary_equality for column in state.shown.versions.keys),
        )

    def writer(self, schema: T.StructType, overwrite: bool) -> DataSourceWriter:
        """Refuse to write: a snapshot has many tables, but one DataFrame is one table.

        Raises:
            InvalidConfiguration: always.
        """
        raise InvalidConfiguration(
            "a snapshot is written from one DataFrame per state: state_runtime.importing.bootstrap.bootstrap(spark, "
            "place, job, frames)"
        )

    # --- options -------------------------------------------------------------------------------------------------

    def _what(self) -> str:
        unknown = [name for name in self.options if name.lower() not in _OPTIONS]
        if unknown:
            # Never show its value: it may be a credential.
            raise InvalidConfiguration(
                f"option {unknown[0]!r} is not known; there are: {', '.join(_OPTIONS)}. Credentials go into the "
                "environment, or to register(spark, storage_options=…)"
            )
        if self.options.get("inflight"):
            clash = [name for name in ("what", "operator", "state", "columns") if self.options.get(name)]
            if clash:
                raise InvalidConfiguration(f"option inflight names an operator by itself; leave out {clash[0]!r}")
            return "rows"
        what = self.options.get("what") or ("state" if self.options.get("state") else "operators")
        if what != "state" and what not in RELATIONS:
            raise InvalidConfiguration(f"option what={what!r}: use one of state, {', '.join(RELATIONS)}")
        return what

    def _place(self) -> str:
        place = self.options.get("place") or self.options.get("path")
        if not place:
            raise InvalidConfiguration('name what to read: option("place", "<store>/<job>")')
        return place

    def _open(self) -> ReadableSnapshot:
        """Return the snapshot, the same one from the first call on: this object is pickled to the query's planner."""
        snapshot = open_snapshot_for_reading(self._fixed or self._place(), self._storage_options)
        self._fixed = snapshot.place
        return snapshot

    def _state(self, snapshot: ReadableSnapshot) -> ReadableState:
        operator, state = self.options.get("operator"), self.options.get("state")
        if not state:
            raise InvalidConfiguration('name the state: option("state", …); what="operators" lists them')
        having = [s for s in snapshot.states() if s.name == state]
        if operator:
            return snapshot.state(operator, state)
        if len(having) != 1:
            known = ", ".join(f"{s.operator}/{s.name}" for s in having or snapshot.states()) or "none"
            raise InvalidConfiguration(
                f"name the operator of state {state!r} with option `operator`; there are: {known}"
            )
        return having[0]

    def _columns(self, state: ReadableState) -> list[str] | None:
        text = self.options.get("columns")
        if text is None:
            return None
        return state.wanted([name.strip() for name in text.split(",")])

    def _rows(self, snapshot: ReadableSnapshot) -> ReadableInflight:
        return snapshot.inflight(self.options.get("inflight") or "")

    def _ranges(self, size: int) -> tuple[tuple[int, int], ...]:
        text = self.options.get("partitions")
        count = min(_PARTITIONS_MAX, -(-size // _PARTITION_BYTES)) if text is None else _number(text, "partitions")
        if not 0 <= count <= 32768:
            raise InvalidConfiguration(f"option partitions={count}: give 1 to 32768")
        first, last = ALL_HASHES
        if text := self.options.get("hash_range"):
            low, _, high = text.partition(":")
            first, last = _number(low, "hash_range"), _number(high, "hash_range")
            if not 0 <= first <= last <= ALL_HASHES[1]:
                raise InvalidConfiguration("option hash_range must be LOW:HIGH, two hashes from 0 to 2^64 - 1")
        cut = [(max(low, first), min(high, last)) for low, high in hash_ranges(count)]
        return tuple((low, high) for low, high in cut if low <= high)


def _number(text: str, option: str) -> int:
    try:
        return int(text.strip(), 0)
    except ValueError:
        raise InvalidConfiguration(f"option {option} holds {text[:40]!r}, which is no whole number") from None


# --- reading -----------------------------------------------------------------------------------------------------


class _Options(dict[str, Any]):
    """Storage options whose repr shows nothing."""

    def __repr__(self) -> str:
        return f"<{len(self)} storage options>"


@dataclass
class _HashRange(InputPartition):
    low: int
    high: int


@dataclass(repr=False)
class _Keys(InputPartition):
    """Keys to look up; never shown."""

    keys: tuple[dict[str, Any], ...]

    def __repr__(self) -> str:
        return f"_Keys({len(self.keys)})"


class _RelationReader(DataSourceReader):
    """Reader of a small relation, in one task."""

    def __init__(self, what: str, place: str, storage_options: Mapping[str, Any], schema: pa.Schema) -> None:
        self._what = what
        self._place = place
        self._storage_options = _Options(storage_options)
        self._schema = schema

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        names = self._schema.names
        for rows in relation_rows(self._what, self._place, self._storage_options):
            columns = [pa.array([row[name] for row in rows], field.type) for name, field in zip(names, self._schema)]
            yield pa.RecordBatch.from_arrays(columns, schema=self._schema)


class _InflightReader(DataSourceReader):
    """Reader of rows in flight, a hash range per task."""

    def __init__(
        self,
        place: str,
        storage_options: Mapping[str, Any],
        operator: str,
        schema: pa.Schema,
        ranges: Sequence[tuple[int, int]],
    ) -> None:
        self._place = place
        self._storage_options = _Options(storage_options)
        self._operator = operator
        self._schema = schema
        self._ranges = tuple(ranges)

    def partitions(self) -> Sequence[InputPartition]:
        return [_HashRange(low, high) for low, high in self._ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, _HashRange):
            raise StillstateError(f"a partition of type {type(partition).__name__}")
        rows = open_snapshot_for_reading(self._place, self._storage_options).inflight(self._operator)
        for batch in rows.batches((partition.low, partition.high)):
            if not self._schema.names:  # `count()` needs rows, but no columns
                yield batch.select([])
                continue
            arrays = [batch.column(field.name).cast(field.type) for field in self._schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)


class _StateReader(DataSourceReader):
    """Reader of a state, a hash range per task."""

    def __init__(
        self,
        place: str,
        storage_options: Mapping[str, Any],
        operator: str,
        state: str,
        schema: pa.Schema,
        ranges: Sequence[tuple[int, int]],
        key_columns: Sequence[str],
        hashable: bool,
    ) -> None:
        self._place = place
        self._storage_options = _Options(storage_options)
        self._operator = operator
        self._state = state
        self._schema = schema
        self._ranges = tuple(ranges)
        self._key_columns = tuple(key_columns)
        self._hashable = hashable
        self._keys: list[dict[str, Any]] | None = None

    def partitions(self) -> Sequence[InputPartition]:
        if self._keys is None:
            return [_HashRange(low, high) for low, high in self._ranges]
        cut = range(0, len(self._keys), _KEYS_PER_TASK)
        return [_Keys(tuple(self._keys[at : at + _KEYS_PER_TASK])) for at in cut] or [_Keys(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        state = open_snapshot_for_reading(self._place, self._storage_options).state(self._operator, self._state)
        # `count()` needs rows, but no columns.
        columns = self._schema.names or list(state.key_columns[:1])
        if isinstance(partition, _Keys):
            batches = state.batches(columns, keys=partition.keys)
        elif isinstance(partition, _HashRange):
            batches = state.batches(columns, hash_range=(partition.low, partition.high))
        else:
            raise StillstateError(f"a partition of type {type(partition).__name__}")
        for batch in batches:
            arrays = [batch.column(i).cast(field.type) for i, field in enumerate(self._schema)]
            if arrays:
                yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)
            else:
                yield batch.select([])


class _PushingReader(_StateReader):
    """The same reader, for sessions in which Spark pushes down the conditions of a query."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take the conditions that name whole keys; all others stay with Spark."""
        wanted: dict[str, tuple[Any, ...]] = {}
        taken: list[Filter] = []
        for condition in filters:
            values = _values_of(condition)
            name = ".".join(getattr(condition, "attribute", ()))
            if values is not None and name in self._key_columns and name not in wanted:
                wanted[name] = values
                taken.append(condition)
        if not self._hashable or len(wanted) < len(self._key_columns):
            return filters
        count = 1
        for values in wanted.values():
            count *= len(values)
        if count > _KEYS_MAX:
            return filters
        keys = [dict(zip(wanted, combined)) for combined in product(*wanted.values())]
        if not self._fits(keys):
            return filters
        self._keys = keys
        return [condition for condition in filters if not any(condition is one for one in taken)]

    def _fits(self, keys: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the values are of the columns' types, as Python has them: else Spark compares."""
        state = open_snapshot_for_reading(self._place, self._storage_options).state(self._operator, self._state)
        types = {c.name: c.type for c in state.shown.versions.keys}
        named = {name: own for name, (role, own) in state.shown.roles().items() if role == "key"}
        try:
            for key in keys:
                for name, value in key.items():
                    kind = types[named[name]]
                    if kind is None or pa.types.is_nested(kind) or pa.types.is_timestamp(kind):
                        return False
                    pa.scalar(value, kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError, InvalidData):
            return False
        return all(named[name] == name for name in self._key_columns)


def _values_of(condition: Filter) -> tuple[Any, ...] | None:
    """Return the values that a condition allows; None if it is not a list of values. Values that grouping takes for
    equal are returned once."""
    if isinstance(condition, EqualTo):
        return None if condition.value is None else (condition.value,)
    if isinstance(condition, EqualNullSafe):
        return (condition.value,)
    if isinstance(condition, IsNull):
        return (None,)
    if isinstance(condition, In):
        try:
            return tuple(dict.fromkeys(value for value in condition.value if value is not None))
        except TypeError:
            return None
    return None
