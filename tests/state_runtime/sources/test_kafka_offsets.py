"""Positions in topics of Kafka: their form, how far a batch goes, what was lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from state_runtime.base.errors import CorruptData, MissingSource
from state_runtime.sources.kafka_offsets import (
    Positions,
    Range,
    behind_lost,
    check_not_gone,
    check_same_topics,
    go_on,
    limited,
    positions_in,
    ranges,
)

PARTS = st.tuples(st.sampled_from(["orders", "version", "topics"]), st.integers(0, 20))
OFFSETS = st.dictionaries(PARTS, st.integers(0, 1 << 62), max_size=12)


@given(OFFSETS, st.booleans())
def test_a_position_is_read_as_it_was_written_whatever_its_topics_are_called(
    offsets: dict[Any, int], with_ids: bool
) -> None:
    ids = {topic: f"id-of-{topic}" for topic, _ in offsets} if with_ids else {}
    positions = Positions(offsets, ids)
    assert Positions.from_json(json.loads(json.dumps(positions.to_json()))) == positions


@given(st.dictionaries(PARTS, st.integers(0, 1 << 62), min_size=1))
def test_the_form_of_sparks_own_source_is_read_without_ids(offsets: dict[Any, int]) -> None:
    document: dict[str, Any] = {}
    for (topic, number), offset in offsets.items():
        document.setdefault(topic, {})[str(number)] = offset
    assert Positions.from_json(document) == Positions(offsets)


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        "x",
        {"version": 2, "topics": {}},
        {"version": 1},
        {"version": 1, "topics": {"a": {"next": {"0": 1}}}},
        {"version": 1, "topics": {"a": {"id": "x", "next": {"0": -1}}}},
        {"version": 1, "topics": {"a": {"id": "x", "next": {"-1": 1}}}},
        {"version": 1, "topics": {"a": {"id": "x", "next": {"0": True}}}},
        {"version": 1, "topics": {"a": {"id": "x", "next": {"²": 1}}}},
        {"version": 1, "topics": {"a": {"id": "x", "next": None}}},
        {"logOffset": 3},
        {"a": {"0": "1"}},
    ],
)
def test_what_is_no_position_is_refused(document: Any) -> None:
    with pytest.raises(CorruptData, match="none of Kafka's"):
        Positions.from_json(document)


@given(OFFSETS, OFFSETS, st.integers(1, 1000))
def test_a_batch_with_a_limit_goes_forward_and_never_beyond_what_there_is(
    begun: dict[Any, int], newest: dict[Any, int], rows_max: int
) -> None:
    start = Positions(begun)
    end = go_on(start, Positions(newest))
    cut = limited(start, end, rows_max)
    assert set(cut.next) == set(begun) | set(newest)
    for part, offset in cut.next.items():
        assert start.next.get(part, 0) <= offset <= end.next[part]
    taken, waiting = (sum(part.end - part.start for part in ranges(start, to)) for to in (cut, end))
    assert min(waiting, 1) <= taken <= rows_max + len(newest), "it goes on, and by no more than one a partition too far"


def test_each_partition_gives_in_proportion_to_what_waits_and_the_smallest_at_least_one() -> None:
    start, end = Positions({("a", 0): 100, ("a", 1): 0}), Positions({("a", 0): 1000, ("a", 1): 99, ("a", 2): 1})
    assert limited(start, end, 100).next == {("a", 0): 190, ("a", 1): 9, ("a", 2): 1}


def test_what_kafka_does_not_list_now_stays_where_it_was() -> None:
    start = Positions({("a", 0): 5, ("a", 1): 7}, {"a": "1"})
    assert go_on(start, Positions({("a", 0): 3}, {"a": "1"})) == start


def test_a_partition_that_is_new_is_read_from_its_first_record() -> None:
    assert ranges(Positions({("a", 0): 5}), Positions({("a", 0): 5, ("a", 1): 2})) == [Range("a", 1, 0, 2)]


def test_a_topic_that_was_made_again_is_not_taken_for_the_old_one() -> None:
    read = Positions({("a", 0): 5}, {"a": "old"})
    check_same_topics(read, {"a": "old", "b": "new"})
    check_same_topics(Positions({("a", 0): 5}), {"a": "new"})  # Spark's form knows no ids
    with pytest.raises(MissingSource, match="deleted and made again"):
        check_same_topics(read, {"a": "new"})
    with pytest.raises(MissingSource, match="does not have topic 'a' any more"):
        check_same_topics(read, {})


def test_lost_records_are_counted_and_named_with_what_is_wanted_and_what_there_is() -> None:
    parts = [Range("a", 0, 5, 20), Range("a", 1, 0, 4), Range("a", 2, 7, 9)]
    earliest = {("a", 0): 10, ("a", 1): 0, ("a", 2): 100}
    with pytest.raises(
        MissingSource, match=r"removed 7 records .*partition 0: wanted from offset 5 on, available .* 10"
    ):
        check_not_gone(parts, earliest)
    assert behind_lost(parts, earliest) == [Range("a", 0, 10, 20), Range("a", 1, 0, 4)]
    check_not_gone([parts[1]], earliest)


def test_positions_are_found_among_those_of_other_sources() -> None:
    position = Positions({("a", 0): 4}, {"a": "id"})
    as_text = json.dumps(position.to_json())
    assert positions_in(['{"logOffset": 3}', "-", "17", "nonsense", "v1", "", as_text]) == [position]
