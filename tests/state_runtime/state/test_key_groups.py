"""Which shard owns a key: the ranges of hashes, and how shards of two parallelisms lie upon each other."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from state_runtime.base.errors import StillstateError
from state_runtime.base.limits import MAX_PARALLELISM
from state_runtime.state.key_groups import hash_range_of_shard, overlaps, shard_of_hash

PARALLELISMS = st.integers(1, 60) | st.integers(1, MAX_PARALLELISM)


@pytest.mark.parametrize("parallelism", [1, 2, 3, 4, 5, 7, 8, 16, 100, 1000, 32767, 32768])
def test_the_ranges_of_all_shards_are_all_hashes(parallelism: int) -> None:
    """No hash without an owner, none with two, in order."""
    ranges = [hash_range_of_shard(s, parallelism) for s in range(parallelism)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == (1 << 64) - 1
    for (_, end), (begin, _) in itertools.pairwise(ranges):
        assert begin == end + 1


@given(st.integers(0, (1 << 64) - 1), st.integers(1, MAX_PARALLELISM))
@examples(400)
def test_a_hash_lies_in_the_range_of_the_shard_that_spark_sends_it_to(key_hash: int, parallelism: int) -> None:
    """The SQL that partitions the rows says floor(group * P / 32768), and state must be where the rows arrive."""
    shard = (key_hash >> 49) * parallelism // MAX_PARALLELISM
    assert shard_of_hash(key_hash, parallelism) == shard
    low, high = hash_range_of_shard(shard, parallelism)
    assert low <= key_hash <= high


@pytest.mark.parametrize(("shard", "parallelism"), [(-1, 4), (4, 4), (0, 0), (0, 32769)])
def test_a_shard_that_cannot_be_is_an_error_of_ours(shard: int, parallelism: int) -> None:
    """Better loud than an empty range."""
    with pytest.raises(StillstateError, match="invariant broken"):
        hash_range_of_shard(shard, parallelism)


@given(PARALLELISMS, PARALLELISMS, st.data())
@examples(200)
def test_overlaps_are_the_shards_that_share_hashes_with_one(before: int, now: int, data: st.DataObject) -> None:
    """After a rescale a copy serves the shards that own a part of its range, each by the part that it holds."""
    shard = data.draw(st.integers(0, before - 1))
    low, high = hash_range_of_shard(shard, before)
    found = dict(overlaps(shard, before, now))
    expected = {}
    for other in range(shard_of_hash(low, now), shard_of_hash(high, now) + 1):
        other_low, other_high = hash_range_of_shard(other, now)
        common = min(high, other_high) - max(low, other_low) + 1
        expected[other] = common / (other_high - other_low + 1)
    assert found == expected
    assert all(0 < share <= 1 for share in found.values())


@pytest.mark.parametrize(("before", "now"), [(1, 1), (1, 7), (7, 1), (3, 4), (6, 3), (32768, 32767), (32767, 32768)])
def test_all_shards_of_one_parallelism_cover_each_of_another(before: int, now: int) -> None:
    """The shares of a shard add up to the whole of it."""
    covered = [0.0] * now
    for shard in range(before):
        for other, share in overlaps(shard, before, now):
            covered[other] += share
    assert covered == pytest.approx([1.0] * now)
