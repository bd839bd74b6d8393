"""The SQL that sends rows to shards and the Python that looks for their state say the same of every key."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from state_runtime.base.limits import MAX_PARALLELISM
from state_runtime.pipeline.compile import runtime_columns
from state_runtime.spark.columns import HASH_COLUMN
from state_runtime.state.key_groups import (
    first_hash_sql,
    hash_range_of_shard,
    shard_of_hash,
    shard_sql,
    shards_of_hashes,
    top_bits_sql,
)
from state_runtime.state.keyhash import hash_rows

pytestmark = pytest.mark.spark

PARALLELISMS = (1, 2, 3, 5, 7, 8, 100, 1000, 16_384, 32_767, MAX_PARALLELISM)


def hashes_to_try() -> list[int]:
    """Unsigned: the extremes, both sides of borders of shards and of the sign, and many in between."""
    borders = [hash_range_of_shard(s, p)[0] for p in PARALLELISMS for s in {0, 1 % p, p // 2, p - 1}]
    ends = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, *borders, *(b - 1 for b in borders if b)]
    drawn = np.random.default_rng(15).integers(0, 1 << 64, 2000, dtype=np.uint64, endpoint=False)
    return sorted({*ends, *(int(h) for h in drawn)})


def test_sql_and_python_send_every_hash_to_the_same_shard(spark: SparkSession) -> None:
    """If they differed for one hash, its rows would arrive at a shard that has none of its state."""
    hashes = hashes_to_try()
    signed = np.array(hashes, dtype=np.uint64).view(np.int64).tolist()
    frame = spark.createDataFrame([(h,) for h in signed], "h bigint")
    columns = [f"{shard_sql('h', p)} AS p{p}" for p in PARALLELISMS]
    rows = frame.selectExpr("h", f"{top_bits_sql('h', 4)} AS cell", *columns).collect()
    found = {row.h & ((1 << 64) - 1): row for row in rows}
    assert sorted(found) == hashes
    for key_hash, row in found.items():
        assert [row[f"p{p}"] for p in PARALLELISMS] == [shard_of_hash(key_hash, p) for p in PARALLELISMS], key_hash
        assert row.cell == key_hash >> 60
    for parallelism in PARALLELISMS:
        many = shards_of_hashes(np.array(hashes, dtype=np.uint64), parallelism)
        assert many.tolist() == [shard_of_hash(h, parallelism) for h in hashes]


def test_the_columns_of_an_epoch_hold_the_hash_and_the_shard_that_python_finds(spark: SparkSession) -> None:
    """From the key columns on, as a job runs it; a name with a backtick is a name like others."""
    texts, numbers = [None if n % 7 == 0 else f"k{n}" for n in range(200)], list(range(-100, 100))
    frame = spark.createDataFrame(list(zip(texts, numbers, strict=True)), "`a``b` string, n int")
    hashes = hash_rows([pa.array(texts, pa.string()), pa.array(numbers, pa.int32())])
    expected = {n: (int(h), shard_of_hash(int(h), 13)) for n, h in zip(numbers, hashes, strict=True)}
    rows = (
        frame.selectExpr("n", *runtime_columns(("a`b", "n")))
        .selectExpr("*", f"{shard_sql(HASH_COLUMN, 13)} AS shard")
        .collect()
    )
    assert {row.n: (row[HASH_COLUMN] & ((1 << 64) - 1), row.shard) for row in rows} == expected


def test_a_row_that_wakes_a_shard_has_the_first_hash_that_the_shard_owns(spark: SparkSession) -> None:
    """It goes where its hash says, as all rows do; another shard's hash would wake that one."""
    for parallelism in PARALLELISMS:
        frame = spark.range(0, parallelism).selectExpr("id", f"{first_hash_sql('id', parallelism)} AS h")
        found = {row.id: row.h & ((1 << 64) - 1) for row in frame.collect()}
        assert found == {s: hash_range_of_shard(s, parallelism)[0] for s in range(parallelism)}
