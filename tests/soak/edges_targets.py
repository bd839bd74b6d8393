"""The targets that `make soak-edges` writes to: how a driver makes the sink, which steps it has, what readers see."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import NoSuchTableError

from state_runtime.base.faults import (
    DELTA_KILL_POINTS,
    ICEBERG_KILL_POINTS,
    KAFKA_KILL_POINTS,
    KAFKA_START_KILL_POINTS,
    SQL_KILL_POINTS,
)
from state_runtime.pipeline.sinks import Sink
from state_runtime.sinks.delta import DeltaSink
from state_runtime.sinks.iceberg import IcebergSink
from state_runtime.sinks.kafka import KafkaSink
from state_runtime.sinks.sql import SqlSink
from tests.kafka_topics import messages
from tests.soak.edges_record import Row, appended, merged

__all__ = ["DRIVER_POINTS", "TARGETS", "Place", "Target"]

DRIVER_POINTS: Final = (
    "driver-fenced-others",
    "driver-owns",
    "driver-recovered",
    "driver-staged",
    "driver-named",
    "driver-published",
    "driver-settled",
)
"""Steps of a driver that are no step of a sink: its first manifest is written; the place is its own; what was named is
published; rows of an epoch are staged; a manifest names them; they are published; those of the epoch before are settled."""
_MERGE_ON: Final = ("k",)
_PARTITIONS: Final = 2


@dataclass(frozen=True)
class Place:
    """Where a life's target is, for any process.

    Attributes:
        folder: of the life.
        life: its name, from which its rows follow.
        name: the table's, the topic's.
        job_uid: of the life's root. Writers of one database, or one broker, are told apart by it.
        server: address of the target's server.
    """

    folder: str
    life: str
    name: str
    job_uid: str
    server: str = ""

    @property
    def table(self) -> str:
        return f"t_{self.name.replace('-', '_')}"


@dataclass(frozen=True)
class Target:
    """One kind of sink.

    Attributes:
        points: its own steps while it publishes or starts.
        make: the sink, as a driver that has just started makes it.
        read: what readers see.
        wanted: the rows that it must have.
        server: whose death it must outlive.
        keeps_order: readers see the rows in the order of `wanted`, key by key.
        locks: while a driver sleeps at these points, the next one waits for it.
    """

    name: str
    points: Sequence[str]
    make: Callable[[Place], Sink]
    read: Callable[[Place], list[Row]]
    wanted: Callable[[str, Sequence[tuple[int, int]]], list[Row]]
    server: str = ""
    keeps_order: bool = False
    locks: Sequence[str] = ()


def _iceberg_options(place: Place) -> dict[str, str]:
    return {
        "type": "sql",
        "uri": f"sqlite:///{place.folder}/catalog.db",
        "warehouse": f"file://{place.folder}/warehouse",
    }


def _delta(merges: bool) -> Callable[[Place], Sink]:
    more: dict[str, Any] = {"merge_on": _MERGE_ON, "remove_where": "gone"} if merges else {}
    return lambda place: DeltaSink(f"{place.folder}/table", **more)


def _iceberg(merges: bool) -> Callable[[Place], Sink]:
    more: dict[str, Any] = {"merge_on": _MERGE_ON, "remove_where": "gone"} if merges else {}
    return lambda place: IcebergSink("soak.table", catalog="lake", catalog_options=_iceberg_options(place), **more)


def _sql(merges: bool) -> Callable[[Place], Sink]:
    more: dict[str, Any] = {"merge_on": _MERGE_ON, "remove_where": "gone"} if merges else {}
    return lambda place: SqlSink(place.table, dsn=place.server, **more)


def _kafka(place: Place) -> Sink:
    create = {"partitions": _PARTITIONS, "replication": 1}
    return KafkaSink(place.name, bootstrap_servers=place.server, key="k", create=create, options={"log_level": 0})


def _of_dicts(rows: list[dict[str, Any]]) -> list[Row]:
    names = [name for name in ("k", "epoch", "term", "place", "gone") if rows and name in rows[0]]
    return [tuple(row[name] for name in names) for row in rows]


def _delta_rows(place: Place) -> list[Row]:
    table = f"{place.folder}/table"
    if not DeltaTable.is_deltatable(table):
        return []
    return _of_dicts(DeltaTable(table).to_pyarrow_table().to_pylist())


def _iceberg_rows(place: Place) -> list[Row]:
    try:
        table = load_catalog("lake", **_iceberg_options(place)).load_table("soak.table")
    except NoSuchTableError:
        return []
    return _of_dicts(table.scan().to_arrow().to_pylist())


def _sql_rows(place: Place) -> list[Row]:
    import psycopg

    with psycopg.connect(place.server, autocommit=True, row_factory=psycopg.rows.dict_row) as connection:
        there = connection.execute("SELECT to_regclass(%s) AS t", [place.table]).fetchone()
        if there is None or there["t"] is None:
            return []
        return _of_dicts(connection.execute(f"SELECT * FROM {place.table}".encode()).fetchall())


def _kafka_rows(place: Place) -> list[Row]:
    return [tuple(json.loads(m.value()).values()) for m in messages(place.server, place.name)]  # type: ignore[arg-type]


_OF_DELTA: Final = ("one-file-published", *DELTA_KILL_POINTS)
_OF_DELTA_MERGES: Final = tuple(point for point in DELTA_KILL_POINTS if point != "delta-moved")
_OF_SQL: Final = tuple(SQL_KILL_POINTS)
_LOCKS: Final = ("sql-locked", "sql-written")
TARGETS: Final = (
    Target("delta", _OF_DELTA, _delta(False), _delta_rows, appended),
    Target("iceberg", ICEBERG_KILL_POINTS, _iceberg(False), _iceberg_rows, appended),
    Target("kafka", (*KAFKA_START_KILL_POINTS, *KAFKA_KILL_POINTS), _kafka, _kafka_rows, appended, "broker", True),
    Target("postgres", _OF_SQL, _sql(False), _sql_rows, appended, "database", locks=_LOCKS),
    Target("delta, merged", _OF_DELTA_MERGES, _delta(True), _delta_rows, merged),
    Target("iceberg, merged", ICEBERG_KILL_POINTS, _iceberg(True), _iceberg_rows, merged),
    Target("postgres, merged", _OF_SQL, _sql(True), _sql_rows, merged, "database", locks=_LOCKS),
)
