"""From which snapshot a run begins."""

from __future__ import annotations

import pytest
from maintenance_root import FakeWorld, Job
from model import CountingIds

from state_runtime.base.errors import CorruptManifest
from state_runtime.driver.start_position import StartPosition
from state_runtime.snapshot.paths import manifest_path


def test_a_damaged_newest_snapshot_stops_a_run_unless_it_was_told_where_to_go_back_to() -> None:
    """To go on from the one before would publish twice what the newest has published: only a person, or a rule of the
    job, may say so."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(3)
    newest = job.committer.last.snapshot_id
    name = f"/store/job/{manifest_path(newest)}"
    world.objects[name] = world.objects[name].replace(b"a", b"b", 1)
    with pytest.raises(CorruptManifest):
        StartPosition(job.catalog, clock=world.clock, ids=CountingIds(9)).look()
    back = StartPosition(job.catalog, from_snapshot=newest - 1, clock=world.clock, ids=CountingIds(9)).look()
    assert back is not None
    assert back.snapshot_id >= newest - 1
