"""The processors of users that `benchmarks.profile_tasks` runs: the rows flavour with each kind of state; no Spark job.

The classes are those of `benchmarks.engine` and of NEXMark's q15, so that what is profiled is what is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

from benchmarks.processors import (
    COUNTED_SCHEMA,
    DAY_COLUMNS,
    OUTPUT_SCHEMA,
    STATE_SCHEMA,
    Appends,
    DayStatistics,
    RunningTotals,
    RunningTotalsInPandas,
    Timeouts,
    TotalsByKind,
)
from state_runtime.processors.user.handle import StateDeclaration, TimeMode, layout_of
from state_runtime.processors.user.stateful import StatefulProcessorOperator

__all__ = ["appends", "day_columns", "day_statistics", "in_pandas", "row_totals", "timeouts", "totals_by_kind"]

_KEY: Final = pa.schema([("key", pa.int64())])
_COUNTS: Final = pa.schema([("counts", pa.list_(pa.int64()))])


def row_totals() -> StatefulProcessorOperator:
    """One ValueState."""
    return _operator(RunningTotals(), OUTPUT_SCHEMA, _value(STATE_SCHEMA, "totals"))


def in_pandas() -> StatefulProcessorOperator:
    """The same over frames."""
    return _operator(RunningTotalsInPandas(), OUTPUT_SCHEMA, _value(STATE_SCHEMA, "totals"), pandas=True)


def appends() -> StatefulProcessorOperator:
    """A ListState that only grows."""
    return _operator(Appends(), COUNTED_SCHEMA, {"amounts": ("list", longs("amount long"), None)})


def totals_by_kind() -> StatefulProcessorOperator:
    """A MapState of ten entries a key."""
    states = {"totals": ("map", longs("n long, total long"), longs("kind long"))}
    return _operator(TotalsByKind(), COUNTED_SCHEMA, states)


def timeouts() -> StatefulProcessorOperator:
    """A ValueState and a timer a key."""
    states = _value("n long, total long, due_ms long", "open")
    return _operator(Timeouts(), COUNTED_SCHEMA, states, time_mode="event")


def day_statistics() -> StatefulProcessorOperator:
    """Two MapStates with very many entries of few keys."""
    seen = longs("ranks long"), longs("id long")
    states = {"counts": ("value", _COUNTS, None), "bidders": ("map", *seen), "auctions": ("map", *seen)}
    return _operator(DayStatistics(), ", ".join(f"{name} long" for name in DAY_COLUMNS), states)


def day_columns(random: np.random.Generator, epoch: int, rows: int, ids: int) -> Mapping[str, pa.Array]:
    """Bids of one epoch: half of them of a hundred people; of the others most were seen before.

    The first epoch has every person and auction once.
    """
    columns: dict[str, Any] = {"rank": pa.array(random.integers(1, 4, rows))}
    for name, new in (("bidder", 4_000), ("auction", 4_000)):
        if epoch == 0:
            columns[name] = pa.array(np.arange(rows) % ids)
            continue
        last = ids + epoch * new
        of_few = random.integers(last - 100, last, rows)
        columns[name] = pa.array(np.where(random.random(rows) < 0.5, of_few, random.integers(last - ids, last, rows)))
    return columns


def longs(ddl: str) -> pa.Schema:
    """Columns of longs."""
    return pa.schema([(column.split()[0], pa.int64()) for column in ddl.split(",")])


def _value(ddl: str, name: str) -> dict[str, Any]:
    return {name: ("value", longs(ddl), None)}


def _operator(
    processor: Any, output: str, states: Mapping[str, Any], *, pandas: bool = False, time_mode: TimeMode = "none"
) -> StatefulProcessorOperator:
    schemas = {
        name: layout_of(StateDeclaration(name, kind, ""), _KEY, value, entry)
        for name, (kind, value, entry) in states.items()
    }
    return StatefulProcessorOperator(
        uid="totals",
        key_columns=("key",),
        key_ddl="key long",
        key_schema=_KEY,
        output_schema=longs(output),
        state_schemas=schemas,
        state_ddl=dict.fromkeys(states, ""),
        processor=processor,
        pandas=pandas,
        output_rows_per_batch=65_536,
        state_kinds={name: kind for name, (kind, _, _) in states.items()},
        time_mode=time_mode,
        event_time_column="ts" if time_mode == "event" else "",
    )
