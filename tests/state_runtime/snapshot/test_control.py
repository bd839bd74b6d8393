"""Requests to a running job and their answers."""

from __future__ import annotations

import pytest
from model import CountingIds, DictStore, FakeClock

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.snapshot.control import (
    Answer,
    ControlAnswer,
    ControlRequest,
    answer,
    asked_to_stop,
    new_requests,
    open_requests,
    pending_stop,
    read_answer,
    request_savepoint,
    request_stop,
    savepoint_request,
)
from state_runtime.snapshot.savepoint_record import SavepointThen


def ask(root: DictStore, term: int, name: str, clock: FakeClock, ids: CountingIds, then: SavepointThen = "continue") -> ControlRequest:  # fmt: skip
    clock.advance_s(1)
    return request_savepoint(root, term, name, clock=clock, ids=ids, then=then, tags=("t",), note="why")


def test_a_run_hears_each_request_once_in_order_and_only_its_own(clock: FakeClock, ids: CountingIds) -> None:
    store = DictStore()
    root = store.child("job")
    assert isinstance(root, DictStore)
    ids.count = 100
    first = ask(root, 7, "late-id", clock, ids)
    ids.count = 1
    second = ask(root, 7, "early-id", clock, ids)
    ask(root, 8, "another", clock, ids)
    request_stop(store, "job", 7, clock=clock, ids=ids)
    heard = new_requests(root, 7, ())
    assert [r.action for r in heard.values() if r is not None] == ["savepoint", "savepoint", "stop"]
    assert list(heard.values())[:2] == [first, second]
    assert new_requests(root, 7, set(heard)) == {}


def test_an_answered_request_is_not_heard_again_and_the_first_answer_stands(clock: FakeClock, ids: CountingIds) -> None:
    """Two runs may answer: the one that was asked and the one that found it void."""
    root = DictStore()
    request = ask(root, 7, "a", clock, ids)
    assert read_answer(root, request) is None
    accepted = ControlAnswer(request.request_id, "accepted", 5, snapshot_id=3)
    answer(root, request, accepted)
    answer(root, request, ControlAnswer(request.request_id, "void", 6))
    assert read_answer(root, request) == accepted
    assert new_requests(root, 7, ()) == {}
    assert open_requests(root, before_term=99) == []


def test_a_request_to_a_run_that_is_over_is_void(clock: FakeClock, ids: CountingIds) -> None:
    root = DictStore()
    old = ask(root, 6, "a", clock, ids)
    current = ask(root, 7, "b", clock, ids)
    root.put("control/notes.txt", b"")
    assert open_requests(root, before_term=7) == [old]
    assert list(new_requests(root, 7, ()).values()) == [current]


def test_a_damaged_request_does_not_keep_the_others_from_being_heard(clock: FakeClock, ids: CountingIds) -> None:
    root = DictStore()
    broken = ask(root, 7, "a", clock, ids)
    path = f"control/{7:020d}-savepoint-{broken.request_id}.json"
    root.put(path, root.objects[path][:-4])
    whole = ask(root, 7, "b", clock, ids)
    heard = new_requests(root, 7, ())
    assert list(heard.values()) == [None, whole]


@pytest.mark.parametrize(
    ("then", "given", "stays_stopped"),
    [
        ("continue", None, False),
        ("continue", "accepted", False),
        ("stop", None, True),
        ("stop", "accepted", True),
        ("drain", "accepted", True),
        ("stop", "refused", False),
        ("drain", "void", False),
    ],
)
def test_a_run_that_dies_after_it_was_asked_to_end_is_not_wanted_back(
    then: SavepointThen, given: Answer | None, stays_stopped: bool, clock: FakeClock, ids: CountingIds
) -> None:
    """As with a plain stop: bringing it back would undo what a person asked for. A refused request asked for nothing."""
    root = DictStore()
    request = ask(root, 7, "a", clock, ids, then)
    if given is not None:
        answer(root, request, ControlAnswer(request.request_id, given, 5))
    assert asked_to_stop(root, 7) == stays_stopped
    assert not asked_to_stop(root, 8)
    assert pending_stop(root, 7) is None


def test_a_request_that_is_removed_while_requests_are_looked_for_is_no_error(
    clock: FakeClock, ids: CountingIds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends tidies up: what was listed before may be gone."""
    store = DictStore()
    root = store.child("job")
    assert isinstance(root, DictStore)
    request_stop(store, "job", 7, clock=clock, ids=ids)
    gone = ["-stop-", ask(root, 7, "a", clock, ids).request_id]
    left = ask(root, 7, "b", clock, ids, "stop")
    read = root.read

    def removed(path: str, bytes_max: int) -> bytes:
        if any(name in path for name in gone):
            raise FileNotFoundError(path)
        return read(path, bytes_max)

    monkeypatch.setattr(root, "read", removed)
    assert pending_stop(root, 7) is None
    assert savepoint_request(root, 7, "a") is None
    assert savepoint_request(root, 7, "b") == left
    assert asked_to_stop(root, 7)


def test_nothing_is_asked_under_a_name_that_cannot_be_one(clock: FakeClock, ids: CountingIds) -> None:
    root = DictStore()
    with pytest.raises(InvalidConfiguration):
        ask(root, 7, "../escape", clock, ids)
    assert root.objects == {}


def test_a_savepoint_that_cannot_have_its_name_is_not_even_asked_for() -> None:
    """The message is the person's who typed it, and no run has to answer."""
    store = DictStore()
    with pytest.raises(InvalidConfiguration, match="savepoint name 'Bad Name' must be 1 to"):
        request_savepoint(store, 1, "Bad Name", clock=FakeClock(), ids=CountingIds())
    assert not store.objects
