"""The steps of a boundary, as values: what is given up never comes back, and nothing else is given up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import CountingIds, DictStore, FakeClock, empty_manifest, examples

from state_runtime.base.actor import Actor
from state_runtime.base.errors import Fenced, StillstateError
from state_runtime.maintenance.delete.roots import delete_root
from state_runtime.maintenance.layout import DATA_KINDS, kind_of, number_in
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer, check_not_given_up
from state_runtime.snapshot.document import decode_document, encode_document
from state_runtime.snapshot.expiry_boundary import (
    NO_BOUNDARY,
    ExpiryBoundary,
    advance_boundary,
    leave_mark,
    read_boundary,
    remove_older_marks,
)
from state_runtime.snapshot.fencing import open_job_root, open_run
from state_runtime.snapshot.paths import boundary_path, run_mark_path
from state_runtime.snapshot.term_files import Term
from state_runtime.store.paths import check_relative_path

RUN = Term(1, "a" * 32, "h", 1, 0)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["commit", "announce", "settle"]), st.sets(st.integers(1, 12)), st.sets(st.integers(1, 12))
    ),
    max_size=20,
)


@given(STEPS)
@examples(150)
def test_a_snapshot_is_kept_going_or_gone_and_never_comes_back_from_gone(
    steps: list[tuple[str, set[int], set[int]]],
) -> None:
    boundary, newest, gone = NO_BOUNDARY, 1, set[int]()
    for step, some, pinned in steps:
        existing = [i for i in range(1, newest + 1) if boundary.keeps(i)]
        before = boundary
        if step == "commit":
            newest += 1
        elif step == "announce":
            boundary = boundary.announcing(some & set(range(1, newest)), existing) or boundary
            assert set(boundary.going) == set(before.going) | (some & set(existing[:-1]))
        else:
            boundary = boundary.settling(some, pinned) or boundary
            assert {i for i in before.going if boundary.keeps(i)} == set(before.going) & some & pinned
        kept = {i for i in range(1, newest + 1) if boundary.keeps(i)}
        gone_now = {i for i in range(1, newest + 1) if boundary.is_gone(i)}
        assert kept | set(boundary.going) | gone_now == set(range(1, newest + 1))
        assert not kept & set(boundary.going)
        assert gone <= gone_now, "back from gone"
        assert gone_now - gone <= set(before.going), "gone without being announced"
        assert newest in kept
        assert boundary.snapshot_id >= before.snapshot_id
        gone = gone_now


def test_the_newest_is_never_given_up_alone() -> None:
    with pytest.raises(StillstateError, match="newest"):
        NO_BOUNDARY.announcing([3], [1, 2, 3])


def test_nothing_is_left_to_announce_or_settle_twice() -> None:
    first = NO_BOUNDARY.announcing([1], [1, 2, 3])
    assert first is not None
    assert first.announcing([1], [2, 3]) is None
    settled = first.settling([1], [])
    assert settled is not None
    assert settled.settling([1], []) is None
    assert settled.announcing([1], [2, 3]) is None


def test_a_tombstone_keeps_nothing_that_ever_was_or_will_be() -> None:
    tombstone = ExpiryBoundary(1, 4, (2,), 0, "u", (3,)).tombstone()
    assert tombstone is not None
    assert tombstone.is_tombstone
    assert not any(tombstone.keeps(i) for i in (1, 2, 5, 10**19))
    assert tombstone.tombstone() is None
    assert tombstone.announcing([5], [5, 6]) is None
    assert tombstone.settling([3], [3]) is None
    root = DictStore()
    leave_mark(root, RUN)
    advance_boundary(root, lambda now: now.tombstone(), clock=FakeClock(), ids=CountingIds())
    with pytest.raises(Fenced, match="deleted as a whole"):
        check_not_given_up(root, replace(empty_manifest(), snapshot_id=10**15), RUN, None)


def test_a_root_without_a_run_s_own_mark_is_not_its_root() -> None:
    """It was removed with its boundary: a run that slept meanwhile commits nothing more, whoever else left a mark since."""
    root, mine = DictStore(), replace(empty_manifest(), snapshot_id=10**15)
    root.put(f"boundary/root-{mine.job_uid}", b"of an earlier version")
    for other in (None, replace(RUN, run_uid="b" * 32), replace(RUN, term=RUN.term + 1)):
        if other is not None:
            leave_mark(root, other)
        with pytest.raises(Fenced, match="was removed, or newer runs"):
            check_not_given_up(root, mine, RUN, None)
    leave_mark(root, RUN)
    assert check_not_given_up(root, mine, RUN, None) == NO_BOUNDARY


def test_a_run_that_starts_in_a_removed_root_revives_no_older_one() -> None:
    """The newer one read the job before it was deleted, and leaves its mark after that. Both are fenced."""
    store, clock, ids = DictStore(), FakeClock(), CountingIds()
    catalog = Catalog(store, "job", clock)
    info = open_job_root(catalog.root, "job", clock=clock, ids=ids)

    def start() -> Committer:
        return open_run(catalog, info, empty_manifest(info.uid), actor=Actor(clock, ids, "h", 1))

    older = start()
    assert older.commit(older.last).snapshot_id == 2
    clock.advance_s(3600)
    delete_root(catalog.root, clock=clock, ids=ids, owner="somebody")
    with pytest.raises(Fenced, match="was deleted, or moved elsewhere"):
        start()
    with pytest.raises(Fenced, match="does not belong to the run of term 1 any more"):
        older.commit(older.last)


def test_a_run_that_starts_where_another_job_has_begun_meanwhile_is_fenced() -> None:
    store, clock, ids = DictStore(), FakeClock(), CountingIds()
    catalog = Catalog(store, "job", clock)
    info = open_job_root(catalog.root, "job", clock=clock, ids=ids)
    catalog.root.delete("job.json")
    open_job_root(catalog.root, "job", clock=clock, ids=ids)
    with pytest.raises(Fenced, match="was deleted, or moved elsewhere"):
        open_run(catalog, info, empty_manifest(info.uid), actor=Actor(clock, ids, "h", 1))


def test_a_boundary_that_goes_while_it_is_read_is_that_of_a_removed_root() -> None:
    """It was listed, and when it is read all is gone, the marks as well: not a root where nothing was ever given up."""

    class EndsMeanwhile(DictStore):
        def list_names(self, folder: str) -> list[str]:
            names = list(super().list_names(folder))
            for name in names:
                self.delete(f"{folder}/{name}")
            return names

    root = EndsMeanwhile()
    leave_mark(root, RUN)
    root.create(boundary_path(1), encode_document("boundary", ExpiryBoundary(1, 2, (), 0, "u")))
    with pytest.raises(Fenced, match="was removed"):
        check_not_given_up(root, replace(empty_manifest(), snapshot_id=10**15), RUN, None)


def test_a_run_tidies_away_the_marks_of_fenced_runs_but_the_last() -> None:
    root = DictStore()
    root.put("boundary/root-00000000000000000000000000000001", b"of an earlier version")
    advance_boundary(root, lambda now: replace(now, snapshot_id=1, kept=(1,)), clock=FakeClock(), ids=CountingIds())
    root.put("boundary/somebody-elses", b"")
    for term in (1, 2, 3, 4):
        leave_mark(root, replace(RUN, term=term))
    remove_older_marks(root, replace(RUN, term=3))
    marks = {run_mark_path(term, RUN.run_uid).rpartition("/")[2] for term in (2, 3, 4)}
    assert set(root.list_names("boundary")) == {f"{1:020d}.json", "somebody-elses", *marks}
    assert all(kind_of(f"boundary/{name}") == "mark" for name in marks)


def test_a_boundary_without_what_this_version_added_is_read_as_it_was() -> None:
    """The first ones of this format had no `going`."""
    body = encode_document("boundary", ExpiryBoundary(1, 5, (2,), 7, "u"))
    assert b'"going"' in body
    found = decode_document("boundary", ExpiryBoundary, body, "x")
    assert found.going == ()
    assert found.is_gone(3)
    assert not found.is_gone(2)


def test_of_two_that_write_the_next_boundary_the_second_decides_again() -> None:
    root = DictStore()
    clock, seen = FakeClock(), []

    def decide(now: ExpiryBoundary) -> ExpiryBoundary | None:
        if not seen:
            advance_boundary(root, lambda b: b.announcing([1], [1, 2, 3]), clock=clock, ids=CountingIds(1))
        seen.append(now.sequence)
        return now.announcing([2], [1, 2, 3])

    written = advance_boundary(root, decide, clock=clock, ids=CountingIds(2))
    assert seen == [0, 1]
    assert written.going == (1, 2)
    assert read_boundary(root) == written
    assert root.exists(boundary_path(2))


@given(st.text(alphabet="abz019._-=/", max_size=60))
@examples(200)
def test_a_name_that_is_data_lies_in_a_folder_of_data(name: str) -> None:
    kind = kind_of(name)
    if kind in DATA_KINDS:
        check_relative_path(name)
        assert name.split("/")[0] in ("changelog", "files", "tables", "outputs")


@pytest.mark.parametrize(
    ("path", "kind", "number"),
    [
        (f"changelog/{7:020d}/direct-op-1f.seg", "direct", 7),
        (f"changelog/{7:020d}/{9:020d}-1f.seg", "segment", 7),
        (f"changelog/{7:020d}/{9:020d}-1f.tmp", None, 0),
        (f"files/{7:020d}/op/1-2-3-4", "shard-file", 7),
        (f"files/{7:020d}/{9:020d}-1f.json", "listing", 7),
        ("tables/op/state/1-2-3.parquet", "table", 0),
        ("tables/_sources/1-2/source-0.log", "source-log", 0),
        (f"outputs/sink/{3:020d}/x.parquet", "staged", 3),
        (f"snapshots/{3:020d}/manifest.json", "manifest", 3),
        (f"snapshots/{3:020d}/manifest.json.bak", None, 0),
        (f"boundary/{3:020d}.json", "boundary", 3),
        (f"control/{3:020d}-stop-1f.json", "request", 3),
        (f"control/{3:020d}-savepoint-1f.answer.json", "answer", 3),
        ("job.json", "job", 0),
        ("savepoint-12.json", "savepoint", 0),
        ("../job.json", None, 0),
        ("x/job.json", None, 0),
        ("job.json\n", None, 0),
    ],
)
def test_names_are_known_whole_or_not_at_all(path: str, kind: str | None, number: int) -> None:
    assert kind_of(path) == kind
    assert number_in(path) == number
