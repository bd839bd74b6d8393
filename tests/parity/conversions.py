"""Every Python value into every declared type: what a state holds then, in the same call and in the next batch."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

VALUES: dict[str, Any] = {
    "5": 5,
    "2**40": 2**40,
    "2**60 + 1": 2**60 + 1,
    "1": 1,
    "True": True,
    "5.0": 5.0,
    "7.5": 7.5,
    "5.1": 5.1,
    "1e300": 1e300,
    'Decimal("5")': Decimal("5"),
    'Decimal("5.25")': Decimal("5.25"),
    'Decimal("5.259")': Decimal("5.259"),
    'Decimal("-5.255")': Decimal("-5.255"),
    'Decimal("123456789.12")': Decimal("123456789.12"),
    '"a"': "a",
    '"é"': "é",
    '"5"': "5",
    'b"a"': b"a",
    "date(2024, 2, 29)": date(2024, 2, 29),
    "datetime(2024, 2, 29)": datetime(2024, 2, 29),  # noqa: DTZ001  (states hold wall clocks)
    "datetime(2024, 2, 29, 13, 14, 15)": datetime(2024, 2, 29, 13, 14, 15),  # noqa: DTZ001
    "timedelta(days=1, seconds=2)": timedelta(days=1, seconds=2),
}
TYPES = {
    "boolean": "boolean",
    "tinyint": "tinyint",
    "int": "int",
    "bigint": "bigint",
    "float": "float",
    "double": "double",
    "decimal": "decimal(10,2)",
    "string": "string",
    "binary": "binary",
    "date": "date",
    "timestamp": "timestamp",
    "timestamp_ntz": "timestamp_ntz",
}
SAID = "key string, said string, in_call string"


class Conversions(StatefulProcessor):
    """The first row of a key, "value into type", writes and reads; each further one reads."""

    def init(self, handle: Any) -> None:
        self._states = {name: handle.getValueState(name, f"v {ddl}") for name, ddl in TYPES.items()}

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        value, _, kind = key[0].partition(" into ")
        state = self._states[kind]
        writes = any(row.n == 0 for row in rows)
        if not writes:
            yield Row(key=key[0], said=_read(state), in_call=None)
            return
        try:
            state.update((VALUES[value],))
        except Exception as error:
            yield Row(key=key[0], said=f"raised {type(error).__name__}", in_call=None)
            return
        yield Row(key=key[0], said="took it", in_call=_read(state))

    def close(self) -> None:
        pass


class Spans(Conversions):
    """Has a state of a type that Spark's states do not take."""

    def init(self, handle: Any) -> None:
        self._states = {"interval": handle.getValueState("interval", "v interval day to second")}


def _read(state: Any) -> str:
    found = state.get()
    return "no value" if found is None else f"{type(found[0]).__name__} {found[0]!r}"


PAIRS = [f"{value} into {kind}" for value in VALUES for kind in TYPES]
LATE = frozenset(
    [f"{value} into {kind}" for value in ("2**40", "2**60 + 1") for kind in ("tinyint", "int")]
    + [f"1e300 into {kind}" for kind in ("tinyint", "int", "bigint")]
)
"""Beyond the range of a whole number: here the epoch's column is refused, and with it the epoch, not the call."""

FATAL = frozenset(['Decimal("123456789.12") into decimal'])
"""Spark's query ends with it, without saying why: it runs apart."""
