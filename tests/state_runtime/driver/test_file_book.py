"""What a driver knows of all shards' files with the changelog off."""

from __future__ import annotations

from dataclasses import replace

from maintenance_root import FakeWorld, Job
from model import CountingIds, empty_manifest

from state_runtime.driver.file_index import FileIndex
from state_runtime.materialize import apply, materialize


def test_the_first_run_with_the_changelog_off_visits_every_shard_that_has_state() -> None:
    """State that lies in segments alone, or in tables alone, is in no listing of files yet. Taken for whole, the empty
    listing would be the snapshot: everything would be lost with its first checkpoint."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(3)
    in_segments = job.committer.last
    in_tables = apply(in_segments, materialize(job.root, in_segments, clock=world.clock, ids=CountingIds(8)))
    both = replace(in_tables, segments=in_segments.segments)
    assert (bool(in_segments.segments), bool(in_segments.layers)) == (True, False)
    assert (bool(in_tables.segments), bool(in_tables.layers)) == (False, True)
    nothing = empty_manifest(job.committer.info.uid)
    for last, complete in ((in_segments, False), (in_tables, False), (both, False), (nothing, True)):
        assert FileIndex.begin(job.root, last, 2, ["op"]).complete is complete
