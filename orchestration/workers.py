"""Whether the process that does one of Stillstate's Dagster runs still lives, where Dagster's launcher cannot tell.

The default run launcher has no health check. A worker that dies together with its code server (a reboot, a container
that was ended) leaves a run that is "started" until its maximum runtime is over, and every run that waits for its turn
waits as long: also the recovery of a dead job. So each of Stillstate's runs notes its worker in a tag, and updates the
tag every minute while it lives; a sensor ends the runs whose worker is gone.

where the worker is                                          it is gone when
its process id is one of this host and this container's      that process does not exist any more
elsewhere                                                    it has noted nothing for five minutes
not known: it has noted nothing yet                          the run has been under way for ten minutes

A worker that hangs is not gone. Safety does not depend on this: terms decide which driver may write.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import dagster as dg

from state_runtime.base.clock import Clock
from state_runtime.base.process_space import process_space
from stillstate.orchestration.launchers.processes import is_running
from stillstate.orchestration.run_statuses import CANCELING, WITH_WORKER
from stillstate.orchestration.text import time_text

__all__ = ["WORKER_TAG", "Worker", "add_tags", "end_lost_runs", "read_worker", "why_lost", "working"]

WORKER_TAG: Final = "stillstate/worker"
BEAT_EVERY_S: Final = 60.0
SILENT_S: Final = 300.0
NO_WORD_S: Final = 600.0
"""Between the launch of a run and its first note, its code is imported."""
JOIN_S: Final = 10.0
RUNS_LOOKED_AT_MAX: Final = 500

_LOG: Final = logging.getLogger(__name__)
_TAGS_TURN: Final = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Worker:
    """The process that does a run.

    Attributes:
        space: of its process id (state_runtime/base/process_space.py); empty where the system does not tell.
        beat_ms: when it last noted that it lives, by its own clock.
    """

    pid: int
    host: str
    space: str
    beat_ms: int

    def text(self) -> str:
        """The tag's text."""
        return json.dumps([self.pid, self.host, self.space, self.beat_ms], separators=(",", ":"))


def read_worker(text: str) -> Worker | None:
    """Parse a tag; None if it cannot be parsed."""
    try:
        pid, host, space, beat_ms = json.loads(text)
        return Worker(pid=int(pid), host=str(host), space=str(space), beat_ms=int(beat_ms))
    except (ValueError, TypeError):
        return None


def why_lost(worker: Worker | None, changed_ms: int, now_ms: int, space: str) -> str:
    """Return why a run that is under way has lost its worker, for people; empty: the worker lives, as far as is known.

    Args:
        changed_ms: when the run's status last changed.
        space: of the process that asks.
    """
    if worker is None:
        is_late = now_ms - changed_ms > NO_WORD_S * 1000
        return f"no worker has been heard of since {time_text(changed_ms)}" if is_late else ""
    who = f"process {worker.pid} on {worker.host}"
    if worker.space and worker.space == space:
        return "" if is_running(worker.pid, worker.beat_ms) else f"{who} is gone"
    is_silent = now_ms - worker.beat_ms > SILENT_S * 1000
    return f"{who} was last heard of at {time_text(worker.beat_ms)}" if is_silent else ""


def add_tags(instance: dg.DagsterInstance, run_id: str, tags: Mapping[str, str]) -> None:
    """Add tags to the run that this process does. Dagster reads all tags and writes them back, so two threads take
    turns: otherwise one would lose the other's tags."""
    with _TAGS_TURN:
        instance.add_run_tags(run_id, tags)


@contextmanager
def working(instance: dg.DagsterInstance, run_id: str, clock: Clock) -> Iterator[None]:
    """Note in the run's tag that this process does the run, as long as the block lasts."""
    me = Worker(pid=os.getpid(), host=socket.gethostname(), space=process_space(), beat_ms=0)
    over = threading.Event()

    def note() -> None:
        try:
            add_tags(instance, run_id, {WORKER_TAG: replace(me, beat_ms=clock.now_ms()).text()})
        except Exception as error:  # any error of the storage: it must not end the run
            _LOG.warning("run %s cannot note that it is under way; it tries again: %s", run_id, error)

    def beat() -> None:
        while not over.wait(BEAT_EVERY_S):
            note()

    note()
    thread = threading.Thread(target=beat, name="stillstate-worker", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(JOIN_S)


def end_lost_runs(
    instance: dg.DagsterInstance, streams: Collection[str], tag_names: Collection[str], action_tag: str, clock: Clock
) -> list[str]:
    """End Stillstate's runs whose worker is gone, so that waiting runs continue; return a line for each.

    Args:
        streams: the tags of the jobs whose runs are Stillstate's (`Mount.tag`).
        tag_names: under which a run may have them.
        action_tag: a tag that each of Stillstate's jobs has; such a job does its run in one process. A run of assets
            that a user selected, or of a user's own job, may have a process for each step: the end of one of them
            proves nothing.
    """
    if instance.run_launcher.supports_check_run_worker_health:
        return []  # Dagster ends such runs itself
    ended: list[str] = []
    records = instance.get_run_records(dg.RunsFilter(statuses=list(WITH_WORKER)), limit=RUNS_LOOKED_AT_MAX)
    for record in records:
        tags = record.dagster_run.tags
        if action_tag not in tags or not any(tags.get(name) in streams for name in tag_names):
            continue
        worker = read_worker(tags.get(WORKER_TAG, ""))
        changed_ms = int(record.update_timestamp.timestamp() * 1000)
        why = why_lost(worker, changed_ms, clock.now_ms(), process_space())
        now = instance.get_run_by_id(record.dagster_run.run_id) if why else None
        if now is None or now.is_finished:
            continue
        message = f"the worker of this run is gone: {why}. The run is ended, so that what waits for it goes on"
        if now.status is CANCELING:
            instance.report_run_canceled(now, message)
        else:
            instance.report_run_failed(now, message)
        ended.append(f"{now.job_name}, run {now.run_id[:8]}: {message}")
    return ended
