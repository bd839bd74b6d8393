"""Fixtures of the flights example: the year, a handle without Spark, a session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from pyspark.sql import Row, SparkSession

from examples.flights.data import year_parquet
from examples.flights.planes import PlaneDay

Flights = list[Row]
RunProcessor = Callable[[Iterable[Flights]], list[Row]]


class DictValueState:
    """A value state that keeps its tuples in a dict, one per key of the handle."""

    def __init__(self, handle: DictHandle) -> None:
        self._handle = handle
        self._values: dict[Any, tuple[Any, ...]] = {}

    def exists(self) -> bool:
        """Whether the current key has a value."""
        return self._handle.key in self._values

    def get(self) -> tuple[Any, ...] | None:
        """The current key's value, or None."""
        return self._values.get(self._handle.key)

    def update(self, value: tuple[Any, ...]) -> None:
        """Replace the current key's value."""
        assert type(value) is tuple
        self._values[self._handle.key] = value

    def clear(self) -> None:
        """Forget the current key's value."""
        self._values.pop(self._handle.key, None)


class DictHandle:
    """As much of Spark's ``StatefulProcessorHandle`` as a value state needs."""

    def __init__(self) -> None:
        self.key: Any = None
        self.states: dict[str, DictValueState] = {}

    def getValueState(self, name: str, schema: str, ttlDurationMs: int | None = None) -> DictValueState:
        """Return the state of that name; it outlives the processor, as a store does."""
        return self.states.setdefault(name, DictValueState(self))


@pytest.fixture(scope="session")
def year_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The year's Parquet file."""
    return year_parquet(tmp_path_factory.mktemp("flights"))


@pytest.fixture(scope="session")
def year(year_path: Path) -> pa.Table:
    """The year in event order."""
    return pa.parquet.read_table(year_path)


@pytest.fixture(scope="session")
def as_flights() -> Callable[[pa.Table], Flights]:
    """Turn Arrow rows into the rows that Spark hands to a processor."""

    def convert(table: pa.Table) -> Flights:
        make = Row(*table.column_names)
        return [make(*values) for values in zip(*(column.to_pylist() for column in table.columns), strict=True)]

    return convert


@pytest.fixture(scope="session")
def run_plane_day() -> RunProcessor:
    """Run ``PlaneDay`` over batches as Spark does: a new processor for every batch, the keys one after the other."""

    def run(batches: Iterable[Flights]) -> list[Row]:
        handle, output = DictHandle(), list[Row]()
        for batch in batches:
            keys: Mapping[str | None, Flights] = _grouped(batch)
            processor = PlaneDay()
            processor.init(handle)  # type: ignore[arg-type]  # duck typing is the point
            for tailnum, flights in keys.items():
                handle.key = (tailnum,)
                output.extend(processor.handleInputRows((tailnum,), iter(flights), None))
            processor.close()
        return output

    return run


def _grouped(batch: Flights) -> dict[str | None, Flights]:
    groups: dict[str | None, Flights] = {}
    for flight in batch:
        groups.setdefault(flight.tailnum, []).append(flight)
    return groups


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """A small session."""
    from state_runtime.spark.session import build_session

    session = build_session("tests-examples", master="local[2]", conf={"spark.sql.shuffle.partitions": "2"})
    yield session
    session.stop()
