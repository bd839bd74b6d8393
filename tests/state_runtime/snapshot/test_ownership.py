"""What a run must prove before it changes or removes anything: that the job is still its own."""

from __future__ import annotations

import pytest
from maintenance_root import FakeWorld, Job

from state_runtime.base.errors import Fenced
from state_runtime.snapshot.expiry_boundary import place_of_newest_run
from state_runtime.snapshot.paths import run_mark_path


def test_a_run_that_only_starts_takes_nothing_from_the_one_before_and_its_first_snapshot_takes_everything() -> None:
    """A start may be refused, or die, after it has left its mark: the job would have no run at all. After the fencing
    snapshot nothing that the old run still has in hand, retention or a collection, may touch the root."""
    world = FakeWorld()
    old = Job(world.connect(), world.clock).checkpoints(2)
    world.root().put(run_mark_path(old.committer.term.term + 1, "b" * 32), b"")
    old.committer.ownership.check()
    new = Job(world.connect(), world.clock, prefix=6)
    assert new.committer.last.term > old.committer.term.term
    with pytest.raises(Fenced, match="has taken the job over"):
        old.committer.ownership.check()
    new.committer.ownership.check()


def test_a_mark_that_is_tidied_away_between_the_listing_and_the_read_tells_of_no_place() -> None:
    """The next run removes the marks of those before it. Who looks just then must not end for it."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock)
    mark = run_mark_path(job.committer.term.term, job.committer.term.run_uid)
    assert place_of_newest_run(job.root) == job.root.url

    def tidied(operation: str, path: str) -> None:
        if operation == "read":
            world.objects.pop(f"/store/job/{mark}", None)

    assert place_of_newest_run(world.root(before=tidied)) == ""
