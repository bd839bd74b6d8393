"""Events of an online auction after NEXMark (Tucker, Tufte, Papadimos, Maier: "NEXMark – A Benchmark for Queries over Data
Streams", 2002; columns as in the generator of Apache Beam and nexmark-flink), one Parquet file a batch. Pure apart from
:func:`write_events`.

Of fifty events one is a person, three are auctions and 46 are bids; a batch is ten seconds of event time. Half of the bids go to
the newest `HOT` auctions, the other half to any of the newest `RECENT`; bidders likewise.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["BATCH_S", "FIRST_S", "SCHEMA", "write_events"]

PERSON = "id: bigint, name: string, email: string, city: string, state: string, date_time: timestamp, extra: string"
AUCTION = (
    "id: bigint, item_name: string, description: string, initial_bid: bigint, reserve: bigint, date_time: timestamp, "
    "expires: timestamp, seller: bigint, category: bigint, extra: string"
)
BID = (
    "auction: bigint, bidder: bigint, price: bigint, channel: string, url: string, date_time: timestamp, extra: string"
)
SCHEMA = f"event_type int, person struct<{PERSON}>, auction struct<{AUCTION}>, bid struct<{BID}>"

SEED = 20020601
BATCH_S = 10
FIRST_S = 1_700_000_000
HOT = 2_000
RECENT = 20_000
HOT_PEOPLE = 5_000
PEOPLE = 50_000
_MICROS = pa.timestamp("us", "UTC")
_TEXTS = 4_096
"""How many different fillers there are; no query looks into them."""


def write_events(folder: Path, batches: int, rows: int, then: Sequence[int] = ()) -> list[Path]:
    """Write the events, `rows` a file, and return the files in order. The same seed gives the same rows everywhere.

    Args:
        then: numbers of further batches, later ones, of fewer rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(SEED)
    texts = _texts(random)
    files: list[Path] = []
    for index in (*range(batches), *then):
        path = folder / f"{index:05d}.parquet"
        table = _batch(random, texts, index, rows if index < batches else 50)
        pq.write_table(table, path, row_group_size=(rows + 1) // 2)
        os.utime(path, (FIRST_S + index, FIRST_S + index))
        files.append(path)
    return files


def _batch(random: np.random.Generator, texts: pa.Array, index: int, rows: int) -> pa.Table:
    number = np.arange(index * rows, (index + 1) * rows)
    place = number % 50
    kind = np.where(place == 0, 0, np.where(place < 4, 1, 2)).astype(np.int32)
    micros = (FIRST_S + index * BATCH_S) * 1_000_000 + np.sort(random.integers(0, BATCH_S * 1_000_000, rows))
    people = PEOPLE + number // 50  # of the newest person
    auctions = RECENT + number // 50 * 3 + np.clip(place - 1, 0, 2)  # of the newest auction
    times = pa.array(micros, _MICROS)
    extra = _some(random, texts, rows)
    return pa.table(
        {
            "event_type": kind,
            "person": _only(kind == 0, _person(random, people, times, extra)),
            "auction": _only(kind == 1, _auction(random, auctions, people, times, extra)),
            "bid": _only(kind == 2, _bid(random, auctions, people, times, extra)),
        }
    )


def _person(random: np.random.Generator, newest: np.ndarray, times: pa.Array, extra: pa.Array) -> dict[str, pa.Array]:
    rows = len(newest)
    first, last = ["Peter", "Paul", "Luke", "Kate", "Julie", "Sarah"], ["Shultz", "Abrams", "White", "Noris"]
    names = [f"{a} {b}" for a in first for b in last]
    cities, states = ["Phoenix", "Palo Alto", "Bend", "Boise", "Seattle"], ["AZ", "CA", "ID", "OR", "WA", "WY"]
    return {
        "id": pa.array(newest),
        "name": _some(random, pa.array(names), rows),
        "email": _some(random, pa.array([f"{name.replace(' ', '.').lower()}@example.com" for name in names]), rows),
        "city": _some(random, pa.array(cities), rows),
        "state": _some(random, pa.array(states), rows),
        "date_time": times,
        "extra": extra,
    }


def _auction(
    random: np.random.Generator, newest: np.ndarray, people: np.ndarray, times: pa.Array, extra: pa.Array
) -> dict[str, pa.Array]:
    rows = len(newest)
    bid = random.integers(100, 10_000, rows)
    expires = times.cast(pa.int64()).to_numpy() + random.integers(5, 30, rows) * 1_000_000
    return {
        "id": pa.array(newest),
        "item_name": _some(random, pa.array([f"item {n}" for n in range(500)]), rows),
        "description": extra,
        "initial_bid": pa.array(bid),
        "reserve": pa.array(bid + random.integers(0, 1_000, rows)),
        "date_time": times,
        "expires": pa.array(expires, _MICROS),
        "seller": pa.array(_chosen(random, people, HOT_PEOPLE, PEOPLE)),
        "category": pa.array(10 + random.integers(0, 5, rows)),
        "extra": extra,
    }


def _bid(
    random: np.random.Generator, auctions: np.ndarray, people: np.ndarray, times: pa.Array, extra: pa.Array
) -> dict[str, pa.Array]:
    rows = len(auctions)
    channels = ["Google", "Facebook", "Baidu", "Apple", *(f"channel-{n}" for n in range(10_000))]
    urls = [
        f"https://www.nexmark.com/{n}/{n * 7 % 91}/{n * 3 % 57}/item.htm?query=1&channel_id={n}" for n in range(9_999)
    ]
    which = np.where(random.random(rows) < 0.5, random.integers(0, 4, rows), random.integers(4, len(channels), rows))
    return {
        "auction": pa.array(_chosen(random, auctions, HOT, RECENT)),
        "bidder": pa.array(_chosen(random, people, HOT_PEOPLE, PEOPLE)),
        "price": pa.array(np.round(10 ** (random.random(rows) * 6) * 100).astype(np.int64)),
        "channel": pa.array(channels).take(pa.array(which)),
        "url": _some(random, pa.array(urls), rows),
        "date_time": times,
        "extra": extra,
    }


def _chosen(random: np.random.Generator, newest: np.ndarray, hot: int, recent: int) -> np.ndarray:
    """Ids up to the newest: half of them among the `hot` last ones."""
    back = np.where(
        random.random(len(newest)) < 0.5, random.integers(0, hot, len(newest)), random.integers(0, recent, len(newest))
    )
    return newest - back


def _only(where: np.ndarray, columns: dict[str, pa.Array]) -> pa.Array:
    """A struct that is null elsewhere."""
    fields = [pa.field(name, column.type) for name, column in columns.items()]
    return pa.StructArray.from_arrays(list(columns.values()), fields=fields, mask=pa.array(~where))


def _some(random: np.random.Generator, values: pa.Array, rows: int) -> pa.Array:
    return values.take(pa.array(random.integers(0, len(values), rows)))


def _texts(random: np.random.Generator) -> pa.Array:
    letters = random.integers(97, 123, (_TEXTS, 60), dtype=np.uint8)
    sizes = random.integers(20, 60, _TEXTS)
    texts: Sequence[str] = [row[: int(size)].tobytes().decode() for row, size in zip(letters, sizes)]
    return pa.array(texts)
