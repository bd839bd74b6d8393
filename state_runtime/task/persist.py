"""The durable results of a task's epoch: its changes on the primary store, and its local version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from state_runtime.base import faults
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import InvalidData
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.base.limits import KEY_BYTES_MAX
from state_runtime.base.settings import UploadSettings
from state_runtime.changelog.changes import TaskChanges
from state_runtime.changelog.parts_writer import PartsWriter
from state_runtime.changelog.upload import Uploader
from state_runtime.changelog.writer import begin_task_changes, task_writer
from state_runtime.processors.operator import Operator
from state_runtime.state.changed_rows import Changed, batches_of, on_top
from state_runtime.state.reader import StateReader
from state_runtime.state.table import bounded_slices, hashes_of
from state_runtime.task.acknowledgement import PersistedFiles
from state_runtime.task.persist_files import persist_files
from state_runtime.task.shard_access import ShardAccess, TaskJob

__all__ = ["Persisted", "Step", "changes_writer", "persist", "refuse_large_keys", "uploader"]


@dataclass(frozen=True)
class Step:
    """One epoch's step of a shard's state.

    Attributes:
        attempt: id of the local version after it.
        before: id of the one before it.
        base: the state before it.
        changes: per state the changed rows, sorted; states without changes are left out.
        due_taken: see `ShardStore.write`.
        writer: of the parts whose upload has begun already; None without such parts.
        sent: the `id` of the batches of `changes` that were given to the writer.
        listed: with the changelog off the driver's listing of the shard (`ListedFiles.paths`).
        restored: whether `base` came from the primary store, so that local disk does not have it yet.
    """

    attempt: str
    before: str
    base: StateReader
    changes: Mapping[str, Changed]
    due_taken: Mapping[str, int]
    restored: bool
    listed: Mapping[str, str] | None = None
    writer: PartsWriter | None = None
    sent: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Persisted:
    """The part of a persisted step that the driver needs.

    Attributes:
        version: local version after the epoch; `NO_VERSION` if it could not be written.
        changes: empty with the changelog off.
        files: the shard's with the changelog off.
    """

    version: str
    local_failed: bool
    changes: TaskChanges
    files: PersistedFiles = field(default_factory=PersistedFiles)


def changes_writer(job: TaskJob, operator: str, access: ShardAccess) -> PartsWriter:
    """Return a writer for the changes of a task."""
    return task_writer(
        lambda: access.root,
        uploader(job.settings.upload),
        term=job.term,
        snapshot_id=job.snapshot_id,
        operator=operator,
        settings=job.settings,
        ids=SYSTEM_IDS,
    )


def persist(job: TaskJob, operator: Operator, access: ShardAccess, step: Step) -> Persisted:
    """Make a shard's step durable, as far as a task can: the driver's manifest completes it.

    Raises:
        InvalidData: the changes of a key in this epoch are larger than can be read back.
        StoreUnavailable, OutcomeUnknown: an upload failed; the epoch fails and is run again.
    """
    refuse_large_keys(operator.uid, step.changes)
    if job.settings.changelog == "off":
        return _persist_files(job, operator, access, step)
    writer = step.writer if step.writer is not None else changes_writer(job, operator.uid, access)
    pending = begin_task_changes(
        writer, operator=operator.uid, hash_range=access.hash_range, changes=step.changes, sent=step.sent
    )
    try:
        # The local version is written while the upload runs: a task takes as long as the slower of the two.
        version, failed = access.write(
            step.attempt, step.base, step.changes, step.before, step.restored, step.due_taken
        )
    except BaseException:
        pending.abandon()
        raise
    changes = pending.result()
    faults.reach("task-logged")
    return Persisted(version, failed, changes)


def refuse_large_keys(operator: str, changes: Mapping[str, Changed], bytes_max: int = KEY_BYTES_MAX) -> None:
    """Refuse changes of one key that are too large: two versions of a key are put together when they are read.

    Args:
        changes: per state.

    Raises:
        InvalidData: the changes of a key are larger than `bytes_max`.
    """
    # No key is in two batches.
    for state, batch in ((state, batch) for state, changed in changes.items() for batch in batches_of(changed)):
        for (rows,) in bounded_slices([batch], bytes_max):
            if rows.nbytes > bytes_max:
                raise InvalidData(
                    f"operator {operator!r}, state {state!r}: the key with the hash {int(hashes_of(rows)[0]):016x} has "
                    f"{rows.nbytes:,} bytes in this epoch, and a key may have {bytes_max:,}. Nothing of the epoch was "
                    "committed. Keep less of it: a shorter value, a digest, or a key for each part of it"
                )


def _persist_files(job: TaskJob, operator: Operator, access: ShardAccess, step: Step) -> Persisted:
    version, failed = access.write(step.attempt, step.base, step.changes, step.before, step.restored, step.due_taken)
    files = persist_files(
        job,
        operator,
        access,
        on_top(step.base, step.changes, step.due_taken),
        version,
        changed=bool(step.changes),
        listed=step.listed,
        uploader=uploader(job.settings.upload),
    )
    return Persisted(version, failed, TaskChanges((), (), files.totals), files)


@lru_cache(maxsize=4)
def uploader(policy: UploadSettings) -> Uploader:
    """Return the uploader of this worker process, so that all of its tasks share the bound on bytes in flight."""
    return Uploader(policy, SYSTEM_CLOCK)
