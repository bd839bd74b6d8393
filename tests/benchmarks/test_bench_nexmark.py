"""NEXMark: the events are what they are said to be. That the answers are right: tests/spark/test_nexmark.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks import nexmark_data
from benchmarks.nexmark import WORKLOADS
from benchmarks.nexmark_queries import QUERIES


def test_the_same_seed_gives_the_same_events(tmp_path: Path) -> None:
    one, other = (nexmark_data.write_events(tmp_path / name, 2, 500, then=(9,)) for name in ("one", "other"))
    assert [path.name for path in one] == ["00000.parquet", "00001.parquet", "00009.parquet"]
    for a, b in zip(one, other, strict=True):
        assert pq.read_table(a).equals(pq.read_table(b))


def test_of_fifty_events_one_is_a_person_three_are_auctions_and_the_rest_bids(tmp_path: Path) -> None:
    """Each has its own columns only; ids are new ones, bids go to auctions that are there, and time goes on."""
    table = pq.read_table(nexmark_data.write_events(tmp_path, 1, 5_000)[0])
    kind = table["event_type"].to_numpy()
    assert np.bincount(kind).tolist() == [100, 300, 4_600]
    for number, name in enumerate(("person", "auction", "bid")):
        assert np.array_equal(table[name].is_valid().to_numpy(), kind == number)
    opened = (
        table["auction"].combine_chunks().filter(table["auction"].is_valid().combine_chunks()).field("id").to_numpy()
    )
    assert np.array_equal(opened, nexmark_data.RECENT + np.arange(300))
    bids = table["bid"].combine_chunks().filter(table["bid"].is_valid().combine_chunks())
    assert bids.field("auction").to_numpy().min() >= 0
    assert bids.field("auction").to_numpy().max() <= opened.max()
    times = bids.field("date_time").cast("int64").to_numpy()
    assert np.all(np.diff(times) >= 0)
    assert times.max() - times.min() < nexmark_data.BATCH_S * 1_000_000


def test_every_query_is_measured_and_has_an_aim() -> None:
    assert [workload.key for workload in WORKLOADS] == list(QUERIES)
    assert {str(workload.target) for workload in WORKLOADS} == {">= 1", ">= 2", ">= 3", ">= 8"}
