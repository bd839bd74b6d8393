"""Processes of this host: whether the one that a run names still lives, and certainly belongs to that run."""

from __future__ import annotations

import os
import socket
from typing import Final

import psutil

from state_runtime.base.process_space import process_space
from state_runtime.snapshot.migration import Migration
from state_runtime.snapshot.term_files import RunStatus

__all__ = ["is_hidden", "is_over", "is_owner_gone", "is_running", "living", "process_of"]

# A process is created a moment before it claims its term; the kernel's and the store's clocks differ by a tick.
CREATED_AFTER_CLAIM_MAX_S: Final = 2.0


def process_of(status: RunStatus, job: str) -> psutil.Process | None:
    """Return the process of a run on this host, if it lives and its command line says that it drives this job.

    The stricter check, made before a signal is sent: process ids are reused.
    """
    process = living(status.pid, status.started_at_ms)
    if process is None:
        return None
    try:
        arguments = process.cmdline()
    except psutil.Error:
        return None
    at = arguments.index("run") if "run" in arguments else -1
    return process if at > 0 and job in arguments[at + 1 :] else None


def living(pid: int, known_ms: int) -> psutil.Process | None:
    """Return the process that had an id on this host at a known moment, such as the beginning of its run, if it still
    runs. A process that was created later has reused the id."""
    try:
        process = psutil.Process(pid)
        if is_over(process):
            return None
        created_s = process.create_time()
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return process  # it exists; no more can be known; `process_of` is called before a signal is sent
    return process if created_s <= known_ms / 1000 + CREATED_AFTER_CLAIM_MAX_S else None


def is_running(pid: int, known_ms: int) -> bool:
    """Whether such a process may still run: also if a process of this id cannot be examined."""
    return living(pid, known_ms) is not None or is_hidden(pid)


def is_owner_gone(record: Migration) -> bool:
    """Whether the process that recorded a step would be visible here, and has ended. Another container may have this
    host's name: if the process space is unknown or another one, nothing is certain."""
    host, _, pid = record.owner.rpartition(":")
    is_near = host == socket.gethostname() and record.owner_space != "" and record.owner_space == process_space()
    return is_near and pid.isdigit() and not is_running(int(pid), record.at_ms)


def is_hidden(pid: int) -> bool:
    """Whether a process of that id exists which this one cannot examine: /proc may hide those of other users
    (`hidepid`). Then a process that is not visible has not necessarily ended."""
    try:
        psutil.Process(pid)
    except psutil.NoSuchProcess:
        try:
            os.kill(pid, 0)  # no signal is sent: this only checks whether one could be
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
    except psutil.AccessDenied:
        return False  # it was seen
    return False


def is_over(process: psutil.Process) -> bool:
    """Whether it has ended, also if its parent has not collected its exit code yet: it will never write again."""
    return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
