"""Snapshots that were gone back to, or taken over: which ones are ancestors, and what a manifest then says. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import empty_manifest, examples

from state_runtime.base.errors import JobRootMismatch
from state_runtime.materialize.records import Record, fits, view_of
from state_runtime.snapshot.document import FORMAT_VERSION
from state_runtime.snapshot.job_info import JobInfo, StartedFrom
from state_runtime.snapshot.lineage import (
    check_belongs,
    gone_back,
    pending_outputs,
    standing_in,
    taken_over,
    undelivered_outputs,
    withdrawing,
    withdrawn_outputs,
)
from state_runtime.snapshot.manifest import Manifest, SourcePosition, StagedFile, StagedOutput

INFO = JobInfo("c" * 32, "new", 32768, FORMAT_VERSION, 77)
STARTED = StartedFrom("/store/old", "old", "job-1", 42, "commit-42", "NO_CLAIM")


def output(epoch: int) -> StagedOutput:
    return StagedOutput("out", epoch, (StagedFile(f"s{epoch}", f"f{epoch}", 1, 1),))


@examples(200)
@given(st.lists(st.integers(0, 40), max_size=25))
def test_what_is_abandoned_is_exactly_what_is_no_ancestor(choices: list[int]) -> None:
    """Any order of going on and going back. 0 goes on; n goes back to the n-th snapshot, if there is one."""
    newest = replace(empty_manifest(), snapshot_id=1, epoch=1)
    stored: dict[int, Manifest] = {1: newest}
    ancestors: dict[int, set[int]] = {1: {1}}
    for choice in choices:
        target = stored.get(choice, newest)
        following = newest.snapshot_id + 1
        content = gone_back(target, newest)
        assert content.epoch >= max(m.epoch for m in stored.values())
        newest = replace(content, snapshot_id=following, epoch=content.epoch + (choice == 0))
        stored[following] = newest
        ancestors[following] = ancestors[target.snapshot_id] | {following}
        for snapshot_id in range(1, following + 1):
            assert newest.abandons(snapshot_id) == (snapshot_id not in ancestors[following])


@examples(200)
@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=25))
def test_no_start_counts_on_output_that_was_taken_out(choices: list[tuple[int, bool]]) -> None:
    """Any order of going on and going back; a start may let the sink take out what is behind. A table of one row for
    each epoch: each snapshot knows which epochs it counts on, and the table has exactly those, as long as each start
    takes out."""
    newest = replace(empty_manifest(), snapshot_id=1, epoch=1)
    stored: dict[int, Manifest] = {1: newest}
    counted: dict[int, set[int]] = {1: {1}}
    table, is_clean = {1}, True
    for choice, takes_out in choices:
        target = stored.get(choice, newest)
        is_lost = not counted[target.snapshot_id] <= table
        assert bool(withdrawn_outputs(target, newest)) == is_lost
        if is_lost:
            continue
        content = gone_back(target, newest)
        left = {epoch for first, last in content.left_epochs for epoch in range(first, last + 1)}
        assert not left & counted[target.snapshot_id]
        assert table <= left | counted[target.snapshot_id]
        if takes_out:
            content = withdrawing(content, ["out"])
            table -= left
        is_clean = is_clean and (takes_out or target is newest)
        following = newest.snapshot_id + 1
        epoch = content.epoch + 1
        newest = replace(content, snapshot_id=following, epoch=epoch)
        stored[following], counted[following] = newest, counted[target.snapshot_id] | {epoch}
        table.add(epoch)
        if is_clean:
            assert table == counted[following]


def test_ranges_that_touch_are_one_and_a_manifest_without_any_says_nothing() -> None:
    first = replace(empty_manifest(), snapshot_id=5, epoch=5)
    second = replace(gone_back(first, replace(first, snapshot_id=8, epoch=9)), snapshot_id=9)
    assert second.left_epochs == ((6, 9),)
    third = gone_back(first, replace(second, snapshot_id=12, epoch=14))
    assert third.left_epochs == ((6, 14),)
    assert withdrawing(withdrawing(second, ["a"]), ["b"]).withdrawn == (("a", 6, 9), ("b", 6, 9))
    both = withdrawing(replace(third, withdrawn=(("a", 6, 9),)), ["a"])
    assert both.withdrawn == (("a", 6, 14),)
    assert b"left_epochs" not in first.encode()
    assert b"withdrawn" not in first.encode()
    assert Manifest.decode(both.encode(), "here") == both


def test_going_back_to_the_newest_is_going_on() -> None:
    newest = replace(empty_manifest(), snapshot_id=9, outputs=(output(9),))
    assert gone_back(newest, newest) == newest


def test_epochs_of_a_snapshot_that_cannot_be_read_are_never_used_again() -> None:
    """Several epochs end in one checkpoint, so the id of a lost one does not tell how many there were."""
    target = replace(empty_manifest(), snapshot_id=3, epoch=500)
    readable = replace(empty_manifest(), snapshot_id=7, epoch=900)
    lost = replace(empty_manifest(), snapshot_id=9, epoch=900 + 2 * 100_000)
    content = gone_back(target, standing_in(readable, lost.snapshot_id))
    assert content.epoch > lost.epoch
    assert content.abandoned == ((4, 9),)


def test_only_output_that_the_newest_still_names_is_pending() -> None:
    """A checkpoint is made after the one before was published."""
    target = replace(empty_manifest(), snapshot_id=5, outputs=(output(5),))
    again = replace(target, snapshot_id=6, kind="fencing")
    later = replace(empty_manifest(), snapshot_id=6, outputs=(output(6),))
    assert pending_outputs(target, again) == gone_back(target, again).outputs == (output(5),)
    assert pending_outputs(target, later) == gone_back(target, later).outputs == ()


def test_output_that_was_not_delivered_when_its_history_was_left_is_known_for_ever() -> None:
    """7 was the newest when the job went back to 5, and 9 was when it went back to 4."""
    five = replace(empty_manifest(), snapshot_id=5, outputs=(output(5),))
    seven = replace(five, snapshot_id=7, outputs=(output(6), output(7)))
    six = replace(seven, snapshot_id=6, outputs=(output(6),))
    eight = replace(gone_back(five, seven, is_delivered=False), snapshot_id=8)
    assert eight.undelivered == (("out", 6, 7),)
    nine = replace(eight, snapshot_id=9, outputs=(output(9),))
    assert undelivered_outputs(six, nine) == (output(6),)
    assert undelivered_outputs(seven, nine) == (output(6), output(7))
    assert undelivered_outputs(five, nine) == (), "it is an ancestor"
    ten = replace(gone_back(five, nine, is_delivered=False), snapshot_id=10)
    assert ten.undelivered == (("out", 6, 7), ("out", 9, 9))
    assert Manifest.decode(ten.encode(), "x") == ten
    assert undelivered_outputs(nine, ten) == (output(9),)
    assert undelivered_outputs(eight, ten) == (), "9 no longer names what 8 does"


def test_output_that_was_delivered_or_goes_along_is_not_left() -> None:
    five = replace(empty_manifest(), snapshot_id=5, outputs=(output(5),))
    seven = replace(five, snapshot_id=7, outputs=(output(7),))
    assert gone_back(five, seven).undelivered == ()
    assert gone_back(five, replace(five, snapshot_id=6, kind="fencing"), is_delivered=False).undelivered == ()


def test_a_materialization_of_an_abandoned_snapshot_does_not_fit() -> None:
    """Not even if it folds the same files: the columns of its tables may be those of the other history."""
    target = replace(empty_manifest(), snapshot_id=5)
    record = Record(1, target.job_uid, 7, "w", "minor", 0, 1, view_of(target, 7))
    ahead = replace(target, snapshot_id=9)
    assert fits(ahead, record)
    back = replace(gone_back(target, ahead), snapshot_id=10)
    assert view_of(back, 7) == record.view
    assert not fits(back, record)


def test_a_snapshot_that_is_taken_over_says_the_same_each_time() -> None:
    """A start that is repeated must find its own manifest; and two jobs that begin from one snapshot have nothing in common."""
    source = SourcePosition(3, '{"id":"2f7c"}', "o", "p", "c")
    manifest = replace(
        empty_manifest(),
        snapshot_id=42,
        term=6,
        commit_id="commit-42",
        kind="checkpoint",
        versions={"op": "f" * 16},
        outputs=(output(4),),
        source=source,
        abandoned=((3, 4),),
    )
    first, second = (taken_over(manifest, STARTED, INFO) for _ in range(2))
    assert first.encode() == second.encode()
    assert Manifest.decode(first.encode(), "x") == first
    assert (first.snapshot_id, first.term, first.kind) == (42, 6, "fencing")
    assert first.job_uids == {"job-1", INFO.uid}
    assert (first.versions, first.outputs, first.abandoned) == ({}, (), ())
    assert first.epoch == 42, "epochs of formats without them are ids"
    other = taken_over(manifest, STARTED, replace(INFO, uid="d" * 32))
    assert other.commit_id not in (first.commit_id, manifest.commit_id)
    assert first.source is not None
    assert other.source is not None
    assert first.source.metadata == '{"id":"cccccccc-cccc-cccc-cccc-cccccccccccc"}'
    assert other.source.metadata != first.source.metadata
    again = taken_over(first, replace(STARTED, job_uid=INFO.uid), replace(INFO, uid="e" * 32))
    assert [o.job_uid for o in again.origins] == ["job-1", INFO.uid]
    assert again.job_uids == {"job-1", INFO.uid, "e" * 32}


def test_a_folder_s_manifests_and_its_job_file_must_agree() -> None:
    """Read only: a job that the snapshot came from will do. To go on from it: no other will."""
    mine = taken_over(replace(empty_manifest(), snapshot_id=42), STARTED, INFO)
    check_belongs(mine, INFO, "here", own=True)
    ancestor = replace(INFO, uid="job-1")
    check_belongs(mine, ancestor, "here", own=False)
    for info, own in ((ancestor, True), (replace(INFO, uid="x"), False)):
        with pytest.raises(JobRootMismatch, match="files of two job roots were mixed"):
            check_belongs(mine, info, "here", own=own)
