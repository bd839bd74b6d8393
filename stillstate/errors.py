"""The errors that Stillstate raises on purpose, to be caught by name.

Each says what happened, where, and what to do next, and never holds a credential, a key or a row. Catch a branch to
react alike to all below it: `Invalid` (fix the call, the configuration or the data), `Fenced` (another run owns the
job: stop), `Unavailable` (try again later), `CorruptData` (repair, or restore from an older snapshot),
`UnsupportedFormat` (upgrade Stillstate), `UserCodeError` (the job's own code raised). `exit_code` of a class is that of
the command line.
"""

from __future__ import annotations

from state_runtime.base.errors import (
    CorruptData,
    CorruptManifest,
    CorruptSegment,
    Fenced,
    Invalid,
    InvalidConfiguration,
    InvalidData,
    InvalidPipeline,
    JobAlreadyRunning,
    JobNotFound,
    JobRootMismatch,
    MissingFile,
    MissingJava,
    MissingSnapshot,
    MissingSource,
    OutcomeUnknown,
    ProcessEnded,
    SavepointExists,
    ScratchRemoved,
    SnapshotExpired,
    SnapshotInUse,
    StillstateError,
    StoreNotCapable,
    StoreRefused,
    StoreUnavailable,
    TasksDisagree,
    Unavailable,
    UnsupportedFormat,
    UserCodeError,
    WorkerEnded,
)

__all__ = [
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
    "Unavailable",
    "UnsupportedFormat",
    "UserCodeError",
    "WorkerEnded",
]
