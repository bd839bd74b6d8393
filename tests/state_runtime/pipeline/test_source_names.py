"""Positions belong to names: whatever pipelines a job has one after the other, each source reads on where it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from state_runtime.base.errors import InvalidPipeline
from state_runtime.pipeline.source_names import PLAIN, SourceName, SourceNumbers, source_numbers
from state_runtime.pipeline.source_position import SparkCheckpoint
from state_runtime.snapshot.manifest import SourceFile, SourcePosition

HEADER = ["v1", '{"batchWatermarkMs":0,"batchTimestampMs":7,"conf":{}}']
NAMES = st.sampled_from(["", "a", "b", "c", "d"])
PIPELINES = st.lists(st.lists(NAMES, min_size=1, max_size=4, unique=True), min_size=1, max_size=6)
STREAMS = st.fixed_dictionaries({name: st.integers(1, 2) for name in ("", "a", "b", "c", "d")})


def offsets(*lines: str) -> str:
    return "\n".join([*HEADER, *lines])


def position(*lines: str, names: tuple[str, ...] = (), batch_id: int = 0) -> SourcePosition:
    return SourcePosition(batch_id, "meta", offsets(*lines), "", "v1\n{}", names=names)


def numbers(*names: str, before: SourcePosition | None, dropped: bool = False) -> SourceNumbers:
    return source_numbers([SourceName(name) for name in names], before, allow_dropped=dropped)


@given(PIPELINES, STREAMS)
@examples(300)
def test_each_source_reads_on_where_it_was(pipelines: list[list[str]], streams: dict[str, int]) -> None:
    """Also one that was away meanwhile; of a name that is new nothing was read."""
    read: dict[tuple[str, int], int] = {}
    known: dict[tuple[str, int], int] = {}
    before: SourcePosition | None = None
    for batch, names in enumerate(pipelines):
        found = source_numbers([SourceName(name, streams[name]) for name in names], before, allow_dropped=True)
        places = [(name, stream) for name in names for stream in range(streams[name])]
        if before is not None:
            sees = found.by_place(before.offsets).split("\n")[2:]
            if found is not PLAIN:
                assert sees == [str(read[place]) if place in read else "-" for place in places]
        for at, place in enumerate(places):
            number = found.number(at)
            assert found.place(number) == at
            if found is not PLAIN:
                assert known.setdefault(place, number) == number, "a number is for life"
            read[place] = batch * 100 + at
        text = found.by_number(offsets(*(str(read[place]) for place in places)))
        if found is PLAIN:
            read = {place: read[place] for place in places}
            known = {place: at for at, place in enumerate(places)}
        before = SourcePosition(batch, "meta", text, "", "", names=found.names)


def test_a_job_whose_sources_have_no_names_has_sparks_own_numbers() -> None:
    """Its snapshots are what they were, and Spark says itself if the number of sources has changed."""
    assert source_numbers([SourceName("", 2)], position("1", "2", "3")) is PLAIN
    assert source_numbers([SourceName("")], None) is PLAIN
    assert source_numbers([SourceName(""), SourceName("join.right")], position("1", "2")) is PLAIN
    assert source_numbers([SourceName("", 0), SourceName("join.right")], position("1", "2", "3")) is PLAIN
    other_version = SourcePosition(0, "meta", "v2\n{}\nticks:1", "", "v1\n{}")
    assert source_numbers([SourceName("")], other_version) is PLAIN
    assert PLAIN.by_place("v2\nanything") == PLAIN.by_number("v2\nanything") == "v2\nanything"


def test_a_source_that_is_missing_is_refused_with_what_is_new() -> None:
    """A name that is only written differently would read everything again."""
    before = position("1", "2", names=("orders", "refunds"))
    with pytest.raises(InvalidPipeline, match=r"position of source 'refunds'.*source 'refund' is new.*was='refunds'"):
        numbers("orders", "refund", before=before)
    with pytest.raises(InvalidPipeline, match=r"position of source 'refunds'.*--allow-dropped-state"):
        numbers("orders", before=before)
    with pytest.raises(InvalidPipeline, match=r"position of the source without a name.*was=''"):
        numbers("orders", before=position("1"))
    assert numbers("orders", before=before, dropped=True).names == ("orders", "refunds")


def test_the_sides_of_a_join_keep_their_positions_when_other_sources_come() -> None:
    """Nobody has named them; their snapshots have them in the order in which Spark read them."""
    sides = [SourceName("", 2), SourceName("join.right")]
    found = source_numbers([SourceName("new"), *sides], position("1", "2", "3"))
    assert (found.names, found.numbers) == (("", "", "join.right", "new"), (3, 0, 1, 2))
    again = source_numbers(sides[:1], position("1", "2", "3", names=("", "", "join.right")), allow_dropped=True)
    assert again.numbers == (0, 1)
    grown = source_numbers([SourceName(""), SourceName("join.right")], position("1"))
    assert grown.by_place(position("1").offsets) == offsets("1", "-")


def test_a_source_that_was_left_out_once_is_not_asked_for_again() -> None:
    """A supervisor starts the run again without the words that its user said once; also if nothing was read since."""
    before = position("1", "2", names=("orders", "refunds"))
    found = numbers("orders", before=before, dropped=True)
    read = replace(before, offsets=found.by_number(offsets("7")), away=found.away)
    for left in (found.restated(before), read):
        assert left is not None
        again = numbers("orders", before=left)
        assert (again.away, again.by_number(offsets("8"))) == ((1,), offsets("8", "2"))
        with pytest.raises(InvalidPipeline, match="position of source 'orders'"):
            numbers("refunds", before=left)
        back = numbers("orders", "refunds", before=left)
        assert (back.away, back.restated(left)) == ((), replace(left, away=()))
    unnamed = numbers("orders", before=position("1"), dropped=True).restated(position("1"))
    assert unnamed == replace(position("1", names=("",)), away=(0,))


def test_another_name_is_said_and_keeps_the_number() -> None:
    found = source_numbers([SourceName("new"), SourceName("orders", was="")], position("7"))
    assert (found.names, found.numbers) == (("orders", "new"), (1, 0))
    assert found.by_place(position("7").offsets) == offsets("-", "7")


def test_a_source_that_is_made_of_another_number_of_streams_is_refused() -> None:
    with pytest.raises(InvalidPipeline, match="made of 2 streams of Spark, and of 1 in the snapshot"):
        source_numbers([SourceName("a", 2)], position("1", names=("a",)))


def test_offsets_of_another_version_or_number_are_no_guess() -> None:
    found = numbers("a", "b", before=None)
    with pytest.raises(InvalidPipeline, match=r"offsets in version 'v2'.*readStream\.name"):
        found.by_number("v2\n{}\n1\n2")
    with pytest.raises(InvalidPipeline, match="Spark reads 3 sources, and the pipeline has 2"):
        found.by_number(offsets("1", "2", "3"))


def written(folder: Path, batch_id: int, *lines: str) -> None:
    for name in ("offsets", "commits"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "metadata").write_text("meta")
    (folder / "offsets" / str(batch_id)).write_text(offsets(*lines))
    (folder / "commits" / str(batch_id)).write_text("v1\n{}")


def test_files_and_logs_of_a_source_go_with_its_name(tmp_path: Path) -> None:
    """A log of files seen is stored under the number, and lies in Spark's folder of the place."""
    first = SparkCheckpoint(tmp_path / "1", numbers=numbers("files", "ticks", before=None))
    written(first.folder, 0, '{"logOffset":0}', "5")
    for place, name, text in ((0, "0", 'v1\n{"path":"x","timestamp":1,"batchId":0}'), (1, "0", "begun")):
        (first.folder / "sources" / str(place)).mkdir(parents=True)
        (first.folder / "sources" / str(place) / name).write_text(text)
    before = first.position(0)
    assert (before.names, before.logs, [f.path for f in before.files]) == (("files", "ticks"), (0,), ["1/0"])
    assert first.new_log_lines(None, before) == {0: ['{"path":"x","timestamp":1,"batchId":0}']}

    second = SparkCheckpoint(tmp_path / "2", numbers=numbers("more", "ticks", "files", before=before))
    second.prime(before, {0: ['{"path":"x","timestamp":1,"batchId":0}']})
    assert (second.folder / "offsets" / "0").read_text() == offsets("-", "5", '{"logOffset":0}')
    assert (second.folder / "sources" / "1" / "0").read_text() == "begun"
    assert "batchId" in (second.folder / "sources" / "2" / "0").read_text()
    assert not (second.folder / "sources" / "0").exists()
    written(second.folder, 1, "3", "6", '{"logOffset":0}')
    after = second.position(1)
    assert after.offsets == offsets('{"logOffset":0}', "6", "3")
    assert second.new_log_lines(before, after) == {}

    third = SparkCheckpoint(tmp_path / "3", numbers=numbers("more", before=after, dropped=True))
    third.prime(after, {0: []})
    assert not (third.folder / "sources").exists()
    written(third.folder, 2, "4")
    away = third.position(2)
    assert away.offsets == offsets('{"logOffset":0}', "6", "4")
    assert (away.logs, away.files) == (after.logs, after.files), "they wait for the source to come back"
    assert third.new_log_lines(after, away) == {}


def test_the_line_of_a_file_is_not_taken_for_that_of_another_source() -> None:
    gone = numbers(
        "b", before=replace(position("1", "2", names=("a", "b")), files=(SourceFile("0/x", ""),)), dropped=True
    )
    assert [file.path for file in gone.absent_files] == ["0/x"]
    assert (gone.is_read(0), gone.is_read(1)) == (False, True)
