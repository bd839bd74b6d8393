"""How far a job is behind a folder: what is listed and not read, by the folder and Spark's log of seen files alone."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model import FakeClock

from state_runtime.sources import files_lag, files_listed
from state_runtime.sources.files_lag import FilesLag, folder_lags
from state_runtime.sources.files_listed import kept_ms_of, listed, local_folder

DAY_MS = 86_400_000
NAMES = ["a.json", "b 1.json", "c%20.json", "d=é.json", "e.json", "f.json"]


class SeenLog:
    """Spark's log: in each entry some files, with the times of their writing."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.entries = folder, list[dict[str, int]]()

    def add(self, names: Iterable[str]) -> int:
        """Let the job read some files; returns its position."""
        modified = {name: os.stat(self.folder / name).st_mtime_ns // 1_000_000 for name in names}
        self.entries.append(modified)
        return len(self.entries) - 1

    def lines(self, after: int, until: int) -> list[str]:
        return [
            json.dumps({"path": f"file://{quote(str(self.folder / name))}", "timestamp": at_ms, "batchId": number})
            for number, entry in enumerate(self.entries)
            for name, at_ms in entry.items()
            if after < number <= until
        ]


def at(position: int) -> Any:
    return None if position < 0 else {"logOffset": position}


def write(folder: Path, name: str, size: int, at_ms: int) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"x" * size)
    os.utime(folder / name, ns=(at_ms * 1_000_000, at_ms * 1_000_000))


steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from(NAMES), st.integers(0, 9)),
        st.tuples(st.just("remove"), st.sampled_from(NAMES), st.just(0)),
        st.tuples(st.just("read"), st.just(""), st.integers(1, 3)),
        st.tuples(st.just("look"), st.just(""), st.integers(0, 40)),
        st.tuples(st.just("restart"), st.just(""), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=100)
@given(steps)
def test_what_waits_is_what_a_fresh_look_at_folder_and_log_says(steps: Sequence[tuple[str, str, int]]) -> None:
    """Over files that come and go, batches, restarts and looks at any time. A number may be as old as the last listing,
    but for what the job has read since. A name that is written again after it was read is not read again by Spark."""
    with tempfile.TemporaryDirectory() as place:
        folder, clock = Path(place) / "in", FakeClock()
        folder.mkdir()
        log, position, now_ms = SeenLog(folder), -1, 1_700_000_000_000
        lag, seen, there = None, set[str](), dict[str, tuple[int, int]]()
        due_s = 0.0
        for step, name, number in steps:
            now_ms += 1000
            if step == "write" and name not in seen:
                write(folder, name, number, now_ms)
            elif step == "remove":
                (folder / name).unlink(missing_ok=True)
            elif step == "read" and (batch := [n for n in sorted(os.listdir(folder)) if n not in seen][:number]):
                position, seen = log.add(batch), seen | set(batch)
            elif step == "restart":
                lag = None
            elif step == "look":
                clock.advance_s(number)
                if lag is None:
                    lag, due_s = FilesLag(str(folder), kept_ms_of({}), log.lines, clock), clock.monotonic_s()
                if clock.monotonic_s() >= due_s:
                    there = {n: (os.stat(folder / n).st_size, _ms(folder / n)) for n in os.listdir(folder)}
                    due_s = clock.monotonic_s() + 30
                state = lag.look(at(position), now_ms)
                waiting = {n: of for n, of in there.items() if n not in seen}
                assert state.behind == len(waiting)
                assert state.behind_bytes == sum(size for size, _ in waiting.values())
                assert state.oldest_unread_ms == min((time_ms for _, time_ms in waiting.values()), default=0)
                assert (state.unit, state.retention_left_s, state.away_since_ms) == ("files", -1.0, 0)


def _ms(path: Path) -> int:
    return path.stat().st_mtime_ns // 1_000_000


def test_what_came_and_was_read_between_two_listings_does_not_wait_at_the_next(tmp_path: Path) -> None:
    write(tmp_path, "a", 1, 1000)
    log, clock = SeenLog(tmp_path), FakeClock()
    lag = FilesLag(str(tmp_path), None, log.lines, clock)
    first = at(log.add(["a"]))
    assert lag.look(first, 1).behind == 0
    write(tmp_path, "b", 1, 2000)
    second = at(log.add(["b"]))
    clock.advance_s(5)
    assert lag.look(second, 2).behind == 0
    clock.advance_s(25)
    assert lag.look(second, 3).behind == 0


def test_names_that_are_gone_are_not_kept(tmp_path: Path) -> None:
    """The log has all that the job has ever read."""
    names = [f"{number}" for number in range(50)]
    for name in names:
        write(tmp_path, name, 1, 1000)
    log, clock = SeenLog(tmp_path), FakeClock()
    position = at(log.add(names))
    for name in names[2:]:
        (tmp_path / name).unlink()
    lag = FilesLag(str(tmp_path), None, log.lines, clock)
    assert lag.look(position, 1).behind == 0
    assert lag._read == {"0", "1"}
    (tmp_path / "0").unlink()
    clock.advance_s(30)
    lag.look(position, 2)
    assert lag._read == {"1"}


def test_a_folder_is_listed_at_most_every_half_minute_and_for_a_tenth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, listings, takes_s = FakeClock(), list[float](), 1.0
    began_s = clock.monotonic_s()

    def slow(folder: str) -> Any:
        listings.append(clock.monotonic_s() - began_s)
        clock.advance_s(takes_s)
        return {}

    monkeypatch.setattr(files_lag, "listed", slow)
    lag = FilesLag(str(tmp_path), None, lambda after, until: [], clock)
    for _ in range(20):
        lag.look(None, 0)
        clock.advance_s(5)
    assert listings == [0.0, 31.0, 62.0, 93.0]
    takes_s = 20.0
    listings.clear()
    for _ in range(100):
        lag.look(None, 0)
        clock.advance_s(5)
    assert [b - a for a, b in pairwise(listings)] == pytest.approx([220.0, 220.0], abs=5)


def test_of_too_many_names_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        write(tmp_path, f"{number}.json", 1, 0)
    assert listed(str(tmp_path), 5) is not None
    assert listed(str(tmp_path), 4) is None
    monkeypatch.setattr(files_lag, "listed", lambda folder: None)
    state = FilesLag(str(tmp_path), None, lambda after, until: [], FakeClock()).look(None, 7)
    assert (state.behind, state.behind_bytes, state.oldest_unread_ms, state.asked_at_ms) == (-1, -1, 0, 7)


def test_a_file_that_spark_will_never_read_because_it_is_too_old_does_not_wait(tmp_path: Path) -> None:
    """Spark passes over what is a week older than the newest that it has read."""
    write(tmp_path, "new", 1, 30 * DAY_MS)
    write(tmp_path, "in time", 2, 23 * DAY_MS)
    write(tmp_path, "too old", 4, 23 * DAY_MS - 1)
    log = SeenLog(tmp_path)
    position = at(log.add(["new"]))
    options = {"latestfirst": "true", "maxfilespertrigger": "1"}
    assert FilesLag(str(tmp_path), kept_ms_of({}), log.lines, FakeClock()).look(position, 0).behind_bytes == 2
    assert FilesLag(str(tmp_path), kept_ms_of(options), log.lines, FakeClock()).look(position, 0).behind_bytes == 6


def test_a_folder_that_is_away_is_told_since_when_and_until_it_is_back(tmp_path: Path) -> None:
    write(tmp_path / "in", "a", 1, 1000)
    clock = FakeClock()
    lag = FilesLag(str(tmp_path / "in"), None, lambda after, until: [], clock)
    assert lag.look(None, 1000).behind == 1
    shutil.move(tmp_path / "in", tmp_path / "gone")
    for now_ms in (2000, 3000):
        clock.advance_s(30)
        away = lag.look(None, now_ms)
    assert (away.away_since_ms, away.asked_at_ms) == (2000, 1000)
    assert "cannot be listed: [Errno 2] No such file" in away.said
    shutil.move(tmp_path / "gone", tmp_path / "in")
    clock.advance_s(30)
    assert (lag.look(None, 9000).away_since_ms, lag.look(None, 9000).behind) == (0, 1)


@pytest.mark.parametrize(
    ("options", "folder"),
    [
        ({"path": "/data/in"}, "/data/in"),
        ({"path": "file:///data/a%20b/", "maxfilespertrigger": "3", "header": "true"}, "/data/a b"),
        ({"path": "/data/../data/in"}, "/data/in"),
        ({}, None),
        ({"path": "s3a://bucket/in"}, None),
        ({"path": "file://host/in"}, None),
        ({"path": "/data/*/in"}, None),
        ({"path": "/data/in", "recursivefilelookup": "true"}, None),
        ({"path": "/data/in", "pathglobfilter": "*.json"}, None),
        ({"path": "/data/in", "maxfileage": "1h"}, None),
        ({"path": "/data/in", "cleansource": "archive"}, None),
    ],
)
def test_only_folders_are_told_of_of_which_it_is_certain_what_spark_takes(
    options: Mapping[str, str], folder: str | None
) -> None:
    assert local_folder(options, lambda path: "file") == folder
    lags = folder_lags([options, {}], lambda path: "file", lambda place: lambda a, b: [], FakeClock())
    assert [lag is not None for lag in lags] == [folder is not None, False]


def test_a_path_without_a_scheme_is_one_of_this_machine_only_if_spark_takes_it_so() -> None:
    assert local_folder({"path": "/data/in"}, lambda path: "hdfs") is None
    assert local_folder({"path": "/data/in"}, lambda path: None) is None
    assert local_folder({"path": "file:/data/in"}, lambda path: None) == "/data/in"


def test_a_folder_with_a_name_that_is_no_text_is_not_told_of(tmp_path: Path) -> None:
    """Java has another one for it."""
    (tmp_path / "a").touch()
    assert listed(str(tmp_path)) is not None
    Path(os.fsdecode(bytes(tmp_path) + b"/b\xff")).touch()
    assert listed(str(tmp_path)) is None


def test_a_folder_that_is_not_told_of_is_looked_at_again_after_some_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_lag, "listed", lambda folder: None)
    clock = FakeClock()
    lag = FilesLag(str(tmp_path), None, lambda after, until: [], clock)
    write(tmp_path, "a", 1, 1000)
    assert lag.look(None, 1).behind == -1
    monkeypatch.undo()
    clock.advance_s(300)
    assert lag.look(None, 2).behind == -1
    clock.advance_s(30)
    assert lag.look(None, 3).behind == 1


def test_positions_of_other_kinds_of_sources_are_not_read(tmp_path: Path) -> None:
    lag = FilesLag(str(tmp_path), None, lambda after, until: [], FakeClock())
    assert lag.reads({"logOffset": 3})
    assert not any(map(lag.reads, [3, {}, {"logOffset": {"0": 3}}, {"logOffset": 3, "x": 1}, {"a": {"0": 4}}]))


def test_names_in_one_listing_are_bounded() -> None:
    assert files_listed.NAMES_MAX == 100_000
