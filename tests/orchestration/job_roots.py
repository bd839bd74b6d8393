"""Job roots made by state_runtime's own functions, and a clock that tests move by hand."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from state_runtime.base.actor import Actor
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.base.progress import Progress
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.fencing import open_job_root, open_run
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.snapshot.manifest import (
    LayerEntry,
    Manifest,
    OperatorEntry,
    SegmentEntry,
    SourcePosition,
    StagedFile,
    StagedOutput,
    StateEntry,
    TableEntry,
)
from state_runtime.snapshot.paths import manifest_path
from state_runtime.snapshot.term_files import RunState, RunStatus, write_status
from state_runtime.store import open_store

SECRET = "s3cr3t-sentinel-7f1e"  # must never be seen anywhere
NO_SUCH_PID = 2**22 + 1  # above the kernel's largest process id


@dataclass
class FakeClock:
    """A clock that moves only when told to."""

    at_ms: int = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.at_ms

    def monotonic_s(self) -> float:
        return self.at_ms / 1000

    def advance_s(self, seconds: float) -> None:
        self.at_ms += int(seconds * 1000)


def empty_manifest(info: JobInfo) -> Manifest:
    """The content of a job that has no snapshot yet."""
    return Manifest(
        format_version=1,
        job_uid=info.uid,
        snapshot_id=0,
        term=0,
        commit_id="",
        kind="checkpoint",
        created_at_ms=0,
        parallelism=4,
        operators=(OperatorEntry("plane-day", "transform", "tailnum STRING", (StateEntry("legs", "value", "n INT"),)),),
    )


def checkpoint_of(last: Manifest, rows: int = 100) -> Manifest:
    """The draft of a checkpoint after `last`, with something in every part."""
    snapshot_id = last.snapshot_id + 1
    segment = SegmentEntry(f"changelog/x/{snapshot_id}.seg", 1000, "d", 10, snapshot_id, rows, 24)
    table = TableEntry("tables/plane-day/legs/a.parquet", 5000, "d", 40, "plane-day", "legs", 0, 2**64 - 1)
    return replace(
        last,
        kind="checkpoint",
        segments=(*last.segments[-1:], segment),
        layers=(LayerEntry(1, 1, (table,)),),
        source=SourcePosition(snapshot_id, "{}", "v1\n{}", "", "{}"),
        outputs=(StagedOutput("legs", snapshot_id, (StagedFile("a", "b", 10, rows),)),),
        progress=Progress(
            snapshot_id=snapshot_id,
            batch_id=snapshot_id,
            input_rows=rows,
            rows_per_s=rows / 0.5,
            state_rows=4321,
            duration_ms=500.0,
            checkpoint_ms=12.5,
            phases_ms={"plan": 1.0, "process": 400.0},
            segment_bytes=1024,
        ),
    )


@dataclass
class JobRoot:
    """One job on a local store; plays the driver by hand."""

    store_path: Path
    name: str
    clock: FakeClock
    host: str = field(default_factory=socket.gethostname)
    pid: int = NO_SUCH_PID
    committer: Committer | None = None

    def __post_init__(self) -> None:
        self.store = open_store(str(self.store_path))
        self.catalog = Catalog(self.store, self.name, self.clock)

    def start(self, state: RunState = "running") -> int:
        """A new run: a term, a fencing snapshot and a heartbeat."""
        info = open_job_root(self.catalog.root, self.name, clock=self.clock, ids=SYSTEM_IDS)
        self.committer = open_run(
            self.catalog, info, empty_manifest(info), actor=Actor(self.clock, SYSTEM_IDS, self.host, self.pid)
        )
        self.beat(state)
        return self.committer.term.term

    def beat(
        self, state: RunState = "running", message: str = "", restoring: tuple[int, int] = (0, 0), **more: Any
    ) -> None:
        """A heartbeat now; `more` are other fields of it."""
        assert self.committer is not None
        term = self.committer.term
        write_status(
            self.catalog.root,
            RunStatus(
                term=term.term,
                run_uid=term.run_uid,
                state=state,
                at_ms=self.clock.now_ms(),
                started_at_ms=term.started_at_ms,
                heartbeat_interval_s=2.0,
                pid=self.pid,
                host=self.host,
                snapshot_id=self.committer.last.snapshot_id,
                message=message,
                restored=restoring[0],
                restoring=restoring[1],
                **more,
            ),
        )

    def checkpoint(self, rows: int = 100, **more: Any) -> Manifest:
        """One more checkpoint; `more` are fields of the manifest."""
        assert self.committer is not None
        draft = replace(checkpoint_of(self.committer.last, rows), **more)
        newest = draft.segments[-1]
        self.catalog.root.put(newest.path, b"x" * newest.bytes)
        return self.committer.commit(draft)

    def damage(self, snapshot_id: int) -> None:
        """Cut a manifest in half, as a full disk or a bad copy would."""
        file = self.store_path / self.name / manifest_path(snapshot_id)
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
