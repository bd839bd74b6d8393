"""The source position: out of Spark's checkpoint directory and back into a fresh one, on plain files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from state_runtime.base.errors import CorruptData, StillstateError
from state_runtime.pipeline.source_position import SparkCheckpoint, plan_source_log, same_offsets
from state_runtime.snapshot.manifest import SourcePosition

INTERVAL = 10


class FakeSpark:
    """Writes a checkpoint directory as Spark 4.3 does for one file source: one log entry per batch, every tenth compacted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "sources" / "0"
        self.log.mkdir(parents=True, exist_ok=True)
        for name in ("offsets", "commits"):
            (folder / name).mkdir(exist_ok=True)
        (folder / "metadata").write_text('{"id":"query"}')

    def entry(self, entry: int, paths: list[str]) -> list[str]:
        """Write one entry of the log of seen files; returns its lines."""
        lines = [json.dumps({"path": p, "timestamp": 1, "batchId": entry}, ensure_ascii=False) for p in paths]
        name, kept = str(entry), lines
        if (entry + 1) % INTERVAL == 0:
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


names = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"), min_size=1, max_size=6)
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


def plan_and_join(paths: list[str]) -> list[str]:
    return [json.dumps({"path": p, "batchId": 0}) for p in paths]


@pytest.mark.parametrize("entries", [1, 9, 10, 11, 19, 20, 21, 35])
def test_the_newest_full_interval_is_compacted(entries: int) -> None:
    """As Spark names its files: <last of the interval>.compact, then one file per entry."""
    lines = [json.dumps({"path": f"f{n}", "batchId": n}) for n in range(entries)]
    files = plan_source_log(lines)
    full = entries // INTERVAL * INTERVAL
    expected = {f"{full - 1}.compact"} if full else set()
    assert set(files) == expected | {str(n) for n in range(full, entries)}
    assert [line for body in files.values() for line in body.split("\n")[1:]] == lines
    assert plan_source_log([]) == {}


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
