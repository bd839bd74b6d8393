"""A new position in topics: what a person may say, what is skipped and what comes again."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from state_runtime.base.errors import InvalidConfiguration, MissingSource
from state_runtime.sources.kafka_offsets import Partition, Positions
from state_runtime.sources.kafka_seek import Seek, parse_to, seek

OLD = Positions({("orders", 0): 40, ("orders", 1): 7}, {"orders": "id-1"})


class Topics:
    """Kafka as it answers: two partitions, of which the first has lost its first ten records, and a new third one."""

    def __init__(self, topic_id: str = "id-1") -> None:
        self.ids = {"orders": topic_id}

    def newest(self, topics: Sequence[str]) -> Positions:
        found = {("orders", 0): 100, ("orders", 1): 20, ("orders", 2): 5}
        return Positions(found, self.ids) if "orders" in topics else Positions({})

    def earliest(self, parts: Sequence[Partition]) -> dict[Partition, int]:
        return {part: 10 if part[1] == 0 else 0 for part in parts}

    def at_time(self, parts: Sequence[Partition], time_ms: int) -> dict[Partition, int]:
        assert time_ms == 1_700_000_000_000
        return {("orders", 0): 60, ("orders", 1): -1, ("orders", 2): 0}


def moved(to: str, old: Positions = OLD, topics: Topics | None = None) -> Seek:
    return seek(topics or Topics(), ["orders"], old, parse_to(to), "source 'orders'")


def moves(to: str, old: Positions = OLD, topics: Topics | None = None) -> list[tuple[int | None, int, int, int]]:
    found = moved(to, old, topics).moves
    assert [(move.topic, move.partition) for move in found] == [("orders", number) for number in range(3)]
    return [(move.was, move.will_be, move.skipped, move.again) for move in found]


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        ("earliest", [(40, 10, 0, 30), (7, 0, 0, 7), (None, 0, 0, 0)]),
        ("latest", [(40, 100, 60, 0), (7, 20, 13, 0), (None, 5, 5, 0)]),
        ("2023-11-14T22:13:20Z", [(40, 60, 20, 0), (7, 20, 13, 0), (None, 0, 0, 0)]),
        ("2023-11-14T23:13:20+01:00", [(40, 60, 20, 0), (7, 20, 13, 0), (None, 0, 0, 0)]),
        ('{"orders": {"0": 30}}', [(40, 30, 0, 10), (7, 7, 0, 0), (None, 0, 0, 0)]),
        ('{"orders": {"0": 10, "1": 20}}', [(40, 10, 0, 30), (7, 20, 13, 0), (None, 0, 0, 0)]),
    ],
)
def test_each_way_to_say_where_gives_the_offsets_and_what_they_cost(
    to: str, expected: list[tuple[int | None, int, int, int]]
) -> None:
    """A time behind the last record is the end; a partition that is not named stays where it was."""
    assert moves(to) == expected
    assert moved(to).new.ids == {"orders": "id-1"}


def test_what_kafka_has_removed_is_not_skipped_by_the_move() -> None:
    """It is lost already; only what could be read counts."""
    behind = Positions({("orders", 0): 3, ("orders", 1): 7}, {"orders": "id-1"})
    assert moves("latest", behind)[0] == (3, 100, 90, 0)
    assert moves("earliest", behind)[0] == (3, 10, 0, 0)


def test_offsets_of_a_topic_that_was_made_anew_are_not_compared_with_the_old_ones() -> None:
    """They count from 0 again; the new position has the new topic's id, so that the job goes on."""
    anew = Topics("id-2")
    assert moves("earliest", topics=anew) == [(None, 10, 0, 0), (None, 0, 0, 0), (None, 0, 0, 0)]
    assert moved("latest", topics=anew).new.ids == {"orders": "id-2"}
    with pytest.raises(InvalidConfiguration, match=r"made anew.*each of its partitions \(also 1\)"):
        moved('{"orders": {"0": 30}}', topics=anew)
    assert moves('{"orders": {"0": 30, "1": 2}}', topics=anew) == [(None, 30, 20, 0), (None, 2, 2, 0), (None, 0, 0, 0)]


def test_a_position_of_sparks_own_source_has_no_ids_and_is_of_the_topic_that_is_there() -> None:
    assert moves("earliest", Positions(OLD.next))[1] == (7, 0, 0, 7)


@pytest.mark.parametrize("offset", [9, 101])
def test_an_offset_that_kafka_does_not_have_is_refused_with_those_that_it_has(offset: int) -> None:
    """The run would end with it, after the state had been given the position."""
    with pytest.raises(InvalidConfiguration, match="partition 0 has offsets from 10 to 100"):
        moved(f'{{"orders": {{"0": {offset}}}}}')


def test_partitions_and_topics_that_are_not_there_are_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="no topic 'orders' with a partition 9"):
        moved('{"orders": {"9": 1}}')
    with pytest.raises(MissingSource, match="no topic 'gone'"):
        seek(Topics(), ["gone"], OLD, "latest", "source 'gone'")


@pytest.mark.parametrize(
    "text", ["", "newest", "12", '{"orders": 3}', "{", '{"orders": {"0": -1}}', "2023-99-01T00:00Z"]
)
def test_words_that_are_no_place_are_refused_with_what_may_be_said(text: str) -> None:
    with pytest.raises(InvalidConfiguration, match="a place to go on is earliest, latest, a time"):
        parse_to(text)


def test_a_time_without_a_zone_is_refused() -> None:
    """Two people would mean two moments."""
    with pytest.raises(InvalidConfiguration, match="no time zone: write 2026-11-28T12:00:00Z"):
        parse_to("2026-11-28T12:00:00")
    assert parse_to("2026-11-28T12:00:00Z") == datetime(2026, 11, 28, 12, tzinfo=UTC)
