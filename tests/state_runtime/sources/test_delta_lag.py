"""How far a job is behind a Delta table: asked beside the run, by the table's log alone."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st
from tenacity import wait_none

from state_runtime.base.source_state import SourceState
from state_runtime.sources import delta as delta_source
from state_runtime.sources import delta_lag
from state_runtime.sources.delta_commits import Commit
from state_runtime.sources.delta_lag import DeltaLag, log_kept_s
from state_runtime.sources.delta_position import DeltaPosition
from state_runtime.sources.delta_table import OpenedTable, TableLog

DAY_S = 86_400.0
CHANGE_DATA = {"delta.enableChangeDataFeed": "true"}


class CountedLog(TableLog):
    """Remembers what it is asked."""

    def __init__(self, table: Path) -> None:
        super().__init__(str(table), {}, f"source {str(table)!r}", away_s=0, wait=wait_none())
        self.questions: list[tuple[str, int | None]] = []

    def has(self, version: int) -> bool:
        self.questions.append(("has", version))
        return super().has(version)

    def commit(self, version: int) -> Commit:
        self.questions.append(("commit", version))
        return super().commit(version)

    def opened(self, version: int | None = None) -> OpenedTable:
        self.questions.append(("opened", version))
        return super().opened(version)


def lag_of(table: Path, log: TableLog | None = None, **how: bool) -> DeltaLag:
    opened = CountedLog(table).opened()
    reads = {"changes": False, "skip_changes": False, **how}
    return DeltaLag(str(table), log or CountedLog(table), opened.version, opened.metadata, "source 't'", **reads)


def at(table: Path, version: int, files: int = 0, *, is_whole: bool = False) -> Any:
    return DeltaPosition(str(DeltaTable(str(table)).metadata().id), version, files, is_whole).to_json()


def add(table: Path, ids: range, files: int = 1, **how: Any) -> None:
    """Write one version, with that many files."""
    rows = pa.table({"id": pa.array(list(ids), pa.int64()), "part": pa.array([n % files for n in ids], pa.int32())})
    write_deltalake(str(table), rows, mode="append", partition_by=["part"], **how)


def actions(table: Path, version: int) -> list[dict[str, Any]]:
    text = (table / "_delta_log" / f"{version:020}.json").read_text()
    return [json.loads(line) for line in text.splitlines()]


def committed_ms(table: Path, version: int) -> int:
    return next(int(action["commitInfo"]["timestamp"]) for action in actions(table, version) if "commitInfo" in action)


def files_in(table: Path, version: int, *, changes: bool, skip_changes: bool) -> list[int]:
    """The oracle: sizes of what a version gives to a stream, in the order of positions, by the text of the log."""
    found: dict[str, list[tuple[int, str, int]]] = {"add": [], "remove": [], "cdc": []}
    for action in actions(table, version):
        for kind in found.keys() & action.keys():
            of = action[kind]
            if kind == "cdc" or of["dataChange"]:
                found[kind].append((of.get("modificationTime") or 0, unquote(of["path"]), of.get("size") or 0))
    is_change = bool(found["remove"] or found["cdc"])
    if changes:
        picked = sorted(found["cdc"]) or [*sorted(found["remove"]), *sorted(found["add"])]
    else:
        picked = [] if is_change and skip_changes else sorted(found["add"])
    return [size for _, _, size in picked]


def whole(table: Path, version: int) -> list[tuple[int, int]]:
    """The same of all files of the table at a version, with the times of their writing."""
    rows = pa.table(DeltaTable(str(table), version=version).get_add_actions()).to_pylist()
    written = sorted((row["modification_time"], unquote(row["path"]), row["size_bytes"]) for row in rows)
    return [(time_ms, size) for time_ms, _, size in written]


def change(table: Path, how: str, number: int) -> None:
    opened, ids = DeltaTable(str(table)), range(10 * number, 10 * number + 10)
    if how.startswith("add"):
        add(table, ids, int(how[-1]))
    elif how == "overwrite":
        rows = pa.table({"id": pa.array(ids, pa.int64()), "part": pa.array([0] * 10, pa.int32())})
        write_deltalake(str(table), rows, mode="overwrite")
    elif how == "delete":
        opened.delete(f"id % 5 = {number % 5}")
    elif how == "optimize":
        opened.optimize.compact()
    else:
        opened.alter.set_table_properties({"delta.logRetentionDuration": f"interval {number + 1} days"})


@settings(max_examples=12)
@given(
    steps=st.lists(
        st.sampled_from(["add1", "add3", "add3", "delete", "overwrite", "optimize", "setting"]), min_size=1, max_size=6
    ),
    asked_after=st.lists(st.booleans(), min_size=6, max_size=6),
    how=st.sampled_from([{}, {"changes": True}, {"skip_changes": True}]),
    draw=st.data(),
)
def test_what_waits_is_what_the_log_has_behind_the_position(
    steps: Sequence[str], asked_after: Sequence[bool], how: dict[str, bool], draw: st.DataObject
) -> None:
    """Whatever happened to the table before and between two looks, and wherever the job is."""
    with tempfile.TemporaryDirectory() as folder:
        follow(Path(folder) / "t", steps, asked_after, how, draw)


def follow(
    table: Path, steps: Sequence[str], asked_after: Sequence[bool], how: dict[str, bool], draw: st.DataObject
) -> None:
    reads = {"changes": False, "skip_changes": False, **how}
    add(table, range(10), 2, configuration=CHANGE_DATA)
    lag, next_ = lag_of(table, **how), 0
    now_ms = committed_ms(table, 0)
    for number, step in enumerate(steps, 1):
        change(table, step, number)
        newest = DeltaTable(str(table)).version()
        if not asked_after[number - 1] and number < len(steps):
            continue
        next_ = draw.draw(st.integers(next_, newest + 1), label="version of the position")
        is_whole = next_ <= newest and draw.draw(st.booleans(), label="whole")
        first = [s for _, s in whole(table, next_)] if is_whole else []
        if next_ <= newest and not is_whole:
            first = files_in(table, next_, **reads)
        read = draw.draw(st.integers(0, len(first)), label="files that are read")
        later = [(version, files_in(table, version, **reads)) for version in range(next_ + 1, newest + 1)]
        state = lag.look(at(table, next_, read, is_whole=is_whole), now_ms)
        sizes = [*first[read:], *(size for _, of in later for size in of)]
        assert (state.behind, state.behind_bytes, state.behind_versions) == (
            len(sizes), sum(sizes), newest + 1 - next_
        )  # fmt: skip
        if first[read:]:
            oldest_ms = whole(table, next_)[read][0] if is_whole else committed_ms(table, next_)
        else:
            oldest_ms = next((committed_ms(table, version) for version, of in later if of), 0)
        assert state.oldest_unread_ms == oldest_ms
        kept_s = [30, *(n + 1 for n, s in enumerate(steps[:number], 1) if s == "setting")][-1] * DAY_S
        if is_whole and next_ == newest:
            assert (state.retention_left_s, state.kept_s) == (-1.0, -1.0)
        else:
            left_s = kept_s + (committed_ms(table, next_) - now_ms) / 1000 if next_ <= newest else -1.0
            assert (state.retention_left_s, state.kept_s) == (pytest.approx(left_s), kept_s)


def test_each_version_is_read_once_and_a_quiet_table_is_asked_two_small_questions(tmp_path: Path) -> None:
    table = tmp_path / "t"
    for number in range(3):
        add(table, range(number, number + 1))
    log = CountedLog(table)
    lag = lag_of(table, log)
    assert lag.look(at(table, 1), 0).behind == 2
    assert log.questions == [("has", 3), ("has", 2), ("commit", 1), ("commit", 2)]
    log.questions.clear()
    assert lag.look(at(table, 2), 0).behind == 1
    assert log.questions == [("has", 3), ("has", 2)]
    log.questions.clear()
    add(table, range(3, 4))
    assert lag.look(at(table, 2), 0).behind == 2
    assert log.questions == [("has", 3), ("commit", 3), ("has", 4)]
    assert lag.look(at(table, 4), 0).behind == 0


def test_a_table_that_a_job_begins_with_is_listed_once(tmp_path: Path) -> None:
    table = tmp_path / "t"
    add(table, range(6), 3)
    log = CountedLog(table)
    lag = lag_of(table, log)
    assert [lag.look(at(table, 0, files, is_whole=True), 0).behind for files in (0, 1, 3)] == [3, 2, 0]
    assert log.questions.count(("opened", 0)) == 1
    assert lag.look(at(table, 1), 0).behind == 0


def test_what_is_not_counted_in_one_look_is_not_told_as_a_number_and_is_counted_in_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is thousands of versions behind does not make one question of all of them."""
    monkeypatch.setattr(delta_lag, "_COMMITS_MAX", 2)
    table = tmp_path / "t"
    for number in range(6):
        add(table, range(number, number + 1))
    lag, now_ms = lag_of(table), committed_ms(table, 1) + 5000
    first, second, third = (lag.look(at(table, 1), now_ms) for _ in range(3))
    for state in (first, second):
        assert (state.behind, state.behind_bytes, state.behind_versions) == (-1, -1, -1)
        assert state.age_s(now_ms) == 5.0, "the oldest is known from the first look on"
    assert (third.behind, third.behind_versions) == (5, 5)


class Silent:
    """A store that does not answer."""

    def __init__(self) -> None:
        self.asked = 0

    def get_file_info(self, path: Any) -> Any:
        self.asked += 1
        raise OSError("connection refused with key hunter2")


def test_a_store_that_is_away_is_told_since_when_and_until_it_answers_and_is_asked_once(tmp_path: Path) -> None:
    table = tmp_path / "t"
    add(table, range(1))
    log = CountedLog(table)
    log._secrets = ["hunter2"]
    lag = lag_of(table, log)
    assert lag.look(at(table, 0), 1000).away_since_ms == 0
    well, silent = log.filesystem, Silent()
    log._filesystem = silent
    assert lag.look(at(table, 0), 2000).away_since_ms == 2000
    away = lag.look(at(table, 0), 6000)
    assert (away.away_since_ms, away.away_s(6000), away.asked_at_ms, away.behind) == (2000, 4.0, 1000, 1)
    assert "does not answer: connection refused" in away.said
    assert "hunter2" not in away.said
    assert silent.asked == 2, "the watch asks again by itself, and other sources wait for its answer"
    log._filesystem = well
    add(table, range(1, 2))
    back = lag.look(at(table, 0), 9000)
    assert (back.away_since_ms, back.said, back.behind) == (0, "", 2)


def test_a_table_that_was_replaced_put_back_or_removed_is_told_with_that_word(tmp_path: Path) -> None:
    table = tmp_path / "t"
    add(table, range(1))
    shutil.copytree(table, tmp_path / "old")
    add(table, range(1, 2))
    lag, position = lag_of(table), at(table, 2)
    assert lag.look(position, 0).behind == 0
    shutil.rmtree(table)
    shutil.copytree(tmp_path / "old", table)
    assert "put back from an older copy" in lag.look(position, 0).said
    shutil.rmtree(table)
    assert "there is no Delta table" in lag.look(position, 0).said
    add(table, range(1))
    told = lag.look(position, 7000)
    assert "replaced by another one" in told.said
    assert told.away_since_ms, "nothing is read from it"


def test_a_start_at_a_version_that_is_not_there_is_told(tmp_path: Path) -> None:
    add(tmp_path / "t", range(1))
    assert (
        "starting names a version that is not there yet" in lag_of(tmp_path / "t").look(at(tmp_path / "t", 9), 1).said
    )


def test_versions_that_were_made_anew_behind_an_older_copy_are_counted_anew(tmp_path: Path) -> None:
    table = tmp_path / "t"
    add(table, range(1))
    shutil.copytree(table, tmp_path / "old")
    for number in (1, 2):
        add(table, range(number, number + 1))
    lag, position = lag_of(table), at(table, 1)
    assert lag.look(position, 1).behind == 2
    shutil.rmtree(table)
    shutil.copytree(tmp_path / "old", table)
    add(table, range(4), 4)
    assert [lag.look(position, now_ms).behind for now_ms in (2, 3)] == [4, 4]


def test_a_log_that_was_cleaned_before_the_job_had_read_it_is_told(tmp_path: Path) -> None:
    table = tmp_path / "t"
    for number in range(4):
        add(table, range(number, number + 1))
    DeltaTable(str(table)).create_checkpoint()
    (table / "_delta_log" / f"{1:020}.json").unlink()
    assert "version 1 of the table is wanted" in lag_of(table).look(at(table, 1), 1).said


def test_until_the_job_has_begun_it_is_not_known_how_far_behind_it_is(tmp_path: Path) -> None:
    add(tmp_path / "t", range(1))
    state = lag_of(tmp_path / "t").look(None, 1000)
    assert state == SourceState(str(tmp_path / "t"), asked_at_ms=1000, unit="files")


def test_positions_of_other_tables_and_of_other_kinds_of_sources_are_not_read(tmp_path: Path) -> None:
    add(tmp_path / "t", range(1))
    lag = lag_of(tmp_path / "t")
    assert lag.reads(at(tmp_path / "t", 1))
    other = DeltaPosition("another", 1).to_json()
    assert not any(map(lag.reads, [None, 17, "x", {"logOffset": 3}, {"orders": {"0": 4}}, other]))


def test_a_source_keeps_nothing_of_the_tables_files_and_no_secret_to_be_asked_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAKE_SECRET", "hunter2")
    add(tmp_path / "t", range(1))
    source = delta_source(str(tmp_path / "t"), storage_options_env={"AWS_SECRET_ACCESS_KEY": "LAKE_SECRET"})
    opened = CountedLog(tmp_path / "t").opened()
    lag = source.lag(opened.version, opened.metadata)
    assert lag.look(at(tmp_path / "t", 0), 1).behind == 1
    assert "hunter2" not in repr(lag.state) + repr(source)


@pytest.mark.parametrize(
    ("text", "kept_s"),
    [
        ("interval 30 days", 30 * DAY_S),
        ("INTERVAL 1 DAY", DAY_S),
        ("2 weeks", 14 * DAY_S),
        ("interval 1 day 12 hours", 1.5 * DAY_S),
        ("interval 90 seconds", 90.0),
        ("interval 1 month", -1.0),
        ("interval a day", -1.0),
        ("interval 3", -1.0),
        ("", -1.0),
    ],
)
def test_the_time_for_which_a_log_is_kept_is_read_or_not_told(text: str, kept_s: float) -> None:
    assert log_kept_s({"delta.logRetentionDuration": text}) == kept_s
    assert log_kept_s({"delta.logRetentionDuration": text, "delta.enableExpiredLogCleanup": "false"}) == -1.0


def test_a_table_that_says_nothing_keeps_its_log_for_thirty_days() -> None:
    assert log_kept_s({}) == 30 * DAY_S
