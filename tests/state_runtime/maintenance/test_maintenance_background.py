"""The driver gives old checkpoints up by itself: bounded, cheap, and never in the way of an epoch."""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from maintenance_root import FakeWorld, Job
from model import CountingIds

from state_runtime.base.settings import JobSettings, RetentionPolicy
from state_runtime.maintenance.retention.background import BackgroundRetention, checkpoints_in_a_round, policy_of_driver
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.pins import pin_snapshot
from state_runtime.store import Store, open_store
from tests.job_settings import job_settings

RETAINED = 5


def settings(**changes: Any) -> JobSettings:
    return job_settings(**{"retained_checkpoints": RETAINED, **changes})


def background(job: Job, root: Store | None = None, **changes: Any) -> BackgroundRetention:
    root = root or job.root
    proof = replace(job.committer.ownership, root=root)
    return BackgroundRetention(root, settings(**changes), CountingIds(8), job.clock, proof)


def run(job: Job, retention: BackgroundRetention, count: int) -> int:
    """So many checkpoints; the most snapshots that there were at once."""
    most = 0
    for _ in range(count):
        retention.committed(job.checkpoint())
        most = max(most, len(job.catalog.snapshot_ids()))
        retention.join(60)
    return most


@pytest.mark.parametrize("place", ["local", "s3"])
def test_the_number_of_checkpoints_is_bounded_without_an_operator(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url, options = (str(tmp_path), None) if place == "local" else request.getfixturevalue("s3_location")
    job = Job(open_store(url, options))
    retention = background(job)
    count = 45 if place == "local" else 24
    most = run(job, retention, count)
    in_a_round = checkpoints_in_a_round(settings())
    assert most <= RETAINED + in_a_round + 1
    assert retention.failures_in_a_row == 0
    assert retention.given_up >= count - most
    job.check()
    assert len(job.root.list_names("snapshots")) == len(job.catalog.snapshot_ids())


def test_segments_that_no_kept_checkpoint_needs_are_removed() -> None:
    world = FakeWorld()
    job = Job(world.connect(), world.clock)
    retention = background(job)
    run(job, retention, 10)
    job.fold()
    run(job, retention, 30)
    kept = job.check()
    needed = {s.path for i in kept for s in job.catalog.manifest(i).segments}
    assert {n for n in world.names() if n.startswith("changelog/")} == needed


ROUND_REQUESTS = {"list": 26, "create": 2, "info": 8, "put": 0}
ROUND_READS = 15  # boundaries, and the run's newest manifest for each proof that the root is still its own


@pytest.mark.parametrize("retained", [5, 20])
def test_what_a_round_asks_of_the_store_does_not_grow_with_the_checkpoints(retained: int) -> None:
    """The numbers of docs/design/0017-deletion.md: per round, not per checkpoint, and whatever is kept."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock, inline_bytes_max=0)
    asked: Counter[str] = Counter()
    root = world.root(before=lambda operation, path: asked.update([operation]))
    retention = background(job, root, retained_checkpoints=retained)
    run(job, retention, 16 + 2 * retained)
    while retention.given_up:
        before = retention.given_up
        asked.clear()
        run(job, retention, 1)
        if retention.given_up > before:
            break
    assert {kind: asked[kind] for kind in ROUND_REQUESTS} == ROUND_REQUESTS, asked
    # And the index of each new segment that leads to other objects; no manifest.
    assert asked["read"] <= ROUND_READS + checkpoints_in_a_round(settings())


def test_a_checkpoint_itself_asks_for_nothing_and_waits_for_nobody() -> None:
    world = FakeWorld()
    job = Job(world.connect(), world.clock)
    asked: list[str] = []
    retention = background(job, world.root(before=lambda operation, path: asked.append(path)))
    for _ in range(RETAINED - 1):
        retention.committed(job.checkpoint())
    assert asked == []


def test_pins_and_rules_keep_what_the_number_alone_would_not() -> None:
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(2)
    pin_snapshot(job.root, 2, reason="user", holder="somebody", clock=job.clock, ids=CountingIds(3))
    retention = background(job, retention=RetentionPolicy(keep_hourly=3))
    for _ in range(40):
        retention.committed(job.checkpoint(seconds=300))
        retention.join(60)
    ids = job.check()
    assert 2 in ids
    hours = {job.catalog.manifest(i).created_at_ms // 3_600_000 for i in ids}
    assert len(hours) >= 3
    assert len(ids) < 30


MONTH_S = 30 * 86_400.0


def test_a_jump_of_the_clock_costs_no_history(caplog: pytest.LogCaptureFixture) -> None:
    """Six checkpoints that are dated a month ahead make all others old, for a driver that has no other clock: it gives none of them
    up, says so, and nothing has happened once the clock is right again."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock)
    retention = background(job, retained_checkpoints=10, retention=RetentionPolicy(keep_within_s=3_600))
    run(job, retention, 26)
    world.clock.advance_s(MONTH_S)
    run(job, retention, 6)
    assert not retention.given_up
    assert "the clock is wrong" in caplog.text
    world.clock.advance_s(-MONTH_S)
    run(job, retention, 40)
    assert not retention.given_up
    assert len(job.check()) == 73


def test_what_is_old_goes_once_newer_checkpoints_are_half_of_all(caplog: pytest.LogCaptureFixture) -> None:
    """A job that stood still for a month is such a jump too, and needs no operator. Nor does one whose rules go by number alone."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock)
    retention = background(job, retained_checkpoints=10, retention=RetentionPolicy(keep_within_s=3_600))
    run(job, retention, 26)
    world.clock.advance_s(MONTH_S)
    run(job, retention, 48)
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1, "it is said once, and not in every round of a month"
    assert retention.given_up == 27, "the first run's fencing snapshot, and the old checkpoints"
    lowered = background(job)
    run(job, lowered, 1)
    assert len(job.check()) == RETAINED


def test_rules_say_how_many_newest_there_are_where_they_say_it() -> None:
    assert policy_of_driver(settings()).keep_last == RETAINED
    assert policy_of_driver(settings(retention=RetentionPolicy(keep_last=2, keep_daily=3))) == RetentionPolicy(
        keep_last=2, keep_daily=3
    )


def test_without_the_setting_nothing_is_given_up() -> None:
    world = FakeWorld()
    job = Job(world.connect(), world.clock)
    retention = background(job, retained_checkpoints=0)
    run(job, retention, 40)
    assert len(job.check()) == 41


def test_a_store_that_refuses_to_delete_harms_no_checkpoint_and_the_next_round_ends_it() -> None:
    world = FakeWorld()
    job = Job(world.connect(), world.clock)
    refused = True

    def before(operation: str, path: str) -> None:
        if refused and operation == "delete":
            raise PermissionError(errno.EACCES, "AccessDenied")

    retention = background(job, world.root(before=before))
    run(job, retention, 20)
    assert any(n.startswith("snapshots/") for n in world.names())
    refused = False
    run(job, retention, 16)
    ids = job.check()
    assert sorted(n for n in world.names() if n.startswith("snapshots/")) == [
        f"snapshots/{i:020d}/manifest.json" for i in ids
    ]


def test_a_round_that_fails_is_tried_again_after_a_pause() -> None:
    world = FakeWorld()
    job = Job(world.connect(), world.clock)
    down = True

    def before(operation: str, path: str) -> None:
        if down and operation == "list":
            raise OSError(errno.EIO, "down")

    retention = background(job, world.root(before=before))
    run(job, retention, 18)
    assert retention.failures_in_a_row > 0
    assert read_boundary(job.root).sequence == 0
    down = False
    world.clock.advance_s(600)
    run(job, retention, 2)
    assert retention.failures_in_a_row == 0
    assert len(job.check()) <= RETAINED + 2


def test_a_new_run_ends_what_a_killed_one_began() -> None:
    """Boundary written, data not removed: the first round of the next run does it."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(20)
    from state_runtime.maintenance.delete.snapshots import give_up

    give_up(
        job.root, [1, 2, 3], job.catalog.snapshot_ids(), job.committer.ownership, clock=job.clock, ids=CountingIds(2)
    )
    job.start()
    retention = background(job)
    run(job, retention, 1)
    assert not [n for n in world.names() if n.startswith(f"snapshots/{1:020d}")]
    assert len(job.check()) == RETAINED


def test_old_boundaries_are_tidied_away() -> None:
    world = FakeWorld()
    job = Job(world.connect(), world.clock)
    run(job, background(job), 16 * 8)
    assert len([n for n in world.names() if n.startswith("boundary/0")]) <= 8
    job.check()
