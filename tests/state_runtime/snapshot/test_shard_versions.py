"""Local versions of shards: one value, stored as one text."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from state_runtime.base.errors import StillstateError
from state_runtime.snapshot.shard_versions import NO_VERSION, UNKNOWN_VERSIONS, ShardVersions

IDS = st.lists(st.integers(0, (1 << 64) - 1).map(lambda n: f"{n:016x}") | st.just(NO_VERSION), max_size=40)


@examples(60)
@given(IDS)
def test_what_a_manifest_stores_reads_back_as_the_same_versions(ids: list[str]) -> None:
    """The stored form is that of every manifest so far: the ids joined, in the order of the shards."""
    versions = ShardVersions.of(ids)
    assert versions.encode() == "".join(ids)
    assert ShardVersions.decode(versions.encode(), len(ids)) == versions
    assert list(versions) == ids == [versions[shard] for shard in range(len(versions))]


@pytest.mark.parametrize("stored", ["", "a" * 16, "a" * 31, "a" * 33, "a" * 48])
def test_a_text_of_another_length_is_no_hint(stored: str) -> None:
    """Another parallelism, or damage: then every shard is restored, and none of them wrongly."""
    assert ShardVersions.decode(stored, 2) == ShardVersions.none(2)


def test_other_versions_of_some_shards_make_a_new_value() -> None:
    before = ShardVersions.none(3)
    after = before.with_shards({1: "a" * 16})
    assert list(after) == [NO_VERSION, "a" * 16, NO_VERSION]
    assert before == ShardVersions.none(3)


def test_an_id_of_another_length_would_shift_all_others_and_is_refused() -> None:
    with pytest.raises(StillstateError, match="has 16 characters"):
        ShardVersions.of(["a" * 16, "b" * 15])


@pytest.mark.parametrize("shard", [-1, 3])
def test_a_shard_that_is_not_there_has_no_version(shard: int) -> None:
    """A negative number must not count from the end."""
    with pytest.raises(IndexError):
        ShardVersions.none(3)[shard]


def test_nothing_is_known_where_nothing_was_said() -> None:
    assert not UNKNOWN_VERSIONS
    assert ShardVersions.none(1)


def test_a_task_is_sent_little_more_than_the_ids() -> None:
    """They are pickled into the function of every stage of every epoch."""
    versions = ShardVersions.of(f"{n:016x}" for n in range(1000))
    assert len(pickle.dumps(versions)) < 16 * 1000 + 200
