"""Create-if-absent between writers that know nothing of each other: who wins, and what an unknown outcome leaves."""

from __future__ import annotations

import pytest
from fake_fs import FakeFs

from state_runtime.base.errors import Fenced, OutcomeUnknown, StoreRefused, Unavailable
from state_runtime.base.limits import CLAIM_ATTEMPTS_MAX
from state_runtime.snapshot.create_once import Proposal, create_agreed, create_next, read_newest
from state_runtime.store.fsspec_store import FsspecStore


class Writer:
    """One writer of a series, with a connection of its own to the store that all of them share."""

    def __init__(self, name: str, objects: dict[str, bytes]) -> None:
        self.name = name
        self.fs = FakeFs(objects)
        self.store = FsspecStore(self.fs, "/store", "fake://store", retry_wait_max_s=0.0)
        self.proposed: list[int] = []

    def newest(self) -> int:
        return max((int(name) for name in self.store.list_names("series")), default=0)

    def propose(self) -> Proposal[tuple[int, str]]:
        number = self.newest() + 1
        self.proposed.append(number)
        return Proposal(f"series/{number}", self.name.encode(), (number, self.name))

    def create(self, attempts_max: int = CLAIM_ATTEMPTS_MAX) -> tuple[int, str]:
        return create_next(
            self.store, self.propose, contended=lambda: Fenced("too many writers"), attempts_max=attempts_max
        )


@pytest.fixture
def objects() -> dict[str, bytes]:
    return {}


@pytest.fixture
def one(objects: dict[str, bytes]) -> Writer:
    return Writer("one", objects)


@pytest.fixture
def other(objects: dict[str, bytes]) -> Writer:
    return Writer("other", objects)


def rival_before_each_create(mine: Writer, rival: Writer, times: int) -> None:
    """The rival takes the number that `mine` is about to create."""
    left = times

    def before(operation: str, path: str) -> None:
        nonlocal left
        if operation == "create" and left:
            left -= 1
            # Past the store: its writes are one at a time in a process, and this one is in the middle of one.
            rival.fs.objects[path] = rival.name.encode()

    mine.fs.before = before


def test_of_two_writers_of_one_number_one_has_it_and_the_other_gets_the_next(one: Writer, other: Writer) -> None:
    """The loser looks again: what it proposes next follows what the winner wrote."""
    rival_before_each_create(one, other, times=1)
    assert one.create() == (2, "one")
    assert one.proposed == [1, 2]
    assert one.store.read("series/1", 100) == b"other"
    assert one.store.read("series/2", 100) == b"one"


def test_attempts_are_bounded_and_end_in_the_callers_error(one: Writer, other: Writer) -> None:
    """So many lost races in a row are a fault, and the caller says what it means for it."""
    rival_before_each_create(one, other, times=CLAIM_ATTEMPTS_MAX)
    with pytest.raises(Fenced, match="too many writers"):
        one.create()
    assert len(one.proposed) == CLAIM_ATTEMPTS_MAX


def test_a_lost_answer_is_read_back_and_the_number_is_mine(one: Writer) -> None:
    """The document holds its writer's identity: found again, it is no rival's, and no second one is written."""
    lost = [TimeoutError("the answer was lost")]

    def after(operation: str, path: str) -> None:
        if operation == "create" and lost:
            raise lost.pop()

    one.fs.after = after
    assert one.create() == (1, "one")
    assert one.newest() == 1


@pytest.mark.parametrize("landed", [True, False])
def test_after_an_unknown_outcome_nothing_more_is_written(one: Writer, landed: bool) -> None:
    """The document may be there and count: one under the next number would make one writer two."""

    def fail(operation: str, path: str) -> None:
        if operation in ("read", "create"):
            raise TimeoutError("no answer")

    if landed:
        one.fs.after = fail
        one.fs.before = lambda operation, path: fail(operation, path) if operation == "read" else None
    else:
        one.fs.before = fail
    with pytest.raises(OutcomeUnknown):
        one.create()
    assert one.proposed == [1]
    one.fs.before = one.fs.after = lambda operation, path: None
    assert one.newest() == (1 if landed else 0)


def test_a_refused_write_is_not_repeated_under_another_number(one: Writer) -> None:
    """A store that may only be read is not a lost race."""

    def refuse(operation: str, path: str) -> None:
        if operation == "create":
            raise PermissionError("read-only")

    one.fs.before = refuse
    with pytest.raises(StoreRefused):
        one.create()
    assert one.proposed == [1]


def test_a_document_that_does_not_count_is_a_lost_race(one: Writer) -> None:
    """A store forgets deleted names: a sleeper that creates an old number anew has not written the next one."""
    one.store.put("series/7", b"newer")

    def propose() -> Proposal[int]:
        number = [3, one.newest() + 1][bool(one.proposed)]
        one.proposed.append(number)
        return Proposal(f"series/{number}", b"one", number)

    written = create_next(
        one.store, propose, contended=lambda: Fenced("contended"), counts=lambda number: one.newest() == number
    )
    assert (written, one.proposed) == (8, [3, 8])


def test_nothing_is_written_when_nothing_is_proposed(one: Writer) -> None:
    """Whoever finds that others have done it already stops."""
    assert create_next(one.store, lambda: None, contended=lambda: Fenced("contended")) is None
    assert one.newest() == 0


def agreed(writer: Writer, body: bytes) -> bytes | None:
    def read() -> bytes | None:
        try:
            return writer.store.read("job.json", 100)
        except FileNotFoundError:
            return None

    return create_agreed(writer.store, Proposal("job.json", body, body), read)


def test_all_writers_of_one_name_agree_on_the_first(one: Writer, other: Writer) -> None:
    """Also when the first one asks again: it finds its own document."""
    assert agreed(one, b"one") == b"one"
    assert agreed(other, b"other") == b"one"
    assert agreed(one, b"one") == b"one"


def test_a_name_that_was_taken_and_removed_again_is_nobodys(one: Writer, other: Writer) -> None:
    """The caller is told so; it never takes its own proposal for what counts."""
    agreed(other, b"other")
    reads = []

    def before(operation: str, path: str) -> None:
        if operation == "read":
            reads.append(path)
            if len(reads) == 2:  # after the store's own read-back
                other.store.delete("job.json")

    one.fs.before = before
    assert agreed(one, b"one") is None


def test_an_unknown_outcome_of_an_agreement_is_raised(one: Writer) -> None:
    """Neither the own document nor another one may be taken for what counts."""

    def fail(operation: str, path: str) -> None:
        raise TimeoutError("no answer")

    one.fs.before = fail
    with pytest.raises(OutcomeUnknown):
        agreed(one, b"one")


def test_the_newest_is_read_although_older_ones_are_tidied_away(one: Writer) -> None:
    """Between the listing and the read a newer one was written and the listed one removed."""
    one.create()
    gone = [1]

    def read(number: int) -> bytes:
        if gone:
            gone.pop()
            one.create()
            one.store.delete(f"series/{number}")
        return one.store.read(f"series/{number}", 100)

    assert read_newest(one.newest, read, "the series") == b"one"
    assert one.newest() == 2


def test_a_series_that_never_holds_still_is_unavailable(one: Writer) -> None:
    """It is never said to be empty: that would be the beginning of a job."""
    reads = []

    def read(number: int) -> bytes:
        reads.append(number)
        raise FileNotFoundError

    one.create()
    with pytest.raises(Unavailable, match="the series changed 16 times while it was read; try again"):
        read_newest(one.newest, read, "the series")
    assert len(reads) == CLAIM_ATTEMPTS_MAX


def test_an_empty_series_has_no_newest(one: Writer) -> None:
    """It is told from one that could not be read."""
    assert read_newest(one.newest, lambda number: number, "the series") is None
