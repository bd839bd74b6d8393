"""The source position: out of Spark's checkpoint directory and back into a fresh one, on plain files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from state_runtime.base import limits
from state_runtime.base.errors import CorruptData, CorruptManifest, InvalidData, ScratchRemoved, StillstateError
from state_runtime.pipeline import source_position
from state_runtime.pipeline.source_position import SparkCheckpoint, is_file_source, same_offsets, write_source_log
from state_runtime.snapshot.manifest import Manifest, SourceFile, SourcePosition

INTERVAL = 10


class FakeSpark:
    """Writes a checkpoint directory as Spark 4.3 does for one file source: one log entry per batch, every tenth compacted."""

    def __init__(self, folder: Path, interval: int = INTERVAL) -> None:
        self.folder = folder
        self.interval = interval
        self.log = folder / "sources" / "0"
        self.log.mkdir(parents=True, exist_ok=True)
        for name in ("offsets", "commits"):
            (folder / name).mkdir(exist_ok=True)
        (folder / "metadata").write_text('{"id":"query"}')

    def entry(self, entry: int, paths: list[str]) -> list[str]:
        """Write one entry of the log of seen files; returns its lines."""
        lines = [json.dumps({"path": p, "timestamp": 1, "batchId": entry}, ensure_ascii=False) for p in paths]
        name, kept = str(entry), lines
        if (entry + 1) % self.interval == 0:
            name, kept = f"{entry}.compact", [*self.all_lines(entry), *lines]
        (self.log / name).write_text("\n".join(["v1", *kept]))
        return lines

    def all_lines(self, before: int) -> list[str]:
        """What Spark reads when it compacts: the newest compacted file and every entry after it."""
        compacted = max((int(p.stem) for p in self.log.glob("*.compact") if int(p.stem) < before), default=-1)
        names = [f"{compacted}.compact"] if compacted >= 0 else []
        names += [str(e) for e in range(compacted + 1, before)]
        return [line for name in names for line in (self.log / name).read_text().split("\n")[1:] if line]

    def batch(self, batch_id: int, log_offset: int) -> None:
        """Plan a batch, and commit the one before."""
        header = json.dumps({"batchWatermarkMs": 7 * batch_id, "batchTimestampMs": 1000 + batch_id, "conf": {}})
        (self.folder / "offsets" / str(batch_id)).write_text(f'v1\n{header}\n{{"logOffset":{log_offset}}}')
        if batch_id > 0:
            (self.folder / "commits" / str(batch_id - 1)).write_text('v1\n{"nextBatchWatermarkMs":0}')


names = st.text(
    alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\n\r[]{}*?"), min_size=1, max_size=6
)
# Per batch some log entries, per entry some files.
batches = st.lists(
    st.lists(st.lists(names, min_size=1, max_size=2), min_size=1, max_size=4), min_size=1, max_size=12
)  # fmt: skip


@given(batches, st.integers(0, 11))
@examples(40)
def test_the_log_of_seen_files_survives_a_restart_anywhere(
    tmp_path_factory: pytest.TempPathFactory, all_batches: list[list[list[str]]], restart_after: int
) -> None:
    """Collected line by line over a restart into a primed directory, it is every file exactly once; Spark can go on from it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    spark, checkpoint = FakeSpark(folder / "0"), SparkCheckpoint(folder / "0")
    written: list[str] = []
    collected: list[str] = []
    before: SourcePosition | None = None
    entry = 0
    for batch_id, entries in enumerate(all_batches):
        for paths in entries:
            written += spark.entry(entry, paths)
            entry += 1
        spark.batch(batch_id, entry - 1)
        position = checkpoint.position(batch_id)
        assert position.logs == (0,)
        collected += checkpoint.new_log_lines(before, position).get(0, [])
        assert collected == written
        before = position
        if batch_id == restart_after:
            checkpoint = SparkCheckpoint(folder / "1")
            checkpoint.prime(position, {0: collected})
            spark = FakeSpark(folder / "1")
            assert spark.all_lines(entry) == written, "Spark would read these files again"
            assert same_offsets(checkpoint.position(batch_id).offsets, position.offsets)


def test_a_primed_directory_has_exactly_what_spark_needs(tmp_path: Path) -> None:
    """metadata, two offsets, one commit: tried on Spark 4.3.0."""
    position = SourcePosition(7, "meta", "v1\n{}\n{}", "v1\n{}\n-", "v1\n{}", ())
    SparkCheckpoint(tmp_path / "c").prime(position, {})
    files = sorted(str(p.relative_to(tmp_path / "c")) for p in (tmp_path / "c").rglob("*") if p.is_file())
    assert files == ["commits/7", "metadata", "offsets/6", "offsets/7"]
    first = SourcePosition(0, "meta", "v1\n{}\n{}", "", "v1\n{}", ())
    SparkCheckpoint(tmp_path / "d").prime(first, {})
    assert sorted(p.name for p in (tmp_path / "d" / "offsets").iterdir()) == ["0"]


def test_position_and_prime_are_inverse(tmp_path: Path) -> None:
    """What is read from a primed directory is what was put in."""
    spark = FakeSpark(tmp_path / "a")
    spark.entry(0, ["x"])
    for batch_id in range(3):
        spark.batch(batch_id, 0)
    position = SparkCheckpoint(tmp_path / "a").position(2)
    assert json.loads(position.commit.split("\n")[1]) == {"nextBatchWatermarkMs": 14}
    primed = SparkCheckpoint(tmp_path / "b")
    primed.prime(position, {0: plan_and_join(["x"])})
    assert primed.position(2) == position
    assert primed.clock(2) == SparkCheckpoint(tmp_path / "a").clock(2)
    assert (primed.clock(2).batch_time_ms, primed.clock(2).watermark_ms) == (1002, 14)


def laid_out(folder: Path, texts: Iterable[str], last: int, interval: int = INTERVAL) -> dict[str, str]:
    """The files of a log that was written, the compacted one first."""
    write_source_log(folder, texts, last, interval)
    names = sorted(
        (p.name for p in folder.iterdir() if p.is_file()),
        key=lambda n: (not n.endswith(".compact"), int(n.partition(".")[0])),
    )
    return {name: (folder / name).read_text() for name in names}


def plan_and_join(paths: list[str]) -> list[str]:
    return [json.dumps({"path": p, "batchId": 0}) for p in paths]


@pytest.mark.parametrize("entries", [1, 9, 10, 11, 19, 20, 21, 35])
def test_the_newest_full_interval_is_compacted(tmp_path: Path, entries: int) -> None:
    """As Spark names its files: <last of the interval>.compact, then one file per entry."""
    lines = [json.dumps({"path": f"f{n}", "batchId": n}) for n in range(entries)]
    files = laid_out(tmp_path, lines, entries - 1)
    full = entries // INTERVAL * INTERVAL
    expected = {f"{full - 1}.compact"} if full else set()
    assert set(files) == expected | {str(n) for n in range(full, entries)}
    assert [line for body in files.values() for line in body.split("\n")[1:]] == lines
    (tmp_path / "none").mkdir()
    assert laid_out(tmp_path / "none", [], -1) == {}


def test_offsets_are_the_same_if_the_input_is() -> None:
    """Times and settings differ between attempts of a batch; the offsets are what counts."""
    assert same_offsets('v1\n{"t":1}\n{"logOffset":3}\n-', 'v1\n{"t":2}\n{"logOffset":3}\n-')
    assert not same_offsets('v1\n{"t":1}\n{"logOffset":3}', 'v1\n{"t":1}\n{"logOffset":4}')
    assert not same_offsets("v1\n{}\n{}", "v1\n{}\n{}\n{}")


def test_a_missing_entry_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    """A log with another layout must not be taken for "no new files"."""
    spark = FakeSpark(tmp_path)
    spark.entry(0, ["x"])
    spark.batch(0, 3)
    checkpoint = SparkCheckpoint(tmp_path)
    with pytest.raises(StillstateError, match="has no entry 1 for source 0"):
        checkpoint.new_log_lines(None, checkpoint.position(0))


def test_a_source_whose_files_were_removed_is_not_committed_without_them(tmp_path: Path) -> None:
    """A cleaner of temporary files may come between Spark's writing and our reading. A position without the log of a
    source of files would let the next restart read all of them again; one without a rate source's time begins anew."""
    spark, checkpoint = FakeSpark(tmp_path), SparkCheckpoint(tmp_path)
    own = tmp_path / "sources" / "1" / "0"
    own.parent.mkdir()
    own.write_text("v1\n1700000000000")
    spark.entry(0, ["x"])
    spark.batch(0, 0)
    before = checkpoint.position(0)
    spark.entry(1, ["y"])
    spark.batch(1, 1)
    assert checkpoint.new_log_lines(before, checkpoint.position(1))
    for taken in (own, spark.log):
        kept = {path: path.read_bytes() for path in ([taken] if taken.is_file() else taken.iterdir())}
        for path in kept:
            path.unlink()
        with pytest.raises(ScratchRemoved, match=r"cleaner.*scratch_dir"):
            checkpoint.new_log_lines(before, checkpoint.position(1))
        for path, content in kept.items():
            path.write_bytes(content)


@pytest.mark.parametrize("name", ["a%5B1%5D", "a%7Bb,c%7D", "a*", "a%3F", "a%5C1", "in%5B1%5D/a", "]"])
def test_a_file_whose_name_is_a_pattern_is_refused_beside_others(tmp_path: Path, name: str) -> None:
    """Spark reads what the pattern fits once more, and sums are wrong without a word. Alone in its batch it is fine."""
    pattern, plain = f"file:///in/{name}.parquet", ["file:///in/a1.parquet", "file:///in/a%255B1%20%C3%A9.parquet"]
    spark = FakeSpark(tmp_path)
    checkpoint = SparkCheckpoint(tmp_path)
    spark.entry(0, [pattern])
    spark.batch(0, 0)
    alone = checkpoint.position(0)
    assert len(checkpoint.new_log_lines(None, alone)[0]) == 1
    spark.entry(1, plain)
    spark.batch(1, 1)
    others = checkpoint.position(1)
    assert len(checkpoint.new_log_lines(alone, others)[0]) == 2
    spark.entry(2, [plain[0], pattern])
    spark.batch(2, 2)
    with pytest.raises(
        InvalidData, match=rf"{re.escape(unquote(pattern))}.*batch of 2 files.*maxFilesPerTrigger=1.*rename"
    ):
        checkpoint.new_log_lines(others, checkpoint.position(2))


def test_a_log_of_another_version_is_corrupt(tmp_path: Path) -> None:
    """Spark may change its format; guessing would lose files."""
    spark = FakeSpark(tmp_path)
    (spark.log / "0").write_text("v2\n{}")
    spark.batch(0, 0)
    checkpoint = SparkCheckpoint(tmp_path)
    with pytest.raises(CorruptData, match="has version 'v2'"):
        checkpoint.new_log_lines(None, checkpoint.position(0))


def test_sources_without_a_log_are_left_alone(tmp_path: Path) -> None:
    """Kafka and rate sources keep their place in the offsets alone."""
    spark = FakeSpark(tmp_path)
    spark.log.rmdir()
    spark.batch(0, 0)
    position = SparkCheckpoint(tmp_path).position(0)
    assert position.logs == ()
    assert SparkCheckpoint(tmp_path).new_log_lines(None, position) == {}


# --- which sources keep what -----------------------------------------------------------------------------------------

SEEN = 'v1\n{"path":"file:///in/a","timestamp":1,"batchId":0}'
KINDS = {
    "a file source": ('{"logOffset":0}', {"0": SEEN}, True),
    "a file source whose log was compacted": ('{"logOffset":9}', {"8": SEEN, "9.compact": SEEN}, True),
    "a rate source: a number, and its time of creation": ("17", {"0": "v1\n1795385325406"}, False),
    "rate-micro-batch: offset and time, nothing of its own": ('{"offset":20,"timestamp":5}', {}, False),
    "Kafka, with its first offsets": ('{"topic":{"0":1}}', {"0": '\0v1\n{"topic":{"0":0}}'}, False),
    "Kafka, a topic of this name": ('{"logOffset":{"0":1}}', {"0": '\0v1\n{"logOffset":{"0":0}}'}, False),
    "Kafka, this topic and another": ('{"logOffset":{"0":1},"t":{"0":2}}', {"0": '\0v1\n{}'}, False),
    "a table with versions": ('{"sourceVersion":1,"reservoirId":"r","reservoirVersion":3,"index":-1}', {}, False),
    "a connector that counts files, and keeps something else": ('{"logOffset":4}', {"0": "v1\nmine"}, False),
    "a connector that counts files, and keeps nothing": ('{"logOffset":4}', {}, False),
    "a source without rows yet": ("-", {}, False),
    "an offset that is not JSON": ("batch 7", {"0": "v1"}, False),
}  # fmt: skip


def a_checkpoint(folder: Path, offset: str, files: dict[str, str], batch: int = 0) -> SparkCheckpoint:
    (folder / "sources" / "0").mkdir(parents=True)
    for name, body in files.items():
        (folder / "sources" / "0" / name).write_text(body)
    for name in ("offsets", "commits"):
        (folder / name).mkdir()
    (folder / "metadata").write_text('{"id":"q"}')
    header = '{"batchWatermarkMs":0,"batchTimestampMs":1}'
    for planned in {max(0, batch - 1), batch}:
        (folder / "offsets" / str(planned)).write_text(f"v1\n{header}\n{offset}")
    return SparkCheckpoint(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_source_keeps_is_told_by_its_kind_and_not_by_a_name(tmp_path: Path, kind: str) -> None:
    """A rate source's time of creation was taken for a log of seen files, and so was a topic called logOffset: the one was
    lost at a restart, the other ended the job."""
    offset, files, is_log = KINDS[kind]
    checkpoint = a_checkpoint(tmp_path / "a", offset, files)
    position = checkpoint.position(0)
    assert position.logs == ((0,) if is_log else ())
    if is_log:
        assert position.files == ()
        return
    assert checkpoint.new_log_lines(None, position) == {}
    SparkCheckpoint(tmp_path / "b").prime(position, {})
    primed = {p.name: p.read_text() for p in (tmp_path / "b").glob("sources/0/*")}
    assert primed == files, "a restart must find what the source kept"


def test_what_another_source_keeps_is_carried_by_the_manifest_byte_for_byte(tmp_path: Path) -> None:
    """Also what is no text, and what lies in folders; checksums and unfinished writes are not of the source."""
    checkpoint = a_checkpoint(tmp_path, "3", {".0.crc": "sum", ".1.tmp": "half"})
    (tmp_path / "sources/0/0").write_bytes(b"\xff\0v1")
    (tmp_path / "sources/0/deep").mkdir()
    (tmp_path / "sources/0/deep/1").write_bytes(b"")
    manifest = Manifest(4, "u", 1, 1, "c", "checkpoint", 0, 2, source=checkpoint.position(0))
    read = Manifest.decode(manifest.encode(), "there")
    assert read == manifest
    assert read.source is not None
    assert read.source.files == (SourceFile("0/0", "/wB2MQ=="), SourceFile("0/deep/1", ""))


def test_a_manifest_without_such_files_is_the_one_that_earlier_versions_read() -> None:
    """The field is younger than format 4; earlier versions have never heard of it."""
    plain = SourcePosition(0, "m", "v1\n{}\n{}", "", "v1\n{}", (0,))
    body = Manifest(4, "u", 1, 1, "c", "checkpoint", 0, 2, source=plain).encode()
    assert "files" not in json.loads(body.split(b"\n")[1])["source"]
    with_one = SourcePosition(0, "m", "v1\n{}\n{}", "", "v1\n{}", (), (SourceFile("0/0", "MQ=="),))
    body = Manifest(4, "u", 1, 1, "c", "checkpoint", 0, 2, source=with_one).encode()
    assert json.loads(body.split(b"\n")[1])["source"]["files"] == [{"path": "0/0", "content": "MQ=="}]


@pytest.mark.parametrize(
    "files",
    [
        (SourceFile("../x", ""),),
        (SourceFile("/etc/x", ""),),
        (SourceFile("name/0", ""),),
        (SourceFile("0", ""),),
        (SourceFile("0/0", ""), SourceFile("0/0", "")),
        (SourceFile("0/0", "no Base64"),),
        tuple(SourceFile(f"0/{n}", "") for n in range(limits.SOURCE_FILES_MAX + 1)),
        (SourceFile("0/0", "AAAA" * (limits.SOURCE_FILES_BYTES_MAX // 3 + 1)),),
    ],
    ids=["above", "absolute", "no number", "no name", "twice", "not Base64", "too many", "too large"],
)
def test_hostile_files_of_sources_are_not_written_to_the_drivers_disk(files: tuple[SourceFile, ...]) -> None:
    """Whoever can write to the store must not write to the driver's disk."""
    position = SourcePosition(0, "m", "v1\n{}\n3", "", "v1\n{}", (), files)
    body = Manifest(4, "u", 1, 1, "c", "checkpoint", 0, 2, source=position).encode()
    with pytest.raises((CorruptData, CorruptManifest)):
        Manifest.decode(body, "there")


@pytest.mark.parametrize("path", ["../../x", "/etc/x", "0/../../x"])
def test_no_file_of_a_source_is_written_elsewhere_whoever_gives_the_position(tmp_path: Path, path: str) -> None:
    """Where bytes become files of the driver the path is looked at once more."""
    position = SourcePosition(0, "m", "v1\n{}\n3", "", "v1\n{}", (), (SourceFile(path, ""),))
    with pytest.raises(CorruptData, match="not a plain relative path"):
        SparkCheckpoint(tmp_path / "a" / "b").prime(position, {})


@pytest.mark.parametrize(
    "files",
    [
        {str(n): "x" for n in range(limits.SOURCE_FILES_MAX + 1)},
        {"0": "x" * (limits.SOURCE_FILES_BYTES_MAX + 1)},
        {"a name": "x"},
    ],
    ids=["many", "large", "odd name"],
)
def test_a_source_that_keeps_too_much_is_refused_at_the_first_checkpoint(tmp_path: Path, files: dict[str, str]) -> None:
    """Better at once, by its number, than at a restart that cannot be."""
    checkpoint = a_checkpoint(tmp_path, '{"mine":1}', files)
    with pytest.raises(InvalidData, match=r'source 0 \(its offset is \'\{"mine":1\}\'\).*cannot carry.*another source'):
        checkpoint.position(0)


# --- the log does not make an epoch slower, nor end a job ------------------------------------------------------------


def test_only_what_is_new_is_read_from_a_compacted_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tenth entry is a file with all names ever seen. What an epoch costs must not depend on them."""
    old = "\n".join(f'{{"path":"file:///in/{n}","timestamp":1,"batchId":{n // 100}}}' for n in range(20_000))
    new = [f'{{"path":"file:///in/n{n}é","timestamp":1,"batchId":209}}' for n in range(3)]
    checkpoint = a_checkpoint(tmp_path, '{"logOffset":209}', {"209.compact": "\n".join(["v1", old, *new])}, batch=209)
    before = SourcePosition(208, "m", 'v1\n{}\n{"logOffset":208}', "", "v1\n{}", (0,))
    parsed = []
    entry_of = source_position._entry_of
    monkeypatch.setattr(source_position, "_entry_of", lambda line: parsed.append(line) or entry_of(line))
    assert checkpoint.new_log_lines(before, checkpoint.position(209)) == {0: new}
    assert len(parsed) == len(new) + 1


def test_new_lines_of_a_compacted_log_may_be_longer_than_a_block(tmp_path: Path) -> None:
    """Names have up to 4 KiB, and an entry thousands of them."""
    new = [f'{{"path":"file:///{"é" * 2000}{n}","timestamp":1,"batchId":9}}' for n in range(100)]
    old = '{"path":"file:///a","timestamp":1,"batchId":8}'
    checkpoint = a_checkpoint(tmp_path, '{"logOffset":9}', {"9.compact": "\n".join(["v1", old, *new])}, batch=9)
    before = SourcePosition(8, "m", 'v1\n{}\n{"logOffset":8}', "", "v1\n{}", (0,))
    assert checkpoint.new_log_lines(before, checkpoint.position(9)) == {0: new}
    (tmp_path / "sources/0/9.compact").write_text("\n".join(["v1", *new]))
    assert checkpoint.new_log_lines(before, checkpoint.position(9)) == {0: new}, "an entry may be all of it"


def test_old_names_are_copied_into_a_fresh_directory_without_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart brings all names back; only a text that reaches beyond the compacted file is taken apart."""
    lines = [f'{{"path":"f{n}","timestamp":1,"batchId":{n}}}' for n in range(25)]
    texts = ["\n".join(lines[:15]), "\n".join(lines[15:22]), *lines[22:]]
    parsed = []
    entry_of = source_position._entry_of
    monkeypatch.setattr(source_position, "_entry_of", lambda line: parsed.append(line) or entry_of(line))
    files = laid_out(tmp_path, texts, 24)
    assert [line for body in files.values() for line in body.split("\n")[1:]] == lines
    assert list(files) == ["19.compact", "20", "21", "22", "23", "24"]
    assert len(parsed) == len(texts) + 7 + 3
    (tmp_path / "other").mkdir()
    with pytest.raises(CorruptData, match="not of one snapshot"):
        laid_out(tmp_path / "other", texts, 23)


@given(st.integers(1, 25), st.sampled_from([1, 3, 10]), st.data())
@examples(40)
def test_lines_of_some_entries_are_read_whatever_spark_has_compacted_and_removed(
    tmp_path_factory: pytest.TempPathFactory, entries: int, interval: int, draw: st.DataObject
) -> None:
    """Spark removes an entry some time after it is in a compacted file."""
    folder = tmp_path_factory.mktemp("checkpoint")
    spark = FakeSpark(folder, interval)
    lines = [spark.entry(entry, [f"a{entry}", f"b{entry}"]) for entry in range(entries)]
    compacted = max((int(path.stem) for path in spark.log.glob("*.compact")), default=-1)
    for entry in range(draw.draw(st.integers(0, max(compacted, 0)), label="removed before")):
        for name in (f"{entry}", f"{entry}.compact"):
            (spark.log / name).unlink(missing_ok=True)
    after = draw.draw(st.integers(-1, entries - 1), label="after")
    until = draw.draw(st.integers(max(after, compacted), entries - 1), label="until")
    expected = [line for of in lines[after + 1 : until + 1] for line in of]
    assert list(SparkCheckpoint(folder, interval).seen_lines(0, after, until)) == expected


@pytest.mark.parametrize("interval", [1, 3, 7, 10, 30])
@pytest.mark.parametrize("entries", [1, 6, 9, 30, 31])
def test_a_primed_log_is_compacted_where_spark_looks_for_it(tmp_path: Path, interval: int, entries: int) -> None:
    """The interval is a setting of the user's. With a log laid out for another one Spark does not start again."""
    lines = [f'{{"path":"f{n}","timestamp":1,"batchId":{n}}}' for n in range(entries)]
    checkpoint = SparkCheckpoint(tmp_path / "c", interval)
    position = SourcePosition(0, "m", f'v1\n{{}}\n{{"logOffset":{entries - 1}}}', "", "v1\n{}", (0,))
    checkpoint.prime(position, {0: lines})
    spark = FakeSpark(tmp_path / "c", interval)
    names = {p.name for p in spark.log.iterdir()}
    full = entries // interval * interval
    assert names == ({f"{full - 1}.compact"} if full else set()) | {str(n) for n in range(full, entries)}
    assert spark.all_lines(entries) == lines


def test_a_log_that_grows_too_long_is_warned_of_at_half_and_then_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bound that nobody hears of before it is reached ends a job that ran for months."""
    line = '{"path":"file:///in/a","timestamp":1,"batchId":9}'
    checkpoint = a_checkpoint(tmp_path, '{"logOffset":9}', {"9.compact": f"v1\n{line}"}, batch=9)
    before = SourcePosition(8, "m", 'v1\n{}\n{"logOffset":8}', "", "v1\n{}", (0,))
    position = checkpoint.position(9)
    monkeypatch.setattr(source_position, "SOURCE_LOG_TOTAL_BYTES_MAX", 2 * len(line) + 8)
    checkpoint.new_log_lines(before, position)
    assert not caplog.records
    monkeypatch.setattr(source_position, "SOURCE_LOG_TOTAL_BYTES_MAX", 2 * len(line))
    for _ in range(3):
        assert checkpoint.new_log_lines(before, position) == {0: [line]}
    assert any("more than half" in message for message in caplog.messages)
    assert len(caplog.records) == 1, "once is enough"
    monkeypatch.setattr(source_position, "SOURCE_LOG_TOTAL_BYTES_MAX", len(line))
    with pytest.raises(InvalidData, match=r"source 0 has seen take 52 bytes, more than the 49 .*fewer, larger files"):
        checkpoint.new_log_lines(before, position)


def test_a_log_that_is_too_long_is_refused_where_it_is_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a manifest names may be of anybody; the driver's disk is not to be filled with it."""
    line = '{"path":"file:///in/a","timestamp":1,"batchId":0}'
    monkeypatch.setattr(source_position, "SOURCE_LOG_TOTAL_BYTES_MAX", 5 * len(line))
    monkeypatch.setattr(source_position, "SOURCE_LOG_BYTES_MAX", 2 * len(line))
    assert laid_out(tmp_path, [line] * 7, 9)
    taken: list[str] = []
    more = (taken.append(line) or line for _ in range(100))
    (tmp_path / "other").mkdir()
    with pytest.raises(CorruptData, match=r"the log of seen files for .* has more than 392 bytes"):
        laid_out(tmp_path / "other", more, 9)
    assert len(taken) == 8


def test_one_entry_that_is_too_long_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that has seen so many files would not fit where it is kept."""
    lines = [f'{{"path":"f{n}","timestamp":1,"batchId":9}}' for n in range(40)]
    checkpoint = a_checkpoint(tmp_path, '{"logOffset":9}', {"9.compact": "\n".join(["v1", *lines])}, batch=9)
    before = SourcePosition(8, "m", 'v1\n{}\n{"logOffset":8}', "", "v1\n{}", (0,))
    monkeypatch.setattr(source_position, "_BLOCK_BYTES", 64)
    assert checkpoint.new_log_lines(before, checkpoint.position(9)) == {0: lines}
    monkeypatch.setattr(source_position, "SOURCE_LOG_BYTES_MAX", 512)
    with pytest.raises(CorruptData, match="one entry in the log of seen files has more than 512 bytes"):
        checkpoint.new_log_lines(before, checkpoint.position(9))


def test_a_folder_without_a_log_is_not_of_a_file_source(tmp_path: Path) -> None:
    """A connector may keep nothing but a folder."""
    assert not is_file_source({"logOffset": 3}, tmp_path)
    assert not is_file_source({"logOffset": True}, tmp_path)
