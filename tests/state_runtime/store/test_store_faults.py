"""Creates with a lost, late or strange answer: what `FsspecStore` makes of them."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from fake_fs import FakeFs
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from state_runtime.base.errors import OutcomeUnknown, StoreNotCapable, StoreUnavailable
from state_runtime.store import Created, FsspecStore


def store_on(fs: FakeFs) -> FsspecStore:
    return FsspecStore(fs, "/bucket", "fake://bucket", retry_wait_max_s=0.0)


def raising(operation: str, error: Exception, times: int = 1) -> Callable[[str, str], None]:
    """A fault that hits the first `times` calls of an operation."""
    left = [times]

    def fault(called: str, path: str) -> None:
        if called == operation and left[0] > 0:
            left[0] -= 1
            raise error

    return fault


LOST_ANSWERS = [
    OSError(errno.EBUSY, "SlowDown"),
    OSError(errno.EREMOTEIO, "InternalError"),
    OSError(errno.EIO, "ConditionalRequestConflict"),
    TimeoutError("read timed out"),
    ConnectionResetError("reset by peer"),
]


@pytest.mark.parametrize("error", LOST_ANSWERS, ids=repr)
def test_a_create_whose_answer_was_lost_is_recognised_as_mine(error: OSError) -> None:
    """The object was stored before the connection broke; calling it lost would fence a healthy run."""
    fs = FakeFs()
    fs.after = raising("create", error)
    assert store_on(fs).create("a", b"mine") is Created.MINE
    assert fs.objects == {"/bucket/a": b"mine"}


@pytest.mark.parametrize("error", LOST_ANSWERS, ids=repr)
def test_a_create_that_failed_before_storing_is_repeated(error: OSError) -> None:
    """Nothing landed, nobody else was there: the same bytes are sent again."""
    fs = FakeFs()
    fs.before = raising("create", error, times=3)
    assert store_on(fs).create("a", b"mine") is Created.MINE


@pytest.mark.parametrize("error", [*LOST_ANSWERS, OSError(errno.EINVAL, "412 without a Condition element")], ids=repr)
def test_a_refusal_in_an_unknown_shape_is_lost(error: OSError) -> None:
    """Old S3 imitations answer 412 so that s3fs raises EINVAL; the read-back finds the other writer."""
    fs = FakeFs({"/bucket/a": b"theirs"})
    fs.before = raising("create", error)
    assert store_on(fs).create("a", b"mine") is Created.LOST
    assert fs.objects == {"/bucket/a": b"theirs"}


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_store_without_conditional_writes_is_not_capable(number: int) -> None:
    """501: to run on would mean that two runs can both win."""
    fs = FakeFs()
    fs.before = raising("create", OSError(number, "NotImplemented"))
    with pytest.raises(StoreNotCapable, match="use a store that has them"):
        store_on(fs).create("a", b"mine")
    assert fs.objects == {}


@pytest.mark.parametrize("landed", [True, False])
def test_a_read_back_that_fails_leaves_the_outcome_unknown(landed: bool) -> None:
    """Unknown is its own answer: nothing is cleaned up after it, and it is neither mine nor lost."""
    fs = FakeFs()
    if landed:
        fs.after = raising("create", TimeoutError("late"))
    create_fault = raising("create", TimeoutError("late")) if not landed else lambda operation, path: None
    read_fault = raising("read", OSError(errno.EBUSY, "SlowDown"), times=100)

    def before(operation: str, path: str) -> None:
        create_fault(operation, path)
        read_fault(operation, path)

    fs.before = before
    with pytest.raises(OutcomeUnknown, match="Nothing was cleaned up; start again"):
        store_on(fs).create("a", b"mine")
    assert ("/bucket/a" in fs.objects) == landed


def test_a_create_that_keeps_failing_is_unknown_and_bounded() -> None:
    """Retries have an end, and the end is not a false certainty."""
    fs = FakeFs()
    calls: list[str] = []

    def fault(operation: str, path: str) -> None:
        calls.append(operation)
        if operation == "create":
            raise TimeoutError("late")

    fs.before = fault
    with pytest.raises(OutcomeUnknown):
        store_on(fs).create("a", b"mine")
    assert calls.count("create") <= 10


def test_a_name_that_was_taken_and_collected_meanwhile_is_lost() -> None:
    """Refused, but gone at the read-back: garbage collection took an old name, so this writer slept too long."""
    fs = FakeFs({"/bucket/a": b"theirs"})

    def collect(operation: str, path: str) -> None:
        if operation == "read":
            fs.objects.pop("/bucket/a", None)

    fs.before = collect
    assert store_on(fs).create("a", b"mine") is Created.LOST
    assert fs.objects == {}


def test_passing_faults_of_reads_and_writes_are_repeated() -> None:
    """One SlowDown must not end an epoch."""
    fs = FakeFs({"/bucket/a": b"123"})
    for operation, call in {
        "read": lambda s: s.read("a", 10),
        "info": lambda s: s.size("a"),
        "put": lambda s: s.put("b", b"1"),
        "list": lambda s: s.list_names("x"),
        "delete": lambda s: s.delete("b"),
        "copy": lambda s: s.move("a", "c"),
    }.items():
        fs.before = raising(operation, OSError(errno.EBUSY, "SlowDown"), times=2)
        call(store_on(fs))
    assert fs.objects == {"/bucket/c": b"123"}


def test_lasting_faults_are_unavailable_with_what_where_and_next() -> None:
    """The message is what an operator sees at night."""
    fs = FakeFs({"/bucket/a": b"123"})
    fs.before = raising("read", OSError(errno.EBUSY, "SlowDown"), times=100)
    with pytest.raises(StoreUnavailable, match=r"cannot read a in fake://bucket: .*SlowDown.*Check the network"):
        store_on(fs).read("a", 10)


def test_a_failing_listing_is_an_error_and_never_empty() -> None:
    """An empty listing of snapshots would mean "start from nothing"."""
    fs = FakeFs({"/bucket/d/a": b"1"})
    fs.before = raising("list", OSError(errno.EREMOTEIO, "InternalError"), times=100)
    with pytest.raises(StoreUnavailable):
        store_on(fs).list_names("d")


class NotAnOSError(Exception):
    """What botocore raises for a refused connection, missing credentials, a parse error."""


@pytest.mark.parametrize("stored", [True, False])
def test_a_client_library_error_that_is_no_oserror_is_handled_like_one(stored: bool) -> None:
    """botocore's connection and credential errors are plain exceptions; they must not escape untyped."""
    fs = FakeFs()
    if stored:
        fs.after = raising("create", NotAnOSError("connection was closed"))
    else:
        fs.before = raising("create", NotAnOSError("connection was closed"))
    assert store_on(fs).create("a", b"mine") is Created.MINE


faults = st.lists(st.sampled_from(["ok", "before", "after", "read-fails"]), max_size=8)


@given(faults=faults, taken=st.booleans())
@examples(200)
def test_mine_means_stored_and_lost_means_taken(faults: list[str], taken: bool) -> None:
    """Under any sequence of faults an answer is true, or it is "unknown"."""
    fs = FakeFs({"/bucket/a": b"theirs"} if taken else {})
    script = iter(faults)
    current = ["ok"]

    def before(operation: str, path: str) -> None:
        if operation == "create":
            current[0] = next(script, "ok")
            if current[0] == "before":
                raise TimeoutError("before")
        if operation == "read" and current[0] == "read-fails":
            raise TimeoutError("read")

    def after(operation: str, path: str) -> None:
        if current[0] in ("after", "read-fails"):
            raise TimeoutError("after")

    fs.before, fs.after = before, after
    try:
        created = store_on(fs).create("a", b"mine")
    except OutcomeUnknown:
        return
    assert fs.objects["/bucket/a"] == (b"mine" if created is Created.MINE else b"theirs")
    assert (created is Created.LOST) == taken
