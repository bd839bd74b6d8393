"""Laws of the replay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.flights import replay

ROOT = Path(__file__).parents[2]


def _never(seconds: float) -> bool:
    raise AssertionError("a replay at once must not wait")


def _all(year: pa.Table, inbox: Path, days_per_file: int = 1) -> list[replay.Delivery]:
    return list(replay.replay(year, inbox, days_per_s=None, days_per_file=days_per_file, wait=_never))


def _read(inbox: Path) -> pa.Table:
    """The inbox as Spark's file source would read it: by modification time in milliseconds."""
    files = [path for path in inbox.iterdir() if not path.name.startswith((".", "_"))]
    times = [path.stat().st_mtime_ns // 1_000_000 for path in files]
    assert len(set(times)) == len(times), "two files of the same millisecond have no order"
    ordered = sorted(files, key=lambda path: path.stat().st_mtime_ns)
    return pa.concat_tables(pa.parquet.read_table(path) for path in ordered)


def test_the_inbox_in_order_of_modification_time_is_the_year(year: pa.Table, tmp_path: Path) -> None:
    """Spark's file source knows no other order than this one, in milliseconds."""
    assert len(_all(year, tmp_path / "inbox")) == 365
    assert _read(tmp_path / "inbox").equals(year)


@given(delivered=st.integers(0, 336_776), days_per_file=st.integers(1, 400))
@settings(max_examples=50, deadline=None)
def test_a_plan_covers_exactly_what_is_not_delivered(year: pa.Table, delivered: int, days_per_file: int) -> None:
    """From any place and with any size: no gap, no overlap, no empty file."""
    expected = delivered + 1
    for delivery in replay.plan(year, delivered, days_per_file):
        assert delivery.first == expected
        assert delivery.last >= delivery.first
        expected = delivery.last + 1
    assert expected == 336_777


def test_a_replay_stopped_anywhere_goes_on_without_a_gap_or_a_repeat(year: pa.Table, tmp_path: Path) -> None:
    """The inbox is the only memory; a change of the file size in between does not matter."""
    stopped = replay.replay(year, tmp_path, days_per_s=None, days_per_file=3, wait=_never)
    assert len(list(islice(stopped, 2))) == 2
    (tmp_path / ".arriving-flights-0000001-0000002.parquet").write_bytes(b"half a file of a killed replay")
    _all(year, tmp_path, days_per_file=7)
    assert _read(tmp_path).equals(year)
    assert not list(tmp_path.glob(".*")), "what a killed replay left behind is gone"
    assert _all(year, tmp_path) == [], "a finished replay has nothing to deliver"


def test_a_replay_of_some_days_ends_there_and_the_next_one_delivers_the_rest(year: pa.Table, tmp_path: Path) -> None:
    """What the check holds back for later must arrive later, whole."""
    first = list(replay.replay(year, tmp_path, days_per_s=None, days_per_file=4, days=10, wait=_never))
    assert [delivery.due_days for delivery in first] == [4, 8, 10]
    assert year["flight_date"][first[-1].last - 1].as_py().isoformat() == "2013-01-10"
    _all(year, tmp_path, days_per_file=100)
    assert _read(tmp_path).equals(year)


def test_a_gap_in_the_inbox_is_refused(year: pa.Table, tmp_path: Path) -> None:
    """Delivering behind a gap would lose flights silently."""
    list(islice(replay.replay(year, tmp_path, days_per_s=None, wait=_never), 3))
    sorted(tmp_path.iterdir())[1].unlink()
    with pytest.raises(replay.InboxNotContiguous, match="empty it"):
        _all(year, tmp_path)


def test_a_file_in_the_future_does_not_break_the_order(year: pa.Table, tmp_path: Path) -> None:
    """A clock that was set back between two replays must not put new files before old ones."""
    first = next(replay.replay(year, tmp_path, days_per_s=None, wait=_never))
    future_ns = time.time_ns() + 3_600_000_000_000
    os.utime(tmp_path / first.name, ns=(future_ns, future_ns))
    list(islice(replay.replay(year, tmp_path, days_per_s=None, wait=_never), 5))
    assert _read(tmp_path)["flight_id"].to_pylist() == list(range(1, _read(tmp_path).num_rows + 1))


def test_files_are_due_at_the_chosen_speed_and_none_is_skipped_when_late(year: pa.Table, tmp_path: Path) -> None:
    """With a clock of the test's own: 2 days a second and one slow moment."""
    now, waits = [100.0], list[float]()

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        now[0] += seconds
        if len(waits) == 3:
            now[0] += 5.0  # this delivery takes as long as ten files
        return False

    arrived = islice(replay.replay(year, tmp_path, days_per_s=2.0, wait=wait, clock=lambda: now[0]), 6)
    assert [delivery.due_days for delivery in arrived] == [1, 2, 3, 4, 5, 6]
    assert waits == [0.5, 0.5, 0.5, 0.0, 0.0, 0.0]


def test_a_stop_request_ends_the_replay_before_the_next_file(year: pa.Table, tmp_path: Path) -> None:
    """What Ctrl-C in the demo relies on."""
    assert list(replay.replay(year, tmp_path, days_per_s=1.0, wait=lambda seconds: True)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_killed_replay_process_leaves_whole_files_and_resumes(
    year: pa.Table, year_path: Path, tmp_path: Path
) -> None:
    """A real SIGKILL in the middle of the delivery."""
    inbox = tmp_path / "inbox"
    command = [
        sys.executable,
        "-m",
        "examples.flights.replay",
        "--inbox",
        str(inbox),
        "--work",
        str(year_path.parent),
    ]
    process = subprocess.Popen([*command, "--all"], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        give_up = time.monotonic() + 60
        while not inbox.is_dir() or replay.delivered_flights(inbox) < 50_000:
            assert process.poll() is None, "the replay ended before it was killed"
            assert time.monotonic() < give_up, "no 50,000 flights delivered within 60 s"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    delivered = replay.delivered_flights(inbox)
    assert _read(inbox)["flight_id"].to_pylist() == list(range(1, delivered + 1))
    subprocess.run([*command, "--all"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=60)
    assert _read(inbox).equals(year)


@pytest.mark.parametrize(
    "arguments", [["--speed", "0"], ["--speed", "-1"], ["--days-per-file", "0"], ["--days", "366"]]
)
def test_nonsense_arguments_are_refused_before_anything_is_written(arguments: list[str], tmp_path: Path) -> None:
    """Usage errors end with code 2, like every command line's."""
    with pytest.raises(SystemExit) as ended:
        replay.main(["--inbox", str(tmp_path / "inbox"), *arguments])
    assert ended.value.code == 2
    assert not (tmp_path / "inbox").exists()
