"""What a run shows while it runs, and how signals stop it."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Iterator

import pytest
from job_roots import FakeClock, JobRoot
from rich.console import Console

from state_runtime.base.progress import Progress
from stillstate.orchestration.running.run import ONE_REQUEST_S, RestoreWatch, _leave, _stop_on_signals
from stillstate.orchestration.show.runs import JsonLines, LiveLine, PlainLines, progress_line, progress_view
from stillstate.orchestration.text import bytes_text, count_text, duration_text, redacted_location, time_text


def epoch(number: int) -> Progress:
    return Progress(
        snapshot_id=number, input_rows=1000, rows_per_s=5120.4, state_rows=3801, checkpoint_ms=9.4, log_bytes=1_300_000
    )


def test_the_line_has_what_people_watch() -> None:
    assert progress_line("flights", epoch(12)) == (
        "flights  epoch 12  rows 1,000  5,120/s  state 3,801  checkpoint 9 ms  log 1.2 MiB"
    )


def test_plain_lines_are_at_most_one_a_second_and_the_last_is_kept(clock: FakeClock) -> None:
    out = io.StringIO()
    view = PlainLines(Console(file=out), "flights", clock)
    for number in range(1, 12):
        view.show(epoch(number))
        clock.advance_s(0.3)
    view.close()
    lines = out.getvalue().splitlines()
    assert [line.split()[2] for line in lines] == ["1", "5", "9", "11"]
    assert "(+3 epochs between)" in lines[1]
    assert "(+1 epochs between)" in lines[3]


def test_json_lines_are_one_object_per_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    view = progress_view("flights", as_json=True)
    assert isinstance(view, JsonLines)
    view.show(epoch(1))
    view.show(epoch(2))
    view.close()
    assert [json.loads(line)["snapshot_id"] for line in capsys.readouterr().out.splitlines()] == [1, 2]


def test_a_terminal_gets_one_line_that_is_rewritten() -> None:
    out = io.StringIO()
    view = progress_view("flights", console=Console(file=out, force_terminal=True, width=120))
    assert isinstance(view, LiveLine)
    view.show(epoch(1))
    view.show(epoch(2))
    view.close()
    assert "epoch 2" in out.getvalue()
    assert isinstance(progress_view("flights", console=Console(file=io.StringIO())), PlainLines)


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture
def with_a_terminal() -> Iterator[None]:
    """`nohup` has SIGHUP ignored, also in tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("with_a_terminal")
@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_and_what_comes_with_it_ask_and_a_later_one_ends(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal to a whole group reaches a driver twice, by its supervisor too, and `timeout` sends two: the second killed
    the run in the middle of the epoch that the first let it end."""
    ended: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", ended.append)
    monkeypatch.setattr(os, "isatty", lambda descriptor: False)  # ours may be one, and stays
    clock = FakeClock()
    before = {n: signal.getsignal(n) for n in SIGNALS}
    with _stop_on_signals(clock) as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.wait(60)
        for also in SIGNALS:
            os.kill(os.getpid(), also)
        assert ended == []
        clock.advance_s(ONE_REQUEST_S)
        os.kill(os.getpid(), number)
        assert ended == [number], "one that hangs ends by the next signal, as if nobody handled it"
        assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    assert {n: signal.getsignal(n) for n in before} == before


def test_a_run_that_is_to_outlive_its_terminal_does() -> None:
    """`nohup` ignores SIGHUP for what it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_is_written_to_no_more() -> None:
    """A write to it fails, and what showed the progress of the last epoch would fail the run."""
    ours, theirs = os.openpty()
    os.close(ours)
    with pytest.raises(OSError, match="Input/output error"):
        os.write(theirs, b"epoch 1")
    _leave([theirs])
    assert os.write(theirs, b"epoch 1") == 7
    os.close(theirs)


def test_numbers_as_people_read_them() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1024, 5 << 30)] == ["0 B", "1023 B", "1.0 KiB", "5.0 GiB"]
    assert [duration_text(s) for s in (0.04, 59.9, 61, 7260, 90_000)] == [
        "0.0 s",
        "59.9 s",
        "1 min 1 s",
        "2 h 1 min",
        "1 d 1 h",
    ]
    assert [count_text(n) for n in (0, 1234567, 2.55, 12.7)] == ["0", "1,234,567", "2.5", "13"]
    assert time_text(0) == "1970-01-01 00:00:00Z"
    assert time_text(253_402_300_799_999) == "9999-12-31 23:59:59Z"
    assert time_text(253_402_300_800_000) == "253402300800000 ms", "a damaged root may hold any number"
    assert time_text(-62_135_596_800_001) == "-62135596800001 ms"


def test_locations_lose_credentials_and_parameters() -> None:
    assert redacted_location("s3://key:secret@bucket:9000/a?token=x#y") == "s3://bucket:9000/a"
    assert redacted_location("/data/state") == "/data/state"


class Shown:
    """A view that keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def restoring(self, done: int, total: int) -> None:
        self.steps.append((done, total))

    def show(self, progress: Progress) -> None:
        raise AssertionError("no epoch has ended")

    def close(self) -> None:
        raise AssertionError("the run has not ended")


def test_a_restore_is_shown_step_by_step_from_this_run_s_heartbeats(flights: JobRoot) -> None:
    """A heartbeat of the run before, the same number again and a store that stutters are passed over."""
    flights.pid = 1
    flights.start()
    flights.beat(restoring=(7, 8))
    view = Shown()

    def heartbeats() -> Iterator[bool]:
        yield False  # the look at that of the old run
        flights.pid = 2
        for seen in ((0, 8), (0, 8), (5, 8), (0, 0), (8, 8)):
            flights.beat(restoring=seen)
            yield False
        yield True

    script = heartbeats()
    RestoreWatch(flights.catalog, view.restoring, lambda _: next(script), pid=2).follow()
    assert view.steps == [(0, 8), (5, 8), (8, 8)]


def test_a_log_file_has_lines_of_the_restore_before_the_first_epoch() -> None:
    out = io.StringIO()
    view = PlainLines(Console(file=out, width=200), "flights")
    view.restoring(3, 8)
    view.show(Progress(snapshot_id=5))
    assert out.getvalue().splitlines()[0] == "flights  restoring  3 of 8 shards"
    assert "epoch 5" in out.getvalue()


def test_the_line_says_where_shards_came_back_from_and_that_a_checkpoint_comes_later() -> None:
    line = progress_line(
        "flights", Progress(snapshot_id=3, epoch=9, local_restores=5, stale_restores=1, primary_restores=2)
    )
    assert "epoch 9" in line
    assert "checkpoint later" in line
    assert line.endswith("restored 5 local, 1 stale local, 2 store")
