"""Columns under other names, and windows made of their times."""

from __future__ import annotations

import pyarrow as pa

from state_runtime.processors.renamed import Renamed

TIME = pa.timestamp("us", "UTC")


def test_rows_get_the_names_types_and_windows_of_their_schema() -> None:
    window = pa.struct([pa.field("start", TIME), pa.field("end", TIME)])
    schema = pa.schema([("w", window), ("n", pa.int64()), ("again", pa.int64()), ("name", pa.string())])
    batch = pa.RecordBatch.from_pydict(
        {
            "count": pa.array([1, None], pa.int64()),
            "s": pa.array([0, None], pa.timestamp("us", "America/Los_Angeles")),
            "e": pa.array([5, None], TIME),
            "shop": ["a", None],
            "unread": [0, 0],
        }
    )
    made = Renamed((("s", "e"), ("count",), ("count",), ("shop",)), schema).of(batch)
    assert made.schema == schema
    made.validate(full=True)
    times = [
        None if row["w"] is None else [at.timestamp() * 1e6 for at in row["w"].values()] for row in made.to_pylist()
    ]
    assert times == [[0, 5], None]
    assert [(row["n"], row["again"], row["name"]) for row in made.to_pylist()] == [(1, 1, "a"), (None, None, None)]
