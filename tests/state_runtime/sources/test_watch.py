"""The watch beside a run: it asks each source that the run reads, of whatever kind, and no other one."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from model import FakeClock

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.source_state import SourceState
from state_runtime.sources import watch as watch_module
from state_runtime.sources.source_lag import SourceLag, belonging
from state_runtime.sources.watch import SourceWatch, offsets_in, opened_lags, remember_opened


class Told:
    """A source that answers at once; its positions have its name."""

    def __init__(self, name: str) -> None:
        self.name, self.asked, self.closed = name, [], False  # type: ignore[var-annotated]
        self.was_asked = threading.Event()

    def reads(self, offset: Any) -> bool:
        return isinstance(offset, dict) and self.name in offset

    def look(self, offset: Any | None, now_ms: int) -> SourceState:
        self.asked.append(offset)
        self.was_asked.set()
        return SourceState(self.name, now_ms, behind=-1 if offset is None else 0)

    def close(self) -> None:
        self.closed = True


def watch_of(*lags: SourceLag) -> SourceWatch:
    watch = SourceWatch(lambda: lags, FakeClock())
    watch._lags = lags
    return watch


def test_what_is_no_json_is_no_position_and_keeps_its_place() -> None:
    assert offsets_in(['{"logOffset": 3}', None, "17", "-", "", {"a": 1}]) == [
        {"logOffset": 3}, None, 17, None, None, {"a": 1}
    ]  # fmt: skip


def test_a_source_that_the_run_does_not_read_is_not_told_of() -> None:
    """A process may have opened that of another job."""
    watch = watch_of(Told("a"), Told("b"))
    for unknown in ([], [None], [{"logOffset": 3}, None]):
        watch.look(unknown)
        assert [(state.name, state.behind) for state in watch.states] == [("a", -1), ("b", -1)], unknown
    watch.look([{"logOffset": 3}, {"a": 4}])
    assert [(state.name, state.behind) for state in watch.states] == [("a", 0)]
    watch.look([None, {"a": 4}])
    assert [state.name for state in watch.states] == ["a"], "what has not begun yet may be a source that tells nothing"
    watch.look([{"logOffset": 3}])
    assert watch.states == (), "all that the run reads is known, and neither of them is it"


def test_folders_are_matched_by_their_place_and_by_nothing_if_that_is_not_certain() -> None:
    """Their positions do not say of which folder they are."""
    table, first, second = Told("t"), Told("n"), Told("n")

    def told(folders: Sequence[SourceLag | None], offsets: Sequence[Any]) -> list[tuple[str, Any]]:
        watch = watch_of(table)
        watch._folders = folders
        for lag in (table, first, second):
            lag.asked.clear()
        watch.look(offsets)
        return [(name, at) for name, lag in (("t", table), ("1", first), ("2", second)) for at in lag.asked]

    assert told([second, None, first], [{"n": 1}, {"t": 5}, {"n": 2}]) == [
        ("t", {"t": 5}),
        ("1", {"n": 2}),
        ("2", {"n": 1}),
    ]
    assert told([first, second], [None, {"n": 2}]) == [("1", None), ("2", {"n": 2})], "the table is another job's"
    assert told([first, None], []) == [("t", None), ("1", None)]
    assert told([first, None], [{"t": 5}, {"n": 1}]) == [], "what Spark reads there is no folder"
    assert told([first, second], [{"n": 1}]) == []


def test_each_of_two_sources_of_one_place_has_its_own_position() -> None:
    """A job may read a table and its changes; one of them that another job has opened before has none left."""
    old, first, second = Told("a"), Told("a"), Told("a")
    assert belonging([old, first, second], [{"a": 1}, {"b": 7}, {"a": 2}]) == [(first, {"a": 1}), (second, {"a": 2})]
    assert belonging([old, second], [{"a": 2}]) == [(second, {"a": 2})]


def test_a_source_that_is_opened_again_is_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_OPENED", {})
    first, second = Told("a"), Told("b")
    for name, lag in (("a", first), ("b", second), ("a", first)):
        remember_opened(name, lambda lag=lag: lag)  # type: ignore[misc]
    assert opened_lags() == [second, first]


def test_the_thread_ends_with_the_run_and_closes_what_it_opened() -> None:
    lag = Told("a")
    watch = SourceWatch(lambda: [lag], FakeClock())
    begun = {"a": 4}
    watch.follow(lambda: None, "v1\n{}\n-\n" + json.dumps(begun))
    assert lag.was_asked.wait(30)
    watch.close()
    assert lag.closed
    assert lag.asked == [begun], "until the run has read something, it is where its snapshot is"
    assert [state.behind for state in watch.states] == [0]


def test_another_jobs_source_that_cannot_be_asked_any_more_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may run several jobs, and the variable with a secret of one be gone when the next one begins."""

    def gone() -> Any:
        raise InvalidConfiguration("the environment variable is not set")

    mine = Told("a")
    monkeypatch.setattr(watch_module, "_OPENED", {"other": gone, "mine": lambda: mine})
    assert opened_lags() == [mine]


def test_an_error_in_the_numbers_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Any:
        raise RuntimeError("a bug")

    lag = Told("a")
    watch = SourceWatch(lambda: [lag], FakeClock())
    watch.follow(broken, "")
    watch.close()
    assert "could not be asked" in caplog.text
