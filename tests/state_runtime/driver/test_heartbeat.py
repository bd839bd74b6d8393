"""The heartbeat of a run that has nothing to commit: how it learns that another one has taken the job over."""

from __future__ import annotations

import threading

import pytest
from maintenance_root import FakeWorld, Job
from model import CountingIds

from state_runtime.base.actor import Actor
from state_runtime.driver.heartbeat import Heartbeat
from state_runtime.driver.savepoint_requests import Savepoints
from state_runtime.maintenance.delete.snapshots import give_up, remove_given_up
from state_runtime.maintenance.marks import Marker
from state_runtime.snapshot.ownership import JobProof
from state_runtime.snapshot.term_files import claim_term, read_status


def heartbeat(job: Job) -> Heartbeat:
    """Of the run that the job has now."""
    run = job.committer
    savepoints = Savepoints(job.root, run.info, run.term.term, clock=job.clock, ids=job.ids)
    return Heartbeat(job.root, run, 2.0, job.clock, threading.Event(), savepoints)


@pytest.mark.parametrize("given_up", ["nothing", "announced", "removed"])
def test_an_idle_run_that_slept_learns_that_it_was_taken_over_whatever_retention_has_done(given_up: str) -> None:
    """It looks for the snapshot under its own next id, which may be gone by the time that it wakes: it said "running" for ever."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(1)
    sleeper = heartbeat(job)
    sleeper._beat()
    assert sleeper.fenced is None
    job.start()
    job.checkpoints(8)
    ids, proof = job.catalog.snapshot_ids(), JobProof(job.root, job.committer.info.uid)
    gone = [i for i in ids if i < ids[-3]]
    if given_up != "nothing":
        give_up(job.root, gone, ids, proof, clock=job.clock, ids=CountingIds(2))
    if given_up == "removed":
        remove_given_up(job.root, gone, proof, marker=Marker(job.root, job.clock), clock=job.clock)
    said = sleeper.look_for_fencing()
    assert said is not None
    sleeper._beat()
    assert sleeper.fenced == said
    newest = read_status(job.root)
    assert newest is not None
    assert newest.term == job.committer.term.term


def test_a_run_goes_on_while_a_newer_term_has_not_begun() -> None:
    """A start that was refused, or died, leaves a number and takes nothing from anybody; nor does the run's own retention."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(8)
    run = heartbeat(job)
    claim_term(job.root, actor=Actor(job.clock, CountingIds(3), "h", 2))
    ids, proof = job.catalog.snapshot_ids(), JobProof(job.root, job.committer.info.uid)
    give_up(job.root, ids[:-2], ids, proof, clock=job.clock, ids=CountingIds(2))
    run._beat()
    assert run.fenced is None
    job.checkpoints(1)
    run._beat()
    assert run.fenced is None
