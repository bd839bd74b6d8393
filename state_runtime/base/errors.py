"""Every error that Stillstate raises on purpose, grouped by the reader's reaction.

    StillstateError                exit 1   a bug or something unforeseen
    ├── ChangesPending             —        between a task and its driver only: the driver writes, the epoch runs again
    ├── TooMuchForOneTask          —        the same: the epoch runs again with a task for each shard
    ├── ProcessEnded               exit 1   a process of Spark's ended under the run: start again
    ├── Invalid                    exit 2   fix the call, the configuration or the data
    │   ├── InvalidConfiguration
    │   ├── InvalidPipeline
    │   ├── InvalidData
    │   ├── JobNotFound
    │   ├── JobRootMismatch
    │   ├── MissingSnapshot
    │   │   └── SnapshotExpired
    │   ├── MissingSource
    │   ├── SnapshotInUse
    │   ├── SavepointExists
    │   └── MissingJava
    ├── Fenced                     exit 3   another run owns the job: stop, touch nothing
    │   └── JobAlreadyRunning
    ├── Unavailable                exit 4   try again later; nothing is known to be wrong with the data
    │   ├── StoreUnavailable
    │   │   └── StoreRefused
    │   ├── StoreNotCapable
    │   ├── OutcomeUnknown
    │   ├── ScratchRemoved
    │   └── TasksDisagree
    ├── CorruptData                exit 5   repair, or restore from an older snapshot
    │   ├── CorruptManifest
    │   ├── CorruptSegment
    │   └── MissingFile
    ├── UnsupportedFormat          exit 6   upgrade Stillstate; nothing was changed
    └── UserCodeError              exit 7   the job's own code raised
        └── WorkerEnded                     (a ProcessEnded too) the Python process that ran it ended

A message says what happened, where, and what to do next. It never holds a credential, a key or a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Final, TypeGuard

__all__ = [
    "EXIT_OF_KIND",
    "FINAL_EXITS",
    "FINAL_KINDS",
    "REACTIONS",
    "RESTORE_OR_CHOOSE",
    "RESTORE_OR_GO_BACK",
    "ChangesPending",
    "CorruptData",
    "CorruptManifest",
    "CorruptSegment",
    "Fenced",
    "Invalid",
    "InvalidConfiguration",
    "InvalidData",
    "InvalidPipeline",
    "JobAlreadyRunning",
    "JobNotFound",
    "JobRootMismatch",
    "MissingFile",
    "MissingJava",
    "MissingSnapshot",
    "MissingSource",
    "OutcomeUnknown",
    "ProcessEnded",
    "SavepointExists",
    "ScratchRemoved",
    "SnapshotExpired",
    "SnapshotInUse",
    "StillstateError",
    "StoreNotCapable",
    "StoreRefused",
    "StoreUnavailable",
    "TasksDisagree",
    "TooMuchForOneTask",
    "Unavailable",
    "UnsupportedFormat",
    "UserCodeError",
    "WorkerEnded",
    "can_pass",
    "check",
    "is_typed",
    "kind_of_exit",
    "missing_file",
]


class StillstateError(Exception):
    """What nobody foresaw; and the root of the tree, of which every error is one.

    Attributes:
        exit_code: exit code of the command line.
        kind: the stable name of the reaction.
        is_final: the same start would end the same way, or the job is another run's: it is not started again in place.
        help: of the exit code, for people.
        mend: what the reader does about it; docs/errors.md is made of it and of the docstrings.
    """

    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "internal"
    is_final: ClassVar[bool] = False
    help: ClassVar[str] = "unforeseen (a bug, or a driver that was killed)"
    mend: ClassVar[str] = "start the job again; if it repeats, report it with the log"


class ChangesPending(StillstateError):
    """A task needs the primary store for a shard whose newest changes only the driver holds.

    Never leaves the driver: it writes them to a segment and runs the epoch's action once more.
    """

    mend = "nothing: the driver does it"


class TooMuchForOneTask(StillstateError):
    """A task that has the rows of all shards got too many of them, or takes too long.

    Never leaves the driver: it runs the epoch's action once more, with a task for each shard.
    """

    mend = "nothing: the driver does it"


class ProcessEnded(StillstateError):
    """A process in which Spark works for this run ended: Java, or one of its Python workers. After a signal that asked
    the run to stop, this is part of the stop: a signal to a whole group or service reaches those processes too."""

    mend = "start the job again; if it repeats, less memory for Java (`spark.driver.memory`) or more in the machine"


class Invalid(StillstateError, ValueError):
    """The caller, the configuration or the input is wrong: fix it and call again."""

    exit_code = 2
    kind = "invalid"
    is_final = True
    help = "invalid call, configuration or data: fix it"
    mend = "put right what the message names, and call again"


class InvalidConfiguration(Invalid):
    """`stillstate.yaml`, a setting or an entry point is malformed or missing."""

    mend = "the message has file, line and key: correct it"


class InvalidPipeline(Invalid):
    """The pipeline cannot be built: a missing key column, a missing uid, a repeated name."""

    mend = "the message names operator and column: correct the code; nothing was written"


class InvalidData(Invalid):
    """A row or a state value does not fit the schema that was declared for it."""

    mend = (
        "let the code take such rows (`try_cast`, a filter), or put the input right, and start: the epoch "
        "was not committed"
    )


class JobNotFound(Invalid):
    """There is no job root of that name on the store."""

    mend = "check the name and the store; `stillstate jobs` lists the jobs of a file"


class JobRootMismatch(Invalid):
    """The folder on the store belongs to another job, or the local data to another store."""

    mend = "give the job another name or store, or the local data another folder (`local_dir`)"


class MissingSnapshot(Invalid):
    """No snapshot with that id; the message names the newest ones that exist."""

    mend = "name one of those that exist: `stillstate snapshots JOB`"


class SnapshotExpired(MissingSnapshot):
    """The snapshot is expired: deleted on request, or by retention. No part of it is read."""

    mend = "choose a newer one; `stillstate pin` keeps what is still to be read"


class MissingSource(Invalid):
    """The next input of the job does not exist: a topic, a partition, offsets, a file or a folder. A restart gets the
    same answer, until it is restored, or a setting says that the job may continue without it."""

    mend = "bring it back, or let the source go on without it; the message names the ways that keep the state"


class SnapshotInUse(Invalid):
    """The snapshot (or savepoint, or job) is still needed; the message names who needs it. Nothing was changed."""

    mend = "wait, or end the process that the message names"


class SavepointExists(Invalid):
    """The job has a savepoint of that name."""

    mend = "take another name, or delete that savepoint first (`stillstate delete JOB --savepoint NAME`)"


class MissingJava(Invalid):
    """No Java 17 or newer was found; the message names the command that installs one."""

    mend = "install it by the command that the message names"


class Fenced(StillstateError):
    """Another run of the job has taken over. This one must stop and publish nothing."""

    exit_code = 3
    kind = "fenced"
    is_final = True
    help = "fenced: another driver has the job"
    mend = "nothing: the other run goes on, and this one published nothing after it was replaced"


class JobAlreadyRunning(Fenced):
    """A live run holds the job, and no take-over was requested: this driver is refused at the start."""

    mend = "nothing; or `stillstate stop JOB` first; or `--takeover`"


class Unavailable(StillstateError):
    """A passing fault of the store or the network: try again."""

    exit_code = 4
    kind = "unavailable"
    help = "unavailable: the store did not answer, or a driver did not stop; try again"
    mend = "try again later"


class StoreUnavailable(Unavailable, OSError):
    """The store did not answer, or refused (permission, quota, read-only file system)."""

    mend = "look at network and endpoint, and start the job again"


class StoreRefused(StoreUnavailable):
    """The store refused the request (permission, credentials, quota, read-only): the same request again gets the same
    answer, so it is not sent again. Someone must grant, pay or mount. Recovery knows it by its kind, and tries it a
    bounded number of times."""

    kind = "refused"
    mend = "grant, pay or mount what the message names, and start the job again; repeating alone does not help"


class StoreNotCapable(Unavailable):
    """The store does not support create-if-absent; two runs could both win, so Stillstate does not start."""

    mend = "take another store; or go on with `single_writer: true`, and keep a second driver away yourself"


class OutcomeUnknown(Unavailable):
    """A write may or may not have succeeded. Nothing is cleaned up after it: the next run reads back."""

    mend = "start the job again: the run reads what is there"


class ScratchRemoved(Unavailable):
    """Files that Spark keeps for the whole run were removed during it. This run cannot continue, now or later; the next
    start creates them again."""

    mend = "start the job again; put `scratch_dir` and `spark.local.dir` where no cleaner comes"


class TasksDisagree(Unavailable):
    """Spark ran a task of an epoch twice, because the executor with its output was lost, and the second attempt stopped
    at another row by the deadline. Results made of the first output do not fit the second: the epoch is run again."""

    mend = "nothing: the epoch is run again; start the job again if its run ended"


class CorruptData(StillstateError):
    """Stored data differs from the data that was written: wrong digest, size, identity or structure."""

    exit_code = 5
    kind = "corrupt"
    is_final = True
    help = "corrupt data: repair, or use an older snapshot"
    mend = (
        "restore the named file from a copy of the job root, or start from an older snapshot; nothing was overwritten"
    )


class CorruptManifest(CorruptData):
    """A manifest, term or job file cannot be trusted."""


class CorruptSegment(CorruptData):
    """A changelog segment or state table cannot be trusted."""


class MissingFile(CorruptData, FileNotFoundError):
    """A file that a manifest names does not exist."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else "a file that a manifest names does not exist"


class UnsupportedFormat(StillstateError):
    """Written by a newer version of Stillstate."""

    exit_code = 6
    kind = "unsupported"
    is_final = True
    help = "written by a newer Stillstate: upgrade"
    mend = "upgrade Stillstate; nothing was changed"


class UserCodeError(StillstateError):
    """The job's own code (processor, transform, sink function) raised; the cause is chained."""

    exit_code = 7
    kind = "user-code"
    is_final = True
    help = "the job's own code raised"
    mend = "the message has file, line and function: fix the code and start the job again"


class WorkerEnded(UserCodeError, ProcessEnded):
    """A Python process that ran the job's own code ended: the code left it, crashed, or memory ran out."""

    mend = "look for a crash or for lack of memory in the log; more memory, or fewer rows in a batch"


REACTIONS: Final[tuple[type[StillstateError], ...]] = (
    StillstateError,
    Invalid,
    Fenced,
    Unavailable,
    CorruptData,
    UnsupportedFormat,
    UserCodeError,
    StoreRefused,
)
"""One class for each kind; the first one with an exit code gives the code's meaning if nothing else is known."""
EXIT_OF_KIND: Final[Mapping[str, int]] = MappingProxyType({error.kind: error.exit_code for error in REACTIONS})
FINAL_KINDS: Final = frozenset(error.kind for error in REACTIONS if error.is_final)
FINAL_EXITS: Final = frozenset(error.exit_code for error in REACTIONS if error.is_final)
RESTORE_OR_GO_BACK: Final = "Restore the file from a copy of the job root, or start from an older snapshot"
RESTORE_OR_CHOOSE: Final = "Restore the file from a copy of the job root, or choose another snapshot"


def kind_of_exit(exit_code: int) -> str:
    """Return the kind of error behind a driver's exit code; empty for codes without a meaning (1, a signal)."""
    kinds = (error.kind for error in REACTIONS if error.exit_code == exit_code != StillstateError.exit_code)
    return next(kinds, "")


def missing_file(path: str, url: str, what_next: str = RESTORE_OR_GO_BACK) -> MissingFile:
    """Return the error for a missing file that a manifest names."""
    return MissingFile(f"{path} is missing in {url} although a manifest names it. {what_next}")


def can_pass(error: BaseException) -> bool:
    """Return whether the same request may succeed a little later, although nothing is changed."""
    return isinstance(error, Unavailable) and not isinstance(error, (StoreRefused, StoreNotCapable, ScratchRemoved))


def is_typed(error: BaseException) -> TypeGuard[StillstateError]:
    """Return whether an error is typed by its reaction, and so already says what to do."""
    return isinstance(error, StillstateError) and type(error) is not StillstateError


def check(condition: bool, message: str) -> None:
    """Raise `StillstateError` if one of Stillstate's invariants does not hold. Unlike `assert`, `-O` keeps it."""
    if not condition:
        raise StillstateError(f"invariant broken: {message}; please report this")
