"""Named points at which tests kill the driver; inert unless the environment asks for it.

    STILLSTATE_KILL_AT=before-manifest        kill at the first passage
    STILLSTATE_KILL_AT=before-manifest:5      kill at the fifth passage (of one process)

Points inside a task kill the driver process (named by STILLSTATE_DRIVER_PID), because that is the crash of interest;
Spark itself repeats tasks whose worker dies.
"""

from __future__ import annotations

import os
import signal

__all__ = [
    "COMPACTION_KILL_POINTS",
    "DELTA_KILL_POINTS",
    "FOLD_KILL_POINTS",
    "ICEBERG_KILL_POINTS",
    "INTERVAL_KILL_POINTS",
    "KAFKA_KILL_POINTS",
    "KAFKA_START_KILL_POINTS",
    "KILL_POINTS",
    "RESTORE_KILL_POINTS",
    "RETENTION_KILL_POINTS",
    "SQL_KILL_POINTS",
    "reach",
]

KILL_POINTS = (
    "task-started",
    "task-processed",
    "task-logged",
    "task-acknowledged",
    "action-done",
    "segment-written",
    "before-manifest",
    "manifest-written",
    "before-publish",
    "one-file-published",
    "published",
)

# Only where several epochs end in one checkpoint.
INTERVAL_KILL_POINTS = ("epoch-pending", "pending-flushed", "one-output-published")

# Of a materialization, in the driver's thread or in a separate process.
FOLD_KILL_POINTS = ("fold-claimed", "fold-table-written", "fold-units-done", "fold-recorded")

# In a task that restores a shard's state: before its new local version has a file, and when it is complete.
RESTORE_KILL_POINTS = ("restore-begun", "restore-written")

# In the driver's thread that expires old checkpoints: their expiry is settled, their data removed, their manifests too.
RETENTION_KILL_POINTS = ("retention-given-up", "retention-data-removed", "retention-removed")

# Of an epoch's output in a Delta table: its files have their names, the commit is about to be made, and it is.
DELTA_KILL_POINTS = ("delta-moved", "delta-before-commit", "delta-committed")

# Of an epoch's output in an Iceberg table: its data files are there, a commit (of an epoch, or of an owner) is about to
# be made, and the table has the epoch.
ICEBERG_KILL_POINTS = ("iceberg-written", "iceberg-before-commit", "iceberg-committed")

# Of an epoch's output in a database: its writer is locked, its transaction is about to be committed, and it is.
SQL_KILL_POINTS = ("sql-locked", "sql-written", "sql-committed")

# Of an epoch's output in a Kafka topic: its transaction has begun, its records are there, its number too, and all is
# committed.
KAFKA_KILL_POINTS = ("kafka-begun", "kafka-produced", "kafka-before-commit", "kafka-committed")

# Of a producer that begins: it has fenced the ones before.
KAFKA_START_KILL_POINTS = ("kafka-fenced",)

# Of a compaction of an output folder: its file waits, it was agreed on, the file has its name, an input is gone, and
# all are.
COMPACTION_KILL_POINTS = (
    "compaction-staged",
    "compaction-agreed",
    "compaction-visible",
    "compaction-input-removed",
    "compaction-removed",
)

_passed: dict[str, int] = {}


def reach(point: str) -> None:
    """Kill the driver process here if the environment asks for it."""
    wanted = os.environ.get("STILLSTATE_KILL_AT")
    if not wanted:
        return
    name, _, count = wanted.partition(":")
    if name != point:
        return
    _passed[point] = _passed.get(point, 0) + 1
    if _passed[point] >= int(count or 1):
        os.kill(int(os.environ.get("STILLSTATE_DRIVER_PID", os.getpid())), signal.SIGKILL)
